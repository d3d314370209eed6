//! A 4 KiB write allocates nothing in steady state.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::VecDeque;
use std::io;

use ashlar_engine::IoBuf;
use ashlar_store::{Device, Geometry, MemoryIndex, OpenOptions, Outcome, Part, Persist, Store};
use common::{Data, MIB, format_options, position, range, spec};

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Keeps its buffers and its completions, as an engine does.
struct Reusing {
    bytes: Vec<u8>,
    spare: Vec<IoBuf>,
    done: VecDeque<(u64, usize, Option<IoBuf>)>,
}

impl Device for Reusing {
    fn geometry(&self, part: Part) -> Option<Geometry> {
        let size_bytes = self.bytes.len() as u64;
        (part == Part::Blocks).then_some(Geometry {
            size_bytes,
            logical_block_bytes: 512,
        })
    }
    fn read_blocking(&mut self, _: Part, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        buf.copy_from_slice(&self.bytes[offset as usize..offset as usize + buf.len()]);
        Ok(())
    }
    fn write_blocking(&mut self, _: Part, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.bytes[offset as usize..offset as usize + buf.len()].copy_from_slice(buf);
        Ok(())
    }
    fn sync_blocking(&mut self, _: Part) -> io::Result<()> {
        Ok(())
    }
    fn read(&mut self, part: Part, token: u64, offset: u64, mut buf: IoBuf, len: usize) {
        self.read_blocking(part, offset, &mut buf[..len])
            .expect("in memory");
        self.done.push_back((token, len, Some(buf)));
    }
    fn write(&mut self, part: Part, token: u64, offset: u64, buf: IoBuf, len: usize, _: Persist) {
        self.write_blocking(part, offset, &buf[..len])
            .expect("in memory");
        self.done.push_back((token, len, Some(buf)));
    }
    fn sync(&mut self, _: Part, token: u64) {
        self.done.push_back((token, 0, None));
    }
    fn buffer(&mut self, len: usize) -> IoBuf {
        match self.spare.iter().position(|b| b.capacity() >= len) {
            Some(place) => {
                let mut buf = self.spare.swap_remove(place);
                buf.set_len(len);
                buf
            }
            None => IoBuf::new(len),
        }
    }
    fn recycle(&mut self, buf: IoBuf) {
        self.spare.push(buf);
    }
}

fn turn(store: &mut Store, dev: &mut Reusing) {
    loop {
        store.submit(dev);
        let Some((token, len, buf)) = dev.done.pop_front() else {
            break;
        };
        store.device_completed(dev, token, Ok(len), buf);
    }
}

#[test]
fn a_small_write_allocates_nothing_in_steady_state() {
    let mut dev = Reusing {
        bytes: vec![0; 64 << 20],
        spare: Vec::with_capacity(64),
        done: VecDeque::with_capacity(64),
    };
    let mut options = format_options();
    options.journal_bytes = Some(16 * MIB);
    Store::format(&mut dev, options).expect("blank");
    let index = Box::new(MemoryIndex::new());
    let mut store = Store::open(&mut dev, index, OpenOptions::default()).expect("opens");
    let slot = store
        .create_replica(&mut dev, 1, spec(1, 1, 8192))
        .expect("room");
    turn(&mut store, &mut dev);
    let data = Data::of(&[77]);
    let mut sequence = 0;
    let mut write = |store: &mut Store, dev: &mut Reusing| {
        sequence += 1;
        let block = range(sequence * 37 % 4096, 1);
        let p = position(1, sequence);
        store
            .write(dev, sequence, slot, p, block, data.content())
            .expect("accepted");
        turn(store, dev);
        let mut done = false;
        while let Some(completion) = store.next_completion() {
            done |= matches!(completion.outcome, Outcome::Done(Ok(())));
        }
        assert!(done);
    };
    let settle = |store: &mut Store, dev: &mut Reusing| {
        while store.has_dirty() {
            store.start_home_write(dev);
            turn(store, dev);
        }
    };
    (0..3000).for_each(|_| write(&mut store, &mut dev));
    settle(&mut store, &mut dev);
    (0..1500).for_each(|_| write(&mut store, &mut dev));
    settle(&mut store, &mut dev);
    let before = COUNT.with(Cell::get);
    (0..1000).for_each(|_| write(&mut store, &mut dev));
    let allocations = COUNT.with(Cell::get) - before;
    assert_eq!(allocations, 0, "in 1000 writes");
}
