//! Faults strike, and heal.

use starling_swarm::coordinator;
use starling_swarm::ids::*;
use starling_swarm::worker;

use crate::fault::Fault;
use crate::world::{Event, World};

impl World {
    pub(super) fn strike(&mut self, index: usize) {
        let (_, fault) = self.scenario.faults[index].clone();
        self.tell(format!("fault: {fault:?}"));
        let heals_at = self.now + fault.lasts_us();
        match fault {
            Fault::Kill { peer, .. } => self.kill_worker(peer, Some(heals_at)),
            Fault::KillStage { stage, .. } => {
                for peer in self.holders_of(stage) {
                    self.kill_worker(peer, Some(heals_at));
                }
            }
            Fault::KillCoordinator { torn_record_survives, .. } => {
                self.kill_coordinator(torn_record_survives);
                self.heap.push(heals_at, Event::Start(Address::Coordinator));
            }
            Fault::KillDriver { driver, .. } => {
                if let Some(actor) = self.drivers.get_mut(&DriverId(driver)) {
                    actor.kill();
                    self.heap.push(heals_at, Event::Start(Address::Driver(DriverId(driver))));
                }
            }
            Fault::ClockJump { peer, by_us } => {
                if let Some(actor) = self.workers.get_mut(peer.0 as usize) {
                    actor.jump(by_us);
                    let life = actor.life;
                    self.worker_input(peer, life, worker::Input::Wake);
                }
            }
            Fault::CoordinatorClockJump { by_us } => {
                self.coordinator.jump(by_us);
                self.coordinator_input(self.coordinator.life, coordinator::Input::Wake);
            }
            Fault::Operator(order) => {
                self.coordinator_input(self.coordinator.life, coordinator::Input::Operator(order));
            }
            Fault::HangUp { peer } => {
                let hung_up = coordinator::Input::HungUp(Address::Worker(peer));
                self.coordinator_input(self.coordinator.life, hung_up);
            }
            Fault::Spoil { peer, results } => self.spoiled[peer.0 as usize] += results,
            Fault::Spike => self.spikes += 1,
            Fault::Preempt { peer, notice_us: 0 } => self.kill_worker(peer, None),
            Fault::Preempt { peer, .. } => {
                let life = self.workers.get(peer.0 as usize).map_or(0, |actor| actor.life);
                self.worker_input(peer, life, worker::Input::Notice);
                self.heap.push(heals_at, Event::Heal(index));
            }
            lasting => {
                self.set(&lasting, true);
                self.heap.push(heals_at, Event::Heal(index));
            }
        }
    }

    pub(super) fn heal(&mut self, index: usize) {
        let (_, fault) = self.scenario.faults[index].clone();
        match fault {
            Fault::Preempt { peer, .. } => self.kill_worker(peer, None),
            lasting => self.set(&lasting, false),
        }
    }

    /// Turns a lasting fault on or off.
    fn set(&mut self, fault: &Fault, on: bool) {
        match *fault {
            Fault::Stop { peer, .. } if on => {
                if let Some(actor) =
                    self.workers.get_mut(peer.0 as usize).filter(|actor| actor.machine.is_some())
                {
                    actor.stopped.get_or_insert_default();
                }
            }
            Fault::Stop { peer, .. } => self.continue_worker(peer),
            Fault::StopCoordinator { .. } if on && self.coordinator.machine.is_some() => {
                self.coordinator.stopped.get_or_insert_default();
            }
            Fault::StopCoordinator { .. } => self.continue_coordinator(),
            Fault::Partition { a, b, one_way, .. } => {
                self.network.cut_site(a, b, on);
                if !one_way {
                    self.network.cut_site(b, a, on);
                }
            }
            Fault::CutEdge { a, b, .. } => {
                let (a, b) = (Address::Worker(a), Address::Worker(b));
                self.network.cut_edge(a, b, on);
                self.network.cut_edge(b, a, on);
            }
            Fault::Straggle { peer, factor, .. } => {
                self.slowness[peer.0 as usize] = if on { factor.max(1) } else { 1 };
            }
            Fault::SlowDisk { sync_us, .. } => {
                self.sync_us = if on { sync_us } else { self.scenario.sync_us };
            }
            _ => {}
        }
    }

    fn holders_of(&self, stage: StageId) -> Vec<PeerId> {
        let mut holders = Vec::new();
        for (actor, peer) in self.workers.iter().zip((0..).map(PeerId)) {
            if actor.machine.as_ref().is_some_and(|(machine, _)| machine.stage() == Some(stage)) {
                holders.push(peer);
            }
        }
        holders
    }

    fn kill_worker(&mut self, peer: PeerId, back_at: Option<u64>) {
        if let Some(actor) = self.workers.get_mut(peer.0 as usize) {
            self.died_lots += actor.machine.as_ref().map_or(0, |(_, host)| host.holds().2 as u64);
            actor.kill();
            if let Some(at) = back_at {
                self.heap.push(at, Event::Start(Address::Worker(peer)));
            }
        }
    }

    fn kill_coordinator(&mut self, torn_record_survives: bool) {
        self.coordinator.kill();
        // What was on its way to the disk is lost, or its first record made it there and nobody was told.
        let unsynced = std::mem::take(&mut self.unsynced);
        if let Some((_, record)) = unsynced.into_iter().next().filter(|_| torn_record_survives) {
            self.journal_record(record);
        }
        self.disk_free = self.now;
    }

    /// A stopped process goes on: first what waited for it, in order, then the timers (rule 7).
    fn continue_worker(&mut self, peer: PeerId) {
        let Some(actor) = self.workers.get_mut(peer.0 as usize) else { return };
        let Some(waiting) = actor.stopped.take() else { return };
        let life = actor.life;
        for event in waiting {
            self.handle(event);
        }
        self.worker_input(peer, life, worker::Input::Wake);
    }

    fn continue_coordinator(&mut self) {
        let Some(waiting) = self.coordinator.stopped.take() else { return };
        let life = self.coordinator.life;
        for event in waiting {
            self.handle(event);
        }
        self.coordinator_input(life, coordinator::Input::Wake);
    }
}
