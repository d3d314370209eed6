//! A small NBD client for quickstart and bench: fixed newstyle, GO, simple replies, blocking.
//!
//! Enough to measure and check our own server with; it is no general client.

use std::io::{self, BufReader, IoSlice, Read, Write};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

const MAGIC: u64 = 0x4e42_444d_4147_4943; // "NBDMAGIC"
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054; // "IHAVEOPT"
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const FLAG_FIXED_NEWSTYLE: u16 = 1;
const FLAG_NO_ZEROES: u16 = 2;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;
/// The longest option reply that is read: an error text or an information block.
const OPTION_REPLY_BYTES_MAX: u32 = 64 * 1024;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Command {
    /// Bytes from the volume.
    Read = 0,
    /// Bytes to the volume.
    Write = 1,
    /// Ends the session; has no reply.
    Disconnect = 2,
    /// Everything acknowledged before is durable.
    Flush = 3,
    /// The content is not needed any more.
    Trim = 4,
    /// Zeros to the volume.
    WriteZeroes = 6,
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A connection in its transmission phase.
pub struct NbdClient {
    /// Reads are buffered so that several replies cost one system call.
    stream: BufReader<Stream>,
    size_bytes: u64,
}

/// A reply without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The request's cookie.
    pub cookie: u64,
    /// 0, or an errno of the NBD protocol.
    pub error: u32,
}

impl NbdClient {
    /// Connects to "nbd+unix:///NAME?socket=PATH" or "nbd://HOST:PORT/NAME".
    ///
    /// # Errors
    /// When the server cannot be reached, refuses, or does not follow the protocol.
    pub fn connect(uri: &str) -> anyhow::Result<NbdClient> {
        let (name, stream) = open(uri).with_context(|| format!("connecting to {uri}"))?;
        let mut client = NbdClient {
            stream: BufReader::with_capacity(64 * 1024, stream),
            size_bytes: 0,
        };
        client.size_bytes = client
            .handshake(&name)
            .with_context(|| format!("opening {uri}"))?;
        Ok(client)
    }

    /// The size of the export in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The socket, for polling.
    pub fn socket(&self) -> BorrowedFd<'_> {
        match self.stream.get_ref() {
            Stream::Tcp(s) => s.as_fd(),
            Stream::Unix(s) => s.as_fd(),
        }
    }

    /// Limits how long a read from the server may take.
    ///
    /// # Errors
    /// When the limit cannot be set.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self.stream.get_ref() {
            Stream::Tcp(s) => s.set_read_timeout(timeout),
            Stream::Unix(s) => s.set_read_timeout(timeout),
        }
    }

    /// Whether a reply has been received in part or whole but not taken.
    pub fn has_buffered(&self) -> bool {
        !self.stream.buffer().is_empty()
    }

    fn handshake(&mut self, name: &str) -> anyhow::Result<u64> {
        ensure!(
            self.u64()? == MAGIC && self.u64()? == OPTION_MAGIC,
            "this is no NBD server"
        );
        let server = self.u16()?;
        ensure!(server & FLAG_FIXED_NEWSTYLE != 0, "the server is too old");
        let flags = u32::from(server & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES));
        let mut out = flags.to_be_bytes().to_vec();
        out.extend(OPTION_MAGIC.to_be_bytes());
        out.extend(OPTION_GO.to_be_bytes());
        let length = u32::try_from(name.len()).context("the name is too long")?;
        out.extend((4 + length + 2).to_be_bytes());
        out.extend(length.to_be_bytes());
        out.extend(name.as_bytes());
        out.extend(0u16.to_be_bytes());
        self.stream.get_mut().write_all(&out)?;
        let mut size = None;
        loop {
            ensure!(
                self.u64()? == OPTION_REPLY_MAGIC,
                "an option reply without its magic"
            );
            let (_option, kind, length) = (self.u32()?, self.u32()?, self.u32()?);
            ensure!(
                length <= OPTION_REPLY_BYTES_MAX,
                "an option reply of {length} bytes"
            );
            let mut data = vec![0; length as usize];
            self.stream.read_exact(&mut data)?;
            match kind {
                REPLY_ACK => return size.context("the server did not tell the size"),
                REPLY_INFO if data.len() >= 10 && data[..2] == INFO_EXPORT.to_be_bytes() => {
                    size = data[2..10].try_into().ok().map(u64::from_be_bytes);
                }
                REPLY_INFO => {}
                error => bail!(
                    "the server refused with error {:#x}: {}",
                    error & 0x7fff_ffff,
                    String::from_utf8_lossy(&data)
                ),
            }
        }
    }

    fn u16(&mut self) -> io::Result<u16> {
        let mut bytes = [0; 2];
        self.stream
            .read_exact(&mut bytes)
            .map(|()| u16::from_be_bytes(bytes))
    }

    fn u32(&mut self) -> io::Result<u32> {
        let mut bytes = [0; 4];
        self.stream
            .read_exact(&mut bytes)
            .map(|()| u32::from_be_bytes(bytes))
    }

    fn u64(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.stream
            .read_exact(&mut bytes)
            .map(|()| u64::from_be_bytes(bytes))
    }

    /// Sends a request; `length` is that of `data` for a write.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn send(
        &mut self,
        command: Command,
        cookie: u64,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> io::Result<()> {
        let mut header = [0; 28];
        header[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        header[6..8].copy_from_slice(&(command as u16).to_be_bytes());
        header[8..16].copy_from_slice(&cookie.to_be_bytes());
        header[16..24].copy_from_slice(&offset.to_be_bytes());
        header[24..28].copy_from_slice(&length.to_be_bytes());
        write_both(self.stream.get_mut(), &header, data)
    }

    /// Receives the next reply; the caller reads a read's data with [`NbdClient::data`] next.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn reply(&mut self) -> io::Result<Reply> {
        if self.u32()? != SIMPLE_REPLY_MAGIC {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a reply without its magic",
            ));
        }
        Ok(Reply {
            error: self.u32()?,
            cookie: self.u64()?,
        })
    }

    /// Receives the data of a read.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn data(&mut self, into: &mut [u8]) -> io::Result<()> {
        self.stream.read_exact(into)
    }

    /// Writes and waits for the acknowledgement.
    ///
    /// # Errors
    /// When the connection is broken or the server answers with an error.
    pub fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let length = u32::try_from(data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        self.send(Command::Write, offset, offset, length, data)?;
        check(self.reply()?)
    }

    /// Reads.
    ///
    /// # Errors
    /// When the connection is broken or the server answers with an error.
    pub fn read_at(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let length = u32::try_from(into.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        self.send(Command::Read, offset, offset, length, &[])?;
        check(self.reply()?)?;
        self.data(into)
    }

    /// Waits until everything acknowledged is durable.
    ///
    /// # Errors
    /// When the connection is broken or the server answers with an error.
    pub fn flush(&mut self) -> io::Result<()> {
        self.send(Command::Flush, 0, 0, 0, &[])?;
        check(self.reply()?)
    }
}

impl Drop for NbdClient {
    fn drop(&mut self) {
        // A courtesy; the server copes with a connection that just closes.
        let _ = self.send(Command::Disconnect, 0, 0, 0, &[]);
    }
}

/// An error reply as an error.
///
/// # Errors
/// When the reply is one.
pub fn check(reply: Reply) -> io::Result<()> {
    match reply.error {
        0 => Ok(()),
        // The NBD protocol takes its numbers from Linux.
        errno => Err(io::Error::from_raw_os_error(errno as i32)),
    }
}

fn open(uri: &str) -> anyhow::Result<(String, Stream)> {
    if let Some(rest) = uri.strip_prefix("nbd+unix:///") {
        let (name, path) = rest
            .split_once("?socket=")
            .context("the URI has no ?socket=PATH")?;
        return Ok((
            decode(name),
            Stream::Unix(UnixStream::connect(decode(path))?),
        ));
    }
    let rest = uri.strip_prefix("nbd://").context("not an NBD URI")?;
    let (address, name) = rest.split_once('/').unwrap_or((rest, ""));
    let address = address
        .to_socket_addrs()?
        .next()
        .context("the host has no address")?;
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    Ok((decode(name), Stream::Tcp(stream)))
}

/// Undoes percent-encoding; what is none stays as it is.
fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let hex = (bytes[i] == b'%').then(|| text.get(i + 1..i + 3)).flatten();
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                i += 3;
            }
            None => {
                out.push(bytes[i]);
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Writes header and data with one system call where the socket takes both.
pub fn write_both(stream: &mut impl Write, header: &[u8], data: &[u8]) -> io::Result<()> {
    let mut written = stream.write_vectored(&[IoSlice::new(header), IoSlice::new(data)])?;
    if written == 0 {
        return Err(io::ErrorKind::WriteZero.into());
    }
    if written < header.len() {
        stream.write_all(&header[written..])?;
        written = header.len();
    }
    stream.write_all(&data[written - header.len()..])
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.read(into),
            Stream::Unix(s) => s.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.write(data),
            Stream::Unix(s) => s.write(data),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.write_vectored(slices),
            Stream::Unix(s) => s.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread::JoinHandle;

    use super::*;

    /// A server that answers one handshake, then plays the transmission phase that `play` is.
    fn server(
        refuse: bool,
        play: impl FnOnce(&mut UnixStream) -> io::Result<()> + Send + 'static,
    ) -> (tempfile::TempDir, String, JoinHandle<()>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s o");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut s, _) = listener.accept().unwrap();
            let mut hello = MAGIC.to_be_bytes().to_vec();
            hello.extend(OPTION_MAGIC.to_be_bytes());
            hello.extend(3u16.to_be_bytes());
            s.write_all(&hello).unwrap();
            // Flags, magic, GO, length, length of the name, "a b", number of information requests.
            let mut request = [0; 4 + 8 + 4 + 4 + 4 + 3 + 2];
            s.read_exact(&mut request).unwrap();
            assert_eq!(&request[24..27], b"a b");
            let mut option = |kind: u32, data: &[u8]| {
                let mut reply = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
                for field in [OPTION_GO, kind, data.len() as u32] {
                    reply.extend(field.to_be_bytes());
                }
                reply.extend(data);
                s.write_all(&reply).unwrap();
            };
            if refuse {
                option(0x8000_0006, b"unknown export");
                return;
            }
            // Block sizes, which are not asked for, and the export: size and flags.
            option(REPLY_INFO, &[0, 3, 0, 0, 0, 1, 0, 0, 16, 0, 2, 0, 0, 0]);
            option(REPLY_INFO, &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 5]);
            option(REPLY_ACK, &[]);
            play(&mut s).unwrap();
        });
        let path = path.display().to_string().replace(' ', "%20");
        (folder, format!("nbd+unix:///a%20b?socket={path}"), thread)
    }

    fn reply(cookie: u64, error: u32) -> Vec<u8> {
        let mut bytes = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(error.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes
    }

    #[test]
    fn a_session_reads_writes_and_passes_errors_on() {
        let (_folder, uri, thread) = server(false, |s| {
            let mut header = [0; 28];
            s.read_exact(&mut header)?;
            assert_eq!(&header[..8], [0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1]);
            assert_eq!(&header[16..], [0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 3]);
            let mut data = [0; 3];
            s.read_exact(&mut data)?;
            assert_eq!(data, [7, 8, 9]);
            s.write_all(&reply(512, 0))?;
            s.read_exact(&mut header)?;
            s.write_all(&[reply(0, 0), vec![7, 8]].concat())?;
            s.read_exact(&mut header)?;
            s.write_all(&reply(0, 28))
        });
        let mut client = NbdClient::connect(&uri).unwrap();
        assert_eq!(client.size_bytes(), 1 << 16);
        client.write_at(512, &[7, 8, 9]).unwrap();
        let mut got = [0; 2];
        client.read_at(0, &mut got).unwrap();
        assert_eq!(got, [7, 8]);
        assert_eq!(
            client.flush().unwrap_err().kind(),
            io::ErrorKind::StorageFull
        );
        drop(client);
        thread.join().unwrap();
    }

    #[test]
    fn a_refusal_is_told_in_the_servers_words() {
        let (_folder, uri, thread) = server(true, |_| Ok(()));
        let error = NbdClient::connect(&uri)
            .err()
            .map(|e| format!("{e:#}"))
            .unwrap();
        assert!(error.contains("unknown export"), "{error}");
        thread.join().unwrap();
    }

    #[test]
    fn what_is_no_nbd_address_is_refused() {
        for uri in ["", "http://a/b", "nbd+unix:///name", "nbd://"] {
            assert!(NbdClient::connect(uri).is_err(), "{uri}");
        }
    }
}
