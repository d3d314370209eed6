//! What a store does when nothing goes wrong.

mod common;

use ashlar_replication::digest::positions_digest;
use ashlar_replication::message::{Content, CopyStep};
use ashlar_replication::values::{Block, Position};
use ashlar_store::fake::{FakeDevice, Loss};
use ashlar_store::{FormatError, Outcome, ReplicaSlot, Store, StoreError};
use common::{Data, MIB, Rig, format_options, open_options, position, range, spec, state, volume};

const SIZE: u64 = 24 * MIB;

fn seeds(from: u64, count: usize) -> Vec<u64> {
    (from..from + count as u64).collect()
}

fn expected(p: Position, from: u64, count: usize) -> Vec<(Position, u64)> {
    seeds(from, count).into_iter().map(|s| (p, s)).collect()
}

#[test]
fn a_small_write_is_read_back_from_memory_from_home_and_after_reopening() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    rig.write(slot, position(1, 1), 10, &seeds(100, 3));
    rig.expect_blocks(slot, 10, &expected(position(1, 1), 100, 3));
    rig.expect_blocks(slot, 9, &[(Position::ZERO, 0), (position(1, 1), 100)]);
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, 10, &expected(position(1, 1), 100, 3));
    rig.flush();
    rig.expect_blocks(slot, 10, &expected(position(1, 1), 100, 3));
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, 10, &expected(position(1, 1), 100, 3));
    assert_eq!(rig.store.replica(slot).unwrap().state.last, position(1, 1));
    assert_eq!(rig.store.lookup(volume(1)), Some(slot));
}

#[test]
fn a_small_write_costs_one_device_write() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    rig.write(slot, position(1, 1), 0, &[1]);
    let before = rig.dev.started;
    rig.write(slot, position(1, 2), 7, &[2]);
    let after = rig.dev.started;
    assert_eq!(
        (after.0 - before.0, after.1 - before.1, after.2 - before.2),
        (0, 1, 0)
    );
}

#[test]
fn writes_that_wait_share_one_journal_record() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    let data = Data::of(&[5]);
    let records = rig.store.counters().journal_records;
    for i in 1..=20 {
        let range = range(i, 1);
        rig.store
            .write(&mut rig.dev, i, slot, position(1, i), range, data.content())
            .unwrap();
    }
    rig.settle();
    assert_eq!(rig.store.counters().journal_records, records + 1);
    (1..=20).for_each(|token| rig.expect_done(token));
}

#[test]
fn a_large_write_is_written_once_in_place_and_read_back() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    rig.write(slot, position(1, 1), 256, &seeds(1, 256));
    assert_eq!(rig.store.counters().in_place_bytes, MIB);
    rig.expect_blocks(slot, 256, &expected(position(1, 1), 1, 256));
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, 256, &expected(position(1, 1), 1, 256));
    assert_eq!(rig.store.replica(slot).unwrap().state.last, position(1, 1));
    rig.flush();
    rig.expect_blocks(slot, 256, &expected(position(1, 1), 1, 256));
    assert_eq!(rig.store.counters().in_place_bytes, 0);
}

#[test]
fn small_and_large_writes_of_the_same_blocks_end_with_the_newest() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    rig.write(slot, position(1, 1), 0, &seeds(1000, 4));
    rig.write(slot, position(1, 2), 0, &seeds(2000, 32));
    rig.write(slot, position(1, 3), 2, &seeds(3000, 1));
    rig.flush();
    rig.write(slot, position(1, 4), 1, &seeds(4000, 32));
    let want = [
        (position(1, 2), 2000),
        (position(1, 4), 4000),
        (position(1, 4), 4001),
    ];
    rig.expect_blocks(slot, 0, &want);
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, 0, &want);
    rig.flush();
    rig.expect_blocks(slot, 0, &want);
}

#[test]
fn a_discarded_extent_frees_its_slot_and_keeps_its_position() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    let free = rig.store.usage().extents_free;
    rig.write(slot, position(1, 1), 256, &seeds(1, 256));
    assert_eq!(rig.store.usage().extents_free, free - 1);
    rig.zero(slot, position(1, 2), 256, 256);
    rig.expect_blocks(slot, 256, &[(position(1, 2), 0); 256]);
    rig.flush();
    assert_eq!(rig.store.usage().extents_free, free);
    assert_eq!(rig.store.replica(slot).unwrap().allocated_extents, 0);
    rig.expect_blocks(slot, 300, &[(position(1, 2), 0)]);
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, 300, &[(position(1, 2), 0)]);
    rig.index.delete();
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, 300, &[(position(1, 2), 0)]);
    rig.write(slot, position(1, 3), 300, &[9]);
    rig.expect_blocks(slot, 299, &[(position(1, 2), 0), (position(1, 3), 9)]);
    rig.flush();
    rig.index.delete();
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, 299, &[(position(1, 2), 0), (position(1, 3), 9)]);
}

#[test]
fn zeros_on_an_extent_that_was_never_written_leave_positions_behind() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    rig.zero(slot, position(1, 1), 0, 256);
    assert_eq!(rig.store.replica(slot).unwrap().allocated_extents, 0);
    rig.zero(slot, position(1, 2), 256, 5);
    for _ in 0..2 {
        assert_eq!(rig.positions(slot, 0).positions.len(), 256);
        assert_eq!(rig.positions(slot, 1).positions.len(), 5);
        rig.expect_blocks(slot, 260, &[(position(1, 2), 0), (Position::ZERO, 0)]);
        rig.flush();
        rig = rig.reopen();
    }
}

#[test]
fn a_copy_applies_only_to_blocks_with_the_expected_position() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    rig.write(slot, position(1, 1), 0, &seeds(10, 4));
    rig.write(slot, position(1, 2), 2, &[99]);
    rig.flush();
    let mut rig = rig.reopen();
    let step = CopyStep {
        expected: position(1, 1),
        position: position(2, 1),
    };
    let data = Data::of(&seeds(50, 4));
    let changed = rig.copy(slot, 0, &[step; 4], data.content());
    assert_eq!(changed, [(2, position(1, 2))]);
    let new = position(2, 1);
    rig.expect_blocks(
        slot,
        0,
        &[(new, 50), (new, 51), (position(1, 2), 99), (new, 53)],
    );
    assert_eq!(rig.store.replica(slot).unwrap().state.last, position(1, 2));
}

#[test]
fn a_large_copy_with_one_changed_block_applies_the_rest() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    rig.write(slot, position(1, 1), 0, &seeds(10, 256));
    rig.write(slot, position(1, 2), 100, &[99]);
    let step = CopyStep {
        expected: position(1, 1),
        position: position(2, 1),
    };
    let data = Data::of(&seeds(500, 256));
    let changed = rig.copy(slot, 0, &[step; 256], data.content());
    assert_eq!(changed, [(100, position(1, 2))]);
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, 99, &[(position(2, 1), 599), (position(1, 2), 99)]);
    rig.expect_blocks(slot, 255, &[(position(2, 1), 755)]);
}

#[test]
fn equalise_sets_any_position_and_does_not_move_last() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    rig.write(slot, position(3, 7), 0, &seeds(10, 2));
    let data = Data::of(&[70, 71]);
    let positions = [position(1, 1), position(2, 5)];
    let token = rig.token();
    let range = range(0, 2);
    rig.store
        .equalise(&mut rig.dev, token, slot, range, &positions, data.content())
        .unwrap();
    rig.settle();
    rig.expect_done(token);
    rig.expect_blocks(slot, 0, &[(position(1, 1), 70), (position(2, 5), 71)]);
    assert_eq!(rig.store.replica(slot).unwrap().state.last, position(3, 7));
}

#[test]
fn an_extent_that_is_equalised_to_never_written_stays_so_without_the_index() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    for start in [0, 256] {
        rig.write(slot, position(1, 1 + start), start, &seeds(1, 256));
    }
    rig.zero(slot, position(1, 300), 256, 256);
    rig.flush();
    for start in [0, 256] {
        let token = rig.token();
        let positions = [Position::ZERO; 256];
        let range = range(start, 256);
        rig.store
            .equalise(&mut rig.dev, token, slot, range, &positions, Content::Zeros)
            .unwrap();
        rig.settle();
        rig.expect_done(token);
    }
    rig.flush();
    rig.index.delete();
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, 0, &[(Position::ZERO, 0); 256]);
    rig.expect_blocks(slot, 256, &[(Position::ZERO, 0); 256]);
}

#[test]
fn a_repair_needs_exactly_the_recorded_position() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    rig.write(slot, position(1, 1), 5, &[8]);
    let data = Data::of(&[8]);
    for (token, p) in [(1000, position(1, 2)), (1001, position(1, 1))] {
        rig.store
            .repair(&mut rig.dev, token, slot, Block(5), p, data.content())
            .unwrap();
    }
    rig.settle();
    assert_eq!(rig.done(1000), Err(StoreError::PositionChanged));
    assert_eq!(rig.done(1001), Ok(()));
}

#[test]
fn a_write_does_not_take_back_a_block_with_a_later_position_of_the_epoch() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    let step = CopyStep {
        expected: Position::ZERO,
        position: position(1, 9),
    };
    let data = Data::of(&[77]);
    assert!(rig.copy(slot, 1, &[step], data.content()).is_empty());
    rig.write(slot, position(1, 1), 0, &seeds(10, 3));
    let first = position(1, 1);
    let want = [(first, 10), (position(1, 9), 77), (first, 12)];
    rig.expect_blocks(slot, 0, &want);
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, 0, &want);
    assert_eq!(rig.store.replica(slot).unwrap().state.last, first);
}

#[test]
fn digests_and_lists_are_the_same_for_cold_and_warm_headers() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 65536);
    rig.write(slot, position(1, 1), 0, &seeds(1, 2));
    rig.zero(slot, position(1, 2), 256 * 3, 256);
    rig.write(slot, position(2, 1), 256 * 5 + 1, &seeds(1, 100));
    let digests = rig.digests(slot, 0, 100);
    assert_eq!(digests.iter().map(|d| d.0).collect::<Vec<_>>(), [0, 3, 5]);
    assert_eq!(
        digests[1].1,
        positions_digest((0..256).map(|_| position(1, 2)))
    );
    let all = rig.list_above(slot, Position::ZERO, 0);
    let above = rig.list_above(slot, position(1, 9), 0);
    assert_eq!(above.positions.len(), 100);
    assert_eq!(above.next, None);
    // More than the limit: it goes on from where it says.
    assert_eq!(all.next, Some(Block(256 * 5)));
    rig.flush();
    let mut rig = rig.reopen();
    assert_eq!(rig.digests(slot, 0, 100), digests);
    let mut rig = rig.reopen();
    assert_eq!(rig.list_above(slot, position(1, 9), 0), above);
    assert_eq!(rig.list_above(slot, Position::ZERO, 0), all);
}

#[test]
fn a_full_device_refuses_new_extents_and_goes_on_with_the_old_ones() {
    let mut rig = Rig::new(12 * MIB);
    let slot = rig.create(1, 256 * 100);
    let free = rig.store.usage().extents_free;
    assert!(free > 2, "the test needs a few extents, found {free}");
    for i in 0..free {
        rig.write(slot, position(1, i + 1), i * 256, &[i + 1]);
    }
    let last = position(1, free);
    let data = Data::of(&[1]);
    let result = rig.store.write(
        &mut rig.dev,
        9999,
        slot,
        position(1, free + 1),
        range(free * 256, 1),
        data.content(),
    );
    assert_eq!(result, Err(StoreError::DeviceFull));
    assert_eq!(rig.store.replica(slot).unwrap().state.last, last);
    rig.settle();
    rig.write(slot, position(1, free + 1), 1, &[42]);
    rig.expect_blocks(slot, 1, &[(position(1, free + 1), 42)]);
    // Discarding an extent makes room again.
    rig.zero(slot, position(1, free + 2), 256, 256);
    rig.flush();
    rig.write(slot, position(1, free + 3), free * 256, &[43]);
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, free * 256, &[(position(1, free + 3), 43)]);
    rig.expect_blocks(slot, 256, &[(position(1, free + 2), 0)]);
}

#[test]
fn deleting_a_replica_frees_everything_and_its_slot_can_be_used_again() {
    let mut rig = Rig::new(SIZE);
    let free = rig.store.usage().extents_free;
    let slot = rig.create(1, 4096);
    rig.write(slot, position(1, 1), 0, &seeds(1, 256));
    rig.zero(slot, position(1, 2), 512, 256);
    rig.flush();
    rig.store.delete_replica(&mut rig.dev, 500, slot).unwrap();
    assert_eq!(rig.store.lookup(volume(1)), None);
    rig.settle();
    rig.expect_done(500);
    rig.flush();
    rig.settle();
    assert_eq!(rig.store.usage().extents_free, free);
    let token = rig.token();
    let again = rig
        .store
        .create_replica(&mut rig.dev, token, spec(1, 77, 4096))
        .unwrap();
    rig.settle();
    rig.expect_blocks(again, 0, &[(Position::ZERO, 0)]);
    rig.expect_blocks(again, 512, &[(Position::ZERO, 0)]);
    rig.index.delete();
    let mut rig = rig.reopen();
    rig.expect_blocks(again, 0, &[(Position::ZERO, 0)]);
    rig.expect_blocks(again, 512, &[(Position::ZERO, 0)]);
    assert_eq!(rig.store.usage().extents_free, free);
}

#[test]
fn growing_evicting_and_states_survive_reopening() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 100);
    assert_eq!(
        rig.store.grow_replica(&mut rig.dev, 1, slot, 50),
        Err(StoreError::BadRange)
    );
    rig.store
        .grow_replica(&mut rig.dev, 901, slot, 1000)
        .unwrap();
    rig.store
        .set_evicted(&mut rig.dev, 902, slot, true)
        .unwrap();
    let mut next = state(1);
    next.promised.number.0 = 5;
    next.last = position(4, 4);
    rig.store
        .set_state(&mut rig.dev, 903, slot, next.clone())
        .unwrap();
    rig.settle();
    for round in 0..3 {
        let replica = rig.store.replica(slot).unwrap();
        assert_eq!(
            (replica.size_blocks, replica.evicted),
            (1000, true),
            "round {round}"
        );
        assert_eq!(replica.state, next);
        if round > 0 {
            rig.flush();
        }
        rig = rig.reopen();
    }
}

#[test]
fn ranges_outside_the_volume_and_wrong_checksums_are_refused() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 300);
    let data = Data::of(&[1, 2]);
    let p = position(1, 1);
    let mut write = |r, content| rig.store.write(&mut rig.dev, 1, slot, p, r, content);
    assert_eq!(
        write(range(299, 2), data.content()),
        Err(StoreError::BadRange)
    );
    assert_eq!(
        write(range(255, 2), data.content()),
        Err(StoreError::BadRange)
    );
    assert_eq!(
        write(range(u64::MAX, 2), data.content()),
        Err(StoreError::BadRange)
    );
    assert_eq!(
        write(range(0, 0), Content::Zeros),
        Err(StoreError::BadRange)
    );
    assert_eq!(
        write(range(0, 1), data.content()),
        Err(StoreError::BadRange)
    );
    let mut bad = Data::of(&[1, 2]);
    bad.data[5000] ^= 1;
    assert_eq!(write(range(0, 2), bad.content()), Err(StoreError::Checksum));
    let unknown = ReplicaSlot(3);
    let result = rig
        .store
        .write(&mut rig.dev, 1, unknown, p, range(0, 1), Content::Zeros);
    assert_eq!(result, Err(StoreError::UnknownReplica));
    assert_eq!(rig.store.replica(slot).unwrap().state.last, Position::ZERO);
}

#[test]
fn a_journal_on_its_own_device_works_and_belongs_to_its_store() {
    let mut rig = Rig::on(FakeDevice::new(SIZE, Some(8 * MIB), 1), open_options());
    let slot = rig.create(1, 4096);
    rig.write(slot, position(1, 1), 0, &[1]);
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, 0, &[(position(1, 1), 1)]);
    rig.flush();
    rig.dev.crash(Loss::All);
    let mut rig = rig.reopen();
    rig.expect_blocks(slot, 0, &[(position(1, 1), 1)]);
    let again = Store::format(&mut rig.dev, format_options());
    assert!(matches!(again, Err(FormatError::Foreign(_))));
}

#[test]
fn the_journal_wraps_many_times_without_losing_anything() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    let mut last = std::collections::BTreeMap::new();
    let mut random = ashlar_store::fake::Random(3);
    for sequence in 1..=1500 {
        let count = 1 + random.below(16) as usize;
        let start = random.below(8) * 256 + random.below(240);
        rig.write(
            slot,
            position(1, sequence),
            start,
            &seeds(sequence * 1000, count),
        );
        for i in 0..count as u64 {
            last.insert(start + i, (position(1, sequence), sequence * 1000 + i));
        }
        if sequence % 400 == 0 {
            rig = rig.reopen();
        }
    }
    assert!(rig.store.counters().checkpoints > 0 || rig.store.usage().journal_used_bytes > 0);
    for (block, want) in last {
        rig.expect_blocks(slot, block, &[want]);
    }
}

#[test]
fn completions_of_a_replica_come_in_the_order_of_submission() {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    let large = Data::of(&seeds(1, 64));
    let small = Data::of(&[5]);
    rig.store
        .write(
            &mut rig.dev,
            1,
            slot,
            position(1, 1),
            range(0, 64),
            large.content(),
        )
        .unwrap();
    rig.store
        .write(
            &mut rig.dev,
            2,
            slot,
            position(1, 2),
            range(3, 1),
            small.content(),
        )
        .unwrap();
    // The record is durable, the large write is not in place yet.
    rig.step();
    assert!(
        rig.done.is_empty(),
        "nothing is reported before the large write is durable"
    );
    rig.settle();
    assert!(matches!(rig.done.remove(&1), Some(Outcome::Done(Ok(())))));
    assert!(matches!(rig.done.remove(&2), Some(Outcome::Done(Ok(())))));
    rig.expect_blocks(slot, 2, &[(position(1, 1), 3), (position(1, 2), 5)]);
}
