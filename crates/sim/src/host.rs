//! A peer's host: what `node` is in a real run. Carries out a worker's commands with toy arithmetic, and says
//! how long each takes. It believes whatever it is told: a gradient that is folded twice is in twice.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::Arc;

use starling_swarm::ids::*;
use starling_swarm::journal::Commit;
use starling_swarm::lots::{Lots, TreeNode};
use starling_swarm::sequence::Sequence;
use starling_swarm::spec::Reduce;
use starling_swarm::worker::book::JobId;

use crate::rng::mix;
use crate::toy::{Gradient, Toy};

/// A peer's weights and work.
#[derive(Clone, Debug)]
pub struct Host {
    /// The same for all.
    toy: Arc<Toy>,
    /// The stage that it holds.
    pub stage: StageId,
    /// Its weights, by version: the newest, and those before that an open step is computed with.
    weights: BTreeMap<Step, u64>,
    jobs: Sequence<Job>,
    gradients: Sequence<(Step, Microbatch, Gradient)>,
    lots: BTreeMap<LotOf, Terms>,
    reducing: Step,
    reduced: Vec<Option<u64>>,
    /// The sum over stages of what they share.
    total: Option<u64>,
    /// What was read last, and under which handle it is kept; void as soon as a lot changes.
    last_read: Option<(Vec<TreeNode>, u64)>,
}

/// What a lot is the sum of.
pub type Terms = Vec<(Microbatch, Gradient)>;

#[derive(Clone, Copy, Debug)]
struct Job {
    step: Step,
    weights: u64,
    microbatch: Microbatch,
    input: u64,
    output: u64,
}

/// Some sums as they go over the wire, one a node; and of which microbatches, so that 'exactly once' is also seen
/// directly.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// The sums.
    pub sums: Vec<u64>,
    /// What is in them.
    pub counted: Counted,
}

/// A set of microbatches, as far as it takes to see a double or a gap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// How many.
    pub microbatches: u64,
    hash: u64,
}

impl Counted {
    /// All microbatches of a step.
    pub fn all(lots: Lots) -> Counted {
        (0..lots.microbatches).map(Microbatch).fold(Counted::default(), Counted::with)
    }

    fn with(self, microbatch: Microbatch) -> Counted {
        let hash = self.hash.wrapping_add(mix(u64::from(microbatch.0) + 1));
        Counted { microbatches: self.microbatches + 1, hash }
    }

    fn and(self, other: Counted) -> Counted {
        let hash = self.hash.wrapping_add(other.hash);
        Counted { microbatches: self.microbatches + other.microbatches, hash }
    }
}

impl Host {
    /// A host that holds nothing.
    pub fn new(toy: impl Into<Arc<Toy>>) -> Host {
        Host {
            toy: toy.into(),
            stage: StageId(0),
            weights: BTreeMap::new(),
            jobs: Sequence::default(),
            gradients: Sequence::default(),
            lots: BTreeMap::new(),
            reducing: Step(0),
            reduced: Vec::new(),
            total: None,
            last_read: None,
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
        self.jobs.insert(job.0, Job { step, weights, microbatch, input, output });
        output
    }

    /// Backward; the last stage starts from its own output.
    pub fn backward(&mut self, job: JobId, gradient: Option<u64>) -> u64 {
        let Some(entry) = self.jobs.get(job.0) else { return 0 };
        let come = gradient.unwrap_or(entry.output);
        let (before, gradient) = self.toy.backward(entry.weights, entry.input, come);
        self.gradients.insert(job.0, (entry.step, entry.microbatch, gradient));
        before
    }

    /// Adds a gradient to a lot.
    pub fn fold(&mut self, job: JobId, at: LotOf) {
        if let Some((_, microbatch, gradient)) = self.gradients.remove(job.0) {
            self.lots.entry(at).or_default().push((microbatch, gradient));
            self.last_read = None;
        }
    }

    /// For the negative control: the last gradient of a lot once more.
    pub fn fold_again(&mut self, at: LotOf) {
        if let Some(terms) = self.lots.get_mut(&at)
            && let Some(&last) = terms.last()
        {
            terms.push(last);
            self.last_read = None;
        }
    }

    /// Throws a gradient away.
    pub fn discard(&mut self, job: JobId) {
        self.gradients.remove(job.0);
    }

    /// Throws away what is kept for a job.
    pub fn forget(&mut self, job: JobId) {
        self.jobs.remove(job.0);
    }

    /// Drops lots whole.
    pub fn drop_lots(&mut self, lots: &[LotOf]) {
        lots.iter().for_each(|at| drop(self.lots.remove(at)));
        self.last_read = None;
    }

    /// A copy of some lots.
    pub fn copy(&self, step: Step, lots: &[Lot]) -> Vec<(LotOf, Terms)> {
        let of = |&lot: &Lot| LotOf { step, lot };
        lots.iter().map(of).filter_map(|at| Some((at, self.lots.get(&at)?.clone()))).collect()
    }

    /// Lots that another computed are in ours.
    pub fn inherit(&mut self, lots: Vec<(LotOf, Terms)>) {
        lots.into_iter().for_each(|(at, terms)| self.lots.entry(at).or_default().extend(terms));
        self.last_read = None;
    }

    /// Drops what belongs to the steps before this one.
    pub fn drop_before(&mut self, step: Step) {
        self.lots.retain(|at, _| at.step >= step);
        self.gradients.retain(|(of, _, _)| *of >= step);
    }

    /// Jobs, gradients and lots that it holds.
    pub fn holds(&self) -> (usize, usize, usize) {
        (self.jobs.len(), self.gradients.len(), self.lots.len())
    }

    /// An attempt to reduce a step begins.
    pub fn begin_reduce(&mut self, step: Step) {
        self.reducing = step;
        self.last_read = None;
        self.reduced = vec![None; self.toy.elements as usize];
        self.total = None;
    }

    /// The sums at some nodes of the step that is reduced.
    pub fn read(&self, nodes: &[TreeNode]) -> Piece {
        let mut piece = Piece::default();
        for &node in nodes {
            let under = self.toy.lots.lots_under(node);
            let first = LotOf { step: self.reducing, lot: Lot(under.start) };
            let last = LotOf { step: self.reducing, lot: Lot(under.end) };
            let leaf = |node: TreeNode| {
                let at = LotOf { step: self.reducing, lot: Lot(node.index) };
                let terms = self.lots.get(&at).filter(|terms| node.level == 0 && self.is_complete(at, terms));
                terms.map(|terms| self.toy.lot_sum(terms))
            };
            piece.sums.push(match node {
                TreeNode::ALL => self
                    .complete(first, last)
                    .fold(0, |sum, (_, terms)| self.toy.add(sum, self.toy.lot_sum(terms))),
                node => self.toy.tree_sum(node, &leaf).unwrap_or_default(),
            });
            for (_, terms) in self.complete(first, last) {
                piece.counted =
                    terms.iter().fold(piece.counted, |counted, (microbatch, _)| counted.with(*microbatch));
            }
        }
        piece
    }

    /// The handle under which these nodes were kept, if nothing has changed since.
    pub fn was_read(&self, nodes: &[TreeNode]) -> Option<u64> {
        self.last_read.as_ref().filter(|(read, _)| read == nodes).map(|(_, handle)| *handle)
    }

    /// These nodes are kept under this handle.
    pub fn note_read(&mut self, nodes: &[TreeNode], handle: u64) {
        self.last_read = Some((nodes.to_vec(), handle));
    }

    /// The lots that are complete: only what was accepted is, since the last gradient is withheld until then.
    fn complete(&self, first: LotOf, last: LotOf) -> impl Iterator<Item = (&LotOf, &Terms)> {
        self.lots.range(first..last).filter(|(at, terms)| self.is_complete(**at, terms))
    }

    fn is_complete(&self, at: LotOf, terms: &Terms) -> bool {
        terms.len() >= self.toy.lots.microbatches_of(at.lot).len()
    }

    /// Adds up our own nodes and those that came, at the nodes that are wanted.
    pub fn sum(
        &self,
        own: &[TreeNode],
        come: &[(Vec<TreeNode>, impl Borrow<Piece>)],
        into: &[TreeNode],
    ) -> Piece {
        let mine = self.read(own);
        let mut known = BTreeMap::new();
        let (mut all, mut counted) = (0, Counted::default());
        let come = come.iter().map(|(nodes, piece)| (&nodes[..], piece.borrow()));
        for (nodes, piece) in come.chain([(own, &mine)]) {
            for (&node, &sum) in nodes.iter().zip(&piece.sums) {
                if self.toy.reduce == Reduce::Exact {
                    known.insert(node, sum);
                }
                all = self.toy.add(all, sum);
            }
            counted = counted.and(piece.counted);
        }
        let at = |&node: &TreeNode| match self.toy.reduce {
            Reduce::Exact => self.toy.tree_sum(node, &|node| known.get(&node).copied()).unwrap_or_default(),
            Reduce::Fast => all,
        };
        Piece { sums: into.iter().map(at).collect(), counted }
    }

    /// Writes a part of the reduced gradient.
    pub fn write_reduced(&mut self, start: u64, end: u64, piece: &Piece) {
        for element in start..end {
            let value = piece.sums.first().map(|&sum| self.toy.element(sum, element));
            if let Some(written) = self.reduced.get_mut(element as usize) {
                *written = value;
            }
        }
    }

    /// The hash of the reduced gradient, if it is whole.
    pub fn prepare(&self) -> Option<u64> {
        let reduced: Option<Vec<u64>> = self.reduced.iter().copied().collect();
        reduced.map(|reduced| self.toy.digest(&reduced))
    }

    /// What we have of the gradient of what stages share, if the reduced gradient is whole.
    pub fn uses(&self) -> Option<u64> {
        self.prepare().map(|digest| self.toy.uses(digest))
    }

    /// Adds it up over stages: what came from the others, and our own.
    /// Returns the hash of our whole gradient, and the sum.
    pub fn settle(&mut self, come: &[(StageId, u64)]) -> Option<(u64, u64)> {
        let own = (self.stage, self.uses()?);
        let all: BTreeMap<StageId, u64> = come.iter().copied().chain([own]).collect();
        let total = self.toy.total(all.into_values());
        self.total = Some(total);
        Some((self.toy.with_total(self.stage, self.prepare()?, total), total))
    }

    /// Applies a commit.
    pub fn apply(&mut self, commit: &Commit) {
        if commit.skipped {
            let (_, weights) = self.newest();
            self.catch_up(commit.step.next(), weights);
            return self.reduced.clear();
        }
        let digest = self.prepare().unwrap_or_default();
        let digest = self.toy.with_total(self.stage, digest, self.total.take().unwrap_or_default());
        let constants = commit.constants.as_slice().try_into().map_or(0, u64::from_le_bytes);
        let (_, weights) = self.newest();
        self.catch_up(commit.step.next(), self.toy.apply(weights, digest, constants));
        self.reduced.clear();
    }
}
