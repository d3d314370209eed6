//! In steady state a shard serves 4 KiB writes without an allocation. The client runs on the test's
//! own thread, whose allocations are not those of the shard's.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ashlar_engine::EngineKind;
use support::client::{Client, write_bytes};
use support::{BOTH, Shard, block, epoch, volume};

/// Threads that can be told apart; more than a test process has.
const THREADS_MAX: usize = 256;
static COUNTS: [AtomicU64; THREADS_MAX] = [const { AtomicU64::new(0) }; THREADS_MAX];
static IDS: [AtomicU64; THREADS_MAX] = [const { AtomicU64::new(0) }; THREADS_MAX];
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static THREAD: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Counts per thread.
struct Counting;

fn count() {
    let thread = THREAD.with(|thread| {
        if thread.get() == usize::MAX {
            thread.set(THREADS.fetch_add(1, Ordering::Relaxed) % THREADS_MAX);
            let id = rustix::thread::gettid().as_raw_nonzero().get();
            IDS[thread.get()].store(id as u64, Ordering::Relaxed);
        }
        thread.get()
    });
    COUNTS[thread].fetch_add(1, Ordering::Relaxed);
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(memory, layout, new_size) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations so far of the threads with that name.
fn allocations_of(name: &str) -> u64 {
    let threads = THREADS.load(Ordering::Relaxed).min(THREADS_MAX);
    let named = (0..threads).filter(|n| {
        let id = IDS[*n].load(Ordering::Relaxed);
        let found = std::fs::read_to_string(format!("/proc/self/task/{id}/comm"));
        found.is_ok_and(|found| found.trim() == name)
    });
    named.map(|n| COUNTS[n].load(Ordering::Relaxed)).sum()
}

/// Writes in a window that is counted, and windows.
const WINDOW: u64 = 128;
const WINDOWS: u64 = 60;

/// Sends prepared writes `depth` at a time.
fn run(client: &mut Client, frames: &[Vec<u8>], first: u64, depth: usize) {
    let mut sequence = first;
    for batch in frames.chunks(depth) {
        batch.iter().for_each(|frame| client.send(frame));
        sequence += batch.len() as u64;
        client.wait_applied(0, sequence - 1);
    }
}

fn count_allocations(kind: EngineKind, depth: usize) {
    let shard = Shard::start(kind);
    let member = shard.create(volume(1), 1024);
    let mut client = shard.client();
    client.attach(volume(1), member, epoch(1), 0);
    // Blocks all over the volume, again and again; the journal wraps and is written home meanwhile.
    let prepare = |from: u64| -> Vec<_> {
        (from..from + WINDOW)
            .map(|n| write_bytes(0, n, n * 37 % 1024, &block(n)))
            .collect()
    };
    let mut windows = Vec::new();
    for n in 0..2 * WINDOWS {
        let from = 1 + n * WINDOW;
        let frames = prepare(from);
        let before = allocations_of("ashlar-shard");
        run(&mut client, &frames, from, depth);
        windows.push(allocations_of("ashlar-shard") - before);
    }
    // The first half is the way to the steady state.
    let steady = windows.split_off(WINDOWS as usize);
    assert_eq!(shard.metrics().counters.writes, 2 * WINDOWS * WINDOW);
    let none = steady.iter().filter(|allocations| **allocations == 0);
    let all: u64 = steady.iter().sum();
    // A home write allocates for the index; it serves hundreds of writes.
    assert!(
        none.count() * 2 > steady.len() && all * 4 < WINDOWS * WINDOW,
        "allocations in windows of {WINDOW} writes at depth {depth} with {kind}: {steady:?}"
    );
    println!("windows of {WINDOW} writes at depth {depth} with {kind}: {steady:?}");
}

#[test]
fn between_home_writes_the_shard_allocates_nothing() {
    // One after the other: the threads are told apart by their name.
    for kind in BOTH {
        for depth in [1, 16] {
            count_allocations(kind, depth);
        }
    }
}
