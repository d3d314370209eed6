//! Fresh randomness from the system, for nonces and jitter.

/// `N` random bytes.
///
/// # Panics
/// When the system has no randomness: nothing safe can be done without it.
pub(crate) fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the system has a source of randomness");
    bytes
}

/// A random number.
pub(crate) fn number() -> u64 {
    u64::from_le_bytes(bytes())
}

/// A small generator for jitter, where quality does not matter (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct Jitter(u64);

impl Jitter {
    pub(crate) fn new(seed: u64) -> Jitter {
        Jitter(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between three quarters of `duration` and the whole of it.
    pub(crate) fn shorten(&mut self, duration: std::time::Duration) -> std::time::Duration {
        duration - duration.mul_f64((self.next() >> 11) as f64 / (1u64 << 53) as f64 / 4.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn jitter_stays_between_three_quarters_and_the_whole() {
        let mut jitter = Jitter::new(1);
        let whole = Duration::from_millis(100);
        let drawn: Vec<_> = (0..1000).map(|_| jitter.shorten(whole)).collect();
        assert!(drawn.iter().all(|d| (whole * 3 / 4..=whole).contains(d)));
        assert!(drawn.iter().max() > drawn.iter().min());
    }
}
