//! Arguments of `ashlar bench`.

use std::convert::Infallible;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::ensure;

use crate::bench::pattern::Mode;
use crate::local::Engine;
use crate::pinning::Policy;
use crate::state::Ack;
use crate::units::Size;

/// Arguments of `ashlar bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// What to do.
    #[arg(value_enum)]
    pub mode: Mode,
    /// Bytes per request.
    #[arg(long, default_value = "4k")]
    pub size: Size,
    /// Requests in flight per volume.
    #[arg(long, default_value_t = 1, value_parser = in_range(1, 4096))]
    pub depth: usize,
    /// Copies, each on a storage node process of its own.
    #[arg(long, default_value_t = 3, value_parser = in_range(1, 3))]
    pub replicas: usize,
    /// Volumes that are loaded at once.
    #[arg(long, default_value_t = 1, value_parser = in_range(1, 256))]
    pub volumes: usize,
    /// How long the volume is loaded; the baselines come on top.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub seconds: u64,
    /// Where the stores lie: ram (tmpfs), disk (the temporary directory), or a directory.
    #[arg(long, default_value = "ram", value_name = "ram|disk|DIR")]
    pub store: Store,
    /// Size of each volume; all of it is used.
    #[arg(long, default_value = "128M")]
    pub volume_size: Size,
    /// Through NBD and the initiator daemon instead of the library.
    #[arg(long)]
    pub nbd: bool,
    /// Measure this existing volume instead of a new one. Writes destroy what it holds. Without
    /// --nbd the measurement attaches it itself, which ends any other attachment.
    #[arg(long, value_name = "NAME", conflicts_with = "volumes")]
    pub volume: Option<String>,
    /// Do not ask before writing to an existing volume.
    #[arg(long, requires = "volume")]
    pub overwrite: bool,
    /// Engine of the data path [default: io_uring where it is allowed].
    #[arg(long, value_enum)]
    pub engine: Option<Engine>,
    /// Which acknowledgements a write waits for.
    #[arg(long, value_enum, default_value_t)]
    pub ack: Ack,
    /// Which CPUs the processes run on, those of the floor alike.
    #[arg(long, value_enum, default_value_t)]
    pub pin: Policy,
    /// Let all processes spin up to this long before they sleep.
    #[arg(long, default_value_t = 0)]
    pub busy_poll_us: u64,
    /// Only the volume, without floor and raw.
    #[arg(long)]
    pub no_baselines: bool,
}

/// Where stores lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Store {
    /// On tmpfs.
    Ram,
    /// In the temporary directory.
    Disk,
    /// There.
    Folder(PathBuf),
}

impl FromStr for Store {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Store, Infallible> {
        Ok(match text {
            "ram" => Store::Ram,
            "disk" => Store::Disk,
            path => Store::Folder(path.into()),
        })
    }
}

fn in_range(min: usize, max: usize) -> impl Fn(&str) -> Result<usize, String> + Clone {
    move |text| match text.parse() {
        Ok(number) if (min..=max).contains(&number) => Ok(number),
        _ => Err(format!("write a number from {min} to {max}")),
    }
}

/// The largest request: what NBD servers commonly take.
const REQUEST_BYTES_MAX: u64 = 32 << 20;

impl Args {
    /// What clap cannot check.
    ///
    /// # Errors
    /// When arguments contradict each other.
    pub fn check(&self) -> anyhow::Result<()> {
        let size = self.size.0;
        ensure!(
            size.is_multiple_of(512) && (512..=REQUEST_BYTES_MAX).contains(&size),
            "--size must be a multiple of 512 up to 32M"
        );
        ensure!(
            size.is_multiple_of(4096) || self.no_baselines,
            "the baselines write directly to the device, which takes multiples of 4k only; \
             add --no-baselines to measure other sizes"
        );
        ensure!(
            self.volume_size.0.is_multiple_of(1 << 20) && self.volume_size.0 >= size.max(1 << 20),
            "--volume-size must be a multiple of 1M and hold at least one request"
        );
        Ok(())
    }

    /// Makes sure that an existing volume is meant to be overwritten: by --overwrite, or by who sits at a terminal.
    ///
    /// # Errors
    /// When the answer is no.
    pub fn confirm_overwrite(&self) -> anyhow::Result<()> {
        let Some(name) = &self.volume else {
            return Ok(());
        };
        if self.overwrite || !self.mode.is_write() {
            return Ok(());
        }
        ensure!(
            std::io::stdin().is_terminal(),
            "this destroys what volume {name} holds; say so with --overwrite"
        );
        eprint!("This destroys what volume {name} holds. Type its name to go on: ");
        let mut answer = String::new();
        std::io::stdin().read_line(&mut answer)?;
        ensure!(answer.trim() == name, "volume {name} was left alone");
        Ok(())
    }

    /// Bytes per request.
    pub fn bytes(&self) -> usize {
        // At most 32 MiB, see `check`.
        self.size.0 as usize
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::cli::{Cli, Command};

    fn check(line: &str) -> Result<(), String> {
        let words = ["ashlar", "bench"].into_iter().chain(line.split(' '));
        match Cli::try_parse_from(words)
            .map_err(|e| e.to_string())?
            .command
        {
            Command::Bench(args) => args.check().map_err(|e| e.to_string()),
            _ => panic!("bench was asked for"),
        }
    }

    #[test]
    fn what_cannot_be_measured_is_refused_with_a_way_out() {
        assert_eq!(
            check("randread --depth 32 --replicas 1 --store /tmp --ack all"),
            Ok(())
        );
        for (line, says) in [
            ("write --size 5k", "--no-baselines"),
            ("write --size 100", "multiple of 512"),
            ("write --size 64M", "32M"),
            ("write --overwrite", "--volume"),
            ("write --replicas 4", "1 to 3"),
            ("write --depth 0", "1 to 4096"),
            ("write --volume-size 100k", "multiple of 1M"),
            ("trim", "possible values"),
        ] {
            let error = check(line).unwrap_err();
            assert!(error.contains(says), "{line}: {error}");
        }
        assert_eq!(check("write --volume a --overwrite"), Ok(()));
        assert_eq!(check("write --size 512 --no-baselines"), Ok(()));
    }
}
