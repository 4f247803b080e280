//! The two precisions of the naive engine.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use crate::engine::Dtype;
use crate::engine::heap::Plain;

/// A floating-point number the naive engine can compute with: f32 or f64.
///
/// Transcendental functions come from the `libm` crate: the system's differ from one platform to the next, and
/// the judge of all engines must say the same everywhere.
pub trait Real:
    Plain
    + Debug
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
{
    /// How it is stored.
    const DTYPE: Dtype;
    /// 1.
    const ONE: Self;
    /// The nearest representable number.
    fn of(value: f64) -> Self;
    /// Exact.
    fn to_f64(self) -> f64;
    /// eˣ.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Hyperbolic tangent, to the precision of 1: `libm`'s is exact near 0 too, and three times slower.
    fn tanh(self) -> Self {
        let two = Self::ONE + Self::ONE;
        Self::ONE - two / ((two * self).exp() + Self::ONE)
    }
    /// Error function.
    fn erf(self) -> Self;
    /// Square root, correctly rounded.
    fn sqrt(self) -> Self;
    /// From little-endian bytes, as many as the type has.
    fn from_bytes(bytes: &[u8]) -> Self;
    /// Appends little-endian bytes.
    fn push_bytes(self, bytes: &mut Vec<u8>);
}

macro_rules! real {
    ($type:ident, $dtype:ident, $exp:ident, $ln:ident, $erf:ident) => {
        impl Real for $type {
            const DTYPE: Dtype = Dtype::$dtype;
            const ONE: Self = 1.0;
            fn of(value: f64) -> Self {
                value as $type
            }
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            fn exp(self) -> Self {
                libm::$exp(self)
            }
            fn ln(self) -> Self {
                libm::$ln(self)
            }
            fn erf(self) -> Self {
                libm::$erf(self)
            }
            fn sqrt(self) -> Self {
                $type::sqrt(self)
            }
            fn from_bytes(bytes: &[u8]) -> Self {
                let mut array = [0; size_of::<$type>()];
                array.copy_from_slice(bytes);
                $type::from_le_bytes(array)
            }
            fn push_bytes(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }
        }
    };
}

real!(f32, F32, expf, logf, erff);
real!(f64, F64, exp, log, erf);
