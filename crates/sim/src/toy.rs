//! Exact toy arithmetic in the place of tensors: hashes as values.
//!
//! Every value depends on all that a real one would depend on: an activation on the input and the weights of
//! its version, a gradient on the activation and on what came back, a sum on the order of its terms, a weight on
//! every update before it. So a microbatch that is lost, doubled, folded in another order or computed with a
//! stale weight changes every later weight, and equality with the one-process result is a proof, not a hope.
//!
//! A sum is one value, and an element of the vector that it stands for is that value mixed with the element's
//! number: so the vector is whole only if every part of it came from the same sum, and adding up is cheap.

use starling_swarm::ids::*;
use starling_swarm::journal::{JournalState, Record};
use starling_swarm::lots::{Lots, TreeNode};
use starling_swarm::spec::{Reduce, Sync};

use crate::rng::{mix, mix2};

/// The gradient of one microbatch in one stage, whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gradient(pub u64);

/// What the arithmetic needs to know of the run.
#[derive(Clone, Copy, Debug)]
pub struct Toy {
    /// The run's seed.
    pub seed: u64,
    /// Stages.
    pub stages: u16,
    /// Lots of a step.
    pub lots: Lots,
    /// How late the weights are.
    pub sync: Sync,
    /// How gradients are added up.
    pub reduce: Reduce,
    /// Elements of a stage's gradient.
    pub elements: u64,
    /// Whether the first stage and the last share parameters.
    pub shares: bool,
    /// A microbatch of which the loss is not finite.
    pub poison: Option<(Step, Microbatch)>,
}

impl Toy {
    /// The weights of a stage at version 0.
    pub fn initial(&self, stage: StageId) -> u64 {
        mix2(mix2(self.seed, 0xA11), stage.0.into())
    }

    /// What enters the first stage.
    pub fn tokens(&self, step: Step, microbatch: Microbatch) -> u64 {
        mix2(mix2(self.seed, step.0), microbatch.0.into())
    }

    /// Forward.
    pub fn forward(&self, weights: u64, input: u64) -> u64 {
        mix2(weights, input)
    }

    /// Backward: the gradient of the input, and that of the weights.
    pub fn backward(&self, weights: u64, input: u64, gradient: u64) -> (u64, Gradient) {
        (mix2(mix2(gradient, weights), input), Gradient(mix2(mix2(input, gradient), weights)))
    }

    /// Whether what a stage computes of a microbatch is finite.
    pub fn is_finite(&self, stage: StageId, step: Step, microbatch: Microbatch) -> bool {
        stage.0 + 1 < self.stages || self.poison != Some((step, microbatch))
    }

    /// The sum of a lot, its terms in the order of microbatches.
    pub fn lot_sum(&self, terms: &[(Microbatch, Gradient)]) -> u64 {
        if terms.is_sorted_by_key(|(microbatch, _)| *microbatch) {
            return terms.iter().fold(0, |sum, (_, gradient)| self.add(sum, gradient.0));
        }
        let mut sorted = terms.to_vec();
        sorted.sort_by_key(|(microbatch, _)| *microbatch);
        self.lot_sum(&sorted)
    }

    /// An element of a sum.
    pub fn element(&self, sum: u64, element: u64) -> u64 {
        mix2(sum, element)
    }

    /// One addition. In `fast` mode its order must not matter, as it does not beyond the last bits of a float.
    pub fn add(&self, left: u64, right: u64) -> u64 {
        match self.reduce {
            Reduce::Exact => mix2(left, right),
            Reduce::Fast => left.wrapping_add(right),
        }
    }

    /// The sum of a part of the tree, from the sums at some nodes that cover it; `None` if one is missing.
    pub fn tree_sum(&self, node: TreeNode, known: &impl Fn(TreeNode) -> Option<u64>) -> Option<u64> {
        if let Some(sum) = known(node) {
            return Some(sum);
        }
        let level = node.level.checked_sub(1)?;
        let left = TreeNode { level, index: node.index * 2 };
        let right = TreeNode { level, index: node.index * 2 + 1 };
        if self.lots.lots_under(right).is_empty() {
            return self.tree_sum(left, known);
        }
        Some(self.add(self.tree_sum(left, known)?, self.tree_sum(right, known)?))
    }

    /// The hash of a reduced gradient.
    pub fn digest(&self, reduced: &[u64]) -> u64 {
        reduced.iter().fold(7, |hash, &element| mix2(hash, element))
    }

    /// Whether a stage shares parameters with others.
    pub fn is_shared(&self, stage: StageId) -> bool {
        self.shares && self.stages > 1 && (stage.0 == 0 || stage.0 + 1 == self.stages)
    }

    /// What a stage has of the gradient of what it shares.
    pub fn uses(&self, digest: u64) -> u64 {
        mix2(digest, 0x5ba)
    }

    /// The sum of that over stages, given in their order.
    pub fn total(&self, uses: impl IntoIterator<Item = u64>) -> u64 {
        uses.into_iter().fold(5, mix2)
    }

    /// All that a stage's update depends on: its own gradient, and the sum of what it shares.
    pub fn with_total(&self, stage: StageId, digest: u64, total: u64) -> u64 {
        if self.is_shared(stage) { mix2(digest, total) } else { digest }
    }

    /// A commit's constants from the stages' digests.
    pub fn constants(&self, step: Step, digests: impl IntoIterator<Item = u64>) -> u64 {
        digests.into_iter().fold(step.0, mix2)
    }

    /// The same with amended settings.
    pub fn amended(&self, constants: u64, settings: Option<&[u8]>) -> u64 {
        let hash = |settings: &[u8]| settings.iter().fold(3, |hash, &byte| mix2(hash, byte.into()));
        settings.map_or(constants, |settings| mix2(constants, hash(settings)))
    }

    /// The update.
    pub fn apply(&self, weights: u64, digest: u64, constants: u64) -> u64 {
        mix(mix2(mix2(weights, digest), constants))
    }
}

/// A hash as a digest, and as a summary.
pub fn told(hash: u64) -> (Digest, Vec<u8>) {
    let mut digest = [0; 32];
    digest[..8].copy_from_slice(&hash.to_le_bytes());
    (digest, hash.to_le_bytes().to_vec())
}

/// The one-process result, computed as far as it is asked for.
#[derive(Clone, Debug)]
pub struct Reference {
    toy: Toy,
    versions: Vec<Vec<u64>>,
    journal: JournalState,
}

impl Reference {
    /// The run at version 0.
    pub fn new(toy: Toy) -> Reference {
        let initial = (0..toy.stages).map(|stage| toy.initial(StageId(stage))).collect();
        Reference { toy, versions: vec![initial], journal: JournalState::default() }
    }

    /// From a step on the run has other settings, or updates that are left out.
    pub fn amend(&mut self, record: &Record) {
        if let Record::Amended(from, _) | Record::LeftOut(_, _, (from, _)) = record {
            self.journal.enter(record);
            self.versions.truncate(from.0 as usize + 1);
        }
    }

    /// The weights of a stage at a version.
    pub fn weights(&mut self, stage: StageId, version: Step) -> u64 {
        while self.versions.len() as u64 <= version.0 {
            self.step();
        }
        self.versions[version.0 as usize][stage.0 as usize]
    }

    fn step(&mut self) {
        let (toy, step) = (self.toy, Step(self.versions.len() as u64 - 1));
        // A step is computed with the weights of a version, and its sum is put onto the newest.
        let weights = &self.versions[toy.sync.weights_of(step).0 as usize];
        let newest = &self.versions[step.0 as usize];
        let is_poisoned = toy.poison.is_some_and(|(poisoned, _)| poisoned == step);
        if is_poisoned || self.journal.left_out.contains(&step) {
            let same = newest.clone();
            return self.versions.push(same);
        }
        let mut terms: Vec<Vec<(Microbatch, Gradient)>> = vec![Vec::new(); toy.stages as usize];
        for microbatch in (0..toy.lots.microbatches).map(Microbatch) {
            let mut inputs = vec![toy.tokens(step, microbatch)];
            for &weight in weights {
                inputs.push(toy.forward(weight, inputs[inputs.len() - 1]));
            }
            let mut back = inputs[inputs.len() - 1];
            for stage in (0..weights.len()).rev() {
                let (before, gradient) = toy.backward(weights[stage], inputs[stage], back);
                terms[stage].push((microbatch, gradient));
                back = before;
            }
        }
        let digests: Vec<u64> = terms.iter().map(|terms| toy.digest(&self.reduce(terms))).collect();
        let stages = || (0..toy.stages).map(StageId).zip(&digests);
        let sharing = || stages().filter(|(stage, _)| toy.is_shared(*stage));
        let total = toy.total(sharing().map(|(_, &digest)| toy.uses(digest)));
        // Every stage that shares tells of the sum.
        let told = digests.iter().copied().chain(sharing().map(|_| total));
        let constants = toy.amended(toy.constants(step, told), self.journal.amendment(step));
        let apply = |(&weights, (stage, &digest))| {
            toy.apply(weights, toy.with_total(stage, digest, total), constants)
        };
        let next = newest.iter().zip(stages()).map(apply).collect();
        self.versions.push(next);
    }

    fn reduce(&self, terms: &[(Microbatch, Gradient)]) -> Vec<u64> {
        let toy = &self.toy;
        let leaf = |node: TreeNode| {
            let range = toy.lots.microbatches_of(Lot(node.index));
            (node.level == 0).then(|| toy.lot_sum(&terms[range.start as usize..range.end as usize]))
        };
        let sum = toy.tree_sum(toy.lots.root(), &leaf).unwrap_or_default();
        (0..toy.elements).map(|element| toy.element(sum, element)).collect()
    }
}
