use ashlar_replication::configuration::{
    Ack, Configuration, Generation, Member, MemberState, ReplicaState, Role,
};
use ashlar_replication::values::{
    DeviceId, Epoch, EpochNumber, MemberId, Pass, Position, VolumeId,
};
use proptest::prelude::*;

use super::checkpoint_page::{self, Tail};
use super::extent_header::{self, BlockMap, Owner};
use super::hole_page::{self, HoleOwner};
use super::layout::Layout;
use super::page::{self, PAGE, PAIR, PageState, Pair, Side};
use super::superblock::{self, Found};
use super::volume_header::{self, IMAGE_BYTES, VolumeImage};
use crate::memory::bits::Bits;

const DEVICE: DeviceId = DeviceId([9; 16]);

fn any_page() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), PAGE),
        Just(vec![0; PAGE]),
        // Sealed garbage: the CRC is right and nothing else.
        (
            prop::collection::vec(any::<u8>(), PAGE),
            0..6_usize,
            any::<u32>()
        )
            .prop_map(|(mut page, kind, format)| {
                let magics = [
                    superblock::MAGIC,
                    superblock::JOURNAL_MAGIC,
                    checkpoint_page::MAGIC,
                    extent_header::MAGIC,
                    hole_page::MAGIC,
                    volume_header::MAGIC,
                ];
                page::seal(&mut page, magics[kind], format % 3, DEVICE, 7, 8);
                page
            }),
    ]
}

fn any_position() -> impl Strategy<Value = Position> {
    any::<u64>().prop_map(Position::unpack)
}

fn any_image() -> impl Strategy<Value = VolumeImage> {
    let members = (1..=7_usize, 0..=7_usize, any::<u64>());
    let numbers = (0..1_u32 << 24, any::<u64>(), any::<u64>(), any::<u32>());
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (
        any::<[u8; 16]>(),
        any::<[u8; 32]>(),
        members,
        numbers,
        flags,
        any_position(),
    )
        .prop_map(
            |(
                volume,
                key,
                (count, previous, seed),
                (epoch, nonce, size_blocks, pass),
                flags,
                last,
            )| {
                let member = |i: usize, role| Member {
                    id: MemberId {
                        device: DeviceId([i as u8; 16]),
                        nonce: seed,
                    },
                    role,
                };
                let role = |i: usize| {
                    if i % 3 == 2 {
                        Role::Witness
                    } else {
                        Role::Data
                    }
                };
                let members: Vec<Member> = (0..count).map(|i| member(i, role(i))).collect();
                let ack = if flags.0 { Ack::All } else { Ack::Majority };
                let in_sync = members
                    .iter()
                    .filter(|m| m.role == Role::Data)
                    .map(|m| m.id)
                    .collect();
                let configuration = Configuration {
                    epoch: EpochNumber(epoch),
                    generation: Generation(nonce),
                    ack,
                    previous: (0..previous).map(|i| member(i + 20, Role::Data)).collect(),
                    in_sync,
                    members,
                };
                let resyncing = ReplicaState::Resyncing {
                    epoch: EpochNumber(epoch),
                    pass: Pass(pass),
                };
                VolumeImage {
                    volume: VolumeId(volume),
                    key,
                    ack,
                    size_blocks,
                    evicted: flags.1,
                    state: MemberState {
                        id: MemberId {
                            device: DEVICE,
                            nonce,
                        },
                        role: role(pass as usize % 3),
                        promised: Epoch {
                            number: EpochNumber(epoch),
                            nonce,
                        },
                        configuration: flags.2.then_some(configuration),
                        state: if flags.3 {
                            resyncing
                        } else {
                            ReplicaState::Complete
                        },
                        last_pass: (EpochNumber(epoch), Pass(pass)),
                        last,
                    },
                }
            },
        )
}

proptest! {
    #[test]
    fn no_page_makes_a_parser_panic(a in any_page(), b in any_page()) {
        let _ = superblock::decode(&a, superblock::MAGIC);
        let _ = superblock::decode(&a, superblock::JOURNAL_MAGIC);
        let _ = checkpoint_page::decode(&a, 1 << 20);
        let _ = extent_header::owner(&a);
        let _ = extent_header::block_map(&a);
        let _ = hole_page::decode(&a);
        let _ = volume_header::decode_page(&a);
        let pair = [a, b].concat();
        let found = Pair::examine(&pair, extent_header::MAGIC, DEVICE);
        prop_assert_eq!(found.page(&pair).is_some(), found.side != Side::Neither);
    }

    #[test]
    fn no_head_of_a_device_makes_detection_panic(
        head in prop::collection::vec(any::<u8>(), 0..70_000),
        tail in prop::collection::vec(any::<u8>(), 0..9000),
    ) {
        let _ = crate::signature::detect(&head, &tail);
    }

    #[test]
    fn a_volume_image_comes_back_and_no_bytes_make_it_panic(
        image in any_image(),
        garbage in prop::collection::vec(any::<u8>(), 0..IMAGE_BYTES + 9),
    ) {
        let mut bytes = Vec::new();
        image.encode(&mut bytes);
        prop_assert_eq!(bytes.len(), IMAGE_BYTES);
        let back = VolumeImage::decode(&bytes);
        prop_assert_eq!(back, Some(image));
        let _ = VolumeImage::decode(&garbage);
    }

    #[test]
    fn an_extent_header_comes_back(
        positions in prop::collection::vec(any::<u64>(), 256),
        crcs in prop::collection::vec(any::<u32>(), 256),
        present in any::<[u64; 4]>(),
        torn in any::<[u64; 4]>(),
        lsn in any::<u64>(),
        flip in 0..PAGE * 8,
    ) {
        let map = BlockMap {
            positions: positions.try_into().expect("256"),
            crcs: crcs.try_into().expect("256"),
            present: Bits(present),
            torn: Bits(torn),
        };
        let owner = Owner { volume: VolumeId([1; 16]), nonce: 5, replica: 3, extent: lsn ^ 77 };
        let mut page = vec![0xff; PAGE];
        extent_header::encode(&mut page, DEVICE, lsn, &owner, &map);
        let state = page::check(&page, extent_header::MAGIC, DEVICE);
        prop_assert_eq!(state, PageState::Valid { version: lsn, lsn });
        prop_assert_eq!(extent_header::owner(&page), owner);
        prop_assert_eq!(extent_header::block_map(&page), map);
        page[flip / 8] ^= 1 << (flip % 8);
        let state = page::check(&page, extent_header::MAGIC, DEVICE);
        prop_assert_eq!(state, PageState::Damaged);
    }

    #[test]
    fn a_hole_page_and_a_checkpoint_come_back(
        positions in prop::collection::vec(any::<u64>(), 256),
        lsn in any::<u64>(),
        offset in 0..256_u64,
    ) {
        let positions: [u64; 256] = positions.try_into().expect("256");
        let owner = HoleOwner { volume: VolumeId([1; 16]), nonce: 5, replica: 3, group: lsn };
        let mut page = vec![0xff; PAGE];
        hole_page::encode(&mut page, DEVICE, 4, lsn, &owner, &positions);
        prop_assert_eq!(hole_page::decode(&page), (owner, positions));
        let tail = Tail { lsn, offset: offset * 4096, previous_crc: 99 };
        checkpoint_page::encode(&mut page, DEVICE, tail);
        prop_assert_eq!(checkpoint_page::decode(&page, 1 << 20), Some(tail));
    }

    #[test]
    fn every_planned_layout_is_sound_and_comes_back(
        size in 1_u64 << 20..1 << 44,
        replicas in 1..20_000_u32,
        ring in 1..4000_u64,
        separate in any::<bool>(),
    ) {
        let size = size / 4096 * 4096;
        if let Some(layout) = Layout::plan(size, replicas, separate, ring * 4096) {
            prop_assert!(layout.is_sound(), "{:?}", layout);
            let mut page = vec![0xff; PAGE];
            superblock::encode(&mut page, superblock::MAGIC, DEVICE, &layout);
            let found = superblock::decode(&page, superblock::MAGIC);
            prop_assert_eq!(found, Found::Superblock { device: DEVICE, layout });
        }
    }
}

#[test]
fn a_newer_superblock_is_named_and_a_damaged_version_is_not_taken_for_one() {
    let layout = Layout::plan(64 << 20, 16, false, 4 << 20).expect("it fits");
    let mut page = vec![0; PAGE];
    superblock::encode(&mut page, superblock::MAGIC, DEVICE, &layout);
    let mut newer = page.clone();
    page::seal(&mut newer, superblock::MAGIC, 2, DEVICE, 0, 0);
    assert_eq!(
        superblock::decode(&newer, superblock::MAGIC),
        Found::Newer(2)
    );
    page[12] ^= 2;
    assert_eq!(superblock::decode(&page, superblock::MAGIC), Found::Damaged);
}

#[test]
fn of_two_pages_the_newer_valid_one_counts() {
    let mut pair = vec![0; PAIR];
    let examine = |pair: &[u8]| Pair::examine(pair, hole_page::MAGIC, DEVICE);
    assert_eq!(examine(&pair).side, Side::Neither);
    assert!(!examine(&pair).damaged);
    page::seal(&mut pair[..PAGE], hole_page::MAGIC, 0, DEVICE, 1, 10);
    assert_eq!((examine(&pair).side, examine(&pair).lsn), (Side::A, 10));
    page::seal(&mut pair[PAGE..], hole_page::MAGIC, 0, DEVICE, 2, 20);
    assert_eq!((examine(&pair).side, examine(&pair).lsn), (Side::B, 20));
    pair[PAGE + 100] ^= 1;
    let torn = examine(&pair);
    assert_eq!((torn.side, torn.lsn, torn.damaged), (Side::A, 10, true));
    let other = Pair::examine(&pair, hole_page::MAGIC, DeviceId([1; 16]));
    assert_eq!(other.side, Side::Neither);
}
