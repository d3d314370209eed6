//! A store in a directory, with the index in sled.

mod common;

use std::os::unix::fs::FileExt;
use std::path::Path;

use ashlar_replication::message::{Content, TornBlocks};
use ashlar_store::{
    FileDevice, FormatError, OpenError, OpenOptions, Outcome, ReplicaSlot, SledIndex, Store,
    directory,
};
use common::{Data, MIB, block_content, format_options, position, range, spec};

struct Files {
    dev: FileDevice,
    store: Store,
    _locks: directory::ClaimLocks,
}

fn format(path: &Path) -> Result<(), FormatError> {
    directory::prepare(path, Some(16 * MIB))?;
    let claim = directory::claim(path, None).expect("nobody holds it");
    Store::format(&mut FileDevice::new(claim.blocks, None), format_options())
}

fn open(path: &Path) -> Result<Files, OpenError> {
    let claim = directory::claim(path, None)?;
    let mut dev = FileDevice::new(claim.blocks, claim.journal);
    let device = Store::identify(&mut dev)?;
    let index = SledIndex::new(&claim.meta, device, Box::new(|| {}))?;
    let store = Store::open(&mut dev, Box::new(index), OpenOptions::default())?;
    Ok(Files {
        dev,
        store,
        _locks: claim.locks,
    })
}

impl Files {
    fn outcome(&mut self, token: u64) -> Outcome {
        loop {
            self.store.submit(&mut self.dev);
            while let Some(done) = self.dev.next_completed() {
                self.store
                    .device_completed(&mut self.dev, done.token, done.result, done.buf);
            }
            while let Some(completion) = self.store.next_completion() {
                if completion.token == token {
                    return completion.outcome;
                }
            }
        }
    }

    fn flush(&mut self) {
        let before = self.store.counters().checkpoints;
        while self.store.has_dirty() || self.store.counters().checkpoints == before {
            self.store.start_home_write(&mut self.dev);
            self.store.submit(&mut self.dev);
            while let Some(done) = self.dev.next_completed() {
                self.store
                    .device_completed(&mut self.dev, done.token, done.result, done.buf);
            }
            std::thread::yield_now();
        }
    }

    fn expect(&mut self, slot: ReplicaSlot, block: u64, seed: u64) {
        self.store
            .read(&mut self.dev, 77, slot, range(block, 1), TornBlocks::Refuse)
            .unwrap();
        match self.outcome(77) {
            Outcome::Read(Ok(outcome)) => {
                assert!(outcome.buf.expect("data")[..] == block_content(seed)[..]);
            }
            other => panic!("expected data, found {other:?}"),
        }
    }
}

fn filled(path: &Path) -> ReplicaSlot {
    format(path).expect("an empty folder is formatted");
    let mut files = open(path).expect("it opens");
    let slot = files
        .store
        .create_replica(&mut files.dev, 1, spec(1, 1, 4096))
        .unwrap();
    assert!(matches!(files.outcome(1), Outcome::Done(Ok(()))));
    for i in 0..5 {
        let data = Data::of(&[i + 10]);
        let range = range(i * 256, 1);
        let p = position(1, i + 1);
        files
            .store
            .write(&mut files.dev, 2, slot, p, range, data.content())
            .unwrap();
        assert!(matches!(files.outcome(2), Outcome::Done(Ok(()))));
        if i == 3 {
            files.flush();
        }
    }
    slot
}

#[test]
fn a_store_in_a_directory_is_there_after_opening_again_with_and_without_its_index() {
    let folder = tempfile::tempdir().expect("a folder");
    let slot = filled(folder.path());
    for _ in 0..2 {
        let mut files = open(folder.path()).expect("it opens");
        (0..5).for_each(|i| files.expect(slot, i * 256, i + 10));
        drop(files);
        std::fs::remove_dir_all(directory::meta_path(folder.path())).expect("the index goes");
    }
}

#[test]
fn a_second_claim_is_refused_and_names_the_holder() {
    let folder = tempfile::tempdir().expect("a folder");
    filled(folder.path());
    let _first = open(folder.path()).expect("it opens");
    match open(folder.path()).map(|_| ()) {
        Err(OpenError::InUse {
            holder: Some(holder),
            ..
        }) => {
            assert!(holder.contains(&std::process::id().to_string()), "{holder}");
        }
        other => panic!("expected a refusal, found {other:?}"),
    }
}

#[test]
fn a_truncated_file_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    filled(folder.path());
    let path = directory::blocks_path(folder.path());
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(path)
        .expect("the file");
    file.set_len(10 * MIB).expect("truncated");
    let error = open(folder.path()).map(|_| ()).expect_err("refused");
    assert!(matches!(error, OpenError::Truncated { .. }), "{error}");
    file.set_len(0).expect("truncated");
    let error = open(folder.path()).map(|_| ()).expect_err("refused");
    assert!(matches!(error, OpenError::NotAStore { .. }), "{error}");
}

#[test]
fn a_file_with_something_in_it_is_not_formatted() {
    let folder = tempfile::tempdir().expect("a folder");
    directory::prepare(folder.path(), Some(16 * MIB)).expect("prepared");
    let path = directory::blocks_path(folder.path());
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(path)
        .expect("the file");
    file.write_all_at(b"LUKS\xba\xbe", 0).expect("written");
    let error = format(folder.path()).expect_err("refused");
    assert!(error.to_string().contains("LUKS"), "{error}");
    let error = open(folder.path()).map(|_| ()).expect_err("refused");
    assert!(error.to_string().contains("LUKS"), "{error}");
}

#[test]
fn a_store_that_is_there_is_not_formatted_again_by_accident() {
    let folder = tempfile::tempdir().expect("a folder");
    filled(folder.path());
    let error = format(folder.path()).expect_err("refused");
    assert!(error.to_string().contains("Ashlar"), "{error}");
}

#[test]
fn zeros_are_read_without_a_buffer() {
    let folder = tempfile::tempdir().expect("a folder");
    let slot = filled(folder.path());
    let mut files = open(folder.path()).expect("it opens");
    let p = position(1, 6);
    files
        .store
        .write(&mut files.dev, 3, slot, p, range(0, 1), Content::Zeros)
        .unwrap();
    assert!(matches!(files.outcome(3), Outcome::Done(Ok(()))));
    files
        .store
        .read(&mut files.dev, 4, slot, range(0, 1), TornBlocks::Refuse)
        .unwrap();
    match files.outcome(4) {
        Outcome::Read(Ok(outcome)) => assert!(outcome.buf.is_none()),
        other => panic!("expected zeros, found {other:?}"),
    }
}
