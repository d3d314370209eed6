//! NBD: the front end that other people's clients speak.
//!
//! Fixed newstyle negotiation, simple and structured replies, any alignment. FLUSH and FUA cost
//! nothing: an acknowledged write is durable. Any number of connections may use a volume at the same
//! time and see the same data.

mod negotiation;
mod protocol;
mod server;

pub use server::NbdServer;
