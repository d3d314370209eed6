//! Operations that the store is working on, by the token it was given.

use ashlar_replica::Answer;
use ashlar_replication::values::Time;
use ashlar_store::ReplicaSlot;

use crate::scheduler::Cost;
use crate::shard::commands::Waiting;
use crate::shard::connection::Asker;

/// What is to be answered when an operation is done.
pub enum Owed {
    /// To a request of an initiator.
    Member(Answer),
    /// To a command of the control API.
    Control(Box<Waiting>),
}

/// An operation under way.
pub struct Pending {
    /// Who asked; None for the control API.
    pub asker: Option<Asker>,
    /// Of which replica.
    pub slot: ReplicaSlot,
    /// What the scheduler was charged.
    pub cost: Cost,
    /// What the connection's admission was charged.
    pub bytes: u64,
    /// When it was handed to the store.
    pub started: Time,
    /// What to answer.
    pub owed: Owed,
}

/// A table with stable tokens; freed places are used again, so that it stops growing.
#[derive(Default)]
pub struct PendingTable {
    entries: Vec<Option<Pending>>,
    free: Vec<u32>,
}

impl PendingTable {
    /// Keeps an operation and returns its token.
    pub fn insert(&mut self, pending: Pending) -> u64 {
        match self.free.pop() {
            Some(n) => {
                self.entries[n as usize] = Some(pending);
                u64::from(n)
            }
            None => {
                self.entries.push(Some(pending));
                self.entries.len() as u64 - 1
            }
        }
    }

    /// Whether nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }

    /// Puts the slot into a create command, which was begun before the slot was known.
    pub fn set_created_slot(&mut self, token: u64, slot: ReplicaSlot) {
        let entry = self
            .entries
            .get_mut(token as usize)
            .and_then(Option::as_mut);
        if let Some(Pending {
            owed: Owed::Control(waiting),
            slot: of,
            ..
        }) = entry
            && let Waiting::Create(created, _) = waiting.as_mut()
        {
            *of = slot;
            *created = slot;
        }
    }

    /// Takes an operation out.
    pub fn remove(&mut self, token: u64) -> Option<Pending> {
        let index = usize::try_from(token).ok()?;
        let pending = self.entries.get_mut(index)?.take()?;
        self.free.push(index as u32);
        Some(pending)
    }
}
