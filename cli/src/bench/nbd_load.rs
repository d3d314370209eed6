//! A load through NBD: one connection per volume, `depth` requests in flight on each.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::event::{PollFd, PollFlags, poll};

use crate::bench::pattern::{AlignedBuffer, Mode, Offsets};
use crate::bench::runner::Load;
use crate::bench::statistics::Recorder;
use crate::nbd::{self, Command, NbdClient};

/// The load.
pub struct NbdLoad {
    mode: Mode,
    request_bytes: u32,
    lanes: Vec<Lane>,
    buffer: AlignedBuffer,
    operations: u64,
}

/// One volume's connection.
struct Lane {
    client: NbdClient,
    offsets: Offsets,
    /// Start of each request in flight; its index is the cookie.
    started: Vec<Instant>,
    free: VecDeque<usize>,
}

impl Lane {
    fn in_flight(&self) -> usize {
        self.started.len() - self.free.len()
    }
}

impl NbdLoad {
    /// Connects to every one of `uris`.
    ///
    /// # Errors
    /// When a connection fails.
    pub fn connect(
        uris: &[String],
        mode: Mode,
        span_bytes: u64,
        request_bytes: usize,
        depth: usize,
    ) -> anyhow::Result<NbdLoad> {
        let mut lanes = Vec::new();
        for (i, uri) in uris.iter().enumerate() {
            let client = NbdClient::connect(uri)?;
            let span = span_bytes.min(client.size_bytes());
            lanes.push(Lane {
                client,
                offsets: Offsets::new(mode, span, request_bytes as u64, i as u64),
                started: vec![Instant::now(); depth],
                free: (0..depth).collect(),
            });
        }
        Ok(NbdLoad {
            mode,
            request_bytes: u32::try_from(request_bytes)?,
            lanes,
            buffer: AlignedBuffer::noise(request_bytes, 9),
            operations: 0,
        })
    }

    fn issue(&mut self, lane: usize) -> anyhow::Result<()> {
        let lane = &mut self.lanes[lane];
        let Some(slot) = lane.free.pop_front() else {
            return Ok(());
        };
        let offset = lane.offsets.next_offset();
        self.operations += 1;
        let (command, data): (_, &[u8]) = if self.mode.is_write() {
            self.buffer.stamp(self.operations);
            (Command::Write, &self.buffer)
        } else {
            (Command::Read, &[])
        };
        lane.started[slot] = Instant::now();
        lane.client
            .send(command, slot as u64, offset, self.request_bytes, data)
            .context("sending to the NBD server")
    }

    /// Takes one reply, waiting for it.
    fn complete(&mut self, lane: usize, recorder: &mut Recorder) -> anyhow::Result<()> {
        let lane = &mut self.lanes[lane];
        let reply = lane
            .client
            .reply()
            .context("receiving from the NBD server")?;
        nbd::check(reply).context("the NBD server answered with an error")?;
        if !self.mode.is_write() {
            lane.client
                .data(&mut self.buffer)
                .context("receiving from the NBD server")?;
        }
        let slot = usize::try_from(reply.cookie)
            .ok()
            .filter(|slot| *slot < lane.started.len());
        let slot = slot.context("the NBD server answered what was not asked")?;
        recorder.record_since(lane.started[slot]);
        lane.free.push_back(slot);
        Ok(())
    }

    /// Lanes with a reply to take; waits until there is one.
    fn ready(&self, ready: &mut Vec<usize>) -> anyhow::Result<()> {
        ready.clear();
        ready.extend((0..self.lanes.len()).filter(|i| self.lanes[*i].client.has_buffered()));
        if self.lanes.len() == 1 {
            // The blocking read waits.
            ready.resize(1, 0);
        }
        if !ready.is_empty() {
            return Ok(());
        }
        let sockets: Vec<_> = self.lanes.iter().map(|lane| lane.client.socket()).collect();
        let mut fds: Vec<_> = sockets
            .iter()
            .map(|s| PollFd::new(s, PollFlags::IN))
            .collect();
        poll(&mut fds, None)?;
        ready.extend((0..fds.len()).filter(|i| !fds[*i].revents().is_empty()));
        Ok(())
    }
}

impl Load for NbdLoad {
    fn run(&mut self, duration: Duration, recorder: &mut Recorder) -> anyhow::Result<()> {
        let begin = Instant::now();
        let until = begin + duration;
        let mut ready = Vec::with_capacity(self.lanes.len());
        for lane in 0..self.lanes.len() {
            while !self.lanes[lane].free.is_empty() {
                self.issue(lane)?;
            }
        }
        while self.lanes.iter().any(|lane| lane.in_flight() > 0) {
            self.ready(&mut ready)?;
            for lane in &ready {
                self.complete(*lane, recorder)?;
                if Instant::now() < until {
                    self.issue(*lane)?;
                }
            }
        }
        recorder.ran(begin.elapsed());
        Ok(())
    }
}
