//! A load through the library: a front end on the initiator's own thread.

use std::time::Duration;

use crate::bench::args::Args;
use crate::bench::runner::Load;
use crate::bench::statistics::Recorder;
use crate::pinning::Pinning;
use crate::state::VolumeRecord;

/// The load.
pub struct LibraryLoad;

impl LibraryLoad {
    /// Attaches.
    pub fn start(_: &Args, _: &[VolumeRecord], _: u64, _: &Pinning) -> anyhow::Result<LibraryLoad> {
        anyhow::bail!("not yet")
    }

    /// Fills.
    pub fn fill(&mut self, _: usize) -> anyhow::Result<()> {
        Ok(())
    }
}

impl Load for LibraryLoad {
    fn run(&mut self, _: Duration, _: &mut Recorder) -> anyhow::Result<()> {
        Ok(())
    }
}
