//! The microbatches at a worker, and which is computed next: one at a time, the older step first (all wait for its
//! last microbatch), then backward first (it frees memory and lets the stage before go on), then in the order in
//! which they came.
//!
//! A microbatch that is done stays, with its output and the gradient of its input, until its step is closed or
//! the room for such things is full: whoever does a lot again in another stage is answered from here.

use std::collections::BTreeMap;

use crate::ids::*;
use crate::message::{Fence, Pass, Work};
use crate::sequence::Sequence;
use crate::small::SmallMap;
use crate::time::{Span, Time};
use crate::worker::book::JobId;

/// The microbatches at a worker, a bounded number.
#[derive(Clone, Debug)]
pub struct Jobs {
    limit: usize,
    keep_bytes: u64,
    kept_bytes: u64,
    kept: usize,
    /// By the job's number.
    jobs: Sequence<Job>,
    index: BTreeMap<Key, JobId>,
    /// Those that wait for their turn, in the order in which it comes.
    ready: SmallMap<(Step, Turn, JobId), ()>,
    running: Option<(JobId, Time)>,
}

/// Which try of a microbatch.
pub type Try = (LeaseNo, Attempt);

/// Which microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Of which lot.
    pub at: LotOf,
    /// Which of the step's microbatches.
    pub microbatch: Microbatch,
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
    /// What came out of it, once forward is done.
    pub output: Option<Payload>,
    /// How far it is.
    pub state: State,
    /// The try whose gradient backward started from.
    pub came_back: Option<Try>,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It waits for its turn, with its input.
    Ready(Pass, Option<Payload>),
    /// It is being computed.
    Running(Pass),
    /// Its output is on the way; the gradient is awaited since then.
    Away(Time),
    /// It is done, and the gradient of its input is kept.
    Kept(Payload),
}

/// Backward comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    Backward,
    Forward,
}

impl Job {
    /// Which microbatch it is.
    pub fn key(&self) -> Key {
        key(&self.work, self.fence)
    }

    /// Which try it is.
    pub fn attempt(&self) -> Try {
        (self.work.lease, self.fence.attempt)
    }

    fn kept_bytes(&self) -> u64 {
        match self.state {
            State::Kept(gradient) => gradient.bytes + self.output.map_or(0, |output| output.bytes),
            _ => 0,
        }
    }
}

/// Which microbatch some work is about.
pub fn key(work: &Work, fence: Fence) -> Key {
    Key { at: LotOf { step: fence.step, lot: work.lot }, microbatch: work.microbatch }
}

impl Jobs {
    /// Room for `limit` microbatches at work, and for `keep_bytes` of those that are done.
    pub fn new(limit: usize, keep_bytes: u64) -> Jobs {
        Jobs {
            limit,
            keep_bytes,
            kept_bytes: 0,
            kept: 0,
            jobs: Sequence::default(),
            index: BTreeMap::new(),
            ready: SmallMap::default(),
            running: None,
        }
    }

    /// How many are at work.
    pub fn len(&self) -> usize {
        self.jobs.len() - self.kept
    }

    /// Bytes of those that are done.
    pub fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// The job of a microbatch.
    pub fn get(&self, key: Key) -> Option<&Job> {
        self.jobs.get(self.index.get(&key)?.0)
    }

    /// The job of this number.
    pub fn job(&self, id: JobId) -> Option<&Job> {
        self.jobs.get(id.0)
    }

    fn get_mut(&mut self, key: Key) -> Option<&mut Job> {
        self.jobs.get_mut(self.index.get(&key)?.0)
    }

    /// Whether there is room; if not, the job that has waited for a gradient since before `patience`, if there is
    /// one: its driver is likely gone.
    pub fn room(&self, patience: Time) -> Result<(), Option<Key>> {
        if self.len() < self.limit {
            return Ok(());
        }
        let waits = |(_, job): (u64, &Job)| match job.state {
            State::Away(since) if since < patience => Some((since, job.key())),
            _ => None,
        };
        Err(self.jobs.iter().filter_map(waits).min().map(|(_, key)| key))
    }

    /// A new microbatch, to be computed forward.
    pub fn add(&mut self, work: Work, fence: Fence, grant: Option<Grant>, input: Payload) {
        let id = JobId(self.jobs.next());
        let state = State::Ready(Pass::Forward, Some(input));
        let job = Job { id, work, fence, grant, output: None, state, came_back: None };
        let key = job.key();
        self.ready.insert((key.at.step, Turn::Forward, id), ());
        self.index.insert(key, id);
        self.jobs.push(job);
    }

    /// A later try of a microbatch that is here takes over what was done for the one before.
    pub fn renew(&mut self, work: Work, fence: Fence, grant: Option<Grant>) -> Option<&Job> {
        let job = self.get_mut(key(&work, fence))?;
        (job.work, job.fence, job.grant) = (work, fence, grant);
        Some(job)
    }

    /// More of a microbatch's route is decided: the job, if that is news for it.
    pub fn go_onward(&mut self, work: Work, fence: Fence) -> Option<&Job> {
        let try_of = (work.lease, fence.attempt);
        let job = self.get_mut(key(&work, fence)).filter(|job| job.attempt() == try_of)?;
        if work.route.len() <= job.work.route.len() {
            return None;
        }
        job.work.route = work.route;
        Some(job)
    }

    /// Drops a microbatch.
    pub fn remove(&mut self, key: Key) -> Option<Job> {
        let id = self.index.remove(&key)?;
        self.take(id)
    }

    fn take(&mut self, id: JobId) -> Option<Job> {
        let job = self.jobs.remove(id.0)?;
        match job.state {
            State::Ready(pass, _) => {
                self.ready.remove((job.fence.step, turn(pass), job.id));
            }
            State::Kept(_) => {
                self.kept -= 1;
                self.kept_bytes -= job.kept_bytes();
            }
            State::Running(_) | State::Away(_) => {}
        }
        Some(job)
    }

    /// Drops the microbatches of a lot that were to be folded under this grant or an earlier one.
    pub fn remove_lot(&mut self, at: LotOf, grant: Grant) -> Vec<JobId> {
        self.remove_where(at, |job| job.grant.is_some_and(|given| given <= grant))
    }

    /// Drops the microbatches of a lot that are done: their gradients are gone.
    pub fn remove_kept(&mut self, at: LotOf) -> Vec<JobId> {
        self.remove_where(at, |job| matches!(job.state, State::Kept(_)))
    }

    fn remove_where(&mut self, at: LotOf, which: impl Fn(&Job) -> bool) -> Vec<JobId> {
        let (first, last) = (Microbatch(0), Microbatch(u32::MAX));
        let of_lot = self.index.range(Key { at, microbatch: first }..=Key { at, microbatch: last });
        let is_such = |id: &JobId| self.jobs.get(id.0).is_some_and(&which);
        let keys: Vec<Key> = of_lot.filter(|(_, id)| is_such(id)).map(|(key, _)| *key).collect();
        keys.into_iter().filter_map(|key| self.remove(key)).map(|job| job.id).collect()
    }

    /// Drops all of the steps before this one; returns their numbers. One that runs keeps the device until it
    /// is done.
    pub fn clear_before(&mut self, step: Step) -> Vec<JobId> {
        let first = Key { at: LotOf { step, lot: Lot(0) }, microbatch: Microbatch(0) };
        let rest = self.index.split_off(&first);
        let before = std::mem::replace(&mut self.index, rest);
        before.into_values().inspect(|id| drop(self.take(*id))).collect()
    }

    /// Drops all; returns their numbers.
    pub fn clear(&mut self) -> Vec<JobId> {
        self.index.clear();
        self.ready.clear();
        (self.kept, self.kept_bytes) = (0, 0);
        self.jobs.clear().into_iter().map(JobId).collect()
    }

    /// The gradient of a microbatch has come (or is not needed): backward may run.
    pub fn ready_backward(&mut self, id: JobId, gradient: Option<Payload>) {
        if let Some(job) = self.jobs.get_mut(id.0) {
            job.came_back = Some(job.attempt());
            job.state = State::Ready(Pass::Backward, gradient);
            self.ready.insert((job.fence.step, Turn::Backward, id), ());
        }
    }

    /// The gradient for a later try has come while backward of an earlier one is under way: that will answer it.
    /// Whether it is so.
    pub fn came_back(&mut self, id: JobId) -> bool {
        let Some(job) = self.jobs.get_mut(id.0) else { return false };
        let of_earlier = job.came_back.is_some_and(|came_back| came_back < job.attempt());
        if of_earlier {
            job.came_back = Some(job.attempt());
        }
        of_earlier
    }

    /// Forward is done; the job, with its output.
    pub fn away(&mut self, id: JobId, output: Payload, now: Time) -> Option<&Job> {
        let job = self.jobs.get_mut(id.0)?;
        job.output = Some(output);
        job.state = State::Away(now);
        Some(job)
    }

    /// Backward is done: keeps what others may ask for again, if there is room for it; whether it does.
    pub fn keep(&mut self, id: JobId, gradient: Payload) -> bool {
        let Some(job) = self.jobs.get_mut(id.0) else { return false };
        let state = std::mem::replace(&mut job.state, State::Kept(gradient));
        let bytes = job.kept_bytes();
        if self.kept_bytes + bytes > self.keep_bytes {
            job.state = state;
            return false;
        }
        self.kept += 1;
        self.kept_bytes += bytes;
        true
    }

    /// The device is free again, if this was what it computed; the job, if it is still wanted, and how long it
    /// was computed.
    pub fn done(&mut self, id: JobId, now: Time) -> Option<(&Job, Span)> {
        let (_, since) = self.running.take_if(|(running, _)| *running == id)?;
        Some((self.jobs.get(id.0)?, now.since(since)))
    }

    /// What to compute next, if the device is free.
    pub fn start(&mut self, now: Time) -> Option<(&Job, Pass, Option<Payload>)> {
        if self.running.is_some() {
            return None;
        }
        let ((_, _, id), ()) = self.ready.pop_first()?;
        let job = self.jobs.get_mut(id.0)?;
        let State::Ready(pass, input) = job.state else { return None };
        job.state = State::Running(pass);
        self.running = Some((job.id, now));
        Some((job, pass, input))
    }
}

fn turn(pass: Pass) -> Turn {
    match pass {
        Pass::Forward => Turn::Forward,
        Pass::Backward => Turn::Backward,
    }
}
