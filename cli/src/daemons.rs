//! temp
/// Args
#[derive(Debug, clap::Args)]
pub struct Args {}
/// run
pub fn run(_: Args) -> anyhow::Result<()> {
    anyhow::bail!("x")
}
