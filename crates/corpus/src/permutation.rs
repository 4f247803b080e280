//! A keyed permutation of `0..size` that needs no memory: position → item in O(1).
//!
//! A balanced Feistel network permutes the next power of four; results outside `0..size` are walked on
//! until they fall inside ("cycle walking"), which keeps it a bijection and takes fewer than four steps
//! on average. Shuffling an index array was rejected: eight bytes a window, per source and epoch.

use crate::random::Key;

/// With a good round function four rounds suffice; tiny domains look even only with more.
const ROUNDS: u64 = 8;

/// A permutation of `0..size`, fixed by its key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Permutation {
    key: Key,
    size: u64,
    half_bits: u32,
}

impl Permutation {
    /// The permutation of `0..size` under `key`.
    pub(crate) fn new(key: Key, size: u64) -> Permutation {
        let bits = u64::BITS - size.saturating_sub(1).leading_zeros();
        Permutation { key, size, half_bits: bits.div_ceil(2).max(1) }
    }

    /// Where `position` goes. `position` must be below the size; others come back as they are.
    pub(crate) fn apply(&self, position: u64) -> u64 {
        if position >= self.size {
            return position;
        }
        let mut walked = self.network(position);
        while walked >= self.size {
            walked = self.network(walked);
        }
        walked
    }

    fn network(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (self.key.with(round).with(right).number() & mask));
        }
        (left << self.half_bits) | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_item_is_hit_exactly_once(seed: u64, size in 0u64..3000) {
            let permutation = Permutation::new(Key::new(seed, "test"), size);
            let mut hit = vec![false; size as usize];
            for position in 0..size {
                let item = permutation.apply(position) as usize;
                prop_assert!(!std::mem::replace(&mut hit[item], true));
            }
        }

        #[test]
        fn huge_sizes_stay_in_range(seed: u64, size in 1u64.., position: u64) {
            let permutation = Permutation::new(Key::new(seed, "test"), size);
            prop_assert!(permutation.apply(position % size) < size);
        }
    }

    #[test]
    fn another_key_gives_another_order() {
        let order = |seed| {
            let permutation = Permutation::new(Key::new(seed, "test"), 100);
            (0..100).map(|position| permutation.apply(position)).collect::<Vec<_>>()
        };
        assert_ne!(order(1), order(2));
        assert_ne!(order(1), (0..100).collect::<Vec<_>>());
    }
}
