//! One simulated process: its machine, which life of it this is, its clock, and whether it is stopped.

use starling_swarm::time::Time;

use crate::world::Event;

/// One process.
#[derive(Debug)]
pub struct Actor<M> {
    /// The machine; `None` while it is dead.
    pub machine: Option<M>,
    /// Which life this is; events of earlier lives are void.
    pub life: u64,
    /// While it is stopped: what waits for it, in order.
    pub(super) stopped: Option<Vec<Event>>,
    born_us: u64,
    jumped_us: u64,
    wake_us: Option<u64>,
}

impl<M> Actor<M> {
    /// A process that was never started.
    pub fn absent() -> Actor<M> {
        Actor { machine: None, life: 0, stopped: None, born_us: 0, jumped_us: 0, wake_us: None }
    }

    /// A new life begins.
    pub fn start(&mut self, now: u64) {
        self.life += 1;
        self.stopped = None;
        self.born_us = now;
        self.jumped_us = 0;
        self.wake_us = None;
    }

    /// It dies.
    pub fn kill(&mut self) {
        self.machine = None;
        self.stopped = None;
        self.life += 1;
    }

    /// Its clock jumps ahead.
    pub fn jump(&mut self, by_us: u64) {
        self.jumped_us += by_us;
    }

    /// What its own clock shows: it starts with the process, and no two clocks agree.
    pub fn time(&self, now: u64) -> Time {
        Time(now.saturating_sub(self.born_us) + self.jumped_us)
    }

    /// Plans a wake-up at its own time; returns the life and virtual time of the event if a new one is needed.
    pub fn plan_wake(&mut self, at: Time, now: u64) -> Option<(u64, u64)> {
        let at_us = (at.0.saturating_sub(self.jumped_us) + self.born_us).max(now + 1);
        if self.wake_us.is_some_and(|planned| planned <= at_us && planned > now) || self.machine.is_none() {
            return None;
        }
        self.wake_us = Some(at_us);
        Some((self.life, at_us))
    }

    /// Whether this wake-up is the one that is planned. A stopped process is woken when it goes on.
    pub fn wakes(&mut self, life: u64, now: u64) -> bool {
        let due = self.life == life && self.wake_us == Some(now);
        if due {
            self.wake_us = None;
        }
        due && self.stopped.is_none()
    }
}
