//! The data protocol between initiators and storage nodes: frames, messages, handshake, proofs.
//!
//! docs/wire-format.md describes it byte by byte. [`decode`] reads frames from a receive buffer,
//! [`encode`] writes their headers and bodies, [`Payload`] carries block data with its checksums.

mod body;
mod decode;
pub mod encode;
mod error;
mod frame;
mod header;
mod payload;
pub mod proof;
mod refusal;

pub use decode::{
    BadFrame, DataReply, Decoded, PackedPositions, decode, decode_data, decode_within,
};
pub use encode::EncodeBlocks;
pub use error::WireError;
pub use frame::{
    BLOCK_MAX, BlockData, Fence, Frame, GOODBYE_BYTES_MAX, GoodbyeCode, Hello, POSITIONS_MAX,
    Promise, TORN_MAX, VERSION, Welcome,
};
pub use header::{
    BODY_BYTES_MAX, DATA_BYTES_MAX, FRAME_BYTES_MAX, GREETING_BYTES_MAX, HEADER_BYTES, Kind,
    Limits, MAGIC,
};
pub use payload::Payload;
