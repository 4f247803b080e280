//! Everything that can go wrong, by name. Each fault that lasts says for how long, so that every schedule heals.

use starling_swarm::coordinator::Order;
use starling_swarm::ids::{PeerId, SiteId, StageId};

/// One thing that goes wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A peer's process dies, and another life of it starts later.
    Kill {
        /// Who.
        peer: PeerId,
        /// When it is back.
        back_after_us: u64,
    },
    /// All holders of a stage die at once.
    KillStage {
        /// Which stage.
        stage: StageId,
        /// When they are back.
        back_after_us: u64,
    },
    /// The coordinator dies and starts again from its journal.
    KillCoordinator {
        /// When it is back.
        back_after_us: u64,
        /// Whether a record that was not yet acknowledged survives on disk all the same.
        torn_record_survives: bool,
    },
    /// A driver dies, and another life of it starts later.
    KillDriver {
        /// Which driver.
        driver: u32,
        /// When it is back.
        back_after_us: u64,
    },
    /// A process is stopped, and wakes later without having noticed.
    Stop {
        /// Who.
        peer: PeerId,
        /// For how long.
        for_us: u64,
    },
    /// The coordinator is stopped, and wakes later.
    StopCoordinator {
        /// For how long.
        for_us: u64,
    },
    /// Two sites cannot reach each other.
    Partition {
        /// One.
        a: SiteId,
        /// The other.
        b: SiteId,
        /// Whether `b` still reaches `a`.
        one_way: bool,
        /// For how long.
        for_us: u64,
    },
    /// Two peers cannot talk while both live.
    CutEdge {
        /// One.
        a: PeerId,
        /// The other.
        b: PeerId,
        /// For how long.
        for_us: u64,
    },
    /// A peer is slower than it was, by this factor.
    Straggle {
        /// Who.
        peer: PeerId,
        /// How many times slower.
        factor: u32,
        /// For how long.
        for_us: u64,
    },
    /// The journal's disk is slow.
    SlowDisk {
        /// How long one sync takes.
        sync_us: u64,
        /// For how long.
        for_us: u64,
    },
    /// A peer's clock jumps ahead.
    ClockJump {
        /// Who.
        peer: PeerId,
        /// How far.
        by_us: u64,
    },
    /// The coordinator's clock jumps ahead.
    CoordinatorClockJump {
        /// How far.
        by_us: u64,
    },
    /// What a peer computes next is not finite, so many times.
    Spoil {
        /// Who.
        peer: PeerId,
        /// How many results.
        results: u32,
    },
    /// The loss of the step that is closed next is a spike.
    Spike,
    /// A peer's connection with the coordinator ends, for no reason; the peer lives.
    HangUp {
        /// Who.
        peer: PeerId,
    },
    /// The operator wants something. No fault, but it can come at any moment like one.
    Operator(Order),
    /// A peer is told that it will be taken away, and then is, for good.
    Preempt {
        /// Who.
        peer: PeerId,
        /// How long before.
        notice_us: u64,
    },
}

impl Fault {
    /// After how long it is over.
    pub fn lasts_us(&self) -> u64 {
        match *self {
            Fault::Kill { back_after_us, .. }
            | Fault::KillStage { back_after_us, .. }
            | Fault::KillCoordinator { back_after_us, .. }
            | Fault::KillDriver { back_after_us, .. } => back_after_us,
            Fault::Stop { for_us, .. }
            | Fault::StopCoordinator { for_us }
            | Fault::Partition { for_us, .. }
            | Fault::CutEdge { for_us, .. }
            | Fault::Straggle { for_us, .. }
            | Fault::SlowDisk { for_us, .. } => for_us,
            Fault::ClockJump { .. } | Fault::CoordinatorClockJump { .. } => 0,
            Fault::Spoil { .. } | Fault::Spike | Fault::HangUp { .. } | Fault::Operator(_) => 0,
            Fault::Preempt { notice_us, .. } => notice_us,
        }
    }
}
