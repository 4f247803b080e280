//! Which peers compute a lot, and what to do when one of them is late or gone.

use std::cell::OnceCell;

use crate::driver::launching::Stretch;
use crate::driver::lot::{Flight, LotRun};
use crate::driver::{Command, Driver};
use crate::ids::*;
use crate::message::*;
use crate::spec::Sync;
use crate::time::Span;
use crate::wiring::About;

/// A lot goes to another site only when so many microbatches more wait for every peer that is near: two sites that
/// each hold all stages then exchange sums and nothing else.
const FAR_QUEUE: u64 = 8;

/// What a peer is looked for.
#[derive(Clone, Copy)]
pub(super) struct Search<'a> {
    pub stage: StageId,
    pub step: Step,
    /// Microbatches of the lot.
    pub size: u32,
    /// Its neighbours in the route, as far as they are known.
    pub near: &'a [PeerId],
    /// Who should not get it, if there is anybody else.
    pub not: Option<PeerId>,
    /// It is done before everything else.
    pub is_urgent: bool,
}

impl Driver {
    /// The beginning of a route for a lot whose first hop is chosen.
    pub(super) fn begin_route(&mut self, at: LotOf, first: PeerId) {
        let known = |peer: &PeerId| self.wirings[0].has(*peer);
        let Some(held) = self.lots.get(&at).map(|run| run.lease.held[0].filter(known)) else { return };
        let first = held.unwrap_or_else(|| self.who_does_again(StageId(0), at, &[], first));
        self.add_hop(at, first, held.is_some());
    }

    /// Makes the route so long, as far as there are stages. Each hop is chosen when the first microbatch is done in
    /// the stage before it, and no earlier: who is free then could not be known before.
    pub(super) fn bind(&mut self, at: LotOf, hops: usize) -> bool {
        let size = self.size(at);
        while let Some(run) = self.lots.get(&at).filter(|run| run.route.len() < hops.min(self.wirings.len()))
        {
            let stage = StageId(run.route.len() as u16);
            let wiring = &self.wirings[stage.0 as usize];
            let before = run.route.last().map(|hop| hop.peer);
            let near = before.as_slice();
            let held = run.lease.held[stage.0 as usize].filter(|peer| wiring.has(*peer));
            let search =
                Search { stage, step: at.step, size, near, not: None, is_urgent: self.is_urgent(at) };
            let chosen = held.or_else(|| self.choose_near(at, search)).or_else(|| self.choose(search));
            let Some(peer) = chosen else { return false };
            let peer = held.unwrap_or_else(|| self.who_does_again(stage, at, near, peer));
            self.add_hop(at, peer, held.is_some());
        }
        true
    }

    /// If a lot was lost in a stage, the peer that does others of them again.
    fn who_does_again(&mut self, stage: StageId, at: LotOf, near: &[PeerId], new: PeerId) -> PeerId {
        let lost = self.lots.get(&at).is_some_and(|run| run.is_redo() && run.wants(stage));
        if !lost {
            return new;
        }
        let (size, wiring) = (self.size(at), &self.wirings[stage.0 as usize]);
        let fit = |peer: &PeerId| {
            wiring.about(*peer).is_some_and(|about| self.is_fit(about, at.step, size))
                && self.is_reachable(stage, *peer, near)
        };
        let same = self.queue.who_redoes(at.step, stage).filter(fit);
        self.queue.redo(at.step, stage, same.unwrap_or(new))
    }

    /// Whether a lot is done again for a step that is about to be closed: as soon as the next one is under way, workers
    /// do it first.
    pub(super) fn is_urgent(&self, at: LotOf) -> bool {
        let again = || self.lots.get(&at).is_some_and(LotRun::is_redo);
        self.spec.sync == Sync::Delayed && at.step == self.step && again()
    }

    fn add_hop(&mut self, at: LotOf, peer: PeerId, held: bool) {
        let owed = if held { 0 } else { self.size(at) };
        let is_urgent = self.is_urgent(at);
        if let Some(run) = self.lots.get_mut(&at) {
            self.wirings[run.route.len()].charge(peer, owed, is_urgent);
            run.add_hop(peer, owed, is_urgent);
        }
    }

    /// Gives a stage of a lot to another peer, or to the same if there is no other.
    pub(super) fn reroute(&mut self, at: LotOf, stage: StageId, out: &mut Vec<Command>) {
        let (size, all) = (self.size(at), self.spec.lots.microbatches_of(at.lot));
        let Some(run) = self.lots.get_mut(&at).filter(|run| run.route.len() > stage.0 as usize) else {
            return;
        };
        self.flying.land(run);
        run.settle_stage(stage, &mut self.wirings[stage.0 as usize]);
        let old = run.route[stage.0 as usize];
        let neighbours = [stage.0.checked_sub(1), Some(stage.0 + 1)].into_iter().flatten();
        let near: Vec<PeerId> =
            neighbours.filter_map(|index| run.route.get(index as usize).map(|hop| hop.peer)).collect();
        let is_urgent = self.is_urgent(at);
        let search = Search { stage, step: at.step, size, near: &near, not: Some(old.peer), is_urgent };
        let chosen = self.choose(search);
        let wirings = &mut self.wirings;
        let Some(run) = self.lots.get_mut(&at) else { return };
        let is_redo = run.is_redo();
        match chosen {
            Some(peer) => {
                run.reroute(stage, peer, all, is_urgent);
                wirings[stage.0 as usize].charge(peer, size, is_urgent);
                if let Some(attempt) = old.grant {
                    let (grant, attempt) = (Grant { lease: run.lease.number, attempt }, run.attempt);
                    let body = Body::Revoke { lot: at.lot, grant };
                    self.send(Address::Worker(old.peer), at.step, attempt, body, out);
                }
                self.queue.send_again(at, is_redo);
            }
            None => {
                *self.flying.of(run) += run.flights.len();
                return self.give_up_route(at);
            }
        }
        if let Some(run) = self.lots.get(&at) {
            *self.flying.of(run) += run.flights.len();
        }
        self.note_wake(at);
    }

    /// There is nobody for a stage: the lot waits until there is, and begins again.
    pub(super) fn give_up_route(&mut self, at: LotOf) {
        let Some(run) = self.lots.get_mut(&at) else { return };
        self.flying.land(run);
        run.settle(&mut self.wirings);
        run.begin_again(self.spec.lots.microbatches_of(at.lot));
        self.queue.begin_again(at, run.is_redo());
        self.note_wake(at);
    }

    /// A peer let its deadline pass: it is taken to be slower, and the way to it is avoided for a while.
    pub(super) fn blame(&mut self, at: LotOf, flight: Flight) {
        let Some(run) = self.lots.get(&at) else { return };
        let stage = flight.stage.0 as usize;
        let Some(peer) = run.route.get(stage).map(|hop| hop.peer) else { return };
        let before = self.sender_to(run, flight);
        self.wirings[stage].blame(peer);
        *self.complaints.entry(peer).or_default() += 1;
        let avoid = self.spec.tuning.unknown.times(4);
        self.bad_edges.insert((before, peer), self.now + avoid);
        self.wirings[0].look_again();
    }

    /// The stage that is late, or, if that is not the first time and its sender has lately reached nobody there, the
    /// sender's.
    pub(super) fn whom_to_replace(&self, at: LotOf, flight: Flight) -> StageId {
        let Some(run) = self.lots.get(&at) else { return flight.stage };
        let sender = self.sender_to(run, flight);
        let stage = |hop: &Hop| Address::Worker(hop.peer) == sender;
        let reaches = |peer, _| !self.bad_edges.contains_key(&(sender, peer));
        match run.route.iter().position(stage) {
            Some(before) if run.retries > 0 && !self.wirings[flight.stage.0 as usize].any(reaches) => {
                StageId(before as u16)
            }
            _ => flight.stage,
        }
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
    fn choose_near(&mut self, at: LotOf, search: Search<'_>) -> Option<PeerId> {
        if search.is_urgent {
            return None;
        }
        let Search { stage, size, near, .. } = search;
        let wiring = &self.wirings[stage.0 as usize];
        let kept = self.queue.stretch(stage, at).filter(|&peer| {
            wiring.about(peer).is_some_and(|about| self.is_fit(about, at.step, size))
                && self.is_reachable(stage, peer, near)
        });
        let chosen = self.choose_fit(search)?;
        let wiring = &self.wirings[stage.0 as usize];
        // Neighbours are worth one microbatch's time, and no more: what a peer does later for their sake, the stages
        // behind it begin later, each of them once more.
        if let (Some(kept), Some(most)) = (kept, wiring.done_in(chosen, size.saturating_add(1)))
            && wiring.done_in(kept, size).is_some_and(|done| done <= most)
        {
            return Some(kept);
        }
        let lots = self.stretch_for(stage, chosen, at);
        self.queue.open_stretch(stage, at, Stretch { lots, peer: chosen });
        Some(chosen)
    }

    /// A peer for a stage, reachable from its neighbours in the route; `not` only if there is no other.
    pub(super) fn choose(&self, search: Search<'_>) -> Option<PeerId> {
        let Search { stage, step, size, near, not, .. } = search;
        let wiring = &self.wirings[stage.0 as usize];
        let cost = self.costs(stage, near);
        let (aim, cost) = (self.aim(), |about: About| cost(about.site));
        let able =
            |peer, about: About| (Some(peer) != not && about.has_weights_of(step)).then(|| cost(about));
        let anybody = |_, about: About| Some(cost(about));
        self.choose_fit(search).or_else(|| {
            let choice = wiring.choose(size, aim, able).or_else(|| wiring.choose(size, aim, anybody));
            choice.map(|choice| choice.peer)
        })
    }

    /// The same, among those only that have room for it, stay, and can be reached.
    pub(super) fn choose_fit(&self, search: Search<'_>) -> Option<PeerId> {
        let Search { stage, step, size, near, not, is_urgent } = search;
        let (cost, wiring) = (self.costs(stage, near), &self.wirings[stage.0 as usize]);
        let extra = |peer, about: About| {
            let fit = Some(peer) != not && self.is_fit(about, step, size);
            (fit && self.is_reachable(stage, peer, near)).then(|| cost(about.site))
        };
        if is_urgent {
            return wiring.choose_urgent(size, extra);
        }
        wiring.choose(size, self.aim(), extra).map(|choice| choice.peer)
    }

    /// Whether a peer stays, has the weights, and has room for a lot.
    pub(super) fn is_fit(&self, about: About, step: Step, size: u32) -> bool {
        // A lot larger than the room goes to who has nothing else to do.
        let room = about.owes == 0 || about.owes as usize + size as usize <= self.spec.tuning.jobs;
        !about.draining && about.has_weights_of(step) && room
    }

    /// What the way to a site costs, in the currency of response times. Peers elsewhere work for drivers there, of whose
    /// work we know nothing: they are taken to owe them as much that is on its way back as the near ones owe us.
    fn costs(&self, stage: StageId, near: &[PeerId]) -> impl Fn(SiteId) -> Span {
        let home = near.first().and_then(|&peer| self.site_of(stage, peer)).unwrap_or(self.site);
        let (wiring, far) = (&self.wirings[stage.0 as usize], OnceCell::new());
        let elsewhere =
            move || self.spec.tuning.far + wiring.microbatch().times(FAR_QUEUE) + wiring.returning(home);
        move |site| if site == home { Span(0) } else { *far.get_or_init(&elsewhere) }
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
