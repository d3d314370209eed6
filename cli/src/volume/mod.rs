//! `ashlar volume`: creates, lists, shows, grows and deletes volumes.

pub mod create;
mod remove;
mod show;

use clap::Subcommand;

use crate::context::Context;
use crate::output::Outcome;
use crate::state::Ack;
use crate::units::Size;

/// `ashlar volume …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Makes a volume: one replica on each of several nodes.
    Create(CreateArgs),
    /// Lists the volumes.
    List,
    /// Shows a volume's replicas and its attachment.
    Status {
        /// The volume's name.
        name: String,
    },
    /// Deletes a volume and everything in it.
    Delete(DeleteArgs),
    /// Makes a volume larger.
    Grow {
        /// The volume's name.
        name: String,
        /// The new size.
        #[arg(long)]
        size: Size,
    },
}

/// Arguments of `ashlar volume create`.
#[derive(Debug, clap::Args)]
pub struct CreateArgs {
    /// Its name: letters, digits, '-', '_' and '.'.
    pub name: String,
    /// Its size, like 10G; a multiple of 4k.
    #[arg(long)]
    pub size: Size,
    /// How many copies.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=3))]
    pub replicas: u8,
    /// How many members that only vote. Two replicas and a witness survive the loss of one.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2))]
    pub witnesses: u8,
    /// Which acknowledgements a write waits for.
    #[arg(long, value_enum, default_value_t)]
    pub ack: Ack,
}

/// Arguments of `ashlar volume delete`.
#[derive(Debug, clap::Args)]
pub struct DeleteArgs {
    /// The volume's name.
    pub name: String,
    /// Also while it is attached, and when a node does not answer (its replica stays behind there).
    #[arg(long)]
    pub force: bool,
}

/// Runs the command.
///
/// # Errors
/// When it could not be done.
pub fn run(context: &Context, command: Command) -> anyhow::Result<Outcome> {
    match command {
        Command::Create(args) => create::run(context, &args),
        Command::List => show::list(context),
        Command::Status { name } => show::status(context, &name),
        Command::Delete(args) => remove::delete(context, &args),
        Command::Grow { name, size } => create::grow(context, &name, size),
    }
}
