//! Which thread has which volume.

use std::collections::HashMap;
use std::time::Duration;

use ashlar_replication::values::VolumeId;
use tokio::sync::Mutex;

use crate::handle::{AttachError, InitiatorThreadHandle, Stopped};
use crate::metrics::ThreadMetrics;
use crate::spec::VolumeSpec;
use crate::status::AttachmentStatus;

/// Place of a thread in the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ThreadIndex(pub usize);

#[derive(Clone, Debug)]
struct Placed {
    thread: ThreadIndex,
    name: String,
}

/// The threads of a daemon, and the volumes on them. A volume stays on its thread until it is detached.
pub struct Attachments {
    threads: Vec<InitiatorThreadHandle>,
    placed: Mutex<HashMap<VolumeId, Placed>>,
}

impl Attachments {
    /// Without volumes.
    pub fn new(threads: Vec<InitiatorThreadHandle>) -> Attachments {
        Attachments {
            threads,
            placed: Mutex::default(),
        }
    }

    /// The thread of a volume: where it is, or the one with the fewest.
    async fn place(&self, spec: &VolumeSpec) -> Result<ThreadIndex, AttachError> {
        let mut placed = self.placed.lock().await;
        if placed
            .iter()
            .any(|(id, other)| *id != spec.id && other.name == spec.name)
        {
            return Err(AttachError::NameTaken(spec.name.clone()));
        }
        let of_thread = |thread: &usize| placed.values().filter(|p| p.thread.0 == *thread).count();
        let thread = match placed.get(&spec.id) {
            Some(placed) => placed.thread,
            None => {
                let fewest = (0..self.threads.len()).min_by_key(of_thread);
                ThreadIndex(fewest.ok_or(AttachError::Stopped)?)
            }
        };
        let name = spec.name.clone();
        // An attach with another name is refused by the thread; then the old name stays.
        placed.entry(spec.id).or_insert(Placed { thread, name });
        Ok(thread)
    }

    /// Forgets the place of a volume that its thread does not have.
    async fn forget_if_gone(&self, id: VolumeId, thread: ThreadIndex) {
        let mut placed = self.placed.lock().await;
        let list = self.threads[thread.0]
            .list_async()
            .await
            .unwrap_or_default();
        if list.iter().all(|attachment| attachment.id != id) {
            placed.remove(&id);
        }
    }

    /// See [`InitiatorThreadHandle::attach`].
    ///
    /// # Errors
    /// As there.
    pub async fn attach(
        &self,
        spec: VolumeSpec,
        timeout: Duration,
    ) -> Result<(ThreadIndex, AttachmentStatus), AttachError> {
        let id = spec.id;
        let thread = self.place(&spec).await?;
        match self.threads[thread.0].attach_async(spec, timeout).await {
            Ok(status) => Ok((thread, status)),
            Err(error) => {
                self.forget_if_gone(id, thread).await;
                Err(error)
            }
        }
    }

    /// See [`InitiatorThreadHandle::detach`].
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn detach(&self, id: VolumeId, drain: Duration) -> Result<bool, Stopped> {
        let Some(placed) = self.placed.lock().await.get(&id).cloned() else {
            return Ok(false);
        };
        let was_there = self.threads[placed.thread.0]
            .detach_async(id, drain)
            .await?;
        self.forget_if_gone(id, placed.thread).await;
        Ok(was_there)
    }

    /// All attachments with their threads, by name.
    ///
    /// # Errors
    /// When a thread has ended.
    pub async fn list(&self) -> Result<Vec<(ThreadIndex, AttachmentStatus)>, Stopped> {
        let mut all = Vec::new();
        for (index, thread) in self.threads.iter().enumerate() {
            let list = thread.list_async().await?;
            all.extend(
                list.into_iter()
                    .map(|attachment| (ThreadIndex(index), attachment)),
            );
        }
        all.sort_by(|(_, a), (_, b)| a.name.cmp(&b.name));
        Ok(all)
    }

    /// What every thread has counted.
    ///
    /// # Errors
    /// When a thread has ended.
    pub async fn metrics(&self) -> Result<Vec<ThreadMetrics>, Stopped> {
        let mut all = Vec::new();
        for thread in &self.threads {
            all.push(thread.metrics_async().await?);
        }
        Ok(all)
    }

    /// Whether a thread has ended.
    pub fn is_any_stopped(&self) -> bool {
        self.threads.iter().any(InitiatorThreadHandle::is_stopped)
    }

    /// Makes all threads detach everything and end.
    pub fn stop(&self, drain: Duration) {
        self.threads.iter().for_each(|thread| thread.stop(drain));
    }
}
