//! A replica of the floor: receives, writes and syncs its own file, answers. No protocol.
//!
//! This is what the least possible replica costs, written with care: one blocking thread, one
//! vectored read into aligned memory per request, direct I/O, one sync, one answer. When several
//! requests are under way they share a sync and an answer.

use std::fs::File;
use std::io::ErrorKind::{ConnectionReset, UnexpectedEof};
use std::io::{self, IoSliceMut, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::bench::baseline_file;
use crate::bench::floor_wire::{HEADER_BYTES, Header};
use crate::bench::pattern::{AlignedBuffer, Mode};

/// Requests that share one sync at most.
const BATCH_MAX: usize = 64;

/// Arguments of the hidden command.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The file to make.
    #[arg(long)]
    file: PathBuf,
    /// Its size.
    #[arg(long)]
    file_bytes: u64,
    /// Size of every request.
    #[arg(long)]
    request_bytes: usize,
    /// What is measured.
    #[arg(long, value_enum)]
    mode: Mode,
    /// Spin this long before sleeping.
    #[arg(long, default_value_t = 0)]
    busy_poll_us: u64,
}

/// Serves one connection to its end.
///
/// # Errors
/// When the file or the socket fails.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("listening")?;
    let busy_poll = Duration::from_micros(args.busy_poll_us);
    serve(
        &args.file,
        args.file_bytes,
        args.request_bytes,
        args.mode,
        busy_poll,
        &listener,
    )
}

/// Makes the file, says where it listens, and serves one connection.
///
/// # Errors
/// When the file or the socket fails.
pub fn serve(
    file: &Path,
    file_bytes: u64,
    request_bytes: usize,
    mode: Mode,
    busy_poll: Duration,
    listener: &TcpListener,
) -> anyhow::Result<()> {
    let file = baseline_file::create(file, file_bytes).context("making the file")?;
    println!("{}", listener.local_addr()?);
    io::stdout().flush()?;
    let (stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut replica = Replica {
        file,
        stream,
        busy_poll,
        buffer: AlignedBuffer::zeros(request_bytes),
        answers: Vec::with_capacity(BATCH_MAX * HEADER_BYTES),
    };
    let result = if mode.is_write() {
        replica.serve_writes()
    } else {
        replica.serve_reads()
    };
    match result {
        // The client is done.
        Err(error) if matches!(error.kind(), UnexpectedEof | ConnectionReset) => Ok(()),
        result => Ok(result?),
    }
}

struct Replica {
    file: File,
    stream: TcpStream,
    busy_poll: Duration,
    buffer: AlignedBuffer,
    answers: Vec<u8>,
}

impl Replica {
    fn serve_writes(&mut self) -> io::Result<()> {
        loop {
            let header = self.receive_write()?;
            self.file
                .write_all_at(&self.buffer[..header.length as usize], header.offset)?;
            self.answers.extend_from_slice(&header.encode());
            let more = header.batch
                && self.answers.len() < BATCH_MAX * HEADER_BYTES
                && rustix::io::ioctl_fionread(&self.stream)?
                    >= (HEADER_BYTES + self.buffer.len()) as u64;
            if !more {
                self.file.sync_data()?;
                self.stream.write_all(&self.answers)?;
                self.answers.clear();
            }
        }
    }

    /// Header and data with one system call when both have arrived: all requests have one length.
    fn receive_write(&mut self) -> io::Result<Header> {
        let mut header = [0; HEADER_BYTES];
        wait_readable(&self.stream, self.busy_poll)?;
        let mut slices = [
            IoSliceMut::new(&mut header),
            IoSliceMut::new(&mut self.buffer),
        ];
        let got = self.stream.read_vectored(&mut slices)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if got < HEADER_BYTES {
            self.stream.read_exact(&mut header[got..])?;
        }
        let got = got.max(HEADER_BYTES) - HEADER_BYTES;
        self.stream.read_exact(&mut self.buffer[got..])?;
        let header = Header::decode(&header);
        if header.length as usize != self.buffer.len() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(header)
    }

    fn serve_reads(&mut self) -> io::Result<()> {
        loop {
            let mut header = [0; HEADER_BYTES];
            wait_readable(&self.stream, self.busy_poll)?;
            self.stream.read_exact(&mut header)?;
            let request = Header::decode(&header);
            let data = self.buffer.get_mut(..request.length as usize);
            let data = data.ok_or(io::ErrorKind::InvalidData)?;
            self.file.read_exact_at(data, request.offset)?;
            crate::nbd::write_both(&mut self.stream, &header, data)?;
        }
    }
}

/// Spins up to `busy_poll` for something to read; the blocking read after it sleeps.
fn wait_readable(stream: &TcpStream, busy_poll: Duration) -> io::Result<()> {
    if busy_poll.is_zero() {
        return Ok(());
    }
    let until = Instant::now() + busy_poll;
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    while poll(
        &mut fds,
        Some(&Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        }),
    )? == 0
        && Instant::now() < until
    {
        std::hint::spin_loop();
    }
    Ok(())
}
