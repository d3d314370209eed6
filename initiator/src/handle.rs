//! The mailbox of an initiator thread: how other threads attach, detach and ask. Never on the way
//! of a request.

use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ashlar_engine::Waker;
use ashlar_replication::values::{EpochNumber, VolumeId};

use crate::metrics::ThreadMetrics;
use crate::spec::{SpecError, VolumeSpec};
use crate::status::AttachmentStatus;

/// Takes the answer to a command. It is called on the initiator's thread and must not block.
pub(crate) type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// Why an attach failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// A field of the volume's description is outside its limits.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The volume is attached with other parameters.
    #[error("the volume is attached with other parameters; detach it first")]
    Different,
    /// Another volume of that name is attached.
    #[error("another volume with the name {0:?} is attached")]
    NameTaken(String),
    /// The volume is smaller than the size it is attached with; volumes only grow.
    #[error("the volume is attached with {attached} bytes; volumes do not shrink")]
    Shrinks {
        /// The size it is attached with.
        attached: u64,
    },
    /// The volume is being detached.
    #[error("the volume is being detached")]
    Detaching,
    /// Another initiator fenced this one.
    #[error("another initiator has attached the volume with epoch {}", by.0)]
    Fenced {
        /// Its epoch.
        by: EpochNumber,
    },
    /// The attachment is over for another reason.
    #[error("the attachment is over: {0}")]
    Over(String),
    /// Not enough members answered in time.
    #[error("no recovery quorum of members answered in time; {missing}")]
    TimedOut {
        /// Who is missing.
        missing: String,
    },
    /// The thread takes no more volumes.
    #[error("the thread has as many volumes as it can have")]
    TooMany,
    /// The thread has ended.
    #[error("the initiator has stopped")]
    Stopped,
}

impl AttachError {
    /// Whether the attachment exists and is of no use.
    fn ends_attachment(&self) -> bool {
        matches!(self, AttachError::Fenced { .. } | AttachError::Over(_))
    }
}

/// What a thread is asked to do.
pub(crate) enum Command {
    /// Begins; the answer comes at once.
    Attach(Box<VolumeSpec>, Reply<Result<(), AttachError>>),
    /// Answers once I/O is open or never will be; `None` when there is no such attachment.
    WaitOpen(
        VolumeId,
        Reply<Option<Result<AttachmentStatus, AttachError>>>,
    ),
    /// Answers when it is gone: true if it was there.
    Detach(VolumeId, Duration, Reply<bool>),
    List(Reply<Vec<AttachmentStatus>>),
    Metrics(Reply<Box<ThreadMetrics>>),
    /// Detaches everything, waiting at most so long for requests under way, and ends the thread.
    Stop(Duration),
}

/// The thread has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the initiator has stopped")]
pub struct Stopped;

/// Reaches an initiator thread from other threads.
#[derive(Clone)]
pub struct InitiatorThreadHandle {
    sender: Sender<Command>,
    waker: Waker,
    alive: Weak<()>,
}

/// The thread's end of its mailbox.
pub(crate) struct Mailbox {
    pub(crate) commands: Receiver<Command>,
    /// Gone with the thread.
    _alive: Arc<()>,
}

pub(crate) fn mailbox(waker: Waker) -> (InitiatorThreadHandle, Mailbox) {
    let (sender, commands) = channel();
    let alive = Arc::new(());
    let handle = InitiatorThreadHandle {
        sender,
        waker,
        alive: Arc::downgrade(&alive),
    };
    (
        handle,
        Mailbox {
            commands,
            _alive: alive,
        },
    )
}

impl InitiatorThreadHandle {
    fn command(&self, command: Command) -> Result<(), Stopped> {
        self.sender.send(command).map_err(|_| Stopped)?;
        self.waker.wake();
        Ok(())
    }

    /// Sends a command and blocks until it is answered, at most `timeout`; None then.
    fn ask<T: Send + 'static>(
        &self,
        timeout: Duration,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<Option<T>, Stopped> {
        let (sender, receiver) = sync_channel(1);
        self.command(command(Box::new(move |answer| {
            // Who gave up waiting does not want the answer.
            let _ = sender.try_send(answer);
        })))?;
        match receiver.recv_timeout(timeout) {
            Ok(answer) => Ok(Some(answer)),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => Ok(None),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => Err(Stopped),
        }
    }

    /// Sends a command and waits until it is answered.
    async fn ask_async<T: Send + 'static>(
        &self,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, Stopped> {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        self.command(command(Box::new(move |answer| {
            let _ = sender.send(answer);
        })))?;
        receiver.await.map_err(|_| Stopped)
    }

    /// Attaches a volume and blocks until I/O is open. Idempotent: a volume that is attached with the
    /// same parameters stays as it is, a larger size grows it, one whose attachment is over is
    /// attached anew.
    ///
    /// # Errors
    /// Those of [`AttachError`]. A volume that never opened is not attached afterwards.
    pub fn attach(
        &self,
        spec: VolumeSpec,
        timeout: Duration,
    ) -> Result<AttachmentStatus, AttachError> {
        let id = spec.id;
        let forever = Duration::MAX;
        let begun = self.ask(forever, |reply| Command::Attach(Box::new(spec), reply));
        begun
            .map_err(|Stopped| AttachError::Stopped)?
            .unwrap_or(Err(AttachError::Stopped))?;
        match self.ask(timeout, |reply| Command::WaitOpen(id, reply)) {
            Err(Stopped) => Err(AttachError::Stopped),
            Ok(Some(outcome)) => {
                let outcome = outcome.unwrap_or(Err(AttachError::Detaching));
                if outcome.as_ref().is_err_and(AttachError::ends_attachment) {
                    let _ = self.detach(id, Duration::ZERO);
                }
                outcome
            }
            Ok(None) => {
                let list = self.list().unwrap_or_default();
                let _ = self.detach(id, Duration::ZERO);
                Err(timed_out(list.into_iter().find(|a| a.id == id)))
            }
        }
    }

    /// [`InitiatorThreadHandle::attach`] for asynchronous callers. Dropping the future gives up waiting, not
    /// the attachment.
    ///
    /// # Errors
    /// As there.
    pub async fn attach_async(
        &self,
        spec: VolumeSpec,
        timeout: Duration,
    ) -> Result<AttachmentStatus, AttachError> {
        let id = spec.id;
        let begun = self
            .ask_async(|reply| Command::Attach(Box::new(spec), reply))
            .await;
        begun.map_err(|Stopped| AttachError::Stopped)??;
        let opened = self.ask_async(|reply| Command::WaitOpen(id, reply));
        match tokio::time::timeout(timeout, opened).await {
            Ok(outcome) => {
                let outcome = outcome.map_err(|Stopped| AttachError::Stopped)?;
                let outcome = outcome.unwrap_or(Err(AttachError::Detaching));
                if outcome.as_ref().is_err_and(AttachError::ends_attachment) {
                    let _ = self.detach_async(id, Duration::ZERO).await;
                }
                outcome
            }
            Err(_) => {
                let list = self.list_async().await.unwrap_or_default();
                let _ = self.detach_async(id, Duration::ZERO).await;
                Err(timed_out(list.into_iter().find(|a| a.id == id)))
            }
        }
    }

    /// Detaches a volume: takes no new requests, finishes those under way within `drain`, fails the rest.
    /// False when it was not attached.
    ///
    /// # Errors
    /// When the thread has ended.
    pub fn detach(&self, id: VolumeId, drain: Duration) -> Result<bool, Stopped> {
        let detached = self.ask(Duration::MAX, |reply| Command::Detach(id, drain, reply))?;
        detached.ok_or(Stopped)
    }

    /// [`InitiatorThreadHandle::detach`] for asynchronous callers.
    ///
    /// # Errors
    /// As there.
    pub async fn detach_async(&self, id: VolumeId, drain: Duration) -> Result<bool, Stopped> {
        self.ask_async(|reply| Command::Detach(id, drain, reply))
            .await
    }

    /// The attachments of the thread.
    ///
    /// # Errors
    /// When the thread has ended.
    pub fn list(&self) -> Result<Vec<AttachmentStatus>, Stopped> {
        self.ask(Duration::MAX, Command::List)?.ok_or(Stopped)
    }

    /// The attachments of the thread.
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn list_async(&self) -> Result<Vec<AttachmentStatus>, Stopped> {
        self.ask_async(Command::List).await
    }

    /// What the thread has counted.
    ///
    /// # Errors
    /// When the thread has ended.
    pub fn metrics(&self) -> Result<ThreadMetrics, Stopped> {
        self.ask(Duration::MAX, Command::Metrics)?
            .map(|metrics| *metrics)
            .ok_or(Stopped)
    }

    /// What the thread has counted.
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn metrics_async(&self) -> Result<ThreadMetrics, Stopped> {
        self.ask_async(Command::Metrics)
            .await
            .map(|metrics| *metrics)
    }

    /// Whether the thread has ended.
    pub fn is_stopped(&self) -> bool {
        self.alive.strong_count() == 0
    }

    /// Makes the thread detach everything and end. Requests under way get `drain` to finish.
    pub fn stop(&self, drain: Duration) {
        // One that has ended already has stopped.
        let _ = self.command(Command::Stop(drain));
    }
}

fn timed_out(status: Option<AttachmentStatus>) -> AttachError {
    let missing = status.map(|status| status.missing()).unwrap_or_default();
    let missing = if missing.is_empty() {
        "all are connected".into()
    } else {
        missing
    };
    AttachError::TimedOut { missing }
}
