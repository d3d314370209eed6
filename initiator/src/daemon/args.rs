//! Arguments of the daemon.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ashlar_engine::{Address, EngineKind};
use clap::builder::{PossibleValue, TypedValueParser as _};

/// The most threads; each has its own connections to every device.
const THREADS_MAX: usize = 64;
/// The longest busy polling: beyond it nothing is gained but heat.
const BUSY_POLL_US_MAX: u64 = 100_000;

/// Options of `ashlar-initiator`, also of the command line tool's hidden `initiator`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Where the attach API is served: unix:PATH
    #[arg(long, value_name = "ADDRESS", default_value = "unix:/run/ashlar/initiator.sock",
          value_parser = control_path)]
    pub listen: PathBuf,
    /// Where NBD is served: unix:PATH or tcp:HOST:PORT; may be given again
    #[arg(long, value_name = "ADDRESS")]
    pub nbd: Vec<Address>,
    /// Where /metrics, /healthz and /readyz are served: HOST:PORT
    #[arg(long, value_name = "HOST:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Threads that volumes are spread over; the second and later ones serve NBD at PATH.1 or PORT + 1 and so on
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=THREADS_MAX as i64))]
    pub threads: u16,
    /// CPUs to pin the threads to, one per thread: 2,3
    #[arg(long, value_name = "CPUS", value_delimiter = ',')]
    pub cpu: Vec<usize>,
    /// Engine of the data path; without it io_uring where the system allows it, else portable
    #[arg(long, value_parser = engine_parser())]
    pub engine: Option<EngineKind>,
    /// Spin this many microseconds before sleeping, where that has paid
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0,
          value_parser = clap::value_parser!(u64).range(0..=BUSY_POLL_US_MAX))]
    pub busy_poll_us: u64,
    /// Length of a lease in milliseconds; one constant for all initiators and storage nodes
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 3000,
          value_parser = clap::value_parser!(u64).range(100..=60_000))]
    pub lease_ms: u64,
    /// How long an attach waits for a recovery quorum, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 30_000,
          value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub attach_timeout_ms: u64,
    /// How long requests under way may take to finish when a volume is detached, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 10_000,
          value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    pub drain_timeout_ms: u64,
    /// Print one line of JSON with the addresses when everything is served
    #[arg(long)]
    pub announce: bool,
}

impl Args {
    /// Checks what belongs together.
    ///
    /// # Errors
    /// A message for people.
    pub fn check(&self) -> Result<(), String> {
        if !self.cpu.is_empty() && self.cpu.len() != usize::from(self.threads) {
            let (cpus, threads) = (self.cpu.len(), self.threads);
            return Err(format!("--cpu names {cpus} CPUs for {threads} threads"));
        }
        for address in &self.nbd {
            for thread in 0..self.threads {
                nbd_address(address, thread)?;
            }
        }
        Ok(())
    }

    pub(crate) fn drain_timeout(&self) -> Duration {
        Duration::from_millis(self.drain_timeout_ms)
    }

    pub(crate) fn attach_timeout(&self) -> Duration {
        Duration::from_millis(self.attach_timeout_ms)
    }
}

fn control_path(text: &str) -> Result<PathBuf, String> {
    match text.parse() {
        Ok(Address::Unix(path)) => Ok(path),
        Ok(Address::Tcp(_)) => Err("the attach API hands over keys: only unix:PATH".into()),
        Err(error) => Err(error.to_string()),
    }
}

fn engine_parser() -> impl clap::builder::TypedValueParser<Value = EngineKind> {
    let values = [
        PossibleValue::new("io_uring"),
        PossibleValue::new("portable"),
    ];
    clap::builder::PossibleValuesParser::new(values).map(|name| match name.as_str() {
        "portable" => EngineKind::Portable,
        _ => EngineKind::IoUring,
    })
}

/// Where thread number `thread` serves NBD: a socket belongs to one thread. Port 0 stays 0.
///
/// # Errors
/// When there is no such path or port.
pub(crate) fn nbd_address(address: &Address, thread: u16) -> Result<Address, String> {
    if thread == 0 {
        return Ok(address.clone());
    }
    match address {
        Address::Unix(path) => {
            let text = format!("unix:{}.{thread}", path.display());
            text.parse().map_err(|error| format!("--nbd: {error}"))
        }
        Address::Tcp(tcp) if tcp.port() == 0 => Ok(address.clone()),
        Address::Tcp(tcp) => {
            let port = tcp.port().checked_add(thread);
            let port = port.ok_or(format!("--nbd: {address} has no {thread} ports above it"))?;
            Ok(Address::Tcp(SocketAddr::new(tcp.ip(), port)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Args as _, FromArgMatches as _};

    fn parse(arguments: &[&str]) -> Result<Args, String> {
        let command = Args::augment_args(clap::Command::new("initiator").no_binary_name(true));
        let matches = command
            .try_get_matches_from(arguments)
            .map_err(|e| e.to_string())?;
        let args = Args::from_arg_matches(&matches).map_err(|e| e.to_string())?;
        args.check().map(|()| args)
    }

    #[test]
    fn every_thread_has_an_address_of_its_own() {
        let unix: Address = "unix:/run/nbd.sock".parse().unwrap();
        assert_eq!(nbd_address(&unix, 0).unwrap(), unix);
        assert_eq!(
            nbd_address(&unix, 2).unwrap().to_string(),
            "unix:/run/nbd.sock.2"
        );
        let tcp: Address = "tcp:127.0.0.1:10809".parse().unwrap();
        assert_eq!(
            nbd_address(&tcp, 3).unwrap().to_string(),
            "tcp:127.0.0.1:10812"
        );
        let last: Address = "tcp:127.0.0.1:65535".parse().unwrap();
        assert!(nbd_address(&last, 1).is_err());
    }

    #[test]
    fn options_outside_their_limits_are_refused() {
        let args = parse(&["--listen", "unix:/a", "--engine", "portable"]).unwrap();
        assert_eq!((args.threads, args.engine), (1, Some(EngineKind::Portable)));
        for bad in [
            &["--listen", "tcp:127.0.0.1:1"][..],
            &["--listen", "/a"],
            &["--threads", "0"],
            &["--threads", "65"],
            &["--threads", "2", "--cpu", "1"],
            &["--engine", "fast"],
            &["--busy-poll-us", "100001"],
            &["--lease-ms", "0"],
            &["--nbd", "127.0.0.1:1"],
            &["--nbd", "tcp:127.0.0.1:65535", "--threads", "2"],
            &["--metrics", "tcp:127.0.0.1:1"],
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
