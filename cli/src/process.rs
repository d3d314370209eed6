//! Child processes: real `ashlar …` processes started from this executable, which die with it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use crate::pinning::pin_this_thread;
use crate::scratch::Scratch;

/// How long a child may take from its start to its first line: it may have to preallocate a store.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a child may take to end after SIGTERM before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// Whether a child outlives this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// The kernel kills it when the thread that started it ends, however that happens.
    WithParent,
    /// It goes on running.
    Detached,
}

/// What to start.
#[derive(Clone, Debug)]
pub struct ProcessSpec {
    /// For messages and the name of its log: "storage-node-1".
    pub name: String,
    /// Arguments of this executable.
    pub arguments: Vec<OsString>,
    /// The CPU it may use; `None`: all.
    pub cpu: Option<usize>,
    /// Where its standard error goes.
    pub log: PathBuf,
    /// Whether it outlives this process.
    pub lifetime: Lifetime,
}

/// A running child. Killed when dropped, unless it is [`Lifetime::Detached`].
#[derive(Debug)]
pub struct Process {
    spec: ProcessSpec,
    child: Child,
}

impl Process {
    /// Starts a child and waits for the line it prints when it serves.
    ///
    /// `scratch` remembers the child, so that the next start removes it should this process crash.
    ///
    /// # Errors
    /// When it does not start, ends, or stays silent; the end of its log is in the message.
    pub fn start(spec: ProcessSpec, scratch: &Scratch) -> anyhow::Result<(Process, String)> {
        let log = File::options().create(true).append(true).open(&spec.log);
        let log = log.with_context(|| format!("creating {}", spec.log.display()))?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(&spec.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            // Ctrl-C goes to us alone; we end the children in order.
            .process_group(0);
        let (cpu, lifetime, parent) = (spec.cpu, spec.lifetime, std::process::id());
        let before_exec = move || {
            if lifetime == Lifetime::WithParent {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                // The parent may have died before the line above.
                if std::os::unix::process::parent_id() != parent {
                    return Err(io::Error::from(io::ErrorKind::BrokenPipe));
                }
            }
            pin_this_thread(cpu)
        };
        // SAFETY: the closure runs between fork and exec and makes three system calls; it allocates
        // nothing and takes no lock.
        unsafe { command.pre_exec(before_exec) };
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {}", spec.name))?;
        let stdout = child.stdout.take();
        let process = Process { spec, child };
        scratch.remember(process.child.id())?;
        let stdout = stdout.context("no standard output")?;
        let line = process.first_line(stdout)?;
        Ok((process, line))
    }

    /// Reads the announcement on a thread of its own, because a pipe has no read timeout.
    fn first_line(&self, stdout: std::process::ChildStdout) -> anyhow::Result<String> {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            let mut line = String::new();
            let result = reader.read_line(&mut line).map(|_| line);
            let _ = sender.send(result);
            // Whatever else it prints is thrown away; a closed pipe would kill it.
            let _ = io::copy(&mut reader, &mut io::sink());
        });
        match receiver.recv_timeout(ANNOUNCE_TIMEOUT) {
            Ok(Ok(line)) if line.ends_with('\n') => Ok(line),
            Ok(Ok(_)) => bail!(
                "{} ended at its start:\n{}",
                self.spec.name,
                self.log_tail()
            ),
            Ok(Err(error)) => Err(error).with_context(|| format!("reading from {}", self.name())),
            Err(_) => bail!(
                "{} did not serve within {} s:\n{}",
                self.name(),
                ANNOUNCE_TIMEOUT.as_secs(),
                self.log_tail()
            ),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// What it was started with.
    pub fn spec(&self) -> &ProcessSpec {
        &self.spec
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The last lines of its log, for messages.
    pub fn log_tail(&self) -> String {
        let text = fs::read(&self.spec.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        let tail = &lines[lines.len().saturating_sub(12)..];
        if tail.is_empty() {
            "(its log is empty)".into()
        } else {
            tail.join("\n")
        }
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        Ok(kill_process(
            pid.ok_or(io::ErrorKind::InvalidInput)?,
            signal,
        )?)
    }

    /// Kills it with SIGKILL and waits until it is gone.
    ///
    /// # Errors
    /// When that fails.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }

    /// Asks it to end with SIGTERM, and kills it when it does not.
    ///
    /// # Errors
    /// When that fails.
    pub fn stop(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(status);
        }
        self.signal(Signal::TERM)?;
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.kill()
    }

    /// Fails when the process has ended by itself.
    ///
    /// # Errors
    /// Then, with how it ended and the end of its log.
    pub fn check_running(&mut self) -> anyhow::Result<()> {
        let Some(status) = self.child.try_wait()? else {
            return Ok(());
        };
        let how = match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("signal {signal}"),
            (None, None) => "no status".into(),
        };
        bail!(
            "{} ended unexpectedly ({how}):\n{}",
            self.name(),
            self.log_tail()
        )
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.spec.lifetime == Lifetime::WithParent {
            // It may have ended already; there is nobody left to tell.
            let _ = self.kill();
        }
    }
}

/// CPU time that a process has used, user and kernel, from `/proc`.
///
/// Nanoseconds from `schedstat` of its threads where the kernel keeps it, else clock ticks (10 ms).
/// Threads that ended are missing from the first; daemons of ours end none while they are measured.
///
/// # Errors
/// When the process is gone.
pub fn cpu_time(pid: u32) -> io::Result<Duration> {
    let mut nanos = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
        nanos += text
            .split(' ')
            .next()
            .and_then(|n| n.parse().ok())
            .unwrap_or(0);
    }
    if nanos > 0 {
        return Ok(Duration::from_nanos(nanos));
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat_fields(&stat);
    let ticks = |i: usize| {
        fields
            .get(i)
            .and_then(|f| f.parse::<u64>().ok())
            .unwrap_or(0)
    };
    // utime and stime are fields 14 and 15 of proc(5); the first one here is field 3.
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Ok(Duration::from_millis(
        (ticks(11) + ticks(12)) * 1000 / per_second,
    ))
}

/// When a process started, in clock ticks since boot; with its id that names it for ever.
pub fn start_time(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat_fields(&text).get(19)?.parse().ok()
}

/// The fields of `/proc/PID/stat` after the name, which may hold spaces and brackets itself.
fn stat_fields(stat: &str) -> Vec<&str> {
    let rest = stat.rfind(')').map_or("", |end| &stat[end + 1..]);
    rest.split_ascii_whitespace().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_process_does_not_shift_the_fields_after_it() {
        let fields = stat_fields("7 (a) b) (c) S 1 2 3");
        assert_eq!(fields, ["S", "1", "2", "3"]);
    }

    #[test]
    fn this_process_has_used_cpu_time_and_has_a_start() {
        let pid = std::process::id();
        assert!(cpu_time(pid).unwrap() > Duration::ZERO);
        assert!(start_time(pid).unwrap() > 0);
        assert_eq!(start_time(u32::MAX), None);
    }
}
