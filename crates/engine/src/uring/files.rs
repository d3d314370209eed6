//! File operations through the ring.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};

use super::Uring;
use super::ring::Completion;
use crate::core::Core;
use crate::file::{Action, Durability, Operation, Persist, finish};
use crate::slab::Key;
use crate::tag::{self, Kind};

/// An operation that the kernel may be working on.
pub(crate) struct Started {
    file: Key,
    operation: Operation,
    /// A write and a sync, linked.
    linked: bool,
}

impl Uring {
    pub(crate) fn start(&mut self, core: &mut Core, file: Key, mut operation: Operation) {
        let Some(entry) = core.files.get(file) else {
            return;
        };
        if entry.durability == Durability::Inline {
            let result = operation.run(entry.fd.as_fd());
            finish(core, file, operation, result);
            return;
        }
        let linked = operation.action == Action::Write(Persist::Durable)
            && entry.durability == Durability::Linked;
        // A new key for every attempt: what is left over from an earlier one must not match.
        let key = self.operations.insert(Started {
            file,
            operation,
            linked,
        });
        if let Err(error) = self.push_operation(core, key)
            && let Some(Started {
                file, operation, ..
            }) = self.operations.remove(key)
        {
            finish(core, file, operation, Err(error));
        }
    }

    fn push_operation(&mut self, core: &Core, key: Key) -> io::Result<()> {
        let started = self.operations.get_mut(key).expect("just inserted");
        let entry = core
            .files
            .get(started.file)
            .expect("a file stays while it has operations");
        let fd = Fd(entry.fd.as_raw_fd());
        let data = tag::pack(Kind::File, key);
        let (memory, len, offset) = started.operation.rest();
        let len = len as u32;
        let sync = opcode::Fsync::new(fd)
            .flags(FsyncFlags::DATASYNC)
            .build()
            .user_data(data);
        let write = opcode::Write::new(fd, memory, len).offset(offset);
        // SAFETY: the buffer belongs to the operation, which stays in `operations` until its last
        // completion.
        unsafe {
            match started.operation.action {
                Action::Sync => self.ring.push(&[sync]),
                Action::Read => {
                    let read = opcode::Read::new(fd, memory, len).offset(offset).build();
                    self.ring.push(&[read.user_data(data)])
                }
                Action::Write(Persist::Durable) if started.linked => {
                    let mut flags = squeue::Flags::IO_LINK;
                    if self.ring.can_skip {
                        // Only a failed write has its own completion: one wake-up, not two.
                        flags |= squeue::Flags::SKIP_SUCCESS;
                    }
                    let data = tag::pack(Kind::LinkedWrite, key);
                    let write = write.build().flags(flags).user_data(data);
                    self.ring.push(&[write, sync])
                }
                Action::Write(Persist::Durable) => self
                    .ring
                    .push(&[write.rw_flags(libc::RWF_DSYNC).build().user_data(data)]),
                Action::Write(Persist::Cached) => self.ring.push(&[write.build().user_data(data)]),
            }
        }
    }

    /// The write of a linked operation. A short or failed one has severed the link.
    pub(crate) fn linked_write_done(&mut self, core: &mut Core, key: Key, done: &Completion) {
        let Some(started) = self.operations.get_mut(key) else {
            return;
        };
        let expected = started.operation.rest().1;
        if done.result == expected as i32 {
            return;
        }
        self.operation_attempted(core, key, done.result());
    }

    pub(crate) fn file_done(&mut self, core: &mut Core, key: Key, done: &Completion) {
        let Some(started) = self.operations.get_mut(key) else {
            return;
        };
        let mut result = done.result();
        if started.linked && result.is_ok() {
            // The sync succeeded, so the write before it was complete.
            result = Ok(started.operation.rest().1);
        }
        self.operation_attempted(core, key, result);
    }

    fn operation_attempted(&mut self, core: &mut Core, key: Key, result: io::Result<usize>) {
        let Some(Started {
            file,
            mut operation,
            ..
        }) = self.operations.remove(key)
        else {
            return;
        };
        match operation.advance(result) {
            Some(result) => finish(core, file, operation, result),
            None => self.start(core, file, operation),
        }
    }
}
