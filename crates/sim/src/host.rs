//! A peer's host: what `node` is in a real run. Carries out a worker's commands with toy arithmetic, and says
//! how long each takes. It believes whatever it is told: a gradient that is folded twice is in twice.

use std::collections::BTreeMap;

use starling_swarm::ids::*;
use starling_swarm::journal::Commit;
use starling_swarm::lots::TreeNode;
use starling_swarm::worker::book::JobId;

use crate::toy::{Gradient, Toy};

/// A peer's weights and work.
#[derive(Clone, Debug)]
pub struct Host {
    toy: Toy,
    /// The stage that it holds.
    pub stage: StageId,
    /// Its weights.
    pub weights: u64,
    /// The weights before the last update, for the negative control.
    pub old_weights: u64,
    jobs: BTreeMap<JobId, Job>,
    lots: BTreeMap<Lot, Vec<(Microbatch, Gradient)>>,
    reduced: Vec<Option<u64>>,
}

#[derive(Clone, Copy, Debug)]
struct Job {
    step: Step,
    microbatch: Microbatch,
    input: u64,
    output: u64,
    gradient: Option<Gradient>,
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
            weights: 0,
            old_weights: 0,
            jobs: BTreeMap::new(),
            lots: BTreeMap::new(),
            reduced: Vec::new(),
        }
    }

    /// A state is loaded: all work under way is dropped.
    pub fn load(&mut self, stage: StageId, weights: u64) {
        (self.stage, self.weights, self.old_weights) = (stage, weights, weights);
        self.drop_work();
    }

    /// Forward; `stale` computes with the weights before the last update.
    pub fn forward(
        &mut self,
        job: JobId,
        step: Step,
        microbatch: Microbatch,
        input: u64,
        stale: bool,
    ) -> u64 {
        let input = if self.stage.0 == 0 { self.toy.tokens(step, microbatch) } else { input };
        let output = self.toy.forward(if stale { self.old_weights } else { self.weights }, input);
        self.jobs.insert(job, Job { step, microbatch, input, output, gradient: None });
        output
    }

    /// Backward; the last stage starts from its own output.
    pub fn backward(&mut self, job: JobId, gradient: Option<u64>) -> u64 {
        let Some(entry) = self.jobs.get_mut(&job) else { return 0 };
        let come = gradient.unwrap_or(entry.output);
        let (before, gradient) = self.toy.backward(self.weights, entry.input, come);
        entry.gradient = Some(gradient);
        before
    }

    /// Adds a gradient to a lot; returns what was added.
    pub fn fold(&mut self, job: JobId, lot: Lot) -> Option<(Step, Microbatch)> {
        let entry = self.jobs.remove(&job)?;
        self.lots.entry(lot).or_default().push((entry.microbatch, entry.gradient?));
        Some((entry.step, entry.microbatch))
    }

    /// For the negative control: the last gradient of a lot once more.
    pub fn fold_again(&mut self, lot: Lot) {
        if let Some(terms) = self.lots.get_mut(&lot)
            && let Some(&last) = terms.last()
        {
            terms.push(last);
        }
    }

    /// Throws a job away.
    pub fn forget(&mut self, job: JobId) {
        self.jobs.remove(&job);
    }

    /// Drops lots whole.
    pub fn drop_lots(&mut self, lots: &[Lot]) {
        lots.iter().for_each(|lot| drop(self.lots.remove(lot)));
    }

    /// An attempt to reduce begins.
    pub fn begin_reduce(&mut self) {
        self.reduced = vec![None; self.toy.elements as usize];
    }

    /// The sums at some nodes.
    pub fn read(&self, nodes: &[TreeNode], start: u64, end: u64) -> Piece {
        let mut piece = Piece::default();
        for &node in nodes {
            for element in start..end {
                let mut known = BTreeMap::new();
                for lot in self.toy.lots.lots_under(node).map(Lot) {
                    let terms = self.lots.get(&lot).map_or(&[][..], |terms| &terms[..]);
                    known.insert(TreeNode { level: 0, index: lot.0 }, self.toy.lot_sum(terms, element));
                }
                piece.values.push(self.toy.tree_sum(node, &known).unwrap_or_default());
            }
            for lot in self.toy.lots.lots_under(node).map(Lot) {
                let terms = self.lots.get(&lot).map_or(&[][..], |terms| &terms[..]);
                piece.microbatches.extend(terms.iter().map(|(microbatch, _)| *microbatch));
            }
        }
        piece
    }

    /// Adds up a part from our own nodes and those that came.
    pub fn sum(&self, own: &[TreeNode], come: &[(Vec<TreeNode>, Piece)], start: u64, end: u64) -> Piece {
        let mine = self.read(own, start, end);
        let mut total = Piece::default();
        let width = (end - start) as usize;
        for element in 0..width {
            let mut known = BTreeMap::new();
            for (nodes, piece) in come.iter().map(|(n, p)| (&n[..], p)).chain([(own, &mine)]) {
                for (index, node) in nodes.iter().enumerate() {
                    known.insert(*node, piece.values[index * width + element]);
                }
            }
            total.values.push(self.toy.tree_sum(self.toy.root(), &known).unwrap_or_default());
        }
        for piece in come.iter().map(|(_, piece)| piece).chain([&mine]) {
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
        self.old_weights = self.weights;
        self.weights = self.toy.apply(self.weights, digest, constants);
        self.drop_work();
    }

    fn drop_work(&mut self) {
        self.jobs.clear();
        self.lots.clear();
        self.reduced.clear();
    }
}
