//! Lots out to drivers, and back; and what drivers know of who holds what.

use crate::coordinator::{Closing, Command, Coordinator};
use crate::ids::*;
use crate::message::*;

/// A lot that is out.
#[derive(Clone, Debug)]
pub(super) struct Leased {
    pub number: LeaseNo,
    pub driver: DriverId,
    pub wanted: Vec<StageId>,
}

impl Coordinator {
    /// Hands out open lots, to the driver with the fewest, as far as the windows allow.
    pub(super) fn lease(&mut self, out: &mut Vec<Command>) {
        if self.book.paused
            || self.is_done()
            || self.closing != Closing::No
            || !self.every_stage_is_held()
            || self.is_filling()
        {
            return;
        }
        while !self.to_lease.is_empty() {
            let Some(driver) = self.least_busy_driver() else { return };
            let Some(lot) = self.lot_for(driver) else { return };
            self.to_lease.remove(&lot);
            let wanted = self.ledger.wanted(lot);
            if wanted.is_empty() {
                continue;
            }
            self.next_lease += 1;
            let number = LeaseNo { term: self.term, number: self.next_lease };
            self.leases.insert(lot, Leased { number, driver, wanted: wanted.clone() });
            if let Some(member) = self.drivers.get_mut(&driver) {
                member.leases += 1;
                if member.view != self.view {
                    member.view = self.view;
                    self.send(Address::Driver(driver), Attempt(0), Body::View(self.current_view()), out);
                }
            }
            let lease = Lease { number, lot, wanted };
            self.send(Address::Driver(driver), Attempt(0), Body::Lease(lease), out);
        }
    }

    /// Neighbouring lots go to one driver as far as possible: what its site holds then merges in the tree over
    /// lots, and crosses the WAN as one sum instead of many.
    fn lot_for(&self, driver: DriverId) -> Option<Lot> {
        let place = self.drivers.range(..driver).count() as u64;
        let start = place * u64::from(self.spec.lots.lots) / (self.drivers.len() as u64).max(1);
        self.to_lease.range(Lot(start as u32)..).next().or(self.to_lease.first()).copied()
    }

    fn least_busy_driver(&self) -> Option<DriverId> {
        let open = self.drivers.iter().filter(|(_, driver)| driver.leases < self.spec.tuning.leases);
        open.min_by_key(|(_, driver)| driver.leases).map(|(&driver, _)| driver)
    }

    /// A lot has to be done (again) in some stage: a new lease replaces the one that is out.
    pub(super) fn lease_again(&mut self, lot: Lot, out: &mut Vec<Command>) {
        self.end_lease(lot, out);
        self.to_lease.insert(lot);
    }

    /// A lot is sealed everywhere, or its lease is replaced.
    pub(super) fn end_lease(&mut self, lot: Lot, out: &mut Vec<Command>) {
        let Some(leased) = self.leases.remove(&lot) else { return };
        if let Some(driver) = self.drivers.get_mut(&leased.driver) {
            driver.leases -= 1;
            let body = Body::LeaseEnd { leases: vec![leased.number] };
            self.send(Address::Driver(leased.driver), Attempt(0), body, out);
        }
    }

    pub(super) fn remove_driver(&mut self, driver: DriverId) {
        self.drivers.remove(&driver);
        let lots: Vec<Lot> =
            self.leases.iter().filter(|(_, leased)| leased.driver == driver).map(|(&lot, _)| lot).collect();
        for lot in lots {
            self.leases.remove(&lot);
            self.to_lease.insert(lot);
        }
    }

    /// All leases end with the step.
    pub(super) fn clear_leases(&mut self) {
        self.leases.clear();
        self.drivers.values_mut().for_each(|driver| driver.leases = 0);
        self.to_lease = self.spec.lots.all().collect();
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
        let mut ended: std::collections::BTreeSet<LeaseNo> = status.leases.iter().copied().collect();
        for (&lot, leased) in self.leases.iter().filter(|(_, leased)| leased.driver == driver) {
            if !ended.remove(&leased.number) {
                let lease = Lease { number: leased.number, lot, wanted: leased.wanted.clone() };
                self.send(to, Attempt(0), Body::Lease(lease), out);
            }
        }
        if !ended.is_empty() {
            self.send(to, Attempt(0), Body::LeaseEnd { leases: ended.into_iter().collect() }, out);
        }
        self.advance(out);
    }

    /// Who holds what has changed: every driver is told.
    pub(super) fn new_view(&mut self, out: &mut Vec<Command>) {
        self.view += 1;
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
                stages[stage.0 as usize].push(Holder { peer, site, speed, draining: member.draining });
            }
        }
        View { number: self.view, stages }
    }
}
