//! Activations and their slopes.

use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use super::maths::{erf, exp};
use crate::engine::Activation;

/// Rows of so many elements that one task takes.
pub fn rows(width: usize) -> usize {
    (16 * 1024_usize).div_ceil(width.max(1))
}

/// `out = activation(x)`, rows of `width`; SwiGLU takes two for one.
pub struct Activate<'a> {
    pub activation: Activation,
    pub x: &'a [f32],
    pub out: &'a mut [f32],
    pub width: usize,
}

impl Kernel for Activate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let pairs = self.x.chunks(LANES).zip(self.out.chunks_mut(LANES));
        match self.activation {
            Activation::Identity => pairs.for_each(|(x, out)| out.copy_from_slice(x)),
            Activation::SwiGlu => gate::<V>(self.x, self.out, self.width),
            Activation::Gelu => {
                for (x, out) in pairs {
                    let x = V::load_some(x, 0.0);
                    x.mul(normal_share(x)).store_some(out);
                }
            }
            Activation::GeluNew => {
                for (x, out) in pairs {
                    let x = V::load_some(x, 0.0);
                    x.mul(logistic_share(x)).store_some(out);
                }
            }
        }
    }
}

/// `d *= slope of the activation at x`, of those that take an element for an element; see [`GateBackward`].
pub struct MultiplySlope<'a> {
    pub activation: Activation,
    pub x: &'a [f32],
    pub d: &'a mut [f32],
}

impl Kernel for MultiplySlope<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let pairs = self.x.chunks(LANES).zip(self.d.chunks_mut(LANES));
        match self.activation {
            Activation::Identity | Activation::SwiGlu => {}
            Activation::Gelu => {
                let (half, height) = (V::splat(-0.5), V::splat(0.398_942_3));
                for (x, d) in pairs {
                    let x = V::load_some(x, 0.0);
                    let density = height.mul(exp(x.mul(x).mul(half)));
                    let slope = x.mul_add(density, normal_share(x));
                    V::load_some(d, 0.0).mul(slope).store_some(d);
                }
            }
            Activation::GeluNew => {
                for (x, d) in pairs {
                    let x = V::load_some(x, 0.0);
                    let share = logistic_share(x);
                    // Further out the share does not change any more, and x³ would not be finite.
                    let x = x.min(V::splat(30.0)).max(V::splat(-30.0));
                    // d/dx of the share's argument, 2·√(2/π)·(1 + 3·0.044715·x²).
                    let inner = x.mul(x).mul_add(V::splat(3.0 * CUBIC * TWICE_ROOT), V::splat(TWICE_ROOT));
                    let change = share.mul(V::splat(1.0).sub(share)).mul(inner);
                    V::load_some(d, 0.0).mul(x.mul_add(change, share)).store_some(d);
                }
            }
        }
    }
}

/// SwiGLU of rows: `out[n,f] = silu(x[n,..f])·x[n,f..]`.
#[inline(always)]
fn gate<V: Lanes>(x: &[f32], out: &mut [f32], width: usize) {
    for (x, out) in x.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
        let (gate, up) = x.split_at(width);
        let both = gate.chunks(LANES).zip(up.chunks(LANES));
        for ((gate, up), out) in both.zip(out.chunks_mut(LANES)) {
            let gate = V::load_some(gate, 0.0);
            gate.mul(sigmoid(gate)).mul(V::load_some(up, 0.0)).store_some(out);
        }
    }
}

/// `d_x`, given the gradient `d` of what SwiGLU gives.
pub struct GateBackward<'a> {
    pub x: &'a [f32],
    pub d: &'a [f32],
    pub d_x: &'a mut [f32],
    pub width: usize,
}

impl Kernel for GateBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let width = self.width;
        let rows = self.x.chunks_exact(2 * width).zip(self.d.chunks_exact(width));
        for ((x, d), d_x) in rows.zip(self.d_x.chunks_exact_mut(2 * width)) {
            let (gate, up) = x.split_at(width);
            let (d_gate, d_up) = d_x.split_at_mut(width);
            let operands = gate.chunks(LANES).zip(up.chunks(LANES)).zip(d.chunks(LANES));
            let results = d_gate.chunks_mut(LANES).zip(d_up.chunks_mut(LANES));
            for (((gate, up), d), (d_gate, d_up)) in operands.zip(results) {
                let (gate, up) = (V::load_some(gate, 0.0), V::load_some(up, 0.0));
                let (d, share) = (V::load_some(d, 0.0), sigmoid(gate));
                let active = gate.mul(share);
                // The slope of x·σ(x): σ·(1 + x·(1 − σ)).
                let slope = active.mul_add(V::splat(1.0).sub(share), share);
                d.mul(up).mul(slope).store_some(d_gate);
                d.mul(active).store_some(d_up);
            }
        }
    }
}

#[inline(always)]
fn sigmoid<V: Lanes>(x: V) -> V {
    V::splat(1.0).div(V::splat(1.0).add(exp(V::zero().sub(x))))
}

/// 2·√(2/π).
const TWICE_ROOT: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;

/// ½·(1 + erf(x/√2)).
#[inline(always)]
fn normal_share<V: Lanes>(x: V) -> V {
    erf(x.mul(V::splat(std::f32::consts::FRAC_1_SQRT_2))).mul_add(V::splat(0.5), V::splat(0.5))
}

/// ½·(1 + tanh u) of GPT-2's GELU, which is 1 ÷ (1 + e^(−2u)).
#[inline(always)]
fn logistic_share<V: Lanes>(x: V) -> V {
    let negative = x.mul(x).mul_add(V::splat(-CUBIC * TWICE_ROOT), V::splat(-TWICE_ROOT)).mul(x);
    V::splat(1.0).div(V::splat(1.0).add(exp(negative)))
}
