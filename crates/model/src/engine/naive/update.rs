//! Optimiser updates, element by element: + − × ÷ √ only, so that every replica gets the same bits.

use rayon::prelude::*;

use super::CHUNK;
use super::real::Real;
use crate::optimiser::{Rule, Update};

/// Updates one parameter in place. `first` and `second` are the moments the rule keeps (`second` may be empty).
pub fn update<T: Real>(
    rule: &Rule,
    update: &Update,
    decay: bool,
    weights: &mut [T],
    first: &mut [T],
    second: &mut [T],
    gradient: &[T],
) {
    let scale = T::of(update.gradient_scale);
    let lr = T::of(update.lr);
    match *rule {
        Rule::Fixed => {}
        Rule::AdamW { beta1, beta2, epsilon, weight_decay } => {
            let adam = Adam::new(beta1, beta2, epsilon, update);
            let shrink = T::of(1.0 - update.lr * if decay { weight_decay } else { 0.0 });
            let step = T::of(update.lr / update.bias1);
            weights
                .par_chunks_mut(CHUNK)
                .zip(first.par_chunks_mut(CHUNK).zip(second.par_chunks_mut(CHUNK)))
                .zip(gradient.par_chunks(CHUNK))
                .for_each(|((w, (m, v)), g)| {
                    for i in 0..w.len() {
                        adam.moments(&mut m[i], &mut v[i], g[i] * scale);
                        w[i] = w[i] * shrink - step * (m[i] / adam.denominator(v[i]));
                    }
                });
        }
        Rule::Sgd { momentum, weight_decay } => {
            let momentum = T::of(momentum);
            let pull = T::of(if decay { weight_decay } else { 0.0 });
            weights
                .par_chunks_mut(CHUNK)
                .zip(first.par_chunks_mut(CHUNK))
                .zip(gradient.par_chunks(CHUNK))
                .for_each(|((w, m), g)| {
                    for i in 0..w.len() {
                        m[i] = momentum * m[i] + (g[i] * scale + pull * w[i]);
                        w[i] = w[i] - lr * m[i];
                    }
                });
        }
        Rule::Lamb { beta1, beta2, epsilon, weight_decay } => {
            let adam = Adam::new(beta1, beta2, epsilon, update);
            let pull = T::of(if decay { weight_decay } else { 0.0 });
            let correct = T::of(1.0 / update.bias1);
            let mut direction = Vec::with_capacity(weights.len());
            for i in 0..weights.len() {
                adam.moments(&mut first[i], &mut second[i], gradient[i] * scale);
                direction.push(first[i] * correct / adam.denominator(second[i]) + pull * weights[i]);
            }
            let (size, length) = (norm(weights), norm(&direction));
            // You et al. (2020): a layer moves in proportion to its own size. Their code leaves out, as from decay,
            // biases and norms: a bias that starts at 0 would never get away from there.
            let trust = if decay && size > 0.0 && length > 0.0 { size / length } else { 1.0 };
            let step = T::of(update.lr * trust);
            for (w, d) in weights.iter_mut().zip(direction) {
                *w = *w - step * d;
            }
        }
    }
}

/// Σ x² in f64, in order.
pub fn sum_of_squares<T: Real>(values: &[T]) -> f64 {
    values.iter().fold(0.0, |sum, x| sum + x.to_f64() * x.to_f64())
}

fn norm<T: Real>(values: &[T]) -> f64 {
    sum_of_squares(values).sqrt()
}

/// What AdamW and LAMB share.
struct Adam<T> {
    beta1: T,
    rest1: T,
    beta2: T,
    rest2: T,
    root_bias2: T,
    epsilon: T,
}

impl<T: Real> Adam<T> {
    fn new(beta1: f64, beta2: f64, epsilon: f64, update: &Update) -> Adam<T> {
        Adam {
            beta1: T::of(beta1),
            rest1: T::of(1.0 - beta1),
            beta2: T::of(beta2),
            rest2: T::of(1.0 - beta2),
            root_bias2: T::of(update.bias2.sqrt()),
            epsilon: T::of(epsilon),
        }
    }

    fn moments(&self, first: &mut T, second: &mut T, gradient: T) {
        *first = self.beta1 * *first + self.rest1 * gradient;
        *second = self.beta2 * *second + self.rest2 * (gradient * gradient);
    }

    fn denominator(&self, second: T) -> T {
        second.sqrt() / self.root_bias2 + self.epsilon
    }
}
