//! The volume client: replication, reads, resync, block front ends, attach API.
//!
//! [`thread::InitiatorThread`] is the library: one thread with volumes and front ends. [`daemon`] puts
//! several of them behind the attach API.

mod backoff;
mod byte_io;
mod connection;
pub mod daemon;
pub mod front_end;
pub mod handle;
pub mod metrics;
pub mod nbd;
mod random;
pub mod spec;
pub mod status;
pub mod thread;
mod volume;

pub use connection::ConnectionCounters;
pub use daemon::{Args, run};
