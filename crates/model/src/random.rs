//! Counter-based random numbers: every number is a pure function of its key and counter, so that it is the
//! same whoever computes it, in whatever order, after whatever crash.
//!
//! The generator is Philox 4×32-10 (Salmon et al., 2011): small, fast, vectorisable, and with published test
//! vectors. It is written out here because its thirty lines are part of the definition of a training run.

/// Philox 4×32 with ten rounds: 128 bits of counter and 64 bits of key to 128 random bits.
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let (high0, low0) = multiply(0xD251_1F53, counter[0]);
        let (high1, low1) = multiply(0xCD9E_8D57, counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

fn multiply(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// The place of one dropout in the network: with the sample's number and the element's index inside the
/// sample it names a random number of the run.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// Probability that an element is zeroed; 0 when evaluating.
    pub rate: f64,
    /// The run's seed.
    pub seed: u64,
    /// Which dropout of which layer position (see [`Dropout::place`]).
    pub place: u16,
    /// Global sample number of every row of the microbatch.
    pub samples: &'a [u64],
}

impl Dropout<'_> {
    /// That drops nothing.
    pub fn none() -> Dropout<'static> {
        Dropout { rate: 0.0, seed: 0, place: 0, samples: &[] }
    }

    /// Numbers the dropouts of a model: four sites for each layer position.
    pub fn place(layer: usize, site: u16) -> u16 {
        layer as u16 * 4 + site
    }

    /// What element `element` of row `row` is multiplied with: 0, or 1 / (1 − rate).
    ///
    /// `element` numbers the elements of one sample, below 2^50; the row's place in the microbatch plays no part.
    pub fn factor(&self, row: usize, element: u64) -> f64 {
        if self.rate == 0.0 {
            return 1.0;
        }
        let sample = halves(self.samples[row]);
        let block = element >> 2;
        let counter =
            [block as u32, ((block >> 32) as u32) << 16 | u32::from(self.place), sample[0], sample[1]];
        let word = philox(counter, halves(self.seed))[(element & 3) as usize];
        if f64::from(word) < self.rate * 4_294_967_296.0 { 0.0 } else { 1.0 / (1.0 - self.rate) }
    }

    /// Writes [`Dropout::factor`] of the elements from `first` on: four of them are one draw.
    pub fn write_factors(&self, row: usize, first: u64, factors: &mut [f32]) {
        if self.rate == 0.0 {
            return factors.fill(1.0);
        }
        let (sample, key) = (halves(self.samples[row]), halves(self.seed));
        // No word is as large as this, which the threshold may be.
        let threshold = (self.rate * 4_294_967_296.0).ceil() as u64;
        let kept = (1.0 / (1.0 - self.rate)) as f32;
        let mut words = [0; 4];
        for (i, factor) in factors.iter_mut().enumerate() {
            let element = first + i as u64;
            if i == 0 || element & 3 == 0 {
                let block = element >> 2;
                let place = ((block >> 32) as u32) << 16 | u32::from(self.place);
                words = philox([block as u32, place, sample[0], sample[1]], key);
            }
            let word = words[(element & 3) as usize];
            *factor = if u64::from(word) < threshold { 0.0 } else { kept };
        }
    }
}

/// Standard normal numbers for the initial value of the parameter called `name`: element `i` depends on
/// (seed, name, i) alone, so a stage draws its own parameters without its neighbours.
pub fn normals(seed: u64, name: &str, count: usize) -> impl Iterator<Item = f64> {
    let mut hasher = blake3::Hasher::new_derive_key("starling 2026 initial weights");
    hasher.update(&seed.to_le_bytes());
    hasher.update(name.as_bytes());
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    let key = halves(u64::from_le_bytes(bytes));
    (0..count).map(move |i| {
        let pair = halves(i as u64 / 2);
        let words = philox([pair[0], pair[1], 0, 0], key);
        let uniform = |high: u32, low: u32| {
            let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
            (bits as f64 + 0.5) / 9_007_199_254_740_992.0
        };
        // Box–Muller; libm's functions are the same on every platform.
        let radius = (-2.0 * libm::log(uniform(words[0], words[1]))).sqrt();
        let angle = std::f64::consts::TAU * uniform(words[2], words[3]);
        radius * if i % 2 == 0 { libm::cos(angle) } else { libm::sin(angle) }
    })
}

/// A uniform number in [0, 1) for draw `index` of the stream named by `seed`.
pub fn uniform(seed: u64, index: u64) -> f64 {
    let index = halves(index);
    let words = philox([index[0], index[1], 0, 1], halves(seed));
    ((u64::from(words[0]) << 32 | u64::from(words[1])) >> 11) as f64 / 9_007_199_254_740_992.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_agrees_with_the_published_vectors() {
        let ones = u32::MAX;
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([ones; 4], [ones; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn dropout_keeps_the_expected_share_and_the_mean() {
        let dropout = Dropout { rate: 0.1, seed: 7, place: 3, samples: &[42] };
        let factors: Vec<f64> = (0..100_000).map(|i| dropout.factor(0, i)).collect();
        let dropped = factors.iter().filter(|&&f| f == 0.0).count() as f64 / 100_000.0;
        let mean = factors.iter().sum::<f64>() / 100_000.0;
        assert!((dropped - 0.1).abs() < 0.005 && (mean - 1.0).abs() < 0.005, "{dropped} {mean}");
    }

    #[test]
    fn dropout_follows_the_sample_and_not_its_row() {
        let alone = Dropout { rate: 0.5, seed: 7, place: 3, samples: &[42] };
        let third = Dropout { rate: 0.5, seed: 7, place: 3, samples: &[1, 2, 42] };
        assert!((0..64).all(|i| alone.factor(0, i) == third.factor(2, i)));
        assert!((0..64).any(|i| third.factor(1, i) != third.factor(2, i)));
    }

    #[test]
    fn factors_are_drawn_together_as_they_are_one_by_one() {
        for rate in [0.0, 0.1, 0.5] {
            let dropout = Dropout { rate, seed: 7, place: 3, samples: &[1, 42] };
            for first in [0, 4, (1 << 40) + 7] {
                let mut together = [0.0; 21];
                dropout.write_factors(1, first, &mut together);
                assert!((0..21).all(|i| together[i] == dropout.factor(1, first + i as u64) as f32));
            }
        }
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let values: Vec<f64> = normals(1, "wte.weight", 100_000).collect();
        let mean = values.iter().sum::<f64>() / 1e5;
        let variance = values.iter().map(|v| v * v).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }
}
