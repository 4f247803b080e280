//! The driver: sees leased lots through the pipeline. Picks one peer a stage for each lot, bounds what is in
//! flight, watches progress with deadlines that adapt, and routes around whoever is late or gone.
//!
//! Who grants what: the coordinator leases a lot to one driver; the driver grants (lot, stage) to one peer by
//! the attempt in the hop of the route, so that the grant travels with the forward pass. Changing a stage's
//! peer makes a later grant; the lot is then done again from its start *in that stage* (full replay through the
//! pipeline at the same version), and the other stages, whose grants stay, fold only what they lack.
//!
//! A driver counts nothing: whose sum of a lot is taken is the ledger's business. The worst that a driver can
//! do is to waste work.

mod lot;

use std::collections::BTreeMap;

use crate::deadline::Estimate;
use crate::ids::*;
use crate::message::*;
use crate::refusal::{Refusal, Refusals};
use crate::spec::Spec;
use crate::time::{Span, Time};
use crate::wiring::Wiring;
use lot::{Flight, LotRun};

/// What goes into a driver.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "an input is moved once and never stored")]
pub enum Input {
    /// A message came.
    Message(Envelope),
    /// The time of [`Driver::next_wake`] has come, and the inbox is empty.
    Wake,
}

/// What a driver wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Send this; a `Begin` goes out with the microbatch's tokens as its payload.
    Send(Envelope),
}

/// A driver's state; see the module's head.
#[derive(Clone, Debug)]
pub struct Driver {
    me: DriverId,
    incarnation: u64,
    site: SiteId,
    spec: Spec,
    member: Option<MemberNo>,
    term: Term,
    epoch: Epoch,
    step: Step,
    view: View,
    wirings: Vec<Wiring>,
    responses: BTreeMap<(StageId, Pass), Estimate>,
    lots: BTreeMap<Lot, LotRun>,
    flying: usize,
    now: Time,
    /// Pairs of neighbours between which something was lost, and until when they are avoided.
    bad_edges: BTreeMap<(Address, PeerId), Time>,
    complaints: BTreeMap<PeerId, u32>,
    next_beat: Time,
    refusals: Refusals,
}

impl Driver {
    /// A driver that nobody knows yet.
    pub fn new(me: DriverId, incarnation: u64, site: SiteId, spec: Spec, now: Time) -> Driver {
        let wirings = vec![Wiring::default(); spec.stages as usize];
        Driver {
            me,
            incarnation,
            site,
            spec,
            member: None,
            term: Term(0),
            epoch: Epoch(0),
            step: Step(0),
            view: View::default(),
            wirings,
            responses: BTreeMap::new(),
            lots: BTreeMap::new(),
            flying: 0,
            now,
            bad_edges: BTreeMap::new(),
            complaints: BTreeMap::new(),
            next_beat: now,
            refusals: Refusals::default(),
        }
    }

    /// Takes what happened, and says what is to be done.
    pub fn handle(&mut self, input: Input, now: Time, out: &mut Vec<Command>) {
        self.now = now;
        match input {
            Input::Message(envelope) => self.on_message(envelope, now, out),
            Input::Wake => self.on_wake(now, out),
        }
        self.launch(now, out);
        debug_assert_eq!(self.flying, self.lots.values().map(|lot| lot.flights.len()).sum::<usize>());
    }

    /// When it wants to be woken.
    pub fn next_wake(&self) -> Time {
        let mut wake = self.next_beat;
        for lot in self.lots.values() {
            lot.flights.values().for_each(|flight| wake = wake.min(flight.deadline));
            if let Some(finished) = lot.finished {
                wake = wake.min(finished + self.linger(lot));
            } else if lot.not_before > self.now {
                wake = wake.min(lot.not_before);
            }
        }
        wake
    }

    /// What was refused, by reason.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// Leases, and microbatches in flight.
    pub fn queue_lengths(&self) -> (usize, usize) {
        (self.lots.len(), self.flying)
    }

    fn on_message(&mut self, envelope: Envelope, now: Time, out: &mut Vec<Command>) {
        if let Err(refusal) = self.admit(&envelope) {
            return self.refusals.count(refusal);
        }
        let fence = envelope.fence;
        if envelope.from == Address::Coordinator {
            self.follow(fence);
        }
        match envelope.body {
            Body::Welcome { member, incarnation } if incarnation == self.incarnation => {
                self.member = Some(member);
                self.send_beat(out);
            }
            Body::Stranger { member } if member.is_some() && member == self.member => self.on_stranger(now),
            Body::Welcome { .. } | Body::Stranger { .. } => self.refusals.count(Refusal::OldAttempt),
            Body::View(view) => self.on_view(view, now, out),
            Body::Lease(lease) => self.on_lease(fence, lease, now),
            Body::LeaseEnd { leases } => self.on_lease_end(&leases),
            Body::Progress(progress) => self.on_progress(fence, progress, now),
            Body::Declined { lot, microbatch, lease, stage, reason } => {
                self.on_declined(fence, lot, microbatch, lease, stage, reason, now, out);
            }
            _ => self.refusals.count(Refusal::Malformed),
        }
    }

    fn admit(&self, envelope: &Envelope) -> Result<(), Refusal> {
        envelope.check().map_err(|_| Refusal::Malformed)?;
        if envelope.fence.run != self.spec.run {
            return Err(Refusal::OtherRun);
        }
        let fence = envelope.fence;
        match envelope.from {
            Address::Coordinator if fence.term < self.term => Err(Refusal::OldTerm),
            _ if (fence.epoch, fence.step) < (self.epoch, self.step) => Err(Refusal::OldStep),
            _ => Ok(()),
        }
    }

    /// A new term, epoch or step ends all leases of the old one.
    fn follow(&mut self, fence: Fence) {
        let theirs = (fence.term, fence.epoch, fence.step);
        if theirs > (self.term, self.epoch, self.step) {
            (self.term, self.epoch, self.step) = theirs;
            self.drop_all();
        }
    }

    fn drop_all(&mut self) {
        let lots: Vec<Lot> = self.lots.keys().copied().collect();
        lots.into_iter().for_each(|lot| self.drop_lot(lot));
    }

    fn drop_lot(&mut self, lot: Lot) {
        if let Some(run) = self.lots.remove(&lot) {
            self.flying -= run.flights.len();
            run.settle(&mut self.wirings);
        }
    }

    fn on_stranger(&mut self, now: Time) {
        self.member = None;
        self.incarnation += 1;
        self.drop_all();
        self.next_beat = now;
    }

    fn on_view(&mut self, view: View, now: Time, out: &mut Vec<Command>) {
        if view.stages.len() != self.spec.stages as usize {
            return self.refusals.count(Refusal::Nonsense);
        }
        if view.number < self.view.number {
            return self.refusals.count(Refusal::OldAttempt); // Overtaken on the way by a later one.
        }
        for (wiring, holders) in self.wirings.iter_mut().zip(&view.stages) {
            let guess = |speed: f64| Span::from_s_f64(1.0 / speed.max(1e-6));
            wiring.set_peers(holders.iter().map(|holder| (holder.peer, guess(holder.speed))));
        }
        self.view = view;
        let lots: Vec<Lot> = self.lots.keys().copied().collect();
        for lot in lots {
            for stage in self.lots[&lot].broken_hops(&self.view) {
                self.reroute(lot, stage, now, out);
            }
        }
    }

    fn on_lease(&mut self, fence: Fence, lease: Lease, now: Time) {
        let sound = lease.lot.0 < self.spec.lots.lots
            && lease.wanted.iter().all(|stage| stage.0 < self.spec.stages)
            && lease.number.term == fence.term;
        if !sound || self.lots.len() >= 4 * self.spec.tuning.leases {
            return self.refusals.count(Refusal::Nonsense);
        }
        if self.lots.get(&lease.lot).is_some_and(|lot| lot.lease.number >= lease.number) {
            return self.refusals.count(Refusal::Repeated);
        }
        let all = self.spec.lots.microbatches_of(lease.lot);
        self.drop_lot(lease.lot);
        self.lots.insert(lease.lot, LotRun::new(lease, all, now));
    }

    fn on_lease_end(&mut self, leases: &[LeaseNo]) {
        let ended: Vec<Lot> = self
            .lots
            .iter()
            .filter(|(_, lot)| leases.contains(&lot.lease.number))
            .map(|(&lot, _)| lot)
            .collect();
        ended.into_iter().for_each(|lot| self.drop_lot(lot));
    }

    fn on_progress(&mut self, fence: Fence, progress: Progress, now: Time) {
        let Progress { lot, microbatch, lease, stage, pass, computed } = progress;
        let Some(run) = self.lots.get_mut(&lot).filter(|run| run.lease.number == lease) else {
            return self.refusals.count(Refusal::OldAttempt);
        };
        let Some(&flight) = run.flights.get(&microbatch).filter(|flight| flight.attempt == fence.attempt)
        else {
            return self.refusals.count(Refusal::OldAttempt);
        };
        if stage.0 >= self.spec.stages || !is_further(&flight, stage, pass) {
            return self.refusals.count(Refusal::Repeated);
        }
        if (flight.stage, flight.pass) == (stage, pass) {
            self.responses.entry((stage, pass)).or_default().observe(now.since(flight.since));
        }
        let wiring = &mut self.wirings[stage.0 as usize];
        wiring.observe(run.route[stage.0 as usize].peer, pass, computed);
        if pass == Pass::Backward {
            run.give_back(stage, wiring);
        }
        if (stage.0, pass) == (0, Pass::Backward) {
            run.flights.remove(&microbatch);
            self.flying -= 1;
            if run.flights.is_empty() && run.waiting.is_empty() {
                run.finished = Some(now);
            }
            return;
        }
        let (stage, pass) = next_hop(stage, pass, self.spec.stages);
        let (peer, retries) = (run.route[stage.0 as usize].peer, run.retries);
        let deadline = now + self.patience(stage, pass, peer, retries);
        if let Some(run) = self.lots.get_mut(&lot) {
            run.flights.insert(microbatch, Flight { stage, pass, since: now, deadline, ..flight });
        }
    }

    /// How long to wait for a peer: what such responses took so far, or twice what the peer needs for all that it
    /// owes us, whichever is longer. The first alone would call every slow peer with a queue late.
    fn patience(&self, stage: StageId, pass: Pass, peer: PeerId, retries: u32) -> Span {
        let tuning = self.spec.tuning;
        let estimate = self.responses.get(&(stage, pass)).copied().unwrap_or_default();
        let busy = self.wirings[stage.0 as usize].busy_for(peer).times(2) + tuning.slack;
        estimate.deadline(tuning.slack, tuning.unknown, retries).max(busy)
    }

    fn on_declined(
        &mut self,
        fence: Fence,
        lot: Lot,
        microbatch: Microbatch,
        lease: LeaseNo,
        stage: StageId,
        reason: Decline,
        now: Time,
        out: &mut Vec<Command>,
    ) {
        let Some(run) = self.lots.get_mut(&lot).filter(|run| run.lease.number == lease) else { return };
        if run.flights.get(&microbatch).is_none_or(|flight| flight.attempt != fence.attempt) {
            return self.refusals.count(Refusal::OldAttempt);
        }
        match reason {
            Decline::NotHere if stage.0 < self.spec.stages => self.reroute(lot, stage, now, out),
            _ => {
                // Its queue is full: what is in it will come back, so wait a little and try again.
                run.flights.remove(&microbatch);
                run.waiting.insert(microbatch);
                run.not_before = now + self.spec.tuning.slack;
                self.flying -= 1;
            }
        }
    }

    fn on_wake(&mut self, now: Time, out: &mut Vec<Command>) {
        if now >= self.next_beat {
            self.next_beat = now + self.spec.tuning.beat;
            self.beat(out);
        }
        self.bad_edges.retain(|_, until| *until > now);
        let lots: Vec<Lot> = self.lots.keys().copied().collect();
        for lot in lots {
            self.check_lot(lot, now, out);
        }
    }

    /// Acts on the first deadline of a lot that has passed.
    fn check_lot(&mut self, lot: Lot, now: Time, out: &mut Vec<Command>) {
        let Some(run) = self.lots.get(&lot) else { return };
        let late = run.flights.values().find(|flight| flight.deadline <= now).copied();
        if let Some(flight) = late {
            let stage = flight.stage.0 as usize;
            let peer = run.route[stage].peer;
            let before = self.sender_to(run, flight);
            self.wirings[stage].blame(peer);
            *self.complaints.entry(peer).or_default() += 1;
            let avoid = self.spec.tuning.unknown.times(4);
            self.bad_edges.insert((before, peer), now + avoid);
            self.reroute(lot, flight.stage, now, out);
        } else if run.finished.is_some_and(|finished| finished + self.linger(run) <= now) {
            // All came back, and yet somebody has not sealed: have the wanted stages done once more.
            for stage in run.lease.wanted.clone() {
                self.reroute(lot, stage, now, out);
            }
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

    /// How long after the last microbatch the seals may take.
    fn linger(&self, lot: &LotRun) -> Span {
        (self.spec.tuning.beat.times(3) + self.spec.tuning.unknown).times(1 << lot.retries.min(4))
    }

    /// Gives a stage of a lot to another peer, or to the same if there is no other.
    fn reroute(&mut self, lot: Lot, stage: StageId, now: Time, out: &mut Vec<Command>) {
        let Some(mut run) = self.lots.remove(&lot) else { return };
        self.flying -= run.flights.len();
        let old = run.route.get(stage.0 as usize).copied();
        if let Some(old) = old {
            let neighbours = [stage.0.checked_sub(1), Some(stage.0 + 1)];
            let near: Vec<PeerId> = neighbours
                .into_iter()
                .flatten()
                .filter_map(|index| run.route.get(index as usize).map(|hop| hop.peer))
                .collect();
            run.settle_stage(stage, &mut self.wirings[stage.0 as usize]);
            let size = self.spec.lots.microbatches_of(lot).len() as u32;
            match self.choose(stage, size, &near, Some(old.peer)) {
                Some(peer) => {
                    run.reroute(stage, peer, self.spec.lots.microbatches_of(lot));
                    self.revoke(lot, &run, old, out);
                }
                None => {
                    let all = self.spec.lots.microbatches_of(lot);
                    run.clone().settle(&mut self.wirings);
                    run = LotRun::new(run.lease.clone(), all, now).after(&run);
                }
            }
        }
        self.flying += run.flights.len();
        self.lots.insert(lot, run);
    }

    /// Tells the peer that lost a lot, so that it does not compute it for nothing.
    fn revoke(&self, lot: Lot, run: &LotRun, old: Hop, out: &mut Vec<Command>) {
        if let Some(attempt) = old.grant {
            let grant = Grant { lease: run.lease.number, attempt };
            self.send(Address::Worker(old.peer), run.attempt, Body::Revoke { lot, grant }, out);
        }
    }

    /// A peer for a stage, reachable from its neighbours in the route; `not` only if there is no other.
    fn choose(&mut self, stage: StageId, size: u32, near: &[PeerId], not: Option<PeerId>) -> Option<PeerId> {
        let holders = &self.view.stages[stage.0 as usize];
        let (bad, me) = (&self.bad_edges, Address::Driver(self.me));
        let reachable = |peer: PeerId| {
            near.iter().all(|&other| {
                !bad.contains_key(&(Address::Worker(other), peer))
                    && !bad.contains_key(&(Address::Worker(peer), other))
            }) && (stage.0 > 0 || !bad.contains_key(&(me, peer)))
        };
        let site = |peer: PeerId| holders.iter().find(|holder| holder.peer == peer).map(|holder| holder.site);
        let home = near.first().and_then(|&peer| self.site_of(peer)).unwrap_or(self.site);
        let far = self.spec.tuning.far;
        let cost = |peer: PeerId| if site(peer) == Some(home) { Span(0) } else { far };
        let fresh = |peer: PeerId| holders.iter().any(|holder| holder.peer == peer && !holder.draining);
        let wiring = &mut self.wirings[stage.0 as usize];
        wiring
            .choose(size, |peer| (fresh(peer) && Some(peer) != not && reachable(peer)).then(|| cost(peer)))
            .or_else(|| wiring.choose(size, |peer| (Some(peer) != not).then(|| cost(peer))))
            .or_else(|| wiring.choose(size, |peer| Some(cost(peer))))
            .map(|choice| choice.peer)
    }

    fn site_of(&self, peer: PeerId) -> Option<SiteId> {
        self.view.stages.iter().flatten().find(|holder| holder.peer == peer).map(|holder| holder.site)
    }

    /// Sends what may be sent: lot by lot, in order, as long as there is room in flight.
    fn launch(&mut self, now: Time, out: &mut Vec<Command>) {
        if self.view.stages.iter().any(Vec::is_empty) || self.view.stages.is_empty() {
            return;
        }
        let lots: Vec<Lot> = self.lots.keys().copied().collect();
        for lot in lots {
            if self.flying >= self.spec.tuning.in_flight {
                return;
            }
            self.launch_lot(lot, now, out);
        }
    }

    fn launch_lot(&mut self, lot: Lot, now: Time, out: &mut Vec<Command>) {
        let Some(run) = self.lots.get(&lot).filter(|run| run.not_before <= now && !run.waiting.is_empty())
        else {
            return;
        };
        if run.route.is_empty() {
            let Some(route) = self.new_route(lot) else { return };
            if let Some(run) = self.lots.get_mut(&lot) {
                run.route = route; // What each hop owes was noted when it was chosen.
            }
        }
        while self.flying < self.spec.tuning.in_flight {
            let first = (StageId(0), Pass::Forward);
            let Some(run) = self.lots.get(&lot) else { return };
            let deadline = now + self.patience(first.0, first.1, run.route[0].peer, run.retries);
            let Some(run) = self.lots.get_mut(&lot) else { return };
            let Some(microbatch) = run.waiting.pop_first() else { return };
            let attempt = run.attempt;
            let flight = Flight { attempt, stage: first.0, pass: first.1, since: now, deadline };
            run.flights.insert(microbatch, flight);
            self.flying += 1;
            let (lease, route) = (run.lease.number, run.route.clone());
            let to = Address::Worker(route[0].peer);
            let work = Work { lot, microbatch, lease, driver: self.me, route };
            self.send(to, attempt, Body::Begin(work, Payload::default()), out);
        }
    }

    fn new_route(&mut self, lot: Lot) -> Option<Vec<Hop>> {
        let mut route: Vec<Hop> = Vec::with_capacity(self.spec.stages as usize);
        for stage in (0..self.spec.stages).map(StageId) {
            let near: Vec<PeerId> = route.last().map(|hop| hop.peer).into_iter().collect();
            let size = self.spec.lots.microbatches_of(lot).len() as u32;
            let peer = self.choose(stage, size, &near, None)?;
            let run = self.lots.get_mut(&lot)?;
            run.owed.push(size);
            route.push(Hop { peer, grant: run.wants(stage).then_some(run.attempt) });
        }
        Some(route)
    }

    fn beat(&mut self, out: &mut Vec<Command>) {
        if self.member.is_none() {
            let hello = Hello::Driver { incarnation: self.incarnation, site: self.site };
            return self.send(Address::Coordinator, Attempt(0), Body::Hello(hello), out);
        }
        self.send_beat(out);
    }

    fn send_beat(&mut self, out: &mut Vec<Command>) {
        let status = DriverStatus {
            member: self.member,
            view: self.view.number,
            leases: self.lots.values().map(|lot| lot.lease.number).collect(),
            complaints: std::mem::take(&mut self.complaints).into_iter().collect(),
        };
        self.send(Address::Coordinator, Attempt(0), Body::DriverBeat(status), out);
    }

    fn send(&self, to: Address, attempt: Attempt, body: Body, out: &mut Vec<Command>) {
        let fence =
            Fence { run: self.spec.run, term: self.term, epoch: self.epoch, step: self.step, attempt };
        out.push(Command::Send(Envelope {
            protocol: PROTOCOL,
            from: Address::Driver(self.me),
            to,
            fence,
            body,
        }));
    }
}

impl LotRun {
    /// A lot begun again keeps its attempts, so that its grants are later than all before.
    fn after(mut self, old: &LotRun) -> LotRun {
        self.attempt = Attempt(old.attempt.0 + 1);
        self.retries = old.retries;
        self
    }
}

/// Whether this news is at or after where the flight was known to be.
fn is_further(flight: &Flight, stage: StageId, pass: Pass) -> bool {
    match (flight.pass, pass) {
        (Pass::Forward, Pass::Forward) => stage >= flight.stage,
        (Pass::Forward, Pass::Backward) => true,
        (Pass::Backward, Pass::Forward) => false,
        (Pass::Backward, Pass::Backward) => stage <= flight.stage,
    }
}

/// Who is at work after this.
fn next_hop(stage: StageId, pass: Pass, stages: u16) -> (StageId, Pass) {
    match pass {
        Pass::Forward if stage.0 + 1 == stages => (stage, Pass::Backward),
        Pass::Forward => (StageId(stage.0 + 1), Pass::Forward),
        Pass::Backward => (StageId(stage.0.saturating_sub(1)), Pass::Backward),
    }
}
