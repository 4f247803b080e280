//! Attention of a text's last token, over keys and values that are remembered.
//!
//! Of each head of keys and values first all keys, `[w, capacity]`, then all values, `[capacity, w]`: so a vector holds the same element of
//! sixteen keys, and the other way round of one value.

use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use super::maths::exp;
use crate::engine::Attention;

/// Puts the keys and values of tokens behind those that are known.
pub fn remember(attention: Attention<'_>, qkv: &[f32], known: usize, memory: &mut [f32]) {
    let (width, key_width, head_width) = (attention.width(), attention.key_width(), attention.head_width);
    let capacity = memory.len() / (2 * key_width);
    for (key_head, memory) in memory.chunks_exact_mut(2 * capacity * head_width).enumerate() {
        let (keys, values) = memory.split_at_mut(capacity * head_width);
        for (token, qkv) in qkv.chunks_exact(attention.qkv_width()).enumerate() {
            let at = known + token;
            let key = &qkv[width + key_head * head_width..][..head_width];
            let value = &qkv[width + key_width + key_head * head_width..][..head_width];
            key.iter().enumerate().for_each(|(i, &x)| keys[i * capacity + at] = x);
            values[at * head_width..][..head_width].copy_from_slice(value);
        }
    }
}

/// One head's part of the result.
pub struct Recall<'a> {
    pub query: &'a [f32],
    pub keys: &'a [f32],
    pub values: &'a [f32],
    pub capacity: usize,
    /// As many as tokens are known.
    pub scores: &'a mut [f32],
    pub out: &'a mut [f32],
}

impl Kernel for Recall<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Recall { query, keys, values, capacity, scores, out } = self;
        let (width, known) = (query.len(), scores.len());
        let scale = 1.0 / (width as f32).sqrt();
        let mut highest = V::splat(f32::NEG_INFINITY);
        for (block, scores) in scores.chunks_mut(LANES).enumerate() {
            let first = block * LANES;
            let mut sum = V::zero();
            for (i, &q) in query.iter().enumerate() {
                let keys = &keys[i * capacity + first..][..scores.len()];
                sum = V::splat(q * scale).mul_add(V::load_some(keys, 0.0), sum);
            }
            sum.store_some(scores);
            highest = highest.max(V::load_some(scores, f32::NEG_INFINITY));
        }
        let highest = V::splat(highest.highest());
        let mut total = V::zero();
        for scores in scores.chunks_mut(LANES) {
            exp(V::load_some(scores, f32::NEG_INFINITY).sub(highest)).store_some(scores);
            total = total.add(V::load_some(scores, 0.0));
        }
        let share = V::splat(1.0 / total.sum());
        for (panel, out) in out.chunks_mut(LANES).enumerate() {
            let mut sum = V::zero();
            for token in 0..known {
                let value = &values[token * width + panel * LANES..][..out.len()];
                sum = V::splat(scores[token]).mul_add(V::load_some(value, 0.0), sum);
            }
            sum.mul(share).store_some(out);
        }
    }
}
