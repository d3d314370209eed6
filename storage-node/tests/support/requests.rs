//! Requests frame by frame, and what has to come back.

use ashlar_replication::message::{Content, Refusal, Reply, Request};
use ashlar_replication::values::{EpochNumber, Position, Sequence};

use super::client::{Client, Received, range};

/// A position.
pub fn position(epoch: u32, sequence: u64) -> Position {
    Position {
        epoch: EpochNumber(epoch),
        sequence: Sequence(sequence),
    }
}

/// Why a request is refused; panics when it is not.
pub fn refused(client: &mut Client, handle: u32, request: &Request<&[u8]>) -> Refusal {
    client.send_request(handle, request);
    match client.receive() {
        Received::Reply(h, Reply::Refused { refusal, .. }) if h == handle => refusal,
        Received::Reply(h, Reply::WriteRefused { refusal, .. }) if h == handle => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

/// Sends a request that has to be done.
pub fn done(client: &mut Client, handle: u32, request: &Request<&[u8]>) {
    client.send_request(handle, request);
    match client.receive() {
        Received::Reply(h, Reply::Done { .. }) if h == handle => {}
        other => panic!("not done: {other:?}"),
    }
}

/// The request to write `data` from block `start`.
pub fn write(sequence: u64, start: u64, data: &[u8]) -> Request<&[u8]> {
    Request::Write {
        sequence: Sequence(sequence),
        range: range(start, (data.len() / 4096) as u32),
        content: Content::Data(data),
    }
}
