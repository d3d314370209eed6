//! Frames about the connection and its attachments.

use ashlar_replication::values::{DeviceId, EpochNumber, VolumeId};

use super::Decoder;
use crate::body::Reader;
use crate::error::WireError;
use crate::frame::{
    BLOCK_MAX, Fence, Frame, GOODBYE_BYTES_MAX, GoodbyeCode, Hello, Promise, TORN_MAX, Welcome,
};
use crate::header::Kind;
use crate::proof::Subject;

impl<'a> Decoder<'a> {
    /// The kinds below 32.
    pub(super) fn connection_frame(&mut self, handle: u32) -> Result<Frame<'a>, WireError> {
        Ok(match self.kind {
            Kind::Hello => self.hello()?,
            Kind::Welcome => self.welcome()?,
            Kind::Goodbye => self.goodbye()?,
            Kind::Fence => Frame::Fence(Fence {
                subject: Subject {
                    volume: VolumeId(self.body.array()?),
                    member: self.body.member_id()?,
                    epoch: self.body.epoch()?,
                    handle,
                },
                proof: self.body.array()?,
            }),
            Kind::Promised => self.promised(handle)?,
            Kind::FenceRefused => Frame::FenceRefused {
                handle,
                refusal: self.refusal()?,
            },
            Kind::Release => Frame::Release { handle },
            Kind::Renew => Frame::Renew {
                echo: self.header.request.get(),
            },
            Kind::Renewed => Frame::Renewed {
                echo: self.header.request.get(),
            },
            Kind::Fenced => {
                let promised = u32::try_from(self.header.argument.get()).ok();
                let promised = promised.map(EpochNumber);
                let promised = promised.filter(|number| *number <= EpochNumber::MAX);
                let promised = promised.ok_or(self.body.malformed("an epoch above 24 bits"))?;
                Frame::Fenced { handle, promised }
            }
            _ => return Err(self.body.malformed("an unexpected kind")),
        })
    }

    fn hello(&mut self) -> Result<Frame<'a>, WireError> {
        let hello = Hello {
            version_min: self.body.u16()?,
            version_max: self.body.u16()?,
            features: self.body.u64()?,
            nonce: self.body.array()?,
            initiator: self.body.array()?,
        };
        self.body.skip_rest();
        Ok(Frame::Hello(hello))
    }

    fn welcome(&mut self) -> Result<Frame<'a>, WireError> {
        let welcome = Welcome {
            version: self.body.u16()?,
            features: self.body.u64()?,
            nonce: self.body.array()?,
            node: self.body.array()?,
            device: DeviceId(self.body.array()?),
            operations_max: self.body.u32()?,
            bytes_max: self.body.u64()?,
            lease_ms: self.body.u32()?,
        };
        self.body.skip_rest();
        Ok(Frame::Welcome(welcome))
    }

    fn goodbye(&mut self) -> Result<Frame<'a>, WireError> {
        let code = GoodbyeCode::from_number(self.header.argument.get());
        let code = code.ok_or(self.body.malformed("an unknown code"))?;
        let length = self.body.entries_left(1)?;
        if length > GOODBYE_BYTES_MAX {
            return Err(self.body.malformed("the text is too long"));
        }
        let text = core::str::from_utf8(self.body.bytes(length)?);
        let text = text.map_err(|_| self.body.malformed("the text is not UTF-8"))?;
        Ok(Frame::Goodbye { code, text })
    }

    fn promised(&mut self, handle: u32) -> Result<Frame<'a>, WireError> {
        let whole = self.body.entries_left(1)?;
        let answer_bytes = whole
            .checked_sub(32)
            .ok_or(self.body.malformed("no proof"))?;
        let answer = self.body.bytes(answer_bytes)?;
        let proof = self.body.array()?;
        let mut body = Reader::new(self.kind.name(), answer);
        let epoch = body.epoch()?;
        let state = body.member_state()?;
        let size_blocks = body.u64()?;
        if size_blocks > BLOCK_MAX.0 + 1 {
            return Err(body.malformed("a volume larger than any"));
        }
        let count = body.u32()? as usize;
        if count > TORN_MAX || count != body.entries_left(16)? {
            return Err(body.malformed("the list of torn blocks has another length"));
        }
        let promise = Promise {
            epoch,
            state,
            size_blocks,
            torn: body.positions(count)?,
        };
        Ok(Frame::Promised {
            handle,
            promise,
            answer,
            proof,
        })
    }
}
