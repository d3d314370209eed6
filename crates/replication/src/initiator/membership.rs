//! C6: changing who the members are.
//!
//! ```text
//!          ChangeMembers            R5           quorum of both member sets        quorum of the new one
//!   stable ────────────► joining ─────────► proposed ───────────────────► joint ───────────────────► stable
//!      ▲                    │        (previous = c.members)      (follow-up without previous)
//!      └ refused, cancelled ┘
//! ```
//! Only *joining* is a state of its own; from the proposal on the configurations tell, also to the next
//! initiator, which finishes what it finds.

use crate::configuration::{Configuration, Generation, Member, Role};
use crate::faults::{Fault, is_broken};
use crate::initiator::peer::Peer;
use crate::initiator::{ChangeRefusal, Effect, Effects, Initiator, PEERS_MAX, Phase};
use crate::values::{MEMBERS_MAX, MemberId};

/// A change that was asked for and has not ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    add: Option<Member>,
    remove: Option<MemberId>,
    /// From here on it takes place, or the epoch ends (C1).
    pub(super) is_proposed: bool,
}

impl Change {
    /// `c` after the change, once the newcomer is in sync.
    fn applied_to(&self, c: &Configuration) -> Configuration {
        let stays = |id: MemberId| Some(id) != self.remove;
        let mut members: Vec<Member> = c.members.iter().filter(|m| stays(m.id)).copied().collect();
        let mut in_sync: Vec<MemberId> = c.in_sync.iter().filter(|i| stays(**i)).copied().collect();
        members.extend(self.add);
        in_sync.extend(self.add.filter(|m| m.role == Role::Data).map(|m| m.id));
        members.sort();
        in_sync.sort();
        let previous = if is_broken(Fault::ChangeAtOnce) {
            Vec::new()
        } else {
            c.members.clone()
        };
        Configuration {
            generation: Generation(c.generation.0 + 1),
            members,
            previous,
            in_sync,
            ..c.clone()
        }
    }
}

impl<P: Clone> Initiator<P> {
    pub(super) fn change_members(
        &mut self,
        add: Option<Member>,
        remove: Option<MemberId>,
        effects: &mut Effects<P>,
    ) {
        let change = Change {
            add,
            remove,
            is_proposed: false,
        };
        let accepted = self.check_change(&change).and_then(|()| match add {
            Some(member) => match self.add_peer(member, effects) {
                Some(_) => Ok(()),
                None => Err(ChangeRefusal::TooMany),
            },
            None => Ok(()),
        });
        match accepted {
            Ok(()) => self.change = Some(change),
            Err(reason) => effects.push_back(Effect::MembersChangeRefused { reason }),
        }
    }

    fn check_change(&self, change: &Change) -> Result<(), ChangeRefusal> {
        let Some(c) = self.committed.as_ref().filter(|_| !self.detaching) else {
            return Err(ChangeRefusal::NotOpen);
        };
        if self.phase != Phase::Open {
            return Err(ChangeRefusal::NotOpen);
        }
        // Only from a configuration with empty previous.
        if self.is_change_under_way() {
            return Err(ChangeRefusal::UnderWay);
        }
        if change.add.is_none() && change.remove.is_none() {
            return Err(ChangeRefusal::Nothing);
        }
        if change.remove.is_some_and(|id| c.role_of(id).is_none()) {
            return Err(ChangeRefusal::Unknown);
        }
        if change.add.is_some_and(|m| c.role_of(m.id).is_some()) {
            return Err(ChangeRefusal::Duplicate);
        }
        self.check_members(c, &change.applied_to(c))
    }

    /// Whether `next` is a member set to change to from `c`.
    fn check_members(&self, c: &Configuration, next: &Configuration) -> Result<(), ChangeRefusal> {
        if next.members.len() > MEMBERS_MAX {
            return Err(ChangeRefusal::TooMany);
        }
        if next.data_members() == 0 {
            return Err(ChangeRefusal::NoDataMember);
        }
        // A set that is too small already may stay as small: the change can be what mends it.
        let enough = self.min_in_sync_of(next).min(c.in_sync.len()).max(1);
        if next.in_sync.len() < enough {
            return Err(ChangeRefusal::TooFewInSync);
        }
        Ok(())
    }

    /// Whether a change was asked for that has not ended, or one was found.
    pub(super) fn is_change_under_way(&self) -> bool {
        let is_joint = |c: &Configuration| !c.previous.is_empty();
        self.change.is_some() || self.newest().is_some_and(is_joint)
    }

    /// The member that is being added and that no configuration names yet.
    pub(super) fn newcomer(&self) -> Option<MemberId> {
        let change = self.change.filter(|change| !change.is_proposed)?;
        change.add.map(|member| member.id)
    }

    /// The configuration that changes the members, once the newcomer may be proposed. It is in sync in the
    /// same configuration, and a removed member is not any more.
    pub(super) fn with_members_changed(&self, c: &Configuration) -> Option<Configuration> {
        let change = self.change.filter(|change| !change.is_proposed)?;
        if let Some(member) = change.add {
            let peer = self.peers.iter().find(|p| p.member.id == member.id)?;
            let is_fit = match member.role {
                // R5.
                Role::Data => peer.is_ready(),
                Role::Witness => peer.usable(),
            };
            if !is_fit {
                return None;
            }
        }
        // The in-sync set may have become smaller meanwhile: then the change waits for it.
        let next = change.applied_to(c);
        self.check_members(c, &next).is_ok().then_some(next)
    }

    /// A configuration was committed: whether it ended a change.
    pub(super) fn note_members(&mut self, before: &Configuration, effects: &mut Effects<P>) {
        let Some(c) = &self.committed else { return };
        let is_new = !before.previous.is_empty() || before.members != c.members;
        if !is_new || !(c.previous.is_empty() || is_broken(Fault::DropEarly)) {
            return;
        }
        let mut was = before.members.iter().chain(&before.previous);
        let removed = was.find(|m| c.role_of(m.id).is_none()).map(|m| m.id);
        if c.previous.is_empty() {
            self.change = None;
            if let Some(n) = removed.and_then(|id| self.index(id)) {
                self.retire(n);
            }
        }
        effects.push_back(Effect::MembersChanged { removed });
    }

    /// A change that has not been proposed does not take place.
    pub(super) fn end_change(&mut self, reason: ChangeRefusal, effects: &mut Effects<P>) {
        let Some(change) = self.change.take_if(|change| !change.is_proposed) else {
            return;
        };
        let newcomer = change.add.and_then(|member| self.index(member.id));
        if let Some(n) = newcomer {
            self.retire(n);
        }
        effects.push_back(Effect::MembersChangeRefused { reason });
    }

    /// A member that the shell is to connect to; the one that is known already where there is one.
    fn add_peer(&mut self, member: Member, effects: &mut Effects<P>) -> Option<usize> {
        if let Some(n) = self.index(member.id) {
            self.peers[n].member = member;
            return Some(n);
        }
        let free = self.peers.iter().position(|p| p.retired);
        let n = match free {
            Some(n) => {
                // B6: what the one before it holds still counts as held.
                let lost = self.peers[n].lost;
                self.peers[n] = Peer::new(member);
                self.peers[n].lost = lost;
                n
            }
            None if self.peers.len() < PEERS_MAX => {
                self.peers.push(Peer::new(member));
                self.peers.len() - 1
            }
            None => return None,
        };
        effects.push_back(Effect::Connect { member: member.id });
        Some(n)
    }

    /// A1: members that a configuration names are fenced too. There is room for all of any two
    /// configurations and for as many others; of more, those that come last are left out.
    pub(super) fn learn_members(&mut self, c: &Configuration, effects: &mut Effects<P>) {
        if is_broken(Fault::ForgetFound) {
            return;
        }
        for member in c.members.iter().chain(&c.previous) {
            if self.index(member.id).is_none() {
                self.add_peer(*member, effects);
            }
        }
    }

    /// Forgets a member that no configuration names any more. Its place is taken by the next newcomer.
    fn retire(&mut self, n: usize) {
        self.reads.forget(n);
        self.resync_source_lost(n);
        let peer = &mut self.peers[n];
        peer.disconnect(self.seen);
        let lost = peer.lost.max(peer.took);
        *peer = Peer {
            retired: true,
            lost,
            ..Peer::new(Member {
                id: MemberId::default(),
                role: peer.member.role,
            })
        };
    }
}
