//! Reading and writing the variable part of frames. Nothing here allocates before it has checked
//! that the bytes are there.

use ashlar_replication::configuration::{
    Ack, Configuration, Generation, Member, MemberState, ReplicaState, Role,
};
use ashlar_replication::message::BlockPosition;
use ashlar_replication::values::{
    Block, DeviceId, Epoch, EpochNumber, ExtentIndex, MEMBERS_MAX, MemberId, Pass, Position,
};

use crate::error::WireError;
use crate::frame::{BLOCK_MAX, TORN_MAX};

const MEMBER_ID_BYTES: u32 = 24;
const EPOCH_BYTES: u32 = 12;
const PROOF_BYTES: u32 = 32;
/// A block or extent and eight bytes about it.
pub(crate) const ENTRY_BYTES: u32 = 16;
/// Volume, member, epoch and proof.
pub(crate) const FENCE_BYTES: u32 = 16 + MEMBER_ID_BYTES + EPOCH_BYTES + PROOF_BYTES;
/// A count and that many member ids.
pub(crate) const MEMBER_LIST_BYTES_MAX: u32 = 1 + MEMBERS_MAX as u32 * MEMBER_ID_BYTES;
/// Epoch, generation, ack; members and previous members with their roles; in-sync set.
pub(crate) const CONFIGURATION_BYTES_MAX: u32 =
    4 + 8 + 1 + 2 * (MEMBER_LIST_BYTES_MAX + MEMBERS_MAX as u32) + MEMBER_LIST_BYTES_MAX;
/// Id, role, promise, configuration, state, last pass, last.
const MEMBER_STATE_BYTES_MAX: u32 =
    MEMBER_ID_BYTES + 1 + EPOCH_BYTES + 1 + CONFIGURATION_BYTES_MAX + 9 + 8 + 8;
/// Epoch, member state, size, torn blocks, proof.
pub(crate) const PROMISE_BYTES_MAX: u32 =
    EPOCH_BYTES + MEMBER_STATE_BYTES_MAX + 8 + 4 + TORN_MAX as u32 * ENTRY_BYTES + PROOF_BYTES;

/// A cursor over a body.
pub(crate) struct Reader<'a> {
    kind: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(kind: &'static str, rest: &'a [u8]) -> Reader<'a> {
        Reader { kind, rest }
    }

    pub(crate) fn malformed(&self, what: &'static str) -> WireError {
        WireError::Body {
            kind: self.kind,
            what,
        }
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], WireError> {
        let Some((taken, rest)) = self.rest.split_at_checked(count) else {
            return Err(self.malformed("the body is too short"));
        };
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, WireError> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// How many entries of `bytes` each are left; an error when they do not end with the body.
    pub(crate) fn entries_left(&self, bytes: usize) -> Result<usize, WireError> {
        if !self.rest.len().is_multiple_of(bytes) {
            return Err(self.malformed("a list ends in the middle of an entry"));
        }
        Ok(self.rest.len() / bytes)
    }

    pub(crate) fn end(&self) -> Result<(), WireError> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(self.malformed("the body is too long"))
        }
    }

    pub(crate) fn epoch_number(&mut self) -> Result<EpochNumber, WireError> {
        let number = EpochNumber(self.u32()?);
        if number > EpochNumber::MAX {
            return Err(self.malformed("an epoch above 24 bits"));
        }
        Ok(number)
    }

    pub(crate) fn epoch(&mut self) -> Result<Epoch, WireError> {
        Ok(Epoch {
            number: self.epoch_number()?,
            nonce: self.u64()?,
        })
    }

    pub(crate) fn position(&mut self) -> Result<Position, WireError> {
        Ok(Position::unpack(self.u64()?))
    }

    /// A block that a volume can have.
    pub(crate) fn block(&self, index: u64) -> Result<Block, WireError> {
        let block = Block(index);
        if block > BLOCK_MAX {
            return Err(self.malformed("a block beyond any volume"));
        }
        Ok(block)
    }

    /// An extent that a volume can have.
    pub(crate) fn extent(&self, index: u64) -> Result<ExtentIndex, WireError> {
        let extent = ExtentIndex(index);
        if extent > BLOCK_MAX.extent() {
            return Err(self.malformed("an extent beyond any volume"));
        }
        Ok(extent)
    }

    /// `count` blocks with a position each.
    pub(crate) fn positions(&mut self, count: usize) -> Result<Vec<BlockPosition>, WireError> {
        let mut positions = Vec::with_capacity(count);
        for entry in self.bytes(count * ENTRY_BYTES as usize)?.chunks_exact(16) {
            let mut entry = Reader::new(self.kind, entry);
            let index = entry.u64()?;
            positions.push(BlockPosition {
                block: self.block(index)?,
                position: entry.position()?,
            });
        }
        Ok(positions)
    }

    /// Skips what a later version may have appended.
    pub(crate) fn skip_rest(&mut self) {
        self.rest = &[];
    }

    pub(crate) fn member_id(&mut self) -> Result<MemberId, WireError> {
        Ok(MemberId {
            device: DeviceId(self.array()?),
            nonce: self.u64()?,
        })
    }

    pub(crate) fn member_ids(&mut self) -> Result<Vec<MemberId>, WireError> {
        let count = usize::from(self.u8()?);
        if count > MEMBERS_MAX {
            return Err(self.malformed("too many members"));
        }
        (0..count).map(|_| self.member_id()).collect()
    }

    fn role(&mut self) -> Result<Role, WireError> {
        match self.u8()? {
            1 => Ok(Role::Data),
            2 => Ok(Role::Witness),
            _ => Err(self.malformed("an unknown role")),
        }
    }

    fn members(&mut self) -> Result<Vec<Member>, WireError> {
        let count = usize::from(self.u8()?);
        if count > MEMBERS_MAX {
            return Err(self.malformed("too many members"));
        }
        (0..count)
            .map(|_| {
                Ok(Member {
                    id: self.member_id()?,
                    role: self.role()?,
                })
            })
            .collect()
    }

    pub(crate) fn configuration(&mut self) -> Result<Configuration, WireError> {
        let epoch = self.epoch_number()?;
        let generation = Generation(self.u64()?);
        let ack = match self.u8()? {
            1 => Ack::Majority,
            2 => Ack::All,
            _ => return Err(self.malformed("an unknown kind of acknowledgement")),
        };
        let members = self.members()?;
        let previous = self.members()?;
        let in_sync = self.member_ids()?;
        let configuration = Configuration {
            epoch,
            generation,
            ack,
            members,
            previous,
            in_sync,
        };
        configuration
            .check()
            .map_err(|_| self.malformed("an impossible configuration"))?;
        Ok(configuration)
    }

    pub(crate) fn member_state(&mut self) -> Result<MemberState, WireError> {
        let id = self.member_id()?;
        let role = self.role()?;
        let promised = self.epoch()?;
        let configuration = match self.u8()? {
            0 => None,
            1 => Some(self.configuration()?),
            _ => return Err(self.malformed("neither a configuration nor none")),
        };
        let state = match self.u8()? {
            1 => ReplicaState::Complete,
            2 => ReplicaState::Resyncing {
                epoch: self.epoch_number()?,
                pass: Pass(self.u32()?),
            },
            _ => return Err(self.malformed("an unknown state")),
        };
        let last_pass = (self.epoch_number()?, Pass(self.u32()?));
        let last = self.position()?;
        Ok(MemberState {
            id,
            role,
            promised,
            configuration,
            state,
            last_pass,
            last,
        })
    }
}

pub(crate) fn put_epoch(out: &mut Vec<u8>, epoch: Epoch) {
    out.extend_from_slice(&epoch.number.0.to_le_bytes());
    out.extend_from_slice(&epoch.nonce.to_le_bytes());
}

pub(crate) fn put_member_id(out: &mut Vec<u8>, id: MemberId) {
    out.extend_from_slice(&id.device.0);
    out.extend_from_slice(&id.nonce.to_le_bytes());
}

pub(crate) fn put_member_ids(out: &mut Vec<u8>, ids: &[MemberId]) {
    assert!(ids.len() <= MEMBERS_MAX);
    out.push(ids.len() as u8);
    ids.iter().for_each(|id| put_member_id(out, *id));
}

fn put_role(out: &mut Vec<u8>, role: Role) {
    out.push(match role {
        Role::Data => 1,
        Role::Witness => 2,
    });
}

fn put_members(out: &mut Vec<u8>, members: &[Member]) {
    assert!(members.len() <= MEMBERS_MAX);
    out.push(members.len() as u8);
    for member in members {
        put_member_id(out, member.id);
        put_role(out, member.role);
    }
}

pub(crate) fn put_configuration(out: &mut Vec<u8>, configuration: &Configuration) {
    out.extend_from_slice(&configuration.epoch.0.to_le_bytes());
    out.extend_from_slice(&configuration.generation.0.to_le_bytes());
    out.push(match configuration.ack {
        Ack::Majority => 1,
        Ack::All => 2,
    });
    put_members(out, &configuration.members);
    put_members(out, &configuration.previous);
    put_member_ids(out, &configuration.in_sync);
}

pub(crate) fn put_member_state(out: &mut Vec<u8>, state: &MemberState) {
    put_member_id(out, state.id);
    put_role(out, state.role);
    put_epoch(out, state.promised);
    match &state.configuration {
        None => out.push(0),
        Some(configuration) => {
            out.push(1);
            put_configuration(out, configuration);
        }
    }
    match state.state {
        ReplicaState::Complete => out.push(1),
        ReplicaState::Resyncing { epoch, pass } => {
            out.push(2);
            out.extend_from_slice(&epoch.0.to_le_bytes());
            out.extend_from_slice(&pass.0.to_le_bytes());
        }
    }
    out.extend_from_slice(&state.last_pass.0.0.to_le_bytes());
    out.extend_from_slice(&state.last_pass.1.0.to_le_bytes());
    out.extend_from_slice(&state.last.pack().to_le_bytes());
}
