//! Sixteen f32 at a time: the one vector type that every kernel is written with, whatever the instruction set.
//!
//! The number of lanes is the same on all paths, so that sums over a row are added up in the same order on each of
//! them: on two registers of AVX2, one of AVX-512, four of NEON. What is left to differ is whether `a·b + c` is
//! rounded once or twice.
//!
//! Everything is `inline(always)`: a kernel is compiled as a whole for its instruction set, or its vectors would
//! travel through memory.

#[cfg(target_arch = "aarch64")]
pub mod neon;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub mod plain;
#[cfg(target_arch = "x86_64")]
pub mod x86;

#[cfg(target_arch = "aarch64")]
pub use self::neon::Neon as Baseline;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub use self::plain::Plain as Baseline;
#[cfg(target_arch = "x86_64")]
pub use self::x86::Sse2 as Baseline;

/// Rows for columns.
#[cfg(target_arch = "x86_64")]
pub use self::x86::transpose;

/// Rows for columns.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub fn transpose(rows: [[f32; 4]; 4]) -> [[f32; 4]; 4] {
    let [a, b, c, d] = rows;
    [[a[0], b[0], c[0], d[0]], [a[1], b[1], c[1], d[1]], [a[2], b[2], c[2], d[2]], [a[3], b[3], c[3], d[3]]]
}

/// How many.
pub const LANES: usize = 16;

/// Sixteen f32.
pub trait Lanes: Copy {
    /// Rows and vectors of a product's tile: as many as the registers hold. 2 × 1, 6 × 1 or 12 × 2.
    const TILE: [usize; 2];

    /// The same number in every lane.
    fn splat(x: f32) -> Self;
    /// From memory.
    fn load(from: &[f32; LANES]) -> Self;
    /// To memory.
    fn store(self, to: &mut [f32; LANES]);
    /// `self + other`.
    fn add(self, other: Self) -> Self;
    /// `self − other`.
    fn sub(self, other: Self) -> Self;
    /// `self · other`.
    fn mul(self, other: Self) -> Self;
    /// `self ÷ other`.
    fn div(self, other: Self) -> Self;
    /// √.
    fn sqrt(self) -> Self;
    /// `self · factor + addend`, rounded once where the instruction set can.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// `yes` where `self < other`, else `no` (also where one of them is not a number).
    fn if_less(self, other: Self, yes: Self, no: Self) -> Self;
    /// 2ⁿ from 1.5·2²³ + n, for whole −127 < n < 128: the number's low bits become the exponent.
    fn power_of_two(self) -> Self;

    /// Says that what stands at this place, which may lie behind the end, is about to be needed; nothing waits for it.
    #[inline(always)]
    fn prefetch(_from: &[f32], _at: usize) {}

    /// All zeros.
    #[inline(always)]
    fn zero() -> Self {
        Self::splat(0.0)
    }

    /// The larger; `other` if one of them is not a number, so `LOW.max(x)` does not hide that `x` is none.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        other.if_less(self, self, other)
    }

    /// The smaller; `other` if one of them is not a number.
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.if_less(other, self, other)
    }

    /// The lanes' numbers.
    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        let mut array = [0.0; LANES];
        self.store(&mut array);
        array
    }

    /// From up to sixteen elements, the other lanes filled with `fill`.
    #[inline(always)]
    fn load_some(from: &[f32], fill: f32) -> Self {
        match from.first_chunk() {
            Some(all) => Self::load(all),
            None => {
                let mut array = [fill; LANES];
                array[..from.len()].copy_from_slice(from);
                Self::load(&array)
            }
        }
    }

    /// To up to sixteen elements.
    #[inline(always)]
    fn store_some(self, to: &mut [f32]) {
        match to.first_chunk_mut() {
            Some(all) => self.store(all),
            None => {
                let array = self.to_array();
                let len = to.len();
                to.copy_from_slice(&array[..len]);
            }
        }
    }

    /// The sum over all lanes, by halves: 8 + 8, 4 + 4, 2 + 2, 1 + 1.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut array = self.to_array();
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                array[i] += array[i + half];
            }
        }
        array[0]
    }

    /// The largest of all lanes.
    #[inline(always)]
    fn highest(self) -> f32 {
        let mut array = self.to_array();
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                array[i] = if array[i] < array[i + half] { array[i + half] } else { array[i] };
            }
        }
        array[0]
    }
}

/// Lanes that may also hold two bf16 each: a pair that follows one another in the depth of a product.
pub trait PairLanes: Lanes {
    /// A pair in each lane, from two vectors: the nearest bf16 of `even` below, of `odd` above.
    fn pair(even: Self, odd: Self) -> Self;
    /// The same of neighbours: eight pairs from each of two vectors.
    fn pair_neighbours(first: Self, second: Self) -> Self;
    /// `addend` plus the products of both halves, first of the upper ones: each rounded once, what is too small for a normal
    /// number taken for 0.
    fn mul_add_pairs(self, factor: Self, addend: Self) -> Self;
    /// Rows for columns.
    fn transpose(rows: [Self; LANES]) -> [Self; LANES];
    /// Some lanes to memory, from lane `first` on.
    fn store_lanes<const COUNT: usize>(self, first: usize, to: &mut [f32; COUNT]);
}
