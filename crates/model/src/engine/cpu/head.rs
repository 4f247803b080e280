//! Logits, loss and their gradients, [`TOKENS`] tokens at a time: all logits are never there at once.
//!
//! Logits of a block stand in columns, `[v, tokens]`: a row holds one word for all tokens of the block. So sums over
//! the vocabulary run down the columns, sixteen tokens side by side, and the table is read as it is stored.
//!
//! The gradient of the loss's sum needs nothing that forward does not know, so it is made right away, while the logits
//! are there: making them again in backward would cost a third more products.

use rayon::prelude::*;

use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use super::maths::exp;
use super::product::{DEPTH, Matrix, Start, Workshop};
use crate::engine::NO_TARGET;

/// Tokens whose logits are held at a time. A multiple of [`DEPTH`]: the table's gradient is then summed as if all were.
pub const TOKENS: usize = DEPTH;
/// Words that one task takes.
const TASK: usize = 256;

/// Elements that are at work on so many tokens of a block: logits, and partial sums.
pub fn working(tokens: usize, vocabulary: usize) -> usize {
    tokens.next_multiple_of(LANES) * vocabulary + vocabulary.div_ceil(TASK) * 2 * TOKENS
}

/// What the loss is made from.
#[derive(Clone, Copy)]
pub struct Loss<'a> {
    /// Normalised tokens, `[n, d]`.
    pub normed: &'a [f32],
    /// `[v, d]`.
    pub table: &'a [f32],
    pub width: usize,
    pub targets: &'a [u32],
}

/// Where gradients go.
pub struct Gradients<'a> {
    /// Of normalised tokens, written.
    pub d_normed: &'a mut [f32],
    /// Of the table, added to.
    pub d_table: &'a mut [f32],
}

impl Loss<'_> {
    /// The sum of the loss over all targets, and its gradients if they are wanted.
    pub fn compute(&self, shop: &Workshop, mut gradients: Option<Gradients<'_>>) -> f64 {
        let (width, vocabulary) = (self.width, self.table.len() / self.width);
        let mut logits = shop.heap.take(self.targets.len().min(TOKENS).next_multiple_of(LANES) * vocabulary);
        let mut loss = 0.0;
        for (block, targets) in self.targets.chunks(TOKENS).enumerate() {
            let here = block * TOKENS * width..(block * TOKENS + targets.len()) * width;
            let normed = Matrix::of_rows(&self.normed[here.clone()], width);
            // Whole vectors of tokens: the last ones of a short block are computed, and not looked at.
            let columns = targets.len().next_multiple_of(LANES);
            let logits = &mut logits[..vocabulary * columns];
            multiply(shop, logits, columns, self.table, normed, width, targets.len());
            let sums = LogSumExp::of(shop, logits, columns);
            for (token, &target) in targets.iter().enumerate().filter(|&(_, &target)| target != NO_TARGET) {
                loss +=
                    f64::from(sums.of_token(token)) - f64::from(logits[target as usize * columns + token]);
            }
            let Some(gradients) = &mut gradients else { continue };
            self.softmax_minus_target(shop, logits, columns, &sums, targets);
            let d_logits = Matrix::of_rows(logits, columns);
            let table = Matrix::of_rows(self.table, width);
            let d_normed = &mut gradients.d_normed[here];
            shop.product(d_normed, width, d_logits.transposed(), table, vocabulary, Start::Zero, |_, _| {});
            let d_table = &mut *gradients.d_table;
            shop.product(d_table, width, d_logits, normed, targets.len(), Start::Present, |_, _| {});
        }
        loss
    }

    /// Turns logits into their gradients.
    fn softmax_minus_target(
        &self,
        shop: &Workshop,
        logits: &mut [f32],
        columns: usize,
        sums: &LogSumExp,
        targets: &[u32],
    ) {
        logits
            .par_chunks_mut(TASK * columns)
            .for_each(|logits| shop.isa.run(Softmax { logits, columns, sums: &sums.0 }));
        for (token, &target) in targets.iter().enumerate() {
            if target == NO_TARGET {
                logits.iter_mut().skip(token).step_by(columns).for_each(|d| *d = 0.0);
            } else {
                logits[target as usize * columns + token] -= 1.0;
            }
        }
    }
}

/// `logits[v, columns] = table·normedᵀ`, where `normed` has `tokens` ≤ `columns` rows.
pub fn multiply(
    shop: &Workshop,
    logits: &mut [f32],
    columns: usize,
    table: &[f32],
    normed: Matrix<'_>,
    width: usize,
    tokens: usize,
) {
    let table = Matrix::of_rows(table, width);
    if tokens == columns {
        return shop.product(logits, columns, table, normed.transposed(), width, Start::Zero, |_, _| {});
    }
    let mut padded = shop.heap.zeros(columns * width);
    padded[..tokens * width].copy_from_slice(&normed.data[..tokens * width]);
    let padded = Matrix::of_rows(&padded, width).transposed();
    shop.product(logits, columns, table, padded, width, Start::Zero, |_, _| {});
}

/// ln Σ eˣ of each column.
struct LogSumExp([f32; TOKENS]);

impl LogSumExp {
    fn of(shop: &Workshop, logits: &[f32], columns: usize) -> LogSumExp {
        // Pieces of the vocabulary that do not depend on the number of threads, put together in order.
        let pieces = logits.len().div_ceil(TASK * columns);
        let mut parts = shop.heap.take(pieces * 2 * TOKENS);
        parts.par_chunks_mut(2 * TOKENS).zip(logits.par_chunks(TASK * columns)).for_each(|(part, logits)| {
            let (highest, sums) = part.split_at_mut(TOKENS);
            shop.isa.run(SumDown { logits, columns, highest, sums });
        });
        let mut total = [0.0; TOKENS];
        for (token, total) in total.iter_mut().enumerate().take(columns) {
            let (mut highest, mut sum) = (f32::NEG_INFINITY, 0.0f64);
            for part in parts.chunks_exact(2 * TOKENS) {
                let (here, part) = (part[token], f64::from(part[TOKENS + token]));
                let new = if highest > here { highest } else { here };
                let shrink = |from: f32| libm::exp(f64::from(from) - f64::from(new));
                sum = sum * shrink(highest) + part * shrink(here);
                highest = new;
            }
            *total = (f64::from(highest) + libm::log(sum)) as f32;
        }
        LogSumExp(total)
    }

    fn of_token(&self, token: usize) -> f32 {
        self.0[token]
    }
}

/// The largest of each column, and Σ eˣ measured from it.
struct SumDown<'a> {
    logits: &'a [f32],
    columns: usize,
    highest: &'a mut [f32],
    sums: &'a mut [f32],
}

impl Kernel for SumDown<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        for first in (0..self.columns).step_by(LANES) {
            let mut highest = V::splat(f32::NEG_INFINITY);
            for row in self.logits.chunks_exact(self.columns) {
                highest = highest.max(V::load_some(&row[first..], 0.0));
            }
            let mut sum = V::zero();
            for row in self.logits.chunks_exact(self.columns) {
                sum = sum.add(exp(V::load_some(&row[first..], 0.0).sub(highest)));
            }
            highest.store_some(&mut self.highest[first..]);
            sum.store_some(&mut self.sums[first..]);
        }
    }
}

/// Logits to probabilities.
struct Softmax<'a> {
    logits: &'a mut [f32],
    columns: usize,
    sums: &'a [f32],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        for row in self.logits.chunks_exact_mut(self.columns) {
            for (logits, sums) in row.chunks_mut(LANES).zip(self.sums.chunks(LANES)) {
                exp(V::load_some(logits, 0.0).sub(V::load_some(sums, 0.0))).store_some(logits);
            }
        }
    }
}
