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
use super::product::{Matrix, Numbers, TALL, pack, tile};
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
    let slivers = &slivers[queries.start * width..];
    let panels = &panels[keys.start * width..];
    let count = keys.len().div_ceil(LANES);
    for top in (0..queries.len()).step_by(TALL) {
        let sliver = &slivers[top * width..];
        if V::TILE[1] > 1 && count == 3 {
            score_tile::<V, 3>(sliver, panels, width, top, 0, out);
        } else {
            for panel in 0..count {
                score_tile::<V, 1>(sliver, &panels[panel * LANES * width..], width, top, panel * LANES, out);
            }
        }
    }
}

#[inline(always)]
fn score_tile<V: Lanes, const PANELS: usize>(
    sliver: &[f32],
    panels: &[f32],
    width: usize,
    top: usize,
    left: usize,
    out: &mut Block,
) {
    let [sums]: [[[V; PANELS]; TALL]; 1] = tile::<V, Numbers, 1, PANELS>(sliver, panels, width);
    for row in 0..TALL {
        for panel in 0..PANELS {
            if let Some(to) = out[top + row][left + panel * LANES..].first_chunk_mut() {
                sums[row][panel].store(to);
            }
        }
    }
}

/// `out += block·panels`: rows of `out` for rows of the block, panels of 48 positions for its columns.
#[inline(always)]
fn add_rows<V: Lanes>(block: &Block, panels: &[f32], out: &mut [f32], width: usize) {
    add_product::<V, false>(block, BLOCK, panels, out, width);
}

/// `out += blockᵀ·panels`, over the block's first `depth` rows: rows of `out` for its columns.
#[inline(always)]
fn add_columns<V: Lanes>(block: &Block, depth: usize, panels: &[f32], out: &mut [f32], width: usize) {
    add_product::<V, true>(block, depth, panels, out, width);
}

#[inline(always)]
fn add_product<V: Lanes, const TURNED: bool>(
    block: &Block,
    depth: usize,
    panels: &[f32],
    out: &mut [f32],
    width: usize,
) {
    let count = width.div_ceil(LANES);
    let mut panel = 0;
    while panel < count {
        let panels = &panels[panel * BLOCK * LANES..];
        let at_once = if V::TILE[1] > 1 && panel + 2 <= count { 2 } else { 1 };
        for top in (0..out.len() / width).step_by(TALL) {
            if at_once == 2 {
                add_tile::<V, TURNED, 2>(block, depth, top, panels, out, width, panel * LANES);
            } else {
                add_tile::<V, TURNED, 1>(block, depth, top, panels, out, width, panel * LANES);
            }
        }
        panel += at_once;
    }
}

/// Adds six rows and some panels of a product, as far as `out` has rows and columns.
#[inline(always)]
fn add_tile<V: Lanes, const TURNED: bool, const PANELS: usize>(
    block: &Block,
    depth: usize,
    top: usize,
    panels: &[f32],
    out: &mut [f32],
    width: usize,
    left: usize,
) {
    let mut sums = [[V::zero(); PANELS]; TALL];
    let panels: [&[[f32; LANES]]; PANELS] =
        std::array::from_fn(|i| panels[i * BLOCK * LANES..][..depth * LANES].as_chunks().0);
    let rows: &[[f32; BLOCK]] = if TURNED { &block[..depth] } else { &block[top..top + TALL] };
    for k in 0..depth.min(BLOCK) {
        for row in 0..TALL {
            let left = V::splat(if TURNED { rows[k][top + row] } else { rows[row][k] });
            for panel in 0..PANELS {
                sums[row][panel] = left.mul_add(V::load(&panels[panel][k]), sums[row][panel]);
            }
        }
    }
    for row in 0..TALL.min(out.len() / width - top) {
        let to = &mut out[(top + row) * width..][..width][left..];
        for (panel, to) in to.chunks_mut(LANES).enumerate().take(PANELS) {
            V::load_some(to, 0.0).add(sums[row][panel]).store_some(to);
        }
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
