//! Files behave the same with both kinds of engine, on a disk filesystem and in memory.

mod common;

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use ashlar_engine::{
    Access, Durability, EngineKind, Event, FileId, FileOptions, IoBuf, Persist, open_direct,
};
use common::{Rig, pattern};

for_both_kinds!(
    what_is_written_is_read_back,
    many_operations_at_once_all_complete,
    a_read_past_the_end_is_an_error_with_its_buffer,
    a_write_that_the_file_refuses_is_an_error,
    a_write_beyond_the_size_limit_is_continued_and_then_an_error,
    a_file_that_is_closed_early_answers_what_is_under_way,
    a_sync_that_fails_is_reported,
);

/// Folders on a disk filesystem and in memory, as far as this machine has them.
fn folders() -> Vec<tempfile::TempDir> {
    let disk = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let places = [disk, Path::new("/dev/shm"), Path::new("/tmp")];
    places
        .iter()
        .filter_map(|place| tempfile::tempdir_in(place).ok())
        .collect()
}

fn make(folder: &Path, bytes: usize) -> PathBuf {
    let path = folder.join("blocks");
    std::fs::write(&path, vec![0; bytes]).unwrap();
    path
}

fn open(rig: &mut Rig, path: &Path) -> FileId {
    let opened = open_direct(path, Access::ReadWrite).unwrap();
    let durability = opened.durability;
    rig.engine.open_file(opened.fd, FileOptions { durability })
}

fn done(rig: &mut Rig, token: u64) -> (std::io::Result<usize>, Option<IoBuf>) {
    rig.until(|rig| {
        rig.events
            .iter()
            .any(|e| matches!(e, Event::File { token: t, .. } if *t == token))
    });
    let place = rig
        .events
        .iter()
        .position(|e| matches!(e, Event::File { token: t, .. } if *t == token))
        .unwrap();
    match rig.events.remove(place) {
        Some(Event::File { result, buf, .. }) => (result, buf),
        _ => unreachable!(),
    }
}

fn what_is_written_is_read_back(kind: EngineKind) {
    for folder in folders() {
        let mut rig = Rig::new(kind);
        let file = open(&mut rig, &make(folder.path(), 1 << 20));
        for (round, persist) in [Persist::Durable, Persist::Cached].into_iter().enumerate() {
            let token = round as u64 * 10;
            let data = pattern(65536, token);
            let mut buf = rig.engine.buffer(128 << 10);
            buf[..65536].copy_from_slice(&data);
            rig.engine.write(file, token, 4096, buf, 65536, persist);
            let (result, buf) = done(&mut rig, token);
            assert_eq!(result.unwrap(), 65536);
            assert_eq!(buf.unwrap().len(), 128 << 10);
            rig.engine.sync(file, token + 1);
            let (result, buf) = done(&mut rig, token + 1);
            assert_eq!((result.unwrap(), buf.is_none()), (0, true));
            let buf = rig.engine.buffer(65536);
            rig.engine.read(file, token + 2, 4096, buf, 65536);
            let (result, buf) = done(&mut rig, token + 2);
            assert_eq!(result.unwrap(), 65536);
            assert!(*buf.unwrap() == *data);
        }
    }
}

fn many_operations_at_once_all_complete(kind: EngineKind) {
    for folder in folders() {
        let mut rig = Rig::new(kind);
        let file = open(&mut rig, &make(folder.path(), 1 << 20));
        // More links than the ring has room for in one go.
        for token in 0..200u64 {
            let mut buf = rig.engine.buffer(4096);
            buf.fill(token as u8);
            rig.engine
                .write(file, token, token * 4096, buf, 4096, Persist::Durable);
        }
        for token in 0..200 {
            let (result, buf) = done(&mut rig, token);
            assert_eq!(result.unwrap(), 4096);
            rig.engine.recycle(buf.unwrap());
        }
        let bytes = std::fs::read(folder.path().join("blocks")).unwrap();
        for token in 0..200 {
            assert!(
                bytes[token * 4096..][..4096]
                    .iter()
                    .all(|byte| *byte == token as u8)
            );
        }
    }
}

fn a_read_past_the_end_is_an_error_with_its_buffer(kind: EngineKind) {
    for folder in folders() {
        let mut rig = Rig::new(kind);
        let file = open(&mut rig, &make(folder.path(), 8192));
        rig.engine.read(file, 1, 4096, IoBuf::new(8192), 8192);
        let (result, buf) = done(&mut rig, 1);
        assert_eq!(result.unwrap_err().kind(), ErrorKind::UnexpectedEof);
        assert_eq!(buf.unwrap().len(), 8192);
    }
}

fn a_write_that_the_file_refuses_is_an_error(kind: EngineKind) {
    for folder in folders() {
        let mut rig = Rig::new(kind);
        let opened = open_direct(&make(folder.path(), 8192), Access::ReadOnly).unwrap();
        let durability = opened.durability;
        let file = rig.engine.open_file(opened.fd, FileOptions { durability });
        for (token, persist) in [Persist::Durable, Persist::Cached].into_iter().enumerate() {
            rig.engine
                .write(file, token as u64, 0, IoBuf::new(4096), 4096, persist);
            let (result, buf) = done(&mut rig, token as u64);
            assert_eq!(result.unwrap_err().raw_os_error(), Some(9), "EBADF");
            assert!(buf.is_some());
        }
    }
}

/// In a child process: the limit is one of the process, and io_uring obeys it as well.
fn a_write_beyond_the_size_limit_is_continued_and_then_an_error(kind: EngineKind) {
    if std::env::var_os("ENGINE_TEST_CHILD").is_none() {
        let module = match kind {
            EngineKind::IoUring => "io_uring",
            EngineKind::Portable => "portable",
        };
        let test = "a_write_beyond_the_size_limit_is_continued_and_then_an_error";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("{module}::{test}"), "--nocapture"])
            .env("ENGINE_TEST_CHILD", "1")
            .output()
            .unwrap();
        assert!(
            child.status.success(),
            "{}",
            String::from_utf8_lossy(&child.stderr)
        );
        return;
    }
    // SAFETY: ignoring a signal has no handler to get wrong.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let limit = rustix::process::Rlimit {
        current: Some(1 << 20),
        maximum: None,
    };
    rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
    for folder in folders() {
        let path = make(folder.path(), (1 << 20) - 8192);
        let mut rig = Rig::new(kind);
        let file = open(&mut rig, &path);
        let offset = (1 << 20) - 8192;
        rig.engine
            .write(file, 1, offset, IoBuf::new(16384), 16384, Persist::Durable);
        let (result, _) = done(&mut rig, 1);
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EFBIG));
        assert_eq!(
            std::fs::metadata(&path).unwrap().len(),
            1 << 20,
            "the part that fits"
        );
    }
}

fn a_file_that_is_closed_early_answers_what_is_under_way(kind: EngineKind) {
    for folder in folders() {
        let mut rig = Rig::new(kind);
        let path = make(folder.path(), 1 << 20);
        for token in 0..50 {
            let file = open(&mut rig, &path);
            rig.engine
                .write(file, token, 0, IoBuf::new(4096), 4096, Persist::Durable);
            rig.engine.close_file(file);
            // A new file gets the number of the old descriptor as soon as it is free.
            let other = rustix::pipe::pipe().unwrap();
            let (result, _) = done(&mut rig, token);
            assert_eq!(result.unwrap(), 4096);
            drop(other);
        }
    }
}

fn a_sync_that_fails_is_reported(kind: EngineKind) {
    let mut rig = Rig::new(kind);
    // A pipe takes a write but cannot be synced: the nearest thing to a failing disk.
    let (_read, write): (OwnedFd, OwnedFd) = rustix::pipe::pipe().unwrap();
    let file = rig.engine.open_file(
        write,
        FileOptions {
            durability: Durability::Linked,
        },
    );
    rig.engine.sync(file, 1);
    let (result, buf) = done(&mut rig, 1);
    assert!(result.is_err() && buf.is_none());
    rig.engine
        .write(file, 2, 0, IoBuf::new(4096), 4096, Persist::Durable);
    let (result, buf) = done(&mut rig, 2);
    assert!(result.is_err() && buf.is_some());
}
