//! Temporary directories of quickstart and bench, and the removal of what a crash left of them.
//!
//! A directory is owned by whoever holds the lock on its file `owner`. The kernel drops the lock
//! when the owner dies, however it dies. `processes` lists the children as "PID START-TIME", so
//! that whoever removes the directory can end exactly them and nobody who got their id later.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

use crate::output::EXIT_INTERRUPTED;
use crate::process::start_time;

const PREFIX: &str = "ashlar-run-";
/// Present in a directory that `--keep` left on purpose.
const KEPT: &str = "kept";

/// A temporary directory with the processes that belong to it. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Scratch {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    /// Held for the lock on it. `None` after the directory was kept or removed.
    owner: Mutex<Option<File>>,
    /// A signal came: the thread that took it ends this process.
    interrupted: AtomicBool,
}

impl Scratch {
    /// Makes a directory under `parent`, after removing what crashed runs of this user left there.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new(parent: &Path) -> anyhow::Result<Scratch> {
        remove_leftovers(parent, Leftovers::Crashed);
        let make = || -> anyhow::Result<Scratch> {
            let mut random = [0; 6];
            getrandom::fill(&mut random)?;
            let random: String = random.iter().map(|b| format!("{b:02x}")).collect();
            let path = parent.join(format!("{PREFIX}{random}"));
            DirBuilder::new().mode(0o700).create(&path)?;
            let owner = File::create_new(path.join("owner"))?;
            flock(&owner, FlockOperation::NonBlockingLockExclusive)?;
            Ok(Scratch {
                inner: Arc::new(Inner {
                    path,
                    owner: Mutex::new(Some(owner)),
                    interrupted: AtomicBool::new(false),
                }),
            })
        };
        make().with_context(|| format!("making a temporary directory in {}", parent.display()))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Lists `pid` as a process that belongs here.
    ///
    /// # Errors
    /// When the list cannot be written.
    pub fn remember(&self, pid: u32) -> io::Result<()> {
        let Some(started) = start_time(pid) else {
            return Ok(());
        };
        let list = self.path().join("processes");
        let mut file = OpenOptions::new().create(true).append(true).open(list)?;
        file.write_all(format!("{pid} {started}\n").as_bytes())
    }

    /// Leaves the directory and its processes when this process ends.
    ///
    /// # Errors
    /// When the marker cannot be written.
    pub fn keep(&self) -> io::Result<()> {
        File::create(self.path().join(KEPT))?;
        self.release();
        Ok(())
    }

    /// Ends the processes and removes the directory, unless it was kept. Safe to call again.
    pub fn remove(&self) {
        if self.release() {
            remove_directory(self.path());
        }
    }

    /// Does not return after a signal: processes that die with the directory are no failure to report.
    pub fn give_way_to_signal(&self) {
        while self.inner.interrupted.load(Ordering::SeqCst) {
            std::thread::park();
        }
    }

    /// Whether it was ours to remove.
    fn release(&self) -> bool {
        self.inner
            .owner
            .lock()
            .is_ok_and(|mut owner| owner.take().is_some())
    }

    /// From now on Ctrl-C and SIGTERM remove the directory, then end this process.
    ///
    /// # Errors
    /// When the handler cannot be installed.
    pub fn remove_on_signal(&self) -> anyhow::Result<()> {
        use tokio::signal::unix::{SignalKind, signal};
        let scratch = self.clone();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()?;
        let (mut interrupt, mut terminate) = {
            let _inside = runtime.enter();
            (
                signal(SignalKind::interrupt())?,
                signal(SignalKind::terminate())?,
            )
        };
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                    }
                });
                scratch.inner.interrupted.store(true, Ordering::SeqCst);
                scratch.remove();
                eprintln!("\ninterrupted; everything that was started is gone");
                std::process::exit(i32::from(EXIT_INTERRUPTED));
            })?;
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self
            .owner
            .get_mut()
            .is_ok_and(|owner| owner.take().is_some())
        {
            remove_directory(&self.path);
        }
    }
}

/// Which directories of earlier runs are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leftovers {
    /// Those whose owner died.
    Crashed,
    /// Those, and those that `--keep` left.
    CrashedAndKept,
}

/// Ends the processes of, and removes, directories of this user under `parent` that nobody owns.
/// Returns how many.
pub fn remove_leftovers(parent: &Path, which: Leftovers) -> usize {
    let me = rustix::process::geteuid().as_raw();
    let Ok(entries) = fs::read_dir(parent) else {
        return 0;
    };
    let mut removed = 0;
    for entry in entries.flatten() {
        let path = entry.path();
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX)
            && entry.metadata().is_ok_and(|m| m.is_dir() && m.uid() == me);
        if !ours || (which == Leftovers::Crashed && path.join(KEPT).exists()) {
            continue;
        }
        // A directory that is just being made has no owner file yet, or an unlocked one for an
        // instant; the young are left alone.
        let young = entry
            .metadata()
            .and_then(|m| m.modified())
            .is_ok_and(|made| made.elapsed().is_ok_and(|age| age < Duration::from_secs(1)));
        let Ok(owner) = File::open(path.join("owner")) else {
            continue;
        };
        let unowned = flock(&owner, FlockOperation::NonBlockingLockExclusive).is_ok();
        if unowned && (!young || path.join(KEPT).exists()) {
            remove_directory(&path);
            removed += 1;
        }
    }
    removed
}

fn remove_directory(path: &Path) {
    end_processes(&path.join("processes"));
    // What cannot be removed now is found by the next start.
    let _ = fs::remove_dir_all(path);
}

/// Kills the listed processes that are still the ones that were listed, and waits until they are
/// gone: a store in use could not be removed whole.
fn end_processes(list: &Path) {
    let text = fs::read_to_string(list).unwrap_or_default();
    let mut alive: Vec<(u32, u64)> = text
        .lines()
        .filter_map(|line| {
            let (pid, started) = line.split_once(' ')?;
            Some((pid.parse().ok()?, started.parse().ok()?))
        })
        .collect();
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        alive.retain(|(pid, started)| start_time(*pid) == Some(*started) && !is_zombie(*pid));
        for (pid, _) in &alive {
            if let Some(pid) = i32::try_from(*pid).ok().and_then(Pid::from_raw) {
                // Gone between the check and here: that is what is wanted.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        if alive.is_empty() || Instant::now() > deadline {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A dead child that its parent, which may be us, has not waited for.
fn is_zombie(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rfind(')')
            .is_some_and(|end| stat[end..].starts_with(") Z"))
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_directory_goes_with_its_owner_and_takes_its_processes_with_it() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(parent.path()).unwrap();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        scratch.remember(child.id()).unwrap();
        let path = scratch.path().to_owned();
        assert_eq!(
            remove_leftovers(parent.path(), Leftovers::CrashedAndKept),
            0,
            "it is owned"
        );
        drop(scratch);
        assert!(!path.exists());
        assert!(!child.wait().unwrap().success(), "it was killed");
    }

    #[test]
    fn a_kept_directory_stays_until_it_is_asked_for() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(parent.path()).unwrap();
        let path = scratch.path().to_owned();
        scratch.keep().unwrap();
        drop(scratch);
        assert_eq!(remove_leftovers(parent.path(), Leftovers::Crashed), 0);
        assert!(path.exists());
        assert_eq!(
            remove_leftovers(parent.path(), Leftovers::CrashedAndKept),
            1
        );
        assert!(!path.exists());
    }

    #[test]
    fn a_process_that_only_has_the_id_of_a_listed_one_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let list = folder.path().join("processes");
        fs::write(&list, format!("{} 1\nnonsense\n", child.id())).unwrap();
        end_processes(&list);
        assert!(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
