//! Damaged, foreign and full devices: a clear message, and no data lost or made up.

mod support;

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command as Process;
use std::time::Duration;

use ashlar_cli::nbd::NbdClient;
use support::{Cluster, Options, ashlar, run, temporary};

const MIB: u64 = 1 << 20;

fn written_cluster(nodes: usize, replicas: &str) -> (Cluster, Vec<u8>) {
    let cluster = Cluster::start(Options {
        nodes,
        store_bytes: 256 * MIB,
        ..Options::default()
    });
    cluster.create_volume("data", "32MiB", &["--replicas", replicas]);
    let mut client = NbdClient::connect(&cluster.attach("data")).expect("connects");
    // Every block differs from every other, so that a flipped bit can be aimed at one.
    let data: Vec<u8> = (0..32 * MIB / 8)
        .flat_map(|n| (n | 0xa5a5 << 48).to_le_bytes())
        .collect();
    for (n, chunk) in data.chunks(MIB as usize).enumerate() {
        client.write_at(n as u64 * MIB, chunk).expect("writes");
    }
    client.flush().expect("flushes");
    (cluster, data)
}

fn read_all(cluster: &Cluster) -> Vec<u8> {
    let mut client = NbdClient::connect(&cluster.attach("data")).expect("connects");
    let mut data = vec![0; 32 * MIB as usize];
    for (n, chunk) in data.chunks_mut(MIB as usize).enumerate() {
        client.read_at(n as u64 * MIB, chunk).expect("reads");
    }
    data
}

/// Flips a bit in the copy of the block at `offset` of the volume, wherever it lies in `blocks`.
fn flip_bit(blocks: &Path, wanted: &[u8]) {
    let mut file = File::options()
        .read(true)
        .write(true)
        .open(blocks)
        .expect("opens");
    let mut window = vec![0; MIB as usize];
    let mut at = 0;
    let mut flipped = 0;
    while let Ok(()) = file
        .seek(SeekFrom::Start(at))
        .and_then(|_| file.read_exact(&mut window))
    {
        for (n, block) in window.chunks(4096).enumerate() {
            if block == wanted {
                let place = at + n as u64 * 4096 + 1000;
                let byte = [block[1000] ^ 0x10];
                file.write_all_at(&byte, place).expect("writes");
                flipped += 1;
            }
        }
        at += MIB;
    }
    file.flush().expect("flushes");
    assert!(
        flipped > 0,
        "the block was not found in {}",
        blocks.display()
    );
}

#[test]
fn a_store_without_its_index_is_scanned_and_serves_the_same_data() {
    let (mut cluster, data) = written_cluster(3, "3");
    cluster.detach("data");
    cluster.kill_all();
    for node in &cluster.nodes {
        std::fs::remove_dir_all(node.store.join("meta")).expect("removes the index");
    }
    cluster.start_all();
    assert!(read_all(&cluster) == data);
    cluster.wait_in_sync("data", 3);
    cluster.assert_replicas_equal("data");
}

#[test]
fn a_flipped_bit_is_served_from_another_replica_and_repaired() {
    let (mut cluster, data) = written_cluster(3, "3");
    cluster.detach("data");
    cluster.kill_all();
    // Where a block was journaled and written home both copies go bad.
    for node in 0..2 {
        let block = 1000 + node * 10;
        flip_bit(
            &cluster.nodes[node].store.join("blocks"),
            &data[block * 4096..][..4096],
        );
    }
    cluster.start_all();
    for _ in 0..3 {
        assert!(read_all(&cluster) == data);
    }
    // Not every read goes to the bad copy; the comparison reads all and reports what is still bad.
    let repaired = |cluster: &Cluster| {
        let mut tool = cluster.tool(&["replicas", "compare", "data", "--verify-data"]);
        tool.output().expect("runs").status.success()
    };
    let mut rounds = 0;
    while !repaired(&cluster) {
        rounds += 1;
        assert!(rounds < 50, "the bad copy was never repaired");
        // Each round another replica is the only one to read from besides the bad one.
        let other = rounds % 3;
        cluster.kill_node(other);
        assert!(read_all(&cluster) == data);
        cluster.start_node(other);
        cluster.wait_in_sync("data", 3);
    }
}

#[test]
fn a_flipped_bit_on_the_only_replica_is_an_error_and_never_wrong_data() {
    let (mut cluster, data) = written_cluster(1, "1");
    cluster.detach("data");
    cluster.kill_all();
    let bad = 1234;
    flip_bit(
        &cluster.nodes[0].store.join("blocks"),
        &data[bad * 4096..][..4096],
    );
    cluster.start_all();
    let mut client = NbdClient::connect(&cluster.attach("data")).expect("connects");
    let mut block = vec![0; 4096];
    for n in bad - 5..bad + 6 {
        let result = client.read_at(n as u64 * 4096, &mut block);
        if n == bad {
            let error = result.expect_err("a bad block was served");
            assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
        } else {
            result.expect("the blocks around it are served");
            assert!(block == data[n * 4096..][..4096]);
        }
    }
    // Written anew it is good again.
    client
        .write_at(bad as u64 * 4096, &data[bad * 4096..][..4096])
        .expect("writes");
    client
        .read_at(bad as u64 * 4096, &mut block)
        .expect("reads");
    assert!(block == data[bad * 4096..][..4096]);
}

/// Gives both superblocks another format version and a correct checksum (docs/disk-format.md).
fn set_format_version(blocks: &Path, version: u32) {
    let file = File::options()
        .read(true)
        .write(true)
        .open(blocks)
        .expect("opens");
    for offset in [0, 64 << 10] {
        let mut page = [0; 4096];
        file.read_exact_at(&mut page, offset).expect("reads");
        page[12..16].copy_from_slice(&version.to_le_bytes());
        page[8..12].fill(0);
        let crc = crc32c::crc32c(&page);
        page[8..12].copy_from_slice(&crc.to_le_bytes());
        file.write_all_at(&page, offset).expect("writes");
    }
}

/// Starts a node on `store` and returns what it said when it refused.
fn refusal(store: &Path, more: &[&str]) -> String {
    let directory = temporary(false);
    let control = format!("unix:{}", directory.path().join("control").display());
    let data = format!("unix:{}", directory.path().join("data").display());
    let mut command = ashlar();
    command
        .args(["storage-node", "--store"])
        .arg(store)
        .args([
            "--listen",
            &data,
            "--control",
            &control,
            "--metrics",
            "127.0.0.1:0",
            "--announce",
        ])
        .args(more);
    let output = command.output().expect("runs");
    assert!(
        !output.status.success(),
        "the node took {}",
        store.display()
    );
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn says(text: &str, words: &[&str]) {
    let lower = text.to_lowercase();
    for word in words {
        assert!(
            lower.contains(word),
            "the message does not say {word:?}: {text}"
        );
    }
    assert!(!lower.contains("panicked"), "{text}");
}

#[test]
fn devices_that_cannot_be_used_are_refused_with_the_reason() {
    let (mut cluster, _) = written_cluster(1, "1");
    // A second process on the same store.
    says(&refusal(&cluster.nodes[0].store, &[]), &["in use"]);
    cluster.detach("data");
    cluster.kill_all();
    let blocks = cluster.nodes[0].store.join("blocks");
    let good = std::fs::read(&blocks).expect("reads");

    // Truncated.
    File::options()
        .write(true)
        .open(&blocks)
        .and_then(|f| f.set_len(64 * MIB))
        .expect("truncates");
    says(&refusal(&cluster.nodes[0].store, &[]), &["truncated"]);

    // A format of the future: version in both superblocks, with correct checksums.
    std::fs::write(&blocks, &good).expect("writes");
    set_format_version(&blocks, 99);
    says(
        &refusal(&cluster.nodes[0].store, &[]),
        &["version 99", "newer"],
    );

    // A foreign filesystem.
    let foreign = temporary(false);
    run(Process::new("/usr/sbin/mke2fs")
        .args(["-q", "-F"])
        .arg(foreign.path().join("blocks"))
        .arg("64M"));
    says(
        &refusal(foreign.path(), &["--format-size", "67108864"]),
        &["ext"],
    );
    run(Process::new("/usr/sbin/e2fsck")
        .arg("-fn")
        .arg(foreign.path().join("blocks")));
}

#[test]
fn a_full_device_refuses_writes_clearly_and_goes_on_reading() {
    let cluster = Cluster::start(Options {
        nodes: 1,
        store_bytes: 64 * MIB,
        ..Options::default()
    });
    // Thin: larger than the device.
    cluster.create_volume("data", "256MiB", &["--replicas", "1"]);
    let mut client = NbdClient::connect(&cluster.attach("data")).expect("connects");
    let data = vec![9; MIB as usize];
    let mut fits = 0;
    let error = loop {
        match client.write_at(fits * MIB, &data) {
            Ok(()) => fits += 1,
            Err(error) => break error,
        }
        assert!(fits < 256, "a device of 64 MiB took {fits} MiB");
    };
    println!("{fits} MiB fit into a store of 64 MiB; then: {error}");
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
    let mut read = vec![0; MIB as usize];
    for n in 0..fits {
        client.read_at(n * MIB, &mut read).expect("reads");
        assert!(read == data);
    }
    client
        .write_at(0, &[1; 4096])
        .expect("what is allocated can be overwritten");
    // Space that is given back can be used again.
    client
        .send(ashlar_cli::nbd::Command::Trim, 1, 0, 4 * MIB as u32, &[])
        .expect("sends");
    ashlar_cli::nbd::check(client.reply().expect("an answer")).expect("trims");
    support::wait_until("freed extents can be used", Duration::from_secs(10), || {
        client.write_at((fits + 8) * MIB, &data).is_ok()
    });
}
