//! Which instructions a kernel is compiled for, chosen when the program runs.

use super::lanes::{Baseline, Lanes, PairLanes};

/// A path through the processor's instructions. What a path computes depends on nothing else of the machine: not on
/// the size of its caches, nor on the number of its cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Path);

/// Private, so that there is no path but those that [`Isa::available`] has found in the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// What every processor of the kind has: SSE2 on x86-64, NEON on aarch64.
    Baseline,
    /// AVX2 with FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512F.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// A piece of work, written once for all instruction sets.
pub trait Kernel {
    /// What comes out.
    type Output;
    /// Does it. `inline(always)`, as everything it calls that has to do with lanes.
    fn run<V: Lanes>(self) -> Self::Output;
}

/// The instructions that multiply pairs of bf16, beside those of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pairs(PairPath);

/// Private, so that there are none but those that [`Pairs::beside`] has found in the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PairPath {
    /// AVX512-BF16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
}

/// A piece of work on pairs of bf16.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "there is nothing to run it with"))]
pub trait PairKernel {
    /// What comes out.
    type Output;
    /// Does it; `inline(always)`, see [`Kernel::run`].
    fn run<V: PairLanes>(self) -> Self::Output;
}

/// The environment variable that asks for one path.
const VARIABLE: &str = "STARLING_ISA";

impl Isa {
    /// The paths that this processor has, slowest first.
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut, reason = "not every kind of processor has more")]
        let mut list = vec![Isa(Path::Baseline)];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                list.push(Isa(Path::Avx2));
                if is_x86_feature_detected!("avx512f") {
                    list.push(Isa(Path::Avx512));
                }
            }
        }
        list
    }

    /// The fastest path that this processor has, or the one that the environment asks for.
    pub fn chosen() -> Result<Isa, IsaError> {
        let available = Isa::available();
        let Some(asked) = std::env::var_os(VARIABLE) else { return Ok(available[available.len() - 1]) };
        let found = available.iter().copied().find(|isa| asked == isa.name());
        let names = || available.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ");
        found.ok_or_else(|| IsaError { asked: asked.to_string_lossy().into_owned(), available: names() })
    }

    /// As the environment names it.
    pub fn name(self) -> &'static str {
        match self.0 {
            Path::Baseline if cfg!(target_arch = "aarch64") => "neon",
            Path::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => "avx512",
        }
    }

    /// Runs a kernel on this path.
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Path::Baseline => kernel.run::<Baseline>(),
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 | Path::Avx512 => on::x86(self.0, kernel),
        }
    }
}

impl Pairs {
    /// Those that this processor has beside a path.
    pub fn beside(isa: Isa) -> Result<Pairs, PairsError> {
        #[cfg(target_arch = "x86_64")]
        if isa.0 == Path::Avx512
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512bw")
        {
            return Ok(Pairs(PairPath::Avx512Bf16));
        }
        let is_asked = std::env::var_os(VARIABLE).is_some();
        let asked = if is_asked { ", since STARLING_ISA asks for it: unset that first" } else { "" };
        Err(PairsError { path: isa.name(), asked })
    }

    /// Runs a kernel with them.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(unused_variables, reason = "there are none to run it with")
    )]
    pub fn run<K: PairKernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            PairPath::Avx512Bf16 => on::pairs(self, kernel),
        }
    }
}

/// Where code for other instructions than the base ones is entered.
#[cfg(target_arch = "x86_64")]
mod on {
    #![allow(unsafe_code, reason = "the compiler cannot know what the processor has")]

    use super::{Kernel, PairKernel, Pairs, Path};
    use crate::engine::cpu::lanes::x86::{Avx2, Avx512};

    pub fn x86<K: Kernel>(path: Path, kernel: K) -> K::Output {
        // SAFETY: a path is offered by `Isa::available` alone, which has found its instructions in the processor.
        unsafe { if path == Path::Avx512 { avx512(kernel) } else { avx2(kernel) } }
    }

    pub fn pairs<K: PairKernel>(_there: Pairs, kernel: K) -> K::Output {
        // SAFETY: pairs are offered by `Pairs::beside` alone, which has found their instructions in the processor.
        unsafe { avx512_bf16(kernel) }
    }

    #[target_feature(enable = "avx2,fma")]
    fn avx2<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Avx2>()
    }

    #[target_feature(enable = "avx512f,avx2,fma")]
    fn avx512<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Avx512>()
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx2,fma")]
    fn avx512_bf16<K: PairKernel>(kernel: K) -> K::Output {
        kernel.run::<Avx512>()
    }
}

/// The environment asks for instructions that are not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{VARIABLE} asks for {asked:?}, which this processor does not have; it has {available}")]
pub struct IsaError {
    asked: String,
    available: String,
}

/// The run asks for bf16, and the processor cannot multiply it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the run asks for train.precision = \"bf16\", which needs a processor with AVX512-BF16 (AMD since Zen 4, Xeon since Sapphire \
     Rapids); here is no more than {path}{asked}. Every peer of the run has to have it: join with another machine, or train \
     with train.precision = \"f32\""
)]
pub struct PairsError {
    path: &'static str,
    /// If somebody asked for that path, what undoes it.
    asked: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_beside_a_path_that_does_not_have_it_is_refused_with_what_to_do() {
        let baseline = Isa(Path::Baseline);
        let told = Pairs::beside(baseline).unwrap_err().to_string();
        assert!(told.contains(baseline.name()) && told.contains("train.precision = \"f32\""), "{told}");
    }
}
