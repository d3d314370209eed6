//! Random schedules of members, initiators, clients, crashes and networks that misbehave, from one seed each:
//! checked after every step (I1–I5 in docs/protocol.md), and then left alone, to see that everything comes right.

mod chaos;
mod ledger;
mod node;
mod profile;
mod random;
mod world;

#[cfg(all(test, feature = "faults"))]
mod broken_rules;
#[cfg(test)]
mod by_hand;
#[cfg(all(test, feature = "faults"))]
mod scenarios;
#[cfg(test)]
mod schedules;

pub use chaos::{Media, Summary, run};
pub use ledger::Violation;
