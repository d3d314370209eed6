//! The raw baseline: what the device does alone, without network and replicas.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::bench::baseline_file;
use crate::bench::pattern::{AlignedBuffer, Mode, Offsets};
use crate::bench::runner::Load;
use crate::bench::statistics::Recorder;

/// Threads at most: more requests in flight than this do not make a device faster.
const THREADS_MAX: usize = 64;

/// One file, `depth` threads that each write and sync, or read, one request after the other.
pub struct Raw {
    file: File,
    mode: Mode,
    workers: Vec<Worker>,
}

struct Worker {
    offsets: Offsets,
    buffer: AlignedBuffer,
    recorder: Recorder,
    operations: u64,
}

impl Raw {
    /// On a new file in `folder`.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new(
        folder: &Path,
        mode: Mode,
        span_bytes: u64,
        request_bytes: usize,
        depth: usize,
    ) -> anyhow::Result<Raw> {
        let file = baseline_file::create(&folder.join("raw"), span_bytes)
            .with_context(|| format!("making the file of the raw baseline in {folder:?}"))?;
        let workers = (0..depth.min(THREADS_MAX)).map(|i| Worker {
            offsets: Offsets::new(mode, span_bytes, request_bytes as u64, 1000 + i as u64),
            buffer: AlignedBuffer::noise(request_bytes, i as u64),
            recorder: Recorder::new(request_bytes as u64),
            operations: 0,
        });
        Ok(Raw {
            file,
            mode,
            workers: workers.collect(),
        })
    }
}

impl Worker {
    fn run(&mut self, file: &File, mode: Mode, until: Instant) -> std::io::Result<()> {
        let mut start = Instant::now();
        while start < until {
            let offset = self.offsets.next_offset();
            if mode.is_write() {
                self.operations += 1;
                self.buffer.stamp(self.operations);
                file.write_all_at(&self.buffer, offset)?;
                file.sync_data()?;
            } else {
                file.read_exact_at(&mut self.buffer, offset)?;
            }
            start = self.recorder.record_since(start);
        }
        Ok(())
    }
}

impl Load for Raw {
    fn run(&mut self, duration: Duration, recorder: &mut Recorder) -> anyhow::Result<()> {
        let begin = Instant::now();
        let until = begin + duration;
        let (file, mode) = (&self.file, self.mode);
        let result = match &mut self.workers[..] {
            [only] => only.run(file, mode, until),
            workers => std::thread::scope(|scope| {
                let threads: Vec<_> = workers
                    .iter_mut()
                    .map(|worker| scope.spawn(move || worker.run(file, mode, until)))
                    .collect();
                threads.into_iter().try_for_each(|thread| {
                    thread
                        .join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
            }),
        };
        result.context("the raw baseline's file")?;
        recorder.ran(begin.elapsed());
        for worker in &mut self.workers {
            recorder.merge_latencies(&worker.recorder);
            worker.recorder.clear();
        }
        Ok(())
    }
}
