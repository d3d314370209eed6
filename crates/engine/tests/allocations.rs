//! A small message allocates nothing in steady state.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

use ashlar_engine::{
    Access, EngineKind, Event, FileId, FileOptions, IoBuf, Persist, SocketId, open_direct,
};
use ashlar_replication::values::Time;
use common::Rig;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes everything on; the counter does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

for_both_kinds!(a_message_of_4_kib_and_its_write_allocate_nothing);

fn until_received(rig: &mut Rig, events: &mut Vec<Event>, id: SocketId, len: usize) {
    while rig.engine.input(id).len() < len {
        events.clear();
        rig.engine.poll(Time::NEVER, events).unwrap();
    }
}

fn round(rig: &mut Rig, events: &mut Vec<Event>, ends: (SocketId, SocketId), file: FileId) {
    let (client, server) = ends;
    let buf: IoBuf = rig.engine.buffer(4096);
    let payload = rig.engine.share(buf);
    rig.engine.send(client, &[1; 64]);
    rig.engine.send_shared(client, payload.clone());
    until_received(rig, events, server, 4096 + 64);
    let mut buf = rig.engine.buffer(4096);
    buf.copy_from_slice(&rig.engine.input(server)[64..]);
    rig.engine.consume(server, 4096 + 64);
    rig.engine.write(file, 7, 0, buf, 4096, Persist::Durable);
    let mut written = false;
    while !written {
        events.clear();
        rig.engine.poll(Time::NEVER, events).unwrap();
        for event in events.drain(..) {
            if let Event::File { buf, result, .. } = event {
                result.unwrap();
                rig.engine.recycle(buf.unwrap());
                written = true;
            }
        }
    }
    rig.engine.send(server, &[2; 64]);
    until_received(rig, events, client, 64);
    rig.engine.consume(client, 64);
}

fn a_message_of_4_kib_and_its_write_allocate_nothing(kind: EngineKind) {
    for place in [env!("CARGO_TARGET_TMPDIR"), "/dev/shm"] {
        let Ok(folder) = tempfile::tempdir_in(Path::new(place)) else {
            continue;
        };
        let path = folder.path().join("blocks");
        std::fs::write(&path, [0; 8192]).unwrap();
        let opened = open_direct(&path, Access::ReadWrite).unwrap();
        let mut rig = Rig::new(kind);
        let durability = opened.durability;
        let file = rig.engine.open_file(opened.fd, FileOptions { durability });
        let ends = rig.pair();
        let mut events = Vec::with_capacity(64);
        for _ in 0..50 {
            round(&mut rig, &mut events, ends, file);
        }
        let before = ALLOCATIONS.get();
        for _ in 0..200 {
            round(&mut rig, &mut events, ends, file);
        }
        assert_eq!(ALLOCATIONS.get() - before, 0);
    }
}
