//! The replica server: one pinned thread per device, run to completion from socket to journal to
//! socket. Control (gRPC) and metrics (HTTP) run on threads of their own and talk to it by mailbox.

mod device;
mod http;
pub mod metrics;
pub mod open;
pub mod options;
mod run;
pub mod scheduler;
mod service;
pub mod shard;

pub use run::run;
