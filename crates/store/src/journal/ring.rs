//! The ring: where the next record goes, and what the records that count take.

use std::collections::VecDeque;

use crate::format::checkpoint_page::Tail;

#[derive(Clone, Copy, Debug)]
struct Place {
    lsn: u64,
    /// Where the record lies.
    offset: u64,
    previous_crc: u32,
    /// Bytes from the end of the record before, so including what was left free before a wrap.
    taken: u64,
}

/// State of the ring. Records never cross its end.
pub(crate) struct Ring {
    bytes: u64,
    /// Where the next record goes if it fits before the end.
    head: u64,
    /// Sequence number of the newest record that was given a place.
    lsn: u64,
    crc: u32,
    used: u64,
    /// Records between tail and head.
    places: VecDeque<Place>,
}

impl Ring {
    /// A ring without records: the next one is `tail`'s.
    pub(crate) fn new(bytes: u64, tail: Tail) -> Ring {
        Ring {
            bytes,
            head: tail.offset,
            lsn: tail.lsn - 1,
            crc: tail.previous_crc,
            used: 0,
            places: VecDeque::new(),
        }
    }

    fn place_for(&self, bytes: u64) -> (u64, u64) {
        if self.head + bytes <= self.bytes {
            (self.head, bytes)
        } else {
            (0, bytes + (self.bytes - self.head))
        }
    }

    /// Whether a record of `bytes` can be placed without touching one that counts.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        // Never quite full, so that head and tail only meet when the ring is empty.
        self.used + self.place_for(bytes).1 < self.bytes
    }

    /// Gives the next record its place; returns its offset.
    pub(crate) fn push(&mut self, lsn: u64, bytes: u64, crc: u32) -> u64 {
        assert_eq!(lsn, self.lsn + 1);
        assert!(self.has_room(bytes));
        let (offset, taken) = self.place_for(bytes);
        self.push_at(lsn, offset, bytes, taken, crc);
        offset
    }

    fn push_at(&mut self, lsn: u64, offset: u64, bytes: u64, taken: u64, crc: u32) {
        self.places.push_back(Place {
            lsn,
            offset,
            previous_crc: self.crc,
            taken,
        });
        self.used += taken;
        self.head = offset + bytes;
        self.lsn = lsn;
        self.crc = crc;
    }

    /// Takes in a record that recovery found at `offset`.
    pub(crate) fn found(&mut self, lsn: u64, offset: u64, bytes: u64, crc: u32) {
        let skipped = if offset == self.head {
            0
        } else {
            self.bytes - self.head
        };
        self.push_at(lsn, offset, bytes, bytes + skipped, crc);
    }

    /// Where recovery looks for the next record.
    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    pub(crate) fn crc(&self) -> u32 {
        self.crc
    }

    /// Sequence number of the newest record.
    pub(crate) fn lsn(&self) -> u64 {
        self.lsn
    }

    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    pub(crate) fn size(&self) -> u64 {
        self.bytes
    }

    /// What a checkpoint says when record `lsn` is the first that counts.
    pub(crate) fn tail(&self, lsn: u64) -> Tail {
        // Sequence numbers are consecutive, so the place is found by counting.
        let first = self.places.front().map_or(self.lsn + 1, |p| p.lsn);
        match self.places.get((lsn - first) as usize) {
            Some(place) => Tail {
                lsn,
                offset: place.offset,
                previous_crc: place.previous_crc,
            },
            None => {
                assert_eq!(lsn, self.lsn + 1);
                Tail {
                    lsn,
                    offset: self.head,
                    previous_crc: self.crc,
                }
            }
        }
    }

    /// Frees the places of the records before `lsn`.
    pub(crate) fn advance(&mut self, lsn: u64) {
        while self.places.front().is_some_and(|p| p.lsn < lsn) {
            let place = self.places.pop_front().expect("there is a first one");
            self.used -= place.taken;
        }
    }
}
