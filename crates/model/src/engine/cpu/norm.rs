//! Normalisation, forward and backward.

use rayon::prelude::*;

use super::isa::{Isa, Kernel};
use super::lanes::{LANES, Lanes};

/// Rows that one task takes.
const TASK: usize = 16;
/// Columns that one task takes where columns are summed up: four vectors, so that additions do not wait for each other.
const STRIPE: usize = 4 * LANES;

/// Gain and bias of a normalisation over rows of `weight.len()` elements.
#[derive(Clone, Copy)]
pub struct NormWeights<'a> {
    pub weight: &'a [f32],
    /// Empty in one that is not centred.
    pub bias: &'a [f32],
    pub epsilon: f32,
    /// Whether the mean is taken away.
    pub centred: bool,
}

/// `out = norm(x)`, rows of both as many; each row's mean (0 where it stays) and 1/√(variance + ε) to `statistics`.
pub fn normalise(isa: Isa, x: &[f32], norm: NormWeights<'_>, out: &mut [f32], statistics: &mut [f32]) {
    let d = norm.weight.len();
    out.par_chunks_mut(TASK * d)
        .zip(x.par_chunks(TASK * d).zip(statistics.par_chunks_mut(TASK * 2)))
        .for_each(|(out, (x, statistics))| isa.run(Normalise { x, norm, out, statistics }));
}

/// The same from statistics that are known.
pub fn normalise_again(isa: Isa, x: &[f32], norm: NormWeights<'_>, statistics: &[f32], out: &mut [f32]) {
    let d = norm.weight.len();
    out.par_chunks_mut(TASK * d)
        .zip(x.par_chunks(TASK * d).zip(statistics.par_chunks(TASK * 2)))
        .for_each(|(out, (x, statistics))| isa.run(NormaliseAgain { x, norm, out, statistics }));
}

/// `d_x +=` for one run of rows, given the gradient of `norm(x)`.
pub struct Backward<'a> {
    pub x: &'a [f32],
    pub statistics: &'a [f32],
    pub norm: NormWeights<'a>,
    pub d_out: &'a [f32],
    pub d_x: &'a mut [f32],
}

/// Adds to the gradients of gain and bias: Σ over rows, in their order.
pub fn add_gradients(
    isa: Isa,
    x: &[f32],
    statistics: &[f32],
    d_out: &[f32],
    d_weight: &mut [f32],
    d_bias: &mut [f32],
) {
    let d = d_weight.len();
    let add = |stripe: usize, d_weight: &mut [f32], d_bias: &mut [f32]| {
        isa.run(Gradients { x, statistics, d_out, d, first: stripe * STRIPE, d_weight, d_bias });
    };
    let weights = d_weight.par_chunks_mut(STRIPE).enumerate();
    if d_bias.is_empty() {
        weights.for_each(|(stripe, d_weight)| add(stripe, d_weight, &mut []));
    } else {
        let both = weights.zip(d_bias.par_chunks_mut(STRIPE));
        both.for_each(|((stripe, d_weight), d_bias)| add(stripe, d_weight, d_bias));
    }
}

/// `sums += Σ rows of a`, in their order.
pub fn add_column_sums(isa: Isa, a: &[f32], sums: &mut [f32]) {
    let columns = sums.len();
    sums.par_chunks_mut(STRIPE).enumerate().for_each(|(stripe, sums)| {
        isa.run(ColumnSums { a, columns, first: stripe * STRIPE, sums });
    });
}

struct Normalise<'a> {
    x: &'a [f32],
    norm: NormWeights<'a>,
    out: &'a mut [f32],
    statistics: &'a mut [f32],
}

impl Kernel for Normalise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let d = self.norm.weight.len();
        let count = d as f32;
        for ((x, out), statistics) in
            self.x.chunks_exact(d).zip(self.out.chunks_exact_mut(d)).zip(self.statistics.chunks_exact_mut(2))
        {
            let mut mean = 0.0;
            if self.norm.centred {
                let mut sum = V::zero();
                for x in x.chunks(LANES) {
                    sum = sum.add(V::load_some(x, 0.0));
                }
                mean = sum.sum() / count;
            }
            let mut sum = V::zero();
            for x in x.chunks(LANES) {
                let off = V::load_some(x, mean).sub(V::splat(mean));
                sum = off.mul_add(off, sum);
            }
            let scale = 1.0 / (sum.sum() / count + self.norm.epsilon).sqrt();
            statistics.copy_from_slice(&[mean, scale]);
            scale_row::<V>(x, self.norm, mean, scale, out);
        }
    }
}

struct NormaliseAgain<'a> {
    x: &'a [f32],
    norm: NormWeights<'a>,
    out: &'a mut [f32],
    statistics: &'a [f32],
}

impl Kernel for NormaliseAgain<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let d = self.norm.weight.len();
        for ((x, out), statistics) in
            self.x.chunks_exact(d).zip(self.out.chunks_exact_mut(d)).zip(self.statistics.chunks_exact(2))
        {
            scale_row::<V>(x, self.norm, statistics[0], statistics[1], out);
        }
    }
}

#[inline(always)]
fn scale_row<V: Lanes>(x: &[f32], norm: NormWeights<'_>, mean: f32, scale: f32, out: &mut [f32]) {
    let (mean, scale) = (V::splat(mean), V::splat(scale));
    let mut bias = norm.bias.chunks(LANES);
    for ((x, weight), out) in x.chunks(LANES).zip(norm.weight.chunks(LANES)).zip(out.chunks_mut(LANES)) {
        let hat = V::load_some(x, 0.0).sub(mean).mul(scale);
        let bias = bias.next().map_or(V::zero(), |bias| V::load_some(bias, 0.0));
        hat.mul_add(V::load_some(weight, 0.0), bias).store_some(out);
    }
}

impl Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let weight = self.norm.weight;
        let d = weight.len();
        let rows = self.x.chunks_exact(d).zip(self.d_out.chunks_exact(d));
        for (((x, d_out), d_x), statistics) in
            rows.zip(self.d_x.chunks_exact_mut(d)).zip(self.statistics.chunks_exact(2))
        {
            let (mean, scale) = (V::splat(statistics[0]), V::splat(statistics[1]));
            let (mut sum, mut sum_with_x) = (V::zero(), V::zero());
            for ((x, d_out), weight) in x.chunks(LANES).zip(d_out.chunks(LANES)).zip(weight.chunks(LANES)) {
                let d_hat = V::load_some(d_out, 0.0).mul(V::load_some(weight, 0.0));
                let hat = V::load_some(x, 0.0).sub(mean).mul(scale);
                sum = sum.add(d_hat);
                sum_with_x = d_hat.mul_add(hat, sum_with_x);
            }
            // Only what is taken away depends on all elements alike.
            let mean_d = if self.norm.centred { V::splat(sum.sum() / d as f32) } else { V::zero() };
            let mean_with_x = V::splat(-(sum_with_x.sum() / d as f32));
            let operands = x.chunks(LANES).zip(d_out.chunks(LANES)).zip(weight.chunks(LANES));
            for (((x, d_out), weight), d_x) in operands.zip(d_x.chunks_mut(LANES)) {
                let d_hat = V::load_some(d_out, 0.0).mul(V::load_some(weight, 0.0));
                let hat = V::load_some(x, 0.0).sub(mean).mul(scale);
                let centred = hat.mul_add(mean_with_x, d_hat.sub(mean_d));
                centred.mul_add(scale, V::load_some(d_x, 0.0)).store_some(d_x);
            }
        }
    }
}

struct Gradients<'a> {
    x: &'a [f32],
    statistics: &'a [f32],
    d_out: &'a [f32],
    d: usize,
    first: usize,
    d_weight: &'a mut [f32],
    d_bias: &'a mut [f32],
}

impl Kernel for Gradients<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let width = self.d_weight.len();
        let (mut by_x, mut alone) = ([V::zero(); 4], [V::zero(); 4]);
        let rows = self.x.chunks_exact(self.d).zip(self.d_out.chunks_exact(self.d));
        for ((x, d_out), statistics) in rows.zip(self.statistics.chunks_exact(2)) {
            let (mean, scale) = (V::splat(statistics[0]), V::splat(statistics[1]));
            let (x, d_out) = (&x[self.first..][..width], &d_out[self.first..][..width]);
            for (i, (x, d_out)) in x.chunks(LANES).zip(d_out.chunks(LANES)).enumerate().take(4) {
                let d_out = V::load_some(d_out, 0.0);
                let hat = V::load_some(x, 0.0).sub(mean).mul(scale);
                by_x[i] = d_out.mul_add(hat, by_x[i]);
                alone[i] = alone[i].add(d_out);
            }
        }
        for (i, to) in self.d_weight.chunks_mut(LANES).enumerate().take(4) {
            V::load_some(to, 0.0).add(by_x[i]).store_some(to);
        }
        for (i, to) in self.d_bias.chunks_mut(LANES).enumerate().take(4) {
            V::load_some(to, 0.0).add(alone[i]).store_some(to);
        }
    }
}

struct ColumnSums<'a> {
    a: &'a [f32],
    columns: usize,
    first: usize,
    sums: &'a mut [f32],
}

impl Kernel for ColumnSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let mut sums = [V::zero(); 4];
        for row in self.a.chunks_exact(self.columns) {
            let row = &row[self.first..][..self.sums.len()];
            for (i, x) in row.chunks(LANES).enumerate().take(4) {
                sums[i] = sums[i].add(V::load_some(x, 0.0));
            }
        }
        for (i, to) in self.sums.chunks_mut(LANES).enumerate().take(4) {
            V::load_some(to, 0.0).add(sums[i]).store_some(to);
        }
    }
}
