//! Matrix products.
//!
//! An element's sum runs over blocks of [`DEPTH`] in order; inside a block from zero, one fused multiplication and
//! addition after another. That is all its bits depend on: not on the sizes of the matrices, on where the element
//! stands in them, on the tiles below or on who computes it. (The `gemm` crate is as fast, but chooses its depth by
//! the caches of the machine it finds itself on, so peers would disagree in the last bits.)
//!
//! Where the run asks for bf16, operands are rounded to it as they are packed, and two numbers that follow one another in the
//! depth share the place of one ([`pairs`](super::pairs)); sums are single as ever. Blocks are then of [`DEPTH`] pairs.
//!
//! Both operands are packed, so that the innermost loop reads them one after another: the left side in slivers of
//! [`TALL`] rows, the right side in panels of [`LANES`] columns. What lacks in the last of either is filled with zeros, or, of
//! pairs, with numbers that belong to nothing: no row or column has a part in another's sums.

use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use super::Buffer;
use super::heap::Heap;
use super::isa::{Isa, Kernel, PairKernel, Pairs};
use super::lanes::{self, LANES, Lanes, PairLanes};
use super::one_row;
use super::pairs::PackPairs;

/// Products, or pairs of them, that are summed up before they are added to the result. A panel of this depth takes half of a
/// 32 KiB cache.
pub const DEPTH: usize = 256;
/// Rows of a sliver, and of a tile of the result.
pub const TALL: usize = 6;
/// Rows that one task takes at the most: with [`DEPTH`], 192 KiB that stay in the second-level cache.
const TASK: usize = 192;
/// Elements of the right side that are packed at a time, if that is one block: 4 MiB. More of them are fewer meetings of
/// the threads, fewer stay in the cache.
const PACKED: usize = 1 << 20;
/// Panels that one task packs.
const TOGETHER: usize = 8;
/// Elements of the left side that one task packs at a time.
pub const SLIVERS: usize = TASK * DEPTH;

/// How many steps of the innermost loop a panel is fetched ahead.
const AHEAD: usize = 16;

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
    /// Products multiply pairs of bf16 with these.
    pub pairs: Option<Pairs>,
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
        if rows == 1 && depth > 0 && self.pairs.is_none() {
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
        let places = if self.pairs.is_some() { depth.div_ceil(2) } else { depth };
        for from in (0..places).step_by(at_a_time) {
            let to = places.min(from + at_a_time);
            self.pack_right(&mut packed, right, from..to, (columns, depth));
            out.par_chunks_mut(task * columns).enumerate().for_each(|(number, piece)| {
                let first = number * task;
                let mut slivers = self.heap.take(SLIVERS);
                for begin in (from..to).step_by(DEPTH) {
                    let end = to.min(begin + DEPTH);
                    let deep = end - begin;
                    let rows = first..first + piece.len() / columns;
                    self.pack::<TALL>(&mut slivers, left, rows, begin..end, depth);
                    let panels = &packed[(begin - from) * panels * LANES..][..deep * panels * LANES];
                    let start = if begin == 0 { start } else { Start::Present };
                    let tiles = Tiles { slivers: &slivers, panels, deep, out: piece, columns, start };
                    match self.pairs {
                        Some(pairs) => pairs.run(tiles),
                        None => self.isa.run(tiles),
                    }
                }
                if to == places {
                    finish(first, piece);
                }
            });
        }
    }

    /// Packs some places of the right side's depth, each block of [`DEPTH`] in panels.
    fn pack_right(
        &self,
        packed: &mut Buffer,
        right: Matrix<'_>,
        places: Range<usize>,
        (columns, depth): (usize, usize),
    ) {
        let (panels, right) = (columns.div_ceil(LANES), right.transposed());
        for begin in places.clone().step_by(DEPTH) {
            let end = places.end.min(begin + DEPTH);
            let deep = end - begin;
            let block = &mut packed[(begin - places.start) * panels * LANES..][..deep * panels * LANES];
            let at_once = TOGETHER * LANES;
            block.par_chunks_mut(deep * at_once).enumerate().for_each(|(number, packed)| {
                let first = number * at_once;
                let rows = first..columns.min(first + at_once);
                self.pack::<LANES>(packed, right, rows, begin..end, depth);
            });
        }
    }

    /// Packs `rows` of a matrix that has `depth` columns, some places of each.
    fn pack<const W: usize>(
        &self,
        packed: &mut [f32],
        from: Matrix<'_>,
        rows: Range<usize>,
        places: Range<usize>,
        depth: usize,
    ) {
        let columns = match self.pairs {
            Some(_) => 2 * places.start..depth.min(2 * places.end),
            None => places,
        };
        let from = Matrix { data: &from.data[columns.start * from.right..], ..from };
        match self.pairs {
            Some(pairs) => pairs.run(PackPairs::<W> { packed, from, rows, depth: columns.len() }),
            None => pack::<W>(packed, from, rows, columns.len()),
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
    rows.div_ceil(tasks).next_multiple_of(2 * TALL)
}

/// Packs `rows` of a matrix, `deep` columns of each, `W` rows at a time: column after column, `W` numbers each.
pub fn pack<const W: usize>(packed: &mut [f32], from: Matrix<'_>, rows: Range<usize>, deep: usize) {
    const { assert!(W.is_multiple_of(2), "rows are packed four and two at a time") };
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
            let mut done = 0;
            if count == W && from.right == 1 {
                done = deep / 4 * 4;
                for first in (0..W / 4 * 4).step_by(4) {
                    transpose::<W, 4>(packed, data, from.down, first, deep);
                }
                if W % 4 == 2 {
                    transpose::<W, 2>(packed, data, from.down, W - 2, deep);
                }
            }
            for i in 0..count {
                for k in done..deep {
                    packed[k][i] = data[i * from.down + k * from.right];
                }
            }
        }
    }
}

/// Packs `COUNT` rows, from row `first` on, four columns at a time as far as those go.
#[inline(always)]
fn transpose<const W: usize, const COUNT: usize>(
    packed: &mut [[f32; W]],
    rows: &[f32],
    down: usize,
    first: usize,
    deep: usize,
) {
    let row = |i: usize| rows[(first + i % COUNT) * down..][..deep].as_chunks::<4>().0;
    let (a, b, c, d) = (row(0), row(1), row(2), row(3));
    let fours = a.iter().zip(b).zip(c.iter().zip(d));
    for (to, ((a, b), (c, d))) in packed.as_chunks_mut::<4>().0.iter_mut().zip(fours) {
        for (to, column) in to.iter_mut().zip(lanes::transpose([*a, *b, *c, *d])) {
            to[first..first + COUNT].copy_from_slice(&column[..COUNT]);
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
    fn run<V: Lanes>(mut self) {
        // A large tile's panels take all of a first-level cache, so there its slivers stay in it, and the panels in the second.
        if V::TILE == [2 * TALL, 2] {
            self.tiles::<V, Numbers, 2, 2, 16>();
        } else {
            self.tiles::<V, Numbers, 1, 1, 1>();
        }
    }
}

impl PairKernel for Tiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: PairLanes>(mut self) {
        self.tiles::<V, Twos, 2, 2, 16>();
    }
}

/// What a place of packed operands holds.
pub trait Held<V> {
    /// `sum` plus the product of what two places hold.
    fn mul_add(left: V, right: V, sum: V) -> V;
}

/// A number.
pub struct Numbers;

/// Two of bf16.
pub struct Twos;

impl<V: Lanes> Held<V> for Numbers {
    #[inline(always)]
    fn mul_add(left: V, right: V, sum: V) -> V {
        left.mul_add(right, sum)
    }
}

impl<V: PairLanes> Held<V> for Twos {
    #[inline(always)]
    fn mul_add(left: V, right: V, sum: V) -> V {
        left.mul_add_pairs(right, sum)
    }
}

impl Tiles<'_> {
    /// All tiles, of so many slivers and panels each; where fewer are left, one by one. All slivers meet the panels of a chunk
    /// before the next chunk's turn comes.
    #[inline(always)]
    fn tiles<V: Lanes, H: Held<V>, const SLIVERS: usize, const PANELS: usize, const CHUNK: usize>(&mut self) {
        let slivers = (self.out.len() / self.columns).div_ceil(TALL);
        let panels = self.columns.div_ceil(LANES);
        for chunk in (0..panels).step_by(CHUNK) {
            let panels = panels.min(chunk + CHUNK);
            for sliver in (0..slivers).step_by(SLIVERS) {
                for panel in (chunk..panels).step_by(PANELS) {
                    if sliver + SLIVERS <= slivers && panel + PANELS <= panels {
                        self.tile::<V, H, SLIVERS, PANELS>(sliver, panel);
                        continue;
                    }
                    for panel in panel..panels.min(panel + PANELS) {
                        for sliver in sliver..slivers.min(sliver + SLIVERS) {
                            self.tile::<V, H, 1, 1>(sliver, panel);
                        }
                    }
                }
            }
        }
    }

    /// The tile of some slivers and panels, from these on.
    #[inline(always)]
    fn tile<V: Lanes, H: Held<V>, const SLIVERS: usize, const PANELS: usize>(
        &mut self,
        sliver: usize,
        panel: usize,
    ) {
        let Tiles { deep, columns, start, .. } = *self;
        let (top, left) = (sliver * TALL, panel * LANES);
        let bottom = (self.out.len() / columns).min(top + SLIVERS * TALL);
        let right = columns.min(left + PANELS * LANES);
        // The result is too large for the cache; its rows arrive while their tile is computed.
        for row in top..bottom {
            for panel in 0..PANELS {
                V::prefetch(self.out, row * columns + left + panel * LANES);
            }
        }
        let (slivers, panels) = (&self.slivers[top * deep..], &self.panels[left * deep..]);
        let sums: [[[V; PANELS]; TALL]; SLIVERS] = tile::<V, H, SLIVERS, PANELS>(slivers, panels, deep);
        for (row, sums) in (top..bottom).zip(sums.as_flattened()) {
            let to = &mut self.out[row * columns + left..row * columns + right];
            for (panel, to) in to.chunks_mut(LANES).enumerate().take(PANELS) {
                let before = match start {
                    Start::Zero => V::zero(),
                    Start::Row(row) => V::load_some(&row[left + panel * LANES..right], 0.0),
                    Start::Present => V::load_some(to, 0.0),
                };
                before.add(sums[panel]).store_some(to);
            }
        }
    }
}

/// Products of packed slivers and panels, `deep` each: six rows of each sliver, sixteen columns of each panel.
#[inline(always)]
pub fn tile<V: Lanes, H: Held<V>, const SLIVERS: usize, const PANELS: usize>(
    slivers: &[f32],
    panels: &[f32],
    deep: usize,
) -> [[[V; PANELS]; TALL]; SLIVERS] {
    let mut sums = [[[V::zero(); PANELS]; TALL]; SLIVERS];
    if V::TILE[0] < TALL {
        add_part::<V, H, SLIVERS, PANELS, 0, 2>(&mut sums, slivers, panels, deep);
        add_part::<V, H, SLIVERS, PANELS, 2, 4>(&mut sums, slivers, panels, deep);
        add_part::<V, H, SLIVERS, PANELS, 4, 6>(&mut sums, slivers, panels, deep);
    } else {
        add_part::<V, H, SLIVERS, PANELS, 0, TALL>(&mut sums, slivers, panels, deep);
    }
    sums
}

/// Rows `FIRST..END` of each sliver.
#[inline(always)]
fn add_part<
    V: Lanes,
    H: Held<V>,
    const SLIVERS: usize,
    const PANELS: usize,
    const FIRST: usize,
    const END: usize,
>(
    to: &mut [[[V; PANELS]; TALL]; SLIVERS],
    slivers: &[f32],
    panels: &[f32],
    deep: usize,
) {
    let slivers: [&[[f32; TALL]]; SLIVERS] =
        std::array::from_fn(|i| slivers[i * deep * TALL..][..deep * TALL].as_chunks().0);
    let panels: [&[[f32; LANES]]; PANELS] =
        std::array::from_fn(|i| panels[i * deep * LANES..][..deep * LANES].as_chunks().0);
    let mut sums = *to;
    for k in 0..deep {
        let mut right = [V::zero(); PANELS];
        for panel in 0..PANELS {
            right[panel] = V::load(&panels[panel][k]);
            if PANELS > 1 {
                V::prefetch(panels[panel].as_flattened(), (k + AHEAD) * LANES);
            }
        }
        for sliver in 0..SLIVERS {
            for row in FIRST..END {
                let left = V::splat(slivers[sliver][k][row]);
                for panel in 0..PANELS {
                    sums[sliver][row][panel] = H::mul_add(left, right[panel], sums[sliver][row][panel]);
                }
            }
        }
    }
    *to = sums;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::uniform;

    fn numbers(seed: u64, len: usize) -> Vec<f32> {
        (0..len as u64).map(|i| uniform(seed, i) as f32 - 0.5).collect()
    }

    /// Products on every path of this processor, and with pairs of bf16 if it has them.
    fn shops() -> Vec<(String, Workshop)> {
        let shop = |isa, pairs| Workshop { isa, heap: Heap::new(), pairs };
        let paths = Isa::available();
        let pairs = paths.iter().find_map(|&isa| Some((isa, Pairs::beside(isa).ok()?)));
        if pairs.is_none() {
            eprintln!("this processor has no AVX512-BF16: its products are not tried");
        }
        let singles = paths.into_iter().map(|isa| (isa.name().to_string(), shop(isa, None)));
        let pairs = pairs.map(|(isa, pairs)| ("bf16".to_string(), shop(isa, Some(pairs))));
        singles.chain(pairs).collect()
    }

    #[test]
    fn a_row_by_itself_has_the_bits_that_it_has_among_others() {
        let (rows, columns, depth) = (8, 1037, 515);
        let (left, right, bias) =
            (numbers(1, rows * depth), numbers(2, depth * columns), numbers(3, columns));
        // Rows of the right side in memory, and columns of it.
        let b = [Matrix::of_rows(&right, columns), Matrix::of_rows(&right, depth).transposed()];
        for ((name, shop), b) in shops().into_iter().flat_map(|shop| b.map(|b| (shop.clone(), b))) {
            let product = |left: &[f32], rows: usize| {
                let mut out = vec![f32::NAN; rows * columns];
                let a = Matrix::of_rows(left, depth);
                shop.product(&mut out, columns, a, b, depth, Start::Row(&bias), |_, _| {});
                out
            };
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let (all, one) = (product(&left, rows), product(&left[5 * depth..6 * depth], 1));
            assert!(bits(&all[5 * columns..6 * columns]) == bits(&one), "{name}");
        }
    }

    #[test]
    fn tiles_of_all_sizes_have_the_bits_of_rows_by_themselves() {
        for (name, shop) in shops() {
            for (columns, depth) in
                [(1, 1), (15, 2), (16, 259), (17, 6), (31, 3), (33, 258), (48, 4), (80, 7), (545, 5)]
            {
                for rows in [2, 5, 6, 7, 11, 12, 13, 18, 23, 24, 25, 37] {
                    let left = numbers(1, rows * depth);
                    let turned: Vec<f32> =
                        (0..rows * depth).map(|i| left[i % rows * depth + i / rows]).collect();
                    let right = numbers(2, depth * columns);
                    let b = Matrix::of_rows(&right, columns);
                    let before = numbers(3, rows * columns);
                    let [mut one, mut all, mut all_turned] = [before.clone(), before.clone(), before];
                    for (row, to) in one.chunks_exact_mut(columns).enumerate() {
                        let a = Matrix::of_rows(&left[row * depth..], depth);
                        shop.product(to, columns, a, b, depth, Start::Present, |_, _| {});
                    }
                    let a = Matrix::of_rows(&left, depth);
                    shop.product(&mut all, columns, a, b, depth, Start::Present, |_, _| {});
                    let a = Matrix::of_rows(&turned, rows).transposed();
                    shop.product(&mut all_turned, columns, a, b, depth, Start::Present, |_, _| {});
                    assert!(one == all && one == all_turned, "{name}: {rows}, {depth}, {columns}");
                }
            }
        }
    }

    /// The nearest number that the upper half of an f32 holds; of two that are as near, the even one.
    fn nearest_bf16(x: f32) -> f32 {
        let bits = x.to_bits();
        f32::from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
    }

    /// Sums of few, whole numbers are exact: every place of the operands is where it belongs, however they lie in memory.
    #[test]
    fn whole_numbers_have_exact_products_however_operands_lie_in_memory() {
        for (name, shop) in shops() {
            for (rows, columns, depth) in [(2, 1, 1), (7, 17, 3), (12, 16, 32), (13, 33, 45), (25, 130, 1031)]
            {
                let whole = |seed, len| -> Vec<f32> {
                    (0..len as u64).map(|i| (uniform(seed, i) * 9.0).floor() as f32 - 4.0).collect()
                };
                let (left, right) = (whole(1, rows * depth), whole(2, depth * columns));
                let turned = |data: &[f32], width: usize| -> Vec<f32> {
                    let height = data.len() / width;
                    (0..data.len()).map(|i| data[i % height * width + i / height]).collect()
                };
                let (left_turned, right_turned) = (turned(&left, depth), turned(&right, columns));
                let expected: Vec<f32> = (0..rows * columns)
                    .map(|at| {
                        let (row, column) = (at / columns, at % columns);
                        (0..depth).map(|k| left[row * depth + k] * right[k * columns + column]).sum()
                    })
                    .collect();
                let lefts = [Matrix::of_rows(&left, depth), Matrix::of_rows(&left_turned, rows).transposed()];
                let rights =
                    [Matrix::of_rows(&right, columns), Matrix::of_rows(&right_turned, depth).transposed()];
                for (a, b) in lefts.into_iter().flat_map(|a| rights.map(|b| (a, b))) {
                    let mut out = vec![f32::NAN; rows * columns];
                    shop.product(&mut out, columns, a, b, depth, Start::Zero, |_, _| {});
                    assert!(out == expected, "{name}: {rows}, {columns}, {depth}");
                }
            }
        }
    }

    #[test]
    fn bf16_rounds_to_the_nearest_and_what_lies_half_way_to_the_even_one() {
        let Some((_, shop)) = shops().into_iter().find(|(_, shop)| shop.pairs.is_some()) else { return };
        let halfway = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1.0 + 1.01 / 256.0, -1.0 - 1.0 / 256.0];
        let numbers: Vec<f32> = halfway.into_iter().chain(numbers(5, 60)).collect();
        let one = Matrix::of_rows(&[1.0], 1);
        let mut out = vec![f32::NAN; numbers.len()];
        shop.product(&mut out, 1, Matrix::of_rows(&numbers, 1), one, 1, Start::Zero, |_, _| {});
        assert_eq!(out[..4], [1.0, 1.0 + 4.0 / 256.0, 1.0 + 2.0 / 256.0, -1.0]);
        assert!(out.iter().zip(&numbers).all(|(a, &x)| *a == nearest_bf16(x)));
    }

    #[test]
    fn what_is_no_number_stays_none_in_bf16() {
        let Some((_, shop)) = shops().into_iter().find(|(_, shop)| shop.pairs.is_some()) else { return };
        let left = [f32::NAN, 1.0, f32::INFINITY, 1.0, f32::from_bits(0x7f80_0001), 1.0, 1.0, 1.0];
        let mut out = vec![0.0; 4];
        let ones = Matrix::of_rows(&[1.0; 2], 1);
        shop.product(&mut out, 1, Matrix::of_rows(&left, 2), ones, 2, Start::Zero, |_, _| {});
        assert!(out[0].is_nan() && out[1] == f32::INFINITY && out[2].is_nan() && out[3] == 2.0, "{out:?}");
    }

    #[test]
    fn what_is_packed_in_several_passes_is_the_product_too() {
        let (rows, columns, depth) = (7, 4100, 1100);
        assert!(packed(columns) < depth / 2 * columns);
        let (left, right, bias) =
            (numbers(1, rows * depth), numbers(2, depth * columns), numbers(3, columns));
        for (name, shop) in shops() {
            let mut out = vec![f32::NAN; rows * columns];
            let (a, b) = (Matrix::of_rows(&left, depth), Matrix::of_rows(&right, columns));
            let double = |_: usize, rows: &mut [f32]| rows.iter_mut().for_each(|x| *x *= 2.0);
            shop.product(&mut out, columns, a, b, depth, Start::Row(&bias), double);
            for at in (0..out.len()).step_by(37) {
                let (row, column) = (at / columns, at % columns);
                let product = |k: usize| {
                    let (a, b) = (left[row * depth + k], right[k * columns + column]);
                    let round = |x| if shop.pairs.is_some() { nearest_bf16(x) } else { x };
                    f64::from(round(a)) * f64::from(round(b))
                };
                let expected = 2.0 * (f64::from(bias[column]) + (0..depth).map(product).sum::<f64>());
                assert!((f64::from(out[at]) - expected).abs() < 1e-4, "{name}: {row}, {column}");
            }
        }
    }
}
