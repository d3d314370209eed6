//! What the NBD server counts.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of the NBD server of one thread, for any thread to read.
        #[derive(Debug, Default)]
        pub struct NbdCounters {
            $($(#[$doc])* pub $name: Counter,)*
        }

        impl NbdCounters {
            /// All of them, with the names that metrics give them.
            pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.get()),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Connections that were accepted.
    connections_accepted,
    /// Connections that were closed at once because there were too many.
    connections_refused,
    /// Connections that have ended, whoever ended them.
    connections_closed,
    /// Connections closed because what came is not the protocol, so that framing was lost.
    framing_lost,
    /// Connections closed because they did not get to requests, or read their last answers, in time.
    patience_lost,
    /// Options that were answered by an error.
    options_refused,
    /// Requests, good and bad.
    requests,
    /// Requests outside of a limit of the protocol or of the volume.
    requests_refused,
    /// Requests that the volume failed.
    requests_failed,
    /// Times that receiving from a client stopped until there was room for its next request.
    pauses,
}

/// A number that one thread adds to.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// The number.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// One more. Only the server's thread calls this, so that a plain load and store do.
    pub(super) fn count(&self) {
        self.0.store(self.get() + 1, Ordering::Relaxed);
    }
}
