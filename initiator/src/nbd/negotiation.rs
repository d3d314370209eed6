//! From the greeting to the transmission phase. Pure: bytes in, bytes out.

use crate::front_end::{REQUEST_BYTES_MAX, VolumeAccess, VolumeHandle, VolumeInfo};
use crate::nbd::protocol::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, MAGIC,
    OPTION_BYTES_MAX, OPTION_HEADER_BYTES, OPTION_MAGIC, info, option, option_reply,
    option_reply as reply, transmission, u16_at, u32_at, u64_at,
};

/// The volumes that are exported, by name.
pub(super) trait Exports {
    /// The volume of that name; the only one where the name is empty.
    fn find(&self, name: &str) -> Option<(VolumeHandle, &VolumeInfo)>;
    /// Names of all.
    fn names(&self) -> Vec<String>;
}

/// What a step came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// More bytes are needed: so many in all.
    Need(usize),
    /// So many bytes were used.
    Used(usize),
    /// So many bytes were used; requests come next.
    Transmission(usize, VolumeHandle),
    /// The connection is to be closed; what was answered goes out first.
    Close,
    /// What came is not the protocol: to be closed.
    FramingLost,
}

/// State of a negotiation.
#[derive(Debug, Default)]
pub(super) struct Negotiation {
    greeted: bool,
    no_zeroes: bool,
    /// Bytes of a refused option that are still to be read past.
    skip: u32,
    /// An option was answered by an error since [`Negotiation::take_refused`].
    refused: bool,
    pub(super) structured: bool,
    /// The export that base:allocation was chosen for.
    context_of: Option<String>,
    pub(super) block_status: bool,
}

/// The server's first words.
pub(super) fn greeting(out: &mut Vec<u8>) {
    out.extend_from_slice(&MAGIC.to_be_bytes());
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
}

fn transmission_flags(volume: &VolumeInfo, structured: bool) -> u16 {
    use transmission as t;
    let always = t::HAS_FLAGS | t::SEND_FLUSH | t::SEND_FUA | t::CAN_MULTI_CONN;
    let chunks = if structured { t::SEND_DF } else { 0 };
    let access = match volume.access {
        VolumeAccess::ReadOnly => t::READ_ONLY,
        VolumeAccess::ReadWrite => t::SEND_TRIM | t::SEND_WRITE_ZEROES | t::SEND_FAST_ZERO,
    };
    always | chunks | access
}

/// Reads past `len` bytes as text. None when they are not there or not UTF-8.
fn text<'a>(data: &'a [u8], at: &mut usize) -> Option<&'a str> {
    let len = u32_at(data.get(*at..*at + 4)?, 0) as usize;
    let bytes = data.get(*at + 4..(*at + 4).checked_add(len)?)?;
    *at += 4 + len;
    core::str::from_utf8(bytes).ok()
}

impl Negotiation {
    /// Handles the start of `input`; answers are appended to `out`.
    pub(super) fn step(&mut self, input: &[u8], exports: &impl Exports, out: &mut Vec<u8>) -> Step {
        if !self.greeted {
            if input.len() < 4 {
                return Step::Need(4);
            }
            let flags = u32_at(input, 0);
            let known = u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
            if flags & !known != 0 {
                return Step::FramingLost;
            }
            self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
            self.greeted = true;
            return Step::Used(4);
        }
        if self.skip > 0 {
            let used = input.len().min(self.skip as usize);
            self.skip -= used as u32;
            return if used == 0 {
                Step::Need(1)
            } else {
                Step::Used(used)
            };
        }
        if input.len() < OPTION_HEADER_BYTES {
            return Step::Need(OPTION_HEADER_BYTES);
        }
        if u64_at(input, 0) != OPTION_MAGIC {
            return Step::FramingLost;
        }
        let (kind, len) = (u32_at(input, 8), u32_at(input, 12));
        if len > OPTION_BYTES_MAX {
            if kind == option::EXPORT_NAME || len > 16 * OPTION_BYTES_MAX {
                return Step::FramingLost;
            }
            self.refuse(out, kind, reply::TOO_BIG, b"the option is too long");
            self.skip = len;
            return Step::Used(OPTION_HEADER_BYTES);
        }
        let bytes = OPTION_HEADER_BYTES + len as usize;
        let Some(data) = input.get(OPTION_HEADER_BYTES..bytes) else {
            return Step::Need(bytes);
        };
        self.option(kind, data, bytes, exports, out)
    }

    fn option(
        &mut self,
        kind: u32,
        data: &[u8],
        bytes: usize,
        exports: &impl Exports,
        out: &mut Vec<u8>,
    ) -> Step {
        match kind {
            option::EXPORT_NAME => {
                let found = core::str::from_utf8(data)
                    .ok()
                    .and_then(|name| exports.find(name));
                // This option has no way to answer an error.
                let Some((handle, volume)) = found else {
                    self.refused = true;
                    return Step::Close;
                };
                out.extend_from_slice(&volume.size_bytes.to_be_bytes());
                out.extend_from_slice(&transmission_flags(volume, self.structured).to_be_bytes());
                if !self.no_zeroes {
                    out.extend_from_slice(&[0; 124]);
                }
                self.block_status = self.context_of.as_deref() == Some(volume.name.as_str());
                return Step::Transmission(bytes, handle);
            }
            option::ABORT => {
                option_reply(out, kind, reply::ACK, &[]);
                return Step::Close;
            }
            option::LIST if data.is_empty() => {
                for name in exports.names() {
                    let mut entry = (name.len() as u32).to_be_bytes().to_vec();
                    entry.extend_from_slice(name.as_bytes());
                    option_reply(out, kind, reply::SERVER, &entry);
                }
                option_reply(out, kind, reply::ACK, &[]);
            }
            option::LIST => self.refuse(out, kind, reply::INVALID, b"LIST has no data"),
            option::STARTTLS => {
                self.refuse(
                    out,
                    kind,
                    reply::POLICY,
                    b"TLS is not offered on this socket",
                );
            }
            option::INFO | option::GO => {
                if let Some(handle) = self.info(kind, data, exports, out)
                    && kind == option::GO
                {
                    return Step::Transmission(bytes, handle);
                }
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                option_reply(out, kind, reply::ACK, &[]);
            }
            option::STRUCTURED_REPLY => {
                self.refuse(out, kind, reply::INVALID, b"STRUCTURED_REPLY has no data");
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(kind, data, exports, out);
            }
            _ => self.refuse(out, kind, reply::UNSUPPORTED, b"the option is not known"),
        }
        Step::Used(bytes)
    }

    /// Answers an error.
    fn refuse(&mut self, out: &mut Vec<u8>, option: u32, kind: u32, text: &[u8]) {
        self.refused = true;
        option_reply(out, option, kind, text);
    }

    /// Whether an option was refused since the last call.
    pub(super) fn take_refused(&mut self) -> bool {
        std::mem::take(&mut self.refused)
    }

    /// INFO and GO; the volume when it was found.
    fn info(
        &mut self,
        kind: u32,
        data: &[u8],
        exports: &impl Exports,
        out: &mut Vec<u8>,
    ) -> Option<VolumeHandle> {
        let mut at = 0;
        let name = text(data, &mut at);
        let count = data
            .get(at..at + 2)
            .map(|bytes| usize::from(u16_at(bytes, 0)));
        let (Some(name), Some(count)) = (name, count) else {
            self.refuse(out, kind, reply::INVALID, b"the option's data is malformed");
            return None;
        };
        if data.len() != at + 2 + 2 * count {
            self.refuse(
                out,
                kind,
                reply::INVALID,
                b"the list of informations has another length",
            );
            return None;
        }
        let Some((handle, volume)) = exports.find(name) else {
            self.refuse(
                out,
                kind,
                reply::UNKNOWN,
                b"no volume of that name is attached here",
            );
            return None;
        };
        let wants = |info: u16| data[at + 2..].chunks_exact(2).any(|w| u16_at(w, 0) == info);
        let mut export = info::EXPORT.to_be_bytes().to_vec();
        export.extend_from_slice(&volume.size_bytes.to_be_bytes());
        export.extend_from_slice(&transmission_flags(volume, self.structured).to_be_bytes());
        option_reply(out, kind, reply::INFO, &export);
        for which in [info::NAME, info::DESCRIPTION] {
            if wants(which) {
                let mut entry = which.to_be_bytes().to_vec();
                let id = volume.id.to_string();
                let text = if which == info::NAME {
                    &volume.name
                } else {
                    &id
                };
                entry.extend_from_slice(text.as_bytes());
                option_reply(out, kind, reply::INFO, &entry);
            }
        }
        if wants(info::BLOCK_SIZE) {
            let mut entry = info::BLOCK_SIZE.to_be_bytes().to_vec();
            for size in [1, 4096, REQUEST_BYTES_MAX] {
                entry.extend_from_slice(&size.to_be_bytes());
            }
            option_reply(out, kind, reply::INFO, &entry);
        }
        option_reply(out, kind, reply::ACK, &[]);
        self.block_status = self.context_of.as_deref() == Some(volume.name.as_str());
        Some(handle)
    }

    fn meta_context(&mut self, kind: u32, data: &[u8], exports: &impl Exports, out: &mut Vec<u8>) {
        if !self.structured {
            let text = b"STRUCTURED_REPLY has to be negotiated first";
            return self.refuse(out, kind, reply::INVALID, text);
        }
        let mut at = 0;
        let parsed = (|| {
            let name = text(data, &mut at)?;
            let count = u32_at(data.get(at..at + 4)?, 0);
            at += 4;
            let mut base = count == 0 && kind == option::LIST_META_CONTEXT;
            for _ in 0..count {
                let query = text(data, &mut at)?;
                base |= query == BASE_ALLOCATION
                    || (query == "base:" && kind == option::LIST_META_CONTEXT);
            }
            (at == data.len()).then_some((name, base))
        })();
        let Some((name, base)) = parsed else {
            return self.refuse(out, kind, reply::INVALID, b"the option's data is malformed");
        };
        let Some((_, volume)) = exports.find(name) else {
            let text = b"no volume of that name is attached here";
            return self.refuse(out, kind, reply::UNKNOWN, text);
        };
        if kind == option::SET_META_CONTEXT {
            self.context_of = base.then(|| volume.name.clone());
        }
        if base {
            let mut entry = BASE_ALLOCATION_ID.to_be_bytes().to_vec();
            entry.extend_from_slice(BASE_ALLOCATION.as_bytes());
            option_reply(out, kind, reply::META_CONTEXT, &entry);
        }
        option_reply(out, kind, reply::ACK, &[]);
    }
}

#[cfg(test)]
#[path = "negotiation_tests.rs"]
mod tests;
