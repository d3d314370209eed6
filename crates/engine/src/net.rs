//! System calls that make sockets. None of them is on the path of a message.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use crate::address::Address;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// Connections that wait to be accepted. The system caps it (net.core.somaxconn).
const BACKLOG: i32 = 1024;

/// How long an address may be in use before that is an error. The kernel lets go of the sockets of a process that
/// was killed, and had them in an io_uring, a little after the process is gone.
const IN_USE_MAX: Duration = Duration::from_secs(1);
/// Between two looks whether it still is.
const IN_USE_PAUSE: Duration = Duration::from_millis(20);

/// A listening socket, and where it really listens.
pub(crate) fn listen(address: &Address) -> io::Result<(OwnedFd, Address)> {
    let give_up = Instant::now() + IN_USE_MAX;
    loop {
        match try_listen(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < give_up => {
                std::thread::sleep(IN_USE_PAUSE);
            }
            result => return result,
        }
    }
}

fn try_listen(address: &Address) -> io::Result<(OwnedFd, Address)> {
    match address {
        Address::Tcp(wanted) => {
            let fd = socket(address)?;
            sockopt::set_socket_reuseaddr(&fd, true)?;
            rustix::net::bind(&fd, wanted)?;
            rustix::net::listen(&fd, BACKLOG)?;
            let actual = rustix::net::getsockname(&fd)?.try_into()?;
            Ok((fd, Address::Tcp(actual)))
        }
        Address::Unix(path) => {
            let fd = socket(address)?;
            match rustix::net::bind(&fd, &SocketAddrUnix::new(path)?) {
                Err(Errno::ADDRINUSE) if is_abandoned(path) => {
                    std::fs::remove_file(path)?;
                    rustix::net::bind(&fd, &SocketAddrUnix::new(path)?)?;
                }
                other => other?,
            }
            rustix::net::listen(&fd, BACKLOG)?;
            Ok((fd, address.clone()))
        }
    }
}

/// True if `path` is a socket that nobody listens on: left behind by a process that was killed.
fn is_abandoned(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    is_socket
        && std::os::unix::net::UnixStream::connect(path)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

fn socket(address: &Address) -> io::Result<OwnedFd> {
    let family = match address {
        Address::Tcp(std::net::SocketAddr::V4(_)) => AddressFamily::INET,
        Address::Tcp(std::net::SocketAddr::V6(_)) => AddressFamily::INET6,
        Address::Unix(_) => AddressFamily::UNIX,
    };
    Ok(rustix::net::socket_with(
        family,
        SocketType::STREAM,
        FLAGS,
        None,
    )?)
}

/// Whether a socket that starts to connect is already connected.
pub(crate) enum Connect {
    Done(OwnedFd),
    Waits(OwnedFd),
    /// For example nobody listens on the unix socket. The descriptor stands for the dead socket.
    Failed(OwnedFd, io::Error),
}

pub(crate) fn connect(address: &Address) -> io::Result<Connect> {
    let fd = socket(address)?;
    let result = match address {
        Address::Tcp(to) => rustix::net::connect(&fd, to),
        Address::Unix(path) => rustix::net::connect(&fd, &SocketAddrUnix::new(path)?),
    };
    Ok(match result {
        Ok(()) => Connect::Done(fd),
        Err(Errno::INPROGRESS | Errno::INTR) => Connect::Waits(fd),
        Err(error) => Connect::Failed(fd, error.into()),
    })
}

/// The result of a connect whose socket became writable.
pub(crate) fn connect_result(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(sockopt::socket_error(fd)??)
}

/// Small messages go out at once. Refused by unix sockets, which do so anyhow.
pub(crate) fn set_no_delay(fd: BorrowedFd<'_>) {
    let _ = sockopt::set_tcp_nodelay(fd, true);
}

/// io_uring waits by itself only on blocking sockets, epoll needs the other kind.
pub(crate) fn set_blocking(fd: BorrowedFd<'_>, blocking: bool) -> io::Result<()> {
    Ok(rustix::io::ioctl_fionbio(fd, !blocking)?)
}

/// The next connection of a listener; None when there is none.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    loop {
        return match rustix::net::accept_with(listener, FLAGS) {
            Ok(fd) => Ok(Some(fd)),
            // The peer gave up while it waited, or a network error of that one connection.
            Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO | Errno::NETDOWN) => continue,
            Err(Errno::HOSTDOWN | Errno::HOSTUNREACH | Errno::NETUNREACH) => continue,
            Err(Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        };
    }
}

/// Sends what the kernel takes at once.
///
/// # Safety
/// `message` and all it points to are valid.
pub(crate) unsafe fn send(fd: BorrowedFd<'_>, message: *const libc::msghdr) -> io::Result<usize> {
    loop {
        // SAFETY: the caller vouches for the message.
        let sent = unsafe {
            libc::sendmsg(
                fd.as_raw_fd(),
                message,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        if sent >= 0 {
            return Ok(sent as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Receives what is there.
///
/// # Safety
/// `room` bytes may be written at `memory`.
pub(crate) unsafe fn receive(
    fd: BorrowedFd<'_>,
    memory: *mut u8,
    room: usize,
) -> io::Result<usize> {
    loop {
        // SAFETY: the caller vouches for the memory.
        let received =
            unsafe { libc::recv(fd.as_raw_fd(), memory.cast(), room, libc::MSG_DONTWAIT) };
        if received >= 0 {
            return Ok(received as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Bytes of unread input that are thrown away so that a last message is not lost.
const DISCARD_BYTES_MAX: usize = 1 << 20;

/// Takes a socket down after a last message. Unread input would make the kernel send a reset,
/// which can destroy the message on its way: read it first, within a limit.
pub(crate) fn discard_input(fd: BorrowedFd<'_>) {
    let mut scrap = [MaybeUninit::<u8>::uninit(); 16 << 10];
    let mut left = DISCARD_BYTES_MAX;
    while left > 0 {
        match rustix::net::recv(fd, &mut scrap, RecvFlags::DONTWAIT) {
            Ok((_, 1..)) => left = left.saturating_sub(scrap.len()),
            _ => return,
        }
    }
}

pub(crate) fn shut_down(fd: BorrowedFd<'_>) {
    // Not connected (any more) is what is wanted.
    let _ = rustix::net::shutdown(fd.as_fd(), Shutdown::Both);
}
