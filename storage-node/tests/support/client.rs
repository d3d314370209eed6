//! A raw client: frames over a blocking socket, nothing of the initiator's machinery.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ashlar_engine::Address;
use ashlar_replication::message::{
    Content, ReadError, Refusal, Reply, Request, RequestId, TornBlocks,
};
use ashlar_replication::values::{
    Block, BlockRange, Epoch, EpochNumber, MemberId, Sequence, VolumeId,
};
use ashlar_wire::proof::{Challenges, Subject, VolumeKey, fence_proof, verify_promise};
use ashlar_wire::{
    BlockData, Decoded, Fence, Frame, GoodbyeCode, Hello, Promise, VERSION, Welcome, decode, encode,
};
use zerocopy::little_endian::U32;

use super::{KEY, configuration};

/// A frame that was received, with memory of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    Welcome(Welcome),
    Goodbye(GoodbyeCode, String),
    /// With whether the member's proof is right.
    Promised(Box<Promise>, bool),
    FenceRefused(u32, Refusal),
    Renewed(u64),
    Fenced(u32, EpochNumber),
    Reply(u32, Reply<Vec<u8>>),
    /// The node closed the connection.
    Closed,
    /// Nothing came within the client's patience.
    Silence,
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A connection to a shard.
pub struct Client {
    stream: Stream,
    input: Vec<u8>,
    challenges: Challenges,
    /// Of the last Fence on each handle, to check its answer.
    subjects: Vec<Subject>,
    next_id: u64,
}

pub fn range(start: u64, count: u32) -> BlockRange {
    BlockRange {
        start: Block(start),
        count,
    }
}

pub fn crcs(data: &[u8]) -> Vec<U32> {
    data.chunks(4096)
        .map(|block| U32::new(crc32c::crc32c(block)))
        .collect()
}

impl Client {
    /// Connects and says nothing yet.
    pub fn connect(address: &Address) -> Client {
        let stream = match address {
            Address::Tcp(address) => Stream::Tcp(TcpStream::connect(address).unwrap()),
            Address::Unix(path) => Stream::Unix(UnixStream::connect(path).unwrap()),
        };
        let mut client = Client {
            stream,
            input: Vec::new(),
            challenges: Challenges {
                client: [3; 16],
                server: [0; 16],
            },
            subjects: Vec::new(),
            next_id: 1,
        };
        client.set_patience(Duration::from_secs(20));
        client
    }

    /// How long [`Client::receive`] waits.
    pub fn set_patience(&mut self, patience: Duration) {
        match &self.stream {
            Stream::Tcp(stream) => stream.set_read_timeout(Some(patience)).unwrap(),
            Stream::Unix(stream) => stream.set_read_timeout(Some(patience)).unwrap(),
        }
    }

    /// Makes sends give up instead of waiting for room.
    pub fn set_nonblocking_sends(&mut self) {
        let patience = Some(Duration::from_millis(300));
        match &self.stream {
            Stream::Tcp(stream) => stream.set_write_timeout(patience).unwrap(),
            Stream::Unix(stream) => stream.set_write_timeout(patience).unwrap(),
        }
    }

    pub fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match &mut self.stream {
            Stream::Tcp(stream) => stream.write_all(bytes),
            Stream::Unix(stream) => stream.write_all(bytes),
        }
    }

    /// Sends as much as goes; returns how much that was.
    pub fn send_some(&mut self, bytes: &[u8]) -> usize {
        let mut sent = 0;
        while sent < bytes.len() {
            let written = match &mut self.stream {
                Stream::Tcp(stream) => stream.write(&bytes[sent..]),
                Stream::Unix(stream) => stream.write(&bytes[sent..]),
            };
            match written {
                Ok(written) => sent += written,
                Err(_) => break,
            }
        }
        sent
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.try_send(bytes).expect("the node takes bytes");
    }

    /// Sends a frame that `write` encodes.
    pub fn send_frame(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let mut out = Vec::new();
        write(&mut out);
        self.send(&out);
    }

    pub fn hello() -> Hello {
        Hello {
            version_min: VERSION,
            version_max: VERSION,
            features: 0,
            nonce: [3; 16],
            initiator: [4; 16],
        }
    }

    /// The handshake.
    pub fn greet(&mut self) -> Welcome {
        self.send_frame(|out| encode::hello(out, &Client::hello()));
        match self.receive() {
            Received::Welcome(welcome) => {
                self.challenges.server = welcome.nonce;
                welcome
            }
            other => panic!("no welcome: {other:?}"),
        }
    }

    /// The next frame.
    pub fn receive(&mut self) -> Received {
        loop {
            match decode(&self.input).expect("a storage node sends whole frames") {
                Decoded::Frame { frame, bytes } => {
                    let frame = frame.expect("a storage node sends right frames");
                    let received = self.own(frame);
                    self.input.drain(..bytes);
                    return received;
                }
                Decoded::Incomplete { .. } => {}
            }
            let mut buffer = [0; 64 << 10];
            let read = match &mut self.stream {
                Stream::Tcp(stream) => stream.read(&mut buffer),
                Stream::Unix(stream) => stream.read(&mut buffer),
            };
            match read {
                Ok(0) => return Received::Closed,
                Ok(read) => self.input.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    return Received::Silence;
                }
                // Reset: the node closed with input unread.
                Err(_) => return Received::Closed,
            }
        }
    }

    fn own(&self, frame: Frame<'_>) -> Received {
        match frame {
            Frame::Welcome(welcome) => Received::Welcome(welcome),
            Frame::Goodbye { code, text } => Received::Goodbye(code, text.to_owned()),
            Frame::Promised {
                handle,
                promise,
                answer,
                proof,
            } => {
                let subject = self.subjects.iter().rev().find(|s| s.handle == handle);
                let subject = subject.expect("an answer to a Fence that was sent");
                let key = VolumeKey(KEY);
                let right = verify_promise(&key, &self.challenges, subject, answer, &proof);
                Received::Promised(Box::new(promise), right)
            }
            Frame::FenceRefused { handle, refusal } => Received::FenceRefused(handle, refusal),
            Frame::Renewed { echo } => Received::Renewed(echo),
            Frame::Fenced { handle, promised } => Received::Fenced(handle, promised),
            Frame::Reply { handle, reply } => Received::Reply(handle, own_reply(reply)),
            other => panic!("a storage node sends no {other:?}"),
        }
    }

    pub fn subject(volume: VolumeId, member: MemberId, epoch: Epoch, handle: u32) -> Subject {
        Subject {
            volume,
            member,
            epoch,
            handle,
        }
    }

    /// Sends a Fence with the proof that `key` gives.
    pub fn send_fence(&mut self, subject: Subject, key: [u8; 32]) {
        let proof = fence_proof(&VolumeKey(key), &self.challenges, &subject);
        self.subjects.push(subject);
        self.send_frame(|out| encode::fence(out, &Fence { subject, proof }));
    }

    /// Fences and returns the promise.
    pub fn fence(
        &mut self,
        volume: VolumeId,
        member: MemberId,
        epoch: Epoch,
        handle: u32,
    ) -> Promise {
        self.send_fence(Client::subject(volume, member, epoch, handle), KEY);
        match self.receive() {
            Received::Promised(promise, true) => *promise,
            other => panic!("no promise: {other:?}"),
        }
    }

    /// Fences and starts the epoch: writes can follow.
    pub fn attach(&mut self, volume: VolumeId, member: MemberId, epoch: Epoch, handle: u32) {
        let promise = self.fence(volume, member, epoch, handle);
        let generation = promise.state.configuration.unwrap().generation.0 + 1;
        let id = self.id();
        let request = Request::StoreConfig {
            id,
            configuration: configuration(member, epoch.number.0, generation),
            start: vec![member],
        };
        self.send_request(handle, &request);
        assert_eq!(
            self.receive(),
            Received::Reply(handle, Reply::Done { id }),
            "the configuration is stored"
        );
    }

    pub fn id(&mut self) -> RequestId {
        self.next_id += 1;
        RequestId(self.next_id)
    }

    pub fn send_request(&mut self, handle: u32, request: &Request<&[u8]>) {
        let bytes = request_bytes(handle, request);
        self.send(&bytes);
    }

    pub fn send_write(&mut self, handle: u32, sequence: u64, start: u64, data: &[u8]) {
        let bytes = write_bytes(handle, sequence, start, data);
        self.send(&bytes);
    }

    /// Writes and waits until that is durable.
    pub fn write(&mut self, handle: u32, sequence: u64, start: u64, data: &[u8]) {
        self.send_write(handle, sequence, start, data);
        self.wait_applied(handle, sequence);
    }

    /// Waits for an answer that covers a write.
    pub fn wait_applied(&mut self, handle: u32, wanted: u64) {
        loop {
            match self.receive() {
                Received::Reply(h, Reply::Applied { sequence }) if h == handle => {
                    assert!(sequence.0 <= wanted, "{sequence:?} was not sent yet");
                    if sequence.0 == wanted {
                        return;
                    }
                }
                other => panic!("no answer to a write: {other:?}"),
            }
        }
    }

    pub fn send_read(&mut self, handle: u32, start: u64, count: u32) -> RequestId {
        let id = self.id();
        let request = Request::Read {
            id,
            range: range(start, count),
            torn: TornBlocks::Refuse,
        };
        self.send_request(handle, &request);
        id
    }

    /// Reads; zeros where nothing was ever written.
    pub fn read(&mut self, handle: u32, start: u64, count: u32) -> Result<Vec<u8>, ReadError> {
        let wanted = self.send_read(handle, start, count);
        match self.receive() {
            Received::Reply(h, Reply::Data { id, result }) if h == handle && id == wanted => result
                .map(|read| {
                    assert_eq!(read.positions.len(), count as usize);
                    match read.content {
                        Content::Zeros => vec![0; count as usize * 4096],
                        Content::Data(data) => data,
                    }
                }),
            other => panic!("no answer to a read: {other:?}"),
        }
    }

    /// The node's challenge of this connection.
    pub fn server_nonce(&self) -> [u8; 16] {
        self.challenges.server
    }

    /// Shuts the sending half.
    pub fn finish_sending(&self) {
        match &self.stream {
            Stream::Tcp(stream) => stream.shutdown(std::net::Shutdown::Write).unwrap(),
            Stream::Unix(stream) => stream.shutdown(std::net::Shutdown::Write).unwrap(),
        }
    }
}

/// Frame and data of a request.
pub fn request_bytes(handle: u32, request: &Request<&[u8]>) -> Vec<u8> {
    let mut out = Vec::new();
    let mut data: &[u8] = &[];
    let content = |content: &Content<&'_ [u8]>| match content {
        Content::Zeros => None,
        Content::Data(data) => Some((crcs(data), data.to_vec())),
    };
    let owned = match request {
        Request::Write { content: c, .. }
        | Request::Copy { content: c, .. }
        | Request::Equalise { content: c, .. }
        | Request::Repair { content: c, .. } => content(c),
        _ => None,
    };
    let blocks = match &owned {
        Some((crcs, bytes)) => {
            data = bytes;
            Content::Data(BlockData { crcs, data: bytes })
        }
        None => Content::Zeros,
    };
    encode::request(&mut out, handle, &with_content(request, blocks));
    out.extend_from_slice(data);
    out
}

pub fn write_bytes(handle: u32, sequence: u64, start: u64, data: &[u8]) -> Vec<u8> {
    let request = Request::Write {
        sequence: Sequence(sequence),
        range: range(start, (data.len() / 4096) as u32),
        content: Content::Data(data),
    };
    request_bytes(handle, &request)
}

fn with_content<'a>(
    request: &Request<&[u8]>,
    content: Content<BlockData<'a>>,
) -> Request<BlockData<'a>> {
    request.clone().map_content(|_| content.clone())
}

fn own_reply(reply: Reply<BlockData<'_>>) -> Reply<Vec<u8>> {
    reply.map_content(|content| match content {
        Content::Zeros => Content::Zeros,
        Content::Data(blocks) => {
            assert_eq!(blocks.first_bad_block(), None, "right checksums");
            Content::Data(blocks.data.to_vec())
        }
    })
}
