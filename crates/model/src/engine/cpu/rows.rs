//! Work on whole rows: sums, dropout, and heads put side by side.

use rayon::prelude::*;

use super::isa::{Isa, Kernel};
use super::lanes::{LANES, Lanes};
use crate::engine::Shape;
use crate::random::Dropout;

/// Elements that one task takes.
const TASK: usize = 64 * 1024;

/// `into += from`.
pub fn add(isa: Isa, into: &mut [f32], from: &[f32]) {
    into.par_chunks_mut(TASK).zip(from.par_chunks(TASK)).for_each(|(to, from)| isa.run(AddTo { to, from }));
}

/// `to += from`, of a piece.
pub struct AddTo<'a> {
    pub to: &'a mut [f32],
    pub from: &'a [f32],
}

impl Kernel for AddTo<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        for (to, from) in self.to.chunks_mut(LANES).zip(self.from.chunks(LANES)) {
            V::load_some(to, 0.0).add(V::load_some(from, 0.0)).store_some(to);
        }
    }
}

/// Applies dropout to the row of token `n`.
pub fn apply_dropout(shape: Shape, dropout: Dropout<'_>, n: usize, width: usize, values: &mut [f32]) {
    if dropout.rate == 0.0 {
        return;
    }
    let (row, column) = (n / shape.columns, n % shape.columns);
    let mut factors = [0.0; 256];
    for (number, values) in values.chunks_mut(factors.len()).enumerate() {
        let first = column * width + number * factors.len();
        dropout.write_factors(row, first as u64, &mut factors[..values.len()]);
        values.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
    }
}

/// `[b, heads, parts, t, w]`, as heads are computed, to rows of tokens, `[b·t, parts, heads, w]`.
pub fn interleave(
    by_head: &[f32],
    out: &mut [f32],
    columns: usize,
    width: usize,
    heads: usize,
    parts: usize,
) {
    let size = columns * width;
    out.par_chunks_mut(parts * heads * width).with_min_len(16).enumerate().for_each(|(n, out)| {
        let (row, column) = (n / columns, n % columns);
        for (place, out) in out.chunks_exact_mut(width).enumerate() {
            let (part, head) = (place / heads, place % heads);
            let start = ((row * heads + head) * parts + part) * size + column * width;
            out.copy_from_slice(&by_head[start..][..width]);
        }
    });
}
