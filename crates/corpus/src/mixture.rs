//! From which source a sample comes: exact proportions in every block of samples, and no state.
//!
//! Every block of [`BLOCK`] samples gives each source its fixed count of slots; a keyed permutation decides
//! which slots. So the sample number alone says the source, and how many samples of that source came before.

use crate::permutation::Permutation;
use crate::random::Key;

/// Samples in which the proportions are exact.
pub(crate) const BLOCK: u64 = 4096;

/// The sources' shares, and the order in which they take turns.
#[derive(Clone, Debug)]
pub(crate) struct Mixture {
    key: Key,
    counts: Vec<u64>,
}

impl Mixture {
    /// A mixture of sources by their counts, as [`apportion`] gives them.
    pub(crate) fn new(key: Key, counts: Vec<u64>) -> Mixture {
        Mixture { key, counts }
    }

    /// The source of a sample, and the sample's number among those of its source.
    pub(crate) fn place(&self, sample: u64) -> (usize, u64) {
        if self.counts.len() == 1 {
            return (0, sample);
        }
        let block = sample / BLOCK;
        let mut slot = Permutation::new(self.key.with(block), BLOCK).apply(sample % BLOCK);
        for (source, &count) in self.counts.iter().enumerate() {
            if slot < count {
                return (source, block * count + slot);
            }
            slot -= count;
        }
        (0, sample) // not reached: the counts add up to BLOCK
    }
}

/// How many of [`BLOCK`] samples each source gives: by weight, rounded by largest remainder. A source whose
/// count is 0 would never be seen; callers refuse such weights. `None` if the sum is not finite: every share
/// would be 0, and the rounding would silently mix evenly.
pub(crate) fn apportion(weights: &[f64]) -> Option<Vec<u64>> {
    let sum: f64 = weights.iter().sum();
    if !sum.is_finite() {
        return None;
    }
    let quotas: Vec<f64> = weights.iter().map(|weight| weight / sum * BLOCK as f64).collect();
    let mut counts: Vec<u64> = quotas.iter().map(|quota| *quota as u64).collect();
    let mut by_remainder: Vec<usize> = (0..weights.len()).collect();
    by_remainder.sort_by(|&a, &b| quotas[b].fract().total_cmp(&quotas[a].fract()));
    let missing = BLOCK.saturating_sub(counts.iter().sum());
    for &source in by_remainder.iter().cycle().take(missing as usize) {
        counts[source] += 1;
    }
    Some(counts)
}

/// Whether a number can be a weight at all.
pub(crate) fn is_weight(number: f64) -> bool {
    number.is_finite() && number > 0.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shares_are_rounded_by_largest_remainder() {
        assert_eq!(apportion(&[1.0]).unwrap(), [4096]);
        assert_eq!(apportion(&[3.0, 1.0]).unwrap(), [3072, 1024]);
        assert_eq!(apportion(&[1.0, 1.0, 1.0]).unwrap(), [1366, 1365, 1365]);
        assert_eq!(apportion(&[1.0, 1e-9]).unwrap(), [4096, 0]);
    }

    #[test]
    fn weights_without_a_finite_sum_have_no_shares() {
        assert_eq!(apportion(&[f64::MAX, f64::MAX, 1.0]), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn every_block_has_exact_proportions_and_numbers_samples_without_gap(
            seed: u64, weights in prop::collection::vec(0.01f64..10.0, 1..6), block in 0u64..1000
        ) {
            let counts = apportion(&weights).unwrap();
            let mixture = Mixture::new(Key::new(seed, "test"), counts.clone());
            let mut numbers = vec![Vec::new(); weights.len()];
            for sample in block * BLOCK..(block + 1) * BLOCK {
                let (source, number) = mixture.place(sample);
                numbers[source].push(number);
            }
            for (numbers, count) in numbers.iter_mut().zip(counts) {
                numbers.sort();
                prop_assert!(numbers.iter().copied().eq(block * count..(block + 1) * count));
            }
        }
    }
}
