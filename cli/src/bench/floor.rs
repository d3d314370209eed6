//! The floor: the same bytes to as many processes, which write and sync one file each and answer.
//!
//! Nothing that replicates durably over sockets can be much faster; the distance to it is what the
//! protocol, the checksums and the store cost.

use std::collections::VecDeque;
use std::io::Read as _;
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::bench::floor_wire::{HEADER_BYTES, Header};
use crate::bench::pattern::{AlignedBuffer, Mode, Offsets};
use crate::bench::runner::Load;
use crate::bench::statistics::Recorder;
use crate::nbd::write_both;
use crate::pinning::Pinning;
use crate::process::{Lifetime, Process, ProcessSpec};
use crate::scratch::Scratch;

/// As many copies as a volume may have.
const REPLICAS_MAX: usize = 3;

/// What the floor does.
#[derive(Clone, Debug)]
pub struct FloorPlan {
    /// What is measured.
    pub mode: Mode,
    /// Size of every replica's file.
    pub span_bytes: u64,
    /// Size of every request.
    pub request_bytes: usize,
    /// Processes. A read goes to the first one.
    pub replicas: usize,
    /// Answers that complete a write.
    pub quorum: usize,
    /// Spin this long before sleeping.
    pub busy_poll: Duration,
}

/// The floor's processes and the connections to them.
pub struct Floor {
    plan: FloorPlan,
    processes: Vec<Process>,
    connections: Vec<Connection>,
    offsets: Offsets,
    buffer: AlignedBuffer,
    issued: u64,
    completed: u64,
    /// When the operations after `completed` began.
    started: VecDeque<Instant>,
}

struct Connection {
    stream: TcpStream,
    /// Operations answered. A replica answers in order, so a count says which.
    answered: u64,
    /// Bytes of an answer that has arrived in part.
    partial: usize,
}

/// The floor at a certain depth, as a load.
pub struct FloorAt<'a> {
    /// The floor.
    pub floor: &'a mut Floor,
    /// Operations in flight.
    pub depth: usize,
}

impl Floor {
    /// Starts the processes, with their files in `folder`.
    ///
    /// # Errors
    /// When one does not start.
    pub fn start(
        plan: FloorPlan,
        folder: &Path,
        pinning: &Pinning,
        scratch: &Scratch,
    ) -> anyhow::Result<Floor> {
        let replicas = if plan.mode.is_write() {
            plan.replicas
        } else {
            1
        };
        let mut processes = Vec::new();
        let mut addresses = Vec::new();
        for i in 0..replicas {
            let name = format!("floor-replica-{}", i + 1);
            let arguments = [
                "floor-replica".to_owned(),
                format!("--file={}", folder.join(&name).display()),
                format!("--file-bytes={}", plan.span_bytes),
                format!("--request-bytes={}", plan.request_bytes),
                format!("--mode={}", plan.mode.name()),
                format!("--busy-poll-us={}", plan.busy_poll.as_micros()),
            ];
            let spec = ProcessSpec {
                log: scratch.path().join(format!("{name}.log")),
                name,
                arguments: arguments.map(Into::into).to_vec(),
                cpu: pinning.replica(i),
                lifetime: Lifetime::WithParent,
            };
            let (process, address) = Process::start(spec, scratch)?;
            processes.push(process);
            addresses.push(address.trim().to_owned());
        }
        let mut floor = Floor::connect(plan, &addresses)?;
        floor.processes = processes;
        Ok(floor)
    }

    /// Connects to replicas that are there.
    fn connect(plan: FloorPlan, addresses: &[String]) -> anyhow::Result<Floor> {
        anyhow::ensure!(
            (1..=REPLICAS_MAX).contains(&addresses.len()),
            "1 to 3 replicas"
        );
        let mut connections = Vec::new();
        for address in addresses {
            let stream = TcpStream::connect(address).context("connecting to the floor")?;
            stream.set_nodelay(true)?;
            connections.push(Connection {
                stream,
                answered: 0,
                partial: 0,
            });
        }
        Ok(Floor {
            offsets: Offsets::new(plan.mode, plan.span_bytes, plan.request_bytes as u64, 2000),
            buffer: AlignedBuffer::noise(plan.request_bytes, 5),
            plan,
            processes: Vec::new(),
            connections,
            issued: 0,
            completed: 0,
            started: VecDeque::new(),
        })
    }

    /// Names and ids of its processes.
    pub fn processes(&self) -> Vec<(String, u32)> {
        self.processes
            .iter()
            .map(|p| (p.name().to_owned(), p.id()))
            .collect()
    }

    fn issue(&mut self, batch: bool, now: Instant) -> anyhow::Result<()> {
        let offset = self.offsets.next_offset();
        let length = u32::try_from(self.plan.request_bytes)?;
        let header = Header {
            offset,
            length,
            batch,
        }
        .encode();
        self.issued += 1;
        self.started.push_back(now);
        let data: &[u8] = if self.plan.mode.is_write() {
            self.buffer.stamp(self.issued);
            &self.buffer
        } else {
            &[]
        };
        for connection in &mut self.connections {
            write_both(&mut connection.stream, &header, data).context("sending to the floor")?;
        }
        Ok(())
    }

    /// Waits for an answer and takes all that are there.
    fn receive(&mut self) -> anyhow::Result<()> {
        let ready = match self.connections.len() {
            // The blocking read waits.
            1 if self.plan.busy_poll.is_zero() => [true, false, false],
            _ => self.wait_ready()?,
        };
        for (connection, ready) in self.connections.iter_mut().zip(ready) {
            if ready {
                receive_from(connection, self.plan.mode, &mut self.buffer)?;
            }
        }
        Ok(())
    }

    /// Which connections have answers to take; waits until one has.
    fn wait_ready(&self) -> anyhow::Result<[bool; REPLICAS_MAX]> {
        let until = (!self.plan.busy_poll.is_zero()).then(|| Instant::now() + self.plan.busy_poll);
        // Places without a connection poll the first one for nothing.
        let mut fds: [PollFd<'_>; REPLICAS_MAX] = std::array::from_fn(|i| {
            let flags = if i < self.connections.len() {
                PollFlags::IN
            } else {
                PollFlags::empty()
            };
            PollFd::new(
                &self
                    .connections
                    .get(i)
                    .unwrap_or(&self.connections[0])
                    .stream,
                flags,
            )
        });
        let count = self.connections.len();
        let zero = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        loop {
            let spin = until.is_some_and(|until| Instant::now() < until);
            if poll(&mut fds[..count], spin.then_some(&zero))? > 0 {
                return Ok(fds.map(|fd| !fd.revents().is_empty()));
            }
        }
    }

    /// Completes what a quorum has answered.
    fn complete(&mut self, recorder: &mut Recorder) -> Option<Instant> {
        let mut counts = [0; REPLICAS_MAX];
        for (count, connection) in counts.iter_mut().zip(&self.connections) {
            *count = connection.answered;
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let reached = counts[self.plan.quorum.min(self.connections.len()) - 1];
        let mut now = None;
        while self.completed < reached {
            if let Some(start) = self.started.pop_front() {
                let at = *now.get_or_insert_with(Instant::now);
                recorder.record(at.saturating_duration_since(start));
            }
            self.completed += 1;
        }
        now
    }
}

fn receive_from(
    connection: &mut Connection,
    mode: Mode,
    buffer: &mut AlignedBuffer,
) -> anyhow::Result<()> {
    if mode.is_write() {
        // Many answers at once when there are many.
        let mut bytes = [0; 64 * HEADER_BYTES];
        let got = connection
            .stream
            .read(&mut bytes)
            .context("receiving from the floor")?;
        anyhow::ensure!(got > 0, "a replica of the floor ended");
        let whole = connection.partial + got;
        connection.answered += (whole / HEADER_BYTES) as u64;
        connection.partial = whole % HEADER_BYTES;
    } else {
        let mut header = [0; HEADER_BYTES];
        let mut slices = [
            std::io::IoSliceMut::new(&mut header),
            std::io::IoSliceMut::new(&mut buffer[..]),
        ];
        let got = connection.stream.read_vectored(&mut slices)?;
        anyhow::ensure!(got > 0, "the replica of the floor ended");
        if got < HEADER_BYTES {
            connection.stream.read_exact(&mut header[got..])?;
        }
        let got = got.max(HEADER_BYTES) - HEADER_BYTES;
        connection.stream.read_exact(&mut buffer[got..])?;
        connection.answered += 1;
    }
    Ok(())
}

impl Load for FloorAt<'_> {
    fn run(&mut self, duration: Duration, recorder: &mut Recorder) -> anyhow::Result<()> {
        let floor = &mut *self.floor;
        let begin = Instant::now();
        let until = begin + duration;
        let batch = self.depth > 1;
        let mut now = begin;
        loop {
            while now < until && floor.issued - floor.completed < self.depth as u64 {
                floor.issue(batch, if batch { Instant::now() } else { now })?;
            }
            if floor.completed == floor.issued {
                break;
            }
            floor.receive()?;
            now = floor.complete(recorder).unwrap_or(now);
        }
        recorder.ran(begin.elapsed());
        // The slower replicas' answers, so that the next slice begins with nothing under way.
        while floor.connections.iter().any(|c| c.answered < floor.issued) {
            floor.receive()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::bench::floor_replica::serve;

    fn floor(mode: Mode, replicas: usize, folder: &Path, busy_poll: Duration) -> Floor {
        let plan = FloorPlan {
            mode,
            span_bytes: 1 << 20,
            request_bytes: 8192,
            replicas,
            quorum: replicas / 2 + 1,
            busy_poll,
        };
        let addresses: Vec<_> = (0..replicas)
            .map(|i| {
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                let address = listener.local_addr().unwrap().to_string();
                let file = folder.join(i.to_string());
                std::thread::spawn(move || {
                    serve(&file, 1 << 20, 8192, mode, busy_poll, &listener).unwrap();
                });
                address
            })
            .collect();
        Floor::connect(plan, &addresses).unwrap()
    }

    #[test]
    fn every_write_reaches_every_replica_at_any_depth() {
        for (depth, busy_poll) in [(1, 0), (1, 50), (16, 0)] {
            let folder = tempfile::tempdir().unwrap();
            let busy_poll = Duration::from_micros(busy_poll);
            let mut floor = floor(Mode::Write, 3, folder.path(), busy_poll);
            let mut recorder = Recorder::new(8192);
            let duration = Duration::from_millis(50);
            FloorAt {
                floor: &mut floor,
                depth,
            }
            .run(duration, &mut recorder)
            .unwrap();
            let summary = recorder.summary();
            assert!(summary.operations > 10, "{summary:?}");
            assert_eq!(floor.issued, summary.operations);
            assert!(floor.connections.iter().all(|c| c.answered == floor.issued));
            let files =
                [0, 1, 2].map(|i| std::fs::read(folder.path().join(i.to_string())).unwrap());
            assert!(files[0] == files[1] && files[1] == files[2]);
            let last = (floor.issued - 1) % 128 * 8192;
            assert_eq!(files[0][last as usize..][..8], floor.issued.to_le_bytes());
        }
    }

    #[test]
    fn reads_bring_the_data_of_one_replica() {
        let folder = tempfile::tempdir().unwrap();
        let mut floor = floor(Mode::RandRead, 1, folder.path(), Duration::ZERO);
        let mut recorder = Recorder::new(8192);
        let duration = Duration::from_millis(20);
        FloorAt {
            floor: &mut floor,
            depth: 4,
        }
        .run(duration, &mut recorder)
        .unwrap();
        assert!(recorder.summary().operations > 4);
        let file = std::fs::read(folder.path().join("0")).unwrap();
        assert!(file.chunks(8192).any(|chunk| chunk == &floor.buffer[..]));
    }
}
