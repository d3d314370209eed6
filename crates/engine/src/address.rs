//! Where a socket listens or connects to.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;

/// Address of a stream socket, written as `tcp:HOST:PORT` or `unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// TCP over IPv4 or IPv6. Port 0 means "any free port" when listening.
    Tcp(SocketAddr),
    /// A unix stream socket in the file system.
    Unix(PathBuf),
}

/// Why a text is not an [`Address`].
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// The text starts with neither `tcp:` nor `unix:`.
    #[error("address {0:?} starts with neither tcp: nor unix:")]
    Scheme(String),
    /// The path is empty or longer than the system allows.
    #[error("unix socket path {0:?} is empty or longer than 107 bytes")]
    Path(String),
    /// The host or port is not understood, or the name does not resolve.
    #[error("cannot resolve {text:?}")]
    Host {
        /// What was given.
        text: String,
        /// What the resolver said.
        #[source]
        source: std::io::Error,
    },
}

/// `sun_path` holds 108 bytes, one of them for the terminating zero.
const UNIX_PATH_BYTES_MAX: usize = 107;

impl FromStr for Address {
    type Err = AddressError;

    /// Names are resolved here (which may block on the name service): the first address counts.
    fn from_str(text: &str) -> Result<Address, AddressError> {
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() || path.len() > UNIX_PATH_BYTES_MAX || path.contains('\0') {
                return Err(AddressError::Path(path.to_owned()));
            }
            return Ok(Address::Unix(PathBuf::from(path)));
        }
        let Some(host) = text.strip_prefix("tcp:") else {
            return Err(AddressError::Scheme(text.to_owned()));
        };
        let fail = |source| AddressError::Host {
            text: host.to_owned(),
            source,
        };
        let none = || std::io::Error::new(std::io::ErrorKind::NotFound, "no address for this name");
        let mut found = host.to_socket_addrs().map_err(fail)?;
        found.next().map(Address::Tcp).ok_or_else(|| fail(none()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(f, "tcp:{address}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Address {
        Address::Tcp(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_address_are_converted_both_ways() {
        for text in [
            "tcp:127.0.0.1:7000",
            "tcp:[::1]:0",
            "unix:/run/ashlar/data.sock",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn texts_that_are_no_address_are_refused() {
        for text in [
            "",
            "127.0.0.1:1",
            "unix:",
            "tcp:",
            "tcp:127.0.0.1",
            "tcp:127.0.0.1:99999",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
        assert!(
            format!("unix:/{}", "x".repeat(107))
                .parse::<Address>()
                .is_err()
        );
    }
}
