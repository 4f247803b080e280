//! Backward through one head: probabilities are made again from scores and log-sum-exp.

use super::{
    BLOCK, Block, Head, Sizes, add_columns, add_rows, all_seen, pack_blocks, pack_panels, pack_slivers,
    scores, seen, store_row,
};
use crate::engine::cpu::isa::Kernel;
use crate::engine::cpu::lanes::{LANES, Lanes};
use crate::engine::cpu::maths::exp;
use crate::engine::cpu::product::Matrix;

/// Writes one head's gradients of queries, keys and values, `[3, t, w]`.
pub struct Backward<'a> {
    pub head: Head<'a>,
    /// The sample's `[t, h·w]`, and its gradient.
    pub out: &'a [f32],
    pub d_out: &'a [f32],
    /// The head's `[t]`.
    pub log_sum_exp: &'a [f32],
    pub d_parts: &'a mut [f32],
    /// [`Backward::scratch`] elements, whatever is in them.
    pub scratch: &'a mut [f32],
}

impl Backward<'_> {
    /// Elements that it works with.
    pub fn scratch(sizes: Sizes) -> usize {
        4 * sizes.along() + 3 * sizes.across() + 2 * sizes.columns
    }
}

/// What is the same for all blocks.
struct Packed<'a> {
    queries: &'a [f32],
    d_outs: &'a [f32],
    keys: &'a [f32],
    values: &'a [f32],
    query_blocks: &'a [f32],
    key_blocks: &'a [f32],
    d_out_blocks: &'a [f32],
    firsts: &'a [f32],
    /// Σ out·d_out of each query: what all of its probabilities have in common.
    common: &'a [f32],
    log_sum_exp: &'a [f32],
}

impl Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Backward { head, out, d_out, log_sum_exp, d_parts, scratch } = self;
        let sizes = head.sizes();
        let Sizes { columns, width, .. } = sizes;
        let (queries, scratch) = scratch.split_at_mut(sizes.along());
        let (d_outs, scratch) = scratch.split_at_mut(sizes.along());
        let (keys, scratch) = scratch.split_at_mut(sizes.along());
        let (values, scratch) = scratch.split_at_mut(sizes.along());
        let (query_blocks, scratch) = scratch.split_at_mut(sizes.across());
        let (key_blocks, scratch) = scratch.split_at_mut(sizes.across());
        let (d_out_blocks, scratch) = scratch.split_at_mut(sizes.across());
        let (firsts, common) = scratch.split_at_mut(columns);
        let all = head.attention.heads * width;
        let d_head = Matrix { data: &d_out[head.head * width..], down: all, right: 1 };
        pack_slivers(queries, head.part(0), sizes);
        pack_slivers(d_outs, d_head, sizes);
        pack_panels(keys, head.part(1), sizes);
        pack_panels(values, head.part(2), sizes);
        pack_blocks(query_blocks, head.part(0), sizes);
        pack_blocks(key_blocks, head.part(1), sizes);
        pack_blocks(d_out_blocks, d_head, sizes);
        head.write_firsts(firsts);
        for (i, common) in common.iter_mut().enumerate().take(columns) {
            let here = i * all + head.head * width..i * all + (head.head + 1) * width;
            *common = dot::<V>(&out[here.clone()], &d_out[here]);
        }
        let packed = Packed {
            queries,
            d_outs,
            keys,
            values,
            query_blocks,
            key_blocks,
            d_out_blocks,
            firsts,
            common,
            log_sum_exp,
        };
        d_parts.fill(0.0);
        let blocks = columns.div_ceil(BLOCK);
        for key_block in 0..blocks {
            for query_block in key_block..blocks {
                block_pair::<V>(&head, sizes, &packed, query_block, key_block, d_parts);
            }
        }
    }
}

#[inline(always)]
fn block_pair<V: Lanes>(
    head: &Head<'_>,
    sizes: Sizes,
    packed: &Packed<'_>,
    query_block: usize,
    key_block: usize,
    d_parts: &mut [f32],
) {
    let Sizes { columns, width, panels, .. } = sizes;
    let (queries, keys) = (sizes.positions(query_block), sizes.positions(key_block));
    if packed.firsts[queries.start] >= keys.end as f32 {
        return; // No query of the block sees a key of the block.
    }
    let mut weights: Block = [[0.0; BLOCK]; BLOCK];
    let mut d_scores: Block = [[0.0; BLOCK]; BLOCK];
    scores::<V>(packed.queries, packed.keys, queries.clone(), keys.clone(), width, &mut weights);
    scores::<V>(packed.d_outs, packed.values, queries.clone(), keys.clone(), width, &mut d_scores);
    for row in 0..queries.len() {
        let (i, first) = (queries.start + row, packed.firsts[queries.start + row]);
        let whole = key_block < query_block && first <= keys.start as f32;
        let scores = if whole {
            all_seen::<V>(&weights[row], head.scale())
        } else {
            seen::<V>(&weights[row], head.scale(), first, i, keys.start)
        };
        let (base, common) = (V::splat(packed.log_sum_exp[i]), V::splat(packed.common[i]));
        let mut factors = [1.0; BLOCK];
        if head.dropout.rate > 0.0 {
            head.write_factors(i, keys.start, &mut factors);
        }
        let (mut kept, mut d_row) = (scores, scores);
        for part in 0..3 {
            let at = part * LANES;
            let share = exp(scores[part].sub(base));
            let factor = V::load_some(&factors[at..at + LANES], 0.0);
            let d_share = V::load_some(&d_scores[row][at..at + LANES], 0.0).mul(factor);
            kept[part] = share.mul(factor);
            let d_score = share.mul(d_share.sub(common)).mul(V::splat(head.scale()));
            // Keys that are not seen hold whatever was there: their share is 0, their gradient must be.
            d_row[part] = V::zero().if_less(share, d_score, share);
        }
        store_row(kept, &mut weights[row]);
        store_row(d_row, &mut d_scores[row]);
    }
    let (d_queries, rest) = d_parts.split_at_mut(columns * width);
    let (d_keys, d_values) = rest.split_at_mut(columns * width);
    let d_queries = &mut d_queries[queries.start * width..queries.end * width];
    let d_keys = &mut d_keys[keys.start * width..keys.end * width];
    let d_values = &mut d_values[keys.start * width..keys.end * width];
    let size = panels * BLOCK * LANES;
    let of_keys = &packed.key_blocks[key_block * size..][..size];
    let of_queries = &packed.query_blocks[query_block * size..][..size];
    let of_d_outs = &packed.d_out_blocks[query_block * size..][..size];
    add_rows::<V>(&d_scores, of_keys, d_queries, width);
    add_columns::<V>(&d_scores, queries.len(), of_queries, d_keys, width);
    add_columns::<V>(&weights, queries.len(), of_d_outs, d_values, width);
}

/// Σ a·b.
#[inline(always)]
fn dot<V: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    let mut sum = V::zero();
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        sum = V::load_some(a, 0.0).mul_add(V::load_some(b, 0.0), sum);
    }
    sum.sum()
}
