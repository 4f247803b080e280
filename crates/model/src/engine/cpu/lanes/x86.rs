//! Sixteen f32 in four registers of SSE2 (which every processor of the kind has), two of AVX2, or one of AVX-512.
//!
//! SAFETY, of everything here: the types are not visible outside of `cpu`, and kernels are run with them by
//! [`Isa::run`](super::super::isa::Isa::run) and [`Pairs::run`](super::super::isa::Pairs::run) alone, whose values are made
//! only where their instructions were found in the processor.
#![allow(unsafe_code, reason = "an intrinsic may be called only where the processor has its instruction")]

use std::arch::x86_64::*;
use std::mem::transmute;

use super::{LANES, Lanes, PairLanes};

/// SSE2: no fused multiplication and addition.
#[derive(Clone, Copy)]
pub struct Sse2([__m128; 4]);

/// AVX2 with fused multiplication and addition.
#[derive(Clone, Copy)]
pub struct Avx2(__m256, __m256);

/// AVX-512F; as pairs also AVX512-BW and AVX512-BF16.
#[derive(Clone, Copy)]
pub struct Avx512(__m512);

/// Rows for columns. (Written plainly it is moved one number at a time.)
#[inline(always)]
pub fn transpose(rows: [[f32; 4]; 4]) -> [[f32; 4]; 4] {
    // SAFETY: see the module's head; each row, and each column, is an array of four.
    unsafe {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| _mm_loadu_ps(rows[i].as_ptr()));
        let (ab, cd) = (_mm_unpacklo_ps(a, b), _mm_unpacklo_ps(c, d));
        let (ab_high, cd_high) = (_mm_unpackhi_ps(a, b), _mm_unpackhi_ps(c, d));
        let mut columns = [[0.0; 4]; 4];
        _mm_storeu_ps(columns[0].as_mut_ptr(), _mm_movelh_ps(ab, cd));
        _mm_storeu_ps(columns[1].as_mut_ptr(), _mm_movehl_ps(cd, ab));
        _mm_storeu_ps(columns[2].as_mut_ptr(), _mm_movelh_ps(ab_high, cd_high));
        _mm_storeu_ps(columns[3].as_mut_ptr(), _mm_movehl_ps(cd_high, ab_high));
        columns
    }
}

/// All four quarters through one expression.
macro_rules! quarters {
    ($i:ident => $value:expr) => {{
        let quarter = |$i: usize| {
            // SAFETY: see the module's head; what is read lies in an array of sixteen.
            #[allow(unused_unsafe, reason = "what needs no more than SSE2 is safe, but for pointers")]
            unsafe {
                $value
            }
        };
        Sse2([quarter(0), quarter(1), quarter(2), quarter(3)])
    }};
}

impl Lanes for Sse2 {
    // Eight registers of sums, four of the right side, the rest for the left side and products.
    const TILE: [usize; 2] = [2, 1];

    #[inline(always)]
    fn splat(x: f32) -> Sse2 {
        quarters!(_i => _mm_set1_ps(x))
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Sse2 {
        quarters!(i => _mm_loadu_ps(from.as_ptr().add(4 * i)))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        for i in 0..4 {
            // SAFETY: see the module's head; the quarter lies in the array.
            unsafe { _mm_storeu_ps(to.as_mut_ptr().add(4 * i), self.0[i]) }
        }
    }
    #[inline(always)]
    fn add(self, other: Sse2) -> Sse2 {
        quarters!(i => _mm_add_ps(self.0[i], other.0[i]))
    }
    #[inline(always)]
    fn sub(self, other: Sse2) -> Sse2 {
        quarters!(i => _mm_sub_ps(self.0[i], other.0[i]))
    }
    #[inline(always)]
    fn mul(self, other: Sse2) -> Sse2 {
        quarters!(i => _mm_mul_ps(self.0[i], other.0[i]))
    }
    #[inline(always)]
    fn div(self, other: Sse2) -> Sse2 {
        quarters!(i => _mm_div_ps(self.0[i], other.0[i]))
    }
    #[inline(always)]
    fn sqrt(self) -> Sse2 {
        quarters!(i => _mm_sqrt_ps(self.0[i]))
    }
    #[inline(always)]
    fn mul_add(self, factor: Sse2, addend: Sse2) -> Sse2 {
        quarters!(i => _mm_add_ps(_mm_mul_ps(self.0[i], factor.0[i]), addend.0[i]))
    }
    #[inline(always)]
    fn if_less(self, other: Sse2, yes: Sse2, no: Sse2) -> Sse2 {
        quarters!(i => {
            let less = _mm_cmplt_ps(self.0[i], other.0[i]);
            _mm_or_ps(_mm_and_ps(less, yes.0[i]), _mm_andnot_ps(less, no.0[i]))
        })
    }
    #[inline(always)]
    fn power_of_two(self) -> Sse2 {
        quarters!(i => {
            let exponent = _mm_add_epi32(_mm_castps_si128(self.0[i]), _mm_set1_epi32(127));
            _mm_castsi128_ps(_mm_slli_epi32::<23>(exponent))
        })
    }
    #[inline(always)]
    fn max(self, other: Sse2) -> Sse2 {
        quarters!(i => _mm_max_ps(self.0[i], other.0[i]))
    }
    #[inline(always)]
    fn min(self, other: Sse2) -> Sse2 {
        quarters!(i => _mm_min_ps(self.0[i], other.0[i]))
    }
}

/// Both halves through one intrinsic.
macro_rules! halves {
    ($op:ident, $($operand:expr),+) => {
        // SAFETY: see the module's head.
        unsafe { Avx2($op($($operand.0),+), $op($($operand.1),+)) }
    };
}

impl Lanes for Avx2 {
    // Twelve registers of sums, two of the right side, one or two of the left: all sixteen.
    const TILE: [usize; 2] = [6, 1];

    #[inline(always)]
    fn prefetch(from: &[f32], at: usize) {
        // SAFETY: an address is only looked at, whatever it is.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(at).cast()) }
    }

    #[inline(always)]
    fn splat(x: f32) -> Avx2 {
        // SAFETY: see the module's head.
        unsafe { Avx2(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Avx2 {
        let from = from.as_ptr();
        // SAFETY: see the module's head; both halves lie in the array, and need no alignment.
        unsafe { Avx2(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        let to = to.as_mut_ptr();
        // SAFETY: see the module's head; both halves lie in the array, and need no alignment.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }
    #[inline(always)]
    fn add(self, other: Avx2) -> Avx2 {
        halves!(_mm256_add_ps, self, other)
    }
    #[inline(always)]
    fn sub(self, other: Avx2) -> Avx2 {
        halves!(_mm256_sub_ps, self, other)
    }
    #[inline(always)]
    fn mul(self, other: Avx2) -> Avx2 {
        halves!(_mm256_mul_ps, self, other)
    }
    #[inline(always)]
    fn div(self, other: Avx2) -> Avx2 {
        halves!(_mm256_div_ps, self, other)
    }
    #[inline(always)]
    fn sqrt(self) -> Avx2 {
        halves!(_mm256_sqrt_ps, self)
    }
    #[inline(always)]
    fn mul_add(self, factor: Avx2, addend: Avx2) -> Avx2 {
        halves!(_mm256_fmadd_ps, self, factor, addend)
    }
    #[inline(always)]
    fn if_less(self, other: Avx2, yes: Avx2, no: Avx2) -> Avx2 {
        // SAFETY: see the module's head.
        let less = unsafe {
            Avx2(_mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0), _mm256_cmp_ps::<_CMP_LT_OQ>(self.1, other.1))
        };
        halves!(_mm256_blendv_ps, no, yes, less)
    }
    #[inline(always)]
    fn power_of_two(self) -> Avx2 {
        #[inline(always)]
        fn half(x: __m256) -> __m256 {
            // SAFETY: see the module's head.
            unsafe {
                let exponent = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
            }
        }
        Avx2(half(self.0), half(self.1))
    }

    #[inline(always)]
    fn max(self, other: Avx2) -> Avx2 {
        halves!(_mm256_max_ps, self, other)
    }
    #[inline(always)]
    fn min(self, other: Avx2) -> Avx2 {
        halves!(_mm256_min_ps, self, other)
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see the module's head.
        unsafe {
            let eight = _mm256_add_ps(self.0, self.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn highest(self) -> f32 {
        // SAFETY: see the module's head.
        unsafe {
            let eight = _mm256_max_ps(self.1, self.0);
            let four = _mm_max_ps(_mm256_extractf128_ps::<1>(eight), _mm256_castps256_ps128(eight));
            let two = _mm_max_ps(_mm_movehl_ps(four, four), four);
            _mm_cvtss_f32(_mm_max_ss(_mm_shuffle_ps::<1>(two, two), two))
        }
    }
}

/// One intrinsic.
macro_rules! whole {
    ($op:ident, $($operand:expr),+) => {
        // SAFETY: see the module's head.
        unsafe { Avx512($op($($operand.0),+)) }
    };
}

impl Lanes for Avx512 {
    // 24 registers of sums, two of the right side, the rest for the left side. Six rows alone wait for their own sums:
    // 114 of 150 GFLOP/s.
    const TILE: [usize; 2] = [12, 2];

    #[inline(always)]
    fn prefetch(from: &[f32], at: usize) {
        // SAFETY: an address is only looked at, whatever it is.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(at).cast()) }
    }

    #[inline(always)]
    fn splat(x: f32) -> Avx512 {
        // SAFETY: see the module's head.
        unsafe { Avx512(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Avx512 {
        // SAFETY: see the module's head; no alignment is needed.
        unsafe { Avx512(_mm512_loadu_ps(from.as_ptr())) }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: see the module's head; no alignment is needed.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn add(self, other: Avx512) -> Avx512 {
        whole!(_mm512_add_ps, self, other)
    }
    #[inline(always)]
    fn sub(self, other: Avx512) -> Avx512 {
        whole!(_mm512_sub_ps, self, other)
    }
    #[inline(always)]
    fn mul(self, other: Avx512) -> Avx512 {
        whole!(_mm512_mul_ps, self, other)
    }
    #[inline(always)]
    fn div(self, other: Avx512) -> Avx512 {
        whole!(_mm512_div_ps, self, other)
    }
    #[inline(always)]
    fn sqrt(self) -> Avx512 {
        whole!(_mm512_sqrt_ps, self)
    }
    #[inline(always)]
    fn mul_add(self, factor: Avx512, addend: Avx512) -> Avx512 {
        whole!(_mm512_fmadd_ps, self, factor, addend)
    }
    #[inline(always)]
    fn if_less(self, other: Avx512, yes: Avx512, no: Avx512) -> Avx512 {
        // SAFETY: see the module's head.
        unsafe {
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0);
            Avx512(_mm512_mask_blend_ps(less, no.0, yes.0))
        }
    }
    #[inline(always)]
    fn power_of_two(self) -> Avx512 {
        // SAFETY: see the module's head.
        unsafe {
            let exponent = _mm512_add_epi32(_mm512_castps_si512(self.0), _mm512_set1_epi32(127));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent)))
        }
    }
}

impl PairLanes for Avx512 {
    #[inline(always)]
    fn pair(even: Avx512, odd: Avx512) -> Avx512 {
        const TURN_BY_TURN: [i16; 2 * LANES] = {
            let mut order = [0; 2 * LANES];
            let mut lane = 0;
            while lane < LANES {
                order[2 * lane] = lane as i16;
                order[2 * lane + 1] = (LANES + lane) as i16;
                lane += 1;
            }
            order
        };
        // SAFETY: see the module's head; the order is 64 bytes.
        unsafe {
            let order = _mm512_loadu_epi16(TURN_BY_TURN.as_ptr());
            let halves = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd.0, even.0));
            Avx512(_mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves)))
        }
    }
    #[inline(always)]
    fn pair_neighbours(first: Avx512, second: Avx512) -> Avx512 {
        // SAFETY: see the module's head.
        unsafe { Avx512(transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second.0, first.0))) }
    }
    #[inline(always)]
    fn mul_add_pairs(self, factor: Avx512, addend: Avx512) -> Avx512 {
        // SAFETY: see the module's head.
        unsafe {
            let left = transmute::<__m512, __m512bh>(self.0);
            let right = transmute::<__m512, __m512bh>(factor.0);
            Avx512(_mm512_dpbf16_ps(addend.0, left, right))
        }
    }
    #[inline(always)]
    fn transpose(rows: [Avx512; LANES]) -> [Avx512; LANES] {
        // (No closures here: one that is not inlined would be compiled without the instructions.) Of pairs of rows, then of fours: in each quarter of a vector its four columns. Then quarters change places.
        let (mut twos, mut fours) = (rows, rows);
        // SAFETY: see the module's head.
        unsafe {
            for i in (0..LANES).step_by(2) {
                twos[i].0 = _mm512_unpacklo_ps(rows[i].0, rows[i + 1].0);
                twos[i + 1].0 = _mm512_unpackhi_ps(rows[i].0, rows[i + 1].0);
            }
            for i in (0..LANES).step_by(4) {
                let (a, b) = (_mm512_castps_pd(twos[i].0), _mm512_castps_pd(twos[i + 1].0));
                let (c, d) = (_mm512_castps_pd(twos[i + 2].0), _mm512_castps_pd(twos[i + 3].0));
                fours[i].0 = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
                fours[i + 1].0 = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
                fours[i + 2].0 = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
                fours[i + 3].0 = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
            }
            let mut columns = rows;
            for i in 0..4 {
                let (a, b, c, d) = (fours[i].0, fours[i + 4].0, fours[i + 8].0, fours[i + 12].0);
                let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
                let (even_, odd_) = (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xdd>(c, d));
                columns[i].0 = _mm512_shuffle_f32x4::<0x88>(even, even_);
                columns[i + 4].0 = _mm512_shuffle_f32x4::<0x88>(odd, odd_);
                columns[i + 8].0 = _mm512_shuffle_f32x4::<0xdd>(even, even_);
                columns[i + 12].0 = _mm512_shuffle_f32x4::<0xdd>(odd, odd_);
            }
            columns
        }
    }
    #[inline(always)]
    fn store_lanes<const COUNT: usize>(self, first: usize, to: &mut [f32; COUNT]) {
        assert!(first + COUNT <= LANES);
        let lanes = ((1u32 << COUNT) - 1) << first;
        // SAFETY: see the module's head; lanes that are not stored are not touched, so only the array is written.
        unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr().wrapping_sub(first), lanes as __mmask16, self.0) }
    }
}
