//! The replica server: one pinned thread per device, run to completion from socket to journal to
//! socket. Control (gRPC) and metrics (HTTP) run on threads of their own and talk to it by mailbox.

pub mod device;
pub mod metrics;
pub mod scheduler;
pub mod shard;
