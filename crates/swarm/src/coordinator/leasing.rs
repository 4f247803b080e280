//! Lots out to drivers, and back; and what drivers know of who holds what.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::coordinator::deposits::Deposits;
use crate::coordinator::doubting::Doubts;
use crate::coordinator::members::DriverMember;
use crate::coordinator::{Closing, Command, Coordinator};
use crate::feeding::peers_fed_from;
use crate::ids::*;
use crate::ledger::Ledger;
use crate::message::*;
use crate::spec::Spec;

/// One open step: what is sealed, what is out, and what is not.
#[derive(Clone, Debug)]
pub(super) struct OpenStep {
    pub ledger: Ledger,
    pub doubts: Doubts,
    pub deposits: Deposits,
    leases: BTreeMap<Lot, Leased>,
    to_lease: BTreeSet<Lot>,
}

/// A lot that is out.
#[derive(Clone, Debug)]
struct Leased {
    number: LeaseNo,
    driver: DriverId,
    held: Vec<Option<PeerId>>,
}

impl OpenStep {
    fn new(spec: &Spec) -> OpenStep {
        OpenStep {
            ledger: Ledger::new(spec.stages, spec.lots),
            doubts: Doubts::new(),
            deposits: Deposits::new(),
            leases: BTreeMap::new(),
            to_lease: spec.lots.all().collect(),
        }
    }

    /// Whether nothing of it was begun.
    pub(super) fn is_fresh(&self) -> bool {
        self.leases.is_empty() && self.ledger.is_untouched()
    }

    /// Whether a lot is out.
    pub(super) fn is_leased(&self, lot: Lot) -> bool {
        self.leases.contains_key(&lot)
    }

    /// As many as are open at a time.
    pub(super) fn all(spec: &Spec) -> VecDeque<OpenStep> {
        (0..=spec.sync.lag()).map(|_| OpenStep::new(spec)).collect()
    }
}

impl Coordinator {
    /// The open step of this number.
    pub(super) fn open_step(&mut self, step: Step) -> Option<&mut OpenStep> {
        let index = step.0.checked_sub(self.book.step.0)?;
        self.steps.get_mut(usize::try_from(index).ok()?)
    }

    /// Hands out open lots, those of the oldest step first, to the driver whose window has the most room.
    pub(super) fn lease(&mut self, out: &mut Vec<Command>) {
        if self.is_done()
            || self.closing == Closing::Journaling
            || !self.is_staffed
            || self.collecting.is_some()
            || self.halted.is_some()
        {
            return;
        }
        let open = (self.last_step().0 - self.book.step.0).min(self.steps.len() as u64);
        for index in 0..open as usize {
            if self.book.paused && self.steps[index].is_fresh() {
                return;
            }
            while !self.steps[index].to_lease.is_empty() {
                let Some(driver) = self.least_busy_driver() else { return };
                let Some(lot) = self.lot_for(index, driver) else { return };
                self.lease_lot(index, lot, driver, out);
            }
        }
    }

    fn lease_lot(&mut self, index: usize, lot: Lot, driver: DriverId, out: &mut Vec<Command>) {
        let step = Step(self.book.step.0 + index as u64);
        let open = &mut self.steps[index];
        open.to_lease.remove(&lot);
        if open.ledger.is_sealed_everywhere(lot) {
            return;
        }
        let held = open.ledger.held(lot);
        self.next_lease += 1;
        let number = LeaseNo { term: self.term, number: self.next_lease };
        open.leases.insert(lot, Leased { number, driver, held: held.clone() });
        if let Some(member) = self.drivers.get_mut(&driver) {
            member.leases += 1;
            if member.view != self.view {
                member.view = self.view;
                self.send(Address::Driver(driver), Attempt(0), Body::View(self.current_view()), out);
            }
        }
        let lease = Lease { number, at: LotOf { step, lot }, held };
        self.send(Address::Driver(driver), Attempt(0), Body::Lease(lease), out);
    }

    /// Neighbouring lots go to one driver as far as possible: what its site holds then merges in the tree over
    /// lots, and crosses the WAN as one sum instead of many.
    fn lot_for(&self, index: usize, driver: DriverId) -> Option<Lot> {
        let place = self.drivers.range(..driver).count() as u64;
        let start = place * u64::from(self.spec.lots.lots) / (self.drivers.len() as u64).max(1);
        let to_lease = &self.steps[index].to_lease;
        to_lease.range(Lot(start as u32)..).next().or(to_lease.first()).copied()
    }

    /// The driver whose window has the most room.
    fn least_busy_driver(&self) -> Option<DriverId> {
        let open = self.drivers.iter().filter(|(_, driver)| driver.leases < driver.window);
        let filled = |driver: &DriverMember| driver.leases as f64 / driver.window.max(1) as f64;
        open.min_by(|a, b| filled(a.1).total_cmp(&filled(b.1)).then(a.0.cmp(b.0))).map(|(&driver, _)| driver)
    }

    /// Who holds what, or who drives, has changed. One driver gets all that there is. Of several each gets what keeps
    /// the peers of its site at work, and more when that is done: nobody can know now who will be done first.
    pub(super) fn size_windows(&mut self) {
        let most = self.spec.tuning.leases;
        if self.drivers.len() < 2 {
            return self.drivers.values_mut().for_each(|driver| driver.window = most);
        }
        let active = || self.members.values().filter(|member| member.is_active());
        // Lots begin at home, so a driver's part of the work is its part of the first stage.
        let mut first: BTreeMap<SiteId, usize> = BTreeMap::new();
        for member in active().filter(|member| member.stage == Some(StageId(0))) {
            *first.entry(member.capability.site).or_default() += 1;
        }
        let sites: Vec<SiteId> = self.drivers.values().map(|driver| driver.site).collect();
        let all = active().count() as f64 / first.values().sum::<usize>().max(1) as f64;
        for driver in self.drivers.values_mut() {
            let peers = peers_fed_from(driver.site, &sites, &first) * all;
            let window = ((2 * self.spec.tuning.depth) as f64 * peers).ceil() as usize;
            // Who feeds nobody gets nothing, unless nobody is there whom anybody could feed.
            let least = if first.is_empty() || peers > 0.0 { 2 } else { 0 };
            driver.window = window.clamp(least, most.max(2));
        }
    }

    /// A lot has to be done (again) in some stage: a new lease replaces the one that is out.
    pub(super) fn lease_again(&mut self, at: LotOf, out: &mut Vec<Command>) {
        self.end_lease(at, out);
        if let Some(open) = self.open_step(at.step) {
            open.to_lease.insert(at.lot);
        }
    }

    /// A lot is sealed everywhere, or its lease is replaced.
    pub(super) fn end_lease(&mut self, at: LotOf, out: &mut Vec<Command>) {
        let Some(open) = self.open_step(at.step) else { return };
        open.to_lease.remove(&at.lot);
        let Some(leased) = open.leases.remove(&at.lot) else { return };
        if let Some(driver) = self.drivers.get_mut(&leased.driver) {
            driver.leases -= 1;
            let body = Body::LeaseEnd { leases: vec![leased.number] };
            self.send(Address::Driver(leased.driver), Attempt(0), body, out);
        }
    }

    pub(super) fn remove_driver(&mut self, driver: DriverId) {
        self.drivers.remove(&driver);
        self.size_windows();
        for open in &mut self.steps {
            let theirs = open.leases.iter().filter(|(_, leased)| leased.driver == driver);
            let lots: Vec<Lot> = theirs.map(|(&lot, _)| lot).collect();
            for lot in lots {
                open.leases.remove(&lot);
                open.to_lease.insert(lot);
            }
        }
    }

    /// The oldest step is closed, with all its leases; another one is open.
    pub(super) fn next_step(&mut self) {
        for leased in self.steps.pop_front().into_iter().flat_map(|open| open.leases.into_values()) {
            if let Some(driver) = self.drivers.get_mut(&leased.driver) {
                driver.leases -= 1;
            }
        }
        self.steps.push_back(OpenStep::new(&self.spec));
    }

    /// All leases are void.
    pub(super) fn clear_steps(&mut self) {
        self.drivers.values_mut().for_each(|driver| driver.leases = 0);
        self.steps = OpenStep::all(&self.spec);
    }

    /// Sends a driver what it lacks, and ends what it should not have.
    pub(super) fn reconcile_driver(
        &mut self,
        driver: DriverId,
        status: &DriverStatus,
        out: &mut Vec<Command>,
    ) {
        let to = Address::Driver(driver);
        if status.view != self.view {
            if let Some(member) = self.drivers.get_mut(&driver) {
                member.view = self.view;
            }
            self.send(to, Attempt(0), Body::View(self.current_view()), out);
        }
        // As a rule it has what it should, in the same order.
        let theirs = self.steps.iter().flat_map(|open| open.leases.values());
        let theirs = theirs.filter(|leased| leased.driver == driver).map(|leased| &leased.number);
        if theirs.eq(&status.leases) {
            return self.lease(out);
        }
        let mut told = status.leases.clone();
        told.sort_unstable();
        told.dedup();
        let mut is_known = vec![false; told.len()];
        for (open, step) in self.steps.iter().zip(self.book.step.0..) {
            for (&lot, leased) in open.leases.iter().filter(|(_, leased)| leased.driver == driver) {
                if let Ok(place) = told.binary_search(&leased.number) {
                    is_known[place] = true;
                } else {
                    let at = LotOf { step: Step(step), lot };
                    let lease = Lease { number: leased.number, at, held: leased.held.clone() };
                    self.send(to, Attempt(0), Body::Lease(lease), out);
                }
            }
        }
        let ended = told.into_iter().zip(is_known).filter(|(_, is_known)| !is_known);
        let leases: Vec<LeaseNo> = ended.map(|(number, _)| number).collect();
        if !leases.is_empty() {
            self.send(to, Attempt(0), Body::LeaseEnd { leases }, out);
        }
        self.lease(out);
    }

    /// Who holds what has changed: every driver is told.
    pub(super) fn new_view(&mut self, out: &mut Vec<Command>) {
        self.view += 1;
        self.size_windows();
        self.name_keepers(out);
        let view = self.current_view();
        let drivers: Vec<DriverId> = self.drivers.keys().copied().collect();
        for driver in drivers {
            self.send(Address::Driver(driver), Attempt(0), Body::View(view.clone()), out);
        }
        self.drivers.values_mut().for_each(|driver| driver.view = self.view);
    }

    fn current_view(&self) -> View {
        let mut stages = vec![Vec::new(); self.spec.stages as usize];
        for (&peer, member) in self.members.iter().filter(|(_, member)| member.is_active()) {
            if let Some(stage) = member.stage {
                let Capability { site, speed, .. } = member.capability;
                let (draining, since) = (member.draining, member.since());
                let until = member.behind.then(|| self.spec.sync.last_step(member.version.1));
                let speed = speed / self.spec.cost(stage);
                stages[stage.0 as usize].push(Holder { peer, site, speed, draining, since, until });
            }
        }
        let drivers = self.drivers.values().map(|driver| driver.site).collect();
        View { number: self.view, stages, drivers }
    }
}
