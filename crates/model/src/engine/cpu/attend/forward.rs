//! Forward through one head.

use super::{
    BLOCK, Block, Head, Sizes, add_rows, all_seen, pack_blocks, pack_panels, pack_slivers, scores, seen,
    store_row,
};
use crate::engine::cpu::isa::Kernel;
use crate::engine::cpu::lanes::{LANES, Lanes};
use crate::engine::cpu::maths::{exp, exp_of};

/// Writes one head's `out[t, w]` and log-sum-exp `[t]`.
pub struct Forward<'a> {
    pub head: Head<'a>,
    pub out: &'a mut [f32],
    pub log_sum_exp: &'a mut [f32],
    /// [`Forward::scratch`] elements, whatever is in them.
    pub scratch: &'a mut [f32],
}

impl Forward<'_> {
    /// Elements that it works with.
    pub fn scratch(sizes: Sizes) -> usize {
        2 * sizes.along() + sizes.across() + sizes.columns
    }
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Forward { head, out, log_sum_exp, scratch } = self;
        let sizes = head.sizes();
        let (queries, scratch) = scratch.split_at_mut(sizes.along());
        let (keys, scratch) = scratch.split_at_mut(sizes.along());
        let (values, firsts) = scratch.split_at_mut(sizes.across());
        let firsts = &mut firsts[..sizes.columns];
        pack_slivers(queries, head.part(0), sizes);
        pack_panels(keys, head.part(1), sizes);
        pack_blocks(values, head.part(2), sizes);
        head.write_firsts(firsts);
        let packed = Packed { queries, keys, values, firsts };
        let of_block = out.chunks_mut(BLOCK * sizes.width).zip(log_sum_exp.chunks_mut(BLOCK));
        for (block, (out, log_sum_exp)) in of_block.enumerate() {
            query_block::<V>(&head, sizes, &packed, block, out, log_sum_exp);
        }
    }
}

struct Packed<'a> {
    queries: &'a [f32],
    keys: &'a [f32],
    values: &'a [f32],
    firsts: &'a [f32],
}

#[inline(always)]
fn query_block<V: Lanes>(
    head: &Head<'_>,
    sizes: Sizes,
    packed: &Packed<'_>,
    block: usize,
    out: &mut [f32],
    log_sum_exp: &mut [f32],
) {
    let Sizes { width, panels, .. } = sizes;
    let queries = sizes.positions(block);
    let mut weights: Block = [[0.0; BLOCK]; BLOCK];
    let (mut highest, mut sums) = ([f32::NEG_INFINITY; BLOCK], [0.0f32; BLOCK]);
    out.fill(0.0);
    // Documents only begin later in later queries: what the first does not see, none does.
    for key_block in packed.firsts[queries.start] as usize / BLOCK..=block {
        let keys = sizes.positions(key_block);
        scores::<V>(packed.queries, packed.keys, queries.clone(), keys.clone(), width, &mut weights);
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            let (i, first) = (queries.start + row, packed.firsts[queries.start + row]);
            let whole = key_block < block && first <= keys.start as f32;
            let scores = if whole {
                all_seen::<V>(&weights[row], head.scale())
            } else {
                seen::<V>(&weights[row], head.scale(), first, i, keys.start)
            };
            let here = scores[0].max(scores[1]).max(scores[2]).highest();
            let new = if highest[row] > here { highest[row] } else { here };
            // A row that sees nothing yet has no maximum to be measured from.
            let base = if new == f32::NEG_INFINITY { 0.0 } else { new };
            let shrink = exp_of::<V>(highest[row] - base);
            let mut shares = scores;
            for share in &mut shares {
                *share = exp(share.sub(V::splat(base)));
            }
            sums[row] = sums[row] * shrink + shares[0].add(shares[1]).add(shares[2]).sum();
            highest[row] = new;
            store_row(shares, &mut weights[row]);
            if shrink != 1.0 {
                for out in out.chunks_mut(LANES) {
                    V::load_some(out, 0.0).mul(V::splat(shrink)).store_some(out);
                }
            }
            if head.dropout.rate > 0.0 {
                let mut factors = [0.0; BLOCK];
                head.write_factors(i, keys.start, &mut factors);
                weights[row].iter_mut().zip(factors).for_each(|(weight, factor)| *weight *= factor);
            }
        }
        let values = &packed.values[key_block * panels * BLOCK * LANES..][..panels * BLOCK * LANES];
        add_rows::<V>(&weights, values, out, width);
    }
    for (row, out) in out.chunks_exact_mut(width).enumerate() {
        for out in out.chunks_mut(LANES) {
            V::load_some(out, 0.0).div(V::splat(sums[row])).store_some(out);
        }
        log_sum_exp[row] = highest[row] + libm::logf(sums[row]);
    }
}
