use super::*;

const DEVICE: DeviceId = DeviceId([3; 16]);

fn key(replica: u32, nonce: u64, extent: u64) -> IndexKey {
    IndexKey {
        replica,
        nonce,
        extent: ExtentIndex(extent),
    }
}

fn value(slot: u32) -> IndexValue {
    IndexValue {
        slot,
        position_max: 77,
        lsn: 5,
        torn: slot % 2 == 1,
    }
}

fn load(folder: &Path, device: DeviceId) -> (SledIndex, Option<u64>, Vec<(IndexKey, IndexValue)>) {
    let mut index = SledIndex::new(folder, device, Box::new(|| {})).expect("the folder is made");
    let mut entries = Vec::new();
    let covered = index.load(&mut |k, v| entries.push((k, v))).unwrap_or(None);
    (index, covered, entries)
}

fn wait(index: &mut SledIndex, covers: u64) {
    while index.covered().expect("the index works") < covers {
        std::thread::yield_now();
    }
}

fn filled(folder: &Path) {
    let (mut index, covered, _) = load(folder, DEVICE);
    assert_eq!(covered, None);
    let changes = (0..100)
        .map(|i| IndexChange::Put(key(1, 9, i), value(i as u32)))
        .collect();
    index.apply(IndexBatch {
        changes,
        covers: 10,
        clear: true,
    });
    index.apply(IndexBatch {
        changes: vec![
            IndexChange::Remove(key(1, 9, 50)),
            IndexChange::Put(key(2, 8, 0), value(200)),
            IndexChange::Put(key(3, 7, 0), value(300)),
            IndexChange::RemoveReplica {
                replica: 3,
                nonce: 7,
            },
        ],
        covers: 12,
        clear: false,
    });
    wait(&mut index, 12);
}

#[test]
fn what_was_applied_is_there_after_opening_again() {
    let folder = tempfile::tempdir().expect("a folder");
    filled(folder.path());
    let (mut index, covered, entries) = load(folder.path(), DEVICE);
    assert_eq!(covered, Some(12));
    assert_eq!(entries.len(), 100);
    assert!(entries.contains(&(key(1, 9, 99), value(99))));
    assert!(entries.contains(&(key(2, 8, 0), value(200))));
    let changes = vec![IndexChange::RemoveReplica {
        replica: 1,
        nonce: 9,
    }];
    index.apply(IndexBatch {
        changes,
        covers: 20,
        clear: false,
    });
    wait(&mut index, 20);
    drop(index);
    assert_eq!(load(folder.path(), DEVICE).2, [(key(2, 8, 0), value(200))]);
}

#[test]
fn an_index_of_another_device_is_not_used() {
    let folder = tempfile::tempdir().expect("a folder");
    filled(folder.path());
    let (_index, covered, entries) = load(folder.path(), DeviceId([4; 16]));
    assert_eq!((covered, entries.len()), (None, 0));
}

#[test]
fn a_database_that_the_process_died_on_is_thrown_away() {
    let folder = tempfile::tempdir().expect("a folder");
    filled(folder.path());
    File::create(folder.path().join("opening")).expect("the marker");
    assert_eq!(load(folder.path(), DEVICE).1, None);
}

#[test]
fn a_database_that_does_not_open_is_an_error_and_can_be_rebuilt() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(database(folder.path()), b"not a folder").expect("a file in its place");
    let mut index = SledIndex::new(folder.path(), DEVICE, Box::new(|| {})).expect("made");
    assert!(index.load(&mut |_, _| {}).is_err());
    std::fs::remove_file(database(folder.path())).expect("the file goes");
    index.apply(IndexBatch {
        changes: Vec::new(),
        covers: 3,
        clear: true,
    });
    wait(&mut index, 3);
}

#[test]
fn sizes_of_entries_are_checked() {
    assert_eq!(decode_key(&[0; KEY_BYTES - 1]), None);
    assert_eq!(decode_value(&[0; VALUE_BYTES + 1]), None);
    assert_eq!(decode_key(&encode_key(&key(1, 2, 3))), Some(key(1, 2, 3)));
    assert_eq!(decode_value(&encode_value(&value(5))), Some(value(5)));
}

#[test]
fn an_index_that_lost_an_entry_is_not_used() {
    let folder = tempfile::tempdir().expect("a folder");
    filled(folder.path());
    let db = open(folder.path()).expect("opens");
    db.remove(encode_key(&key(1, 9, 7))).expect("removed");
    db.flush().expect("flushed");
    drop(db);
    assert_eq!(load(folder.path(), DEVICE).1, None);
}
