//! Work on whole rows: sums, dropout, rotation, and heads put side by side.

use rayon::prelude::*;

use super::isa::{Isa, Kernel};
use super::lanes::{LANES, Lanes};
use crate::engine::{Attention, Shape};
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

/// `[b, h, t, w]`, as heads are computed, to rows of tokens, `[b·t, h·w]`.
pub fn interleave(by_head: &[f32], out: &mut [f32], columns: usize, attention: Attention<'_>) {
    let Attention { heads, head_width: w, .. } = attention;
    out.par_chunks_mut(attention.width()).with_min_len(16).enumerate().for_each(|(n, out)| {
        let (row, column) = (n / columns, n % columns);
        for (head, out) in out.chunks_exact_mut(w).enumerate() {
            out.copy_from_slice(&by_head[((row * heads + head) * columns + column) * w..][..w]);
        }
    });
}

/// `[b, h, 3, t, w]`, gradients as heads are computed, to rows of tokens, `[b·t, (h+2k)·w]`: those of heads that share keys
/// and values are added up in the order of heads.
pub fn interleave_qkv(isa: Isa, by_head: &[f32], out: &mut [f32], columns: usize, attention: Attention<'_>) {
    let Attention { heads, key_heads, head_width: w, .. } = attention;
    let sharing = heads / key_heads;
    out.par_chunks_mut(attention.qkv_width()).with_min_len(16).enumerate().for_each(|(n, out)| {
        let (row, column) = (n / columns, n % columns);
        let part = |head: usize, which: usize| {
            &by_head[(((row * heads + head) * 3 + which) * columns + column) * w..][..w]
        };
        let (queries, keys_and_values) = out.split_at_mut(attention.width());
        for (head, out) in queries.chunks_exact_mut(w).enumerate() {
            out.copy_from_slice(part(head, 0));
        }
        for (place, out) in keys_and_values.chunks_exact_mut(w).enumerate() {
            let (which, first) = (1 + place / key_heads, place % key_heads * sharing);
            out.copy_from_slice(part(first, which));
            for head in first + 1..first + sharing {
                isa.run(AddTo { to: out, from: part(head, which) });
            }
        }
    });
}

/// Turns queries and keys, as [`Engine::rotate`](crate::engine::Engine::rotate) says.
pub fn rotate(isa: Isa, attention: Attention<'_>, rotation: &[f32], qkv: &mut [f32], back: bool) {
    let tokens = 16;
    qkv.par_chunks_mut(tokens * attention.qkv_width())
        .zip(rotation.par_chunks(tokens * attention.head_width))
        .for_each(|(qkv, rotation)| isa.run(Rotate { attention, rotation, qkv, back }));
}

struct Rotate<'a> {
    attention: Attention<'a>,
    rotation: &'a [f32],
    qkv: &'a mut [f32],
    back: bool,
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let (attention, w) = (self.attention, self.attention.head_width);
        let turned = attention.width() + attention.key_width();
        let sign = V::splat(if self.back { -1.0 } else { 1.0 });
        let tokens = self.qkv.chunks_exact_mut(attention.qkv_width());
        for (qkv, rotation) in tokens.zip(self.rotation.chunks_exact(w)) {
            let (cos, sin) = rotation.split_at(w / 2);
            for head in qkv[..turned].chunks_exact_mut(w) {
                let (x, y) = head.split_at_mut(w / 2);
                let angles = cos.chunks(LANES).zip(sin.chunks(LANES));
                for ((x, y), (cos, sin)) in x.chunks_mut(LANES).zip(y.chunks_mut(LANES)).zip(angles) {
                    let (cos, sin) = (V::load_some(cos, 0.0), V::load_some(sin, 0.0).mul(sign));
                    let (from_x, from_y) = (V::load_some(x, 0.0), V::load_some(y, 0.0));
                    from_x.mul(cos).sub(from_y.mul(sin)).store_some(x);
                    from_x.mul_add(sin, from_y.mul(cos)).store_some(y);
                }
            }
        }
    }
}
