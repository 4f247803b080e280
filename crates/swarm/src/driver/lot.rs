//! One lot at its driver: its route, what is in flight, what is done.

use std::sync::Arc;

use crate::ids::*;
use crate::message::{Hop, Lease, Pass};
use crate::small::SmallMap;
use crate::time::{Span, Time};
use crate::wiring::{Load, Wiring};

/// One leased lot.
#[derive(Clone, Debug)]
pub struct LotRun {
    /// The lease.
    pub lease: Lease,
    /// Who computes it, stage by stage, as far as that is decided.
    pub route: Arc<[Hop]>,
    /// What each hop of the route has to do for us.
    pub owed: Vec<Owed>,
    /// The last attempt that was handed out.
    pub attempt: Attempt,
    /// Microbatches that wait to be sent (again).
    pub waiting: SmallMap<Microbatch, ()>,
    /// Microbatches under way.
    pub flights: SmallMap<Microbatch, Flight>,
    /// Nothing is sent before this.
    pub not_before: Option<Time>,
    /// How often it had to be done again; every time it is given twice the patience.
    pub retries: u32,
    /// How often the result of a peer was not finite.
    pub not_finite: u32,
    /// When the last microbatch came back: the seals should be in soon after.
    pub finished: Option<Time>,
    /// When it wants to be looked at, as it stands in the driver's calendar.
    pub wake: Option<Time>,
}

/// What a hop has to do for a lot.
#[derive(Clone, Copy, Debug, Default)]
pub struct Owed {
    /// Microbatches that it has not given back.
    microbatches: u32,
    /// Whether they are done before everything else.
    is_urgent: bool,
    load: Load,
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
    /// When it is late, unless its peer tells us of other work meanwhile: then it waits for its turn.
    pub deadline: Time,
    /// How long the peer may tell us of nothing.
    pub patience: Span,
    /// How much of the route those who compute it know.
    pub known: usize,
}

/// How many times its patience a flight may take while its peer is at work on others: queues before it, on the wire as in
/// the device, grow faster than what was measured says. If all that waits in them were called late and sent anew,
/// they would only grow longer (64 peers in 8 sites closed no step in an hour). And no more than that, since what was lost
/// between two that live is found by nothing else.
const PATIENCES: u64 = 4;

impl Flight {
    /// A microbatch is on its way to a peer, which may take so long to answer.
    pub fn begun(
        attempt: Attempt,
        (stage, pass): (StageId, Pass),
        since: Time,
        patience: Span,
        known: usize,
    ) -> Flight {
        Flight { attempt, stage, pass, since, deadline: since + patience, patience, known }
    }

    /// Its deadline, if its peer was heard of then.
    pub fn put_off(&self, heard: Time) -> Time {
        (heard + self.patience).min(self.since + self.patience.times(PATIENCES))
    }
}

impl Owed {
    fn all(microbatches: u32, is_urgent: bool) -> Owed {
        let urgent = if is_urgent { microbatches } else { 0 };
        Owed { microbatches, is_urgent, load: Load { forward: microbatches, backward: 0, urgent } }
    }
}

impl LotRun {
    /// A lot of which nothing is done.
    pub fn new(lease: Lease, microbatches: std::ops::Range<u32>) -> LotRun {
        LotRun {
            lease,
            route: Arc::new([]),
            owed: Vec::new(),
            attempt: Attempt(0),
            flights: SmallMap::with_capacity(microbatches.len()),
            waiting: whole(microbatches),
            not_before: None,
            retries: 0,
            not_finite: 0,
            finished: None,
            wake: None,
        }
    }

    /// Whether the gradients of a stage are wanted from us.
    pub fn wants(&self, stage: StageId) -> bool {
        self.lease.held.get(stage.0 as usize).is_some_and(Option::is_none)
    }

    /// Whether some stage has it already: it was lost in the others.
    pub fn is_redo(&self) -> bool {
        self.lease.held.iter().any(Option::is_some)
    }

    /// The next stage is given to a peer, which then owes us so many microbatches.
    pub fn add_hop(&mut self, peer: PeerId, owed: u32, is_urgent: bool) {
        let grant = self.wants(StageId(self.route.len() as u16)).then_some(self.attempt);
        self.route = self.route.iter().copied().chain([Hop { peer, grant }]).collect();
        self.owed.push(Owed::all(owed, is_urgent));
    }

    /// Another peer takes over a stage. If its gradients are wanted, the lot is done again from its start there,
    /// so every microbatch goes through once more; the other stages fold only what they have not folded.
    pub fn reroute(&mut self, stage: StageId, peer: PeerId, all: std::ops::Range<u32>, is_urgent: bool) {
        self.attempt.0 += 1;
        self.retries += 1;
        let grant = self.wants(stage).then_some(self.attempt);
        let mut route = self.route.to_vec();
        route[stage.0 as usize] = Hop { peer, grant };
        self.route = route.into();
        if let Some(owed) = self.owed.get_mut(stage.0 as usize) {
            *owed = Owed::all(all.len() as u32, is_urgent);
        }
        if grant.is_some() {
            self.waiting = whole(all);
        } else {
            for microbatch in self.flights.keys() {
                self.waiting.insert(microbatch, ());
            }
        }
        self.flights.clear();
        if !self.waiting.is_empty() {
            self.finished = None;
        }
    }

    /// A microbatch was computed in a stage: what that hop and the one before owe then.
    pub fn computed(&mut self, stage: StageId, pass: Pass, wirings: &mut [Wiring]) {
        let at = stage.0 as usize;
        let is_last = at + 1 == wirings.len();
        let (Some(owed), Some(hop)) = (self.owed.get_mut(at), self.route.get(at)) else { return };
        match pass {
            Pass::Forward => {
                if owed.load.forward > 0 {
                    owed.load.forward -= 1;
                    wirings[at].gone_on(hop.peer);
                }
                if is_last {
                    self.comes_back(stage, wirings);
                }
            }
            Pass::Backward => {
                if owed.load.backward > 0 && owed.microbatches > 0 {
                    owed.load.backward -= 1;
                    owed.microbatches -= 1;
                    owed.load.urgent = owed.load.urgent.saturating_sub(1);
                    wirings[at].paid(hop.peer, owed.is_urgent);
                }
                if let Some(before) = stage.0.checked_sub(1) {
                    self.comes_back(StageId(before), wirings);
                }
            }
        }
    }

    /// The gradient of a microbatch came back to a stage.
    fn comes_back(&mut self, stage: StageId, wirings: &mut [Wiring]) {
        let at = stage.0 as usize;
        if let (Some(owed), Some(hop)) = (self.owed.get_mut(at), self.route.get(at))
            && owed.load.forward + owed.load.backward < owed.microbatches
        {
            owed.load.backward += 1;
            wirings[at].come_back(hop.peer);
        }
    }

    /// The hop of a stage owes nothing more for this lot.
    pub fn settle_stage(&mut self, stage: StageId, wiring: &mut Wiring) {
        if let (Some(owed), Some(hop)) =
            (self.owed.get_mut(stage.0 as usize), self.route.get(stage.0 as usize))
        {
            let Owed { microbatches, load, .. } = std::mem::take(owed);
            wiring.settle(hop.peer, microbatches, load);
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
        self.waiting = whole(all);
        self.finished = None;
    }

    /// When it wants to be looked at.
    pub fn next_wake(&self, linger: Span) -> Option<Time> {
        let late = self.flights.values().map(|flight| flight.deadline).min();
        [late, self.not_before, self.finished.map(|finished| finished + linger)].into_iter().flatten().min()
    }

    /// The hops whose peers no longer hold their stages.
    pub fn broken_hops(&self, wirings: &[Wiring]) -> impl Iterator<Item = StageId> {
        let gone = |(index, hop): &(usize, &Hop)| !wirings.get(*index).is_some_and(|w| w.has(hop.peer));
        self.route.iter().enumerate().filter(gone).map(|(index, _)| StageId(index as u16))
    }
}

/// All microbatches of a lot.
fn whole(microbatches: std::ops::Range<u32>) -> SmallMap<Microbatch, ()> {
    microbatches.map(|microbatch| (Microbatch(microbatch), ())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flight_waits_while_its_peer_is_at_work_on_others_but_not_for_ever() {
        let (first, patience) = ((StageId(0), Pass::Forward), Span::s(2));
        let flight = Flight::begun(Attempt(0), first, Time(0) + Span::s(10), patience, 1);
        let at = |s: u64| Time(0) + Span::s(s);
        assert_eq!(flight.deadline, at(12));
        assert_eq!(flight.put_off(at(9)), at(11), "nothing was heard since it was sent");
        assert_eq!(flight.put_off(at(11)), at(13));
        assert_eq!(flight.put_off(at(17)), at(18), "what is lost on its way is found out in the end");
    }
}
