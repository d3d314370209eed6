//! Forbids io_uring to a child process, as the default seccomp profiles of container runtimes do.

use std::io;

/// `io_uring_setup` has the same number on every architecture.
const IO_URING_SETUP: u32 = 425;

const fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    }
}

/// For `Command::pre_exec`: `io_uring_setup` fails with EPERM from here on, children included.
pub fn forbid_io_uring() -> io::Result<()> {
    let equal = libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt: 0,
        jf: 1,
        k: IO_URING_SETUP,
    };
    let mut filter = [
        // The number of the system call is the first word of struct seccomp_data.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        equal,
        statement(
            libc::BPF_RET | libc::BPF_K,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: plain integers; both calls change only the calling process.
    let no_new_privileges = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: `program` and the filter that it points to live until the call returns.
    let installed = unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
            0,
            0,
        )
    };
    if no_new_privileges != 0 || installed != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
