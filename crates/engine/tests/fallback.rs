//! Where io_uring is forbidden the portable engine takes over.

mod common;

use std::process::Command;

use ashlar_engine::{Engine, EngineError, EngineKind, Options};

/// A filter as container runtimes install it: io_uring_setup answers EPERM, the rest is allowed.
fn forbid_io_uring() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let filter = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        // The number of the system call is the first field of seccomp_data.
        filter(LOAD, 0, 0, 0),
        filter(JUMP_EQUAL, libc::SYS_io_uring_setup as u32, 0, 1),
        filter(RETURN, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
        filter(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the program is valid and is copied by the kernel.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program),
            0
        );
    }
}

#[test]
fn a_seccomp_filter_leads_to_the_portable_engine_with_one_line_of_notice() {
    if std::env::var_os("ENGINE_TEST_CHILD").is_none() {
        let name = "a_seccomp_filter_leads_to_the_portable_engine_with_one_line_of_notice";
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
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
    forbid_io_uring();
    let engine = Engine::new(Options::default()).unwrap();
    assert_eq!(engine.kind(), EngineKind::Portable);
    let notice = engine.notice().unwrap().to_owned();
    assert!(
        notice.contains("io_uring") && notice.contains("Operation not permitted"),
        "{notice}"
    );
    assert!(!notice.contains('\n'));
    let by_name = Options {
        kind: Some(EngineKind::IoUring),
        ..Options::default()
    };
    assert!(matches!(
        Engine::new(by_name),
        Err(EngineError::Unavailable { .. })
    ));
    let mut rig = common::Rig::with(Options::default());
    let (client, server) = rig.pair();
    rig.engine.send(client, b"works");
    assert_eq!(rig.take_exactly(server, 5), b"works");
}

#[test]
fn an_engine_of_the_preferred_kind_has_no_notice() {
    let engine = Engine::new(Options::default()).unwrap();
    assert_eq!(
        engine.notice().is_none(),
        engine.kind() == EngineKind::IoUring
    );
}
