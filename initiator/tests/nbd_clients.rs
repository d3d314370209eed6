//! Clients that nobody here wrote, against the NBD server with a volume in memory.
//!
//! They are skipped, with a line, where they are not installed; CI installs them.

mod nbd_support;

use std::path::Path;
use std::process::{Command, Output};

use ashlar_engine::EngineKind;
use nbd_support::{Server, Setup, folder, unix};

fn have(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("{program} is not installed: skipped");
    }
    found
}

fn run(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .expect("starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {text}{errors}"
    );
    output
}

fn with_server(test: impl Fn(&Path, &str)) {
    for engine in [EngineKind::IoUring, EngineKind::Portable] {
        let folder = folder();
        let server = Server::start(Setup::new(engine, unix(&folder)));
        test(folder.path(), &server.uri());
        assert_eq!(server.counter("framing_lost"), 0);
        assert_eq!(server.counter("requests_refused"), 0);
    }
}

fn pattern_file(path: &Path, bytes: usize) {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let data: Vec<u8> = (0..bytes / 8).flat_map(|_| word()).collect();
    std::fs::write(path, data).expect("a file");
}

#[test]
fn nbdinfo_and_nbdcopy() {
    if !have("nbdinfo") || !have("nbdcopy") {
        return;
    }
    with_server(|folder, uri| {
        let info = run("nbdinfo", &["--json", uri]);
        let info: serde_json::Value = serde_json::from_slice(&info.stdout).expect("JSON");
        let export = &info["exports"][0];
        assert_eq!(export["export-size"], 256 << 20, "{info}");
        assert_eq!(export["block_size_minimum"], 1, "{info}");
        assert_eq!(export["block_size_preferred"], 4096, "{info}");
        for flag in [
            "can_flush",
            "can_fua",
            "can_trim",
            "can_zero",
            "can_df",
            "can_multi_conn",
        ] {
            assert_eq!(export[flag], true, "{flag}: {info}");
        }
        assert_eq!(info["structured"], true, "{info}");
        run("nbdinfo", &["--list", &uri.replace("/data", "/")]);
        let input = folder.join("input");
        let output = folder.join("output");
        pattern_file(&input, 256 << 20);
        for size in ["4096", "262144", "33554432"] {
            let request = format!("--request-size={size}");
            let paths = (input.to_str().unwrap(), output.to_str().unwrap());
            run("nbdcopy", &[&request, "--", paths.0, uri]);
            run("nbdcopy", &[&request, "--", uri, paths.1]);
            run("cmp", &[paths.0, paths.1]);
        }
        run("nbdinfo", &["--map", uri]);
    });
}

#[test]
fn qemu_img_and_qemu_io() {
    if !have("qemu-img") || !have("qemu-io") {
        return;
    }
    with_server(|folder, uri| {
        let (raw, image) = (folder.join("raw"), folder.join("image.qcow2"));
        let (raw, image) = (raw.to_str().unwrap(), image.to_str().unwrap());
        pattern_file(Path::new(raw), 64 << 20);
        let file = std::fs::File::options().write(true).open(raw).unwrap();
        file.set_len(256 << 20).unwrap();
        run(
            "qemu-img",
            &["convert", "-f", "raw", "-O", "qcow2", raw, image],
        );
        run(
            "qemu-img",
            &["convert", "-n", "-f", "qcow2", "-O", "raw", image, uri],
        );
        run(
            "qemu-img",
            &["compare", "-f", "qcow2", "-F", "raw", image, uri],
        );
        run("qemu-img", &["map", "-f", "raw", "--output=json", uri]);
        let commands = [
            "write -P 0xaa 1 3",
            "write -P 0xbb 4095 2",
            "write -P 0xcc 1048575 8193",
            "read -P 0xaa 1 3",
            "read -P 0xbb 4095 2",
            "read -P 0xcc 1048575 8193",
            "write -z 100 200000",
            "read -P 0 100 200000",
            "write -z -u 3M 2M",
            "read -P 0 3M 2M",
            "write -P 0xdd -f 5000001 31M",
            "read -P 0xdd 5000001 31M",
            "discard 6M 4M",
            "flush",
        ];
        let mut arguments = vec!["-f", "raw"];
        commands.iter().for_each(|c| arguments.extend(["-c", c]));
        arguments.push(uri);
        let output = run("qemu-io", &arguments);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(!text.contains("verification failed"), "{text}");
    });
}

#[test]
fn fio_verifies_what_it_wrote() {
    if !have("fio") || !have("nbdinfo") {
        return;
    }
    let engines = run("fio", &["--enghelp"]);
    if !String::from_utf8_lossy(&engines.stdout).contains("nbd") {
        eprintln!("fio has no nbd engine: skipped");
        return;
    }
    with_server(|folder, uri| {
        for (depth, sizes) in [("1", "4k-4k"), ("32", "512-512"), ("32", "512-4m")] {
            let arguments = [
                "--name=verify",
                "--ioengine=nbd",
                &format!("--uri={uri}"),
                "--rw=randwrite",
                &format!("--bsrange={sizes}"),
                "--bs_unaligned=0",
                &format!("--iodepth={depth}"),
                "--size=64m",
                "--io_size=64m",
                "--verify=crc32c",
                "--verify_fatal=1",
                &format!("--aux-path={}", folder.display()),
            ];
            run("fio", &arguments);
        }
    });
}
