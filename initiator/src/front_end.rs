//! What a front end is: something on an initiator's thread that makes byte requests of volumes.
//!
//! A front end runs on the thread that owns the volumes, between the sockets of its clients and the
//! sockets of the storage nodes, with no hand-off. The NBD server is one, the load generator of
//! `ashlar bench` another.

use ashlar_engine::{Engine, Event, ListenerId, SharedBytes, SocketId};
use ashlar_replication::message::Content;
use ashlar_replication::values::{EpochNumber, Time, VolumeId};

/// The most bytes of one read or write. A front end splits what is larger.
///
/// The largest request that NBD clients are promised (32 MiB).
pub const REQUEST_BYTES_MAX: u32 = 32 << 20;

/// A volume that is attached on this thread. Never used again for another attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeHandle(pub u32);

/// A front end's name for one of its requests, unique among those it has under way on a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Place of a front end among those of its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontEndId(pub u16);

/// How a range is made to read as zeros. Both are writes of zeros to the replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Zero {
    /// The client no longer needs the content. Only whole blocks are zeroed, the edges may keep
    /// their content.
    Discard,
    /// The range reads as zeros afterwards, to the byte.
    WriteZeroes,
    /// As [`Zero::WriteZeroes`], and the range has space on the devices afterwards: later writes to it
    /// find it. As slow as a write.
    Provision,
}

/// A request for bytes of a volume, at any alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteRequest<'a> {
    /// Completes with [`Completed::Read`].
    Read {
        /// The first byte.
        offset: u64,
        /// Bytes, 1 to [`REQUEST_BYTES_MAX`].
        len: u32,
    },
    /// Completes with [`Completed::Done`] when it is durable on a write quorum.
    Write {
        /// The first byte.
        offset: u64,
        /// 1 to [`REQUEST_BYTES_MAX`] bytes, copied before the call returns.
        data: &'a [u8],
    },
    /// As [`ByteRequest::Write`] without the copy: what is whole blocks of it is kept until all
    /// replicas have it. Nobody may change it any more.
    WriteShared {
        /// The first byte.
        offset: u64,
        /// 1 to [`REQUEST_BYTES_MAX`] bytes.
        data: &'a SharedBytes,
    },
    /// Completes with [`Completed::Done`].
    Zero {
        /// The first byte.
        offset: u64,
        /// Bytes, at least 1; up to the size of the volume.
        len: u64,
        /// How.
        kind: Zero,
    },
    /// Completes with [`Completed::Done`] once every write that completed before is durable, which
    /// it is by the time it completes.
    Flush,
    /// Completes with [`Completed::Allocation`].
    Allocation {
        /// The first byte.
        offset: u64,
        /// Bytes, at least 1.
        len: u64,
    },
}

/// Consecutive bytes of a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadPiece {
    /// How many.
    pub len: u32,
    /// `len` bytes, or zeros without a buffer.
    pub content: Content<SharedBytes>,
}

/// Consecutive bytes with the same allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationPiece {
    /// How many.
    pub len: u64,
    /// Whether they were found to hold data, or zeros.
    pub allocation: Allocation,
}

/// What a range holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Allocation {
    /// Data, perhaps zeros that were written as data.
    Data,
    /// Zeros, without space on the devices.
    Zeros,
}

/// How a request ended well. What it borrows is reused after the call: keep clones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completed<'a> {
    /// The bytes in order; their lengths add up to the length of the request.
    Read(&'a [ReadPiece]),
    /// Done, and durable on a write quorum.
    Done,
    /// In order; the lengths add up to at most the length of the request, at least one piece.
    Allocation(&'a [AllocationPiece]),
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// The range is empty or reaches beyond the end of the volume.
    #[error("the range is empty or reaches beyond the end of the volume")]
    OutOfRange,
    /// More bytes than [`REQUEST_BYTES_MAX`].
    #[error("the request is longer than {REQUEST_BYTES_MAX} bytes")]
    TooLong,
    /// The volume is attached read-only.
    #[error("the volume is attached read-only")]
    ReadOnly,
    /// No such volume on this thread, or it is being detached.
    #[error("the volume is not attached")]
    NotAttached,
    /// The volume has as many requests under way as it takes; see [`Context::can_accept`].
    #[error("the volume has too many requests under way")]
    Busy,
    /// No quorum of replicas answered within the volume's I/O timeout.
    #[error("no quorum of replicas answered within the I/O timeout")]
    TimedOut,
    /// Another initiator has attached the volume.
    #[error(
        "fenced: another initiator has attached the volume with epoch {}",
        by.0
    )]
    Fenced {
        /// The epoch that fenced this attachment.
        by: EpochNumber,
    },
    /// The attachment is over for another reason.
    #[error("the attachment is over: {0}")]
    Over(&'static str),
    /// No replica has a good copy of a block.
    #[error("no replica has a good copy of the data at offset {offset}")]
    Media {
        /// The first byte of the block.
        offset: u64,
    },
    /// The devices of too many replicas are full.
    #[error("the devices of the replicas are full")]
    NoSpace,
    /// The devices of too many replicas failed.
    #[error("the devices of the replicas failed")]
    Device,
}

/// What a front end learns about a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    /// Its UUID.
    pub id: VolumeId,
    /// Its name, unique on this initiator.
    pub name: String,
    /// Its size, a multiple of 4096.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub access: VolumeAccess,
}

/// Whether a volume takes writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum VolumeAccess {
    /// Reads and writes.
    #[default]
    ReadWrite,
    /// Reads only.
    ReadOnly,
}

/// Something of the engine whose events go to the front end that owns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owned {
    /// A socket that it adopted or connected.
    Socket(SocketId),
    /// A listener. The sockets that it accepts are owned by the front end as well.
    Listener(ListenerId),
}

impl From<SocketId> for Owned {
    fn from(socket: SocketId) -> Owned {
        Owned::Socket(socket)
    }
}

impl From<ListenerId> for Owned {
    fn from(listener: ListenerId) -> Owned {
        Owned::Listener(listener)
    }
}

/// The volumes of a thread, as a [`Context`] reaches them; a fake of it tests a front end alone.
pub trait Volumes {
    /// Takes a request; see [`Context::submit`].
    ///
    /// # Errors
    /// When the request is refused at once. It then never completes.
    fn submit(
        &mut self,
        engine: &mut Engine,
        front_end: FrontEndId,
        volume: VolumeHandle,
        ticket: Ticket,
        request: ByteRequest<'_>,
    ) -> Result<(), IoError>;

    /// See [`Context::can_accept`].
    fn can_accept(&self, volume: VolumeHandle) -> bool;

    /// See [`Context::own`].
    fn own(&mut self, front_end: FrontEndId, owned: Owned);

    /// The opposite of [`Volumes::own`].
    fn disown(&mut self, owned: Owned) {
        let _ = owned;
    }
}

/// What a front end works with while it is called.
pub struct Context<'a> {
    engine: &'a mut Engine,
    volumes: &'a mut dyn Volumes,
    front_end: FrontEndId,
}

impl<'a> Context<'a> {
    /// The context of one front end for one call.
    pub fn new(
        engine: &'a mut Engine,
        volumes: &'a mut dyn Volumes,
        front_end: FrontEndId,
    ) -> Context<'a> {
        Context {
            engine,
            volumes,
            front_end,
        }
    }

    /// The thread's engine. What is sent goes out when the turn ends.
    pub fn engine(&mut self) -> &mut Engine {
        self.engine
    }

    /// Monotonic time, read once per turn.
    pub fn now(&self) -> Time {
        self.engine.now()
    }

    /// Makes the calling front end the receiver of the events of a socket or listener. It ends by
    /// itself with the socket.
    pub fn own(&mut self, owned: impl Into<Owned>) {
        self.volumes.own(self.front_end, owned.into());
    }

    /// Closes a socket of the calling front end; no event about it follows. Ownership of a socket that
    /// is closed through the engine alone would stay behind.
    pub fn close(&mut self, socket: SocketId) {
        self.volumes.disown(socket.into());
        self.engine.close(socket);
    }

    /// Makes a request of a volume. It ends with [`FrontEnd::completed`], later, never from within
    /// this call.
    ///
    /// # Errors
    /// When the request is refused at once; it then never completes.
    pub fn submit(
        &mut self,
        volume: VolumeHandle,
        ticket: Ticket,
        request: ByteRequest<'_>,
    ) -> Result<(), IoError> {
        self.volumes
            .submit(self.engine, self.front_end, volume, ticket, request)
    }

    /// Whether the volume takes another request now. If not, try again in the turn after one of
    /// its requests completed; [`Context::submit`] would answer [`IoError::Busy`].
    pub fn can_accept(&self, volume: VolumeHandle) -> bool {
        self.volumes.can_accept(volume)
    }
}

/// Something on an initiator's thread that makes requests of the volumes there.
///
/// All methods run on that thread and must not block. In each turn the thread delivers socket
/// events and completions, then calls [`FrontEnd::turn`] once, then sends what was queued.
pub trait FrontEnd {
    /// Called once, before anything else, for example to listen.
    ///
    /// # Errors
    /// Anything that makes the front end useless; the thread ends with that error.
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        let _ = context;
        Ok(())
    }

    /// An event of a socket or listener that it owns.
    fn socket_event(&mut self, context: &mut Context<'_>, event: &Event) {
        let _ = (context, event);
    }

    /// A request that [`Context::submit`] took has ended.
    fn completed(
        &mut self,
        context: &mut Context<'_>,
        volume: VolumeHandle,
        ticket: Ticket,
        result: Result<Completed<'_>, IoError>,
    );

    /// Called once per turn, after events and completions. Returns when it wants to be called
    /// again at the latest ([`Time::NEVER`]: when something happens).
    fn turn(&mut self, context: &mut Context<'_>) -> Time {
        let _ = context;
        Time::NEVER
    }

    /// A volume is open for I/O.
    fn volume_attached(
        &mut self,
        context: &mut Context<'_>,
        volume: VolumeHandle,
        info: &VolumeInfo,
    ) {
        let _ = (context, volume, info);
    }

    /// The volume has grown.
    fn volume_resized(
        &mut self,
        context: &mut Context<'_>,
        volume: VolumeHandle,
        info: &VolumeInfo,
    ) {
        let _ = (context, volume, info);
    }

    /// The volume is being detached: no more requests are taken, those under way still complete.
    fn volume_detached(&mut self, context: &mut Context<'_>, volume: VolumeHandle) {
        let _ = (context, volume);
    }
}
