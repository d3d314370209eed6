//! The front end that makes requests on the initiator's own thread, as a database linked against
//! the library would.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use ashlar_engine::{Event, SocketId};
use ashlar_initiator::front_end::{
    ByteRequest, Completed, Context, FrontEnd, IoError, Ticket, VolumeHandle, VolumeInfo,
};
use ashlar_replication::values::Time;

use crate::bench::pattern::{AlignedBuffer, Mode, Offsets};
use crate::bench::statistics::Recorder;

/// After so many failures in one job it ends: the volume is gone for good.
const ERRORS_MAX: u64 = 1000;

/// What the generator shall do next.
pub struct Job {
    /// What to do.
    pub mode: Mode,
    /// Bytes per request.
    pub request_bytes: usize,
    /// Requests in flight per volume.
    pub depth: usize,
    /// When to end.
    pub limit: Limit,
}

/// When a job ends.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// After this time.
    Time(Duration),
    /// After this many requests per volume.
    Requests(u64),
}

/// What a job did.
pub struct JobDone {
    /// Latencies and time.
    pub recorder: Recorder,
    /// The last error.
    pub error: Option<String>,
}

/// The front end.
pub struct Generator {
    jobs: Receiver<Job>,
    results: Sender<JobDone>,
    /// Becomes a socket of the engine at the start; a byte on it announces a job.
    doorbell: Option<OwnedFd>,
    socket: Option<SocketId>,
    span_bytes: u64,
    volumes: Vec<VolumeHandle>,
    running: Option<Running>,
}

/// A job in progress.
struct Running {
    job: Job,
    lanes: Vec<Lane>,
    buffer: AlignedBuffer,
    recorder: Recorder,
    error: Option<String>,
    begin: Instant,
    operations: u64,
}

/// The requests of one volume.
struct Lane {
    volume: VolumeHandle,
    offsets: Offsets,
    started: Vec<Instant>,
    free: VecDeque<usize>,
    left: u64,
}

impl Generator {
    /// Takes jobs from `jobs` whenever a byte arrives on `doorbell`.
    pub fn new(
        jobs: Receiver<Job>,
        results: Sender<JobDone>,
        doorbell: OwnedFd,
        span_bytes: u64,
    ) -> Generator {
        Generator {
            jobs,
            results,
            doorbell: Some(doorbell),
            socket: None,
            span_bytes,
            volumes: Vec::new(),
            running: None,
        }
    }

    fn begin(&mut self, job: Job) {
        let lane = |(i, volume): (usize, &VolumeHandle)| Lane {
            volume: *volume,
            offsets: Offsets::new(
                job.mode,
                self.span_bytes,
                job.request_bytes as u64,
                i as u64,
            ),
            started: vec![Instant::now(); job.depth],
            free: (0..job.depth).collect(),
            left: match job.limit {
                Limit::Time(_) => u64::MAX,
                Limit::Requests(count) => count,
            },
        };
        self.running = Some(Running {
            lanes: self.volumes.iter().enumerate().map(lane).collect(),
            buffer: AlignedBuffer::noise(job.request_bytes, 9),
            recorder: Recorder::new(job.request_bytes as u64),
            error: None,
            begin: Instant::now(),
            operations: 0,
            job,
        });
    }
}

impl Running {
    fn is_over(&self) -> bool {
        let out_of_time = match self.job.limit {
            Limit::Time(duration) => self.begin.elapsed() >= duration,
            Limit::Requests(_) => false,
        };
        out_of_time || self.recorder.errors() >= ERRORS_MAX
    }

    /// Hands requests over until every lane is full.
    fn issue(&mut self, context: &mut Context<'_>) {
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            while lane.left > 0 && context.can_accept(lane.volume) {
                let Some(slot) = lane.free.pop_front() else {
                    break;
                };
                lane.left -= 1;
                self.operations += 1;
                let offset = lane.offsets.next_offset();
                let request = if self.job.mode.is_write() {
                    self.buffer.stamp(self.operations);
                    ByteRequest::Write {
                        offset,
                        data: &self.buffer,
                    }
                } else {
                    // At most 32 MiB, see Args::check.
                    ByteRequest::Read {
                        offset,
                        len: self.job.request_bytes as u32,
                    }
                };
                lane.started[slot] = Instant::now();
                let ticket = Ticket((index * self.job.depth + slot) as u64);
                if let Err(error) = context.submit(lane.volume, ticket, request) {
                    self.recorder.failed();
                    self.error = Some(error.to_string());
                    lane.free.push_back(slot);
                    break;
                }
            }
        }
    }

    fn complete(&mut self, ticket: Ticket, result: Result<Completed<'_>, IoError>) {
        let ticket = ticket.0 as usize;
        let (index, slot) = (ticket / self.job.depth, ticket % self.job.depth);
        let Some(lane) = self.lanes.get_mut(index) else {
            return;
        };
        match result {
            Ok(_) => {
                self.recorder.record_since(lane.started[slot]);
            }
            Err(error) => {
                self.recorder.failed();
                self.error = Some(error.to_string());
            }
        }
        lane.free.push_back(slot);
    }

    fn is_idle(&self) -> bool {
        self.lanes
            .iter()
            .all(|lane| lane.free.len() == lane.started.len())
    }
}

impl FrontEnd for Generator {
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        if let Some(doorbell) = self.doorbell.take() {
            let socket = context.engine().adopt(doorbell);
            context.own(socket);
            self.socket = Some(socket);
        }
        Ok(())
    }

    fn socket_event(&mut self, context: &mut Context<'_>, event: &Event) {
        if let Event::Received { socket } = event {
            let rung = context.engine().input(*socket).len();
            context.engine().consume(*socket, rung);
        }
    }

    fn completed(
        &mut self,
        _: &mut Context<'_>,
        _: VolumeHandle,
        ticket: Ticket,
        result: Result<Completed<'_>, IoError>,
    ) {
        if let Some(running) = &mut self.running {
            running.complete(ticket, result);
        }
    }

    fn turn(&mut self, context: &mut Context<'_>) -> Time {
        if self.running.is_none()
            && let Ok(job) = self.jobs.try_recv()
        {
            self.begin(job);
        }
        let Some(running) = &mut self.running else {
            return Time::NEVER;
        };
        let over = running.is_over();
        if !over {
            running.issue(context);
        }
        let over = over || running.lanes.iter().all(|lane| lane.left == 0);
        if over && running.is_idle() {
            running.recorder.ran(running.begin.elapsed());
            if let Some(running) = self.running.take() {
                // Nobody waits any more when the measurement was given up.
                let _ = self.results.send(JobDone {
                    recorder: running.recorder,
                    error: running.error,
                });
            }
        }
        Time::NEVER
    }

    fn volume_attached(&mut self, _: &mut Context<'_>, volume: VolumeHandle, _: &VolumeInfo) {
        self.volumes.push(volume);
    }

    fn volume_detached(&mut self, _: &mut Context<'_>, volume: VolumeHandle) {
        self.volumes.retain(|v| *v != volume);
    }
}
