//! How the run stands, for people.

use crate::coordinator::Coordinator;
use crate::ids::*;

/// What a coordinator knows of its members.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overview {
    /// Workers.
    pub workers: Vec<WorkerView>,
    /// Drivers.
    pub drivers: Vec<DriverId>,
    /// Lots of the open step that are not sealed yet, stage by stage.
    pub open_lots: Vec<u32>,
}

/// What it knows of one worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerView {
    /// Who.
    pub peer: PeerId,
    /// What it was given to hold.
    pub stage: Option<StageId>,
    /// Whether it counts.
    pub active: bool,
    /// Whether it is about to leave.
    pub leaving: bool,
    /// Microbatches in its queue, at its last beat.
    pub queued: u32,
}

impl Coordinator {
    /// Which lots of which peers are counted in the open step, stage by stage.
    pub fn counted(&self) -> Vec<Vec<(u32, Vec<u32>)>> {
        let of = |stage| {
            let holdings = self.steps[0].ledger.holdings(StageId(stage)).into_iter();
            holdings.map(|(peer, lots)| (peer.0, lots.into_iter().map(|lot| lot.0).collect())).collect()
        };
        (0..self.spec.stages).map(of).collect()
    }

    /// How the members stand.
    pub fn overview(&self) -> Overview {
        let workers = self.members.iter().map(|(&peer, member)| WorkerView {
            peer,
            stage: member.stage,
            active: member.is_active(),
            leaving: member.draining,
            queued: member.status.queued,
        });
        let ledger = &self.steps[0].ledger;
        Overview {
            workers: workers.collect(),
            drivers: self.drivers.keys().copied().collect(),
            open_lots: (0..self.spec.stages).map(|stage| ledger.open_lots(StageId(stage))).collect(),
        }
    }
}
