//! What peers of other builds send must stay what it is: the bytes of every frame of [`all_frames`].
//!
//! A difference is a new version of the protocol, or a fault. Where the change is meant, write the file
//! anew with `ASHLAR_WRITE_VECTORS=1 cargo test -p ashlar-wire --test vectors`.

mod common;

use std::fmt::Write as _;

use ashlar_wire::{Frame, HEADER_BYTES, Kind};
use common::*;

const VECTORS: &str = include_str!("vectors.txt");

/// The kind, header and body in hexadecimal, and how much block data follows with which checksum.
fn line(frame: &[u8]) -> String {
    let kind = u16::from_le_bytes([frame[4], frame[5]]);
    let kind = Kind::from_number(kind).expect("a known kind");
    let (head, data) = frame.split_at(HEADER_BYTES + body_bytes(frame));
    let mut line = format!("{} ", kind.name());
    let (header, body) = head.split_at(HEADER_BYTES);
    for part in [header, body] {
        part.iter()
            .for_each(|byte| write!(line, "{byte:02x}").expect("to a string"));
        line.push(' ');
    }
    write!(line, "{} {:08x}", data.len(), crc32c::crc32c(data)).expect("to a string");
    line
}

#[test]
fn every_frame_is_encoded_as_it_always_was() {
    let now: Vec<_> = all_frames().iter().map(|frame| line(frame)).collect();
    if std::env::var_os("ASHLAR_WRITE_VECTORS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors.txt");
        std::fs::write(path, now.join("\n") + "\n").expect("the file can be written");
        return;
    }
    for (vector, now) in VECTORS.lines().zip(&now) {
        assert_eq!(vector, now);
    }
    assert_eq!(VECTORS.lines().count(), now.len());
}

#[test]
fn every_kind_has_a_vector() {
    for kind in Kind::ALL {
        let named = |line: &str| line.split(' ').next() == Some(kind.name());
        assert!(VECTORS.lines().any(named), "{}", kind.name());
    }
}

#[test]
fn every_kind_is_in_the_document_with_its_limits() {
    let document = include_str!("../../../docs/wire-format.md");
    let (kinds, limits) = document.split_once("## Limits").expect("both tables");
    let limits = limits.replace(',', "");
    for kind in Kind::ALL {
        let row = format!("\n| {} | {} |", *kind as u16, kind.name());
        assert!(kinds.contains(&row), "{row}");
        let of_kind = |row: &&str| row.split([' ', '|']).any(|word| word == kind.name());
        let rows = limits.lines().filter(|line| line.starts_with("| "));
        let row = rows.take_while(|row| !row.contains("all others"));
        let row = row
            .filter(of_kind)
            .last()
            .unwrap_or("| all others | 0 | 0 |");
        let max = kind.limits();
        let end = format!("| {} | {} |", max.body_bytes_max, max.data_bytes_max);
        assert!(row.ends_with(&end), "{}: {row}", kind.name());
    }
}

/// Bytes alone, without the values and the encoder of today.
#[test]
fn vectors_are_decoded() {
    let bytes = |hex: &str| -> Vec<u8> {
        let digits = (0..hex.len()).step_by(2);
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
        digits.map(byte).collect()
    };
    for line in VECTORS.lines() {
        let mut parts = line.split(' ');
        let kind = parts.next().expect("the kind");
        let mut frame = bytes(parts.next().expect("the header"));
        frame.extend_from_slice(&bytes(parts.next().expect("the body")));
        let data: usize = parts.next().and_then(|n| n.parse().ok()).expect("bytes");
        frame.resize(frame.len() + data, 0);
        let expected = match Kind::ALL
            .iter()
            .find(|k| k.name() == kind)
            .map(|k| *k as u16)
        {
            Some(32..64) => "Request",
            Some(64..) => "Reply",
            _ => kind,
        };
        let shown = match whole(&frame) {
            Frame::Request { .. } => "Request".into(),
            Frame::Reply { .. } => "Reply".into(),
            other => format!("{other:?}"),
        };
        assert!(shown.starts_with(expected), "{kind}: {shown}");
    }
}
