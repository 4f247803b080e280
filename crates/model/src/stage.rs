//! The upper level of compute: a stage as the rest of Starling talks to it.
//!
//! A [`Stage`] is a contiguous run of the model's units with their weights. It is an object, and everything
//! crosses its boundary as plain numbers and bytes, so that what stands behind it may be this process
//! ([`crate::local::LocalStage`]), or later a whole job of another framework behind a socket.
//!
//! The life of a step in a stage: `forward` and `backward` for every microbatch; each `backward` leaves a
//! [`Pending`] gradient, which enters its lot by `fold`, once, or is thrown away; lots that have all their
//! microbatches are *sealed*; sealed sums are read, reduced outside in the fixed tree, and written back in a
//! numbered attempt ([`Reduction`]); `prepare` tells the sums of squares; the gradients of parameters that are used in
//! several places are read by `uses`, added up outside, and taken by `settle`; `apply` carries out the commit. Nothing
//! changes a weight before.
//!
//! Work of a step is kept apart from that of the next, so that a reduction can go on while the next step computes.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::engine::{Dtype, Shape};
use crate::layout::Layout;
use crate::lots::{Lots, Node};
use crate::optimiser::Update;

/// One microbatch of one step, to be computed with the weights of `version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Microbatch {
    /// The step it belongs to.
    pub step: u64,
    /// Its place in the step.
    pub index: u32,
    /// Updates that the weights have seen; a step that was skipped counts.
    pub version: u64,
}

/// What a stage must know of a microbatch besides its input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// Rows and columns.
    pub shape: Shape,
    /// Global sample number of each row.
    pub samples: Vec<u64>,
    /// Position of each token in its document or row.
    pub positions: Vec<u32>,
    /// Document of each token in its row; attention does not cross it.
    pub documents: Vec<u32>,
    /// What each token should predict; [`crate::engine::NO_TARGET`] where there is no loss.
    pub targets: Vec<u32>,
}

/// What enters a stage.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// Token ids, into the first stage.
    Tokens(Vec<u32>),
    /// Hidden states, into every other.
    Hidden(Hidden),
}

/// Hidden states, or their gradient, between two stages.
#[derive(Clone, Debug, PartialEq)]
pub struct Hidden {
    /// Rows and columns.
    pub shape: Shape,
    /// Width of the residual stream.
    pub width: usize,
    /// How elements are stored.
    pub dtype: Dtype,
    /// Little-endian elements, row-major.
    pub bytes: Vec<u8>,
}

impl Hidden {
    /// Whether every element is a number.
    pub fn is_finite(&self) -> bool {
        match self.dtype {
            Dtype::F32 => self.bytes.as_chunks().0.iter().all(|&x| f32::from_le_bytes(x).is_finite()),
            Dtype::F64 => self.bytes.as_chunks().0.iter().all(|&x| f64::from_le_bytes(x).is_finite()),
        }
    }
}

/// What leaves a stage.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Hidden states for the next stage.
    Hidden(Hidden),
    /// The last stage's loss.
    Loss(Loss),
    /// The last stage's logits at the last position of each row (only when inferring).
    Logits(Vec<f32>),
}

/// The loss of some microbatches, not yet divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Loss {
    /// Sum over tokens of −ln p(target), in nats.
    pub sum: f64,
    /// Tokens that carry loss.
    pub tokens: u64,
}

impl std::ops::AddAssign for Loss {
    fn add_assign(&mut self, other: Loss) {
        self.sum += other.sum;
        self.tokens += other.tokens;
    }
}

impl Loss {
    /// Mean loss in nats per token.
    pub fn mean(&self) -> f64 {
        self.sum / self.tokens as f64
    }
}

/// What a stage keeps between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// Everything that backward needs.
    All,
    /// The inputs of its blocks; backward computes the rest again, block by block.
    Input,
}

/// What the last stage is asked for when inferring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The loss over all targets.
    Loss,
    /// Logits at the last position of each row.
    NextToken,
}

/// A forward pass that waits for its backward: a number that the stage gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Ticket(pub u64);

/// The gradient of one microbatch in this stage, not in any sum yet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pending {
    /// The number that the stage gave it.
    pub id: u64,
    /// Whose gradient it is.
    pub microbatch: Microbatch,
    /// The loss, from the last stage.
    pub loss: Option<Loss>,
}

/// What `fold` made of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Folded {
    /// Microbatches of the lot are still missing.
    Open,
    /// The lot has all its microbatches.
    Sealed,
}

/// One attempt to reduce the gradients of one step; a later attempt makes an earlier one void.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Reduction {
    /// Whose gradients.
    pub step: u64,
    /// Counted up with every new try.
    pub attempt: u32,
}

/// What a stage knows of the reduced gradient before the commit.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// BLAKE3 of the reduced gradient: replicas must agree on it.
    pub gradient_hash: [u8; 32],
    /// Σ g² in f64 of each parameter that is used once; of the others [`Stage::settle`] tells it.
    pub sums_of_squares: BTreeMap<String, f64>,
}

/// A parameter that has more than one use in the whole model, and one of them in this stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Its name.
    pub name: String,
    /// Its elements.
    pub elements: usize,
    /// Its uses in the whole model.
    pub uses: usize,
    /// Whether other stages use it too.
    pub elsewhere: bool,
    /// Whether this stage has the model's first use: it counts it in the norm, and stores it.
    pub first: bool,
}

/// The end of a step, the same for every stage and replica.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Commit {
    /// The step it closes.
    pub step: u64,
    /// The version it is applied to; applying makes the next.
    pub version: u64,
    /// The update, or `None` to skip it (the gradient was not finite), everywhere.
    pub update: Option<Update>,
}

/// A flat vector of the stage's that can be read and written: everything that a joiner or a checkpoint needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The weights.
    Weights,
    /// The optimiser's moment of this number.
    Moment(usize),
}

/// What a stage remembers of a text, so that it is not computed again for every token.
pub struct Memory(pub(crate) Box<dyn std::any::Any + Send>);

/// A contiguous run of the model's units with their weights; see the module's head.
pub trait Stage: Send {
    /// Where each parameter stands in [`State`] vectors.
    fn layout(&self) -> &Layout;
    /// Elements of a gradient as it is summed, with a slot for each use of a parameter.
    fn gradient_len(&self) -> usize;
    /// How elements are stored.
    fn dtype(&self) -> Dtype;
    /// The numerics class: stages of one class agree bit for bit.
    fn class(&self) -> String;
    /// Updates that the weights have seen.
    fn version(&self) -> u64;
    /// Vectors of [`State::Moment`].
    fn moments(&self) -> usize;

    /// Computes forward and remembers what `keep` says under the ticket.
    fn forward(
        &mut self,
        microbatch: Microbatch,
        input: Input,
        meta: Meta,
        keep: Keep,
    ) -> Result<(Output, Ticket), StageError>;
    /// Computes backward: the gradient of the output in (none for the last stage), of the input out (none from
    /// the first stage).
    fn backward(
        &mut self,
        ticket: Ticket,
        gradient: Option<Hidden>,
    ) -> Result<(Option<Hidden>, Pending), StageError>;
    /// Computes forward without dropout, and keeps nothing.
    fn infer(&self, input: Input, meta: &Meta, want: Want) -> Result<Output, StageError>;
    /// Room for what it remembers of one text of up to so many tokens.
    fn memory(&self, tokens: usize) -> Memory;
    /// Goes on with a text: its first tokens, or the one that comes next. The last stage gives logits of what follows.
    fn proceed(&self, memory: &mut Memory, input: Input, meta: &Meta) -> Result<Output, StageError>;

    /// Adds a gradient to its lot, in the order of microbatches: one that comes early waits inside. A gradient that
    /// can never be folded (its microbatch is in already) is thrown away with the refusal.
    fn fold(&mut self, pending: Pending, lots: Lots) -> Result<Folded, StageError>;
    /// Throws a gradient away.
    fn discard(&mut self, pending: Pending);
    /// Throws away what is kept of a forward pass.
    fn forget(&mut self, ticket: Ticket);
    /// Adds the sealed lots of a step up into one sum, in whatever order: for who does not need the tree.
    fn merge(&mut self, step: u64);
    /// The sum of some sealed lots that another stage of the same kind has computed becomes one of ours: at its node of
    /// the tree, or, if it has none, merged. Refused if anything of those lots is here.
    fn enter(
        &mut self,
        step: u64,
        lots: Lots,
        of: (Option<Node>, &[u32]),
        bytes: &[u8],
    ) -> Result<(), StageError>;
    /// Drops a lot whole, with the lots it was merged with; returns the lots that must be done again.
    fn revoke(&mut self, step: u64, lot: u32) -> Vec<u32>;
    /// The sums of a step that it holds: nodes of the tree over lots.
    fn held(&self, step: u64) -> Vec<Node>;
    /// The lots of a step that were merged.
    fn merged(&self, step: u64) -> Vec<u32>;
    /// Little-endian bytes of a piece of their sum.
    fn read_merged(&self, step: u64, piece: Range<usize>) -> Result<Vec<u8>, StageError>;
    /// Little-endian bytes of a piece of the sum at a node.
    fn read_sum(&self, step: u64, node: Node, piece: Range<usize>) -> Result<Vec<u8>, StageError>;

    /// Starts an attempt to reduce; what an earlier one wrote is void, the sums are untouched.
    fn begin_reduce(&mut self, reduction: Reduction) -> Result<(), StageError>;
    /// For who reduces alone: the sum over all lots, which this stage holds, becomes the reduced gradient as it is. It is
    /// not copied, so there is no other attempt.
    fn reduce_alone(&mut self, reduction: Reduction) -> Result<(), StageError>;
    /// Writes a piece of the reduced gradient.
    fn write_reduced(&mut self, reduction: Reduction, start: usize, bytes: &[u8]) -> Result<(), StageError>;
    /// The parameters that have more than one use in the whole model, and one of them here.
    fn shared(&self) -> Vec<Shared>;
    /// The reduced gradients of this stage's uses of a shared parameter, one after another.
    fn uses(&self, reduction: Reduction, name: &str) -> Result<Vec<u8>, StageError>;
    /// Takes the sum over all uses of a shared parameter; tells Σ g² in f64 if this stage counts it.
    fn settle(&mut self, reduction: Reduction, name: &str, total: &[u8]) -> Result<Option<f64>, StageError>;
    /// Little-endian bytes of a piece of the reduced gradient, as far as it was written.
    fn read_reduced(&self, reduction: Reduction, piece: Range<usize>) -> Result<Vec<u8>, StageError>;
    /// The sum over all uses of a shared parameter, as it was settled.
    fn read_settled(&self, reduction: Reduction, name: &str) -> Result<Vec<u8>, StageError>;
    /// Adds up the uses of a shared parameter that has all of them here; tells Σ g² in f64.
    fn settle_alone(&mut self, reduction: Reduction, name: &str) -> Result<f64, StageError>;
    /// Σ g² in f64 of each parameter that is used once, of the gradient as it was reduced.
    fn sums_of_squares(&self, reduction: Reduction) -> Result<BTreeMap<String, f64>, StageError>;
    /// What the coordinator must know before it commits, of the gradient as it was reduced.
    fn prepare(&self, reduction: Reduction) -> Result<Prepared, StageError>;
    /// Carries out a commit, once: applying it again changes nothing. Drops all work of its step and earlier ones.
    fn apply(&mut self, commit: &Commit) -> Result<u64, StageError>;

    /// Little-endian bytes of a piece of a state vector, of this version or none: pieces that are read one after
    /// another belong together.
    fn read(&self, version: u64, state: State, piece: Range<usize>) -> Result<Vec<u8>, StageError>;
    /// Overwrites a piece of a state vector.
    fn write(&mut self, state: State, start: usize, bytes: &[u8]) -> Result<(), StageError>;
    /// Says which version the state that was written is; drops all work under way.
    fn restore(&mut self, version: u64);
    /// BLAKE3 of each parameter's weights.
    fn weight_hashes(&self) -> BTreeMap<String, [u8; 32]>;

    /// Bytes that it needs with `in_flight` microbatches of `shape` between forward and backward.
    fn plan(&self, shape: Shape, in_flight: usize, keep: Keep) -> u64;
}

/// Why a stage refused; nothing has changed then.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum StageError {
    #[error(
        "{what} of the microbatch has {got} elements where {expected} are expected; the sender and this stage disagree about the model or the microbatch"
    )]
    Length { what: &'static str, expected: usize, got: usize },
    #[error("the microbatch has no tokens; there is nothing to compute")]
    Empty,
    #[error("{what} {value} is not below {limit}; the microbatch does not fit this model")]
    Range { what: &'static str, value: u64, limit: u64 },
    #[error(
        "hidden states of {got} arrived where {expected} are expected; the stages are cut from different models"
    )]
    Hidden { expected: String, got: String },
    #[error("{got} arrived where this stage takes {expected}")]
    Kind { expected: &'static str, got: &'static str },
    #[error(
        "work for version {asked} arrived while this stage is at version {have}; it belongs to another step and is refused"
    )]
    Version { asked: u64, have: u64 },
    #[error("step {step} is neither the next nor the one after it for a stage at version {version}; refused")]
    Step { step: u64, version: u64 },
    #[error("attempt {} to reduce step {} is not the current one; it is void", .0.attempt, .0.step)]
    Reduction(Reduction),
    #[error("no forward pass waits under ticket {0}; it was used, forgotten or dropped by a commit")]
    Ticket(u64),
    #[error("no gradient waits under number {0}; it was folded, discarded or dropped by a commit")]
    Pending(u64),
    #[error(
        "microbatch {microbatch} is in lot {lot} already; counting it twice would change the training, so it is refused"
    )]
    Twice { microbatch: u32, lot: u32 },
    #[error(
        "{microbatches} microbatches in {lots} lots are not how this step is cut here, or not possible; refused"
    )]
    Lots { microbatches: u32, lots: u32 },
    #[error("this stage holds no sum at node {0:?}")]
    Node(Node),
    #[error("elements {start}..{end} lie outside a vector of {len}")]
    Piece { start: usize, end: usize, len: usize },
    #[error("{missing} elements of the reduced gradient have not arrived; nothing was applied")]
    Incomplete { missing: usize },
    #[error("this stage has no {0}")]
    Unknown(String),
}
