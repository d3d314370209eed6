//! The volume client: replication, reads, resync, block front ends, attach API.

pub mod front_end;
