//! Matrix products.
//!
//! An element's sum runs over blocks of [`DEPTH`] in order; inside a block from zero, one fused multiplication and
//! addition after another. That is all its bits depend on: not on the sizes of the matrices, on where the element
//! stands in them, on the tiles below or on who computes it. (The `gemm` crate is as fast, but chooses its depth by
//! the caches of the machine it finds itself on, so peers would disagree in the last bits.)
//!
//! Both operands are packed, so that the innermost loop reads them one after another: the left side in slivers of
//! [`TALL`] rows, the right side in panels of [`LANES`] columns. What lacks in the last of either is filled with zeros.

use std::sync::Arc;

use rayon::prelude::*;

use super::Buffer;
use super::heap::Heap;
use super::isa::{Isa, Kernel};
use super::lanes::{LANES, Lanes};
use super::one_row;

/// Products that are summed up before they are added to the result. A panel of this depth takes half of a 32 KiB cache.
pub const DEPTH: usize = 256;
/// Rows of a sliver, and of a tile of the result.
pub const TALL: usize = 6;
/// Rows that one task takes at the most: with [`DEPTH`], 192 KiB that stay in the second-level cache.
const TASK: usize = 192;
/// Elements of the right side that are packed at a time, if that is one block: 4 MiB. More of them are fewer meetings of
/// the threads, fewer stay in the cache.
const PACKED: usize = 1 << 20;
/// Elements of the left side that one task packs at a time.
pub const SLIVERS: usize = TASK * DEPTH;

/// A matrix in memory: element (i, j) is `data[i·down + j·right]`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub data: &'a [f32],
    pub down: usize,
    pub right: usize,
}

impl<'a> Matrix<'a> {
    /// Row after row, each of so many columns.
    pub fn of_rows(data: &'a [f32], columns: usize) -> Matrix<'a> {
        Matrix { data, down: columns, right: 1 }
    }

    /// Rows for columns.
    pub fn transposed(self) -> Matrix<'a> {
        Matrix { data: self.data, down: self.right, right: self.down }
    }
}

/// What the products are added to.
#[derive(Clone, Copy)]
pub enum Start<'a> {
    /// Nothing; what stands in the result is overwritten.
    Zero,
    /// The same row everywhere.
    Row(&'a [f32]),
    /// What stands in the result.
    Present,
}

/// What products are computed with.
#[derive(Clone)]
pub struct Workshop {
    pub isa: Isa,
    pub heap: Arc<Heap<f32>>,
}

impl Workshop {
    /// `out[m,n] = start + left[m,depth]·right[depth,n]`; then `finish(first row, rows)` for each piece of the result.
    pub fn product(
        &self,
        out: &mut [f32],
        columns: usize,
        left: Matrix<'_>,
        right: Matrix<'_>,
        depth: usize,
        start: Start<'_>,
        finish: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        if out.is_empty() {
            return;
        }
        let rows = out.len() / columns;
        if rows == 1 && depth > 0 {
            one_row::product(self, out, left, right, depth, start);
            return finish(0, out);
        }
        let task = task_rows(rows);
        let panels = columns.div_ceil(LANES);
        let mut packed = self.heap.take(packed(columns));
        let at_a_time = packed.len() / (panels * LANES) / DEPTH * DEPTH;
        if depth == 0 {
            match start {
                Start::Zero => out.fill(0.0),
                Start::Row(row) => out.chunks_exact_mut(columns).for_each(|to| to.copy_from_slice(row)),
                Start::Present => {}
            }
            return finish(0, out);
        }
        for from in (0..depth).step_by(at_a_time) {
            let to = depth.min(from + at_a_time);
            self.pack_right(&mut packed, right, from, to, columns);
            out.par_chunks_mut(task * columns).enumerate().for_each(|(number, piece)| {
                let first = number * task;
                let mut slivers = self.heap.take(SLIVERS);
                for begin in (from..to).step_by(DEPTH) {
                    let end = to.min(begin + DEPTH);
                    let deep = end - begin;
                    let here = Matrix { data: &left.data[begin * left.right..], ..left };
                    pack::<TALL>(&mut slivers, here, first..first + piece.len() / columns, deep);
                    let panels = &packed[(begin - from) * panels * LANES..][..deep * panels * LANES];
                    let start = if begin == 0 { start } else { Start::Present };
                    self.isa.run(Tiles { slivers: &slivers, panels, deep, out: piece, columns, start });
                }
                if to == depth {
                    finish(first, piece);
                }
            });
        }
    }

    /// Packs rows `from..to` of the right side, each block of [`DEPTH`] in panels.
    fn pack_right(&self, packed: &mut Buffer, right: Matrix<'_>, from: usize, to: usize, columns: usize) {
        let panels = columns.div_ceil(LANES);
        for begin in (from..to).step_by(DEPTH) {
            let deep = (to - begin).min(DEPTH);
            let here = Matrix { data: &right.data[begin * right.down..], ..right }.transposed();
            let block = &mut packed[(begin - from) * panels * LANES..][..deep * panels * LANES];
            block.par_chunks_mut(deep * LANES).with_min_len(8).enumerate().for_each(|(panel, packed)| {
                let first = panel * LANES;
                pack::<LANES>(packed, here, first..columns.min(first + LANES), deep);
            });
        }
    }
}

/// Elements of the right side that are packed at a time, if it has so many columns.
pub fn packed(columns: usize) -> usize {
    PACKED.max(DEPTH * columns.next_multiple_of(LANES))
}

/// Rows of one task: whole slivers, at the most [`TASK`], and as many tasks for each thread.
fn task_rows(rows: usize) -> usize {
    let threads = rayon::current_num_threads();
    let tasks = threads * rows.div_ceil(threads * TASK);
    rows.div_ceil(tasks).next_multiple_of(TALL)
}

/// Packs `rows` of a matrix, `deep` columns of each, `W` rows at a time: column after column, `W` numbers each.
pub fn pack<const W: usize>(packed: &mut [f32], from: Matrix<'_>, rows: std::ops::Range<usize>, deep: usize) {
    for (number, packed) in packed.chunks_exact_mut(W * deep).enumerate() {
        let first = rows.start + number * W;
        if first >= rows.end {
            return;
        }
        let count = W.min(rows.end - first);
        let packed = packed.as_chunks_mut::<W>().0;
        let data = &from.data[first * from.down..];
        if from.down == 1 {
            for (k, group) in packed[..deep].iter_mut().enumerate() {
                match data[k * from.right..].first_chunk::<W>() {
                    Some(all) if count == W => *group = *all,
                    _ => {
                        *group = [0.0; W];
                        group[..count].copy_from_slice(&data[k * from.right..][..count]);
                    }
                }
            }
        } else {
            if count < W {
                packed.fill([0.0; W]);
            }
            for i in 0..count {
                let row = &data[i * from.down..];
                if from.right == 1 {
                    packed.iter_mut().zip(&row[..deep]).for_each(|(group, &x)| group[i] = x);
                } else {
                    packed[..deep]
                        .iter_mut()
                        .enumerate()
                        .for_each(|(k, group)| group[i] = row[k * from.right]);
                }
            }
        }
    }
}

/// The product of packed operands.
struct Tiles<'a> {
    slivers: &'a [f32],
    panels: &'a [f32],
    deep: usize,
    out: &'a mut [f32],
    columns: usize,
    start: Start<'a>,
}

impl Kernel for Tiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Tiles { slivers, panels, deep, out, columns, start } = self;
        let rows = out.len() / columns;
        for panel in 0..columns.div_ceil(LANES) {
            let first = panel * LANES;
            let width = LANES.min(columns - first);
            let panel = &panels[panel * deep * LANES..][..deep * LANES];
            let row_start = match start {
                Start::Row(row) => V::load_some(&row[first..columns], 0.0),
                Start::Zero | Start::Present => V::zero(),
            };
            for sliver in 0..rows.div_ceil(TALL) {
                let top = sliver * TALL;
                // The result is too large for the cache; its rows arrive while their tile is computed.
                for row in top..rows.min(top + TALL) {
                    V::prefetch(&out[row * columns + first..]);
                }
                let sums: [V; TALL] = tile(&slivers[sliver * deep * TALL..][..deep * TALL], panel);
                for (row, sum) in sums.into_iter().enumerate().take(rows - top) {
                    let to = &mut out[(top + row) * columns + first..][..width];
                    let before =
                        if matches!(start, Start::Present) { V::load_some(to, 0.0) } else { row_start };
                    before.add(sum).store_some(to);
                }
            }
        }
    }
}

/// Six rows by sixteen columns of a product, from a packed sliver and a packed panel.
#[inline(always)]
pub fn tile<V: Lanes>(sliver: &[f32], panel: &[f32]) -> [V; TALL] {
    if V::TILE == TALL {
        return part::<V, TALL, 0>(sliver, panel);
    }
    let [[a, b], [c, d], [e, f]] =
        [part::<V, 2, 0>(sliver, panel), part::<V, 2, 2>(sliver, panel), part::<V, 2, 4>(sliver, panel)];
    [a, b, c, d, e, f]
}

/// `ROWS` rows of a tile, from row `FIRST` on.
#[inline(always)]
fn part<V: Lanes, const ROWS: usize, const FIRST: usize>(sliver: &[f32], panel: &[f32]) -> [V; ROWS] {
    let mut sums = [V::zero(); ROWS];
    for (left, right) in sliver.as_chunks::<TALL>().0.iter().zip(panel.as_chunks::<LANES>().0) {
        let right = V::load(right);
        for row in 0..ROWS {
            sums[row] = V::splat(left[FIRST + row]).mul_add(right, sums[row]);
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::uniform;

    fn numbers(seed: u64, len: usize) -> Vec<f32> {
        (0..len as u64).map(|i| uniform(seed, i) as f32 - 0.5).collect()
    }

    #[test]
    fn a_row_by_itself_has_the_bits_that_it_has_among_others() {
        let (rows, columns, depth) = (8, 1037, 515);
        let (left, right, bias) =
            (numbers(1, rows * depth), numbers(2, depth * columns), numbers(3, columns));
        // Rows of the right side in memory, and columns of it.
        let b = [Matrix::of_rows(&right, columns), Matrix::of_rows(&right, depth).transposed()];
        for (isa, b) in Isa::available().into_iter().flat_map(|isa| b.map(|b| (isa, b))) {
            let shop = Workshop { isa, heap: Heap::new() };
            let product = |left: &[f32], rows: usize| {
                let mut out = vec![f32::NAN; rows * columns];
                let a = Matrix::of_rows(left, depth);
                shop.product(&mut out, columns, a, b, depth, Start::Row(&bias), |_, _| {});
                out
            };
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let (all, one) = (product(&left, rows), product(&left[5 * depth..6 * depth], 1));
            assert!(bits(&all[5 * columns..6 * columns]) == bits(&one), "{}", isa.name());
        }
    }

    #[test]
    fn what_is_packed_in_several_passes_is_the_product_too() {
        let (rows, columns, depth) = (7, 4100, 600);
        assert!(packed(columns) < depth * columns);
        let (left, right, bias) =
            (numbers(1, rows * depth), numbers(2, depth * columns), numbers(3, columns));
        for isa in Isa::available() {
            let shop = Workshop { isa, heap: Heap::new() };
            let mut out = vec![f32::NAN; rows * columns];
            let (a, b) = (Matrix::of_rows(&left, depth), Matrix::of_rows(&right, columns));
            let double = |_: usize, rows: &mut [f32]| rows.iter_mut().for_each(|x| *x *= 2.0);
            shop.product(&mut out, columns, a, b, depth, Start::Row(&bias), double);
            for at in (0..out.len()).step_by(37) {
                let (row, column) = (at / columns, at % columns);
                let product =
                    |k: usize| f64::from(left[row * depth + k]) * f64::from(right[k * columns + column]);
                let expected = 2.0 * (f64::from(bias[column]) + (0..depth).map(product).sum::<f64>());
                assert!((f64::from(out[at]) - expected).abs() < 1e-4, "{}: {row}, {column}", isa.name());
            }
        }
    }
}
