//! Which CPUs the processes of a measurement run on.
//!
//! The floor and the real path use the same places, and every output names them: waking a thread on
//! another sleeping core can cost more than everything else that is measured.

use std::io;

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

/// How processes are laid out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The client on the first CPU, the replicas round robin on the others.
    #[default]
    Spread,
    /// Everything on the first CPU.
    OneCpu,
    /// The kernel decides.
    None,
}

/// A policy applied to the CPUs that this process may use.
#[derive(Clone, Debug)]
pub struct Pinning {
    policy: Policy,
    cpus: Vec<usize>,
}

impl Pinning {
    /// Applies `policy` to the CPUs that this process may use now.
    pub fn new(policy: Policy) -> Pinning {
        let cpus = sched_getaffinity(None)
            .map(|set| {
                (0..CpuSet::MAX_CPU)
                    .filter(|cpu| set.is_set(*cpu))
                    .collect()
            })
            .unwrap_or_default();
        Pinning { policy, cpus }
    }

    /// Where the client (and the initiator) runs; `None`: anywhere.
    pub fn client(&self) -> Option<usize> {
        match self.policy {
            Policy::None => None,
            Policy::Spread | Policy::OneCpu => self.cpus.first().copied(),
        }
    }

    /// Where replica `index` runs; `None`: anywhere.
    pub fn replica(&self, index: usize) -> Option<usize> {
        match self.policy {
            Policy::Spread if self.cpus.len() > 1 => {
                Some(self.cpus[1 + index % (self.cpus.len() - 1)])
            }
            _ => self.client(),
        }
    }

    /// One line for the output.
    pub fn describe(&self, replicas: usize) -> String {
        match self.client() {
            None => format!("not pinned, {} CPUs", self.cpus.len()),
            Some(client) => {
                let places: Vec<_> = (0..replicas)
                    .filter_map(|i| self.replica(i))
                    .map(|c| c.to_string())
                    .collect();
                format!(
                    "client on CPU {client}, replicas on CPU {} (of {} CPUs)",
                    places.join(", "),
                    self.cpus.len()
                )
            }
        }
    }
}

/// Pins the calling thread to `cpu`; what it starts afterwards inherits that.
///
/// # Errors
/// When the CPU does not exist or is not allowed.
pub fn pin_this_thread(cpu: Option<usize>) -> io::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None::<Pid>, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_keeps_the_client_alone_where_there_is_more_than_one_cpu() {
        let pinning = Pinning {
            policy: Policy::Spread,
            cpus: vec![2, 3, 7],
        };
        assert_eq!(pinning.client(), Some(2));
        assert_eq!(
            [0, 1, 2].map(|i| pinning.replica(i)),
            [Some(3), Some(7), Some(3)]
        );
        let single = Pinning {
            policy: Policy::Spread,
            cpus: vec![5],
        };
        assert_eq!((single.client(), single.replica(1)), (Some(5), Some(5)));
    }

    #[test]
    fn other_policies_pin_to_one_cpu_or_not_at_all() {
        let one = Pinning {
            policy: Policy::OneCpu,
            cpus: vec![0, 1],
        };
        assert_eq!((one.client(), one.replica(2)), (Some(0), Some(0)));
        let none = Pinning {
            policy: Policy::None,
            cpus: vec![0, 1],
        };
        assert_eq!((none.client(), none.replica(2)), (None, None));
        assert_eq!(none.describe(3), "not pinned, 2 CPUs");
    }
}
