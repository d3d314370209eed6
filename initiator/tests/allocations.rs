//! What a 4 KiB request allocates on the initiator's thread once everything has its size: nothing for a
//! write, the list of positions for a read.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use ashlar_initiator::front_end::{
    ByteRequest, Completed, Context, FrontEnd, IoError, Ticket, VolumeHandle, VolumeInfo,
};
use ashlar_initiator::thread::{InitiatorThread, ThreadOptions};
use ashlar_replication::values::Time;
use support::{Cluster, MIB};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes on to the system's allocator; the counter is a plain cell without a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: handed through.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: handed through.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: handed through.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
#[ignore = "not a test: the storage node that the tests start"]
fn storage_node_process() {
    support::storage_node_process();
}

/// Requests of each phase.
const COUNT: u64 = 4000;
/// The first half of a phase brings everything to its size.
const WARM: u64 = COUNT / 2;
/// Requests that are counted together.
const WINDOW: u64 = 100;

/// Writes blocks one after the other, then reads them.
struct Loop {
    volume: Option<VolumeHandle>,
    done: u64,
    before: u64,
    windows: Vec<u64>,
    results: std::sync::mpsc::Sender<Vec<u64>>,
}

impl Loop {
    fn next(&mut self, context: &mut Context<'_>) {
        let Some(volume) = self.volume else { return };
        if self.done > 0 && self.done.is_multiple_of(WINDOW) {
            let allocations = ALLOCATIONS.with(Cell::get) - self.before;
            self.windows.push(allocations);
            if self.done.is_multiple_of(COUNT) {
                let warm = (COUNT - WARM) / WINDOW;
                let windows = self.windows.split_off(self.windows.len() - warm as usize);
                self.results.send(windows).unwrap();
            }
            self.before = ALLOCATIONS.with(Cell::get);
        }
        let offset = self.done % 1000 * 4096;
        let request = match self.done / COUNT {
            0 => ByteRequest::Write {
                offset,
                data: &[7; 4096],
            },
            1 => ByteRequest::Read { offset, len: 4096 },
            _ => return,
        };
        context.submit(volume, Ticket(1), request).unwrap();
    }
}

impl FrontEnd for Loop {
    fn completed(
        &mut self,
        context: &mut Context<'_>,
        _: VolumeHandle,
        _: Ticket,
        result: Result<Completed<'_>, IoError>,
    ) {
        result.unwrap();
        self.done += 1;
        self.next(context);
    }

    fn turn(&mut self, _: &mut Context<'_>) -> Time {
        Time::NEVER
    }

    fn volume_attached(&mut self, context: &mut Context<'_>, volume: VolumeHandle, _: &VolumeInfo) {
        self.volume = Some(volume);
        self.next(context);
    }
}

#[test]
fn a_small_write_allocates_nothing_and_a_small_read_only_its_positions() {
    let cluster = Cluster::start(3, None);
    let spec = cluster.create_volume("data", 64 * MIB, 0);
    let (results, counted) = std::sync::mpsc::channel();
    let front_end = Loop {
        volume: None,
        done: 0,
        before: 0,
        windows: Vec::with_capacity(2 * (COUNT / WINDOW) as usize),
        results,
    };
    let thread = InitiatorThread::new(ThreadOptions::default(), vec![Box::new(front_end)]).unwrap();
    let handle = thread.handle().clone();
    let control = std::thread::spawn(move || {
        handle.attach(spec, Duration::from_secs(20)).unwrap();
        let counts = [(); 2].map(|()| counted.recv_timeout(Duration::from_secs(60)));
        handle.stop(Duration::from_secs(1));
        counts
    });
    thread.run().unwrap();
    let [writes, reads] = control.join().unwrap();
    let (writes, reads) = (writes.unwrap(), reads.unwrap());
    println!("allocations in windows of {WINDOW} writes: {writes:?}, reads: {reads:?}");
    // A member that lags holds more buffers than ever before now and then; that is not one per request.
    let none = writes.iter().filter(|count| **count == 0).count();
    assert!(none * 2 > writes.len(), "allocations of writes: {writes:?}");
    let usual = reads.iter().filter(|count| **count <= WINDOW).count();
    assert!(usual * 2 > reads.len(), "allocations of reads: {reads:?}");
}
