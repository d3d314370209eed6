//! NBD: the front end that other people's clients speak.
//!
//! Fixed newstyle negotiation, simple and structured replies, any alignment. FLUSH and FUA cost
//! nothing: an acknowledged write is durable. Any number of connections may use a volume at the same
//! time and see the same data, which is why CAN_MULTI_CONN is offered.
//!
//! Source: NetworkBlockDevice/nbd, doc/proto.md.

mod counters;
mod negotiation;
mod protocol;
mod receive;
mod reply;
mod request;
mod server;
mod session;

pub use counters::{Counter, NbdCounters};
pub use server::NbdServer;
