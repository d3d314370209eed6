//! The NBD server in front of a volume in memory, and a client that can also say wrong things.
#![allow(dead_code, reason = "each test binary uses its part of this module")]

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use ashlar_engine::{Address, Engine, EngineKind, IoBuf, SharedBytes, Waker};
use ashlar_initiator::front_end::{
    Allocation, AllocationPiece, ByteRequest, Completed, Context, FrontEnd, FrontEndId, IoError,
    Owned, ReadPiece, Ticket, VolumeAccess, VolumeHandle, VolumeInfo, Volumes, Zero,
};
use ashlar_initiator::nbd::{NbdCounters, NbdServer};
use ashlar_replication::message::Content;
use ashlar_replication::values::{Time, VolumeId};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
const CHUNK: u64 = 64 * KIB;

enum Outcome {
    Read(Vec<ReadPiece>),
    Done,
    Allocation(Vec<AllocationPiece>),
}

/// Sparse bytes.
struct Memory {
    info: VolumeInfo,
    chunks: HashMap<u64, Box<[u8]>>,
}

impl Memory {
    fn for_chunks(offset: u64, len: u64, mut each: impl FnMut(u64, std::ops::Range<usize>)) {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let stop = (at / CHUNK * CHUNK + CHUNK).min(end);
            let from = (at % CHUNK) as usize;
            each(at / CHUNK, from..from + (stop - at) as usize);
            at = stop;
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let mut rest = data;
        Memory::for_chunks(offset, data.len() as u64, |chunk, range| {
            let fresh = || vec![0; CHUNK as usize].into_boxed_slice();
            let bytes = self.chunks.entry(chunk).or_insert_with(fresh);
            let (now, later) = rest.split_at(range.len());
            bytes[range].copy_from_slice(now);
            rest = later;
        });
    }

    fn zero(&mut self, offset: u64, len: u64, kind: Zero) {
        Memory::for_chunks(offset, len, |chunk, range| {
            if range.len() == CHUNK as usize && kind != Zero::Provision {
                self.chunks.remove(&chunk);
            } else if let Some(bytes) = self.chunks.get_mut(&chunk) {
                bytes[range].fill(0);
            } else if kind == Zero::Provision {
                self.chunks.insert(chunk, vec![0; CHUNK as usize].into());
            }
        });
    }

    fn read(&self, offset: u64, len: u64) -> Vec<ReadPiece> {
        let mut pieces = Vec::new();
        Memory::for_chunks(offset, len, |chunk, range| {
            let len = range.len() as u32;
            let content = self.chunks.get(&chunk).map_or(Content::Zeros, |bytes| {
                Content::Data(SharedBytes::new(IoBuf::copy_of(&bytes[range])))
            });
            pieces.push(ReadPiece { len, content });
        });
        pieces
    }

    fn allocation(&self, offset: u64, len: u64) -> Vec<AllocationPiece> {
        let mut pieces: Vec<AllocationPiece> = Vec::new();
        Memory::for_chunks(offset, len, |chunk, range| {
            let allocation = match self.chunks.contains_key(&chunk) {
                true => Allocation::Data,
                false => Allocation::Zeros,
            };
            let len = range.len() as u64;
            match pieces.last_mut() {
                Some(last) if last.allocation == allocation => last.len += len,
                _ => pieces.push(AllocationPiece { len, allocation }),
            }
        });
        pieces
    }
}

/// Volumes in memory that take few requests at a time and finish them in any order.
struct InMemory {
    volumes: HashMap<VolumeHandle, Memory>,
    in_flight: Vec<(VolumeHandle, Ticket, Result<Outcome, IoError>)>,
    in_flight_max: usize,
    random: u64,
    /// Reads beyond this fail.
    bad_from: u64,
}

impl InMemory {
    fn below(&mut self, limit: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % limit as u64) as usize
    }
}

impl Volumes for InMemory {
    fn submit(
        &mut self,
        _: &mut Engine,
        _: FrontEndId,
        handle: VolumeHandle,
        ticket: Ticket,
        request: ByteRequest<'_>,
    ) -> Result<(), IoError> {
        assert!(self.can_accept(handle), "asked for more than is accepted");
        let known = |(v, t, _): &(VolumeHandle, Ticket, _)| (*v, *t) == (handle, ticket);
        assert!(!self.in_flight.iter().any(known), "a ticket twice");
        let bad_from = self.bad_from;
        let memory = self.volumes.get_mut(&handle).ok_or(IoError::NotAttached)?;
        let size = memory.info.size_bytes;
        let outcome = match request {
            ByteRequest::Read { offset, len } => {
                assert!(len > 0 && offset + u64::from(len) <= size);
                if offset >= bad_from {
                    Err(IoError::Media { offset })
                } else {
                    Ok(Outcome::Read(memory.read(offset, len.into())))
                }
            }
            ByteRequest::Write { offset, data } => {
                memory.write(offset, data);
                Ok(Outcome::Done)
            }
            ByteRequest::WriteShared { offset, data } => {
                assert!(offset / MIB == (offset + data.len() as u64 - 1) / MIB);
                memory.write(offset, data);
                Ok(Outcome::Done)
            }
            ByteRequest::Zero { offset, len, kind } => {
                memory.zero(offset, len, kind);
                Ok(Outcome::Done)
            }
            ByteRequest::Flush => Ok(Outcome::Done),
            ByteRequest::Allocation { offset, len } => {
                Ok(Outcome::Allocation(memory.allocation(offset, len)))
            }
        };
        self.in_flight.push((handle, ticket, outcome));
        Ok(())
    }

    fn can_accept(&self, _: VolumeHandle) -> bool {
        self.in_flight.len() < self.in_flight_max
    }

    fn own(&mut self, _: FrontEndId, _: Owned) {}
}

/// How the server is to be.
#[derive(Clone)]
pub struct Setup {
    pub engine: EngineKind,
    pub address: Address,
    pub size_bytes: u64,
    pub access: VolumeAccess,
    pub in_flight_max: usize,
    pub bad_from: u64,
}

impl Setup {
    pub fn new(engine: EngineKind, address: Address) -> Setup {
        Setup {
            engine,
            address,
            size_bytes: 256 * MIB,
            access: VolumeAccess::ReadWrite,
            in_flight_max: 64,
            bad_from: u64::MAX,
        }
    }
}

/// What a test tells the server's thread.
pub enum Order {
    Detach,
    Resize(u64),
}

/// A server on a thread of its own, with the volume "data".
pub struct Server {
    pub address: Address,
    pub counters: Arc<NbdCounters>,
    orders: Sender<Order>,
    waker: Waker,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

struct Running {
    engine: Engine,
    volumes: InMemory,
    server: NbdServer,
}

impl Running {
    fn call<T>(&mut self, f: impl FnOnce(&mut NbdServer, &mut Context<'_>) -> T) -> T {
        let mut context = Context::new(&mut self.engine, &mut self.volumes, FrontEndId(0));
        f(&mut self.server, &mut context)
    }

    /// Finishes some of what is under way, in any order.
    fn complete(&mut self) {
        let count = self.volumes.in_flight.len();
        for _ in 0..count.div_ceil(2) {
            let index = self.volumes.below(self.volumes.in_flight.len());
            let (handle, ticket, outcome) = self.volumes.in_flight.swap_remove(index);
            let result = match &outcome {
                Ok(Outcome::Read(pieces)) => Ok(Completed::Read(pieces)),
                Ok(Outcome::Allocation(pieces)) => Ok(Completed::Allocation(pieces)),
                Ok(Outcome::Done) => Ok(Completed::Done),
                Err(error) => Err(error.clone()),
            };
            self.call(|server, context| server.completed(context, handle, ticket, result));
        }
    }
}

impl Server {
    pub fn start(setup: Setup) -> Server {
        let (sender, started) = channel();
        let (orders, taken) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let body = move || {
            let options = ashlar_engine::Options {
                kind: Some(setup.engine),
                ..ashlar_engine::Options::default()
            };
            let actual = Arc::new(Mutex::new(Vec::new()));
            let server = NbdServer::new(vec![setup.address.clone()], Arc::clone(&actual));
            let mut info = VolumeInfo {
                id: VolumeId([7; 16]),
                name: "data".into(),
                size_bytes: setup.size_bytes,
                access: setup.access,
            };
            let handle = VolumeHandle(1);
            let memory = Memory {
                info: info.clone(),
                chunks: HashMap::new(),
            };
            let mut running = Running {
                engine: Engine::new(options).expect("an engine"),
                volumes: InMemory {
                    volumes: HashMap::from([(handle, memory)]),
                    in_flight: Vec::new(),
                    in_flight_max: setup.in_flight_max,
                    random: 0x9e37_79b9_7f4a_7c15,
                    bad_from: setup.bad_from,
                },
                server,
            };
            running.call(|s, c| s.start(c)).expect("listens");
            running.call(|s, c| s.volume_attached(c, handle, &info));
            let waker = running.engine.waker();
            let address = actual.lock().unwrap()[0].clone();
            let counters = running.server.counters();
            sender.send((address, counters, waker)).unwrap();
            let mut events = Vec::new();
            let mut deadline = Time::NEVER;
            while !stopped.load(Ordering::Acquire) {
                running.engine.poll(deadline, &mut events).expect("polls");
                for event in events.drain(..) {
                    running.call(|s, c| s.socket_event(c, &event));
                }
                while let Ok(order) = taken.try_recv() {
                    match order {
                        Order::Detach => {
                            running.volumes.volumes.remove(&handle);
                            running.call(|s, c| s.volume_detached(c, handle));
                        }
                        Order::Resize(size) => {
                            info.size_bytes = size;
                            let memory = running.volumes.volumes.get_mut(&handle).unwrap();
                            memory.info.size_bytes = size;
                            running.call(|s, c| s.volume_resized(c, handle, &info));
                        }
                    }
                }
                running.complete();
                let wanted = running.call(|s, c| s.turn(c));
                let idle = running.volumes.in_flight.is_empty();
                deadline = if idle { wanted } else { Time(0) };
            }
        };
        let thread = std::thread::spawn(body);
        let (address, counters, waker) = started.recv().expect("starts");
        Server {
            address,
            counters,
            orders,
            waker,
            stop,
            thread: Some(thread),
        }
    }

    pub fn order(&self, order: Order) {
        self.orders.send(order).unwrap();
        self.waker.wake();
    }

    /// As clients name it.
    pub fn uri(&self) -> String {
        match &self.address {
            Address::Tcp(address) => format!("nbd://{address}/data"),
            Address::Unix(path) => format!("nbd+unix:///data?socket={}", path.display()),
        }
    }

    pub fn counter(&self, name: &str) -> u64 {
        let found = self.counters.all().find(|(n, _)| *n == name);
        found.expect("such a counter").1
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended
                .unwrap()
                .expect("the server's thread has not panicked");
        }
    }
}

pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

pub fn unix(folder: &tempfile::TempDir) -> Address {
    let path: PathBuf = folder.path().join("nbd.sock");
    format!("unix:{}", path.display())
        .parse()
        .expect("an address")
}

pub trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// Connected to a server; every step can be done wrong.
pub struct Client {
    pub stream: Box<dyn Stream>,
}

/// What came back: of a structured reply all chunks.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub cookie: u64,
    pub error: u32,
    pub text: String,
    /// (offset, bytes), in the order they came.
    pub data: Vec<(u64, Vec<u8>)>,
    pub holes: Vec<(u64, u32)>,
    pub status: Vec<(u32, u32)>,
}

pub fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

pub fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

impl Client {
    pub fn connect(server: &Server) -> Client {
        let stream: Box<dyn Stream> = match &server.address {
            Address::Tcp(address) => Box::new(std::net::TcpStream::connect(address).unwrap()),
            Address::Unix(path) => Box::new(UnixStream::connect(path).unwrap()),
        };
        Client { stream }
    }

    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("more bytes");
        bytes
    }

    /// Whether the server has closed the connection, after whatever it still says.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        // A reset is a close as well.
        let _ = self.stream.read_to_end(&mut rest);
        true
    }

    pub fn option(&mut self, kind: u32, data: &[u8]) {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        self.stream.write_all(&bytes).unwrap();
    }

    /// (kind, data) of one option reply.
    pub fn option_reply(&mut self) -> (u32, Vec<u8>) {
        let head = self.take(20);
        assert_eq!(be64(&head, 0), 0x0003_e889_0455_65a9);
        let data = self.take(be32(&head, 16) as usize);
        (be32(&head, 12), data)
    }

    fn until_ack(&mut self) -> Vec<(u32, Vec<u8>)> {
        let mut all = Vec::new();
        loop {
            let reply = self.option_reply();
            let last = reply.0 == 1 || reply.0 >> 31 == 1;
            all.push(reply);
            if last {
                return all;
            }
        }
    }

    pub fn greet(&mut self) {
        let greeting = self.take(18);
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        self.stream.write_all(&3_u32.to_be_bytes()).unwrap();
    }

    /// Negotiates like a modern client. Returns the transmission flags.
    pub fn go(&mut self, structured: bool) -> u16 {
        self.greet();
        let mut data = 4_u32.to_be_bytes().to_vec();
        data.extend_from_slice(b"data");
        if structured {
            self.option(8, &[]);
            assert_eq!(self.option_reply().0, 1);
            let mut contexts = data.clone();
            contexts.extend_from_slice(&1_u32.to_be_bytes());
            contexts.extend_from_slice(&15_u32.to_be_bytes());
            contexts.extend_from_slice(b"base:allocation");
            self.option(10, &contexts);
            assert_eq!(self.until_ack().len(), 2);
        }
        data.extend_from_slice(&[0, 0]);
        self.option(7, &data);
        let replies = self.until_ack();
        assert_eq!(replies.last().unwrap().0, 1, "{replies:?}");
        let export = &replies[0].1;
        u16::from_be_bytes(export[10..12].try_into().unwrap())
    }

    pub fn request(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, len: u32) {
        let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
        bytes.extend_from_slice(&flags.to_be_bytes());
        bytes.extend_from_slice(&command.to_be_bytes());
        bytes.extend_from_slice(&cookie.to_be_bytes());
        bytes.extend_from_slice(&offset.to_be_bytes());
        bytes.extend_from_slice(&len.to_be_bytes());
        self.stream.write_all(&bytes).unwrap();
    }

    pub fn write(&mut self, cookie: u64, offset: u64, data: &[u8]) {
        self.request(0, 1, cookie, offset, data.len() as u32);
        self.stream.write_all(data).unwrap();
    }

    /// One whole reply; `simple_len` is how much a simple one carries.
    pub fn answer(&mut self, simple_len: usize) -> Answer {
        let mut answer = Answer::default();
        loop {
            let magic = be32(&self.take(4), 0);
            if magic == 0x6744_6698 {
                let head = self.take(12);
                answer.error = be32(&head, 0);
                answer.cookie = be64(&head, 4);
                if answer.error == 0 && simple_len > 0 {
                    let data = self.take(simple_len);
                    answer.data.push((0, data));
                }
                return answer;
            }
            assert_eq!(magic, 0x668e_33ef);
            let head = self.take(16);
            let done = head[1] & 1 == 1;
            let kind = u16::from_be_bytes(head[2..4].try_into().unwrap());
            answer.cookie = be64(&head, 4);
            let body = self.take(be32(&head, 12) as usize);
            match kind {
                0 => assert!(done && body.is_empty()),
                1 => answer.data.push((be64(&body, 0), body[8..].to_vec())),
                2 => answer.holes.push((be64(&body, 0), be32(&body, 8))),
                5 => {
                    assert_eq!(be32(&body, 0), 1);
                    let states = body[4..].chunks(8).map(|c| (be32(c, 0), be32(c, 4)));
                    answer.status = states.collect();
                }
                0x8001 => {
                    answer.error = be32(&body, 0);
                    answer.text = String::from_utf8(body[6..].to_vec()).unwrap();
                }
                other => panic!("a chunk of kind {other}"),
            }
            if done {
                return answer;
            }
        }
    }

    /// Reads, and puts the chunks together.
    pub fn read(&mut self, offset: u64, len: u32) -> Vec<u8> {
        self.request(0, 0, 77, offset, len);
        let answer = self.answer(len as usize);
        assert_eq!((answer.error, answer.cookie), (0, 77));
        assemble(&answer, offset, len)
    }
}

/// The bytes of a structured read.
pub fn assemble(answer: &Answer, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    let mut covered = 0;
    for (at, data) in &answer.data {
        let at = at.saturating_sub(offset) as usize;
        bytes[at..at + data.len()].copy_from_slice(data);
        covered += data.len();
    }
    covered += answer.holes.iter().map(|h| h.1 as usize).sum::<usize>();
    assert_eq!(covered, len as usize, "all of it was answered");
    bytes
}
