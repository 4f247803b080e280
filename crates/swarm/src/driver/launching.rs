//! What is sent next: as much as may be in flight, each time a lot for the peer of the first stage that would be
//! done with it first.
//!
//! In `exact` mode neighbouring lots should go to one peer, which then sends one sum for them instead of many. So
//! a peer is given a *stretch* of lots that fill a node of the tree over lots, about as many as its share of the
//! step. With `step` the stretches grow shorter towards the end, so that all peers are done together; with
//! `delayed` there is no such end, since the next step's lots follow.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::driver::lot::Flight;
use crate::driver::routing::Search;
use crate::driver::{Command, Driver};
use crate::feeding::peers_fed_from;
use crate::ids::*;
use crate::message::*;
use crate::spec::{Reduce, Sync};
use crate::time::Span;
use crate::wiring::{About, Aim, Wiring};

/// How many lost lots one peer does again.
const REDO: u32 = 3;

/// What waits to be sent.
#[derive(Clone, Debug)]
pub(super) struct Queue {
    /// Lots that were lost somewhere, and have something to send.
    again: BTreeSet<LotOf>,
    /// Of the others, lots that have a route, and microbatches to send along it.
    routed: BTreeSet<LotOf>,
    /// Of the others, lots that nobody was chosen for.
    free: BTreeSet<LotOf>,
    /// Lots that were set aside for a peer of the first stage.
    set_aside: BTreeMap<PeerId, VecDeque<LotOf>>,
    /// For the stages after the first: which peer got the lots from here on.
    stretches: Vec<BTreeMap<LotOf, Stretch>>,
    /// For lots that were lost in a stage: who does them again, and how many more it should get.
    redoes: BTreeMap<(Step, StageId), (PeerId, u32)>,
    /// Lots of each step that were leased to us.
    leased: BTreeMap<Step, u32>,
}

/// Some neighbouring lots for one peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch {
    /// How many.
    pub lots: u32,
    /// For whom.
    pub peer: PeerId,
}

impl Queue {
    pub(super) fn new(stages: u16) -> Queue {
        Queue {
            again: BTreeSet::new(),
            routed: BTreeSet::new(),
            free: BTreeSet::new(),
            set_aside: BTreeMap::new(),
            stretches: vec![BTreeMap::new(); stages as usize],
            redoes: BTreeMap::new(),
            leased: BTreeMap::new(),
        }
    }

    /// A lot was leased to us, for the first time or because it was lost somewhere.
    pub(super) fn add(&mut self, at: LotOf, is_redo: bool) {
        *self.leased.entry(at.step).or_default() += 1;
        self.begin_again(at, is_redo);
    }

    /// A lot has no route (any more).
    pub(super) fn begin_again(&mut self, at: LotOf, is_redo: bool) {
        self.routed.remove(&at);
        if is_redo {
            self.again.insert(at)
        } else {
            self.free.insert(at)
        };
    }

    /// A lot has something to send.
    pub(super) fn send_again(&mut self, at: LotOf, is_redo: bool) {
        if is_redo {
            self.again.insert(at)
        } else {
            self.routed.insert(at)
        };
    }

    /// A lot has nothing to send for now.
    pub(super) fn hold_back(&mut self, at: LotOf) {
        self.again.remove(&at);
        self.routed.remove(&at);
    }

    /// A lot is not ours any more. What was set aside is looked at again when its turn comes.
    pub(super) fn forget(&mut self, at: LotOf) {
        self.again.remove(&at);
        self.routed.remove(&at);
        self.free.remove(&at);
    }

    /// The steps before this one are closed.
    pub(super) fn forget_before(&mut self, step: Step) {
        let first = LotOf { step, lot: Lot(0) };
        self.stretches.iter_mut().for_each(|stretches| *stretches = stretches.split_off(&first));
        self.set_aside.retain(|_, lots| {
            lots.retain(|at| *at >= first);
            !lots.is_empty()
        });
        self.leased.retain(|&open, _| open >= step);
        self.redoes.retain(|&(open, _), _| open >= step);
    }

    /// What was set aside for peers that are gone is free again.
    pub(super) fn keep_peers(&mut self, first: &Wiring) {
        let gone: Vec<PeerId> = self.set_aside.keys().copied().filter(|peer| !first.has(*peer)).collect();
        for peer in gone {
            self.free.extend(self.set_aside.remove(&peer).unwrap_or_default());
        }
    }

    /// The peer that got the stretch in which a lot lies.
    pub(super) fn stretch(&self, stage: StageId, at: LotOf) -> Option<PeerId> {
        let (start, stretch) = self.stretches[stage.0 as usize].range(..=at).next_back()?;
        let inside = start.step == at.step && at.lot.0 - start.lot.0 < stretch.lots;
        inside.then_some(stretch.peer)
    }

    pub(super) fn open_stretch(&mut self, stage: StageId, at: LotOf, stretch: Stretch) {
        if stretch.lots > 1 {
            self.stretches[stage.0 as usize].insert(at, stretch);
        }
    }

    /// Who does the lots again that were lost in a stage, unless it has had its share of them.
    pub(super) fn who_redoes(&self, step: Step, stage: StageId) -> Option<PeerId> {
        self.redoes.get(&(step, stage)).filter(|(_, left)| *left > 0).map(|(peer, _)| *peer)
    }

    /// A peer does one of them again. It gets a few, since whoever does one has to send its whole sum again if the
    /// step is being reduced.
    pub(super) fn redo(&mut self, step: Step, stage: StageId, peer: PeerId) -> PeerId {
        let share = self.redoes.entry((step, stage)).or_insert((peer, REDO));
        if share.0 != peer || share.1 == 0 {
            *share = (peer, REDO);
        }
        share.1 -= 1;
        peer
    }

    /// The oldest lot that was set aside for a peer, unless an older step has free ones.
    fn take_aside(&mut self, peer: PeerId) -> Option<LotOf> {
        let lots = self.set_aside.get_mut(&peer)?;
        let &at = lots.front()?;
        if self.free.first().is_some_and(|free| free.step < at.step) {
            return None;
        }
        lots.pop_front();
        if lots.is_empty() {
            self.set_aside.remove(&peer);
        }
        Some(at)
    }

    /// Sets the lots that follow a free one aside for a peer.
    fn put_aside(&mut self, peer: PeerId, at: LotOf, lots: u32) {
        let rest = (1..lots).map(|n| LotOf { lot: Lot(at.lot.0 + n), ..at });
        let rest: VecDeque<LotOf> = rest.take_while(|next| self.free.remove(next)).collect();
        if !rest.is_empty() {
            self.set_aside.entry(peer).or_default().extend(rest);
        }
    }

    /// The last lot of the peer that has most set aside.
    fn steal(&mut self) -> Option<LotOf> {
        let (&peer, _) = self.set_aside.iter().max_by_key(|(_, lots)| lots.len())?;
        let lots = self.set_aside.get_mut(&peer)?;
        let at = lots.pop_back();
        if lots.is_empty() {
            self.set_aside.remove(&peer);
        }
        at
    }

    /// The step of some lot that waits for a route.
    fn step(&self) -> Option<Step> {
        let aside = || self.set_aside.values().next().and_then(VecDeque::front);
        self.free.first().or_else(aside).map(|at| at.step)
    }
}

impl Driver {
    /// Sends what may be sent, as long as there is room in flight: first what was lost, if it is time, then what is new.
    pub(super) fn launch(&mut self, out: &mut Vec<Command>) {
        if self.wirings.iter().any(Wiring::is_empty) {
            return;
        }
        while self.has_room(true) && self.is_time_to_do_again() {
            let Some(at) = self.next_again() else { break };
            self.launch_lot(at, true, out);
        }
        while self.has_room(false) {
            let next = self.queue.routed.pop_first().or_else(|| self.next_lot());
            let Some(at) = next else { return };
            self.launch_lot(at, false, out);
        }
    }

    /// In `delayed` sync what is done again does not wait for those that go all the way: it costs one stage's time.
    fn has_room(&self, is_redo: bool) -> bool {
        let flying = match (self.spec.sync, is_redo) {
            (Sync::Step, _) => self.flying.all(),
            (Sync::Delayed, true) => self.flying.again,
            (Sync::Delayed, false) => self.flying.first,
        };
        flying < self.room && self.flying.all() < self.spec.tuning.in_flight
    }

    /// Whether what was lost is to be done now. While a stage does something again, all others wait for it. So in
    /// `delayed` sync that is put off until the rest of the step is on its way: then they do it at the same time. Unless
    /// nothing is on its way: it may be this that keeps a peer from taking more.
    fn is_time_to_do_again(&self) -> bool {
        let Some(again) = self.queue.again.first() else { return false };
        let is_rest_under_way = || self.queue.step().is_none_or(|fresh| fresh > again.step);
        self.spec.sync == Sync::Step || self.flying.first == 0 || is_rest_under_way()
    }

    /// The next lot that was lost somewhere, with a route, if anybody can take it; as long as nothing is in flight, the
    /// one who can take it least badly.
    fn next_again(&mut self) -> Option<LotOf> {
        while let Some(at) = self.queue.again.pop_first() {
            let Some(run) = self.lots.get(&at) else { continue };
            if run.route.is_empty() {
                let (stage, step, size) = (StageId(0), at.step, self.size(at));
                let is_urgent = self.is_urgent(at);
                let search = Search { stage, step, size, near: &[], not: None, is_urgent };
                let least_bad = || self.choose(search).filter(|_| self.flying.all() == 0);
                let Some(first) = self.choose_fit(search).or_else(least_bad) else {
                    self.queue.begin_again(at, true);
                    return None;
                };
                self.begin_route(at, first);
            }
            return Some(at);
        }
        None
    }

    /// How many microbatches we may have in flight: so many for each peer, shared among the drivers as the first stage
    /// is, where lots begin. With more, a step takes longer to drain; with fewer, some have nothing to do.
    pub(super) fn room_for_all(&self) -> usize {
        let tuning = self.spec.tuning;
        let peers: usize = self.wirings.iter().map(Wiring::len).sum();
        let first = self.wirings[0].by_site();
        let fed = peers_fed_from(self.site, &self.driven, &first);
        // Who feeds nobody (any more) may still have lots, and sees them through as one of the drivers.
        let ours = match fed > 0.0 {
            true => fed / first.values().sum::<usize>().max(1) as f64,
            false => 1.0 / self.driven.len().max(1) as f64,
        };
        tuning.in_flight.min(((tuning.depth * peers) as f64 * ours).ceil() as usize)
    }

    /// The next lot that has no route, with one.
    fn next_lot(&mut self) -> Option<LotOf> {
        // Some that were set aside may not be ours any more.
        while let Some(step) = self.queue.step().filter(|step| !self.wirings[0].is_full_for(*step)) {
            let size = self.spec.lots.largest();
            // Lots begin at home if anybody there can take them, or where no other driver is at home.
            let able = |peer, about: About| {
                let stays = !about.draining && about.has_weights_of(step);
                stays && self.is_reachable(StageId(0), peer, &[])
            };
            let home = self.wirings[0].any(|peer, about| about.site == self.site && able(peer, about));
            let choice = self.wirings[0].choose(size, self.aim(), |peer, about| {
                let near = !home || about.site == self.site || !self.driven.contains(&about.site);
                let fresh = self.is_fit(about, step, size) && about.to_begin < 2 * size;
                (near && fresh && able(peer, about)).then_some(Span(0))
            });
            let Some(first) = choice.map(|choice| choice.peer) else {
                // All are busy, and the next news of one of them brings us here again.
                self.wirings[0].note_full(step);
                return None;
            };
            let at = self.next_lot_for(first)?;
            if self.lots.get(&at).is_some_and(|run| run.route.is_empty() && !run.is_redo()) {
                self.begin_route(at, first);
                return Some(at);
            }
        }
        None
    }

    /// Towards the end of what there is to do, an early end counts more than that everybody is at work.
    pub(super) fn aim(&self) -> Aim {
        if self.queue.step().is_some() { Aim::Throughput } else { Aim::End }
    }

    /// What was set aside for a peer of the first stage, or a new stretch, or the last of what another has.
    fn next_lot_for(&mut self, peer: PeerId) -> Option<LotOf> {
        if let Some(at) = self.queue.take_aside(peer) {
            return Some(at);
        }
        let Some(at) = self.queue.free.pop_first() else { return self.queue.steal() };
        let lots = self.stretch_for(StageId(0), peer, at);
        self.queue.put_aside(peer, at, lots);
        Some(at)
    }

    /// How many lots from this one on a peer should get: those under a node of the tree, within its share.
    pub(super) fn stretch_for(&self, stage: StageId, peer: PeerId, at: LotOf) -> u32 {
        let share = self.wirings[stage.0 as usize].share_of(peer);
        let leased = self.queue.leased.get(&at.step).copied().unwrap_or(0);
        let most = match (self.spec.reduce, self.spec.sync) {
            (Reduce::Fast, _) => 1.0,
            (Reduce::Exact, Sync::Delayed) => f64::from(leased) * share,
            (Reduce::Exact, Sync::Step) => (self.queue.free.len() + 1) as f64 * share,
        };
        let aligned = if at.lot.0 == 0 { 31 } else { at.lot.0.trailing_zeros() };
        1 << (most.max(1.0).log2() as u32).min(aligned)
    }

    fn launch_lot(&mut self, at: LotOf, is_redo: bool, out: &mut Vec<Command>) {
        let first = (StageId(0), Pass::Forward);
        let Some(run) = self.lots.get(&at).filter(|run| run.not_before.is_none()) else { return };
        let Some(hop) = run.route.first() else { return };
        let patience = self.patience(first.0, first.1, hop.peer, run.retries);
        while self.has_room(is_redo) {
            let Some(run) = self.lots.get_mut(&at) else { return };
            let Some((microbatch, ())) = run.waiting.pop_first() else { break };
            let attempt = run.attempt;
            let known = run.route.len();
            let flight = Flight::begun(attempt, first, self.now, patience, known);
            run.flights.insert(microbatch, flight);
            *self.flying.of(run) += 1;
            let (lease, route) = (run.lease.number, run.route.clone());
            let to = Address::Worker(route[0].peer);
            let work = Work { lot: at.lot, microbatch, lease, driver: self.me, route };
            self.send(to, at.step, attempt, Body::Begin(work, Payload::default()), out);
        }
        if self.lots.get(&at).is_some_and(|run| !run.waiting.is_empty()) {
            self.queue.send_again(at, is_redo);
        }
        self.note_wake(at);
    }
}
