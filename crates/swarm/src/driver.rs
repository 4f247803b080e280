//! The driver: sees leased lots through the pipeline. Picks a peer for each stage of a lot when it is to go there,
//! bounds what is in flight, watches progress with deadlines that adapt, and routes around whoever is late or gone.
//!
//! Who grants what: the coordinator leases a lot to one driver; the driver grants (lot, stage) to one peer by
//! the attempt in the hop of the route, so that the grant travels with the forward pass. Changing a stage's
//! peer makes a later grant; the lot is then sent through the whole pipeline once more, and is done again from its
//! start *in that stage*. The other stages, whose grants stay, answer from what they kept, and fold only what they
//! lack.
//!
//! A driver counts nothing: whose sum of a lot is taken is the ledger's business. The worst that a driver can
//! do is to waste work, and, since it hands out the data, to give wrong data.

mod launching;
mod lot;
mod routing;
mod table;

use std::collections::{BTreeMap, BTreeSet};

use crate::deadline::Estimate;
use crate::ids::*;
use crate::message::*;
use crate::refusal::{Refusal, Refusals};
use crate::spec::Spec;
use crate::time::{Span, Time};
use crate::wiring::Wiring;
use launching::Queue;
use lot::{Flight, LotRun};
use table::LotTable;

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
    /// The oldest step that is open.
    step: Step,
    view: u64,
    /// The sites that have a driver.
    driven: Vec<SiteId>,
    wirings: Vec<Wiring>,
    /// How long stages took to respond, forward and backward.
    responses: Vec<[Estimate; 2]>,
    lots: LotTable<LotRun>,
    leases: BTreeMap<LeaseNo, LotOf>,
    queue: Queue,
    flying: Flying,
    /// How many may be in flight of either kind, for those who are there now.
    room: usize,
    /// When each lot wants to be looked at.
    calendar: BTreeSet<(Time, LotOf)>,
    now: Time,
    /// Pairs of neighbours between which something was lost, and until when they are avoided.
    bad_edges: BTreeMap<(Address, PeerId), Time>,
    complaints: BTreeMap<PeerId, u32>,
    next_beat: Time,
    refusals: Refusals,
}

/// Microbatches in flight. Those of lots that were lost somewhere are counted apart: a closing step waits for them, and
/// they cost one stage's time.
#[derive(Clone, Copy, Debug, Default)]
struct Flying {
    first: usize,
    again: usize,
}

impl Flying {
    fn all(&self) -> usize {
        self.first + self.again
    }

    /// The count to which a lot's belong.
    fn of(&mut self, run: &LotRun) -> &mut usize {
        if run.is_redo() { &mut self.again } else { &mut self.first }
    }

    /// All of a lot are given up.
    fn land(&mut self, run: &LotRun) {
        *self.of(run) -= run.flights.len();
    }
}

impl Driver {
    /// A driver that nobody knows yet.
    pub fn new(me: DriverId, incarnation: u64, site: SiteId, spec: Spec, now: Time) -> Driver {
        Driver {
            me,
            incarnation,
            site,
            member: None,
            term: Term(0),
            epoch: Epoch(0),
            step: Step(0),
            view: 0,
            driven: Vec::new(),
            wirings: vec![Wiring::default(); spec.stages as usize],
            responses: vec![Default::default(); spec.stages as usize],
            lots: LotTable::default(),
            leases: BTreeMap::new(),
            queue: Queue::new(spec.stages),
            flying: Flying::default(),
            room: 0,
            calendar: BTreeSet::new(),
            now,
            bad_edges: BTreeMap::new(),
            complaints: BTreeMap::new(),
            next_beat: now,
            refusals: Refusals::default(),
            spec,
        }
    }

    /// Takes what happened, and says what is to be done.
    pub fn handle(&mut self, input: Input, now: Time, out: &mut Vec<Command>) {
        self.now = now;
        match input {
            Input::Message(envelope) => self.on_message(envelope, out),
            Input::Wake => self.on_wake(out),
        }
        self.launch(out);
    }

    /// When it wants to be woken.
    pub fn next_wake(&self) -> Time {
        self.calendar.first().map_or(self.next_beat, |(at, _)| self.next_beat.min(*at))
    }

    /// What was refused, by reason.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// Leases, and microbatches in flight.
    pub fn queue_lengths(&self) -> (usize, usize) {
        (self.lots.len(), self.flying.all())
    }

    fn on_message(&mut self, envelope: Envelope, out: &mut Vec<Command>) {
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
            Body::Stranger { member } if member.is_some() && member == self.member => self.on_stranger(),
            Body::Welcome { .. } | Body::Stranger { .. } => self.refusals.count(Refusal::OldAttempt),
            Body::View(view) => self.on_view(view, out),
            Body::Lease(lease) => self.on_lease(fence, lease),
            Body::LeaseEnd { leases } => self.on_lease_end(&leases),
            Body::Progress(progress) => self.on_progress(fence, progress, out),
            Body::Declined(declined) => self.on_declined(envelope.from, fence, declined, out),
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

    /// A new term or epoch ends all leases of the old one; a new step those of the steps before it.
    fn follow(&mut self, fence: Fence) {
        let (before, now) = ((self.term, self.epoch), (fence.term, fence.epoch));
        if now > before {
            self.drop_lots_before(Step(u64::MAX));
        } else if now == before && fence.step > self.step {
            self.drop_lots_before(fence.step);
        } else {
            return;
        }
        (self.term, self.epoch, self.step) = (fence.term, fence.epoch, fence.step);
    }

    fn drop_lots_before(&mut self, step: Step) {
        for (at, run) in self.lots.take_before(step) {
            self.forget_lot(at, run);
        }
        self.queue.forget_before(step);
    }

    fn drop_lot(&mut self, at: LotOf) {
        if let Some(run) = self.lots.remove(&at) {
            self.forget_lot(at, run);
        }
    }

    fn forget_lot(&mut self, at: LotOf, mut run: LotRun) {
        self.flying.land(&run);
        self.leases.remove(&run.lease.number);
        run.settle(&mut self.wirings);
        if let Some(wake) = run.wake {
            self.calendar.remove(&(wake, at));
        }
        self.queue.forget(at);
    }

    fn on_stranger(&mut self) {
        self.member = None;
        self.incarnation += 1;
        self.drop_lots_before(Step(u64::MAX));
        self.next_beat = self.now;
    }

    fn on_view(&mut self, view: View, out: &mut Vec<Command>) {
        if view.stages.len() != self.spec.stages as usize {
            return self.refusals.count(Refusal::Nonsense);
        }
        if view.number < self.view {
            return self.refusals.count(Refusal::OldAttempt); // Overtaken on the way by a later one.
        }
        (self.view, self.driven) = (view.number, view.drivers);
        let mut somebody_left = false;
        for (wiring, holders) in self.wirings.iter_mut().zip(&view.stages) {
            somebody_left |= wiring.set_peers(holders);
        }
        self.room = self.room_for_all();
        if !somebody_left {
            return;
        }
        self.queue.keep_peers(&self.wirings[0]);
        let broken_hops = |(at, run): (LotOf, &LotRun)| {
            let hops: Vec<StageId> = run.broken_hops(&self.wirings).collect();
            (!hops.is_empty()).then_some((at, hops))
        };
        let broken: Vec<(LotOf, Vec<StageId>)> = self.lots.iter().filter_map(broken_hops).collect();
        for (at, hops) in broken {
            hops.into_iter().for_each(|stage| self.reroute(at, stage, out));
        }
    }

    fn on_lease(&mut self, fence: Fence, lease: Lease) {
        let sound = lease.at.lot.0 < self.spec.lots.lots
            && lease.held.len() == self.spec.stages as usize
            && lease.held.iter().any(Option::is_none)
            && self.spec.sync.is_open(self.step, lease.at.step)
            && lease.number.term == fence.term;
        if !sound || self.lots.len() >= 4 * self.spec.tuning.leases {
            return self.refusals.count(Refusal::Nonsense);
        }
        let at = lease.at;
        if self.lots.get(&at).is_some_and(|run| run.lease.number >= lease.number) {
            return self.refusals.count(Refusal::Repeated);
        }
        self.drop_lot(at);
        self.leases.insert(lease.number, at);
        let run = LotRun::new(lease, self.spec.lots.microbatches_of(at.lot));
        self.queue.add(at, run.is_redo());
        self.lots.insert(at, run);
    }

    fn on_lease_end(&mut self, leases: &[LeaseNo]) {
        for lease in leases {
            if let Some(&at) = self.leases.get(lease) {
                self.drop_lot(at);
            }
        }
    }

    fn on_progress(&mut self, fence: Fence, progress: Progress, out: &mut Vec<Command>) {
        let Progress { lot, microbatch, lease, stage, pass, computed } = progress;
        let (at, now) = (LotOf { step: fence.step, lot }, self.now);
        let Some(run) = self.lots.get_mut(&at).filter(|run| run.lease.number == lease) else {
            return self.refusals.count(Refusal::OldAttempt);
        };
        let Some(&flight) = run.flights.get(microbatch).filter(|flight| flight.attempt == fence.attempt)
        else {
            return self.refusals.count(Refusal::OldAttempt);
        };
        let Some(hop) = run.route.get(stage.0 as usize).copied() else {
            return self.refusals.count(Refusal::Nonsense);
        };
        if !is_further(&flight, stage, pass) {
            return self.refusals.count(Refusal::Repeated);
        }
        let wiring = &mut self.wirings[stage.0 as usize];
        // An answer that comes late, after a stop or a cut, teaches no more than what we were ready to wait: otherwise one of
        // them would make every deadline as long.
        let took = now.since(flight.since).min(flight.patience);
        wiring.hear(hop.peer, pass, took, now);
        if let Some(computed) = computed {
            if (flight.stage, flight.pass) == (stage, pass) {
                self.responses[stage.0 as usize][pass as usize].observe(took);
            }
            wiring.observe(hop.peer, pass, computed);
        }
        let mut at_work = (flight.stage, flight.pass);
        while at_work != (stage, pass) {
            run.computed(at_work.0, at_work.1, &mut self.wirings);
            at_work = next_hop(at_work.0, at_work.1, self.spec.stages);
        }
        run.computed(stage, pass, &mut self.wirings);
        if (stage.0, pass) == (0, Pass::Backward) {
            run.flights.remove(microbatch);
            *self.flying.of(run) -= 1;
            if run.flights.is_empty() && run.waiting.is_empty() {
                run.finished = Some(now);
            }
            return self.note_wake(at);
        }
        let (stage, pass) = next_hop(stage, pass, self.spec.stages);
        let known = self.tell_onward(at, microbatch, flight, stage, out);
        let Some(run) = self.lots.get(&at) else { return };
        let Some(hop) = run.route.get(stage.0 as usize) else { return self.give_up_route(at) };
        let patience = self.patience(stage, pass, hop.peer, run.retries);
        if let Some(run) = self.lots.get_mut(&at) {
            let flight = Flight::begun(flight.attempt, (stage, pass), now, patience, known);
            run.flights.insert(microbatch, flight);
        }
        self.note_wake(at);
    }

    /// A microbatch is to enter a stage: its peer is chosen, and the peer before it, which has the microbatch, is
    /// told. Returns how much of the route is known then.
    fn tell_onward(
        &mut self,
        at: LotOf,
        microbatch: Microbatch,
        flight: Flight,
        stage: StageId,
        out: &mut Vec<Command>,
    ) -> usize {
        let next = stage.0 as usize;
        self.bind(at, next + 1);
        let Some(run) = self.lots.get(&at) else { return flight.known };
        let has_it = next.checked_sub(1).and_then(|before| run.route.get(before));
        let Some(to) = has_it.filter(|_| flight.known <= next && next < run.route.len()) else {
            return flight.known;
        };
        let (to, known) = (Address::Worker(to.peer), run.route.len());
        let (lease, route) = (run.lease.number, run.route.clone());
        let work = Work { lot: at.lot, microbatch, lease, driver: self.me, route };
        self.send(to, at.step, flight.attempt, Body::Onward(work), out);
        known
    }

    /// How long to wait for a peer: what such responses took so far, or twice what the peer needs for all that it
    /// owes us, whichever is longer. The first alone would call every slow peer late that has a queue, or a slow link.
    fn patience(&self, stage: StageId, pass: Pass, peer: PeerId, retries: u32) -> Span {
        let tuning = self.spec.tuning;
        let estimate = self.responses[stage.0 as usize][pass as usize];
        let busy = self.wirings[stage.0 as usize].busy_for(peer, pass).times(2) + tuning.slack;
        // What a straggler taught the estimate is not doubled without end.
        estimate.deadline(tuning.slack, tuning.unknown, retries.min(2)).max(busy)
    }

    fn on_declined(&mut self, from: Address, fence: Fence, declined: Declined, out: &mut Vec<Command>) {
        let Declined { lot, microbatch, lease, stage, reason } = declined;
        let at = LotOf { step: fence.step, lot };
        let Some(run) = self.lots.get_mut(&at).filter(|run| run.lease.number == lease) else { return };
        if run.flights.get(microbatch).is_none_or(|flight| flight.attempt != fence.attempt) {
            return self.refusals.count(Refusal::OldAttempt);
        }
        if run.route.get(stage.0 as usize).is_none_or(|hop| from != Address::Worker(hop.peer)) {
            return self.refusals.count(Refusal::Nonsense);
        }
        match reason {
            Decline::NotHere => self.reroute(at, stage, out),
            Decline::NotFinite => self.compute_elsewhere(at, stage, out),
            Decline::Busy => {
                // Its queue is full: what is in it will come back, so wait a little and try again.
                run.flights.remove(microbatch);
                run.waiting.insert(microbatch, ());
                run.not_before = Some(self.now + self.spec.tuning.slack);
                *self.flying.of(run) -= 1;
                self.queue.hold_back(at);
                self.note_wake(at);
            }
        }
    }

    /// A peer's result is not finite: another is to compute it too. If several have, the step is about to be
    /// skipped; should it not be, the lot is tried again later.
    fn compute_elsewhere(&mut self, at: LotOf, stage: StageId, out: &mut Vec<Command>) {
        self.reroute(at, stage, out);
        let Some(run) = self.lots.get_mut(&at) else { return };
        run.not_finite += 1;
        if run.not_finite > 1 {
            run.not_before = Some(self.now + self.spec.tuning.unknown);
            self.queue.hold_back(at);
            self.note_wake(at);
        }
    }

    fn on_wake(&mut self, out: &mut Vec<Command>) {
        if self.now >= self.next_beat {
            self.next_beat = self.now + self.spec.tuning.beat;
            self.beat(out);
        }
        self.bad_edges.retain(|_, until| *until > self.now);
        self.wirings[0].look_again();
        let due: Vec<LotOf> =
            self.calendar.iter().take_while(|(at, _)| *at <= self.now).map(|(_, at)| *at).collect();
        for at in due {
            self.check_lot(at, out);
        }
    }

    /// Acts on the first deadline of a lot that has passed.
    fn check_lot(&mut self, at: LotOf, out: &mut Vec<Command>) {
        let now = self.now;
        let Some(run) = self.lots.get_mut(&at) else { return };
        if run.not_before.take_if(|not_before| *not_before <= now).is_some() {
            self.queue.send_again(at, run.is_redo());
        }
        self.put_off(at);
        let Some(run) = self.lots.get(&at) else { return };
        let late = run.flights.values().find(|flight| flight.deadline <= now).copied();
        let unsealed = run.finished.is_some_and(|finished| finished + linger(&self.spec, run) <= now);
        if let Some(flight) = late {
            self.blame(at, flight);
            self.reroute(at, self.whom_to_replace(at, flight), out);
        } else if unsealed {
            // All came back, and yet somebody has not sealed: have the wanted stages done once more.
            let wanted: Vec<StageId> =
                (0..self.spec.stages).map(StageId).filter(|stage| run.wants(*stage)).collect();
            let hops = run.route.len();
            if wanted.iter().any(|stage| stage.0 as usize >= hops) {
                return self.give_up_route(at);
            }
            wanted.into_iter().for_each(|stage| self.reroute(at, stage, out));
        }
        self.note_wake(at);
    }

    /// The deadlines of those are put off whose peers tell of other work: they wait for their turn.
    fn put_off(&mut self, at: LotOf) {
        let (now, wirings) = (self.now, &self.wirings);
        let Some(run) = self.lots.get_mut(&at) else { return };
        let route = &run.route;
        let put_off = |flight: &Flight| {
            let (hop, wiring) = (route.get(flight.stage.0 as usize)?, wirings.get(flight.stage.0 as usize)?);
            Some(flight.put_off(wiring.heard(hop.peer)?))
        };
        let over = run.flights.iter().filter(|(_, flight)| flight.deadline <= now);
        let later: Vec<(Microbatch, Option<Time>)> =
            over.map(|(microbatch, flight)| (microbatch, put_off(flight))).collect();
        for (microbatch, later) in later {
            if let (Some(flight), Some(later)) = (run.flights.get_mut(microbatch), later) {
                flight.deadline = later.max(flight.deadline);
            }
        }
    }

    /// Takes note of when a lot wants to be looked at.
    fn note_wake(&mut self, at: LotOf) {
        let Some(run) = self.lots.get_mut(&at) else { return };
        let wake = run.next_wake(linger(&self.spec, run));
        if wake != run.wake {
            if let Some(old) = run.wake {
                self.calendar.remove(&(old, at));
            }
            run.wake = wake;
            self.calendar.extend(wake.map(|wake| (wake, at)));
        }
    }

    fn beat(&mut self, out: &mut Vec<Command>) {
        if self.member.is_none() {
            let hello = Hello::Driver { incarnation: self.incarnation, site: self.site };
            return self.send(Address::Coordinator, self.step, Attempt(0), Body::Hello(hello), out);
        }
        self.send_beat(out);
    }

    fn send_beat(&mut self, out: &mut Vec<Command>) {
        let status = DriverStatus {
            member: self.member,
            view: self.view,
            leases: self.lots.collect(|run| run.lease.number),
            complaints: std::mem::take(&mut self.complaints).into_iter().collect(),
        };
        self.send(Address::Coordinator, self.step, Attempt(0), Body::DriverBeat(status), out);
    }

    fn send(&self, to: Address, step: Step, attempt: Attempt, body: Body, out: &mut Vec<Command>) {
        let fence = Fence { run: self.spec.run, term: self.term, epoch: self.epoch, step, attempt };
        let from = Address::Driver(self.me);
        out.push(Command::Send(Envelope { protocol: PROTOCOL, from, to, fence, body }));
    }
}

/// How long after the last microbatch the seals may take.
fn linger(spec: &Spec, run: &LotRun) -> Span {
    (spec.tuning.beat.times(3) + spec.tuning.unknown).times(1 << run.retries.min(4))
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
