//! Products with one row, as a model that writes has them: every weight is used once, so memory is all that counts, and
//! packing would only be more of it.

use rayon::prelude::*;

use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use super::product::{DEPTH, Matrix, Start, Workshop, pack};

/// Columns, or words, that one task takes.
const TASK: usize = 512;
/// Rows of the right side that are read side by side.
const AT_ONCE: usize = 4;

/// `out[n] = start + left[depth]·right[depth,n]`, with rows or columns of `right` in memory: the sums run as in `product`, so
/// their bits are the same.
pub fn product(
    shop: &Workshop,
    out: &mut [f32],
    left: Matrix<'_>,
    right: Matrix<'_>,
    depth: usize,
    start: Start<'_>,
) {
    out.par_chunks_mut(TASK).enumerate().for_each(|(number, out)| {
        let first = number * TASK;
        match start {
            Start::Zero => out.fill(0.0),
            Start::Row(row) => out.copy_from_slice(&row[first..][..out.len()]),
            Start::Present => {}
        }
        let right = Matrix { data: &right.data[first * right.right..], ..right };
        shop.isa.run(AddProduct { left, right, depth, out });
    });
}

struct AddProduct<'a> {
    left: Matrix<'a>,
    right: Matrix<'a>,
    depth: usize,
    out: &'a mut [f32],
}

impl Kernel for AddProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        if self.right.right == 1 { self.of_rows::<V>() } else { self.of_columns::<V>() }
    }
}

impl AddProduct<'_> {
    /// Rows of the right side are in memory: the result is summed up a few of them at a time.
    #[inline(always)]
    fn of_rows<V: Lanes>(self) {
        let AddProduct { left, right, depth, out } = self;
        let columns = out.len();
        let row = |k: usize| (V::splat(left.data[k * left.right]), &right.data[k * right.down..][..columns]);
        let mut sums = [0.0; TASK];
        let sums = &mut sums[..columns];
        for begin in (0..depth).step_by(DEPTH) {
            let end = depth.min(begin + DEPTH);
            sums.fill(0.0);
            let whole = begin + (end - begin) / AT_ONCE * AT_ONCE;
            for k in (begin..whole).step_by(AT_ONCE) {
                let rows: [(V, &[f32]); AT_ONCE] = std::array::from_fn(|i| row(k + i));
                for first in (0..columns).step_by(LANES) {
                    let last = columns.min(first + LANES);
                    let add =
                        |sum: V, (x, row): (V, &[f32])| x.mul_add(V::load_some(&row[first..last], 0.0), sum);
                    let sum = rows.into_iter().fold(V::load_some(&sums[first..last], 0.0), add);
                    sum.store_some(&mut sums[first..last]);
                }
            }
            for k in whole..end {
                let (x, row) = row(k);
                for (sum, row) in sums.chunks_mut(LANES).zip(row.chunks(LANES)) {
                    x.mul_add(V::load_some(row, 0.0), V::load_some(sum, 0.0)).store_some(sum);
                }
            }
            for (out, sum) in out.chunks_mut(LANES).zip(sums.chunks(LANES)) {
                V::load_some(out, 0.0).add(V::load_some(sum, 0.0)).store_some(out);
            }
        }
    }

    /// Columns of it are. Sixteen at a time are packed: sums must run over the depth one after another, so a vector
    /// holds sixteen of them.
    #[inline(always)]
    fn of_columns<V: Lanes>(self) {
        let AddProduct { left, right, depth, out } = self;
        let mut panel = [0.0; DEPTH * LANES];
        for (number, out) in out.chunks_mut(LANES).enumerate() {
            let first = number * LANES;
            for begin in (0..depth).step_by(DEPTH) {
                let deep = DEPTH.min(depth - begin);
                let columns = Matrix { data: &right.data[begin * right.down..], ..right }.transposed();
                pack::<LANES>(&mut panel[..deep * LANES], columns, first..first + out.len(), deep);
                let mut sum = V::zero();
                for (k, right) in panel.as_chunks::<LANES>().0[..deep].iter().enumerate() {
                    sum = V::splat(left.data[(begin + k) * left.right]).mul_add(V::load(right), sum);
                }
                V::load_some(out, 0.0).add(sum).store_some(out);
            }
        }
    }
}

/// The product of each row of `table` with `x`.
pub fn dots(shop: &Workshop, table: &[f32], x: &[f32]) -> Vec<f32> {
    let mut dots = vec![0.0; table.len() / x.len()];
    dots.par_chunks_mut(TASK)
        .zip(table.par_chunks(TASK * x.len()))
        .for_each(|(out, table)| shop.isa.run(Dots { table, x, out }));
    dots
}

struct Dots<'a> {
    table: &'a [f32],
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Dots<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        for (row, out) in self.table.chunks_exact(self.x.len()).zip(self.out) {
            let mut sums = [V::zero(); 2];
            for (i, (row, x)) in row.chunks(LANES).zip(self.x.chunks(LANES)).enumerate() {
                sums[i % 2] = V::load_some(row, 0.0).mul_add(V::load_some(x, 0.0), sums[i % 2]);
            }
            *out = sums[0].add(sums[1]).sum();
        }
    }
}
