//! Processes killed, stopped and restarted under load. Afterwards all replicas are equal and nothing
//! that was acknowledged is gone.

mod support;

use std::collections::BTreeMap;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use ashlar_cli::nbd::{Command, NbdClient, check};
use rustix::process::Signal;
use serde_json::Value;
use support::{Cluster, Options, cpu_time, resident_bytes, run, wait_until};

const MIB: u64 = 1 << 20;

/// `ashlar bench` on an existing volume: through the library, in a process of its own.
fn start_bench(cluster: &Cluster, volume: &str, seconds: u32) -> Child {
    let seconds = seconds.to_string();
    let arguments = [
        "bench",
        "randwrite",
        "--volume",
        volume,
        "--overwrite",
        "--size",
        "4k",
        "--depth",
        "1",
        "--seconds",
    ];
    let mut command = cluster.tool(&arguments);
    command
        .args([&seconds, "-o", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().expect("the tool starts")
}

fn finish_bench(child: Child) -> Value {
    let output = child.wait_with_output().expect("output");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "bench: {text}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn a_killed_node_stalls_writes_for_at_most_ten_milliseconds() {
    // The stall of a single run is at the mercy of the machine's scheduler; a protocol that waits for
    // the dead node (a timeout, a lease, a reconnect) stalls in each of them. What a machine under load
    // does to writes with no node killed is measured beside it.
    let mut stalls = Vec::new();
    let mut calm = Vec::new();
    let longest = |result: &Value| result["max_us"].as_f64().expect("max_us");
    for n in 0..3 {
        let mut cluster = Cluster::start(Options {
            ram: true,
            ..Options::default()
        });
        cluster.create_volume("data", "64MiB", &[]);
        let without = finish_bench(start_bench(&cluster, "data", 4));
        calm.push(longest(&without));
        let bench = start_bench(&cluster, "data", 4);
        std::thread::sleep(Duration::from_millis(2500));
        cluster.kill_node(n);
        let result = finish_bench(bench);
        assert_eq!(result["errors"], 0, "{result}");
        stalls.push(longest(&result));
    }
    stalls.sort_by(f64::total_cmp);
    calm.sort_by(f64::total_cmp);
    println!(
        "longest stall with each node killed in turn, sorted: {stalls:?} µs; without: {calm:?} µs"
    );
    assert!(
        stalls[1] <= 10_000.0_f64.max(2.0 * calm[1]),
        "longest stalls in µs: {stalls:?}, without a killed node {calm:?}"
    );
}

#[test]
fn a_stopped_node_stalls_nobody_costs_no_memory_and_catches_up() {
    let cluster = Cluster::start(Options {
        ram: true,
        ..Options::default()
    });
    cluster.create_volume("data", "256MiB", &[]);
    let mut client = NbdClient::connect(&cluster.attach("data")).expect("connects");
    let data = vec![7; 64 << 10];
    for n in 0..1024 {
        client
            .write_at(n * data.len() as u64 % (256 * MIB), &data)
            .expect("writes");
    }
    let before = resident_bytes(cluster.initiator_pid());
    cluster.signal_node(2, Signal::STOP);
    let start = Instant::now();
    let mut longest = Duration::ZERO;
    let mut written = 0_u64;
    while start.elapsed() < Duration::from_secs(30) {
        let one = Instant::now();
        client
            .write_at(written % (256 * MIB), &data)
            .expect("writes");
        longest = longest.max(one.elapsed());
        written += data.len() as u64;
    }
    let grown = resident_bytes(cluster.initiator_pid()).saturating_sub(before);
    println!(
        "{} MiB written past a stopped node, longest stall {longest:?}, initiator grew by {} KiB",
        written / MIB,
        grown >> 10
    );
    assert!(longest < Duration::from_millis(500), "stall of {longest:?}");
    // What the stopped node lacks is kept up to the lag limit (32 MiB), then the window (16 MiB) and
    // buffers kept for reuse; all that was written would be many times that.
    assert!(grown < 128 * MIB, "the initiator grew by {grown} bytes");
    assert!(written > 4 * 128 * MIB, "too little was written to tell");
    cluster.signal_node(2, Signal::CONT);
    cluster.wait_in_sync("data", 3);
    cluster.assert_replicas_equal("data");
}

#[test]
fn with_two_of_three_gone_writes_wait_and_go_on_within_a_second_of_a_return() {
    let mut cluster = Cluster::start(Options::default());
    cluster.create_volume("data", "64MiB", &[]);
    let mut client = NbdClient::connect(&cluster.attach("data")).expect("connects");
    client.write_at(0, &[1; 4096]).expect("writes");
    cluster.kill_node(1);
    client
        .write_at(4096, &[2; 4096])
        .expect("writes with two of three");
    cluster.kill_node(2);
    client
        .send(Command::Write, 9, 8192, 4096, &[3; 4096])
        .expect("sends");
    client
        .set_read_timeout(Some(Duration::from_secs(3)))
        .expect("a timeout");
    let early = client.reply();
    assert!(
        early.is_err(),
        "a write was answered without a quorum: {early:?}"
    );
    cluster.start_node(1);
    let back = Instant::now();
    client
        .set_read_timeout(Some(Duration::from_secs(30)))
        .expect("a timeout");
    check(client.reply().expect("an answer")).expect("no error");
    println!(
        "first write {:?} after the second node's return",
        back.elapsed()
    );
    assert!(
        back.elapsed() < Duration::from_secs(1),
        "{:?}",
        back.elapsed()
    );
    let mut read = vec![0; 3 * 4096];
    client.read_at(0, &mut read).expect("reads");
    assert_eq!((read[0], read[4096], read[8192]), (1, 2, 3));
    cluster.start_node(2);
    cluster.wait_in_sync("data", 3);
    cluster.assert_replicas_equal("data");
}

#[test]
fn a_second_initiator_fences_the_first_before_it_acknowledges() {
    let cluster = Cluster::start(Options::default());
    cluster.create_volume("data", "64MiB", &[]);
    let uri = cluster.attach("data");
    let mut first = NbdClient::connect(&uri).expect("connects");
    first.write_at(0, &[1; 4096]).expect("writes");
    // The bench attaches by itself, as another initiator.
    let result = finish_bench(start_bench(&cluster, "data", 1));
    assert_eq!(result["errors"], 0, "{result}");
    let after = first.write_at(0, &[2; 4096]);
    assert!(after.is_err(), "the fenced initiator acknowledged a write");
    let status = cluster.json(&["volume", "status", "data"]);
    let attachment = &status["attachment"];
    assert_eq!(attachment["state"], "over", "{attachment}");
    let reason = attachment["reason"].as_str().unwrap_or_default();
    assert!(
        reason.contains("fenced") && reason.contains("epoch"),
        "{attachment}"
    );
}

/// What a client knows of the volume: per 4 KiB block the last acknowledged value, and the values
/// sent since, any of which may have become durable.
#[derive(Default)]
struct Expected {
    blocks: BTreeMap<u64, (u64, Vec<u64>)>,
}

impl Expected {
    fn verify(&mut self, client: &mut NbdClient, round: usize) {
        let mut data = vec![0; 4096];
        for (block, (acknowledged, sent)) in &mut self.blocks {
            client.read_at(block * 4096, &mut data).expect("reads");
            let words: Vec<u64> = data
                .chunks_exact(8)
                .map(|w| u64::from_le_bytes(w.try_into().expect("eight bytes")))
                .collect();
            assert!(
                words.iter().all(|w| *w == words[0]),
                "round {round}: block {block} is a mix"
            );
            assert!(
                words[0] == *acknowledged || sent.contains(&words[0]),
                "round {round}: block {block} holds {}, acknowledged was {acknowledged}, sent {sent:?}",
                words[0]
            );
            *acknowledged = words[0];
            sent.clear();
        }
    }
}

/// Writes at depth 16 until the connection breaks.
fn write_until_cut(client: &mut NbdClient, expected: &mut Expected, value: &mut u64, blocks: u64) {
    let mut in_flight = BTreeMap::new();
    let mut random = *value | 1;
    loop {
        while in_flight.len() < 16 {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let block = (random >> 33) % blocks;
            if in_flight.values().any(|(b, _)| *b == block) {
                continue;
            }
            *value += 1;
            expected.blocks.entry(block).or_default().1.push(*value);
            in_flight.insert(*value, (block, *value));
            let data = value.to_le_bytes().repeat(512);
            if client
                .send(Command::Write, *value, block * 4096, 4096, &data)
                .is_err()
            {
                return;
            }
        }
        match client.reply() {
            Ok(reply) if reply.error == 0 => {
                let (block, value) = in_flight.remove(&reply.cookie).expect("a cookie of ours");
                let entry = expected.blocks.get_mut(&block).expect("a block of ours");
                entry.0 = value;
                entry.1.retain(|v| *v > value);
            }
            _ => return,
        }
    }
}

/// Rounds of "everything is killed at once under load"; ASHLAR_KILL_ROUNDS sets another number.
#[test]
fn whatever_was_acknowledged_survives_the_death_of_all_processes() {
    let rounds = std::env::var("ASHLAR_KILL_ROUNDS")
        .ok()
        .and_then(|r| r.parse().ok())
        .unwrap_or(100);
    let mut cluster = Cluster::start(Options {
        store_bytes: 256 * MIB,
        ..Options::default()
    });
    cluster.create_volume("data", "64MiB", &[]);
    let mut expected = Expected::default();
    let mut value = 0;
    for round in 0..rounds {
        let uri = cluster.attach("data");
        let mut client = NbdClient::connect(&uri).expect("connects");
        expected.verify(&mut client, round);
        let before = value;
        std::thread::scope(|scope| {
            let writer =
                scope.spawn(|| write_until_cut(&mut client, &mut expected, &mut value, 2048));
            std::thread::sleep(Duration::from_millis(50 + 37 * (round as u64 % 11)));
            cluster.kill_all();
            writer.join().expect("the writer ends");
        });
        assert!(value > before + 16, "round {round}: nothing was written");
        cluster.start_all();
    }
    let mut client = NbdClient::connect(&cluster.attach("data")).expect("connects");
    expected.verify(&mut client, rounds);
    println!(
        "{rounds} rounds, {value} writes sent, {} blocks",
        expected.blocks.len()
    );
    cluster.wait_in_sync("data", 3);
    cluster.assert_replicas_equal("data");
}

#[test]
fn an_idle_installation_costs_next_to_nothing() {
    let cluster = Cluster::start(Options {
        store_bytes: 16 << 30,
        ..Options::default()
    });
    cluster.create_volume("data", "8GiB", &[]);
    let mut client = NbdClient::connect(&cluster.attach("data")).expect("connects");
    let data = vec![3; MIB as usize];
    for n in 0..512 {
        client.write_at(n * 16 * MIB, &data).expect("writes");
    }
    client.flush().expect("flushes");
    // Whatever is written home in the background is over when the CPU time stands still.
    let pids: Vec<_> = (0..3)
        .map(|n| cluster.node_pid(n))
        .chain([cluster.initiator_pid()])
        .collect();
    let total = || pids.iter().map(|pid| cpu_time(*pid)).sum::<Duration>();
    let mut before = total();
    wait_until("the background work ends", Duration::from_secs(60), || {
        std::thread::sleep(Duration::from_secs(1));
        let now = total();
        std::mem::replace(&mut before, now) == now
    });
    let (start, before) = (Instant::now(), total());
    std::thread::sleep(Duration::from_secs(20));
    let share = (total() - before).as_secs_f64() / start.elapsed().as_secs_f64();
    println!("idle: {:.3} % of a core", share * 100.0);
    assert!(share < 0.01, "idle costs {:.2} % of a core", share * 100.0);
    for n in 0..3 {
        let resident = resident_bytes(cluster.node_pid(n));
        println!("node {n}: {} MiB resident", resident / MIB);
        assert!(resident <= 128 * MIB, "node {n}: {resident} bytes resident");
    }
}

#[test]
fn the_quickstart_passes_with_and_without_io_uring() {
    use std::os::unix::process::CommandExt as _;
    run(support::ashlar().arg("quickstart"));
    let mut command = support::ashlar();
    command.arg("quickstart");
    // SAFETY: two system calls between fork and exec.
    unsafe { command.pre_exec(support::seccomp::forbid_io_uring) };
    let output = run(&mut command);
    println!("{}", String::from_utf8_lossy(&output.stdout));
}
