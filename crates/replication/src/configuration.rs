//! Configurations, quorums and the durable state of a member (docs/protocol.md, "Values").

use crate::values::{Epoch, EpochNumber, MEMBERS_MAX, MemberId, Pass, Position};

/// Role of a member of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Holds blocks.
    Data,
    /// Holds everything but blocks: counts for fencing, leases and configurations only.
    Witness,
}

/// A member and its role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// Who.
    pub id: MemberId,
    /// As what.
    pub role: Role,
}

/// Number of a configuration within its epoch; it orders nothing without the epoch (holes 3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u64);

/// Which acknowledgements a write needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Ack {
    /// A majority of the data members, at most the in-sync set.
    #[default]
    Majority,
    /// The whole in-sync set.
    All,
}

/// The configuration of a volume: who its members are and which of them are in sync.
///
/// Guarantees (kept by [`Configuration::check`], which every decoder calls): at most
/// [`MEMBERS_MAX`] members and previous members, each named once; the in-sync set is a non-empty
/// subset of the data members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// The epoch that wrote it.
    pub epoch: EpochNumber,
    /// Its number in that epoch.
    pub generation: Generation,
    /// Which acknowledgements a write needs; fixed when the volume is made.
    pub ack: Ack,
    /// Ascending.
    pub members: Vec<Member>,
    /// Empty unless this configuration changes the member set (C6). Ascending.
    pub previous: Vec<Member>,
    /// Ascending.
    pub in_sync: Vec<MemberId>,
}

/// Why a configuration is not one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigurationError {
    /// More than [`MEMBERS_MAX`] members, or none.
    #[error("a configuration names 1 to {MEMBERS_MAX} members")]
    MemberCount,
    /// Members are not in ascending order or one is named twice.
    #[error("members are not strictly ascending")]
    MemberOrder,
    /// The in-sync set is empty, unordered, or names someone who is no data member.
    #[error("the in-sync set is not a non-empty ascending subset of the data members")]
    InSync,
}

impl Configuration {
    /// Checks the guarantees of the type.
    pub fn check(&self) -> Result<(), ConfigurationError> {
        if self.members.is_empty()
            || self.members.len() > MEMBERS_MAX
            || self.previous.len() > MEMBERS_MAX
        {
            return Err(ConfigurationError::MemberCount);
        }
        let ascending = |m: &[Member]| m.windows(2).all(|w| w[0].id < w[1].id);
        if !ascending(&self.members) || !ascending(&self.previous) {
            return Err(ConfigurationError::MemberOrder);
        }
        let subset = self
            .in_sync
            .iter()
            .all(|id| self.role_of(*id) == Some(Role::Data));
        if self.in_sync.is_empty() || !self.in_sync.windows(2).all(|w| w[0] < w[1]) || !subset {
            return Err(ConfigurationError::InSync);
        }
        Ok(())
    }

    /// What configurations are ordered by.
    pub fn order(&self) -> (EpochNumber, Generation) {
        (self.epoch, self.generation)
    }

    /// The role of a member of `members`.
    pub fn role_of(&self, id: MemberId) -> Option<Role> {
        self.members.iter().find(|m| m.id == id).map(|m| m.role)
    }

    /// Whether `id` is named in `members` or `previous` (M10).
    pub fn names(&self, id: MemberId) -> bool {
        self.members
            .iter()
            .chain(&self.previous)
            .any(|m| m.id == id)
    }

    /// w(in-sync): durable answers from the in-sync set that acknowledge a write.
    pub fn write_quorum(&self) -> usize {
        match self.ack {
            Ack::All => self.in_sync.len(),
            Ack::Majority => self.in_sync.len().min(self.data_members() / 2 + 1),
        }
    }

    /// r: complete in-sync members that an attach needs to see.
    pub fn recovery_quorum(&self) -> usize {
        self.in_sync.len() - self.write_quorum() + 1
    }

    /// quorum(X, c): a majority of `members`, and of `previous` where there are any.
    pub fn is_quorum(&self, has: impl Fn(MemberId) -> bool) -> bool {
        self.is_majority(&has) && (self.previous.is_empty() || majority(&self.previous, &has))
    }

    /// maj(X, c.members), which is a quorum only where there are no previous members.
    pub fn is_majority(&self, has: impl Fn(MemberId) -> bool) -> bool {
        majority(&self.members, has)
    }

    /// How many of the members hold blocks.
    pub fn data_members(&self) -> usize {
        self.members.iter().filter(|m| m.role == Role::Data).count()
    }
}

fn majority(of: &[Member], has: impl Fn(MemberId) -> bool) -> bool {
    of.iter().filter(|m| has(m.id)).count() * 2 > of.len()
}

/// Whether the blocks of a member can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReplicaState {
    /// Every write at or before `last` on the member's line of history is in the blocks.
    Complete,
    /// A resync of that epoch and pass has begun and has not been marked complete.
    Resyncing {
        /// The epoch of the initiator that resyncs.
        epoch: EpochNumber,
        /// Its attempt.
        pass: Pass,
    },
}

/// What a member keeps durably per volume, besides its blocks. It changes in single durable steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberState {
    /// Who this member is.
    pub id: MemberId,
    /// Whether it holds blocks.
    pub role: Role,
    /// The highest epoch it promised.
    pub promised: Epoch,
    /// None for a newcomer that no configuration has named yet.
    pub configuration: Option<Configuration>,
    /// Complete or resyncing. Meaningless for a witness.
    pub state: ReplicaState,
    /// The newest resync that began here: passes at or below are dead (M5).
    pub last_pass: (EpochNumber, Pass),
    /// Position of the last write that is in the blocks. Stays zero on a witness.
    pub last: Position,
}
