//! The bytes between the floor's client and its replicas: the least that a request needs.

/// A request header or an answer.
pub const HEADER_BYTES: usize = 32;

/// A request header, and, with `batch` unused, an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Where in the file.
    pub offset: u64,
    /// How many bytes.
    pub length: u32,
    /// Whether more requests may be under way, so that looking for them pays.
    pub batch: bool,
}

impl Header {
    /// As bytes.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.offset.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12] = self.batch.into();
        bytes
    }

    /// From bytes.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Header {
        let mut offset = [0; 8];
        let mut length = [0; 4];
        offset.copy_from_slice(&bytes[..8]);
        length.copy_from_slice(&bytes[8..12]);
        Header {
            offset: u64::from_le_bytes(offset),
            length: u32::from_le_bytes(length),
            batch: bytes[12] != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_back() {
        let header = Header {
            offset: 1 << 40,
            length: 4096,
            batch: true,
        };
        assert_eq!(Header::decode(&header.encode()), header);
    }
}
