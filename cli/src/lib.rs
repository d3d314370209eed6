//! The `ashlar` command: quickstart, volumes, bench, inspection.

pub mod attach;
pub mod bench;
pub mod cli;
pub mod compare;
pub mod context;
pub mod control;
pub mod daemons;
pub mod image;
pub mod inspect;
pub mod local;
pub mod nbd;
pub mod node;
pub mod output;
pub mod pinning;
pub mod process;
pub mod queue;
pub mod quickstart;
pub mod scratch;
pub mod state;
pub mod units;
pub mod volume;
