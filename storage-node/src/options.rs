//! The command line of a storage node, and what it means.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, bail};
use ashlar_engine::{Address, EngineKind};

use crate::shard::ShardSettings;

/// The engine of the data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineChoice {
    /// One io_uring per device.
    #[value(name = "io_uring")]
    IoUring,
    /// epoll and pwritev2, which every kernel and container allows.
    Portable,
}

impl From<EngineChoice> for EngineKind {
    fn from(choice: EngineChoice) -> EngineKind {
        match choice {
            EngineChoice::IoUring => EngineKind::IoUring,
            EngineChoice::Portable => EngineKind::Portable,
        }
    }
}

/// A number of bytes: "4096", "64KiB", "16GiB", "1TiB".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Bytes, String> {
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let shift = match text[digits.len()..].trim() {
            "" | "B" => 0,
            "KiB" | "Ki" => 10,
            "MiB" | "Mi" => 20,
            "GiB" | "Gi" => 30,
            "TiB" | "Ti" => 40,
            unit => return Err(format!("{unit:?} is no unit; write KiB, MiB, GiB or TiB")),
        };
        let number: u64 = digits
            .parse()
            .map_err(|_| format!("{text:?} is not a size"))?;
        let bytes = number
            .checked_mul(1 << shift)
            .ok_or(format!("{text:?} is too large"))?;
        Ok(Bytes(bytes))
    }
}

/// Serves replicas on this machine's devices.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Directory of a store: `blocks` (a file, or a link to a block device) and `meta`. Repeatable.
    #[arg(long = "store", required = true, value_name = "DIR")]
    pub stores: Vec<PathBuf>,
    /// File or block device for the journal of the store at the same place in the list.
    #[arg(long = "journal", value_name = "PATH")]
    pub journals: Vec<PathBuf>,
    /// Makes a store of this size where the directory holds none yet.
    #[arg(long, value_name = "SIZE")]
    pub format_size: Option<Bytes>,
    /// Bytes of the journal of a store that is made now.
    #[arg(long, value_name = "SIZE")]
    pub journal_size: Option<Bytes>,
    /// Where initiators connect, "tcp:HOST:PORT" or "unix:PATH": one for each store, in its order.
    /// With a single store all of them are its.
    #[arg(long = "listen", required = true, value_name = "ADDRESS")]
    pub listen: Vec<String>,
    /// Where the control API listens, "tcp:HOST:PORT" or "unix:PATH".
    #[arg(long, default_value = "tcp:127.0.0.1:7420", value_name = "ADDRESS")]
    pub control: String,
    /// Where /metrics, /healthz and /readyz are.
    #[arg(long, default_value = "127.0.0.1:9420", value_name = "HOST:PORT")]
    pub metrics: SocketAddr,
    /// The engine; by default io_uring, or portable where the kernel refuses it.
    #[arg(long, value_enum)]
    pub engine: Option<EngineChoice>,
    /// Spins up to so many microseconds before a shard sleeps. Costs a core, saves wake-ups.
    #[arg(long, default_value_t = 0, value_name = "US")]
    pub busy_poll_us: u64,
    /// CPU of the shard of the store at the same place in the list.
    #[arg(long = "cpu", value_name = "N")]
    pub cpus: Vec<usize>,
    /// Length of a lease in milliseconds; the same on all nodes of a volume.
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u32).range(100..=60_000))]
    pub lease_ms: u32,
    /// Keeps all memory resident.
    #[arg(long)]
    pub lock_memory: bool,
    /// Prints one line of JSON with the real addresses once it serves.
    #[arg(long)]
    pub announce: bool,
}

/// One store of a node.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Its directory.
    pub directory: PathBuf,
    /// Its journal, where that is not in the store itself.
    pub journal: Option<PathBuf>,
    /// Bytes of a store to be made where there is none.
    pub format_bytes: Option<u64>,
    /// Bytes of its journal then.
    pub journal_bytes: Option<u64>,
    /// Where its shard listens.
    pub listen: Vec<Address>,
    /// The CPU of its shard.
    pub cpu: Option<usize>,
}

/// A storage node.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Its stores.
    pub stores: Vec<StoreOptions>,
    /// The control API.
    pub control: Address,
    /// Metrics and health.
    pub metrics: SocketAddr,
    /// None: the best that works.
    pub engine: Option<EngineKind>,
    /// How long a shard spins before it sleeps.
    pub busy_poll: Duration,
    /// What every shard is set to.
    pub shard: ShardSettings,
    /// Whether all memory is kept resident.
    pub lock_memory: bool,
    /// Whether the addresses are printed.
    pub announce: bool,
}

fn address(text: &str) -> anyhow::Result<Address> {
    let tcp = format!("tcp:{text}");
    let has_scheme = text.starts_with("unix:") || text.starts_with("tcp:");
    let text = if has_scheme { text } else { &tcp };
    Ok(text.parse()?)
}

impl TryFrom<Args> for NodeOptions {
    type Error = anyhow::Error;

    fn try_from(args: Args) -> anyhow::Result<NodeOptions> {
        let count = args.stores.len();
        if count > 1 && args.listen.len() != count {
            bail!("{count} stores need {count} --listen addresses, in the same order");
        }
        if args.journals.len() > count || args.cpus.len() > count {
            bail!("--journal and --cpu go with the --store at the same place; there are too many");
        }
        let listen = args
            .listen
            .iter()
            .map(|text| address(text).context("--listen"));
        let listen = listen.collect::<anyhow::Result<Vec<_>>>()?;
        let store = |(n, directory): (usize, &PathBuf)| StoreOptions {
            directory: directory.clone(),
            journal: args.journals.get(n).cloned(),
            format_bytes: args.format_size.map(|bytes| bytes.0),
            journal_bytes: args.journal_size.map(|bytes| bytes.0),
            listen: if count == 1 {
                listen.clone()
            } else {
                vec![listen[n].clone()]
            },
            cpu: args.cpus.get(n).copied(),
        };
        Ok(NodeOptions {
            stores: args.stores.iter().enumerate().map(store).collect(),
            control: address(&args.control).context("--control")?,
            metrics: args.metrics,
            engine: args.engine.map(EngineKind::from),
            busy_poll: Duration::from_micros(args.busy_poll_us),
            shard: ShardSettings {
                lease_ms: args.lease_ms,
                ..ShardSettings::default()
            },
            lock_memory: args.lock_memory,
            announce: args.announce,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_binary_units() {
        assert_eq!("16GiB".parse(), Ok(Bytes(16 << 30)));
        assert_eq!("4096".parse(), Ok(Bytes(4096)));
        assert!("16GB".parse::<Bytes>().unwrap_err().contains("GiB"));
        assert!("".parse::<Bytes>().is_err());
        assert!("99999999999TiB".parse::<Bytes>().is_err());
    }
}
