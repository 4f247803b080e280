//! Operands of products as pairs of bf16: rounded to the nearest, and packed as [`product`](super::product) reads them, a pair
//! in the place of a number. What lacks of the last pair in the depth is 0 on both sides, and adds nothing.

use std::ops::Range;

use super::isa::PairKernel;
use super::lanes::{LANES, PairLanes};
use super::product::Matrix;

/// Vectors' worth of rows that are packed side by side where columns lie in memory: down a single one, every number is in a cache
/// line far from the last, and packing took four times as long.
const AT_ONCE: usize = 8;

/// Packs `rows` of a matrix, `W` at a time: pair after pair, `W` each.
pub struct PackPairs<'a, const W: usize> {
    pub packed: &'a mut [f32],
    pub from: Matrix<'a>,
    pub rows: Range<usize>,
    /// Columns of the matrix, all of which are packed.
    pub depth: usize,
}

impl<const W: usize> PairKernel for PackPairs<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<V: PairLanes>(mut self) {
        // As many times `W` rows as a vector holds.
        let group = LANES / W * W;
        // No closures: one that is not inlined would be compiled without the instructions.
        if self.from.down == 1 {
            for first in self.rows.clone().step_by(AT_ONCE * group) {
                self.across::<V>(first..self.rows.end.min(first + AT_ONCE * group));
            }
        } else {
            for first in self.rows.clone().step_by(group) {
                self.along::<V>(first);
            }
        }
    }
}

impl<const W: usize> PackPairs<'_, W> {
    /// Some rows of a matrix whose columns lie in memory.
    #[inline(always)]
    fn across<V: PairLanes>(&mut self, rows: Range<usize>) {
        let Matrix { data, right, .. } = self.from;
        for pair in 0..self.depth.div_ceil(2) {
            let even = &data[2 * pair * right..];
            let odd = data.get((2 * pair + 1) * right..).filter(|_| 2 * pair + 1 < self.depth);
            for first in rows.clone().step_by(LANES / W * W) {
                let count = LANES.min(rows.end - first);
                let odd = match odd {
                    Some(odd) => load::<V>(&odd[first..], count),
                    None => V::zero(),
                };
                self.put(first, pair, V::pair(load::<V>(&even[first..], count), odd));
            }
        }
    }

    /// Rows from `first` on, of a matrix whose rows lie in memory: sixteen pairs of each at a time.
    #[inline(always)]
    fn along<V: PairLanes>(&mut self, first: usize) {
        let Matrix { data, down, .. } = self.from;
        let end = self.rows.end.min(first + LANES / W * W);
        for begin in (0..self.depth).step_by(2 * LANES) {
            let deep = self.depth.min(begin + 2 * LANES) - begin;
            let mut rows = [V::zero(); LANES];
            for (row, pairs) in (first..end).zip(&mut rows) {
                let numbers = &data[row * down + begin..][..deep];
                let (some, more) = numbers.split_at(deep.min(LANES));
                *pairs = V::pair_neighbours(V::load_some(some, 0.0), V::load_some(more, 0.0));
            }
            for (i, pairs) in V::transpose(rows).into_iter().enumerate().take(deep.div_ceil(2)) {
                self.put(first, begin / 2 + i, pairs);
            }
        }
    }

    /// Writes a pair of each row from `first` on.
    #[inline(always)]
    fn put<V: PairLanes>(&mut self, first: usize, pair: usize, pairs: V) {
        let deep = self.depth.div_ceil(2);
        for part in 0..LANES / W {
            let number = (first - self.rows.start) / W + part;
            let to = &mut self.packed[(number * deep + pair) * W..];
            if let Some(to) = to.first_chunk_mut::<W>() {
                pairs.store_lanes(part * W, to);
            }
        }
    }
}

/// So many numbers, if they are the last; else also what follows them: nobody looks at what becomes of rows behind the last.
#[inline(always)]
fn load<V: PairLanes>(numbers: &[f32], count: usize) -> V {
    match numbers.first_chunk() {
        Some(all) => V::load(all),
        None => V::load_some(&numbers[..count], 0.0),
    }
}
