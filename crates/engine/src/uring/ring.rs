//! The ring itself: setting it up, handing entries to the kernel, taking completions.

use std::collections::VecDeque;
use std::io;

use ashlar_replication::values::Time;
use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

use crate::core::monotonic_now;
use crate::options::EngineError;
use crate::spin::Spin;
use crate::tag::{self, Kind};

/// The completion queue has this many times the entries of the submission queue, because every
/// socket has an entry under way all the time. When it overflows the kernel keeps the rest.
const COMPLETIONS_PER_ENTRY: u32 = 8;
/// Attempts to hand entries over while the kernel says "later" (it is out of memory).
const SUBMIT_ATTEMPTS_MAX: u32 = 1000;

/// Looks at the ring between two looks at the clock while spinning: less than a microsecond.
const LOOKS_PER_CLOCK: u32 = 8;

pub(crate) struct Completion {
    pub(crate) data: u64,
    pub(crate) result: i32,
    pub(crate) flags: u32,
}

impl Completion {
    pub(crate) fn result(&self) -> io::Result<usize> {
        if self.result < 0 {
            Err(io::Error::from_raw_os_error(-self.result))
        } else {
            Ok(self.result as usize)
        }
    }

    /// The socket has more input than the receive took.
    pub(crate) fn more_input(&self) -> bool {
        cqueue::sock_nonempty(self.flags)
    }
}

pub(crate) struct Ring {
    ring: IoUring,
    completions: VecDeque<Completion>,
    /// Linux 6.1 or later: completions only come about in our own system calls, a send that must
    /// not wait is over when the call returns, and receives can skip the first attempt.
    pub(crate) modern: bool,
    /// A successful entry can do without a completion.
    pub(crate) can_skip: bool,
}

fn build(entries: u32) -> io::Result<(IoUring, bool)> {
    let mut builder = IoUring::builder();
    builder
        .setup_clamp()
        .setup_cqsize(entries * COMPLETIONS_PER_ENTRY);
    let mut modern = builder.clone();
    modern
        .setup_submit_all()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag();
    match modern.build(entries) {
        Ok(ring) => return Ok((ring, true)),
        Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
        Err(_) => {}
    }
    let mut cooperative = builder.clone();
    cooperative
        .setup_submit_all()
        .setup_coop_taskrun()
        .setup_taskrun_flag();
    match cooperative.build(entries) {
        Ok(ring) => return Ok((ring, false)),
        Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
        Err(_) => {}
    }
    Ok((builder.build(entries)?, false))
}

impl Ring {
    pub(crate) fn new(entries: u32) -> Result<Ring, EngineError> {
        let entries = entries.clamp(8, 4096);
        let unavailable = |reason| move |source| EngineError::Unavailable { reason, source };
        let (ring, modern) =
            build(entries).map_err(unavailable("the kernel refuses to set up a ring"))?;
        let params = ring.params();
        if !params.is_feature_ext_arg()
            || !params.is_feature_nodrop()
            || !params.is_feature_submit_stable()
            || !params.is_feature_fast_poll()
        {
            let source = io::ErrorKind::Unsupported.into();
            return Err(unavailable("the kernel is older than 5.11")(source));
        }
        let can_skip = params.is_feature_skip_cqe_on_success();
        let modern = modern && can_skip;
        let mut ring = Ring {
            ring,
            completions: VecDeque::new(),
            modern,
            can_skip,
        };
        ring.try_out()
            .map_err(unavailable("the kernel refuses to enter the ring"))?;
        Ok(ring)
    }

    /// A filter may allow the setup and refuse the rest: better to know it now.
    fn try_out(&mut self) -> io::Result<()> {
        let entry = opcode::Nop::new()
            .build()
            .user_data(tag::pack(Kind::Ignored, tag::NO_KEY));
        // SAFETY: the entry refers to no memory.
        unsafe { self.push(&[entry]) }?;
        self.ring.submit_and_wait(1)?;
        self.stash();
        self.completions
            .pop_front()
            .map(drop)
            .ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Queues entries next to each other, so that links between them hold.
    ///
    /// # Safety
    /// What the entries refer to stays valid until their completions, or for entries that skip
    /// the completion until they have been executed.
    pub(crate) unsafe fn push(&mut self, entries: &[squeue::Entry]) -> io::Result<()> {
        let room = {
            let queue = self.ring.submission();
            queue.capacity() - queue.len()
        };
        if room < entries.len() {
            self.submit()?;
        }
        // SAFETY: the caller vouches for the entries.
        let pushed = unsafe { self.ring.submission().push_multiple(entries) };
        pushed.map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))
    }

    /// Moves the completions that the kernel has posted to our own queue.
    fn stash(&mut self) {
        for entry in self.ring.completion() {
            self.completions.push_back(Completion {
                data: entry.user_data(),
                result: entry.result(),
                flags: entry.flags(),
            });
        }
    }

    pub(crate) fn next_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    pub(crate) fn has_completions(&self) -> bool {
        !self.completions.is_empty()
    }

    /// Hands all queued entries to the kernel and takes what is complete, without waiting.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        let needs_call = {
            let queue = self.ring.submission();
            !queue.is_empty() || queue.taskrun() || queue.cq_overflow()
        };
        if needs_call {
            self.settle(true)?;
        }
        self.stash();
        Ok(())
    }

    /// Calls the kernel until it has taken every entry and posted every completion that it had no
    /// room for. `first`: at least once.
    fn settle(&mut self, first: bool) -> io::Result<()> {
        let mut again = first;
        for _ in 0..SUBMIT_ATTEMPTS_MAX {
            if !again {
                let queue = self.ring.submission();
                if queue.is_empty() && !queue.cq_overflow() {
                    return Ok(());
                }
            }
            again = false;
            self.stash();
            match self.ring.submit() {
                Err(error) if !is_passing(&error) => return Err(error),
                _ => {}
            }
        }
        Err(io::ErrorKind::OutOfMemory.into())
    }

    /// Hands all queued entries to the kernel and waits until something is complete, or for
    /// `deadline`. Returns false when nothing is: the time is over, or a signal came.
    pub(crate) fn wait(&mut self, deadline: Time, spin: &mut Spin) -> io::Result<bool> {
        let mut now = Time(0);
        let mut started = Time(0);
        let spins = spin.is_on();
        if spins {
            started = monotonic_now();
            let until = spin.until(started).min(deadline);
            if started < until && self.spin(until)? {
                spin.hit();
                return Ok(true);
            }
            now = if until > started { until } else { started };
        }
        let spun = now > started;
        let result = if deadline == Time::NEVER {
            self.ring.submit_and_wait(1)
        } else {
            if !spins || spun {
                now = monotonic_now();
            }
            let timeout = Timespec::from(deadline.since(now));
            self.ring
                .submitter()
                .submit_with_args(1, &SubmitArgs::new().timespec(&timeout))
        };
        match result {
            Err(error) if !is_passing(&error) => return Err(error),
            _ => {}
        }
        // All entries must be executed, and all completions seen, before anyone concludes from
        // the absence of one.
        self.settle(false)?;
        self.stash();
        if spins && !self.completions.is_empty() {
            spin.slept(spun, || monotonic_now().since(started));
        }
        Ok(!self.completions.is_empty())
    }

    /// Spins, without system calls while there is nothing to do; true if something is complete.
    fn spin(&mut self, until: Time) -> io::Result<bool> {
        self.submit()?;
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                if self.is_stirring() {
                    self.submit()?;
                }
                if !self.completions.is_empty() {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            if monotonic_now() >= until {
                return Ok(false);
            }
        }
    }

    /// There are completions, or work that the kernel does when it is called. No system call.
    fn is_stirring(&mut self) -> bool {
        if !self.ring.completion().is_empty() {
            return true;
        }
        let queue = self.ring.submission();
        queue.taskrun() || queue.cq_overflow()
    }
}

/// The call did not do all it should, but will when it is made again.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME)
    )
}
