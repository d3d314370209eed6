//! A writer that goes on through everything, at depth 1, and remembers its longest stall.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};

use crate::bench::{Offsets, RANDWRITE, Recorder, Summary, noise};
use crate::nbd::NbdClient;

const WRITE_BYTES: usize = 4096;

/// The part of the volume that the writer owns.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
}

/// The writer's thread.
pub struct Writer {
    thread: Option<JoinHandle<anyhow::Result<()>>>,
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
}

struct Seen {
    recorder: Recorder,
    longest: Duration,
    writes: u64,
    last_done: Instant,
}

/// What the writer saw since it was last asked.
#[derive(Clone, Debug)]
pub struct Lap {
    /// Rates and latencies.
    pub summary: Summary,
    /// The longest time between two acknowledgements, or without one until now.
    pub longest_stall: Duration,
    /// Acknowledged writes.
    pub writes: u64,
}

impl Writer {
    /// Starts to write random blocks of `region`.
    ///
    /// # Errors
    /// When it cannot connect.
    pub fn start(uri: &str, region: Region) -> anyhow::Result<Writer> {
        let mut client = NbdClient::connect(uri)?;
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(Mutex::new(Seen {
            recorder: Recorder::new(WRITE_BYTES as u64),
            longest: Duration::ZERO,
            writes: 0,
            last_done: Instant::now(),
        }));
        let (stop_flag, shared) = (stop.clone(), seen.clone());
        let thread = std::thread::Builder::new()
            .name("writer".into())
            .spawn(move || {
                let mut offsets = Offsets::new(RANDWRITE, region.bytes, WRITE_BYTES as u64, 17);
                let mut data = noise(WRITE_BYTES, 17);
                let mut count: u64 = 0;
                while !stop_flag.load(Ordering::Acquire) {
                    count += 1;
                    data[..8].copy_from_slice(&count.to_le_bytes());
                    let start = Instant::now();
                    client.write_at(region.offset + offsets.next_offset(), &data)?;
                    let mut seen = shared
                        .lock()
                        .map_err(|_| anyhow!("the other side panicked"))?;
                    let now = seen.recorder.record_since(start);
                    let since_last = now.saturating_duration_since(seen.last_done);
                    seen.recorder.ran(since_last);
                    seen.longest = seen.longest.max(since_last);
                    seen.last_done = now;
                    seen.writes += 1;
                }
                Ok(())
            })?;
        Ok(Writer {
            thread: Some(thread),
            stop,
            seen,
        })
    }

    /// What happened since the last call.
    ///
    /// # Errors
    /// When a write has failed.
    pub fn lap(&mut self) -> anyhow::Result<Lap> {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.stop()?;
            return Err(anyhow!("the writer ended by itself"));
        }
        let mut seen = self
            .seen
            .lock()
            .map_err(|_| anyhow!("the writer panicked"))?;
        let lap = Lap {
            summary: seen.recorder.take_interval(),
            longest_stall: seen.longest.max(seen.last_done.elapsed()),
            writes: seen.writes,
        };
        seen.longest = Duration::ZERO;
        seen.writes = 0;
        Ok(lap)
    }

    /// Ends it after the write in flight.
    ///
    /// # Errors
    /// When a write has failed.
    pub fn stop(&mut self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        thread
            .join()
            .map_err(|_| anyhow!("the writer panicked"))?
            .context("a write failed")
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}
