//! Which peers compute a lot, and what to do when one of them is late or gone.

use std::sync::Arc;

use crate::driver::launching::Stretch;
use crate::driver::lot::{Flight, LotRun};
use crate::driver::{Command, Driver};
use crate::ids::*;
use crate::message::*;
use crate::time::Span;
use crate::wiring::About;

impl Driver {
    /// A route for a lot whose first hop is chosen.
    pub(super) fn find_route(&mut self, at: LotOf, first: PeerId) -> bool {
        let Some(run) = self.lots.get(&at) else { return false };
        let held = run.lease.held.clone();
        let size = self.size(at);
        let mut peers: Vec<PeerId> = Vec::with_capacity(held.len());
        for (stage, held) in held.iter().enumerate() {
            let held = held.filter(|peer| self.wirings[stage].has(*peer));
            let near = peers.last().copied();
            let stage = StageId(stage as u16);
            let chosen = match held {
                Some(peer) => Some(peer),
                None if stage.0 == 0 => Some(first),
                None => self.choose_near(stage, at, size, near),
            };
            let Some(peer) = chosen else { return false };
            peers.push(peer);
        }
        let wirings = &mut self.wirings;
        let Some(run) = self.lots.get_mut(&at) else { return false };
        let hop = |(stage, peer): (usize, PeerId)| {
            let grant = run.wants(StageId(stage as u16)).then_some(run.attempt);
            Hop { peer, grant }
        };
        let route: Arc<[Hop]> = peers.into_iter().enumerate().map(hop).collect();
        run.owed = held.iter().map(|held| if held.is_none() { size } else { 0 }).collect();
        for ((hop, wiring), &owed) in route.iter().zip(wirings).zip(&run.owed) {
            wiring.charge(hop.peer, owed);
        }
        run.route = route;
        true
    }

    /// Gives a stage of a lot to another peer, or to the same if there is no other.
    pub(super) fn reroute(&mut self, at: LotOf, stage: StageId, out: &mut Vec<Command>) {
        let (size, all) = (self.size(at), self.spec.lots.microbatches_of(at.lot));
        let Some(run) = self.lots.get_mut(&at).filter(|run| !run.route.is_empty()) else { return };
        self.flying -= run.flights.len();
        run.settle_stage(stage, &mut self.wirings[stage.0 as usize]);
        let old = run.route[stage.0 as usize];
        let neighbours = [stage.0.checked_sub(1), Some(stage.0 + 1)].into_iter().flatten();
        let near: Vec<PeerId> =
            neighbours.filter_map(|index| run.route.get(index as usize).map(|hop| hop.peer)).collect();
        let chosen = self.choose(stage, at.step, size, &near, Some(old.peer));
        let wirings = &mut self.wirings;
        let Some(run) = self.lots.get_mut(&at) else { return };
        match chosen {
            Some(peer) => {
                run.reroute(stage, peer, all);
                wirings[stage.0 as usize].charge(peer, size);
                if let Some(attempt) = old.grant {
                    let (grant, attempt) = (Grant { lease: run.lease.number, attempt }, run.attempt);
                    let body = Body::Revoke { lot: at.lot, grant };
                    self.send(Address::Worker(old.peer), at.step, attempt, body, out);
                }
                self.queue.send_again(at);
            }
            None => {
                run.settle(wirings);
                run.begin_again(all);
                self.queue.begin_again(at);
            }
        }
        if let Some(run) = self.lots.get(&at) {
            self.flying += run.flights.len();
        }
        self.note_wake(at);
    }

    /// A peer let its deadline pass: it is taken to be slower, and the way to it is avoided for a while.
    pub(super) fn blame(&mut self, at: LotOf, flight: Flight) {
        let Some(run) = self.lots.get(&at) else { return };
        let stage = flight.stage.0 as usize;
        let peer = run.route[stage].peer;
        let before = self.sender_to(run, flight);
        self.wirings[stage].blame(peer);
        *self.complaints.entry(peer).or_default() += 1;
        let avoid = self.spec.tuning.unknown.times(4);
        self.bad_edges.insert((before, peer), self.now + avoid);
    }

    /// Who was to send to the peer that is late.
    fn sender_to(&self, run: &LotRun, flight: Flight) -> Address {
        let stage = flight.stage.0 as usize;
        let neighbour = match flight.pass {
            Pass::Forward => stage.checked_sub(1),
            Pass::Backward => Some(stage + 1),
        };
        match neighbour.and_then(|index| run.route.get(index)) {
            Some(hop) => Address::Worker(hop.peer),
            None => Address::Driver(self.me),
        }
    }

    /// A peer for a stage after `near`. Neighbouring lots go to one peer as far as that holds nobody up.
    fn choose_near(&mut self, stage: StageId, at: LotOf, size: u32, near: Option<PeerId>) -> Option<PeerId> {
        let near: Vec<PeerId> = near.into_iter().collect();
        let wiring = &self.wirings[stage.0 as usize];
        let kept = self.queue.stretch(stage, at).filter(|&peer| {
            wiring.about(peer).is_some_and(|about| self.is_fit(about, at.step, size))
                && self.is_reachable(stage, peer, &near)
        });
        let chosen = self.choose_fit(stage, at.step, size, &near, None)?;
        let wiring = &self.wirings[stage.0 as usize];
        if let (Some(kept), Some(best)) = (kept, wiring.done_in(chosen, size)) {
            let most = best.times(2) + wiring.done_in(chosen, size.saturating_mul(2)).unwrap_or_default();
            if wiring.done_in(kept, size).is_some_and(|done| done <= most) {
                return Some(kept);
            }
        }
        let lots = self.stretch_for(stage, chosen, at);
        self.queue.open_stretch(stage, at, Stretch { lots, peer: chosen });
        Some(chosen)
    }

    /// A peer for a stage, reachable from its neighbours in the route; `not` only if there is no other.
    fn choose(
        &self,
        stage: StageId,
        step: Step,
        size: u32,
        near: &[PeerId],
        not: Option<PeerId>,
    ) -> Option<PeerId> {
        let wiring = &self.wirings[stage.0 as usize];
        let cost = |about: About| self.cost(stage, about.site, near);
        self.choose_fit(stage, step, size, near, not).or_else(|| {
            let able = |peer, about: About| (Some(peer) != not && about.since <= step).then(|| cost(about));
            let choice =
                wiring.choose(size, able).or_else(|| wiring.choose(size, |_, about| Some(cost(about))));
            choice.map(|choice| choice.peer)
        })
    }

    /// The same, among those only that have room for it, stay, and can be reached.
    fn choose_fit(
        &self,
        stage: StageId,
        step: Step,
        size: u32,
        near: &[PeerId],
        not: Option<PeerId>,
    ) -> Option<PeerId> {
        let choice = self.wirings[stage.0 as usize].choose(size, |peer, about| {
            let fit = Some(peer) != not && self.is_fit(about, step, size);
            (fit && self.is_reachable(stage, peer, near)).then(|| self.cost(stage, about.site, near))
        });
        choice.map(|choice| choice.peer)
    }

    /// Whether a peer stays, has the weights, and has room for a lot.
    pub(super) fn is_fit(&self, about: About, step: Step, size: u32) -> bool {
        // A lot larger than the room goes to who has nothing else to do.
        let room = about.owes == 0 || about.owes as usize + size as usize <= self.spec.tuning.jobs;
        !about.draining && about.since <= step && room
    }

    /// What the way to a site costs, in the currency of response times.
    fn cost(&self, stage: StageId, site: SiteId, near: &[PeerId]) -> Span {
        let home = near.first().and_then(|&peer| self.site_of(stage, peer)).unwrap_or(self.site);
        if site == home { Span(0) } else { self.spec.tuning.far }
    }

    pub(super) fn is_reachable(&self, stage: StageId, peer: PeerId, near: &[PeerId]) -> bool {
        if self.bad_edges.is_empty() {
            return true;
        }
        let bad = |from: Address, to: PeerId| self.bad_edges.contains_key(&(from, to));
        let cut = |other: &PeerId| bad(Address::Worker(*other), peer) || bad(Address::Worker(peer), *other);
        !near.iter().any(cut) && (stage.0 > 0 || !bad(Address::Driver(self.me), peer))
    }

    /// The site of a peer of a neighbouring stage.
    fn site_of(&self, stage: StageId, peer: PeerId) -> Option<SiteId> {
        let neighbours = [stage.0.checked_sub(1), Some(stage.0 + 1)].into_iter().flatten();
        let mut wirings = neighbours.filter_map(|index| self.wirings.get(index as usize));
        wirings.find_map(|wiring| wiring.about(peer)).map(|about| about.site)
    }

    pub(super) fn size(&self, at: LotOf) -> u32 {
        self.spec.lots.microbatches_of(at.lot).len() as u32
    }
}
