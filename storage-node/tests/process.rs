//! The node as a process: what survives SIGKILL, how it ends, what it costs when nothing happens, and
//! what it says when it cannot start.

mod support;

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use ashlar_control_api::storage_node::{self as api};
use ashlar_replication::message::Reply;
use ashlar_replication::values::{DeviceId, MemberId};
use rustix::process::Signal;
use support::client::{Client, Received};
use support::process::{Process, command};
use support::{KEY, MIB, block, epoch, volume};

/// Makes a replica of volume 1 by the control API.
fn create(node: &Process) -> MemberId {
    let device_id = node.device_ids[0].clone();
    let device = DeviceId(*uuid::Uuid::parse_str(&device_id).unwrap().as_bytes());
    let request = api::CreateReplicaRequest {
        volume_id: volume(1).to_string(),
        device_id: device_id.clone(),
        size_bytes: 32 * MIB,
        role: api::Role::Data.into(),
        ack: api::Ack::Majority.into(),
        key: KEY.to_vec(),
        nonce: 1,
        members: vec![api::Member {
            device_id,
            nonce: 1,
            role: api::Role::Data.into(),
        }],
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let made = runtime.block_on(async { node.control().await.create_replica(request).await });
    made.unwrap();
    MemberId { device, nonce: 1 }
}

fn connect(node: &Process) -> Client {
    let mut client = Client::connect(&node.data[0]);
    client.greet();
    client
}

/// Kills the node again and again under writes; after each start everything acknowledged is there.
fn acknowledged_writes_survive_sigkill(engine: &str) {
    // On a disk where there is one: killing a process does not lose what the kernel has, but the
    // paths of a real file are these.
    let folder = tempfile::tempdir().unwrap();
    let engine = format!("--engine={engine}");
    let mut node = Process::start(folder.path(), &[&engine]);
    let member = create(&node);
    // The content of every block, by the number of its newest acknowledged write.
    let mut acknowledged = vec![0u64; 1024];
    let mut serial = 0u64;
    for round in 1..=6 {
        let mut client = connect(&node);
        client.fence(volume(1), member, epoch(round), 0);
        for (place, newest) in acknowledged.iter().enumerate() {
            let data = client.read(0, place as u64, 1).unwrap();
            let written = u64::from_le_bytes(data[..8].try_into().unwrap());
            assert!(
                written >= *newest,
                "round {round}: block {place} has {written} of {newest}"
            );
        }
        client.attach(volume(1), member, epoch(round), 0);
        let mut sent = Vec::new();
        let deadline = Instant::now() + Duration::from_millis(40 + 30 * u64::from(round));
        let mut answered = 0;
        while Instant::now() < deadline {
            for _ in 0..8 {
                serial += 1;
                let place = serial.wrapping_mul(2_654_435_761) % 1024;
                let mut data = block(serial);
                data[..8].copy_from_slice(&serial.to_le_bytes());
                sent.push((place as usize, serial));
                client.send_write(0, sent.len() as u64, place, &data);
            }
            if let Received::Reply(0, Reply::Applied { sequence }) = client.receive() {
                answered = sequence.0 as usize;
            }
        }
        node.signal(Signal::KILL);
        // What was answered before the end counts, too.
        loop {
            match client.receive() {
                Received::Reply(0, Reply::Applied { sequence }) => answered = sequence.0 as usize,
                Received::Closed => break,
                other => panic!("{other:?}"),
            }
        }
        assert!(answered > 0);
        for (place, serial) in &sent[..answered] {
            acknowledged[*place] = *serial;
        }
        node.kill();
        node = Process::start(folder.path(), &[&engine]);
    }
}

#[test]
fn acknowledged_writes_survive_sigkill_with_io_uring() {
    acknowledged_writes_survive_sigkill("io_uring");
}

#[test]
fn acknowledged_writes_survive_sigkill_with_the_portable_engine() {
    acknowledged_writes_survive_sigkill("portable");
}

#[test]
fn a_terminated_node_finishes_its_writes_says_goodbye_and_exits_well() {
    let folder = support::folder();
    let node = Process::start(folder.path(), &[]);
    let member = create(&node);
    let mut client = connect(&node);
    client.attach(volume(1), member, epoch(1), 0);
    (1..=50).for_each(|n| client.write(0, n, n, &block(n)));
    node.terminate();
    assert!(matches!(client.receive(), Received::Goodbye(..)));
    assert!(!folder.path().join("data").exists(), "its socket is gone");
    let node = Process::start(folder.path(), &[]);
    let mut client = connect(&node);
    let promise = client.fence(volume(1), member, epoch(2), 0);
    assert_eq!(promise.state.last.sequence.0, 50);
    assert_eq!(client.read(0, 50, 1).unwrap(), block(50));
    node.signal(Signal::INT);
    node.wait_success();
}

/// Seconds of CPU time that a process has used.
fn cpu_seconds(id: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
    let fields: Vec<_> = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .collect();
    let ticks: f64 = [11, 12]
        .iter()
        .map(|n| fields[*n].parse::<f64>().unwrap())
        .sum();
    ticks / 100.0
}

fn resident_bytes(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS")).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib << 10
}

#[test]
fn an_idle_node_uses_no_cpu_and_little_memory_with_a_large_store() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    std::fs::create_dir_all(&store).unwrap();
    // Sparse, so that the test does not need the space.
    let blocks = std::fs::File::create(store.join("blocks")).unwrap();
    blocks.set_len(16 << 30).unwrap();
    let mut command = command(folder.path());
    command
        .arg(format!("--store={}", store.display()))
        .args(["--format-size=16GiB", "--journal-size=64MiB"])
        .arg(format!("--listen=unix:{}/data", folder.path().display()));
    let node = Process::spawn(command);
    let member = create(&node);
    let mut client = connect(&node);
    client.attach(volume(1), member, epoch(1), 0);
    // Work before the idleness: every extent of the volume, small and large writes.
    let large: Vec<u8> = (0..256).flat_map(block).collect();
    let mut sequence = 0;
    for round in 0..40 {
        for extent in 0..32 {
            sequence += 1;
            if round % 8 == 0 {
                client.send_write(0, sequence, extent * 256, &large);
            } else {
                client.send_write(0, sequence, extent * 256 + round, &block(sequence));
            }
        }
        client.wait_applied(0, sequence);
    }
    let resident = resident_bytes(node.id());
    assert!(resident <= 128 << 20, "{} MiB resident", resident >> 20);
    let before = cpu_seconds(node.id());
    let since = Instant::now();
    std::thread::sleep(Duration::from_secs(4));
    let used = (cpu_seconds(node.id()) - before) / since.elapsed().as_secs_f64();
    assert!(used <= 0.01, "{:.1} % of a core while idle", used * 100.0);
}

/// Runs a node that is expected not to start; returns what it says.
fn complaint(folder: &Path, arguments: &[String]) -> String {
    let output = command(folder)
        .args(arguments)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

fn arguments(store: &Path, more: &[&str]) -> Vec<String> {
    let mut arguments = vec![
        format!("--store={}", store.display()),
        format!("--listen=unix:{}/other", store.parent().unwrap().display()),
    ];
    arguments.extend(more.iter().map(|&text| text.to_owned()));
    arguments
}

#[test]
fn a_store_is_claimed_by_one_process() {
    let folder = support::folder();
    let node = Process::start(folder.path(), &[]);
    let elsewhere = support::folder();
    let text = complaint(
        elsewhere.path(),
        &arguments(&folder.path().join("store"), &[]),
    );
    assert!(
        text.contains("another process") || text.contains("in use"),
        "{text}"
    );
    // The first one does not notice.
    create(&node);
}

#[test]
fn what_cannot_be_served_is_refused_in_plain_words() {
    let folder = support::folder();
    let store = folder.path().join("store");
    std::fs::create_dir(&store).unwrap();
    let text = complaint(folder.path(), &arguments(&store, &[]));
    assert!(text.contains("--format-size"), "{text}");
    let text = complaint(folder.path(), &arguments(&store, &["--format-size=1GB"]));
    assert!(text.contains("GiB"), "{text}");
    let text = complaint(folder.path(), &arguments(&store, &["--format-size=64KiB"]));
    assert!(text.contains("small") || text.contains("least"), "{text}");
    let text = complaint(folder.path(), &arguments(&store, &["--lease-ms=5"]));
    assert!(text.contains("100..=60000"), "{text}");
    let text = complaint(
        folder.path(),
        &arguments(&store, &["--store=/x", "--format-size=64MiB"]),
    );
    assert!(text.contains("2 --listen"), "{text}");
    // A foreign filesystem is not touched.
    std::fs::remove_dir_all(&store).unwrap();
    std::fs::create_dir(&store).unwrap();
    let mut image = vec![0u8; 64 << 20];
    image[1024 + 56..1024 + 58].copy_from_slice(&[0x53, 0xef]);
    std::fs::write(store.join("blocks"), &image).unwrap();
    let text = complaint(folder.path(), &arguments(&store, &["--format-size=64MiB"]));
    assert!(text.contains("ext"), "{text}");
    assert!(std::fs::read(store.join("blocks")).unwrap() == image);
}

#[test]
fn a_control_path_that_is_no_socket_is_left_alone() {
    let folder = support::folder();
    std::fs::write(folder.path().join("control"), "precious").unwrap();
    let store = folder.path().join("store");
    std::fs::create_dir(&store).unwrap();
    let text = complaint(folder.path(), &arguments(&store, &["--format-size=64MiB"]));
    assert!(text.contains("--control"), "{text}");
    let kept = std::fs::read_to_string(folder.path().join("control")).unwrap();
    assert_eq!(kept, "precious");
}

#[test]
fn two_stores_are_two_devices_with_an_address_each() {
    let folder = support::folder();
    let mut command = command(folder.path());
    for name in ["a", "b"] {
        let store = folder.path().join(name);
        std::fs::create_dir(&store).unwrap();
        command
            .arg(format!("--store={}", store.display()))
            .arg(format!(
                "--listen=unix:{}/data-{name}",
                folder.path().display()
            ));
    }
    command.args(["--format-size=64MiB", "--journal-size=16MiB"]);
    let node = Process::spawn(command);
    assert_eq!((node.data.len(), node.device_ids.len()), (2, 2));
    for (address, device_id) in node.data.iter().zip(&node.device_ids) {
        let welcome = Client::connect(address).greet();
        assert_eq!(welcome.device.to_string(), *device_id);
    }
}

#[test]
fn a_journal_on_another_device_is_found_again() {
    let folder = support::folder();
    let journal = format!("--journal={}/journal", folder.path().display());
    let node = Process::start(folder.path(), &[&journal]);
    let member = create(&node);
    let mut client = connect(&node);
    client.attach(volume(1), member, epoch(1), 0);
    (1..=20).for_each(|n| client.write(0, n, n, &block(n)));
    node.kill();
    let text = complaint(folder.path(), &arguments(&folder.path().join("store"), &[]));
    assert!(text.contains("journal"), "{text}");
    let node = Process::start(folder.path(), &[&journal]);
    let mut client = connect(&node);
    let promise = client.fence(volume(1), member, epoch(2), 0);
    assert_eq!(promise.state.last.sequence.0, 20);
}
