//! What goes into a worker, and what it wants done. The host carries commands out in order.
//!
//! What a host holds for a job has two lives. What forward keeps, the output and the gradient of the input last
//! until [`Command::Forget`]; the gradient of the weights lasts from [`Input::BackwardDone`] until
//! [`Command::Fold`] or [`Command::Discard`], or until its step is dropped.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::*;
use crate::journal::Commit;
use crate::lots::TreeNode;
use crate::message::{Body, Envelope, Fence, PROTOCOL};
use crate::worker::book::JobId;
use crate::worker::reduction::Due;

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// A message came.
    Message(Envelope),
    /// The time of [`crate::worker::Worker::next_wake`] has come, and the inbox is empty.
    Wake,
    /// A forward pass is done.
    ForwardDone(JobId, Payload),
    /// A backward pass is done; the gradient of the stage waits under the job's number.
    BackwardDone(JobId, Payload),
    /// What was computed is not finite: the output, or a gradient.
    NotFinite(JobId),
    /// It could not be computed here: what it needs is gone, or makes no sense.
    Failed(JobId),
    /// What these lots of a step were to be inherited from is gone, or makes no sense.
    NotInherited(Step, Vec<Lot>),
    /// A part was added up.
    Summed(ReduceNo, u32, Payload),
    /// The reduced gradient was looked at.
    Prepared(ReduceNo, Digest, Vec<u8>),
    /// In this round, what is shared was added up over all stages.
    Settled(ReduceNo, Attempt, Digest, Vec<u8>),
    /// It could not be: what came in this round makes no sense, or is gone.
    SettleFailed(ReduceNo, Attempt),
    /// A commit was applied: the state is now this one.
    Applied(StateOf),
    /// This state was loaded, or caught up with.
    Loaded(StateOf),
    /// This state could not be loaded: what was to be loaded did not come, or makes no sense.
    LoadFailed(StateOf),
    /// What this donor told of cannot be had from it any more, or is not what it told of: it is to be asked anew.
    StateGone(PeerId),
    /// A checkpoint of this state is safe.
    Saved(StateOf),
    /// The machine will be taken away soon.
    Notice,
}

/// What a worker wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Send this.
    Send(Envelope),
    /// Compute forward.
    Forward {
        /// Under this number.
        job: JobId,
        /// Of this step.
        step: Step,
        /// With the weights of this version, which are also those for backward.
        weights: Step,
        /// This microbatch.
        microbatch: Microbatch,
        /// From this input.
        input: Payload,
    },
    /// Compute backward, from the gradient of the output; the last stage has its loss.
    Backward(JobId, Option<Payload>),
    /// Add the job's gradient to this lot.
    Fold(JobId, LotOf),
    /// Throw the job's gradient away.
    Discard(JobId),
    /// Throw away what is kept between the job's forward and backward, its output, and the gradient of its input.
    Forget(JobId),
    /// Drop these lots, whole.
    DropLots(Vec<LotOf>),
    /// Read the sums of these lots as they are now, and leave a copy with another.
    Deposit(Deposit),
    /// These sums, which another left here, are ours from now on.
    Inherit(Inherited),
    /// What came under this name is not needed any more.
    Release(Payload),
    /// Drop all lots, and all gradients that wait to be folded, of the steps before this one.
    DropBefore(Step),
    /// Begin to reduce this step: what an earlier attempt wrote is void.
    BeginReduce(Step),
    /// Read the sums of these nodes, and send them.
    Contribute(Contribute),
    /// Add up a part in the tree over lots, from our own nodes and what came from others.
    Sum(ReduceNo, Due),
    /// Write a part of the reduced gradient.
    WriteReduced {
        /// Of which step.
        step: Step,
        /// Its first element.
        start: u64,
        /// The element after its last.
        end: u64,
        /// The part.
        payload: Payload,
        /// Whether the payload is needed further: others get it from us, now or when they join.
        keep: bool,
    },
    /// Look at the reduced gradient.
    Prepare(ReduceNo),
    /// Read our uses of what we share from the reduced gradient, and send them.
    SendUses {
        /// To whom.
        to: PeerId,
        /// Where it belongs.
        fence: Fence,
        /// Of which stage.
        stage: StageId,
    },
    /// Add up what is shared over all stages, in their order: what came from the others in this round, and our own.
    Settle(ReduceNo, Attempt, Vec<(StageId, Payload)>),
    /// Apply a commit, which makes this state.
    Apply(StateOf, Arc<Commit>),
    /// Put the sums that came from a donor onto the state that is here; work under way goes on.
    CatchUp {
        /// The state that this makes.
        of: StateOf,
        /// The sums.
        payload: Payload,
        /// The version onto which they are put.
        onto: Step,
    },
    /// Load a state, dropping all work under way.
    Load {
        /// Which state.
        of: StateOf,
        /// From here.
        from: LoadFrom,
    },
    /// Read our state, or what came after `have`, and send it.
    SendState {
        /// To whom.
        to: PeerId,
        /// Which version it is.
        fence: Fence,
        /// Of which stage.
        stage: StageId,
        /// What the joiner has.
        have: Option<Step>,
    },
    /// Save the state, which is this one, where it survives us.
    Save(StateOf),
}

/// A copy of our sums of some lots, for our keeper.
#[derive(Clone, Debug, PartialEq)]
pub struct Deposit {
    /// Whose they are.
    pub from: PeerId,
    /// Who keeps them.
    pub to: PeerId,
    /// Where the message belongs; the sums are of its step.
    pub fence: Fence,
    /// Of which stage.
    pub stage: StageId,
    /// Which lots, in order.
    pub lots: Vec<Lot>,
    /// Where in the tree they stand.
    pub nodes: Vec<TreeNode>,
}

impl Deposit {
    /// The message, once the sums are read.
    pub fn message(self, payload: Payload) -> Envelope {
        let Deposit { from, to, fence, stage, lots, nodes } = self;
        let body = Body::Deposit { stage, lots, nodes, payload };
        Envelope { protocol: PROTOCOL, from: Address::Worker(from), to: Address::Worker(to), fence, body }
    }
}

/// Sums that another left here, and that are ours now.
#[derive(Clone, Debug, PartialEq)]
pub struct Inherited {
    /// Of which stage.
    pub stage: StageId,
    /// Of which step.
    pub step: Step,
    /// Whose they were.
    pub of: PeerId,
    /// Which lots, in order.
    pub lots: Vec<Lot>,
    /// Where in the tree they stand.
    pub nodes: Vec<TreeNode>,
    /// The sums.
    pub payload: Payload,
}

/// Which state. Hosts may report in another order than they were asked: their word on another state than the one that
/// is awaited is void.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StateOf {
    /// Of which stage.
    pub stage: StageId,
    /// In which history.
    pub epoch: Epoch,
    /// Of which version.
    pub version: Step,
}

/// Which attempt to reduce; attempts are counted anew in every stage, history, step and term. A host's word on
/// another one is void.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReduceNo {
    /// Of which stage.
    pub stage: StageId,
    /// In which history.
    pub epoch: Epoch,
    /// Of which step.
    pub step: Step,
    /// Whose attempt.
    pub term: Term,
    /// Which attempt.
    pub attempt: Attempt,
}

/// Where a state comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadFrom {
    /// The run's seed.
    Seed,
    /// A checkpoint.
    Checkpoint,
    /// A donor.
    Donor(Payload),
}

/// Sums to be read and sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Contribute {
    /// Who sends.
    pub from: PeerId,
    /// To whom.
    pub to: PeerId,
    /// Where it belongs.
    pub fence: Fence,
    /// Of which stage.
    pub stage: StageId,
    /// Which part.
    pub part: u32,
    /// Its first element.
    pub start: u64,
    /// The element after its last.
    pub end: u64,
    /// Which of our lots count, as the plan stamps them.
    pub stamp: u64,
    /// Which nodes.
    pub nodes: Vec<TreeNode>,
}

impl Contribute {
    /// The message, once the sums are read.
    pub fn message(self, payload: Payload) -> Envelope {
        let Contribute { from, to, fence, stage, part, stamp, nodes, .. } = self;
        let body = Body::Contribution { stage, part, holder: from, stamp, nodes, payload };
        Envelope { protocol: PROTOCOL, from: Address::Worker(from), to: Address::Worker(to), fence, body }
    }
}
