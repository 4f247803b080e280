//! Keyed, counter-based random numbers: the only source of chance in this crate.
//!
//! A [`Key`] names *which* decision is made (run seed, purpose, source, epoch, …); a [`Draws`] is the
//! stream of numbers under one key. Nothing here has hidden state, so any decision can be made again,
//! by anyone, in any order. Integers only: the same bits on every platform. Not for secrets.

/// 2^64 divided by the golden ratio: SplitMix64's increment.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The name of one random decision, or of one stream of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(u64);

impl Key {
    /// The key of one purpose under a seed; two purposes never share a stream.
    pub(crate) fn new(seed: u64, purpose: &str) -> Key {
        purpose.bytes().fold(Key(mix(seed ^ GOLDEN)), |key, byte| key.with(u64::from(byte)))
    }

    /// The key one level further down: of this epoch, this document, this round.
    pub(crate) fn with(self, part: u64) -> Key {
        Key(mix(self.0.rotate_left(23) ^ mix(part.wrapping_add(GOLDEN))))
    }

    /// One number for this key.
    pub(crate) fn number(self) -> u64 {
        mix(self.0.wrapping_add(GOLDEN))
    }

    /// As many numbers as wanted for this key.
    pub(crate) fn draws(self) -> Draws {
        Draws { key: self, counter: 0 }
    }
}

/// The stream of random numbers under one [`Key`].
#[derive(Clone, Debug)]
pub(crate) struct Draws {
    key: Key,
    counter: u64,
}

impl Draws {
    /// The next 64 random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.counter += 1;
        mix(self.key.0.wrapping_add(self.counter.wrapping_mul(GOLDEN)))
    }

    /// A number below `bound`, exactly uniform (Lemire's multiplication with rejection). `bound` ≥ 1.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        debug_assert!(bound >= 1);
        let reject_below = bound.wrapping_neg() % bound.max(1);
        loop {
            let wide = u128::from(self.next()) * u128::from(bound);
            if wide as u64 >= reject_below {
                return (wide >> 64) as u64;
            }
        }
    }

    /// Fisher–Yates.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// SplitMix64's finaliser: a bijection of 64 bits in which every input bit moves every output bit.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_same_on_every_machine() {
        let mut draws = Key::new(7, "test").with(1).draws();
        let drawn = [draws.next(), draws.below(1000), Key::new(7, "test").number()];
        assert_eq!(drawn, GOLDEN_NUMBERS);
    }
    const GOLDEN_NUMBERS: [u64; 3] = [14_567_646_802_954_423_014, 551, 227_013_299_446_183_969];

    #[test]
    fn purposes_and_parts_have_streams_of_their_own() {
        assert_ne!(Key::new(1, "a"), Key::new(1, "b"));
        assert_ne!(Key::new(1, "a").with(1).with(2), Key::new(1, "a").with(2).with(1));
    }

    #[test]
    fn below_is_even() {
        let mut draws = Key::new(3, "even").draws();
        let mut seen = [0u32; 7];
        for _ in 0..70_000 {
            seen[draws.below(7) as usize] += 1;
        }
        assert!(seen.iter().all(|&count| (9_500..10_500).contains(&count)), "{seen:?}");
    }
}
