//! Values to frames.
//!
//! Every function appends a header and a body to `out` and leaves block data to the caller, who
//! hands it to the socket by reference. Nothing allocates once `out` has its capacity.

mod reply;
mod request;

pub use reply::{data, read_failed, reply};
pub use request::request;

use ashlar_replication::message::{BlockPosition, Refusal};
use ashlar_replication::values::{EpochNumber, Position};
use zerocopy::IntoBytes as _;

use crate::body::{put_epoch, put_member_id, put_member_state};
use crate::frame::Welcome;
use crate::frame::{BlockData, Fence, GOODBYE_BYTES_MAX, GoodbyeCode, Hello, Promise, TORN_MAX};
use crate::header::{HEADER_BYTES, Header, Kind};
use crate::payload::Payload;
use crate::proof::{Challenges, Subject, VolumeKey, promise_proof};
use crate::refusal::refusal_code;

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
///
/// # Panics
/// When the frame is larger than its kind may be: the peer would close the connection.
fn frame(out: &mut Vec<u8>, mut header: Header, data: usize, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.resize(start + HEADER_BYTES, 0);
    body(out);
    let body = &out[start + HEADER_BYTES..];
    let limits = Kind::from_number(header.kind.get()).map(Kind::limits);
    let fits = limits.is_some_and(|limits| {
        body.len() <= limits.body_bytes_max as usize && data <= limits.data_bytes_max as usize
    });
    assert!(fits, "a frame above the limits of its kind");
    header.seal(body, data);
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

fn put_positions(out: &mut Vec<u8>, positions: &[BlockPosition]) {
    for entry in positions {
        out.extend_from_slice(&entry.block.0.to_le_bytes());
        out.extend_from_slice(&entry.position.pack().to_le_bytes());
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
