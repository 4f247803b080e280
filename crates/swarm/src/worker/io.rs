//! What goes into a worker, and what it wants done. The host carries commands out in order.
//!
//! What a host holds for a job has two lives. What forward keeps, the output and the gradient of the input last
//! until [`Command::Forget`]; the gradient of the weights lasts from [`Input::BackwardDone`] until
//! [`Command::Fold`] or [`Command::Discard`], or until its step is dropped.

use std::sync::Arc;

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
    /// A part was added up.
    Summed(Term, Attempt, u32, Payload),
    /// The reduced gradient was looked at.
    Prepared(Term, Attempt, Digest, Vec<u8>),
    /// A commit was applied: the state is now of this version.
    Applied(Epoch, Step),
    /// A state was loaded, or caught up: it is of this version.
    Loaded(Epoch, Step),
    /// A checkpoint of this version is safe.
    Saved(Epoch, Step),
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
    /// Drop all lots, and all gradients that wait to be folded, of the steps before this one.
    DropBefore(Step),
    /// Begin to reduce this step: what an earlier attempt wrote is void.
    BeginReduce(Step),
    /// Read the sums of these nodes, and send them.
    Contribute(Contribute),
    /// Add up a part in the tree over lots, from our own nodes and what came from others.
    Sum {
        /// Of which step.
        step: Step,
        /// Whose attempt.
        term: Term,
        /// Which attempt.
        attempt: Attempt,
        /// What.
        due: Due,
    },
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
    },
    /// Look at the reduced gradient.
    Prepare(Term, Attempt),
    /// Apply a commit.
    Apply(Arc<Commit>),
    /// Put the sums that came from a donor onto the state that is here; work under way goes on.
    CatchUp {
        /// In this history.
        epoch: Epoch,
        /// The version that this makes.
        version: Step,
        /// The sums.
        payload: Payload,
        /// The version onto which they are put.
        onto: Step,
    },
    /// Load a state, dropping all work under way.
    Load {
        /// Of this stage.
        stage: StageId,
        /// In this history.
        epoch: Epoch,
        /// Of this version.
        version: Step,
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
    /// Save the state, which is of this version, where it survives us.
    Save(StageId, Epoch, Step),
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
