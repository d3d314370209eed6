//! A load through the library: a front end on the initiator's own thread, in this process.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use ashlar_initiator::daemon::volume_spec;
use ashlar_initiator::thread::{FrontEndMaker, InitiatorThread, SpawnedThread, ThreadOptions};
use ashlar_replication::values::VolumeId;

use crate::bench::args::Args;
use crate::bench::generator::{Generator, Job, JobDone, Limit};
use crate::bench::pattern::Mode;
use crate::bench::runner::Load;
use crate::bench::statistics::Recorder;
use crate::local::Engine;
use crate::pinning::Pinning;
use crate::state::VolumeRecord;

/// How long an attach may take.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(30);
/// How long requests under way may take when the measurement is over.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Volumes attached by this process, and the generator on their thread.
pub struct LibraryLoad {
    thread: Option<SpawnedThread>,
    volumes: Vec<VolumeId>,
    jobs: Sender<Job>,
    results: Receiver<JobDone>,
    doorbell: UnixStream,
    mode: Mode,
    request_bytes: usize,
    depth: usize,
    span_bytes: u64,
}

impl LibraryLoad {
    /// Starts an initiator thread in this process and attaches the volumes there.
    ///
    /// # Errors
    /// When the thread does not start or a volume does not attach.
    pub fn start(
        args: &Args,
        volumes: &[VolumeRecord],
        span_bytes: u64,
        pinning: &Pinning,
    ) -> anyhow::Result<LibraryLoad> {
        let (jobs, job_queue) = channel();
        let (result_queue, results) = channel();
        let (doorbell, bell) = UnixStream::pair().context("making a socket pair")?;
        let generator: FrontEndMaker = Box::new(move || {
            Box::new(Generator::new(
                job_queue,
                result_queue,
                bell.into(),
                span_bytes,
            ))
        });
        let engine = ashlar_engine::Options {
            kind: args.engine.map(|engine| match engine {
                Engine::IoUring => ashlar_engine::EngineKind::IoUring,
                Engine::Portable => ashlar_engine::EngineKind::Portable,
            }),
            busy_poll: Duration::from_micros(args.busy_poll_us),
            ..ashlar_engine::Options::default()
        };
        let options = ThreadOptions {
            cpu: pinning.client(),
            engine,
            ..ThreadOptions::default()
        };
        let thread = InitiatorThread::spawn(options, vec![generator])?;
        let mut load = LibraryLoad {
            thread: Some(thread),
            volumes: Vec::new(),
            jobs,
            results,
            doorbell,
            mode: args.mode,
            request_bytes: args.bytes(),
            depth: args.depth,
            span_bytes,
        };
        for volume in volumes {
            let spec = volume_spec(&volume.attach_request())?;
            let id = spec.id;
            let handle = load.thread.as_ref().context("the thread")?.handle().clone();
            handle
                .attach(spec, ATTACH_TIMEOUT)
                .with_context(|| format!("attaching {}", volume.name))?;
            load.volumes.push(id);
        }
        Ok(load)
    }

    /// Writes every volume once, front to back, with requests of `bytes`.
    ///
    /// # Errors
    /// When a write fails.
    pub fn fill(&mut self, bytes: usize) -> anyhow::Result<()> {
        let requests = self.span_bytes / bytes as u64;
        let job = Job {
            mode: Mode::Write,
            request_bytes: bytes,
            depth: 4,
            limit: Limit::Requests(requests.max(1)),
        };
        let done = self.run_job(job)?;
        let error = done.error.unwrap_or_default();
        ensure!(done.recorder.errors() == 0, "filling the volumes: {error}");
        Ok(())
    }

    fn run_job(&mut self, job: Job) -> anyhow::Result<JobDone> {
        if self.jobs.send(job).is_err() {
            bail!("the initiator thread has ended");
        }
        self.doorbell
            .write_all(&[1])
            .context("waking the initiator thread")?;
        self.results
            .recv()
            .context("the initiator thread has ended")
    }
}

impl Load for LibraryLoad {
    fn run(&mut self, duration: Duration, recorder: &mut Recorder) -> anyhow::Result<()> {
        let job = Job {
            mode: self.mode,
            request_bytes: self.request_bytes,
            depth: self.depth,
            limit: Limit::Time(duration),
        };
        let mut done = self.run_job(job)?;
        recorder.merge(&done.recorder);
        if let Some(error) = done.error
            && done.recorder.summary().operations == 0
        {
            bail!("no request succeeded: {error}");
        }
        Ok(())
    }
}

impl Drop for LibraryLoad {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        thread.handle().stop(DRAIN_TIMEOUT);
        // Its end was asked for; an error now changes nothing that was measured.
        let _ = thread.join();
    }
}
