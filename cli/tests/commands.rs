//! The tool itself: exit codes, what it prints, and that it leaves nothing behind.

mod support;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use support::{Cluster, Options, ashlar, run, send, temporary, wait_until};

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap_or_else(|| panic!("{value}"))
        .keys()
        .map(String::as_str)
        .collect()
}

fn exit_code(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().expect("runs");
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn wrong_usage_and_absent_things_have_exit_codes_of_their_own() {
    let directory = temporary(false);
    let tool = |arguments: &[&str]| {
        let mut command = ashlar();
        command.arg("--state").arg(directory.path()).args(arguments);
        exit_code(&mut command)
    };
    assert_eq!(tool(&["volume"]).0, Some(2));
    assert_eq!(tool(&["volume", "create", "a", "--size", "4x"]).0, Some(2));
    let (code, text) = tool(&["volume", "status", "absent"]);
    assert_eq!(code, Some(3));
    assert!(text.contains("ashlar volume list"), "{text}");
    let (code, text) = tool(&["volume", "create", "a", "--size", "1G"]);
    assert_eq!(code, Some(3));
    assert!(text.contains("ashlar node add"), "{text}");
    let (code, text) = tool(&[
        "--node",
        "127.0.0.1:1",
        "volume",
        "create",
        "a",
        "--size",
        "1G",
    ]);
    assert_eq!(code, Some(3));
    assert!(text.contains("127.0.0.1:1"), "{text}");
    let (code, text) = tool(&["store", "inspect", "/does/not/exist"]);
    assert_eq!(code, Some(3));
    assert!(text.contains("is no store"), "{text}");
    assert_eq!(
        tool(&["--node", "127.0.0.1:1", "node", "status"]).0,
        Some(1)
    );
    assert_eq!(tool(&["volume", "list"]).0, Some(0));
}

#[test]
fn completion_scripts_name_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(ashlar().args(["completion", shell]));
        let script = String::from_utf8_lossy(&output.stdout);
        assert!(
            script.contains("quickstart") && script.contains("replicas"),
            "{shell}"
        );
        assert!(
            !script.contains("floor-replica"),
            "{shell}: hidden commands stay hidden"
        );
    }
}

#[test]
fn a_volume_from_its_creation_to_its_end_with_the_documented_json() {
    let cluster = Cluster::start(Options {
        store_bytes: 256 << 20,
        ram: true,
        ..Options::default()
    });
    let created = cluster.json(&["volume", "create", "data", "--size", "32M"]);
    assert_eq!(
        keys(&created),
        ["ack", "id", "members", "name", "size_bytes"]
    );
    assert_eq!(cluster.json(&["volume", "list"])[0], created);
    let attachment = cluster.json(&["attach", "data"]);
    let attachment_keys = [
        "epoch",
        "members",
        "name",
        "nbd_uris",
        "reason",
        "size_bytes",
        "state",
        "volume_id",
    ];
    assert_eq!(keys(&attachment), attachment_keys);
    assert_eq!(attachment["state"], "open");
    cluster.wait_in_sync("data", 3);
    let status = cluster.json(&["volume", "status", "data"]);
    assert_eq!(
        keys(&status),
        [
            "ack",
            "attachment",
            "id",
            "members",
            "name",
            "replicas",
            "size_bytes"
        ]
    );
    for replica in status["replicas"].as_array().expect("replicas") {
        assert_eq!(replica["state"], "complete", "{replica}");
        assert_eq!(replica["in_sync"], true, "{replica}");
        assert_eq!(replica["attached"], true, "{replica}");
    }
    let nodes = cluster.json(&["node", "status"]);
    assert_eq!(nodes.as_array().expect("nodes").len(), 3);
    assert_eq!(nodes[0]["devices"][0]["state"], "open");
    assert_eq!(nodes[0]["devices"][0]["replicas"], 1);
    let classes = cluster.json(&["queue", "dump"]);
    assert!(
        classes.as_array().is_some_and(|c| !c.is_empty()),
        "{classes}"
    );
    let (code, text) = exit_code(&mut cluster.tool(&["volume", "delete", "data"]));
    assert_eq!(code, Some(3));
    assert!(text.contains("ashlar detach data"), "{text}");
    cluster.detach("data");
    cluster.detach("data");
    assert_eq!(
        cluster.json(&["volume", "grow", "data", "--size", "64M"])["size_bytes"],
        64 << 20
    );
    assert_eq!(cluster.json(&["attach", "data"])["size_bytes"], 64 << 20);
    cluster.detach("data");
    let compared = cluster.json(&["replicas", "compare", "data", "--verify-data"]);
    assert_eq!(
        keys(&compared),
        [
            "blocks_bad",
            "blocks_different",
            "blocks_moving",
            "blocks_total",
            "blocks_written",
            "differences",
            "equal",
            "replicas",
            "volume",
        ]
    );
    assert_eq!(compared["equal"], true);
    wait_until("the lease ends", Duration::from_secs(30), || {
        exit_code(&mut cluster.tool(&["volume", "delete", "data"])).0 == Some(0)
    });
    assert_eq!(cluster.json(&["volume", "list"]), Value::Array(vec![]));
    assert_eq!(
        cluster.json(&["node", "status"])[0]["devices"][0]["replicas"],
        0
    );
}

#[test]
fn an_evicted_replica_leaves_service_and_comes_back_in_sync() {
    let cluster = Cluster::start(Options {
        store_bytes: 256 << 20,
        ram: true,
        ..Options::default()
    });
    cluster.create_volume("data", "32M", &[]);
    cluster.attach("data");
    cluster.wait_in_sync("data", 3);
    let node = cluster.nodes[1].control.clone();
    let evicted = cluster.json(&["node", "evict", &node, "--volume", "data"]);
    assert_eq!(evicted[0]["state"], "evicted");
    wait_until("the replica is out", Duration::from_secs(20), || {
        let states = cluster
            .tool(&["volume", "status", "data", "-o", "json"])
            .output()
            .expect("runs");
        let status: Value = serde_json::from_slice(&states.stdout).expect("JSON");
        status["replicas"]
            .as_array()
            .is_some_and(|r| r.iter().any(|r| r["state"] == "evicted"))
    });
    cluster.json(&["node", "readmit", &node]);
    cluster.wait_in_sync("data", 3);
    cluster.assert_replicas_equal("data");
}

#[test]
fn a_store_is_inspected_with_its_node_up_and_down_and_nothing_in_it_changes() {
    let mut cluster = Cluster::start(Options {
        store_bytes: 256 << 20,
        ram: true,
        ..Options::default()
    });
    cluster.create_volume("data", "32M", &[]);
    let mut client =
        ashlar_cli::nbd::NbdClient::connect(&cluster.attach("data")).expect("connects");
    for n in 0..64 {
        client
            .write_at(n * 100 * 4096, &[n as u8 + 1; 4096])
            .expect("writes");
    }
    let store = cluster.nodes[0].store.display().to_string();
    let up = cluster.json(&["store", "inspect", &store]);
    assert_eq!(up["replicas"].as_array().expect("replicas").len(), 1);
    cluster.kill_all();
    let before = std::fs::read(cluster.nodes[0].store.join("blocks")).expect("reads");
    let down = cluster.json(&["store", "inspect", &store, "--verify"]);
    let replica = &down["replicas"][0];
    assert_eq!(replica["state"], "complete");
    assert_eq!(replica["last_sequence"], 64, "{replica}");
    assert_eq!(replica["bad_blocks"], Value::Array(vec![]), "{replica}");
    assert!(replica["blocks_checked"].as_u64() >= Some(64), "{replica}");
    assert!(replica.get("key").is_none());
    let after = std::fs::read(cluster.nodes[0].store.join("blocks")).expect("reads");
    assert!(before == after, "inspection changed the store");
}

/// The `processes` files of the runs below `directory`.
fn listed_processes(directory: &Path) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).expect("reads").flatten() {
        let text = std::fs::read_to_string(entry.path().join("processes")).unwrap_or_default();
        found.extend(
            text.lines()
                .filter_map(|l| l.split(' ').next()?.parse::<u32>().ok()),
        );
    }
    found
}

fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat[stat.rfind(')').unwrap_or(0)..].starts_with(") Z"))
}

fn start_quickstart(directory: &Path) -> (Child, Vec<u32>) {
    let mut command = ashlar();
    command.args(["quickstart", "--dir"]).arg(directory);
    let child = command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    wait_until("all four processes", Duration::from_secs(30), || {
        listed_processes(directory).len() >= 4
    });
    (child, listed_processes(directory))
}

fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory)
        .expect("reads")
        .next()
        .is_none()
}

#[test]
fn quickstart_cleans_up_after_an_interrupt() {
    let directory = temporary(false);
    let (mut child, processes) = start_quickstart(directory.path());
    send(child.id(), Signal::INT);
    assert_eq!(child.wait().expect("ends").code(), Some(130));
    assert!(is_empty(directory.path()));
    assert!(!processes.into_iter().any(alive));
}

#[test]
fn the_processes_of_a_killed_quickstart_die_with_it_and_the_next_one_removes_its_files() {
    let directory = temporary(false);
    let (mut child, processes) = start_quickstart(directory.path());
    child.kill().expect("kill");
    child.wait().expect("wait");
    wait_until("its processes die", Duration::from_secs(5), || {
        !processes.iter().copied().any(alive)
    });
    assert!(!is_empty(directory.path()));
    // A directory that was just made might be somebody's who is about to lock it.
    std::thread::sleep(Duration::from_millis(1100));
    run(ashlar().args(["quickstart", "--dir"]).arg(directory.path()));
    assert!(is_empty(directory.path()));
}

#[test]
fn a_kept_quickstart_can_be_used_and_is_ended_by_stop() {
    let directory = temporary(false);
    let output = run(ashlar()
        .args(["quickstart", "--keep", "-o", "json", "--dir"])
        .arg(directory.path()));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["passed"], true, "{report}");
    let kept = &report["kept"];
    let uri = kept["nbd_uris"][0].as_str().expect("an address");
    let mut client = ashlar_cli::nbd::NbdClient::connect(uri).expect("connects");
    client.write_at(0, &[1; 4096]).expect("writes");
    let state = kept["state"].as_str().expect("a state directory");
    run(ashlar().args(["--state", state, "volume", "status", "quickstart"]));
    assert!(
        kept["metrics"].as_array().is_some_and(|m| m.len() >= 3),
        "{kept}"
    );
    let processes = listed_processes(directory.path());
    run(ashlar()
        .args(["quickstart", "--stop", "--dir"])
        .arg(directory.path()));
    assert!(is_empty(directory.path()));
    assert!(!processes.into_iter().any(alive));
}

#[test]
fn bench_measures_both_front_ends_beside_the_baselines() {
    for front_end in [&[][..], &["--nbd"]] {
        for mode in ["randwrite", "read"] {
            let mut command = ashlar();
            command.args([
                "bench",
                mode,
                "--seconds",
                "1",
                "--volume-size",
                "16M",
                "--depth",
                "4",
            ]);
            let output = run(command.args(["-o", "json"]).args(front_end));
            let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
            for part in [
                &report,
                &report["floor"],
                &report["floor_depth_1"],
                &report["raw"],
            ] {
                assert!(
                    part["iops"].as_f64() > Some(10.0),
                    "{mode} {front_end:?}: {report}"
                );
                assert!(
                    part["p50_us"].as_f64() <= part["p99_us"].as_f64(),
                    "{report}"
                );
            }
            assert_eq!(report["errors"], 0, "{report}");
            let lines = String::from_utf8_lossy(&output.stderr);
            assert!(lines.contains("IOPS"), "a line a second: {lines}");
        }
    }
}
