//! Requests of an attachment.

use ashlar_replication::message::{Content, Request, RequestId, TornBlocks};
use ashlar_replication::values::{BLOCK_BYTES, BlockRange, Position};

use super::{EncodeBlocks, bare, frame, put_packed};
use crate::body::{put_configuration, put_member_ids};
use crate::header::{FLAG_TORN, FLAG_ZEROS, Header, Kind};

/// Any request but Fence. The data of its content, if it has any, must be sent behind it.
///
/// # Panics
/// On [`Request::Fence`], which has an encoder of its own, and when a list or the content does not
/// have one entry per block.
pub fn request<P: EncodeBlocks>(out: &mut Vec<u8>, handle: u32, request: &Request<P>) {
    let start = |kind: Kind, id: RequestId| {
        let mut header = Header::new(kind);
        header.handle = handle.into();
        header.request = id.0.into();
        header
    };
    match request {
        Request::Fence { .. } => panic!("Fence is encoded with its proof"),
        Request::Write {
            sequence,
            range,
            content,
        } => {
            let header = start(Kind::Write, RequestId(sequence.0));
            with_content(out, header, *range, content, |_| {});
        }
        Request::StoreConfig {
            id,
            configuration,
            start: list,
        } => frame(out, start(Kind::StoreConfig, *id), 0, |out| {
            put_configuration(out, configuration);
            put_member_ids(out, list);
        }),
        Request::BeginResync { id, pass, sequence } => {
            let mut header = start(Kind::BeginResync, *id);
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
            assert_eq!(steps.len(), range.count as usize, "one step per block");
            let mut header = start(Kind::Copy, *id);
            header.argument = u64::from(pass.0).into();
            with_content(out, header, *range, content, |out| {
                for step in steps {
                    put_packed(out, &[step.expected, step.position]);
                }
            });
        }
        Request::MarkComplete { id, pass } => {
            let mut header = start(Kind::MarkComplete, *id);
            header.argument = u64::from(pass.0).into();
            bare(out, header);
        }
        Request::Equalise {
            id,
            range,
            positions,
            content,
        } => equalise(out, start(Kind::Equalise, *id), *range, positions, content),
        Request::SetLast { id, position } => {
            let mut header = start(Kind::SetLast, *id);
            header.argument = position.pack().into();
            bare(out, header);
        }
        Request::Repair {
            id,
            block,
            position,
            content,
        } => {
            let mut header = start(Kind::Repair, *id);
            header.argument = position.pack().into();
            let (start, count) = (*block, 1);
            with_content(out, header, BlockRange { start, count }, content, |_| {});
        }
        Request::Read { .. }
        | Request::Compare { .. }
        | Request::Digests { .. }
        | Request::ListAbove { .. } => question(out, handle, request),
    }
}

/// Requests that change nothing.
fn question<P>(out: &mut Vec<u8>, handle: u32, request: &Request<P>) {
    let mut header = Header::new(Kind::Read);
    let (kind, id) = match request {
        Request::Read { id, range, torn } => {
            set_range(&mut header, *range);
            if *torn == TornBlocks::Serve {
                header.flags = FLAG_TORN.into();
            }
            (Kind::Read, *id)
        }
        Request::Compare { id, extent } => {
            header.start = extent.0.into();
            (Kind::Compare, *id)
        }
        Request::Digests { id, from, count } => {
            header.start = from.0.into();
            header.count = (*count).into();
            (Kind::Digests, *id)
        }
        Request::ListAbove { id, floor, from } => {
            header.argument = floor.pack().into();
            header.start = from.0.into();
            (Kind::ListAbove, *id)
        }
        _ => unreachable!("the caller passes questions only"),
    };
    header.kind = (kind as u16).into();
    header.handle = handle.into();
    header.request = id.0.into();
    bare(out, header);
}

fn equalise<P: EncodeBlocks>(
    out: &mut Vec<u8>,
    header: Header,
    range: BlockRange,
    positions: &[Position],
    content: &Content<P>,
) {
    let count = range.count as usize;
    assert_eq!(positions.len(), count, "one position per block");
    with_content(out, header, range, content, |out| {
        put_packed(out, positions)
    });
}

fn set_range(header: &mut Header, range: BlockRange) {
    header.start = range.start.0.into();
    header.count = range.count.into();
}

/// A frame with a range and its content, whose checksums follow what `list` writes.
fn with_content<P: EncodeBlocks>(
    out: &mut Vec<u8>,
    mut header: Header,
    range: BlockRange,
    content: &Content<P>,
    list: impl FnOnce(&mut Vec<u8>),
) {
    set_range(&mut header, range);
    let data = match content {
        Content::Zeros => {
            header.flags = FLAG_ZEROS.into();
            0
        }
        Content::Data(blocks) => {
            let blocks = blocks.block_count();
            assert_eq!(blocks, range.count as usize, "the content fits the range");
            blocks * BLOCK_BYTES
        }
    };
    frame(out, header, data, |out| {
        list(out);
        if let Content::Data(blocks) = content {
            blocks.put_crcs(out);
        }
    });
}
