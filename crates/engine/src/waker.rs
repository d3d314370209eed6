//! Waking an engine from another thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::EventfdFlags;

/// Makes a waiting [`crate::Engine::poll`] return with [`crate::Event::Woken`]; from any thread.
///
/// For the control plane: waking a thread on another core costs more than a 4 KiB write.
#[derive(Clone, Debug)]
pub struct Waker {
    eventfd: Arc<OwnedFd>,
}

impl Waker {
    pub(crate) fn new() -> std::io::Result<Waker> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Waker {
            eventfd: Arc::new(rustix::event::eventfd(0, flags)?),
        })
    }

    /// Wakes the engine. Several calls before it looks count as one. Harmless after its end.
    pub fn wake(&self) {
        // Any number but zero wakes. The only failure is a counter at its limit, which wakes as well.
        let _ = rustix::io::write(&self.eventfd, &[1u8; 8]);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// Takes the wake-ups back that are there; true if there was one.
    pub(crate) fn take(&self) -> bool {
        rustix::io::read(&self.eventfd, &mut [0u8; 8]).is_ok()
    }
}
