//! What commands print: a table for people, JSON for programs, and what the exit code means.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::{CellAlignment, LineStyle, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// How results are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// A table for people.
    #[default]
    Table,
    /// One JSON document on standard output; everything else goes to standard error.
    Json,
}

/// How a command that ran to its end came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Exit code 0.
    Good,
    /// Exit code 1: the command did its work and the answer is no (replicas differ, a step failed).
    Bad,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> ExitCode {
        match outcome {
            Outcome::Good => ExitCode::SUCCESS,
            Outcome::Bad => ExitCode::from(1),
        }
    }
}

/// Exit code of a command that could not be done. clap takes 2 for wrong usage.
pub const EXIT_ERROR: u8 = 3;
/// Exit code after Ctrl-C or SIGTERM, as shells expect it.
pub const EXIT_INTERRUPTED: u8 = 130;

/// Shown under `ashlar --help`.
pub const EXIT_CODES_HELP: &str = "Exit codes: 0 done; 1 the answer is no (replicas differ, a step \
failed); 2 wrong usage; 3 it could not be done; 130 interrupted.";

/// Prints `document` as JSON, or what `table` makes of it.
///
/// # Errors
/// When standard output cannot be written.
pub fn print<T: Serialize>(
    format: Format,
    document: &T,
    table: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    let mut text = match format {
        Format::Json => serde_json::to_string_pretty(document)?,
        Format::Table => table(document),
    };
    if !text.ends_with('\n') {
        text.push('\n');
    }
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        // Whoever reads us has seen enough: `ashlar volume list | head -1`.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

/// Prints a line about work that goes on: for programs on standard error, because standard output
/// is for the one document.
pub fn progress_line(format: Format, line: &str) {
    // Nobody reads it any more: the work goes on to its end and cleans up.
    let _ = match format {
        Format::Json => writeln!(std::io::stderr(), "{line}"),
        Format::Table => writeln!(std::io::stdout(), "{line}"),
    };
}

/// A table in the style of all commands: a header, no lines between rows.
pub fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING.header_separator(LineStyle::none().fill('─').junction('─')))
        .set_header(header);
    table
}

/// Aligns every column of `table` but the first to the right: numbers.
pub fn align_numbers(table: &mut Table) {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// A bar over `total` units of work, on standard error, shown only on a terminal.
pub fn progress_bar(total: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(total);
    if let Ok(style) = ProgressStyle::with_template("  {msg} {wide_bar} {percent:>3} %  {eta}") {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar
}

/// A spinner for work of unknown length, on standard error, shown only on a terminal.
pub fn spinner(what: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    bar.set_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}
