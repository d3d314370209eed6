//! The header of a replica: what a member keeps durably besides its blocks. The same image travels in
//! journal records.

use ashlar_replication::configuration::{
    Ack, Configuration, Generation, Member, MemberState, ReplicaState, Role,
};
use ashlar_replication::values::{
    DeviceId, Epoch, EpochNumber, MEMBERS_MAX, MemberId, Pass, Position, VolumeId,
};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::page::{self, PREFIX};

pub(crate) const MAGIC: &[u8; 8] = b"ASHLARVO";

/// Everything durable of a replica but its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeImage {
    pub volume: VolumeId,
    pub key: [u8; 32],
    pub ack: Ack,
    pub size_blocks: u64,
    pub evicted: bool,
    pub state: MemberState,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawMember {
    device: [u8; 16],
    nonce: U64,
    role: u8,
    reserved: [u8; 7],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawImage {
    volume: [u8; 16],
    member_device: [u8; 16],
    member_nonce: U64,
    key: [u8; 32],
    size_blocks: U64,
    role: u8,
    ack: u8,
    evicted: u8,
    /// 0 complete, 1 resyncing.
    state: u8,
    reserved: [u8; 4],
    resync_epoch: U32,
    resync_pass: U32,
    promised_number: U32,
    reserved_2: [u8; 4],
    promised_nonce: U64,
    last_pass_epoch: U32,
    last_pass: U32,
    last: U64,
    /// 0: no configuration; the fields below are zero then.
    has_configuration: u8,
    configuration_ack: u8,
    members: u8,
    previous: u8,
    in_sync: u8,
    reserved_3: [u8; 3],
    epoch: U32,
    reserved_4: [u8; 4],
    generation: U64,
    member_list: [RawMember; MEMBERS_MAX],
    previous_list: [RawMember; MEMBERS_MAX],
    in_sync_list: [RawMember; MEMBERS_MAX],
}

/// Bytes of an encoded [`VolumeImage`], a multiple of 8.
pub(crate) const IMAGE_BYTES: usize = size_of::<RawImage>();

fn raw_role(role: Role) -> u8 {
    match role {
        Role::Data => 0,
        Role::Witness => 1,
    }
}

fn raw_ack(ack: Ack) -> u8 {
    match ack {
        Ack::Majority => 0,
        Ack::All => 1,
    }
}

fn role(raw: u8) -> Option<Role> {
    [Role::Data, Role::Witness].get(usize::from(raw)).copied()
}

fn ack(raw: u8) -> Option<Ack> {
    [Ack::Majority, Ack::All].get(usize::from(raw)).copied()
}

fn raw_member(id: MemberId, role: Role) -> RawMember {
    RawMember {
        device: id.device.0,
        nonce: U64::new(id.nonce),
        role: raw_role(role),
        reserved: [0; 7],
    }
}

fn put_members(list: &mut [RawMember; MEMBERS_MAX], members: &[Member]) -> u8 {
    for (raw, member) in list.iter_mut().zip(members) {
        *raw = raw_member(member.id, member.role);
    }
    members.len() as u8
}

fn members(list: &[RawMember; MEMBERS_MAX], count: u8) -> Option<Vec<Member>> {
    list.get(..usize::from(count))?
        .iter()
        .map(|raw| {
            let id = MemberId {
                device: DeviceId(raw.device),
                nonce: raw.nonce.get(),
            };
            Some(Member {
                id,
                role: role(raw.role)?,
            })
        })
        .collect()
}

fn epoch_number(raw: U32) -> Option<EpochNumber> {
    let number = EpochNumber(raw.get());
    (number <= EpochNumber::MAX).then_some(number)
}

fn encode_configuration(raw: &mut RawImage, configuration: &Configuration) {
    raw.has_configuration = 1;
    raw.configuration_ack = raw_ack(configuration.ack);
    raw.epoch = U32::new(configuration.epoch.0);
    raw.generation = U64::new(configuration.generation.0);
    raw.members = put_members(&mut raw.member_list, &configuration.members);
    raw.previous = put_members(&mut raw.previous_list, &configuration.previous);
    raw.in_sync = configuration.in_sync.len() as u8;
    for (slot, id) in raw.in_sync_list.iter_mut().zip(&configuration.in_sync) {
        *slot = raw_member(*id, Role::Data);
    }
}

fn decode_configuration(raw: &RawImage) -> Option<Option<Configuration>> {
    if raw.has_configuration == 0 {
        return Some(None);
    }
    let in_sync = members(&raw.in_sync_list, raw.in_sync)?;
    let configuration = Configuration {
        epoch: epoch_number(raw.epoch)?,
        generation: Generation(raw.generation.get()),
        ack: ack(raw.configuration_ack)?,
        members: members(&raw.member_list, raw.members)?,
        previous: members(&raw.previous_list, raw.previous)?,
        in_sync: in_sync.into_iter().map(|m| m.id).collect(),
    };
    configuration.check().is_ok().then_some(Some(configuration))
}

impl VolumeImage {
    /// Appends [`IMAGE_BYTES`] bytes.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let state = &self.state;
        let mut raw = RawImage::new_zeroed();
        raw.volume = self.volume.0;
        raw.member_device = state.id.device.0;
        raw.member_nonce = U64::new(state.id.nonce);
        raw.key = self.key;
        raw.size_blocks = U64::new(self.size_blocks);
        raw.role = raw_role(state.role);
        raw.ack = raw_ack(self.ack);
        raw.evicted = u8::from(self.evicted);
        if let ReplicaState::Resyncing { epoch, pass } = state.state {
            raw.state = 1;
            raw.resync_epoch = U32::new(epoch.0);
            raw.resync_pass = U32::new(pass.0);
        }
        raw.promised_number = U32::new(state.promised.number.0);
        raw.promised_nonce = U64::new(state.promised.nonce);
        raw.last_pass_epoch = U32::new(state.last_pass.0.0);
        raw.last_pass = U32::new(state.last_pass.1.0);
        raw.last = U64::new(state.last.pack());
        if let Some(configuration) = &state.configuration {
            encode_configuration(&mut raw, configuration);
        }
        out.extend_from_slice(raw.as_bytes());
    }

    /// Reads an image; None where a field is outside its range.
    pub(crate) fn decode(bytes: &[u8]) -> Option<VolumeImage> {
        let (raw, _) = RawImage::ref_from_prefix(bytes).ok()?;
        let state = match raw.state {
            0 => ReplicaState::Complete,
            1 => ReplicaState::Resyncing {
                epoch: epoch_number(raw.resync_epoch)?,
                pass: Pass(raw.resync_pass.get()),
            },
            _ => return None,
        };
        Some(VolumeImage {
            volume: VolumeId(raw.volume),
            key: raw.key,
            ack: ack(raw.ack)?,
            size_blocks: raw.size_blocks.get(),
            evicted: raw.evicted != 0,
            state: MemberState {
                id: MemberId {
                    device: DeviceId(raw.member_device),
                    nonce: raw.member_nonce.get(),
                },
                role: role(raw.role)?,
                promised: Epoch {
                    number: epoch_number(raw.promised_number)?,
                    nonce: raw.promised_nonce.get(),
                },
                configuration: decode_configuration(raw)?,
                state,
                last_pass: (
                    epoch_number(raw.last_pass_epoch)?,
                    Pass(raw.last_pass.get()),
                ),
                last: Position::unpack(raw.last.get()),
            },
        })
    }
}

/// Writes a volume header page; None marks the slot as free.
pub(crate) fn encode_page(
    page: &mut [u8],
    device: DeviceId,
    version: u64,
    lsn: u64,
    image: Option<&VolumeImage>,
) {
    page.fill(0);
    if let Some(image) = image {
        page[PREFIX] = 1;
        let mut bytes = Vec::with_capacity(IMAGE_BYTES);
        image.encode(&mut bytes);
        page[PREFIX + 8..PREFIX + 8 + IMAGE_BYTES].copy_from_slice(&bytes);
    }
    page::seal(page, MAGIC, 0, device, version, lsn);
}

/// What a valid page says.
pub(crate) enum Slot {
    Free,
    Live(Box<VolumeImage>),
    /// The CRC is right and a field is not: written by something else than this code.
    Impossible,
}

/// Reads a valid page.
pub(crate) fn decode_page(page: &[u8]) -> Slot {
    match page[PREFIX] {
        0 => Slot::Free,
        1 => VolumeImage::decode(&page[PREFIX + 8..])
            .map_or(Slot::Impossible, |image| Slot::Live(Box::new(image))),
        _ => Slot::Impossible,
    }
}
