//! Values to frames.
//!
//! Every function appends a header and a body to `out` and leaves block data to the caller, who
//! hands it to the socket by reference. Nothing allocates once `out` has its capacity.

use ashlar_replication::message::{BlockPosition, Content, ReadError, Refusal, Reply, Request};
use ashlar_replication::message::{RequestId, TornBlocks};
use ashlar_replication::values::{BLOCK_BYTES, BlockRange, EpochNumber, ExtentIndex, Position};

use crate::body::{put_configuration, put_epoch, put_member_id, put_member_ids, put_member_state};
use crate::frame::{BlockData, Fence, GOODBYE_BYTES_MAX, GoodbyeCode, Hello, POSITIONS_MAX};
use crate::frame::{Promise, TORN_MAX, Welcome};
use crate::header::{FLAG_MORE, FLAG_TORN, FLAG_ZEROS, HEADER_BYTES, Header, Kind};
use crate::payload::Payload;
use crate::proof::{Challenges, Subject, VolumeKey, promise_proof};
use crate::refusal::{read_error_code, refusal_code};
use zerocopy::IntoBytes as _;

/// Block data whose checksums can be written into a body.
pub trait EncodeBlocks {
    /// Number of blocks.
    fn block_count(&self) -> usize;
    /// Appends one little-endian CRC-32C per block.
    fn put_crcs(&self, out: &mut Vec<u8>);
}

impl EncodeBlocks for Payload {
    fn block_count(&self) -> usize {
        self.blocks()
    }
    fn put_crcs(&self, out: &mut Vec<u8>) {
        self.crcs()
            .iter()
            .for_each(|crc| out.extend_from_slice(&crc.to_le_bytes()));
    }
}

impl EncodeBlocks for BlockData<'_> {
    fn block_count(&self) -> usize {
        self.crcs.len()
    }
    fn put_crcs(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.crcs.as_bytes());
    }
}

/// Writes a frame: room for the header, the body by `body`, then the header over it.
fn frame(out: &mut Vec<u8>, mut header: Header, data: usize, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.resize(start + HEADER_BYTES, 0);
    body(out);
    header.seal(&out[start + HEADER_BYTES..], data);
    out[start..start + HEADER_BYTES].copy_from_slice(header.as_bytes());
}

fn bare(out: &mut Vec<u8>, header: Header) {
    frame(out, header, 0, |_| {});
}

/// [`Kind::Hello`].
pub fn hello(out: &mut Vec<u8>, hello: &Hello) {
    frame(out, Header::new(Kind::Hello), 0, |out| {
        out.extend_from_slice(&hello.version_min.to_le_bytes());
        out.extend_from_slice(&hello.version_max.to_le_bytes());
        out.extend_from_slice(&hello.features.to_le_bytes());
        out.extend_from_slice(&hello.nonce);
        out.extend_from_slice(&hello.initiator);
    });
}

/// [`Kind::Welcome`].
pub fn welcome(out: &mut Vec<u8>, welcome: &Welcome) {
    frame(out, Header::new(Kind::Welcome), 0, |out| {
        out.extend_from_slice(&welcome.version.to_le_bytes());
        out.extend_from_slice(&welcome.features.to_le_bytes());
        out.extend_from_slice(&welcome.nonce);
        out.extend_from_slice(&welcome.node);
        out.extend_from_slice(&welcome.device.0);
        out.extend_from_slice(&welcome.operations_max.to_le_bytes());
        out.extend_from_slice(&welcome.bytes_max.to_le_bytes());
        out.extend_from_slice(&welcome.lease_ms.to_le_bytes());
    });
}

/// [`Kind::Goodbye`]; a text above 512 bytes is cut at a character.
pub fn goodbye(out: &mut Vec<u8>, code: GoodbyeCode, text: &str) {
    let mut header = Header::new(Kind::Goodbye);
    header.argument = (code as u64).into();
    let end = text.floor_char_boundary(GOODBYE_BYTES_MAX);
    frame(out, header, 0, |out| {
        out.extend_from_slice(&text.as_bytes()[..end])
    });
}

/// [`Kind::Fence`].
pub fn fence(out: &mut Vec<u8>, fence: &Fence) {
    let mut header = Header::new(Kind::Fence);
    header.handle = fence.subject.handle.into();
    frame(out, header, 0, |out| {
        out.extend_from_slice(&fence.subject.volume.0);
        put_member_id(out, fence.subject.member);
        put_epoch(out, fence.subject.epoch);
        out.extend_from_slice(&fence.proof);
    });
}

/// [`Kind::Promised`], with the proof over the answer.
///
/// # Panics
/// When there are more than [`TORN_MAX`] torn blocks; the store bounds them.
pub fn promised(
    out: &mut Vec<u8>,
    key: &VolumeKey,
    challenges: &Challenges,
    subject: &Subject,
    promise: &Promise,
) {
    assert!(
        promise.torn.len() <= TORN_MAX,
        "more torn blocks than a promise can name"
    );
    let mut header = Header::new(Kind::Promised);
    header.handle = subject.handle.into();
    frame(out, header, 0, |out| {
        let start = out.len();
        put_epoch(out, promise.epoch);
        put_member_state(out, &promise.state);
        out.extend_from_slice(&promise.size_blocks.to_le_bytes());
        out.extend_from_slice(&(promise.torn.len() as u32).to_le_bytes());
        put_positions(out, &promise.torn);
        let proof = promise_proof(key, challenges, subject, &out[start..]);
        out.extend_from_slice(&proof);
    });
}

/// [`Kind::FenceRefused`].
pub fn fence_refused(out: &mut Vec<u8>, handle: u32, refusal: Refusal) {
    refused_as(out, Kind::FenceRefused, handle, 0, refusal);
}

/// [`Kind::Release`].
pub fn release(out: &mut Vec<u8>, handle: u32) {
    let mut header = Header::new(Kind::Release);
    header.handle = handle.into();
    bare(out, header);
}

/// [`Kind::Renew`].
pub fn renew(out: &mut Vec<u8>, echo: u64) {
    let mut header = Header::new(Kind::Renew);
    header.request = echo.into();
    bare(out, header);
}

/// [`Kind::Renewed`].
pub fn renewed(out: &mut Vec<u8>, echo: u64) {
    let mut header = Header::new(Kind::Renewed);
    header.request = echo.into();
    bare(out, header);
}

/// [`Kind::Fenced`].
pub fn fenced(out: &mut Vec<u8>, handle: u32, promised: EpochNumber) {
    let mut header = Header::new(Kind::Fenced);
    header.handle = handle.into();
    header.argument = u64::from(promised.0).into();
    bare(out, header);
}

fn set_range(header: &mut Header, range: BlockRange) {
    header.start = range.start.0.into();
    header.count = range.count.into();
}

/// Sets the flag of zeros, or returns the bytes of data that follow.
fn set_content<P: EncodeBlocks>(header: &mut Header, content: &Content<P>) -> usize {
    match content {
        Content::Zeros => {
            header.flags = FLAG_ZEROS.into();
            0
        }
        Content::Data(blocks) => {
            debug_assert_eq!(blocks.block_count(), header.count.get() as usize);
            blocks.block_count() * BLOCK_BYTES
        }
    }
}

fn put_content<P: EncodeBlocks>(out: &mut Vec<u8>, content: &Content<P>) {
    if let Content::Data(blocks) = content {
        blocks.put_crcs(out);
    }
}

fn put_positions(out: &mut Vec<u8>, positions: &[BlockPosition]) {
    for entry in positions {
        out.extend_from_slice(&entry.block.0.to_le_bytes());
        out.extend_from_slice(&entry.position.pack().to_le_bytes());
    }
}

/// Any request but Fence. The data of its content, if it has any, must be sent behind it.
///
/// # Panics
/// On [`Request::Fence`], which has an encoder of its own.
pub fn request<P: EncodeBlocks>(out: &mut Vec<u8>, handle: u32, request: &Request<P>) {
    let mut header = Header::new(Kind::Write);
    header.handle = handle.into();
    let mut start = |kind: Kind, id: RequestId| {
        header.kind = (kind as u16).into();
        header.request = id.0.into();
    };
    match request {
        Request::Fence { .. } => panic!("Fence is encoded with its proof"),
        Request::Write {
            sequence,
            range,
            content,
        } => {
            header.request = sequence.0.into();
            set_range(&mut header, *range);
            let data = set_content(&mut header, content);
            frame(out, header, data, |out| put_content(out, content));
        }
        Request::StoreConfig {
            id,
            configuration,
            start: list,
        } => {
            start(Kind::StoreConfig, *id);
            frame(out, header, 0, |out| {
                put_configuration(out, configuration);
                put_member_ids(out, list);
            });
        }
        Request::BeginResync { id, pass, sequence } => {
            start(Kind::BeginResync, *id);
            header.argument = u64::from(pass.0).into();
            header.start = sequence.0.into();
            bare(out, header);
        }
        Request::Copy {
            id,
            pass,
            range,
            steps,
            content,
        } => {
            start(Kind::Copy, *id);
            header.argument = u64::from(pass.0).into();
            set_range(&mut header, *range);
            let data = set_content(&mut header, content);
            frame(out, header, data, |out| {
                for step in steps {
                    out.extend_from_slice(&step.expected.pack().to_le_bytes());
                    out.extend_from_slice(&step.position.pack().to_le_bytes());
                }
                put_content(out, content);
            });
        }
        Request::MarkComplete { id, pass } => {
            start(Kind::MarkComplete, *id);
            header.argument = u64::from(pass.0).into();
            bare(out, header);
        }
        Request::Equalise {
            id,
            range,
            positions,
            content,
        } => {
            start(Kind::Equalise, *id);
            set_range(&mut header, *range);
            let data = set_content(&mut header, content);
            frame(out, header, data, |out| {
                put_packed(out, positions);
                put_content(out, content);
            });
        }
        Request::SetLast { id, position } => {
            start(Kind::SetLast, *id);
            header.argument = position.pack().into();
            bare(out, header);
        }
        Request::Read { id, range, torn } => {
            start(Kind::Read, *id);
            set_range(&mut header, *range);
            if *torn == TornBlocks::Serve {
                header.flags = FLAG_TORN.into();
            }
            bare(out, header);
        }
        Request::Compare { id, extent } => {
            start(Kind::Compare, *id);
            header.start = extent.0.into();
            bare(out, header);
        }
        Request::Digests { id, from, count } => {
            start(Kind::Digests, *id);
            header.start = from.0.into();
            header.count = (*count).into();
            bare(out, header);
        }
        Request::ListAbove { id, floor, from } => {
            start(Kind::ListAbove, *id);
            header.argument = floor.pack().into();
            header.start = from.0.into();
            bare(out, header);
        }
        Request::Repair {
            id,
            block,
            position,
            content,
        } => {
            start(Kind::Repair, *id);
            header.argument = position.pack().into();
            set_range(
                &mut header,
                BlockRange {
                    start: *block,
                    count: 1,
                },
            );
            let data = set_content(&mut header, content);
            frame(out, header, data, |out| put_content(out, content));
        }
    }
}

fn put_packed(out: &mut Vec<u8>, positions: &[Position]) {
    positions
        .iter()
        .for_each(|p| out.extend_from_slice(&p.pack().to_le_bytes()));
}

fn refused_as(out: &mut Vec<u8>, kind: Kind, handle: u32, request: u64, refusal: Refusal) {
    let (code, argument) = refusal_code(refusal);
    let mut header = Header::new(kind);
    header.handle = handle.into();
    header.request = request.into();
    header.count = code.into();
    header.argument = argument.into();
    bare(out, header);
}

/// [`Kind::Data`] for `positions.len()` blocks: with `crcs` the data must be sent behind it, without
/// the content is zeros.
pub fn data(
    out: &mut Vec<u8>,
    handle: u32,
    id: RequestId,
    positions: &[Position],
    crcs: Option<&[u32]>,
) {
    let mut header = Header::new(Kind::Data);
    header.handle = handle.into();
    header.request = id.0.into();
    header.count = (positions.len() as u32).into();
    if crcs.is_none() {
        header.flags = FLAG_ZEROS.into();
    }
    let bytes = crcs.map_or(0, |crcs| crcs.len() * BLOCK_BYTES);
    frame(out, header, bytes, |out| {
        put_packed(out, positions);
        let crcs = crcs.unwrap_or_default();
        crcs.iter()
            .for_each(|crc| out.extend_from_slice(&crc.to_le_bytes()));
    });
}

/// [`Kind::ReadFailed`].
pub fn read_failed(out: &mut Vec<u8>, handle: u32, id: RequestId, error: ReadError) {
    let (code, block, argument) = read_error_code(error);
    let mut header = Header::new(Kind::ReadFailed);
    header.handle = handle.into();
    header.request = id.0.into();
    header.count = code.into();
    header.start = block.into();
    header.argument = argument.into();
    bare(out, header);
}

/// Any answer but Promised and one with data, which have encoders of their own.
///
/// # Panics
/// On those two, and on a list longer than [`POSITIONS_MAX`].
pub fn reply<P>(out: &mut Vec<u8>, handle: u32, reply: &Reply<P>) {
    let mut header = Header::new(Kind::Applied);
    header.handle = handle.into();
    match reply {
        Reply::Promised { .. } => panic!("Promised is encoded with its proof"),
        Reply::Data {
            id,
            result: Err(error),
        } => read_failed(out, handle, *id, *error),
        Reply::Data { .. } => panic!("Data is encoded by encode::data"),
        Reply::Applied { sequence } => {
            header.request = sequence.0.into();
            bare(out, header);
        }
        Reply::Refused { id, refusal } => refused_as(out, Kind::Refused, handle, id.0, *refusal),
        Reply::WriteRefused { sequence, refusal } => {
            refused_as(out, Kind::WriteRefused, handle, sequence.0, *refusal);
        }
        Reply::Done { id } => {
            header.kind = (Kind::Done as u16).into();
            header.request = id.0.into();
            bare(out, header);
        }
        Reply::Copied { id, changed } => {
            assert!(changed.len() <= POSITIONS_MAX);
            header.kind = (Kind::Copied as u16).into();
            header.request = id.0.into();
            frame(out, header, 0, |out| put_positions(out, changed));
        }
        Reply::Positions {
            id,
            positions,
            next,
            last,
        } => {
            assert!(positions.len() <= POSITIONS_MAX);
            header.kind = (Kind::Positions as u16).into();
            header.request = id.0.into();
            header.argument = last.pack().into();
            if let Some(next) = next {
                header.flags = FLAG_MORE.into();
                header.start = next.0.into();
            }
            frame(out, header, 0, |out| put_positions(out, positions));
        }
        Reply::Digests { id, digests } => {
            assert!(digests.len() <= POSITIONS_MAX);
            header.kind = (Kind::DigestList as u16).into();
            header.request = id.0.into();
            frame(out, header, 0, |out| put_digests(out, digests));
        }
    }
}

fn put_digests(out: &mut Vec<u8>, digests: &[(ExtentIndex, u64)]) {
    for (extent, digest) in digests {
        out.extend_from_slice(&extent.0.to_le_bytes());
        out.extend_from_slice(&digest.to_le_bytes());
    }
}
