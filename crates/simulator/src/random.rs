//! The only source of chance: a seed gives a schedule.

/// splitmix64.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0..n.
    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// low..=high.
    pub(super) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Once in `n` times.
    pub(super) fn one_in(&mut self, n: u64) -> bool {
        n > 0 && self.below(n) == 0
    }

    pub(super) fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len() as u64) as usize]
    }

    /// Mostly short, sometimes a hundred times as long.
    pub(super) fn delay(&mut self, typical_ns: u64) -> u64 {
        let scale = match self.below(40) {
            0 => 100,
            1..=4 => 10,
            _ => 1,
        };
        self.between(1, typical_ns * 2) * scale
    }
}
