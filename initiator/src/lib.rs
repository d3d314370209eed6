//! The volume client: replication, reads, resync, block front ends, attach API.

mod backoff;
mod connection;
pub mod front_end;
pub mod handle;
pub mod metrics;
mod random;
pub mod spec;
pub mod status;
