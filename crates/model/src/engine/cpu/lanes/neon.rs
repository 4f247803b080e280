//! Sixteen f32 in four registers of NEON, which every aarch64 processor has.
#![allow(unsafe_code, reason = "an intrinsic may be called only where the processor has its instruction")]

use std::arch::aarch64::*;

use super::{LANES, Lanes};

/// NEON.
#[derive(Clone, Copy)]
pub struct Neon([float32x4_t; 4]);

/// All four quarters through one expression.
macro_rules! quarters {
    ($i:ident => $value:expr) => {{
        let quarter = |$i: usize| {
            // SAFETY: NEON is part of aarch64, and what is read and written lies in an array of sixteen.
            #[allow(unused_unsafe, reason = "some intrinsics are safe where NEON is always there")]
            unsafe {
                $value
            }
        };
        Neon([quarter(0), quarter(1), quarter(2), quarter(3)])
    }};
}

impl Lanes for Neon {
    // 24 registers of sums, four of the right side, the rest for the left.
    const TILE: [usize; 2] = [6, 1];

    #[inline(always)]
    fn splat(x: f32) -> Neon {
        quarters!(_i => vdupq_n_f32(x))
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Neon {
        quarters!(i => vld1q_f32(from.as_ptr().add(4 * i)))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        for i in 0..4 {
            // SAFETY: NEON is part of aarch64, and the quarter lies in the array.
            unsafe { vst1q_f32(to.as_mut_ptr().add(4 * i), self.0[i]) }
        }
    }
    #[inline(always)]
    fn add(self, other: Neon) -> Neon {
        quarters!(i => vaddq_f32(self.0[i], other.0[i]))
    }
    #[inline(always)]
    fn sub(self, other: Neon) -> Neon {
        quarters!(i => vsubq_f32(self.0[i], other.0[i]))
    }
    #[inline(always)]
    fn mul(self, other: Neon) -> Neon {
        quarters!(i => vmulq_f32(self.0[i], other.0[i]))
    }
    #[inline(always)]
    fn div(self, other: Neon) -> Neon {
        quarters!(i => vdivq_f32(self.0[i], other.0[i]))
    }
    #[inline(always)]
    fn sqrt(self) -> Neon {
        quarters!(i => vsqrtq_f32(self.0[i]))
    }
    #[inline(always)]
    fn mul_add(self, factor: Neon, addend: Neon) -> Neon {
        quarters!(i => vfmaq_f32(addend.0[i], self.0[i], factor.0[i]))
    }
    #[inline(always)]
    fn if_less(self, other: Neon, yes: Neon, no: Neon) -> Neon {
        quarters!(i => vbslq_f32(vcltq_f32(self.0[i], other.0[i]), yes.0[i], no.0[i]))
    }
    #[inline(always)]
    fn power_of_two(self) -> Neon {
        quarters!(i => vreinterpretq_f32_u32(vshlq_n_u32::<23>(vaddq_u32(
            vreinterpretq_u32_f32(self.0[i]),
            vdupq_n_u32(127),
        ))))
    }
}
