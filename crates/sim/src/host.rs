//! A peer's host: what `node` is in a real run. Carries out a worker's commands with toy arithmetic, and says
//! how long each takes. It believes whatever it is told: a gradient that is folded twice is in twice.

use std::collections::BTreeMap;

use starling_swarm::ids::*;
use starling_swarm::journal::Commit;
use starling_swarm::lots::TreeNode;
use starling_swarm::spec::Reduce;
use starling_swarm::worker::book::JobId;

use crate::rng::mix;
use crate::toy::{Gradient, Toy};

/// A peer's weights and work.
#[derive(Clone, Debug)]
pub struct Host {
    toy: Toy,
    /// The stage that it holds.
    pub stage: StageId,
    /// Its weights, by version: the newest, and those before that an open step is computed with.
    weights: BTreeMap<Step, u64>,
    jobs: BTreeMap<JobId, Job>,
    gradients: BTreeMap<JobId, (Step, Microbatch, Gradient)>,
    lots: BTreeMap<LotOf, Terms>,
    reducing: Step,
    reduced: Vec<Option<u64>>,
}

/// What a lot is the sum of.
type Terms = Vec<(Microbatch, Gradient)>;

#[derive(Clone, Copy, Debug)]
struct Job {
    step: Step,
    weights: u64,
    microbatch: Microbatch,
    input: u64,
    output: u64,
}

/// Some sums as they go over the wire: node after node, element after element; and which microbatches are in
/// them, so that 'exactly once' is also seen directly.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// The values.
    pub values: Vec<u64>,
    /// The microbatches.
    pub microbatches: Vec<Microbatch>,
}

impl Host {
    /// A host that holds nothing.
    pub fn new(toy: Toy) -> Host {
        Host {
            toy,
            stage: StageId(0),
            weights: BTreeMap::new(),
            jobs: BTreeMap::new(),
            gradients: BTreeMap::new(),
            lots: BTreeMap::new(),
            reducing: Step(0),
            reduced: Vec::new(),
        }
    }

    /// The newest weights, and their version.
    pub fn newest(&self) -> (Step, u64) {
        self.weights.last_key_value().map_or((Step(0), 0), |(&version, &weights)| (version, weights))
    }

    /// All weights that it has, by version.
    pub fn weights(&self) -> &BTreeMap<Step, u64> {
        &self.weights
    }

    /// A state is loaded: all work under way is dropped.
    pub fn load(&mut self, stage: StageId, weights: BTreeMap<Step, u64>) {
        (self.stage, self.weights) = (stage, weights);
        self.jobs.clear();
        self.gradients.clear();
        self.lots.clear();
        self.reduced.clear();
    }

    /// A later version is here, by an update or by what a donor sent.
    pub fn catch_up(&mut self, version: Step, weights: u64) {
        self.weights.insert(version, weights);
        let oldest = self.toy.sync.weights_of(version);
        self.weights.retain(|&kept, _| kept >= oldest);
    }

    /// Forward; `stale` computes with the weights of the version before.
    pub fn forward(
        &mut self,
        job: JobId,
        step: Step,
        version: Step,
        microbatch: Microbatch,
        input: u64,
        stale: bool,
    ) -> u64 {
        let input = if self.stage.0 == 0 { self.toy.tokens(step, microbatch) } else { input };
        // Who computes with weights that it does not have computes nonsense, and the invariants say so.
        let mut weights = self.weights.get(&version).copied().unwrap_or_default();
        if stale {
            weights = mix(weights);
        }
        let output = self.toy.forward(weights, input);
        self.jobs.insert(job, Job { step, weights, microbatch, input, output });
        output
    }

    /// Backward; the last stage starts from its own output.
    pub fn backward(&mut self, job: JobId, gradient: Option<u64>) -> u64 {
        let Some(entry) = self.jobs.get(&job) else { return 0 };
        let come = gradient.unwrap_or(entry.output);
        let (before, gradient) = self.toy.backward(entry.weights, entry.input, come);
        self.gradients.insert(job, (entry.step, entry.microbatch, gradient));
        before
    }

    /// Adds a gradient to a lot.
    pub fn fold(&mut self, job: JobId, at: LotOf) {
        if let Some((_, microbatch, gradient)) = self.gradients.remove(&job) {
            self.lots.entry(at).or_default().push((microbatch, gradient));
        }
    }

    /// For the negative control: the last gradient of a lot once more.
    pub fn fold_again(&mut self, at: LotOf) {
        if let Some(terms) = self.lots.get_mut(&at)
            && let Some(&last) = terms.last()
        {
            terms.push(last);
        }
    }

    /// Throws a gradient away.
    pub fn discard(&mut self, job: JobId) {
        self.gradients.remove(&job);
    }

    /// Throws away what is kept for a job.
    pub fn forget(&mut self, job: JobId) {
        self.jobs.remove(&job);
    }

    /// Drops lots whole.
    pub fn drop_lots(&mut self, lots: &[LotOf]) {
        lots.iter().for_each(|at| drop(self.lots.remove(at)));
    }

    /// Drops what belongs to the steps before this one.
    pub fn drop_before(&mut self, step: Step) {
        self.lots.retain(|at, _| at.step >= step);
        self.gradients.retain(|_, (of, _, _)| *of >= step);
    }

    /// Jobs, gradients and lots that it holds.
    pub fn holds(&self) -> (usize, usize, usize) {
        (self.jobs.len(), self.gradients.len(), self.lots.len())
    }

    /// An attempt to reduce a step begins.
    pub fn begin_reduce(&mut self, step: Step) {
        self.reducing = step;
        self.reduced = vec![None; self.toy.elements as usize];
    }

    /// The sums at some nodes of the step that is reduced.
    pub fn read(&self, nodes: &[TreeNode], start: u64, end: u64) -> Piece {
        let mut piece = Piece::default();
        for &node in nodes {
            let under = self.toy.lots.lots_under(node);
            let first = LotOf { step: self.reducing, lot: Lot(under.start) };
            let last = LotOf { step: self.reducing, lot: Lot(under.end) };
            for element in start..end {
                let mut known = BTreeMap::new();
                for (at, terms) in self.complete(first, last) {
                    let leaf = TreeNode { level: 0, index: at.lot.0 };
                    known.insert(leaf, self.toy.lot_sum(terms, element));
                }
                let sum = match node {
                    TreeNode::ALL => known.values().fold(0, |sum, &term| self.toy.add(sum, term)),
                    node => self.toy.tree_sum(node, &known).unwrap_or_default(),
                };
                piece.values.push(sum);
            }
            for (_, terms) in self.complete(first, last) {
                piece.microbatches.extend(terms.iter().map(|(microbatch, _)| *microbatch));
            }
        }
        piece
    }

    /// The lots that are complete: only what was accepted is, since the last gradient is withheld until then.
    fn complete(&self, first: LotOf, last: LotOf) -> impl Iterator<Item = (&LotOf, &Terms)> {
        let whole =
            |(at, terms): &(&LotOf, &Terms)| terms.len() >= self.toy.lots.microbatches_of(at.lot).len();
        self.lots.range(first..last).filter(whole)
    }

    /// Adds up a part from our own nodes and those that came.
    pub fn sum(&self, own: &[TreeNode], come: &[(Vec<TreeNode>, Piece)], start: u64, end: u64) -> Piece {
        let mine = self.read(own, start, end);
        let pieces = || come.iter().map(|(nodes, piece)| (&nodes[..], piece)).chain([(own, &mine)]);
        let mut total = Piece::default();
        let width = (end - start) as usize;
        for element in 0..width {
            let mut known = BTreeMap::new();
            let mut all = 0;
            for (nodes, piece) in pieces() {
                for (index, node) in nodes.iter().enumerate() {
                    let value = piece.values[index * width + element];
                    known.insert(*node, value);
                    all = self.toy.add(all, value);
                }
            }
            let sum = match self.toy.reduce {
                Reduce::Exact => self.toy.tree_sum(self.toy.root(), &known).unwrap_or_default(),
                Reduce::Fast => all,
            };
            total.values.push(sum);
        }
        for (_, piece) in pieces() {
            total.microbatches.extend(&piece.microbatches);
        }
        total.microbatches.sort();
        total
    }

    /// Writes a part of the reduced gradient.
    pub fn write_reduced(&mut self, start: u64, piece: &Piece) {
        for (offset, &value) in piece.values.iter().enumerate() {
            if let Some(element) = self.reduced.get_mut(start as usize + offset) {
                *element = Some(value);
            }
        }
    }

    /// The hash of the reduced gradient, if it is whole.
    pub fn prepare(&self) -> Option<u64> {
        let reduced: Option<Vec<u64>> = self.reduced.iter().copied().collect();
        reduced.map(|reduced| self.toy.digest(&reduced))
    }

    /// Applies a commit.
    pub fn apply(&mut self, commit: &Commit) {
        let digest = self.prepare().unwrap_or_default();
        let constants = commit.constants.as_slice().try_into().map_or(0, u64::from_le_bytes);
        let (_, weights) = self.newest();
        self.catch_up(commit.step.next(), self.toy.apply(weights, digest, constants));
        self.reduced.clear();
    }
}
