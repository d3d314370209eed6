//! Sockets, files and timers of one thread.
//!
//! An [`Engine`] belongs to one thread. The thread calls [`Engine::poll`] in a loop, handles the
//! events, and queues sends and file operations, which start with the next poll. There are two
//! kinds of engine with the same behaviour ([`EngineKind`]).
//!
//! Assumptions: every event is handled before the next poll; one engine per thread.

mod address;
mod buffer;
mod core;
mod engine;
mod event;
mod file;
mod net;
mod options;
mod output;
mod portable;
mod receive;
mod shared;
mod slab;
mod socket;
mod spin;
mod tag;
mod uring;
mod waker;

pub use address::{Address, AddressError};
pub use buffer::{IoBuf, buffer_alignment};
pub use engine::Engine;
pub use event::{Event, FileId, ListenerId, SocketId};
pub use file::{
    Access, Durability, FileOptions, OpenedFile, Persist, open_direct, probe_durability,
};
pub use options::{EngineError, EngineKind, Options};
pub use shared::{SharedBytes, SharedSlice};
pub use waker::Waker;
