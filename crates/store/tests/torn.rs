//! Large writes that a crash cuts short.

mod common;

use ashlar_replication::values::Block;
use ashlar_store::fake::Loss;
use common::{Data, MIB, Rig, block_content, position, range};

/// Blocks of a write that goes in place.
const COUNT: u32 = 20;

/// A store whose large write at (1, 2) was announced, and cut short in place by a crash that kept some sectors.
fn torn_store() -> Rig {
    for stop in 0..20 {
        let mut rig = Rig::new(8 * MIB);
        let slot = rig.create(1, 512);
        let old: Vec<u64> = (1..=u64::from(COUNT)).collect();
        rig.write(slot, position(1, 1), 0, &old);
        rig.dev.stop_after(stop);
        let new = Data::of(&(101..=100 + u64::from(COUNT)).collect::<Vec<_>>());
        let token = rig.token();
        rig.store
            .write(
                &mut rig.dev,
                token,
                slot,
                position(1, 2),
                range(0, COUNT),
                new.content(),
            )
            .expect("is accepted");
        while rig.step() {}
        rig.dev.crash(Loss::Sectors);
        let rig = rig.reopen();
        let replica = rig.store.replica(slot).expect("is there");
        if !replica.torn.is_empty() {
            assert_eq!(replica.state.last, position(1, 1), "it does not count");
            return rig;
        }
    }
    panic!("no crash tears the write");
}

#[test]
fn a_write_that_was_torn_and_comes_again_replaces_the_torn_blocks() {
    let mut rig = torn_store();
    let slot = rig.store.lookup(common::volume(1)).expect("is there");
    let again: Vec<u64> = (101..=100 + u64::from(COUNT)).collect();
    rig.write(slot, position(1, 2), 0, &again);
    assert!(rig.store.replica(slot).expect("is there").torn.is_empty());
    for block in 0..u64::from(COUNT) {
        let read = rig.read(slot, block, 1).expect("is readable");
        assert_eq!(read.positions, [position(1, 2)]);
        let buf = read.buf.as_ref().expect("is no hole");
        assert!(buf[..] == block_content(101 + block)[..], "block {block}");
    }
    let mut rig = rig.reopen();
    assert!(rig.store.replica(slot).expect("is there").torn.is_empty());
    assert!(rig.read(slot, 0, COUNT).is_ok());
}

#[test]
fn a_torn_block_is_listed_until_it_is_written() {
    let mut rig = torn_store();
    let slot = rig.store.lookup(common::volume(1)).expect("is there");
    let torn = rig.store.replica(slot).expect("is there").torn.clone();
    let Block(first) = torn[0].block;
    rig.write(slot, position(1, 2), first, &[7]);
    let left = &rig.store.replica(slot).expect("is there").torn;
    assert_eq!(left[..], torn[1..]);
}
