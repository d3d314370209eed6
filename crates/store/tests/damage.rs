//! Flipped bits, failing devices, damaged indexes: a clear error, never wrong data.

mod common;

use ashlar_replication::message::{ReadError, TornBlocks};
use ashlar_replication::values::{Block, Position};
use ashlar_store::fake::{FakeDevice, Loss, Random};
use ashlar_store::{
    Existing, FormatError, OpenError, Outcome, Part, ReplicaSlot, Store, StoreError,
};
use common::{Data, MIB, Rig, block_content, format_options, open_options, position, range};

const SIZE: u64 = 24 * MIB;

/// A store with data at home, in the journal, and a hole.
fn filled() -> (Rig, ReplicaSlot, Vec<(u64, Position, u64)>) {
    let mut rig = Rig::new(SIZE);
    let slot = rig.create(1, 4096);
    let mut want = Vec::new();
    rig.write(slot, position(1, 1), 0, &(1..=256).collect::<Vec<_>>());
    want.extend((0..256).map(|b| (b, position(1, 1), b + 1)));
    rig.write(slot, position(1, 2), 256, &[1001]);
    want.push((256, position(1, 2), 1001));
    rig.zero(slot, position(1, 3), 512, 256);
    want.extend((512..768).map(|b| (b, position(1, 3), 0)));
    rig.flush();
    rig.write(slot, position(1, 4), 256, &[1002]);
    want.retain(|(b, _, _)| *b != 256);
    want.push((256, position(1, 4), 1002));
    rig.write(slot, position(1, 5), 800, &[1003]);
    want.push((800, position(1, 5), 1003));
    (rig, slot, want)
}

/// Sequence numbers and places of the records in the ring, ascending.
fn records(dev: &mut FakeDevice) -> Vec<(u64, u64)> {
    let mut records = Vec::new();
    for page in dev.used_pages(Part::Blocks) {
        let mut head = [0; 40];
        dev.peek(Part::Blocks, page, &mut head);
        if &head[..8] == b"ASHLARJR" {
            let lsn = u64::from_le_bytes(head[32..40].try_into().expect("eight bytes"));
            records.push((lsn, page));
        }
    }
    records.sort_unstable();
    records
}

/// Reads everything: right data or an error.
fn nothing_is_wrong(rig: &mut Rig, slot: ReplicaSlot, want: &[(u64, Position, u64)]) -> usize {
    let mut errors = 0;
    for (block, p, seed) in want {
        match rig.read(slot, *block, 1) {
            Ok(outcome) => {
                assert_eq!(outcome.positions[0], *p, "block {block}");
                match outcome.buf {
                    Some(buf) => assert!(buf[..] == block_content(*seed)[..], "block {block}"),
                    None => assert_eq!(*seed, 0, "block {block}"),
                }
            }
            Err(_) => errors += 1,
        }
    }
    errors
}

#[test]
fn a_flipped_bit_in_data_is_a_checksum_error_with_the_position_and_can_be_repaired() {
    let (rig, slot, want) = filled();
    let mut dev = rig.dev.image();
    let mut page = vec![0; 4096];
    let place = dev
        .used_pages(Part::Blocks)
        .into_iter()
        .rfind(|offset| {
            dev.peek(Part::Blocks, *offset, &mut page);
            page == block_content(8)
        })
        .expect("block 7 is at home");
    dev.flip(Part::Blocks, place + 99, 0x40);
    let mut rig = Rig::open(dev, rig.index.image(), rig.options).expect("opens");
    let error = rig.read(slot, 0, 16).expect_err("found");
    assert_eq!(
        error,
        ReadError::Checksum {
            block: Block(7),
            position: position(1, 1)
        }
    );
    assert_eq!(nothing_is_wrong(&mut rig, slot, &want), 1);
    let data = Data::of(&[8]);
    let p = position(1, 1);
    rig.store
        .repair(&mut rig.dev, 900, slot, Block(7), p, data.content())
        .expect("accepted");
    rig.settle();
    assert_eq!(rig.done(900), Ok(()));
    assert_eq!(nothing_is_wrong(&mut rig, slot, &want), 0);
}

#[test]
fn a_flipped_bit_anywhere_never_gives_wrong_data() {
    let (rig, slot, want) = filled();
    let mut random = Random(11);
    let mut pages = rig.dev.used_pages(Part::Blocks);
    // The newest record is the one thing that cannot be told from a write that a crash cut short.
    let newest = *records(&mut rig.dev.image())
        .last()
        .expect("there are records");
    pages.retain(|page| *page != newest.1 && *page != newest.1 + 4096);
    for (n, page) in pages.iter().enumerate() {
        // Data pages are alike; headers and journal pages are tried one by one.
        if n > 80 && n % 16 != 0 {
            continue;
        }
        for with_index in [true, false] {
            let mut dev = rig.dev.image();
            dev.flip(
                Part::Blocks,
                page + random.below(4096),
                1 << random.below(8),
            );
            let index = rig.index.image();
            if !with_index {
                index.delete();
            }
            if let Ok(mut rig) = Rig::open(dev, index, rig.options) {
                // A replica whose record of making is gone would be lost, not wrong.
                if rig.store.replica(slot).is_some() {
                    nothing_is_wrong(&mut rig, slot, &want);
                }
            }
        }
    }
}

#[test]
fn a_damaged_newest_header_is_noticed_with_and_without_the_index() {
    let (mut rig, slot, want) = filled();
    rig.flush();
    let pages = rig.dev.used_pages(Part::Blocks);
    for with_index in [true, false] {
        let mut found = 0;
        for page in &pages {
            let mut dev = rig.dev.image();
            let mut magic = [0; 8];
            dev.peek(Part::Blocks, *page, &mut magic);
            if &magic != b"ASHLAREX" {
                continue;
            }
            found += 1;
            dev.flip(Part::Blocks, page + 700, 1);
            let index = rig.index.image();
            if !with_index {
                index.delete();
            }
            let mut opened = Rig::open(dev, index, rig.options).expect("opens");
            nothing_is_wrong(&mut opened, slot, &want);
            opened.store.check_invariants();
        }
        assert!(found >= 4, "there are headers");
    }
}

#[test]
fn a_damaged_record_that_others_follow_is_not_skipped() {
    let (rig, slot, _) = filled();
    let mut dev = rig.dev.image();
    let records = records(&mut dev);
    let (lsn, page) = records[records.len() - 2];
    dev.flip(Part::Blocks, page + 70, 1);
    match Rig::open(dev, rig.index.image(), rig.options).map(|_| ()) {
        Err(OpenError::JournalDamaged { sequence, .. }) => assert_eq!(sequence, lsn),
        other => panic!("expected a damaged journal, found {other:?}"),
    }
    let _ = slot;
}

#[test]
fn an_index_that_is_gone_stale_or_wrong_is_rebuilt() {
    let (mut rig, slot, want) = filled();
    rig.flush();
    let stale = rig.index.image();
    rig.write(slot, position(1, 6), 3, &[5000]);
    rig.write(slot, position(1, 7), 1024, &[5001]);
    rig.flush();
    let mut want: Vec<_> = want.into_iter().filter(|(b, _, _)| *b != 3).collect();
    want.push((3, position(1, 6), 5000));
    want.push((1024, position(1, 7), 5001));
    let gone = rig.index.image();
    gone.delete();
    let failed = rig.index.image();
    failed.fail();
    for index in [stale, gone, failed] {
        let mut opened = Rig::open(rig.dev.image(), index, rig.options).expect("opens");
        assert_eq!(nothing_is_wrong(&mut opened, slot, &want), 0);
    }
    // Entries that name another slot: noticed when the header is first looked at.
    let wrong = rig.index.image();
    wrong.corrupt(|key, mut value| {
        value.slot = if value.slot == 0 { 1 } else { value.slot - 1 };
        Some((key, value))
    });
    let mut opened = Rig::open(rig.dev.image(), wrong, rig.options).expect("opens");
    nothing_is_wrong(&mut opened, slot, &want);
    assert!(opened.store.is_closed() || nothing_is_wrong(&mut opened, slot, &want) == 0);
    opened.settle();
    let index = opened.index.image();
    let mut opened = Rig::open(opened.dev.image(), index, rig.options).expect("opens again");
    assert_eq!(nothing_is_wrong(&mut opened, slot, &want), 0);
}

#[test]
fn after_any_failed_write_or_sync_the_device_is_closed_and_opens_again() {
    for nth in 0..60 {
        let (mut rig, slot, _) = filled();
        rig.dev.fail_at(nth);
        let mut done = Vec::new();
        for i in 0..20 {
            let seeds: Vec<u64> = (0..if i % 3 == 0 { 32 } else { 2 })
                .map(|s| i * 100 + s + 7)
                .collect();
            let data = Data::of(&seeds);
            let token = rig.token();
            let p = position(1, 6 + i);
            let r = range(i * 40 % 200, seeds.len() as u32);
            match rig
                .store
                .write(&mut rig.dev, token, slot, p, r, data.content())
            {
                Ok(()) => {}
                Err(error) => {
                    assert_eq!(error, StoreError::Closed);
                    assert!(rig.store.is_closed());
                    break;
                }
            }
            rig.settle();
            match rig.done.remove(&token) {
                Some(Outcome::Done(Ok(()))) => done.push((p, r.start.0, seeds)),
                Some(Outcome::Done(Err(StoreError::Closed))) => assert!(rig.store.is_closed()),
                other => panic!("a write ended with {other:?}"),
            }
            rig.store.start_home_write(&mut rig.dev);
        }
        rig.settle();
        if rig.store.is_closed() {
            let result = rig
                .store
                .read(&mut rig.dev, 5000, slot, range(0, 1), TornBlocks::Refuse);
            assert_eq!(result, Err(StoreError::Closed));
        }
        rig.dev.crash(Loss::Sectors);
        let (dev, index) = (rig.dev.image(), rig.index.image());
        let mut rig = Rig::open(dev, index, open_options()).expect("opens again");
        if let Some((p, start, seeds)) = done.last() {
            let last = rig.store.replica(slot).expect("there").state.last;
            assert!(last >= *p, "{last:?} after {p:?}");
            // Blocks of the newest write that was reported are there, or newer ones.
            let outcome = rig.read(slot, *start, seeds.len() as u32);
            if let Ok(outcome) = outcome {
                assert!(outcome.positions.iter().all(|found| found >= p));
            }
        }
    }
}

#[test]
fn a_read_that_fails_is_an_error_and_closes_nothing() {
    let (mut rig, slot, want) = filled();
    rig.flush();
    rig = rig.reopen();
    // The header is in memory then, so that the next operation is the read of the data.
    rig.read(slot, 0, 1).expect("good");
    rig.dev.fail_at(0);
    assert_eq!(rig.read(slot, 0, 4).map(|_| ()), Err(ReadError::Device));
    assert!(!rig.store.is_closed());
    assert_eq!(nothing_is_wrong(&mut rig, slot, &want), 0);
}

#[test]
fn newer_formats_truncated_devices_and_foreign_data_are_named() {
    let mut dev = FakeDevice::new(SIZE, None, 1);
    let error = Rig::open(dev.image(), Default::default(), open_options()).map(|_| ());
    assert!(matches!(error, Err(OpenError::NotAStore { found: None })));
    Store::format(&mut dev, format_options()).expect("blank");
    let mut short = dev.image();
    short.set_size_bytes(Part::Blocks, SIZE - MIB);
    let error = Rig::open(short, Default::default(), open_options()).map(|_| ());
    assert!(
        matches!(error, Err(OpenError::Truncated { .. })),
        "{error:?}"
    );
    let mut again = dev.image();
    let error = Store::format(&mut again, format_options());
    assert!(matches!(&error, Err(FormatError::Foreign(what)) if what.contains("Ashlar")));
    let mut options = format_options();
    options.existing = Existing::Destroy;
    Store::format(&mut again, options).expect("destroyed on request");
    let mut one = dev.image();
    one.flip(Part::Blocks, 12, 1);
    Rig::open(one, Default::default(), open_options()).expect("the second superblock serves");
    let mut foreign = FakeDevice::new(SIZE, None, 1);
    foreign.flip(Part::Blocks, 0x438, 0x53);
    foreign.flip(Part::Blocks, 0x439, 0xef);
    let error = Store::format(&mut foreign, options).expect_err("refused");
    assert!(error.to_string().contains("ext4"), "{error}");
    let mut tiny = FakeDevice::new(2 * MIB, None, 1);
    let error = Store::format(&mut tiny, format_options()).expect_err("refused");
    assert!(matches!(error, FormatError::TooSmall { .. }), "{error}");
    let mut wide = FakeDevice::new(SIZE, None, 1);
    wide.set_logical_block_bytes(16384);
    assert!(Store::format(&mut wide, format_options()).is_err());
}
