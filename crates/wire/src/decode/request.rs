//! Requests of an attachment.

use ashlar_replication::message::{CopyStep, Request, TornBlocks};
use ashlar_replication::values::{Block, BlockRange, Pass, Position};

use super::Decoder;
use crate::error::WireError;
use crate::frame::{BlockData, POSITIONS_MAX};
use crate::header::{FLAG_TORN, Kind};

impl<'a> Decoder<'a> {
    /// The kinds from 32 to 63.
    pub(super) fn request(&mut self) -> Result<Request<BlockData<'a>>, WireError> {
        let id = self.id();
        Ok(match self.kind {
            Kind::Write => {
                let range = self.write_range()?;
                Request::Write {
                    sequence: self.sequence(self.header.request.get())?,
                    range,
                    content: self.content(range.count)?,
                }
            }
            Kind::Read | Kind::Compare | Kind::Digests | Kind::ListAbove => self.question()?,
            Kind::StoreConfig => Request::StoreConfig {
                id,
                configuration: self.body.configuration()?,
                start: self.body.member_ids()?,
            },
            Kind::BeginResync => Request::BeginResync {
                id,
                pass: self.pass()?,
                sequence: self.sequence(self.header.start.get())?,
            },
            Kind::Copy => self.copy()?,
            Kind::MarkComplete => Request::MarkComplete {
                id,
                pass: self.pass()?,
            },
            Kind::Equalise => {
                let range = self.range()?;
                let positions = self.packed(range.count)?;
                Request::Equalise {
                    id,
                    range,
                    positions: positions.iter().collect(),
                    content: self.content(range.count)?,
                }
            }
            Kind::SetLast => Request::SetLast {
                id,
                position: self.position_argument(),
            },
            Kind::Repair => {
                let range = self.range()?;
                if range.count != 1 {
                    return Err(self.body.malformed("repairs go block by block"));
                }
                Request::Repair {
                    id,
                    block: range.start,
                    position: self.position_argument(),
                    content: self.content(1)?,
                }
            }
            _ => return Err(self.body.malformed("an unexpected kind")),
        })
    }

    /// Requests that change nothing.
    fn question(&mut self) -> Result<Request<BlockData<'a>>, WireError> {
        let id = self.id();
        let start = self.header.start.get();
        Ok(match self.kind {
            Kind::Read => Request::Read {
                id,
                range: self.range()?,
                torn: match self.header.flags.get() & FLAG_TORN {
                    0 => TornBlocks::Refuse,
                    _ => TornBlocks::Serve,
                },
            },
            Kind::Compare => Request::Compare {
                id,
                extent: self.body.extent(start)?,
            },
            Kind::Digests => {
                let count = self.header.count.get();
                if count as usize > POSITIONS_MAX {
                    return Err(self.body.malformed("too many extents at once"));
                }
                Request::Digests {
                    id,
                    from: self.body.extent(start)?,
                    count,
                }
            }
            Kind::ListAbove => Request::ListAbove {
                id,
                floor: self.position_argument(),
                from: self.body.block(start)?,
            },
            _ => return Err(self.body.malformed("an unexpected kind")),
        })
    }

    fn copy(&mut self) -> Result<Request<BlockData<'a>>, WireError> {
        let range = self.range()?;
        let words = self.packed(range.count * 2)?;
        let pairs = words.iter().step_by(2).zip(words.iter().skip(1).step_by(2));
        let step = |(expected, position)| CopyStep { expected, position };
        Ok(Request::Copy {
            id: self.id(),
            pass: self.pass()?,
            range,
            steps: pairs.map(step).collect(),
            content: self.content(range.count)?,
        })
    }

    fn pass(&self) -> Result<Pass, WireError> {
        let pass = u32::try_from(self.header.argument.get());
        pass.map(Pass)
            .map_err(|_| self.body.malformed("a pass above 32 bits"))
    }

    fn position_argument(&self) -> Position {
        Position::unpack(self.header.argument.get())
    }

    /// The range of a write; an empty one consumes a sequence and changes nothing.
    fn write_range(&self) -> Result<BlockRange, WireError> {
        if self.header.count.get() == 0 && self.zeros() {
            return Ok(BlockRange {
                start: Block(0),
                count: 0,
            });
        }
        self.range()
    }
}
