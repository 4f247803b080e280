//! A worker's host: carries out what [`starling_swarm::worker`] wants done, with a real [`Stage`].
//!
//! The machine knows tensors only as handles; [`Tensors`] holds what they stand for.
//!
//! Only `step` sync so far.

mod depositing;
mod handing;
mod summing;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use starling_model::checkpoint::{Part, RestoreError, SaveError};
use starling_model::lots;
use starling_model::pipeline::BuildError;
use starling_model::reduce::sum_of_uses;
use starling_model::stage::{
    self, Folded, Hidden, Input as StageInput, Keep, Loss, Output, Pending, Prepared, Reduction, Shared,
    Stage, StageError, State, Ticket, Want,
};
use starling_swarm::ids::*;
use starling_swarm::lots::{Lots, TreeNode};
use starling_swarm::message::{Body, Envelope, Fence, PROTOCOL};
use starling_swarm::reduce::stamp;
use starling_swarm::worker::book::JobId;
use starling_swarm::worker::io::{LoadFrom, StateOf};
use starling_swarm::worker::{Command, Input};

use self::handing::Updates;
use crate::events::Event;
use crate::parcel::Parcel;
use crate::sabotage::{FROM_STEP, Sabotage, spoil};
use crate::tensor::{Sum, Tensor};
use crate::tensors::Tensors;
use crate::trial::Trial;

/// What a stage tells of its reduced gradient: the commit's constants are made of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Σ g² of each parameter that the stage counts.
    pub sums_of_squares: BTreeMap<String, f64>,
    /// The step's loss; only the last stage has one.
    pub loss: Loss,
}

impl Summary {
    fn to_bytes(&self) -> Result<Vec<u8>, HostError> {
        postcard::to_stdvec(self).map_err(|_| HostError::Kind)
    }
}

/// What a host is to do.
#[derive(Debug)]
pub enum Task {
    /// What the machine wants done.
    Machine(Command),
    /// Read this state for somebody who has it from another worker too, if it is the one that is here.
    Read(StateOf),
    /// Write this down.
    Note(Event),
    /// Compute held-out text in the stage of this number.
    Infer(Trial, u16, Arc<Tensor>),
}

/// What comes of a task.
#[derive(Debug)]
pub enum Done {
    /// Tell the machine.
    Tell(Input),
    /// Send this, with what its payload stands for.
    Send(Envelope, Option<Arc<Tensor>>),
    /// Of these, which may take their time, one was read: send it, if it was, then have the next one read.
    Contribution(Option<(Envelope, Vec<Sum>)>),
    /// Tell a joiner of this, and give it what it asks for of it.
    Give(PeerId, Fence, Arc<Parcel>),
    /// Nothing could be read for this joiner.
    NotGiven(PeerId),
    /// This state was read, or is not here.
    Read(StateOf, Option<Arc<Parcel>>),
    /// Held-out text was computed in the stage of this number: pass it on to the next, or tell the loss.
    Inferred(Trial, u16, Inferred),
    /// Keep this where it survives us, then tell the machine.
    Save(StateOf, Part),
    /// Write this down, before anything that follows.
    Note(Event),
    /// The weights of this state have these hashes, by name.
    Hashed(StateOf, BTreeMap<String, [u8; 32]>),
}

/// What held-out text became in a stage.
#[derive(Debug)]
pub enum Inferred {
    /// What the next stage gets.
    Onward(Arc<Tensor>),
    /// The last stage's loss.
    Loss(Loss),
    /// Nothing: other weights are here, or it makes no sense.
    Nothing,
}

/// Fetches a state that survived its holders: a file with at least these parameters, for [`Part::restore`]. May take
/// long; none if there is no such checkpoint, or nobody answers.
pub type Fetch = Arc<dyn Fn(StateOf, Vec<String>) -> Option<Vec<u8>> + Send + Sync>;

/// Makes a stage with the run's initial weights.
pub type Build = Arc<dyn Fn(StageId) -> Result<Box<dyn Stage>, BuildError> + Send + Sync>;

/// See the module's head.
pub struct Host {
    me: PeerId,
    build: Build,
    fetch: Fetch,
    lots: Lots,
    keep: Keep,
    hash_every: u64,
    /// Whether the first weights are a checkpoint's, and not drawn from the seed.
    is_given: bool,
    merges: bool,
    sabotage: Option<Sabotage>,
    /// The weights of the version before, if they are misused on purpose.
    old_weights: Vec<u8>,
    /// Which state it holds.
    holding: Option<StateOf>,
    /// The lots that it gave to a reduction last.
    given: Option<(Step, Vec<u32>)>,
    stage: Option<Box<dyn Stage>>,
    tensors: Tensors,
    jobs: BTreeMap<JobId, Job>,
    /// Of the last stage: the loss of each microbatch whose gradient is in its lot.
    losses: BTreeMap<(Step, u32), Loss>,
    /// Attempts are numbered through, so that a stage never takes one for another.
    attempts: u32,
    reducing: Reduction,
    /// The loss of the step that is reduced.
    reduced_loss: Loss,
    /// The hash of its reduced gradient, once that is prepared.
    gradient_hash: Digest,
    /// The last updates, while somebody may ask for them.
    updates: Updates,
}

/// What is kept for a job.
#[derive(Clone, Debug, Default)]
struct Job {
    step: Step,
    /// The numbers of its samples, which follow one another.
    samples: Range<u64>,
    ticket: Option<Ticket>,
    pending: Option<Pending>,
    handles: Vec<u64>,
}

impl Host {
    /// A host that holds nothing.
    pub fn new(me: PeerId, build: Build, fetch: Fetch, lots: Lots, keep: Keep) -> Host {
        Host {
            me,
            build,
            fetch,
            lots,
            keep,
            hash_every: 0,
            is_given: false,
            merges: false,
            sabotage: None,
            old_weights: Vec::new(),
            holding: None,
            given: None,
            stage: None,
            tensors: Tensors::default(),
            jobs: BTreeMap::new(),
            losses: BTreeMap::new(),
            attempts: 0,
            reducing: Reduction { step: 0, attempt: 0 },
            reduced_loss: Loss::default(),
            gradient_hash: Digest::default(),
            updates: Updates::default(),
        }
    }

    /// From now on it tells the hashes of the weights after every so many steps; 0: never.
    pub fn hash_every(&mut self, steps: u64) {
        self.hash_every = steps;
    }

    /// From now on the first weights are those of the checkpoint of step 0, and not drawn from the seed.
    pub fn begin_at_checkpoint(&mut self) {
        self.is_given = true;
    }

    /// From now on sealed lots are merged whatever their places in the tree: only sums over all of them are wanted.
    pub fn merge_all(&mut self) {
        self.merges = true;
    }

    /// From now on it does something wrong on purpose.
    pub fn sabotage(&mut self, sabotage: Option<Sabotage>) {
        self.sabotage = sabotage;
    }

    /// The stage that it holds.
    pub fn stage(&self) -> Option<&dyn Stage> {
        self.stage.as_deref()
    }

    /// What it holds under handles.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Does a task; see [`Host::carry_out`].
    pub fn do_task(&mut self, task: Task, done: &mut Vec<Done>) -> Result<(), HostError> {
        match task {
            Task::Machine(command) => self.carry_out(command, done),
            Task::Read(of) => {
                let is_here = self.holding == Some(of) && self.has_room();
                let parcel = if is_here { self.read_state(of).ok() } else { None };
                done.push(Done::Read(of, parcel.map(Arc::new)));
                Ok(())
            }
            Task::Infer(trial, stage, tensor) => {
                let (inferred, outcome) = match self.infer(&trial, stage, &tensor) {
                    Ok(inferred) => (inferred, Ok(())),
                    Err(error) => (Inferred::Nothing, Err(error)),
                };
                done.push(Done::Inferred(trial, stage, inferred));
                outcome
            }
            Task::Note(event) => {
                done.push(Done::Note(event));
                Ok(())
            }
        }
    }

    /// Carries out a command. An error changes nothing that counts: what was to be computed is said to have failed,
    /// and is done elsewhere; anything else is asked for again by whoever waits for it.
    pub fn carry_out(&mut self, command: Command, done: &mut Vec<Done>) -> Result<(), HostError> {
        let job = match command {
            Command::Forward { job, .. } | Command::Backward(job, _) => Some(job),
            _ => None,
        };
        let loads = match &command {
            Command::Load { of, .. } | Command::CatchUp { of, .. } => Some(*of),
            _ => None,
        };
        let gives = if let Command::SendState { to, .. } = &command { Some(*to) } else { None };
        let contributes = matches!(command, Command::Contribute(_));
        let settles = if let Command::Settle(no, round, _) = &command { Some((*no, *round)) } else { None };
        let result = self.try_to(command, done);
        if result.is_err() {
            done.extend(contributes.then_some(Done::Contribution(None)));
            done.extend(job.map(|job| Done::Tell(Input::Failed(job))));
            done.extend(gives.map(Done::NotGiven));
            done.extend(loads.map(|of| Done::Tell(Input::LoadFailed(of))));
            done.extend(settles.map(|(no, round)| Done::Tell(Input::SettleFailed(no, round))));
        }
        result
    }

    fn try_to(&mut self, command: Command, done: &mut Vec<Done>) -> Result<(), HostError> {
        match command {
            Command::Send(envelope) => {
                let tensor = envelope.payload().and_then(|payload| self.tensors.get(payload));
                done.push(Done::Send(envelope, tensor));
            }
            Command::Forward { job, step, weights, microbatch, input } => {
                let input = self.tensors.take(input).ok_or(HostError::Gone)?;
                self.forward(job, step, weights, microbatch, &input, done)?;
            }
            Command::Backward(job, gradient) => {
                let gradient = match gradient {
                    Some(payload) => Some(self.tensors.take(payload).ok_or(HostError::Gone)?),
                    None => None,
                };
                self.backward(job, gradient, done)?;
            }
            Command::Fold(job, at) => self.fold(job, at, done)?,
            Command::Discard(job) => {
                if let Some(pending) = self.jobs.get_mut(&job).and_then(|job| job.pending.take()) {
                    self.held()?.discard(pending);
                }
            }
            Command::Forget(job) => self.forget(job),
            Command::DropLots(lots) => {
                for at in &lots {
                    done.push(Done::Note(Event::Dropped { step: at.step.0, lots: vec![at.lot.0] }));
                }
                for at in lots {
                    self.held()?.revoke(at.step.0, at.lot.0);
                    for microbatch in self.lots.microbatches_of(at.lot) {
                        self.losses.remove(&(at.step, microbatch));
                    }
                }
            }
            Command::Deposit(deposit) => self.deposit(deposit, done)?,
            Command::Inherit(inherited) => {
                let (step, lots) = (inherited.step, inherited.lots.clone());
                if let Err(error) = self.inherit(inherited, done) {
                    done.push(Done::Tell(Input::NotInherited(step, lots)));
                    return Err(error);
                }
            }
            Command::Release(payload) => drop(self.tensors.take(payload)),
            Command::DropBefore(step) => {
                if step == Step(u64::MAX) {
                    done.push(Done::Note(Event::Voided));
                }
                self.drop_before(step);
            }
            Command::BeginReduce(step) => {
                self.attempts += 1;
                let reduction = Reduction { step: step.0, attempt: self.attempts };
                self.held()?.begin_reduce(reduction)?;
                self.reducing = reduction;
            }
            Command::Contribute(contribute) => {
                let piece = contribute.start as usize..contribute.end as usize;
                // It is read when there is room for it, and other lots may have been merged since it was wanted.
                if contribute.nodes.contains(&TreeNode::ALL) {
                    let merged = self.held()?.merged(contribute.fence.step.0);
                    if stamp(&merged.into_iter().map(Lot).collect::<Vec<_>>()) != contribute.stamp {
                        return Err(HostError::Gone);
                    }
                }
                let sums = self.read(contribute.fence.step, &contribute.nodes, piece)?;
                self.note_given(contribute.fence.step, &contribute.nodes, done);
                // Nobody asks for it again: it lives until it is sent.
                let bytes = sums.iter().map(|sum| sum.bytes.len() as u64).sum();
                let message = contribute.message(Payload { handle: 0, bytes });
                done.push(Done::Contribution(Some((message, sums))));
            }
            Command::Sum(number, due) => self.sum(number, due, done)?,
            Command::WriteReduced { start, payload, keep, .. } => {
                let tensor = if keep { self.tensors.get(payload) } else { self.tensors.take(payload) };
                let tensor = tensor.ok_or(HostError::Gone)?;
                let Tensor::Sums(sums) = &*tensor else { return Err(HostError::Kind) };
                let [sum] = &sums[..] else { return Err(HostError::Kind) };
                let reducing = self.reducing;
                self.held()?.write_reduced(reducing, start as usize, &sum.bytes)?;
                self.reduced_loss = sum.loss;
            }
            Command::Prepare(number) => {
                let (reducing, loss) = (self.reducing, self.reduced_loss);
                let stage = self.held()?;
                let Prepared { gradient_hash, mut sums_of_squares } = stage.prepare(reducing)?;
                // What has all its uses here is nobody else's business.
                for Shared { name, elements, .. } in stage.shared().into_iter().filter(|one| !one.elsewhere) {
                    let total = sum_of_uses(stage.dtype(), elements, &[stage.uses(reducing, &name)?]);
                    let square = stage.settle(reducing, &name, &total)?;
                    sums_of_squares.extend(square.map(|square| (name, square)));
                }
                self.gradient_hash = gradient_hash;
                let mut summary = Summary { sums_of_squares, loss }.to_bytes()?;
                if self.sabotage == Some(Sabotage::Garble) && reducing.step >= FROM_STEP {
                    summary.fill(0xff);
                }
                done.push(Done::Tell(Input::Prepared(number, gradient_hash, summary)));
            }
            Command::SendUses { to, fence, stage } => {
                let uses = Arc::new(Tensor::Uses(self.uses()?));
                let payload = Payload { handle: 0, bytes: uses.bytes() };
                let (from, to) = (Address::Worker(self.me), Address::Worker(to));
                let body = Body::Uses { stage, payload };
                done.push(Done::Send(Envelope { protocol: PROTOCOL, from, to, fence, body }, Some(uses)));
            }
            Command::Settle(number, round, come) => {
                let (digest, sums_of_squares) = self.settle(number.stage, come)?;
                let summary = Summary { sums_of_squares, loss: Loss::default() }.to_bytes()?;
                done.push(Done::Tell(Input::Settled(number, round, digest, summary)));
            }
            Command::Apply(of, commit) => {
                let (step, version) = (commit.step.0, of.version.0 - 1);
                let update = match commit.skipped {
                    true => None,
                    false => Some(serde_json::from_slice(&commit.constants).map_err(|_| HostError::Kind)?),
                };
                self.remember(&commit);
                let stage = self.stage.as_mut().ok_or(HostError::Gone)?;
                if self.sabotage == Some(Sabotage::Stale) {
                    self.old_weights = stage.read(version, State::Weights, 0..stage.layout().len())?;
                }
                stage.apply(&stage::Commit { step, version, update })?;
                self.now_holds(of, false, done);
                done.push(Done::Tell(Input::Applied(of)));
                self.tell_hashes(of, done)?;
            }
            Command::Load { of, from } => {
                self.load(of, from)?;
                self.now_holds(of, true, done);
                done.push(Done::Tell(Input::Loaded(of)));
                if matches!(from, LoadFrom::Donor(_)) {
                    self.tell_hashes(of, done)?;
                }
            }
            Command::CatchUp { of, payload, .. } => {
                self.catch_up(of, payload)?;
                self.now_holds(of, true, done);
                done.push(Done::Tell(Input::Loaded(of)));
                self.tell_hashes(of, done)?;
            }
            Command::SendState { to, fence, stage, have } => {
                let of = StateOf { stage, epoch: fence.epoch, version: fence.step };
                done.push(Done::Give(to, fence, Arc::new(self.hand_over(of, have)?)));
            }
            Command::Save(of) => {
                let stage = self.held()?;
                if stage.version() != of.version.0 {
                    return Err(HostError::Gone);
                }
                // A parameter that several stages use is stored once, by the first.
                let shared = stage.shared().into_iter().filter(|one| !one.first);
                let elsewhere: BTreeSet<String> = shared.map(|one| one.name).collect();
                done.push(Done::Save(of, Part::of(&**stage, &elsewhere)?));
            }
        }
        Ok(())
    }

    fn forward(
        &mut self,
        job: JobId,
        step: Step,
        weights: Step,
        microbatch: Microbatch,
        input: &Tensor,
        done: &mut Vec<Done>,
    ) -> Result<(), HostError> {
        let Tensor::Activation(input, meta) = input else { return Err(HostError::Kind) };
        let of = stage::Microbatch { step: step.0, index: microbatch.0, version: weights.0 };
        let keep = self.keep;
        let spoilt = self.sabotage.filter(|_| step.0 >= FROM_STEP);
        if spoilt == Some(Sabotage::Stale) {
            self.swap_weights()?;
        }
        let result = self.held()?.forward(of, input.clone(), meta.clone(), keep);
        if spoilt == Some(Sabotage::Stale) {
            self.swap_weights()?;
        }
        let (mut output, ticket) = result?;
        if let (Some(Sabotage::Nan), Output::Hidden(hidden)) = (spoilt, &mut output) {
            spoil(hidden);
        }
        let first = meta.samples.first().copied().unwrap_or(0);
        let samples = first..first + meta.samples.len() as u64;
        let mut entry = Job { step, samples, ticket: Some(ticket), ..Job::default() };
        let finite = match &output {
            Output::Hidden(hidden) => hidden.is_finite(),
            Output::Loss(loss) => loss.sum.is_finite(),
            Output::Logits(_) => true,
        };
        let payload = match output {
            Output::Hidden(hidden) => self
                .tensors
                .store(step, Arc::new(Tensor::Activation(StageInput::Hidden(hidden), meta.clone()))),
            Output::Loss(_) | Output::Logits(_) => Payload::default(),
        };
        entry.handles.push(payload.handle);
        self.jobs.insert(job, entry);
        done.push(Done::Tell(if finite { Input::ForwardDone(job, payload) } else { Input::NotFinite(job) }));
        Ok(())
    }

    /// Puts the weights of the version before in the place of the current ones, or back.
    fn swap_weights(&mut self) -> Result<(), HostError> {
        let stage = self.stage.as_mut().ok_or(HostError::Gone)?;
        let current = stage.read(stage.version(), State::Weights, 0..stage.layout().len())?;
        if self.old_weights.len() == current.len() {
            stage.write(State::Weights, 0, &self.old_weights)?;
            self.old_weights = current;
        }
        Ok(())
    }

    fn backward(
        &mut self,
        id: JobId,
        gradient: Option<Arc<Tensor>>,
        done: &mut Vec<Done>,
    ) -> Result<(), HostError> {
        let gradient = match gradient.as_deref() {
            Some(Tensor::Gradient(gradient)) => Some(gradient.clone()),
            Some(_) => return Err(HostError::Kind),
            None => None,
        };
        let job = self.jobs.get_mut(&id).ok_or(HostError::Gone)?;
        let (step, ticket) = (job.step, job.ticket.take().ok_or(HostError::Gone)?);
        let spoilt = self.sabotage.filter(|_| step.0 >= FROM_STEP);
        if spoilt == Some(Sabotage::Stale) {
            self.swap_weights()?;
        }
        let result = self.held()?.backward(ticket, gradient);
        if spoilt == Some(Sabotage::Stale) {
            self.swap_weights()?;
        }
        let (mut before, pending) = result?;
        if let (Some(Sabotage::Nan), Some(before)) = (spoilt, &mut before) {
            spoil(before);
        }
        let finite = before.as_ref().is_none_or(Hidden::is_finite);
        let payload = before.map_or(Payload::default(), |before| {
            self.tensors.store(step, Arc::new(Tensor::Gradient(before)))
        });
        if let Some(job) = self.jobs.get_mut(&id) {
            job.pending = Some(pending);
            job.handles.push(payload.handle);
        }
        done.push(Done::Tell(if finite { Input::BackwardDone(id, payload) } else { Input::NotFinite(id) }));
        Ok(())
    }

    /// The hashes of the weights, if they are wanted of this version.
    fn tell_hashes(&mut self, of: StateOf, done: &mut Vec<Done>) -> Result<(), HostError> {
        if self.hash_every > 0 && of.version.0 > 0 && of.version.0.is_multiple_of(self.hash_every) {
            done.push(Done::Hashed(of, self.held()?.weight_hashes()));
        }
        Ok(())
    }

    fn infer(&mut self, trial: &Trial, stage: u16, tensor: &Tensor) -> Result<Inferred, HostError> {
        let Tensor::Activation(input, meta) = tensor else { return Err(HostError::Kind) };
        if self.holding != Some(trial.state(stage)) {
            return Ok(Inferred::Nothing);
        }
        Ok(match self.held()?.infer(input.clone(), meta, Want::Loss)? {
            Output::Hidden(hidden) => {
                Inferred::Onward(Arc::new(Tensor::Activation(StageInput::Hidden(hidden), meta.clone())))
            }
            Output::Loss(loss) => Inferred::Loss(loss),
            Output::Logits(_) => Inferred::Nothing,
        })
    }

    fn now_holds(&mut self, of: StateOf, loaded: bool, done: &mut Vec<Done>) {
        self.holding = Some(of);
        self.given = None;
        let (stage, epoch, version) = (of.stage.0, of.epoch.0, of.version.0);
        done.push(Done::Note(Event::Holds { stage, epoch, version, loaded }));
    }

    fn fold(&mut self, id: JobId, at: LotOf, done: &mut Vec<Done>) -> Result<(), HostError> {
        let job = self.jobs.get_mut(&id).ok_or(HostError::Gone)?;
        let (pending, samples) = (job.pending.take().ok_or(HostError::Gone)?, job.samples.clone());
        let lots = lots::Lots { microbatches: self.lots.microbatches, lots: self.lots.lots };
        let merges = self.merges;
        let stage = self.held()?;
        if stage.fold(pending, lots)? == Folded::Sealed && merges {
            stage.merge(at.step.0);
        }
        self.losses.extend(pending.loss.map(|loss| ((at.step, pending.microbatch.index), loss)));
        if let Some(StateOf { stage, epoch, .. }) = self.holding {
            done.push(Done::Note(Event::Folded {
                stage: stage.0,
                epoch: epoch.0,
                step: at.step.0,
                lot: at.lot.0,
                microbatch: pending.microbatch.index,
                first_sample: samples.start,
                samples: samples.end - samples.start,
            }));
        }
        Ok(())
    }

    fn forget(&mut self, id: JobId) {
        // A gradient may still wait to be folded: the machine tells when it is not wanted.
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let (ticket, handles) = (job.ticket.take(), std::mem::take(&mut job.handles));
        if job.pending.is_none() {
            self.jobs.remove(&id);
        }
        if let (Some(ticket), Some(stage)) = (ticket, self.stage.as_mut()) {
            stage.forget(ticket);
        }
        for handle in handles {
            self.tensors.remove(handle);
        }
    }

    /// Drops what belongs to the steps before this one. If all work is void, messages that are ahead of the machine
    /// are not: what came with them stays until their step is closed.
    fn drop_before(&mut self, step: Step) {
        if step < Step(u64::MAX) {
            self.tensors.drop_before(step);
        }
        self.losses.retain(|(of, _), _| *of >= step);
        let gone: Vec<JobId> =
            self.jobs.iter().filter(|(_, job)| job.step < step).map(|(&id, _)| id).collect();
        for id in gone {
            let Some(Job { ticket, pending, handles, .. }) = self.jobs.remove(&id) else { continue };
            handles.iter().for_each(|handle| drop(self.tensors.remove(*handle)));
            if let Some(stage) = self.stage.as_mut() {
                ticket.into_iter().for_each(|ticket| stage.forget(ticket));
                pending.into_iter().for_each(|pending| stage.discard(pending));
            }
        }
    }

    fn load(&mut self, of: StateOf, from: LoadFrom) -> Result<(), HostError> {
        self.stage = None; // There is not memory for two.
        let mut stage = (self.build)(of.stage)?;
        match from {
            LoadFrom::Seed if !self.is_given => {}
            LoadFrom::Seed | LoadFrom::Checkpoint => {
                let names = stage.layout().entries().iter().map(|(parameter, _)| parameter.name.clone());
                let file = (self.fetch)(of, names.collect()).ok_or(HostError::Gone)?;
                Part::restore(&file, &mut *stage, of.version.0)?;
            }
            LoadFrom::Donor(payload) => {
                let tensor = self.tensors.take(payload).ok_or(HostError::Gone)?;
                let Tensor::Parcel(parcel) = &*tensor else { return Err(HostError::Kind) };
                handing::put_state(parcel, of, &mut *stage)?;
            }
        }
        stage.restore(of.version.0);
        self.stage = Some(stage);
        self.updates = Updates::default();
        self.jobs.clear();
        self.losses.clear();
        Ok(())
    }

    fn held(&mut self) -> Result<&mut Box<dyn Stage>, HostError> {
        self.stage.as_mut().ok_or(HostError::Gone)
    }
}

/// Why a command could not be carried out.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// What the command names is not here any more.
    #[error("what was asked for belongs to work that was given up")]
    Gone,
    /// A peer sent something else than its message says.
    #[error("a tensor is not what its message says; the sender is broken or of another version")]
    Kind,
    /// The stage refused.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The stage could not be made.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The state could not be written down.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A state that was written down does not fit.
    #[error(transparent)]
    Restore(#[from] RestoreError),
}

#[cfg(test)]
mod tests {
    use starling_model::pipeline;
    use starling_model::run::{Run, TrainConfig};

    use super::*;

    #[test]
    fn what_cannot_be_computed_has_failed_and_the_device_is_free() {
        let build: Build = Arc::new(|stage| {
            let run =
                Run { train: TrainConfig { stages: 2, threads: 1, ..Default::default() }, ..Run::default() };
            let (architecture, rule) = (run.model.architecture(257), run.optimiser.rule());
            pipeline::build_stage(&architecture, rule, &run.train, 0, stage.0.into())
        });
        let lots = Lots { microbatches: 1, lots: 1 };
        let mut host = Host::new(PeerId(0), build, Arc::new(|_, _| None), lots, Keep::All);
        let (job, step, microbatch) = (JobId(7), Step(0), Microbatch(0));
        for command in [
            Command::Forward { job, step, weights: step, microbatch, input: Payload { handle: 3, bytes: 9 } },
            Command::Backward(job, None),
        ] {
            let mut done = Vec::new();
            assert!(matches!(host.carry_out(command, &mut done), Err(HostError::Gone)));
            assert!(matches!(done[..], [Done::Tell(Input::Failed(JobId(7)))]), "{done:?}");
        }
        let state = StateOf { stage: StageId(0), epoch: Epoch(1), version: Step(4) };
        let load = Command::Load { of: state, from: LoadFrom::Checkpoint };
        let mut done = Vec::new();
        assert!(host.carry_out(load, &mut done).is_err(), "there is no such checkpoint");
        assert!(matches!(done[..], [Done::Tell(Input::LoadFailed(of))] if of == state), "{done:?}");
    }
}
