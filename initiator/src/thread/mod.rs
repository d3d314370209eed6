//! An initiator thread: engine, connections to members, volumes and front ends, run to completion.
//!
//! A turn: socket events (replies become acknowledgements at once), commands, timers, completions to
//! front ends, one call of each front end; then the engine sends everything that was queued and waits.

mod commands;
mod core;
mod table;
mod timers;

use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Duration;

use ashlar_engine::{Engine, EngineError, Event};
use ashlar_replication::values::Time;

use self::core::{Announcement, Completion, Core};
use crate::byte_io::Outcome;
use crate::front_end::{Completed, Context, FrontEnd, FrontEndId, Owned, Volumes as _};
use crate::handle::{InitiatorThreadHandle, Mailbox, mailbox};

/// Makes a front end on the thread it is for.
pub type FrontEndMaker = Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>;

/// Settings of an initiator thread.
#[derive(Clone, Debug)]
pub struct ThreadOptions {
    /// Name of the thread.
    pub name: String,
    /// The CPU it runs on; None: any.
    pub cpu: Option<usize>,
    /// Settings of its engine.
    pub engine: ashlar_engine::Options,
    /// L: the length of a lease, one constant for all initiators and storage nodes.
    pub lease: Duration,
    /// Who this initiator is, for the nodes' messages and status. Fresh for every process.
    pub identity: [u8; 16],
}

impl Default for ThreadOptions {
    fn default() -> ThreadOptions {
        ThreadOptions {
            name: "initiator".into(),
            cpu: None,
            engine: ashlar_engine::Options::default(),
            lease: Duration::from_secs(3),
            identity: crate::random::bytes(),
        }
    }
}

/// Why a thread does not start or has ended.
#[derive(Debug, thiserror::Error)]
pub enum InitiatorError {
    /// Of its engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A front end could not start.
    #[error("a front end cannot start: {0}")]
    FrontEnd(#[source] std::io::Error),
    /// The thread cannot be pinned to its CPU.
    #[error("cannot run on CPU {cpu}")]
    Pinning {
        /// The CPU.
        cpu: usize,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The system refuses another thread.
    #[error("cannot start a thread")]
    Spawn(#[source] std::io::Error),
    /// The thread panicked.
    #[error("the thread panicked")]
    Panicked,
}

/// See the module's documentation.
pub struct InitiatorThread {
    engine: Engine,
    core: Core,
    front_ends: Vec<Box<dyn FrontEnd>>,
    mailbox: Mailbox,
    handle: InitiatorThreadHandle,
}

/// An initiator on a thread of its own.
pub struct SpawnedThread {
    handle: InitiatorThreadHandle,
    thread: JoinHandle<Result<(), InitiatorError>>,
}

impl SpawnedThread {
    /// How to reach it.
    pub fn handle(&self) -> &InitiatorThreadHandle {
        &self.handle
    }

    /// Waits for its end; see [`InitiatorThreadHandle::stop`].
    ///
    /// # Errors
    /// When it ended by an error.
    pub fn join(self) -> Result<(), InitiatorError> {
        self.thread.join().map_err(|_| InitiatorError::Panicked)?
    }
}

impl InitiatorThread {
    /// Starts a thread, and the front ends on it.
    ///
    /// # Errors
    /// When the thread, its engine or a front end cannot start.
    pub fn spawn(
        options: ThreadOptions,
        front_ends: Vec<FrontEndMaker>,
    ) -> Result<SpawnedThread, InitiatorError> {
        let (sender, started) = sync_channel(1);
        let name = options.name.clone();
        let body = move || {
            let front_ends = front_ends.into_iter().map(|make| make()).collect();
            match InitiatorThread::new(options, front_ends) {
                Ok(thread) => {
                    // The other side waits for it.
                    let _ = sender.send(Ok(thread.handle().clone()));
                    thread.run()
                }
                Err(error) => {
                    let _ = sender.send(Err(error));
                    Ok(())
                }
            }
        };
        let thread = std::thread::Builder::new().name(name).spawn(body);
        let thread = thread.map_err(InitiatorError::Spawn)?;
        let handle = started.recv().map_err(|_| InitiatorError::Panicked)??;
        Ok(SpawnedThread { handle, thread })
    }

    /// Makes the calling thread an initiator, pinned if asked for, with its front ends started;
    /// [`InitiatorThread::run`] does the work.
    ///
    /// # Errors
    /// When the engine or a front end cannot start.
    pub fn new(
        options: ThreadOptions,
        front_ends: Vec<Box<dyn FrontEnd>>,
    ) -> Result<InitiatorThread, InitiatorError> {
        if let Some(cpu) = options.cpu {
            pin(cpu).map_err(|source| InitiatorError::Pinning { cpu, source })?;
        }
        let engine = Engine::new(options.engine.clone())?;
        if let Some(notice) = engine.notice() {
            tracing::warn!("{notice}");
        }
        let (handle, mailbox) = mailbox(engine.waker());
        let core = Core::new(&options);
        let mut thread = InitiatorThread {
            engine,
            core,
            front_ends,
            mailbox,
            handle,
        };
        for (index, front_end) in thread.front_ends.iter_mut().enumerate() {
            let id = FrontEndId(index as u16);
            let context = &mut Context::new(&mut thread.engine, &mut thread.core, id);
            front_end.start(context).map_err(InitiatorError::FrontEnd)?;
        }
        Ok(thread)
    }

    /// How to reach it.
    pub fn handle(&self) -> &InitiatorThreadHandle {
        &self.handle
    }

    /// Runs until it is stopped.
    ///
    /// # Errors
    /// When the engine fails; the attachments are over then.
    pub fn run(mut self) -> Result<(), InitiatorError> {
        let mut events = Vec::new();
        let mut deadline = Time(0);
        loop {
            self.engine.poll(deadline, &mut events)?;
            self.core.metrics.turns += 1;
            for event in events.drain(..) {
                self.event(&event);
            }
            self.core.run_timers(&mut self.engine);
            self.deliver();
            let wanted = self.front_end_turns();
            if self.core.stopping
                && self.core.volumes.is_empty()
                && self.core.completions.is_empty()
            {
                // What was queued, such as farewells, goes out with one more turn.
                self.engine.poll(Time(0), &mut events)?;
                return Ok(());
            }
            // A request may have ended within the call that made it.
            let idle = self.core.completions.is_empty() && self.core.announcements.is_empty();
            deadline = if idle {
                wanted.min(self.core.next_timer())
            } else {
                Time(0)
            };
        }
    }

    fn event(&mut self, event: &Event) {
        if self.core.socket_event(&mut self.engine, event) {
            return;
        }
        let owned = match event {
            Event::Accepted { listener, .. } | Event::AcceptFailed { listener, .. } => {
                Owned::Listener(*listener)
            }
            Event::Connected { socket }
            | Event::Received { socket }
            | Event::Drained { socket }
            | Event::Closed { socket, .. } => Owned::Socket(*socket),
            Event::Woken => return self.run_commands(),
            Event::File { .. } => return,
        };
        let Some(id) = self.core.owners.get(&owned).copied() else {
            return;
        };
        match event {
            Event::Accepted { socket, .. } => self.core.own(id, (*socket).into()),
            Event::Closed { .. } => {
                self.core.owners.remove(&owned);
            }
            _ => {}
        }
        let context = &mut Context::new(&mut self.engine, &mut self.core, id);
        self.front_ends[usize::from(id.0)].socket_event(context, event);
    }

    fn run_commands(&mut self) {
        while let Ok(command) = self.mailbox.commands.try_recv() {
            self.core.command(&mut self.engine, command);
        }
    }

    /// Tells front ends what has ended and what has changed.
    fn deliver(&mut self) {
        while let Some(announcement) = self.core.announcements.pop_front() {
            self.announce(announcement);
        }
        // Not until it is empty: a front end that makes a request per completion would never end.
        for _ in 0..self.core.completions.len() {
            let Some(completion) = self.core.completions.pop_front() else {
                break;
            };
            self.complete(completion);
        }
    }

    fn announce(&mut self, announcement: Announcement) {
        for (index, front_end) in self.front_ends.iter_mut().enumerate() {
            let id = FrontEndId(index as u16);
            let (Announcement::Attached(handle)
            | Announcement::Resized(handle)
            | Announcement::Detached(handle)) = announcement;
            let info = self.core.volumes.get(handle).map(|volume| volume.info());
            let context = &mut Context::new(&mut self.engine, &mut self.core, id);
            match (announcement, info) {
                (Announcement::Attached(_), Some(info)) => {
                    front_end.volume_attached(context, handle, &info);
                }
                (Announcement::Resized(_), Some(info)) => {
                    front_end.volume_resized(context, handle, &info);
                }
                (Announcement::Detached(_), _) => front_end.volume_detached(context, handle),
                (_, None) => {}
            }
        }
    }

    fn complete(&mut self, completion: Completion) {
        let Completion {
            front_end: id,
            volume,
            ticket,
            result,
        } = completion;
        let context = &mut Context::new(&mut self.engine, &mut self.core, id);
        let front_end = &mut self.front_ends[usize::from(id.0)];
        let borrowed = match &result {
            Ok(Outcome::Read(pieces)) => Ok(Completed::Read(pieces)),
            Ok(Outcome::Done) => Ok(Completed::Done),
            Ok(Outcome::Allocation(pieces)) => Ok(Completed::Allocation(pieces)),
            Err(error) => Err(error.clone()),
        };
        front_end.completed(context, volume, ticket, borrowed);
        self.core.finished(&mut self.engine, volume, result);
    }

    /// Returns the earliest time that a front end wants to be called again.
    fn front_end_turns(&mut self) -> Time {
        let mut wanted = Time::NEVER;
        for (index, front_end) in self.front_ends.iter_mut().enumerate() {
            let id = FrontEndId(index as u16);
            let context = &mut Context::new(&mut self.engine, &mut self.core, id);
            wanted = wanted.min(front_end.turn(context));
        }
        wanted
    }
}

/// Pins the calling thread.
fn pin(cpu: usize) -> std::io::Result<()> {
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}
