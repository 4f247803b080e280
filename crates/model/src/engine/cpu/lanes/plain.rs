//! Sixteen f32 in an array, for processors whose instructions are not known here.

use super::{LANES, Lanes};

/// The compiler makes of it what it can.
#[derive(Clone, Copy)]
pub struct Plain([f32; LANES]);

impl Plain {
    #[inline(always)]
    fn with(self, other: Plain, f: impl Fn(f32, f32) -> f32) -> Plain {
        let mut out = self.0;
        for i in 0..LANES {
            out[i] = f(self.0[i], other.0[i]);
        }
        Plain(out)
    }
}

impl Lanes for Plain {
    const TILE: [usize; 2] = [2, 1];

    #[inline(always)]
    fn splat(x: f32) -> Plain {
        Plain([x; LANES])
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Plain {
        Plain(*from)
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }
    #[inline(always)]
    fn add(self, other: Plain) -> Plain {
        self.with(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Plain) -> Plain {
        self.with(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Plain) -> Plain {
        self.with(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Plain) -> Plain {
        self.with(other, |a, b| a / b)
    }
    #[inline(always)]
    fn sqrt(self) -> Plain {
        self.with(self, |a, _| a.sqrt())
    }
    #[inline(always)]
    fn mul_add(self, factor: Plain, addend: Plain) -> Plain {
        self.mul(factor).add(addend)
    }
    #[inline(always)]
    fn if_less(self, other: Plain, yes: Plain, no: Plain) -> Plain {
        let mut out = no.0;
        for i in 0..LANES {
            out[i] = if self.0[i] < other.0[i] { yes.0[i] } else { no.0[i] };
        }
        Plain(out)
    }
    #[inline(always)]
    fn power_of_two(self) -> Plain {
        self.with(self, |a, _| f32::from_bits(a.to_bits().wrapping_add(127) << 23))
    }
}
