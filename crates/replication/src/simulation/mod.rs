//! Random schedules of members, initiators, clients, crashes and networks that misbehave, checked after
//! every step (I1–I5 in docs/protocol.md), and then left alone, to see that everything comes right.
//!
//! `ASHLAR_SCHEDULES=20000 cargo test -p ashlar-replication schedules` runs more of them;
//! `ASHLAR_SEED=17 ASHLAR_TRACE=1 … -- --nocapture` replays one and prints what happens.
//!
//! What the model leaves out: C6 (replacing a member), the journal below the durable step, and bad blocks
//! on more than one member at a time.

mod by_hand;
mod chaos;
mod ledger;
mod node;
mod random;
mod scenarios;
mod tests;
mod world;
