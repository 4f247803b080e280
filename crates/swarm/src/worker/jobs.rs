//! The microbatches at a worker, and which is computed next: one after another, first what is done again for a step that
//! is about to be closed (all wait for it), otherwise forward and backward in turns, each the older step first, then
//! the lot that came first, and its microbatches in their order: so few lots are open at a time, each of which takes a
//! gradient's memory, and few gradients come before their turn. Were backward always first, a stage with many gradients
//! to do would send nothing onward meanwhile, and the gap would go round the pipeline (eight stages: a third of the
//! peers' time, against a 25th).
//!
//! A microbatch that is done stays, with its output and the gradient of its input, until its step is closed or
//! the room for such things is full: whoever does a lot again in another stage is answered from here.

use std::collections::{BTreeMap, VecDeque};

use crate::ids::*;
use crate::message::{Fence, Pass, Work};
use crate::sequence::Sequence;
use crate::small::SmallMap;
use crate::time::{Span, Time};
use crate::worker::book::JobId;

/// What the device has at a time: when it is done with one job it begins with the next, and does not wait until we have
/// heard of it and decided what that is (48 peers on two cores: a 60th of their time).
const AHEAD: usize = 2;

/// Microbatches that wait for forward, at the most, for each that may be between forward and backward. They take
/// their input's memory. What has crossed a slow link is not sent away again because others were there first.
pub const WAITING: usize = 1;

/// The microbatches at a worker, a bounded number.
#[derive(Clone, Debug)]
pub struct Jobs {
    /// Of those between forward and backward.
    limit: usize,
    keep_bytes: u64,
    kept_bytes: u64,
    kept: usize,
    /// By the job's number.
    jobs: Sequence<Job>,
    index: BTreeMap<Key, JobId>,
    /// For every lot of which there was any here, the first.
    first_of_lot: BTreeMap<LotOf, JobId>,
    /// Those that wait for forward, and for backward, each in the order of their turns.
    ready: [SmallMap<Turn, ()>; 2],
    /// What the device has: what it computes, since when, and what comes next.
    running: VecDeque<(JobId, Time)>,
    /// What was started last.
    last: Pass,
    /// The newest step here, and the first lease of it.
    newest: Option<(Step, LeaseNo)>,
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
    haste: Haste,
    /// The first job of its lot that came here.
    first_of_lot: JobId,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It waits for its turn, with its input.
    Ready(Pass, Option<Payload>),
    /// It is being computed, or the next that will be.
    Running(Pass),
    /// Its output is on the way; the gradient is awaited since then.
    Away(Time),
    /// It is done, and the gradient of its input is kept.
    Kept(Payload),
}

/// When a job's turn comes among those of its pass.
type Turn = (Haste, Step, JobId, Microbatch, JobId);

/// What is done again comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Haste {
    Again,
    First,
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

    fn turn(&self) -> Turn {
        (self.haste, self.fence.step, self.first_of_lot, self.work.microbatch, self.id)
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
    /// Room for `limit` microbatches between forward and backward, and for `keep_bytes` of those that are done.
    pub fn new(limit: usize, keep_bytes: u64) -> Jobs {
        Jobs {
            limit,
            keep_bytes,
            kept_bytes: 0,
            kept: 0,
            jobs: Sequence::default(),
            index: BTreeMap::new(),
            first_of_lot: BTreeMap::new(),
            ready: Default::default(),
            running: VecDeque::with_capacity(AHEAD),
            last: Pass::Backward,
            newest: None,
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

    /// How many are between forward and backward, or at either of them.
    pub fn begun(&self) -> usize {
        self.len() - self.ready[Pass::Forward as usize].len()
    }

    /// Whether another one may come in.
    pub fn has_room(&self) -> bool {
        self.ready[Pass::Forward as usize].len() < WAITING * self.limit
    }

    /// If something waits to be begun, there is no room for it, and nothing to go on with: what has waited for a gradient
    /// since before `patience`. Its driver is likely gone.
    pub fn overdue(&self, patience: Time) -> Option<Key> {
        let [forward, backward] = &self.ready;
        let is_stuck = self.begun() >= self.limit && self.running.is_empty() && backward.is_empty();
        if forward.is_empty() || !is_stuck {
            return None;
        }
        let waits = |(_, job): (u64, &Job)| match job.state {
            State::Away(since) if since < patience => Some((since, job.key())),
            _ => None,
        };
        self.jobs.iter().filter_map(waits).min().map(|(_, key)| key)
    }

    /// A new microbatch, to be computed forward.
    pub fn add(&mut self, work: Work, fence: Fence, grant: Option<Grant>, input: Payload) {
        let id = JobId(self.jobs.next());
        let state = State::Ready(Pass::Forward, Some(input));
        let haste = self.haste(&work, fence);
        let first_of_lot = *self.first_of_lot.entry(key(&work, fence).at).or_insert(id);
        let job = Job { id, work, fence, grant, output: None, state, came_back: None, haste, first_of_lot };
        self.ready[Pass::Forward as usize].insert(job.turn(), ());
        self.index.insert(job.key(), id);
        self.jobs.push(job);
    }

    /// Whether a step that is about to be closed waits for this: it was leased or routed again when a later step was
    /// under way already.
    fn haste(&mut self, work: &Work, fence: Fence) -> Haste {
        let (newest, first) = *self.newest.get_or_insert((fence.step, work.lease));
        if fence.step > newest {
            self.newest = Some((fence.step, work.lease));
        }
        let again = work.lease > first || fence.attempt > Attempt(0);
        if fence.step < newest && again { Haste::Again } else { Haste::First }
    }

    /// A later try of a microbatch that is here takes over what was done for the one before.
    pub fn renew(&mut self, work: Work, fence: Fence, grant: Option<Grant>) -> Option<&Job> {
        let haste = self.haste(&work, fence);
        let id = *self.index.get(&key(&work, fence))?;
        let job = self.jobs.get_mut(id.0)?;
        let before = job.turn();
        (job.work, job.fence, job.grant, job.haste) = (work, fence, grant, haste);
        if let State::Ready(pass, _) = job.state {
            self.ready[pass as usize].remove(before);
            self.ready[pass as usize].insert(job.turn(), ());
        }
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
                self.ready[pass as usize].remove(job.turn());
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
        self.first_of_lot.remove(&at);
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
        self.first_of_lot = self.first_of_lot.split_off(&first.at);
        before.into_values().inspect(|id| drop(self.take(*id))).collect()
    }

    /// Drops all; returns their numbers.
    pub fn clear(&mut self) -> Vec<JobId> {
        self.index.clear();
        self.first_of_lot.clear();
        self.ready.iter_mut().for_each(SmallMap::clear);
        self.newest = None;
        (self.kept, self.kept_bytes) = (0, 0);
        self.jobs.clear().into_iter().map(JobId).collect()
    }

    /// The gradient of a microbatch has come (or is not needed): backward may run.
    pub fn ready_backward(&mut self, id: JobId, gradient: Option<Payload>) {
        if let Some(job) = self.jobs.get_mut(id.0) {
            job.came_back = Some(job.attempt());
            job.state = State::Ready(Pass::Backward, gradient);
            self.ready[Pass::Backward as usize].insert(job.turn(), ());
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

    /// The device is done with a job; the job, if it is still wanted, and how long it was computed.
    pub fn done(&mut self, id: JobId, now: Time) -> Option<(&Job, Span)> {
        let place = self.running.iter().position(|(running, _)| *running == id)?;
        let (_, since) = self.running.remove(place)?;
        if let Some((_, next_since)) = self.running.front_mut() {
            *next_since = now;
        }
        Some((self.jobs.get(id.0)?, now.since(since)))
    }

    /// What the device is to compute next, if it has room for it.
    pub fn start(&mut self, now: Time) -> Option<(&Job, Pass, Option<Payload>)> {
        // A gradient is folded after what the device has got meanwhile: were that another backward, there would be two.
        let alone = self.running.is_empty();
        if self.running.len() >= AHEAD
            || (!alone && self.last == Pass::Backward && self.next_pass() == Some(Pass::Backward))
        {
            return None;
        }
        let id = self.next()?;
        let job = self.jobs.get_mut(id.0)?;
        let State::Ready(pass, input) = job.state else { return None };
        (job.state, self.last) = (State::Running(pass), pass);
        self.running.push_back((job.id, now));
        Some((job, pass, input))
    }

    /// Whose turn it is.
    fn next(&mut self) -> Option<JobId> {
        let pass = self.next_pass()?;
        self.ready[pass as usize].pop_first().map(|((.., id), ())| id)
    }

    fn next_pass(&self) -> Option<Pass> {
        let may_begin = self.begun() < self.limit;
        let first = |pass: Pass| {
            self.ready[pass as usize].keys().next().filter(|_| pass == Pass::Backward || may_begin)
        };
        let again = |pass: &Pass| first(*pass).is_some_and(|(haste, ..)| haste == Haste::Again);
        let other = if self.last == Pass::Forward { Pass::Backward } else { Pass::Forward };
        let pass = [Pass::Backward, Pass::Forward].into_iter().find(again);
        pass.or_else(|| [other, self.last].into_iter().find(|pass| first(*pass).is_some()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{DriverId, RunId, Term};

    fn add(jobs: &mut Jobs, step: u64, lot: u32, lease: u64) -> JobId {
        let id = JobId(jobs.jobs.next());
        let lease = LeaseNo { term: Term(1), number: lease };
        let (lot, microbatch) = (Lot(lot), Microbatch(lot));
        let work = Work { lot, microbatch, lease, driver: DriverId(0), route: [].into() };
        let fence =
            Fence { run: RunId(1), term: Term(1), epoch: Epoch(1), step: Step(step), attempt: Attempt(0) };
        jobs.add(work, fence, None, Payload::default());
        id
    }

    fn start(jobs: &mut Jobs) -> Option<(JobId, Pass)> {
        jobs.running.clear();
        jobs.start(Time(0)).map(|(job, pass, _)| (job.id, pass))
    }

    #[test]
    fn forward_and_backward_take_turns_and_the_older_step_goes_first() {
        let mut jobs = Jobs::new(9, 0);
        let [a, b, young, old] = [(1, 0, 1), (1, 1, 2), (2, 0, 9), (1, 2, 3)]
            .map(|(step, lot, lease)| add(&mut jobs, step, lot, lease));
        for id in [a, b] {
            jobs.ready[0].remove(jobs.job(id).unwrap().turn());
            jobs.ready_backward(id, None);
        }
        let order: Vec<_> = std::iter::from_fn(|| start(&mut jobs)).collect();
        let (forward, backward) = (Pass::Forward, Pass::Backward);
        assert_eq!(order, [(old, forward), (a, backward), (young, forward), (b, backward)]);
    }

    #[test]
    fn what_an_old_step_has_done_again_goes_before_everything_else() {
        let mut jobs = Jobs::new(9, 0);
        let [back, young, again] =
            [(1, 0, 1), (2, 0, 8), (1, 1, 9)].map(|(step, lot, lease)| add(&mut jobs, step, lot, lease));
        jobs.ready[0].remove(jobs.job(back).unwrap().turn());
        jobs.ready_backward(back, None);
        jobs.last = Pass::Forward;
        assert_eq!(start(&mut jobs), Some((again, Pass::Forward)));
        assert_eq!(start(&mut jobs), Some((back, Pass::Backward)));
        assert_eq!(start(&mut jobs), Some((young, Pass::Forward)));
    }

    #[test]
    fn what_waits_is_begun_when_there_is_memory_for_it() {
        let mut jobs = Jobs::new(2, 0);
        let ids = [0, 1, 2].map(|lot| add(&mut jobs, 1, lot, 1));
        for id in &ids[..2] {
            assert_eq!(start(&mut jobs), Some((*id, Pass::Forward)));
            jobs.away(*id, Payload::default(), Time(5));
        }
        assert_eq!(start(&mut jobs), None, "two are between forward and backward");
        assert!(jobs.has_room(), "and another one may wait");
        add(&mut jobs, 1, 3, 1);
        assert!(!jobs.has_room());
        assert_eq!(jobs.overdue(Time(5)), None);
        assert_eq!(jobs.overdue(Time(6)), jobs.job(ids[0]).map(Job::key), "its gradient may never come");
        jobs.ready_backward(ids[1], None);
        assert_eq!(jobs.overdue(Time(6)), None, "there is something to do");
        assert_eq!(start(&mut jobs), Some((ids[1], Pass::Backward)));
        assert!(jobs.keep(ids[1], Payload::default()));
        assert_eq!(start(&mut jobs), Some((ids[2], Pass::Forward)));
    }

    #[test]
    fn the_device_has_its_next_job_in_time_but_never_two_backwards() {
        let mut jobs = Jobs::new(9, 0);
        let [a, b, c] = [0, 1, 2].map(|lot| add(&mut jobs, 1, lot, 1));
        for id in [a, b] {
            jobs.ready[0].remove(jobs.job(id).unwrap().turn());
            jobs.ready_backward(id, None);
        }
        let start = |jobs: &mut Jobs, now| jobs.start(Time(now)).map(|(job, pass, _)| (job.id, pass));
        jobs.last = Pass::Forward;
        assert_eq!(start(&mut jobs, 0), Some((a, Pass::Backward)));
        assert_eq!(start(&mut jobs, 0), Some((c, Pass::Forward)));
        assert_eq!(start(&mut jobs, 0), None, "it has two");
        assert_eq!(jobs.done(a, Time(7)).map(|(_, computed)| computed), Some(Span(7)));
        assert_eq!(start(&mut jobs, 7), Some((b, Pass::Backward)));
        assert_eq!(
            jobs.done(c, Time(9)).map(|(_, computed)| computed),
            Some(Span(2)),
            "since the one before it"
        );
        let d = add(&mut jobs, 1, 3, 1);
        jobs.ready[0].remove(jobs.job(d).unwrap().turn());
        jobs.ready_backward(d, None);
        assert_eq!(start(&mut jobs, 9), None, "its gradient would lie beside that of the one before");
    }

    #[test]
    fn a_lot_keeps_its_place_though_what_it_had_here_is_gone() {
        let mut jobs = Jobs::new(9, 0);
        let [first, other] = [0, 1].map(|lot| add(&mut jobs, 1, lot, 1));
        let key = jobs.job(first).unwrap().key();
        jobs.remove(key);
        let again = add(&mut jobs, 1, 0, 1);
        assert_eq!(start(&mut jobs), Some((again, Pass::Forward)));
        assert_eq!(start(&mut jobs), Some((other, Pass::Forward)));
    }
}
