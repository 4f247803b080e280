//! One lot at its driver: its route, what is in flight, what is done.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::ids::*;
use crate::message::{Hop, Lease, Pass};
use crate::time::{Span, Time};
use crate::wiring::Wiring;

/// One leased lot.
#[derive(Clone, Debug)]
pub struct LotRun {
    /// The lease.
    pub lease: Lease,
    /// Who computes it, stage by stage; empty while nobody could be found.
    pub route: Arc<[Hop]>,
    /// Microbatches that each hop of the route has not given back.
    pub owed: Vec<u32>,
    /// The last attempt that was handed out.
    pub attempt: Attempt,
    /// Microbatches that wait to be sent (again).
    pub waiting: BTreeSet<Microbatch>,
    /// Microbatches under way.
    pub flights: BTreeMap<Microbatch, Flight>,
    /// Nothing is sent before this.
    pub not_before: Option<Time>,
    /// How often it had to be done again; every time it is given twice the patience.
    pub retries: u32,
    /// When the last microbatch came back: the seals should be in soon after.
    pub finished: Option<Time>,
    /// When it wants to be looked at, as it stands in the driver's calendar.
    pub wake: Option<Time>,
}

/// One microbatch under way.
#[derive(Clone, Copy, Debug)]
pub struct Flight {
    /// Under which attempt.
    pub attempt: Attempt,
    /// The stage that is at work on it.
    pub stage: StageId,
    /// In which direction.
    pub pass: Pass,
    /// Since when.
    pub since: Time,
    /// When it is late.
    pub deadline: Time,
}

impl LotRun {
    /// A lot of which nothing is done.
    pub fn new(lease: Lease, microbatches: std::ops::Range<u32>) -> LotRun {
        LotRun {
            lease,
            route: Arc::new([]),
            owed: Vec::new(),
            attempt: Attempt(0),
            waiting: microbatches.map(Microbatch).collect(),
            flights: BTreeMap::new(),
            not_before: None,
            retries: 0,
            finished: None,
            wake: None,
        }
    }

    /// Whether the gradients of a stage are wanted from us.
    pub fn wants(&self, stage: StageId) -> bool {
        self.lease.held.get(stage.0 as usize).is_some_and(Option::is_none)
    }

    /// Another peer takes over a stage. If its gradients are wanted, the lot is done again from its start there,
    /// so every microbatch goes through once more; the other stages fold only what they have not folded.
    pub fn reroute(&mut self, stage: StageId, peer: PeerId, all: std::ops::Range<u32>) {
        self.attempt.0 += 1;
        self.retries += 1;
        let grant = self.wants(stage).then_some(self.attempt);
        let mut route = self.route.to_vec();
        route[stage.0 as usize] = Hop { peer, grant };
        self.route = route.into();
        self.finished = None;
        if let Some(owed) = self.owed.get_mut(stage.0 as usize) {
            *owed = all.len() as u32;
        }
        if grant.is_some() {
            self.flights.clear();
            self.waiting = all.map(Microbatch).collect();
        } else {
            self.waiting.extend(std::mem::take(&mut self.flights).into_keys());
        }
    }

    /// A microbatch came back from a stage.
    pub fn give_back(&mut self, stage: StageId, wiring: &mut Wiring) {
        if let (Some(owed), Some(hop)) =
            (self.owed.get_mut(stage.0 as usize), self.route.get(stage.0 as usize))
            && *owed > 0
        {
            *owed -= 1;
            wiring.paid(hop.peer, 1);
        }
    }

    /// The hop of a stage owes nothing more for this lot.
    pub fn settle_stage(&mut self, stage: StageId, wiring: &mut Wiring) {
        if let (Some(owed), Some(hop)) =
            (self.owed.get_mut(stage.0 as usize), self.route.get(stage.0 as usize))
        {
            wiring.paid(hop.peer, std::mem::take(owed));
        }
    }

    /// Nobody owes anything more for this lot.
    pub fn settle(&mut self, wirings: &mut [Wiring]) {
        for (stage, wiring) in wirings.iter_mut().enumerate() {
            self.settle_stage(StageId(stage as u16), wiring);
        }
    }

    /// A lot whose route is given up is begun again; its grants are later than all before.
    pub fn begin_again(&mut self, all: std::ops::Range<u32>) {
        self.attempt.0 += 1;
        self.route = Arc::new([]);
        self.owed.clear();
        self.flights.clear();
        self.waiting = all.map(Microbatch).collect();
        self.finished = None;
    }

    /// When it wants to be looked at.
    pub fn next_wake(&self, linger: Span) -> Option<Time> {
        let late = self.flights.values().map(|flight| flight.deadline).min();
        [late, self.not_before, self.finished.map(|finished| finished + linger)].into_iter().flatten().min()
    }

    /// The hops whose peers no longer hold their stages.
    pub fn broken_hops(&self, wirings: &[Wiring]) -> Vec<StageId> {
        let gone = |(index, hop): &(usize, &Hop)| !wirings.get(*index).is_some_and(|w| w.has(hop.peer));
        self.route.iter().enumerate().filter(gone).map(|(index, _)| StageId(index as u16)).collect()
    }
}
