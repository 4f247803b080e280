//! Normalisation, forward and backward.

use rayon::prelude::*;

use super::real::Real;

/// Gain and bias of a normalisation over rows of `weight.len()` elements.
#[derive(Clone, Copy)]
pub struct NormWeights<'a, T> {
    pub weight: &'a [T],
    /// Empty in one that is not centred.
    pub bias: &'a [T],
    pub epsilon: f64,
    /// Whether the mean is taken away.
    pub centred: bool,
}

/// `norm(x)[n,d]`.
pub fn normalise<T: Real>(x: &[T], norm: NormWeights<'_, T>) -> Vec<T> {
    let d = norm.weight.len();
    let mut out = vec![T::ZERO; x.len()];
    out.par_chunks_mut(d).zip(x.par_chunks(d)).with_min_len(16).for_each(|(out_row, x_row)| {
        let (mean, scale) = statistics(x_row, norm);
        for i in 0..d {
            out_row[i] = (x_row[i] - mean) * scale * norm.weight[i];
        }
        out_row.iter_mut().zip(norm.bias).for_each(|(out, &bias)| *out += bias);
    });
    out
}

/// `d_x +=`, and adds to the gradients of gain and bias, given the gradient of `norm(x)`.
pub fn normalise_backward<T: Real>(
    x: &[T],
    norm: NormWeights<'_, T>,
    d_out: &[T],
    d_x: &mut [T],
    d_weight: &mut [T],
    d_bias: &mut [T],
) {
    let d = norm.weight.len();
    let count = T::of(d as f64);
    d_x.par_chunks_mut(d).zip(x.par_chunks(d).zip(d_out.par_chunks(d))).with_min_len(16).for_each(
        |(d_x_row, (x_row, d_row))| {
            let (mean, scale) = statistics(x_row, norm);
            let mut sum = T::ZERO;
            let mut sum_with_x = T::ZERO;
            for i in 0..d {
                let d_hat = d_row[i] * norm.weight[i];
                // What is taken away depends on every element.
                sum += if norm.centred { d_hat } else { T::ZERO };
                sum_with_x += d_hat * ((x_row[i] - mean) * scale);
            }
            for i in 0..d {
                let x_hat = (x_row[i] - mean) * scale;
                let d_hat = d_row[i] * norm.weight[i];
                d_x_row[i] += scale * (d_hat - sum / count - x_hat * (sum_with_x / count));
            }
        },
    );
    for (x_row, d_row) in x.chunks_exact(d).zip(d_out.chunks_exact(d)) {
        let (mean, scale) = statistics(x_row, norm);
        for i in 0..d {
            d_weight[i] += d_row[i] * ((x_row[i] - mean) * scale);
        }
        d_bias.iter_mut().zip(d_row).for_each(|(sum, &d)| *sum += d);
    }
}

/// Mean and 1/√(variance + ε) of a row; around 0, where the mean is not taken away.
fn statistics<T: Real>(row: &[T], norm: NormWeights<'_, T>) -> (T, T) {
    let count = T::of(row.len() as f64);
    let sum = if norm.centred { row.iter().fold(T::ZERO, |sum, &x| sum + x) } else { T::ZERO };
    let mean = sum / count;
    let variance = row.iter().fold(T::ZERO, |sum, &x| sum + (x - mean) * (x - mean)) / count;
    (mean, T::ONE / (variance + T::of(norm.epsilon)).sqrt())
}
