//! Functions beyond + − × ÷ √, sixteen at a time: polynomials, so that their bits are ours on every machine.

use super::lanes::{LANES, Lanes};

/// 1.5·2²³: a number added to it is rounded to a whole one, which then stands in the sum's lowest bits.
const ROUND: f32 = 12_582_912.0;
/// Below, eˣ is no normal number any more, and 0 here.
const LOWEST: f32 = -87.3;
/// Above, it stays what it is here: 2.4e38.
const HIGHEST: f32 = 88.37;

/// eˣ to 2 units in the last place; 0 below −87.3, the same from 88.37 on. What is no number stays none.
#[inline(always)]
pub fn exp<V: Lanes>(x: V) -> V {
    let within = V::splat(LOWEST).max(V::splat(HIGHEST).min(x));
    let rounded = within.mul_add(V::splat(std::f32::consts::LOG2_E), V::splat(ROUND));
    let whole = rounded.sub(V::splat(ROUND));
    // ln 2 in two parts, the first so short that its product is exact.
    let rest = whole.mul_add(V::splat(-0.693_359_4), within);
    let rest = whole.mul_add(V::splat(2.121_944_4e-4), rest);
    // Cephes' polynomial for |x| < ln 2 / 2.
    let mut p = V::splat(1.987_569_1e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = p.mul_add(rest, V::splat(c));
    }
    let power = p.mul_add(rest.mul(rest), rest).add(V::splat(1.0)).mul(rounded.power_of_two());
    x.if_less(V::splat(LOWEST), V::zero(), power)
}

/// The error function, to 3 units in the last place: a rational function, constant beyond ±3.9 (it is ±1 there).
#[inline(always)]
pub fn erf<V: Lanes>(x: V) -> V {
    let x = V::splat(-3.9).max(V::splat(3.9).min(x));
    let square = x.mul(x);
    let mut above = V::splat(-2.726_142e-10);
    for c in [2.770_681_4e-8, -2.101_024e-6, -5.692_506_4e-5, -7.349_906_3e-4, -2.954_6e-3, -1.609_603_3e-2] {
        above = above.mul_add(square, V::splat(c));
    }
    let mut below = V::splat(-1.456_607_2e-5);
    for c in [-2.133_740_5e-4, -1.682_827e-3, -7.373_329e-3, -1.426_473_9e-2] {
        below = below.mul_add(square, V::splat(c));
    }
    x.mul(above).div(below)
}

/// eˣ of one number, by the same polynomial.
#[inline(always)]
pub fn exp_of<V: Lanes>(x: f32) -> f32 {
    let all: [f32; LANES] = exp(V::splat(x)).to_array();
    all[0]
}

#[cfg(test)]
mod tests {
    use super::super::isa::{Isa, Kernel};
    use super::*;

    struct Both<'a>(&'a [f32; LANES]);
    impl Kernel for Both<'_> {
        type Output = ([f32; LANES], [f32; LANES]);
        #[inline(always)]
        fn run<V: Lanes>(self) -> Self::Output {
            let x = V::load(self.0);
            (exp(x).to_array(), erf(x).to_array())
        }
    }

    #[test]
    fn exp_and_erf_are_those_of_libm() {
        for isa in Isa::available() {
            for block in -6000..6000 {
                let x: [f32; LANES] = std::array::from_fn(|i| (block * 16 + i as i32) as f32 * 9e-4);
                let (exps, erfs) = isa.run(Both(&x));
                for i in 0..LANES {
                    let (e, f) = (libm::exp(x[i].into()), libm::erf(x[i].into()));
                    assert!(
                        (f64::from(exps[i]) / e - 1.0).abs() < 2.5e-7,
                        "{isa:?}: exp {}: {}",
                        x[i],
                        exps[i]
                    );
                    assert!(
                        (f64::from(erfs[i]) - f).abs() <= 4e-7 * f.abs(),
                        "{isa:?}: erf {}: {}",
                        x[i],
                        erfs[i]
                    );
                }
            }
        }
    }

    #[test]
    fn exp_ends_at_0_and_stays_finite_and_hides_no_nan() {
        for isa in Isa::available() {
            let mut x = [f32::NEG_INFINITY; LANES];
            (x[1], x[2], x[3], x[4]) = (-200.0, f32::NAN, 1e30, 0.0);
            let (exps, _) = isa.run(Both(&x));
            assert_eq!((exps[0], exps[1], exps[4]), (0.0, 0.0, 1.0), "{isa:?}");
            assert!(exps[2].is_nan() && exps[3] > 1e38 && exps[3].is_finite(), "{isa:?}: {exps:?}");
        }
    }
}
