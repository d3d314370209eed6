//! Random values of everything that a frame carries.

use ashlar_replication::configuration::*;
use ashlar_replication::message::*;
use ashlar_replication::values::*;
use ashlar_wire::{BLOCK_MAX, GoodbyeCode, Hello, Payload, Promise, Welcome};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use super::{payload, refusals};

pub fn epoch_number() -> impl Strategy<Value = EpochNumber> {
    (0..=EpochNumber::MAX.0).prop_map(EpochNumber)
}

pub fn sequence() -> impl Strategy<Value = Sequence> {
    (0..=Sequence::MAX.0).prop_map(Sequence)
}

pub fn position() -> impl Strategy<Value = Position> {
    any::<u64>().prop_map(Position::unpack)
}

pub fn epoch() -> impl Strategy<Value = Epoch> {
    (epoch_number(), any::<u64>()).prop_map(|(number, nonce)| Epoch { number, nonce })
}

pub fn member_id() -> impl Strategy<Value = MemberId> {
    let id = (any::<[u8; 16]>(), any::<u64>());
    id.prop_map(|(device, nonce)| MemberId {
        device: DeviceId(device),
        nonce,
    })
}

fn pass() -> impl Strategy<Value = Pass> {
    any::<u32>().prop_map(Pass)
}

fn id() -> impl Strategy<Value = RequestId> {
    any::<u64>().prop_map(RequestId)
}

fn block() -> impl Strategy<Value = Block> {
    (0..=BLOCK_MAX.0).prop_map(Block)
}

fn extent() -> impl Strategy<Value = ExtentIndex> {
    block().prop_map(Block::extent)
}

/// Mostly short ranges: their content has to be made.
fn range() -> impl Strategy<Value = BlockRange> {
    let count = prop_oneof![9 => 1u32..=12, 1 => 1u32..=256];
    (extent(), count).prop_flat_map(|(extent, count)| {
        let start = 0..=u64::from(256 - count);
        start.prop_map(move |start| BlockRange {
            start: Block(extent.first_block().0 + start),
            count,
        })
    })
}

fn content(count: u32) -> impl Strategy<Value = Content<Payload>> {
    any::<bool>().prop_map(move |zeros| match zeros {
        true => Content::Zeros,
        false => Content::Data(payload(count)),
    })
}

fn block_positions(count_max: usize) -> impl Strategy<Value = Vec<BlockPosition>> {
    let entry = (block(), position());
    let entry = entry.prop_map(|(block, position)| BlockPosition { block, position });
    vec(entry, 0..=count_max)
}

fn role() -> impl Strategy<Value = Role> {
    select(vec![Role::Data, Role::Witness])
}

fn members(min: usize) -> impl Strategy<Value = Vec<Member>> {
    let members = proptest::collection::btree_map(member_id(), role(), min..=MEMBERS_MAX);
    members.prop_map(|m| {
        m.into_iter()
            .map(|(id, role)| Member { id, role })
            .collect()
    })
}

/// Only possible ones, as [`Configuration::check`] has it.
pub fn configuration() -> impl Strategy<Value = Configuration> {
    let members = members(1).prop_map(|mut members| {
        members[0].role = Role::Data;
        members
    });
    let members = members.prop_flat_map(|members| {
        let data = members.iter().filter(|m| m.role == Role::Data);
        let data: Vec<_> = data.map(|m| m.id).collect();
        let count = data.len();
        (Just(members), subsequence(data, 1..=count))
    });
    let ack = select(vec![Ack::Majority, Ack::All]);
    let rest = (epoch_number(), any::<u64>(), ack, self::members(0));
    (members, rest).prop_map(|((members, in_sync), (epoch, generation, ack, previous))| {
        Configuration {
            epoch,
            generation: Generation(generation),
            ack,
            members,
            previous,
            in_sync,
        }
    })
}

fn member_state() -> impl Strategy<Value = MemberState> {
    let resyncing = (epoch_number(), pass());
    let state = prop_oneof![
        Just(ReplicaState::Complete),
        resyncing.prop_map(|(epoch, pass)| ReplicaState::Resyncing { epoch, pass }),
    ];
    let last_pass = (epoch_number(), pass());
    let who = (member_id(), role(), epoch());
    let rest = (option::of(configuration()), state, last_pass, position());
    (who, rest).prop_map(
        |((id, role, promised), (configuration, state, last_pass, last))| MemberState {
            id,
            role,
            promised,
            configuration,
            state,
            last_pass,
            last,
        },
    )
}

pub fn promise() -> impl Strategy<Value = Promise> {
    let size = 0..=BLOCK_MAX.0 + 1;
    let promise = (epoch(), member_state(), size, block_positions(50));
    promise.prop_map(|(epoch, state, size_blocks, torn)| Promise {
        epoch,
        state,
        size_blocks,
        torn,
    })
}

pub fn hello() -> impl Strategy<Value = Hello> {
    any::<(u16, u16, u64, [u8; 16], [u8; 16])>().prop_map(
        |(version_min, version_max, features, nonce, initiator)| Hello {
            version_min,
            version_max,
            features,
            nonce,
            initiator,
        },
    )
}

pub fn welcome() -> impl Strategy<Value = Welcome> {
    let who = any::<(u16, u64, [u8; 16], [u8; 16], [u8; 16])>();
    (who, any::<(u32, u64, u32)>()).prop_map(
        |((version, features, nonce, node, device), (operations_max, bytes_max, lease_ms))| {
            Welcome {
                version,
                features,
                nonce,
                node,
                device: DeviceId(device),
                operations_max,
                bytes_max,
                lease_ms,
            }
        },
    )
}

pub fn goodbye() -> impl Strategy<Value = (GoodbyeCode, String)> {
    let code = (1u64..=5).prop_filter_map("a code", GoodbyeCode::from_number);
    (code, "\\PC{0,120}")
}

fn write() -> impl Strategy<Value = Request<Payload>> {
    let empty = BlockRange {
        start: Block(0),
        count: 0,
    };
    let full = range().prop_flat_map(|range| (Just(range), content(range.count)));
    let write = prop_oneof![4 => full, 1 => Just((empty, Content::Zeros))];
    (sequence(), write).prop_map(|(sequence, (range, content))| Request::Write {
        sequence,
        range,
        content,
    })
}

fn copy() -> impl Strategy<Value = Request<Payload>> {
    let lists = range().prop_flat_map(|range| {
        let step = (position(), position());
        let step = step.prop_map(|(expected, position)| CopyStep { expected, position });
        let count = range.count as usize;
        (Just(range), vec(step, count), content(range.count))
    });
    (id(), pass(), lists).prop_map(|(id, pass, (range, steps, content))| Request::Copy {
        id,
        pass,
        range,
        steps,
        content,
    })
}

fn equalise() -> impl Strategy<Value = Request<Payload>> {
    let lists = range().prop_flat_map(|range| {
        let count = range.count as usize;
        (Just(range), vec(position(), count), content(range.count))
    });
    (id(), lists).prop_map(|(id, (range, positions, content))| Request::Equalise {
        id,
        range,
        positions,
        content,
    })
}

fn store_config() -> impl Strategy<Value = Request<Payload>> {
    let start = vec(member_id(), 0..=MEMBERS_MAX);
    (id(), configuration(), start).prop_map(|(id, configuration, start)| Request::StoreConfig {
        id,
        configuration,
        start,
    })
}

/// Any request but Fence.
pub fn request() -> impl Strategy<Value = Request<Payload>> {
    let torn = select(vec![TornBlocks::Refuse, TornBlocks::Serve]);
    prop_oneof![
        write(),
        store_config(),
        copy(),
        equalise(),
        (id(), pass(), sequence()).prop_map(|(id, pass, sequence)| Request::BeginResync {
            id,
            pass,
            sequence
        }),
        (id(), pass()).prop_map(|(id, pass)| Request::MarkComplete { id, pass }),
        (id(), position()).prop_map(|(id, position)| Request::SetLast { id, position }),
        (id(), range(), torn).prop_map(|(id, range, torn)| Request::Read { id, range, torn }),
        (id(), extent()).prop_map(|(id, extent)| Request::Compare { id, extent }),
        (id(), extent(), 0u32..=4096).prop_map(|(id, from, count)| Request::Digests {
            id,
            from,
            count
        }),
        (id(), position(), block()).prop_map(|(id, floor, from)| Request::ListAbove {
            id,
            floor,
            from
        }),
        (id(), block(), position(), content(1)).prop_map(|(id, block, position, content)| {
            Request::Repair {
                id,
                block,
                position,
                content,
            }
        }),
    ]
}

pub fn refusal() -> impl Strategy<Value = Refusal> {
    prop_oneof![
        epoch_number().prop_map(|promised| Refusal::Fenced { promised }),
        position().prop_map(|last| Refusal::Gap { last }),
        select(refusals()),
    ]
}

fn read_error() -> impl Strategy<Value = ReadError> {
    let checksum = (block(), position());
    prop_oneof![
        checksum.prop_map(|(block, position)| ReadError::Checksum { block, position }),
        (block(), position()).prop_map(|(block, position)| ReadError::Torn { block, position }),
        Just(ReadError::Device),
        refusal().prop_map(ReadError::Refused),
    ]
}

fn read_data() -> impl Strategy<Value = ReadData<Payload>> {
    let count = prop_oneof![9 => 1u32..=12, 1 => 1u32..=256];
    let data = count.prop_flat_map(|count| (vec(position(), count as usize), content(count)));
    data.prop_map(|(positions, content)| ReadData { positions, content })
}

/// Any reply but Promised.
pub fn reply() -> impl Strategy<Value = Reply<Payload>> {
    let list = (id(), block_positions(60));
    let positions = (list, option::of(block()), position());
    let digests = vec((extent(), any::<u64>()), 0..60);
    prop_oneof![
        sequence().prop_map(|sequence| Reply::Applied { sequence }),
        id().prop_map(|id| Reply::Done { id }),
        (id(), refusal()).prop_map(|(id, refusal)| Reply::Refused { id, refusal }),
        (sequence(), refusal())
            .prop_map(|(sequence, refusal)| Reply::WriteRefused { sequence, refusal }),
        (id(), block_positions(60)).prop_map(|(id, changed)| Reply::Copied { id, changed }),
        (id(), read_data()).prop_map(|(id, data)| Reply::Data {
            id,
            result: Ok(data)
        }),
        (id(), read_error()).prop_map(|(id, error)| Reply::Data {
            id,
            result: Err(error)
        }),
        positions.prop_map(|((id, positions), next, last)| Reply::Positions {
            id,
            positions,
            next,
            last,
        }),
        (id(), digests).prop_map(|(id, digests)| Reply::Digests { id, digests }),
    ]
}
