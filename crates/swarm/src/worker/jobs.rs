//! The microbatches at a worker, and which is computed next: one at a time, backward first (it frees memory and
//! lets the stage before go on), then in the order of lots and microbatches.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::*;
use crate::message::{Fence, Pass, Work};
use crate::time::{Span, Time};
use crate::worker::book::JobId;

/// The microbatches at a worker, a bounded number.
#[derive(Clone, Debug)]
pub struct Jobs {
    limit: usize,
    next: u64,
    jobs: BTreeMap<(Lot, Microbatch), Job>,
    keys: BTreeMap<JobId, (Lot, Microbatch)>,
    ready: BTreeSet<(Turn, Lot, Microbatch)>,
    running: Option<(JobId, Time)>,
}

/// One microbatch at a worker.
#[derive(Clone, Debug)]
pub struct Job {
    /// Its number.
    pub id: JobId,
    /// The work.
    pub work: Work,
    /// Where it belongs.
    pub fence: Fence,
    /// Under which grant its gradient is to be folded, if at all.
    pub grant: Option<Grant>,
    /// How far it is.
    pub state: State,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It waits for its turn, with its input.
    Ready(Pass, Option<Payload>),
    /// It is being computed.
    Running(Pass),
    /// Its output is on the way; the gradient is awaited.
    Away(Payload),
}

/// Backward comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    Backward,
    Forward,
}

impl Jobs {
    /// Room for `limit` microbatches.
    pub fn new(limit: usize) -> Jobs {
        Jobs {
            limit,
            next: 0,
            jobs: BTreeMap::new(),
            keys: BTreeMap::new(),
            ready: BTreeSet::new(),
            running: None,
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    /// The job of a microbatch.
    pub fn get(&self, lot: Lot, microbatch: Microbatch) -> Option<&Job> {
        self.jobs.get(&(lot, microbatch))
    }

    /// Whether there is room; if not, the job under the oldest lease that only waits for a gradient, if its
    /// lease is older than this one: its driver is likely gone.
    pub fn room(&self, lease: LeaseNo) -> Result<(), Option<(Lot, Microbatch)>> {
        if self.jobs.len() < self.limit {
            return Ok(());
        }
        let waiting = self.jobs.iter().filter(|(_, job)| matches!(job.state, State::Away(_)));
        let oldest = waiting.min_by_key(|(_, job)| job.work.lease);
        Err(oldest.filter(|(_, job)| job.work.lease < lease).map(|(key, _)| *key))
    }

    /// A new microbatch, to be computed forward.
    pub fn add(&mut self, work: Work, fence: Fence, grant: Option<Grant>, input: Payload) {
        let id = JobId(self.next);
        self.next += 1;
        let key = (work.lot, work.microbatch);
        self.keys.insert(id, key);
        self.ready.insert((Turn::Forward, key.0, key.1));
        let state = State::Ready(Pass::Forward, Some(input));
        self.jobs.insert(key, Job { id, work, fence, grant, state });
    }

    /// Drops a microbatch; returns its number.
    pub fn remove(&mut self, lot: Lot, microbatch: Microbatch) -> Option<Job> {
        let job = self.jobs.remove(&(lot, microbatch))?;
        self.keys.remove(&job.id);
        self.ready.remove(&(Turn::Backward, lot, microbatch));
        self.ready.remove(&(Turn::Forward, lot, microbatch));
        Some(job)
    }

    /// Drops the microbatches of a lot that were to be folded under this grant or an earlier one.
    pub fn remove_lot(&mut self, lot: Lot, grant: Grant) -> Vec<JobId> {
        let of_lot = self.jobs.range((lot, Microbatch(0))..=(lot, Microbatch(u32::MAX)));
        let old = of_lot.filter(|(_, job)| job.grant.is_some_and(|given| given <= grant));
        let keys: Vec<(Lot, Microbatch)> = old.map(|(key, _)| *key).collect();
        keys.into_iter()
            .filter_map(|(lot, microbatch)| self.remove(lot, microbatch))
            .map(|job| job.id)
            .collect()
    }

    /// Drops all; returns their numbers. One that runs keeps the device until it is done.
    pub fn clear(&mut self) -> Vec<JobId> {
        self.jobs.clear();
        self.ready.clear();
        std::mem::take(&mut self.keys).into_keys().collect()
    }

    /// The gradient of a microbatch has come (or is not needed): backward may run.
    pub fn ready_backward(&mut self, lot: Lot, microbatch: Microbatch, gradient: Option<Payload>) {
        if let Some(job) = self.jobs.get_mut(&(lot, microbatch)) {
            job.state = State::Ready(Pass::Backward, gradient);
            self.ready.insert((Turn::Backward, lot, microbatch));
        }
    }

    /// The output of a microbatch is on its way.
    pub fn away(&mut self, lot: Lot, microbatch: Microbatch, output: Payload) {
        if let Some(job) = self.jobs.get_mut(&(lot, microbatch)) {
            job.state = State::Away(output);
        }
    }

    /// The device is free again, if this was what it computed; the job, if it is still wanted, and how long it
    /// was computed.
    pub fn done(&mut self, id: JobId, now: Time) -> Option<(Job, Span)> {
        let (_, since) = self.running.take_if(|(running, _)| *running == id)?;
        let job = self.keys.get(&id).and_then(|key| self.jobs.get(key))?;
        Some((job.clone(), now.since(since)))
    }

    /// What to compute next, if the device is free.
    pub fn start(&mut self, now: Time) -> Option<(Job, Pass, Option<Payload>)> {
        if self.running.is_some() {
            return None;
        }
        let (_, lot, microbatch) = self.ready.pop_first()?;
        let job = self.jobs.get_mut(&(lot, microbatch))?;
        let State::Ready(pass, input) = job.state else { return None };
        job.state = State::Running(pass);
        self.running = Some((job.id, now));
        Some((job.clone(), pass, input))
    }
}
