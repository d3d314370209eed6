//! Answers to requests.

use ashlar_replication::message::{ReadError, Reply, RequestId};
use ashlar_replication::values::{BLOCK_BYTES, ExtentIndex, Position};

use super::{bare, frame, put_packed, put_positions, refused_as};
use crate::frame::POSITIONS_MAX;
use crate::header::{FLAG_MORE, FLAG_ZEROS, Header, Kind};
use crate::refusal::read_error_code;

/// [`Kind::Data`] for `positions.len()` blocks: with `crcs` the data must be sent behind it, without
/// the content is zeros.
///
/// # Panics
/// When there are not as many checksums as positions.
pub fn data(
    out: &mut Vec<u8>,
    handle: u32,
    id: RequestId,
    positions: &[Position],
    crcs: Option<&[u32]>,
) {
    let counts = crcs.map_or(positions.len(), <[u32]>::len);
    assert_eq!(counts, positions.len(), "one checksum per block");
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
