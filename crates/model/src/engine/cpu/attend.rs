//! Causal attention inside documents, one head of one sample at a time, without ever holding all of its scores.
//!
//! Queries and keys are taken in blocks of [`BLOCK`]. Forward goes through a query block's keys with a running maximum
//! and sum (Milakov & Gimelshein, 2018; Dao et al., 2022) and keeps the log-sum-exp; backward makes the probabilities
//! again from it. Blocks are counted from the sample's first position, so a query's result does not depend on how many
//! positions follow.
//!
//! A head's queries, keys and values are packed first, as in `product`: then a block is a few tiles.

mod backward;
mod forward;

use std::ops::Range;

pub use self::backward::Backward;
pub use self::forward::Forward;

use super::lanes::{LANES, Lanes};
use super::product::{Matrix, TALL, pack};
use crate::engine::Attention;
use crate::random::Dropout;

/// Queries, and keys, of a block: whole slivers and whole panels.
pub const BLOCK: usize = 48;

/// Scores or probabilities of a block: a row for each query.
pub type Block = [[f32; BLOCK]; BLOCK];

/// One head of one sample.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    pub attention: Attention<'a>,
    /// The sample's documents, `t`.
    pub documents: &'a [u32],
    /// The sample's `[t, (h+2k)·w]`: query, key, value.
    pub qkv: &'a [f32],
    pub dropout: Dropout<'a>,
    /// The sample's row in the microbatch.
    pub row: usize,
    /// The head's number.
    pub head: usize,
}

/// A vector's worth of columns of the head, and of what packed positions take of memory.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub columns: usize,
    pub width: usize,
    /// `columns` in whole blocks.
    padded: usize,
    /// Panels of the head's width.
    panels: usize,
}

impl Sizes {
    pub fn new(columns: usize, width: usize) -> Sizes {
        Sizes { columns, width, padded: columns.next_multiple_of(BLOCK), panels: width.div_ceil(LANES) }
    }

    /// Elements of positions packed with the head's width as depth: slivers, or panels of positions.
    fn along(&self) -> usize {
        self.padded * self.width
    }

    /// Elements of positions packed in blocks, with the positions as depth.
    fn across(&self) -> usize {
        self.padded * self.panels * LANES
    }

    /// The positions of a block.
    fn positions(&self, block: usize) -> Range<usize> {
        block * BLOCK..self.columns.min((block + 1) * BLOCK)
    }
}

impl<'a> Head<'a> {
    pub fn sizes(&self) -> Sizes {
        Sizes::new(self.documents.len(), self.attention.head_width)
    }

    /// All queries (0), keys (1) or values (2), a row for each position.
    fn part(&self, which: usize) -> Matrix<'a> {
        let first = self.attention.place(which, self.head);
        Matrix { data: &self.qkv[first..], down: self.attention.qkv_width(), right: 1 }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.attention.head_width as f32).sqrt()
    }

    /// Writes the first position that each position attends to: where its document begins.
    fn write_firsts(&self, firsts: &mut [f32]) {
        let mut first = 0;
        for (i, to) in firsts.iter_mut().enumerate() {
            if i > 0 && self.documents[i] != self.documents[i - 1] {
                first = i;
            }
            *to = first as f32;
        }
    }

    /// Writes what the weights of query `i` are multiplied with, for the keys from `first_key` on.
    fn write_factors(&self, i: usize, first_key: usize, factors: &mut [f32; BLOCK]) {
        let element = ((self.head as u64) << 20 | i as u64) << 20 | first_key as u64;
        self.dropout.write_factors(self.row, element, factors);
    }
}

/// Packs positions in slivers, their width as depth: the left side of a product.
fn pack_slivers(to: &mut [f32], from: Matrix<'_>, sizes: Sizes) {
    pack::<TALL>(to, from, 0..sizes.columns, sizes.width);
}

/// Packs positions in panels, their width as depth: the right side of a product, transposed.
fn pack_panels(to: &mut [f32], from: Matrix<'_>, sizes: Sizes) {
    pack::<LANES>(to, from, 0..sizes.columns, sizes.width);
}

/// Packs each block of positions in panels of the width, the positions as depth: the right side of a product. What
/// lacks in the last block is zeros.
fn pack_blocks(to: &mut [f32], from: Matrix<'_>, sizes: Sizes) {
    for (block, to) in to.chunks_exact_mut(sizes.panels * BLOCK * LANES).enumerate() {
        let positions = sizes.positions(block);
        let here = Matrix { data: &from.data[positions.start * from.down..], ..from }.transposed();
        for (panel, to) in to.chunks_exact_mut(BLOCK * LANES).enumerate() {
            let (filled, rest) = to.split_at_mut(positions.len() * LANES);
            let first = panel * LANES;
            pack::<LANES>(filled, here, first..sizes.width.min(first + LANES), positions.len());
            rest.fill(0.0);
        }
    }
}

/// Writes `slivers·panels` of one query block and one key block: tiles over whole slivers and panels.
#[inline(always)]
fn scores<V: Lanes>(
    slivers: &[f32],
    panels: &[f32],
    queries: Range<usize>,
    keys: Range<usize>,
    width: usize,
    out: &mut Block,
) {
    for panel in 0..keys.len().div_ceil(LANES) {
        let first = panel * LANES;
        let panel = &panels[(keys.start + first) * width..][..LANES * width];
        for top in (0..queries.len()).step_by(TALL) {
            let sliver = &slivers[(queries.start + top) * width..][..TALL * width];
            let sums: [V; TALL] = super::product::tile(sliver, panel);
            for (row, sum) in sums.into_iter().enumerate() {
                if let Some(to) = out[top + row][first..].first_chunk_mut() {
                    sum.store(to);
                }
            }
        }
    }
}

/// Six rows by sixteen columns of `block·panel`, from row `top` of the block on.
#[inline(always)]
fn rows_tile<V: Lanes>(block: &Block, top: usize, panel: &[f32]) -> [V; TALL] {
    let mut sums = [V::zero(); TALL];
    let Some(rows) = block[top..].first_chunk::<TALL>() else { return sums };
    let Some(panel) = panel.as_chunks::<LANES>().0.first_chunk::<BLOCK>() else { return sums };
    if V::TILE == TALL {
        for k in 0..BLOCK {
            let right = V::load(&panel[k]);
            for row in 0..TALL {
                sums[row] = V::splat(rows[row][k]).mul_add(right, sums[row]);
            }
        }
    } else {
        for row in 0..TALL {
            for k in 0..BLOCK {
                sums[row] = V::splat(rows[row][k]).mul_add(V::load(&panel[k]), sums[row]);
            }
        }
    }
    sums
}

/// Six rows by sixteen columns of `blockᵀ·panel`, from column `left` of the block on, over its first `depth` rows.
#[inline(always)]
fn columns_tile<V: Lanes>(block: &Block, left: usize, depth: usize, panel: &[f32]) -> [V; TALL] {
    let mut sums = [V::zero(); TALL];
    for (row, right) in block[..depth].iter().zip(panel.as_chunks::<LANES>().0) {
        let Some(row) = row[left..].first_chunk::<TALL>() else { return sums };
        let right = V::load(right);
        for i in 0..TALL {
            sums[i] = V::splat(row[i]).mul_add(right, sums[i]);
        }
    }
    sums
}

/// Adds a tile to `out`, rows of `width`, at row `top` and column `left`, as far as there are rows and columns.
#[inline(always)]
fn add_tile<V: Lanes>(out: &mut [f32], width: usize, top: usize, left: usize, sums: [V; TALL]) {
    for (out, sum) in out.chunks_exact_mut(width).skip(top).zip(sums) {
        let end = width.min(left + LANES);
        let to = &mut out[left..end];
        V::load_some(to, 0.0).add(sum).store_some(to);
    }
}

/// Scores of query `i` and the keys from `first_key` on, scaled; −∞ where a key is not seen.
#[inline(always)]
fn seen<V: Lanes>(scores: &[f32; BLOCK], scale: f32, first: f32, i: usize, first_key: usize) -> [V; 3] {
    let none = V::splat(f32::NEG_INFINITY);
    let (first, last) = (V::splat(first), V::splat(i as f32));
    let mut out = [none; 3];
    for (part, scores) in scores.as_chunks::<LANES>().0.iter().enumerate().take(3) {
        let key: [f32; LANES] = std::array::from_fn(|lane| (first_key + part * LANES + lane) as f32);
        let key = V::load(&key);
        let score = V::load(scores).mul(V::splat(scale));
        out[part] = last.if_less(key, none, key.if_less(first, none, score));
    }
    out
}

/// The same where every key is seen.
#[inline(always)]
fn all_seen<V: Lanes>(scores: &[f32; BLOCK], scale: f32) -> [V; 3] {
    let mut out = [V::zero(); 3];
    for (part, scores) in scores.as_chunks::<LANES>().0.iter().enumerate().take(3) {
        out[part] = V::load(scores).mul(V::splat(scale));
    }
    out
}

#[inline(always)]
fn store_row<V: Lanes>(row: [V; 3], to: &mut [f32; BLOCK]) {
    for (part, to) in row.into_iter().zip(to.as_chunks_mut::<LANES>().0) {
        part.store(to);
    }
}
