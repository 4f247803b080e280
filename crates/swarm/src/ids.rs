//! Names and numbers of things: newtypes, so that a stage is never taken for a step.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty), $word:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($word, " {}"), self.0)
            }
        }
    };
}

number!(
    /// The training job: the first half of the hash of what defines it.
    RunId(u64), "run"
);
number!(
    /// One process that serves a stage. `node` maps it to the peer's public key.
    PeerId(u32), "peer"
);
number!(
    /// One feeder of microbatches.
    DriverId(u32), "driver"
);
number!(
    /// Machines joined by a fast network.
    SiteId(u16), "site"
);
number!(
    /// A contiguous run of layers, by its place in the pipeline.
    StageId(u16), "stage"
);
number!(
    /// One optimiser update, counted from 0. A step is computed with the weights of the version of that number.
    Step(u64), "step"
);
number!(
    /// A lot of a step, by its place.
    Lot(u32), "lot"
);
number!(
    /// A microbatch of a step, by its place.
    Microbatch(u32), "microbatch"
);
number!(
    /// Life of a coordinator: one more at every start.
    Term(u64), "term"
);
number!(
    /// History of the run: one more at every rollback.
    Epoch(u64), "epoch"
);
number!(
    /// A try at something that may have to be tried again.
    Attempt(u32), "attempt"
);
number!(
    /// An admission of a peer or driver: unique for the life of the run, so that who rejoins is a stranger.
    MemberNo(u64), "member"
);

impl Step {
    /// The step after this one.
    pub fn next(self) -> Step {
        Step(self.0.saturating_add(1))
    }
}

/// A lot's full name: two steps may be open at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LotOf {
    /// Of which step.
    pub step: Step,
    /// Which of its lots.
    pub lot: Lot,
}

impl fmt::Display for LotOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.lot, self.step)
    }
}

/// The lease of a lot: a coordinator's term, and a number inside it that only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseNo {
    /// Who leased it.
    pub term: Term,
    /// Which of the term's leases.
    pub number: u64,
}

/// The right to fold the gradients of one lot in one stage: the lease, and the driver's attempt under it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Grant {
    /// Under which lease.
    pub lease: LeaseNo,
    /// The attempt in which the driver chose this peer.
    pub attempt: Attempt,
}

/// Who a message is from or for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Address {
    /// The control plane.
    Coordinator,
    /// A driver.
    Driver(DriverId),
    /// The worker of a peer.
    Worker(PeerId),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Coordinator => write!(f, "coordinator"),
            Address::Driver(driver) => write!(f, "{driver}"),
            Address::Worker(peer) => write!(f, "{peer}"),
        }
    }
}

/// Something big that the machines only pass on: the host knows what `handle` stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Payload {
    /// The host's name for it.
    pub handle: u64,
    /// Bytes on the wire.
    pub bytes: u64,
}

/// A hash of something big.
pub type Digest = [u8; 32];
