//! Everything that machines say to each other: typed, versioned, fenced and bounded.
//!
//! A message that is malformed is refused by [`Envelope::check`] before any machine looks at it; one that is
//! old is refused by the machine, by its [`Fence`]. Both are counted by reason, and neither is ever a panic.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::*;
use crate::journal::Commit;
use crate::lots::TreeNode;
use crate::reduce::ReducePlan;
use crate::time::Span;

/// The version of the protocol that this code speaks.
pub const PROTOCOL: u16 = 4;

/// Most stages of a pipeline.
pub const MAX_STAGES: usize = 1024;
/// Most lots of a step.
pub const MAX_LOTS: u32 = 1 << 20;
/// Most bytes of a stage's summary or a commit's constants.
pub const MAX_SUMMARY_BYTES: usize = 1 << 20;
/// Most bytes of a reason.
pub const MAX_REASON_BYTES: usize = 1 << 10;
/// Most members that one message names.
pub const MAX_MEMBERS: usize = 1 << 16;

/// Most parts of a gradient, and most owners of all of them.
pub const MAX_PARTS: usize = 1 << 20;

/// Where in the life of the run a message belongs. A receiver refuses what is older than what it knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Fence {
    /// The run.
    pub run: RunId,
    /// The coordinator's life in which the sender stands.
    pub term: Term,
    /// The history in which the sender stands.
    pub epoch: Epoch,
    /// The step.
    pub step: Step,
    /// The try, of what the message is about: a lot's, or a reduction's.
    pub attempt: Attempt,
}

/// A message on its way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope {
    /// The protocol's version.
    pub protocol: u16,
    /// Who says it.
    pub from: Address,
    /// Who is to hear it.
    pub to: Address,
    /// Where it belongs.
    pub fence: Fence,
    /// What it says.
    pub body: Body,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Body {
    /// A worker or driver → coordinator: let me in.
    Hello(Hello),
    /// Coordinator → who said hello, or whom its journal names: you are in, under this number. A worker that
    /// hears of a new term answers with all that it holds.
    Welcome {
        /// The number of the admission.
        member: MemberNo,
        /// The life that was admitted; an answer to an earlier one is void.
        incarnation: u64,
    },
    /// Coordinator → anybody: I do not know this member; forget what you hold and say hello.
    Stranger {
        /// Who was not known; an answer to an earlier admission is void.
        member: Option<MemberNo>,
    },
    /// Coordinator → a worker that said hello: it cannot take part in this run.
    Unfit {
        /// Why, and what would help.
        why: String,
    },
    /// Worker → coordinator, at intervals and when something changed.
    WorkerBeat(WorkerStatus),
    /// Driver → coordinator, at intervals.
    DriverBeat(DriverStatus),
    /// Worker → coordinator: I shall be gone soon (a preemption notice).
    Leaving {
        /// Under which admission.
        member: MemberNo,
    },

    /// Coordinator → worker: hold this stage, with the state from that source.
    Assign(Assign),
    /// Coordinator → worker: your joining is complete, you count from now on.
    Activate,
    /// Worker → donor: your state, please.
    StateRequest {
        /// Of which stage.
        stage: StageId,
        /// The version that the joiner already has; the donor then sends only what came after it, if it can.
        have: Option<Step>,
    },
    /// Donor → joiner: the state of the fence's step.
    State {
        /// Of which stage.
        stage: StageId,
        /// The state, or what came after the version that the joiner had.
        payload: Payload,
        /// The version onto which the payload is to be put; `None`: it is whole.
        onto: Option<Step>,
    },

    /// Coordinator → driver: who holds what.
    View(View),
    /// Coordinator → driver: see these lots through.
    Lease(Lease),
    /// Coordinator → driver: these lots need nothing more from you.
    LeaseEnd {
        /// The leases that have ended.
        leases: Vec<LeaseNo>,
    },

    /// Driver → first stage: a microbatch enters the pipeline.
    Begin(Work, Payload),
    /// Driver → who has a microbatch: this is where it goes from there.
    Onward(Work),
    /// Stage → next stage: an activation.
    Activation(Work, Payload),
    /// Stage → stage before: a gradient of an activation.
    Gradient(Work, Payload),
    /// Worker → driver: my part of this is done.
    Progress(Progress),
    /// Worker → driver: I have no result of this.
    Declined(Declined),
    /// Driver → worker: this grant is void; drop the lot whole unless it is sealed.
    Revoke {
        /// Which lot.
        lot: Lot,
        /// All grants up to this one.
        grant: Grant,
    },

    /// Worker → coordinator: I have all gradients of these lots.
    Seals {
        /// Of which stage.
        stage: StageId,
        /// Which lots, under which grants.
        lots: Vec<SealedLot>,
    },
    /// Worker → coordinator: I do not have these lots (any more).
    Lost {
        /// Of which stage.
        stage: StageId,
        /// Which lots.
        lots: Vec<LotOf>,
    },
    /// Worker → coordinator: what I computed for these is not finite.
    NotFinite {
        /// Of which stage.
        stage: StageId,
        /// Which microbatches.
        of: Vec<NotFinite>,
    },
    /// Coordinator → worker: what the ledger made of seals.
    Verdict {
        /// Grows with every verdict of a term: one that was overtaken on the way is void.
        number: u64,
        /// These are yours.
        accepted: Vec<LotOf>,
        /// These are another's: drop them.
        refused: Vec<LotOf>,
    },

    /// Coordinator → worker: leave copies of your sums with this other holder of your stage, if there is one.
    Keeper {
        /// Who keeps them.
        keeper: Option<PeerId>,
    },
    /// Worker → its keeper: my sums of these lots of the fence's step, should I be gone before they are reduced.
    Deposit {
        /// Of which stage.
        stage: StageId,
        /// Which lots, in order.
        lots: Vec<Lot>,
        /// Where in the tree the sums stand.
        nodes: Vec<TreeNode>,
        /// The sums.
        payload: Payload,
    },
    /// Keeper → coordinator, and → whose they are: I have a copy of these sums of the fence's step.
    Deposited {
        /// Of which stage.
        stage: StageId,
        /// Whose they are.
        of: PeerId,
        /// Which lots, in order.
        lots: Vec<Lot>,
    },
    /// Coordinator → keeper: whoever left these with you is gone; they are yours.
    Inherit {
        /// Counted with verdicts: what was overtaken by a later word of the ledger is void.
        number: u64,
        /// Of which stage.
        stage: StageId,
        /// Whose they were.
        of: PeerId,
        /// Which lots of the fence's step, in order.
        lots: Vec<Lot>,
    },

    /// Coordinator → members of a stage: reduce.
    Reduce {
        /// The plan, the same for all.
        plan: Arc<ReducePlan>,
        /// Which of the receiver's lots count, in order.
        lots: Vec<Lot>,
    },
    /// Member → owner of a part in its group, and that owner → the part's root: my sums of it.
    Contribution {
        /// Of which stage.
        stage: StageId,
        /// Which part of the plan.
        part: u32,
        /// Who sends them: the relay passes on what is not its own.
        holder: PeerId,
        /// Which of its lots they are of, as the plan stamps them.
        stamp: u64,
        /// Where in the tree they stand.
        nodes: Vec<TreeNode>,
        /// The sums.
        payload: Payload,
    },
    /// Root of a part → its owners in the other groups, and every owner → its group: the reduced part.
    Reduced {
        /// Of which stage.
        stage: StageId,
        /// Which part of the plan.
        part: u32,
        /// Whom it is for in the end.
        member: PeerId,
        /// The sum.
        payload: Payload,
    },
    /// Member → coordinator: this attempt hangs on a peer that does not answer me.
    Stuck {
        /// Of which stage.
        stage: StageId,
        /// Who does not answer.
        on: PeerId,
        /// Whether it is certainly this peer: the owner of a part may itself be waiting for another.
        certain: bool,
    },
    /// Member → coordinator: I have the whole reduced gradient.
    Prepared {
        /// Of which stage.
        stage: StageId,
        /// Its hash.
        digest: Digest,
        /// What the commit's constants are made of.
        summary: Vec<u8>,
    },
    /// Coordinator → members of stages that share parameters, once all stages are prepared: fetch what the other
    /// stages have of those parameters' gradients, and add it up. The fence carries the round.
    Share {
        /// For every other stage who can be asked, the nearest first.
        sources: Vec<(StageId, Vec<PeerId>)>,
    },
    /// Worker → a member of another stage: your uses of what we share, please.
    UsesRequest {
        /// Of which stage.
        stage: StageId,
    },
    /// Its answer: the reduced gradient of each of its uses.
    Uses {
        /// Of which stage.
        stage: StageId,
        /// The gradients.
        payload: Payload,
    },
    /// Member → coordinator: I have the sums over all stages of what we share.
    Settled {
        /// Of which stage.
        stage: StageId,
        /// Their hash.
        digest: Digest,
        /// What the commit's constants are made of.
        summary: Vec<u8>,
    },
    /// Coordinator → worker: the step is closed.
    Commit(Arc<Commit>),
    /// Coordinator → worker: save the state of the fence's version, which is the run's last.
    Save,
    /// Worker → coordinator: the checkpoint of this version of my stage is safe.
    Saved {
        /// Of which stage.
        stage: StageId,
        /// Which version.
        version: Step,
    },
}

/// What a newcomer tells of itself. All of it is a claim: measured speeds replace it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Hello {
    /// A peer that can hold a stage.
    Worker {
        /// Which life of the peer this is: a repeated hello has the same, a restarted process another.
        incarnation: u64,
        /// What it can do.
        capability: Capability,
    },
    /// A driver.
    Driver {
        /// Which life of the driver this is.
        incarnation: u64,
        /// Where it stands.
        site: SiteId,
    },
}

/// What a peer can do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Capability {
    /// Where it stands.
    pub site: SiteId,
    /// Microbatches of an average stage a second.
    pub speed: f64,
    /// Bytes for weights, optimiser, gradients and activations.
    pub memory_bytes: u64,
    /// What its uplink carries.
    pub link_bytes_per_s: f64,
    /// Peers of one class agree bit for bit.
    pub class: String,
}

/// How a worker stands: the coordinator compares it with what should be, and sends what is missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Grows with every beat: one that was overtaken on the way is void.
    pub number: u64,
    /// Its admission; `None` if it was never admitted.
    pub member: Option<MemberNo>,
    /// What it holds or fetches.
    pub stage: Option<StageId>,
    /// Whether the state is whole: the fence's (epoch, step) is then its version.
    pub whole: bool,
    /// The first step for which it has the weights.
    pub since: Step,
    /// Whether it was activated.
    pub active: bool,
    /// Whether a state is on its way to it: its first, or what it missed while that came.
    pub fetching: bool,
    /// The latest reduction that it takes part in, of the fence's step.
    pub reducing: Option<Attempt>,
    /// The latest round of sharing that it takes part in, of the same.
    pub sharing: Option<Attempt>,
    /// With whom it leaves copies of its sums.
    pub keeper: Option<PeerId>,
    /// The last commit that it knows, for a coordinator whose journal may be behind.
    pub last_commit: Option<Arc<Commit>>,
    /// Under a new term, until it was answered: all seals that it holds, so that the ledger can be rebuilt.
    pub report: Option<Vec<SealedLot>>,
    /// Microbatches in its queue.
    pub queued: u32,
}

/// How a driver stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DriverStatus {
    /// Its admission.
    pub member: Option<MemberNo>,
    /// The number of the view that it knows.
    pub view: u64,
    /// The leases that it works on.
    pub leases: Vec<LeaseNo>,
    /// Peers that made it wait longer than their deadlines, with how often since the last beat.
    pub complaints: Vec<(PeerId, u32)>,
}

/// A stage for a worker to hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Assign {
    /// The number of its admission, so that an old order does not reach its next life.
    pub member: MemberNo,
    /// Which stage.
    pub stage: StageId,
    /// Where its state is.
    pub source: Source,
    /// The worker has the state of a version that is still in use, and goes on with its work while it fetches
    /// the sums that it missed.
    pub catch_up: bool,
}

/// Where a stage's state comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// From the run's seed; version 0.
    Seed,
    /// From a checkpoint of the fence's step.
    Checkpoint,
    /// From a peer that holds the stage.
    Donor(PeerId),
}

/// Who holds what, for drivers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct View {
    /// Grows with every change.
    pub number: u64,
    /// All active peers, stage by stage.
    pub stages: Vec<Vec<Holder>>,
    /// The sites of all drivers.
    pub drivers: Vec<SiteId>,
}

/// One active peer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holder {
    /// Which peer.
    pub peer: PeerId,
    /// Where it stands.
    pub site: SiteId,
    /// Microbatches of an average stage a second, as claimed.
    pub speed: f64,
    /// It will leave soon, and wants no new lots.
    pub draining: bool,
    /// The first step for which it has the weights.
    pub since: Step,
    /// The last one, if it still lacks a sum; `None`: it goes along with the run.
    pub until: Option<Step>,
}

/// A lot for a driver to see through.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    /// Its number.
    pub number: LeaseNo,
    /// Which lot.
    pub at: LotOf,
    /// Stage by stage: who has sealed it already, and is only passed through; `None`: its gradients are wanted.
    pub held: Vec<Option<PeerId>>,
}

/// A lot of which a worker has all gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealedLot {
    /// Which lot.
    pub at: LotOf,
    /// Under which grant it was folded.
    pub grant: Grant,
    /// Whether a coordinator has counted it already: such a seal goes before others when a ledger is rebuilt.
    pub accepted: bool,
}

/// A microbatch of which a worker's result is not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotFinite {
    /// Of which lot.
    pub at: LotOf,
    /// Which microbatch.
    pub microbatch: Microbatch,
    /// How often it was computed.
    pub times: u32,
    /// Whether it was to be folded, and not only passed on.
    pub granted: bool,
}

/// One microbatch on its way through the pipeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Which lot.
    pub lot: Lot,
    /// Which microbatch of the step.
    pub microbatch: Microbatch,
    /// Under which lease. The fence carries the attempt.
    pub lease: LeaseNo,
    /// Who wants to hear of it.
    pub driver: DriverId,
    /// Who computes it, stage by stage, as far as that is decided.
    pub route: Arc<[Hop]>,
}

/// One stage of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hop {
    /// Who computes it.
    pub peer: PeerId,
    /// The attempt in which the peer was chosen to fold the lot; `None`: it passes through, and folds nothing.
    pub grant: Option<Attempt>,
}

/// A worker's news of a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Which lot.
    pub lot: Lot,
    /// Which microbatch.
    pub microbatch: Microbatch,
    /// Under which lease. The fence carries the attempt.
    pub lease: LeaseNo,
    /// In which stage.
    pub stage: StageId,
    /// What was done.
    pub pass: Pass,
    /// How long it was computed, without waiting: measured by the worker's own clock alone. `None`: it was
    /// computed before, and only passed on.
    pub computed: Option<Span>,
}

/// What a worker does not give a result of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Declined {
    /// Of which lot.
    pub lot: Lot,
    /// Which microbatch.
    pub microbatch: Microbatch,
    /// Under which lease. The fence carries the attempt.
    pub lease: LeaseNo,
    /// In which stage.
    pub stage: StageId,
    /// Why.
    pub reason: Decline,
}

/// The two ways through a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Pass {
    /// Towards the loss.
    Forward,
    /// Back from it.
    Backward,
}

/// Why a worker does not take a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Decline {
    /// Its queue is full.
    Busy,
    /// It does not hold that stage at that version (yet, or any more).
    NotHere,
    /// Its result is not finite: another is to compute it too.
    NotFinite,
}

/// What a message may wait behind on its way. A transport keeps these apart: a decision is not stuck behind a
/// tensor, a tensor that a device waits for not behind a gradient for which there is a whole step of time, and that
/// not behind the state for a joiner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Urgency {
    /// Small, and decides something.
    Control,
    /// A tensor that a device waits for.
    Work,
    /// A part of a gradient that a stage waits for.
    Sum,
    /// What one joiner waits for, or nobody: copies of sums.
    State,
}

/// Why a message is malformed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum BadMessage {
    #[error("the sender speaks protocol {got}, this node {PROTOCOL}; upgrade the older of the two")]
    Protocol { got: u16 },
    #[error("{what} counts {got}, more than the {limit} that a message may carry; refused")]
    TooMany { what: &'static str, got: usize, limit: usize },
    #[error("{what} is not a positive finite number; the peer's measurement is broken, refused")]
    NotPositive { what: &'static str },
    #[error("{from} may not say this to {to}; refused")]
    Direction { from: Address, to: Address },
}

impl Envelope {
    /// Refuses what no honest sender of this protocol says, whatever the state of the receiver.
    pub fn check(&self) -> Result<(), BadMessage> {
        if self.protocol != PROTOCOL {
            return Err(BadMessage::Protocol { got: self.protocol });
        }
        if !self.direction_is_right() {
            return Err(BadMessage::Direction { from: self.from, to: self.to });
        }
        match &self.body {
            Body::Hello(Hello::Worker { capability, .. }) => {
                positive("speed", capability.speed)?;
                positive("link rate", capability.link_bytes_per_s)?;
                at_most("class", capability.class.len(), 256)
            }
            Body::Unfit { why } => at_most("reason", why.len(), MAX_REASON_BYTES),
            Body::WorkerBeat(status) => {
                at_most("seals", status.report.as_ref().map_or(0, Vec::len), MAX_LOTS as usize)
            }
            Body::DriverBeat(status) => {
                at_most("leases", status.leases.len(), MAX_LOTS as usize)?;
                at_most("complaints", status.complaints.len(), MAX_MEMBERS)
            }
            Body::View(view) => {
                at_most("stages", view.stages.len(), MAX_STAGES)?;
                at_most("drivers", view.drivers.len(), MAX_MEMBERS)?;
                view.stages.iter().try_for_each(|holders| at_most("holders", holders.len(), MAX_MEMBERS))
            }
            Body::Lease(lease) => at_most("stages", lease.held.len(), MAX_STAGES),
            Body::LeaseEnd { leases } => at_most("leases", leases.len(), MAX_LOTS as usize),
            Body::Begin(work, _)
            | Body::Onward(work)
            | Body::Activation(work, _)
            | Body::Gradient(work, _) => at_most("hops", work.route.len(), MAX_STAGES),
            Body::Lost { lots, .. } => at_most("lost lots", lots.len(), MAX_LOTS as usize),
            Body::Seals { lots, .. } => at_most("seals", lots.len(), MAX_LOTS as usize),
            Body::NotFinite { of, .. } => at_most("microbatches", of.len(), MAX_LOTS as usize),
            Body::Verdict { accepted, refused, .. } => {
                at_most("verdicts", accepted.len().max(refused.len()), MAX_LOTS as usize)
            }
            Body::Reduce { plan, lots } => {
                at_most("members", plan.members().count(), MAX_MEMBERS)?;
                at_most("joined", plan.joined.len(), MAX_MEMBERS)?;
                at_most("holders", plan.holders.len(), MAX_MEMBERS)?;
                at_most("parts", plan.parts.len(), MAX_PARTS)?;
                at_most("owners", plan.parts.iter().map(|part| part.owners.len()).sum(), MAX_PARTS)?;
                at_most("relays", plan.relays.len(), MAX_MEMBERS)?;
                at_most("lots", lots.len(), MAX_LOTS as usize)
            }
            Body::Contribution { nodes, .. } => at_most("nodes", nodes.len(), MAX_LOTS as usize),
            Body::Deposit { lots, nodes, .. } => {
                at_most("lots", lots.len().max(nodes.len()), MAX_LOTS as usize)
            }
            Body::Deposited { lots, .. } | Body::Inherit { lots, .. } => {
                at_most("lots", lots.len(), MAX_LOTS as usize)
            }
            Body::Share { sources } => {
                at_most("stages", sources.len(), MAX_STAGES)?;
                at_most("sources", sources.iter().map(|(_, peers)| peers.len()).sum(), MAX_MEMBERS)
            }
            Body::Prepared { summary, .. } | Body::Settled { summary, .. } => {
                at_most("summary bytes", summary.len(), MAX_SUMMARY_BYTES)
            }
            Body::Commit(commit) => {
                at_most("constants' bytes", commit.constants.len(), MAX_SUMMARY_BYTES)?;
                at_most("stages", commit.digests.len(), MAX_STAGES)
            }
            _ => Ok(()),
        }
    }

    fn direction_is_right(&self) -> bool {
        use Address::*;
        matches!(
            (&self.body, self.from, self.to),
            (
                Body::Hello(Hello::Worker { .. }) | Body::WorkerBeat(_) | Body::Leaving { .. },
                Worker(_),
                Coordinator
            ) | (Body::Seals { .. } | Body::Lost { .. } | Body::Stuck { .. }, Worker(_), Coordinator)
                | (
                    Body::Prepared { .. }
                        | Body::Settled { .. }
                        | Body::Saved { .. }
                        | Body::NotFinite { .. },
                    Worker(_),
                    Coordinator
                )
                | (Body::Hello(Hello::Driver { .. }) | Body::DriverBeat(_), Driver(_), Coordinator)
                | (Body::Welcome { .. } | Body::Stranger { .. }, Coordinator, Worker(_) | Driver(_))
                | (Body::Unfit { .. } | Body::Assign(_), Coordinator, Worker(_))
                | (Body::Activate | Body::Verdict { .. }, Coordinator, Worker(_))
                | (Body::Keeper { .. } | Body::Inherit { .. }, Coordinator, Worker(_))
                | (Body::Deposit { .. }, Worker(_), Worker(_))
                | (Body::Deposited { .. }, Worker(_), Coordinator | Worker(_))
                | (Body::Reduce { .. } | Body::Share { .. }, Coordinator, Worker(_))
                | (Body::Commit(_) | Body::Save, Coordinator, Worker(_))
                | (Body::View(_) | Body::Lease(_) | Body::LeaseEnd { .. }, Coordinator, Driver(_))
                | (Body::Begin(..) | Body::Onward(_) | Body::Revoke { .. }, Driver(_), Worker(_))
                | (Body::Progress(_) | Body::Declined(_), Worker(_), Driver(_))
                | (Body::Activation(..) | Body::Gradient(..), Worker(_), Worker(_))
                | (Body::StateRequest { .. } | Body::State { .. }, Worker(_), Worker(_))
                | (Body::Contribution { .. } | Body::Reduced { .. }, Worker(_), Worker(_))
                | (Body::UsesRequest { .. } | Body::Uses { .. }, Worker(_), Worker(_))
        )
    }

    /// What it may wait behind.
    pub fn urgency(&self) -> Urgency {
        match &self.body {
            Body::Begin(..) | Body::Activation(..) | Body::Gradient(..) => Urgency::Work,
            Body::Contribution { .. } | Body::Reduced { .. } | Body::Uses { .. } => Urgency::Sum,
            Body::State { .. } | Body::Deposit { .. } => Urgency::State,
            _ => Urgency::Control,
        }
    }

    /// Bytes of tensors that travel with it.
    pub fn payload_bytes(&self) -> u64 {
        self.payload().map_or(0, |payload| payload.bytes)
    }

    /// The tensor that travels with it.
    pub fn payload(&self) -> Option<Payload> {
        match self.body {
            Body::Begin(_, payload)
            | Body::Activation(_, payload)
            | Body::Gradient(_, payload)
            | Body::State { payload, .. }
            | Body::Contribution { payload, .. }
            | Body::Deposit { payload, .. }
            | Body::Reduced { payload, .. }
            | Body::Uses { payload, .. } => Some(payload),
            _ => None,
        }
    }

    /// The same, to be named anew by a host that has received it.
    pub fn payload_mut(&mut self) -> Option<&mut Payload> {
        match &mut self.body {
            Body::Begin(_, payload)
            | Body::Activation(_, payload)
            | Body::Gradient(_, payload)
            | Body::State { payload, .. }
            | Body::Contribution { payload, .. }
            | Body::Deposit { payload, .. }
            | Body::Reduced { payload, .. }
            | Body::Uses { payload, .. } => Some(payload),
            _ => None,
        }
    }
}

fn at_most(what: &'static str, got: usize, limit: usize) -> Result<(), BadMessage> {
    if got > limit { Err(BadMessage::TooMany { what, got, limit }) } else { Ok(()) }
}

fn positive(what: &'static str, value: f64) -> Result<(), BadMessage> {
    if value.is_finite() && value > 0.0 { Ok(()) } else { Err(BadMessage::NotPositive { what }) }
}
