//! Clients that nobody here wrote, against a replicated volume; once with all nodes up, once while a
//! node is killed and comes back, and all of it again with io_uring forbidden.

mod support;

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use support::{Cluster, IoUring, Options, run};

/// What happens to the nodes while the clients run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Weather {
    Calm,
    NodeKilledAgainAndAgain,
}

/// Runs `clients` on a fresh volume; afterwards all replicas must be in sync and equal.
fn with_volume(io_uring: IoUring, weather: Weather, clients: fn(&Path, &str)) {
    let mut cluster = Cluster::start(Options {
        io_uring,
        ..Options::default()
    });
    cluster.create_volume("data", "256MiB", &[]);
    let uri = cluster.attach("data");
    let directory = cluster.path().to_owned();
    if weather == Weather::Calm {
        clients(&directory, &uri);
    } else {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let work = scope.spawn(|| {
                let result = std::panic::catch_unwind(|| clients(&directory, &uri));
                over.store(true, Ordering::Release);
                result
            });
            let mut round = 0;
            while !over.load(Ordering::Acquire) {
                // Each node in turn; it is back and in sync again before the next one goes.
                let n = round % 3;
                cluster.kill_node(n);
                std::thread::sleep(Duration::from_millis(300));
                cluster.start_node(n);
                cluster.wait_in_sync("data", 3);
                round += 1;
            }
            assert!(round > 0, "the clients were done before a node was killed");
            if let Err(panic) = work.join().expect("joins") {
                std::panic::resume_unwind(panic);
            }
        });
    }
    cluster.wait_in_sync("data", 3);
    cluster.assert_replicas_equal("data");
}

fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    // mke2fs and e2fsck lie in sbin, which is not on every user's path.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

fn pattern_file(path: &Path, bytes: usize) {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let data: Vec<u8> = (0..bytes / 8)
        .flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        })
        .collect();
    std::fs::write(path, data).expect("a file");
}

fn nbd_tools(directory: &Path, uri: &str) {
    let info = run(command("nbdinfo").args(["--json", uri]));
    let info: serde_json::Value = serde_json::from_slice(&info.stdout).expect("JSON");
    let export = &info["exports"][0];
    assert_eq!(export["export-size"], 256 << 20, "{info}");
    for flag in [
        "can_flush",
        "can_fua",
        "can_trim",
        "can_zero",
        "can_multi_conn",
    ] {
        assert_eq!(export[flag], true, "{flag}: {info}");
    }
    let input = directory.join("input");
    let output = directory.join("output");
    pattern_file(&input, 256 << 20);
    for size in ["4096", "65536", "1048576", "33554432"] {
        let request = format!("--request-size={size}");
        run(command("nbdcopy")
            .args([&request, "--"])
            .arg(&input)
            .arg(uri));
        run(command("nbdcopy").args([&request, "--", uri]).arg(&output));
        let same = run(command("cmp").arg(&input).arg(&output))
            .status
            .success();
        assert!(same, "what was copied in with {size} came out");
    }
    run(command("nbdinfo").args(["--map", uri]));
}

fn qemu(directory: &Path, uri: &str) {
    let raw = directory.join("raw");
    let qcow = directory.join("image.qcow2");
    pattern_file(&raw, 64 << 20);
    std::fs::File::options()
        .write(true)
        .open(&raw)
        .and_then(|f| f.set_len(256 << 20))
        .expect("raw");
    run(command("qemu-img")
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .arg(&raw)
        .arg(&qcow));
    run(command("qemu-img")
        .args(["convert", "-n", "-f", "qcow2", "-O", "raw"])
        .arg(&qcow)
        .arg(uri));
    run(command("qemu-img")
        .args(["compare", "-f", "qcow2", "-F", "raw"])
        .arg(&qcow)
        .arg(uri));
    // Unaligned patterns over each other, then read back; the last writer of each byte wins.
    let script = [
        "write -P 0x11 0 1M",
        "write -P 0x22 511 1",
        "write -P 0x33 4095 2",
        "write -P 0x44 1048575 3",
        "write -P 0x55 12345 67890",
        "write -z 20000 10001",
        "discard 65536 8192",
        "flush",
        "read -P 0x11 0 511",
        "read -P 0x22 511 1",
        "read -P 0x33 4095 2",
        "read -P 0x11 4097 8248",
        "read -P 0x55 12345 7655",
        "read -P 0 20000 10001",
        "read -P 0x55 30001 35535",
        "read -P 0 65536 8192",
        "read -P 0x55 73728 6507",
        "read -P 0x44 1048575 3",
    ];
    let mut io = command("qemu-io");
    io.args(["-f", "raw", uri]);
    for line in script {
        io.args(["-c", line]);
    }
    let output = run(&mut io);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!text.contains("Pattern verification failed"), "{text}");
}

fn fio(_: &Path, uri: &str) {
    for (depth, sizes, bytes) in [("1", "--bs=4k", "8m"), ("32", "--bsrange=512-4m", "192m")] {
        let mut fio = command("fio");
        fio.args([
            "--name=verify",
            "--ioengine=nbd",
            "--rw=randwrite",
            "--randrepeat=0",
        ])
        .args([
            "--verify=crc32c",
            "--verify_fatal=1",
            "--do_verify=1",
            "--size=192m",
        ])
        .args([
            "--bs_unaligned=0",
            "--blockalign=512",
            "--verify_backlog=64",
        ])
        .args([
            &format!("--uri={uri}"),
            &format!("--iodepth={depth}"),
            sizes,
        ])
        .arg(format!("--io_size={bytes}"));
        run(&mut fio);
    }
}

fn filesystem(directory: &Path, uri: &str) {
    let image = directory.join("image");
    let back = directory.join("image-back");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    run(command("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-d"])
        .arg(&source)
        .arg(&image)
        .arg("256M"));
    for _ in 0..3 {
        run(command("nbdcopy").arg("--").arg(&image).arg(uri));
        run(command("nbdcopy").args(["--", uri]).arg(&back));
        run(command("e2fsck").arg("-fn").arg(&back));
        run(command("cmp").arg(&image).arg(&back));
    }
}

macro_rules! client_tests {
    ($($name:ident: $clients:ident;)*) => {
        mod calm {
            use super::*;
            $(#[test] fn $name() { with_volume(IoUring::Allowed, Weather::Calm, $clients); })*
        }
        mod while_nodes_are_killed {
            use super::*;
            $(#[test] fn $name() {
                with_volume(IoUring::Allowed, Weather::NodeKilledAgainAndAgain, $clients);
            })*
        }
        mod without_io_uring {
            use super::*;
            $(#[test] fn $name() { with_volume(IoUring::Forbidden, Weather::Calm, $clients); })*
        }
        mod without_io_uring_while_nodes_are_killed {
            use super::*;
            $(#[test] fn $name() {
                with_volume(IoUring::Forbidden, Weather::NodeKilledAgainAndAgain, $clients);
            })*
        }
    };
}

client_tests! {
    nbdinfo_and_nbdcopy_find_what_they_wrote: nbd_tools;
    qemu_img_and_qemu_io_find_what_they_wrote: qemu;
    fio_verifies_every_block_at_depth_1_and_32: fio;
    an_ext4_image_comes_back_clean: filesystem;
}
