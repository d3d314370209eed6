//! The replication protocol of Ashlar as state machines without I/O: events and time in, effects
//! out. No tokio, socket, file, clock or randomness. docs/protocol.md has the rules; comments here
//! name them by number.

pub mod configuration;
pub mod digest;
pub mod faults;
pub mod initiator;
pub mod member;
pub mod message;
pub mod values;
