//! What the cores can do at the most: multiplications and additions that wait for nothing, neither memory nor each other.

use std::hint::black_box;
use std::time::Instant;

use super::isa::{Isa, Kernel, PairKernel, Pairs};
use super::lanes::{LANES, Lanes, PairLanes};
use super::product::{Held, Numbers, Twos};

const TURNS: usize = 20_000;
const TRIES: usize = 5;

/// Operations a second of this thread, on single numbers or on pairs of bf16: the best of some tries.
pub fn of_thread(isa: Isa, pairs: Option<Pairs>) -> f64 {
    let one_try = |_| {
        let began = Instant::now();
        let multiply = Multiply(black_box(0.999));
        let operations = match pairs {
            Some(pairs) => pairs.run(multiply),
            None => isa.run(multiply),
        };
        operations as f64 / began.elapsed().as_secs_f64().max(1e-9)
    };
    (0..TRIES).map(one_try).fold(0.0, f64::max)
}

struct Multiply(f32);

impl Kernel for Multiply {
    /// Operations.
    type Output = usize;

    #[inline(always)]
    fn run<V: Lanes>(self) -> usize {
        match V::TILE {
            [12, 2] => turns::<V, Numbers, 24>(self.0),
            [6, 1] => turns::<V, Numbers, 6>(self.0),
            _ => turns::<V, Numbers, 2>(self.0),
        }
    }
}

impl PairKernel for Multiply {
    type Output = usize;

    #[inline(always)]
    fn run<V: PairLanes>(self) -> usize {
        2 * turns::<V, Twos, 24>(self.0)
    }
}

#[inline(always)]
fn turns<V: Lanes, H: Held<V>, const AT_ONCE: usize>(factor: f32) -> usize {
    let factor = V::splat(factor);
    let mut sums = [factor; AT_ONCE];
    for _ in 0..TURNS {
        // No closure: one that is not inlined would be compiled without this path's instructions.
        for sum in &mut sums {
            *sum = H::mul_add(factor, factor, *sum);
        }
    }
    black_box(sums.map(Lanes::sum));
    2 * TURNS * AT_ONCE * LANES
}
