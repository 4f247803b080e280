//! What the machines want done: carried out, checked, and reported when the explorer says so.

use std::collections::BTreeMap;
use std::sync::Arc;

use starling_sim::host::{Counted, Host, Piece};
use starling_sim::toy::told;
use starling_swarm::coordinator;
use starling_swarm::driver;
use starling_swarm::ids::*;
use starling_swarm::journal::{Commit, Record};
use starling_swarm::message::{Body, Envelope, PROTOCOL};
use starling_swarm::time::Time;
use starling_swarm::worker;
use starling_swarm::worker::io::{LoadFrom, ReduceNo, StateOf};

use crate::*;

impl State {
    pub(crate) fn coordinator_input(&mut self, input: coordinator::Input) {
        let mut out = Vec::new();
        self.coordinator.change().handle(input, Time(self.now), &mut out);
        self.coordinator_commands(out);
    }

    pub(crate) fn coordinator_commands(&mut self, commands: Vec<coordinator::Command>) {
        for command in commands {
            match command {
                coordinator::Command::Send(envelope) => self.post(envelope),
                coordinator::Command::Append(number, record) => self.unsynced.push_back((number, record)),
                coordinator::Command::Conclude(number, step, summaries) => {
                    let digest = |s: Vec<u8>| s.as_slice().try_into().map_or(0, u64::from_le_bytes);
                    let constants = self.about.toy.constants(step, summaries.into_iter().map(digest));
                    self.concluded.push_back((number, constants.to_le_bytes().to_vec()));
                }
                coordinator::Command::Tell(_) => {}
            }
        }
    }

    /// The oldest record is safe.
    pub(crate) fn synced(&mut self) -> Result<(), String> {
        let Some((number, record)) = self.unsynced.pop_front() else { return Ok(()) };
        let lost = self.about.bounds.sabotage == Some(Sabotage::LostCommit);
        let journal = self.journal.change();
        if let Record::Commit(commit) = &record {
            if (commit.epoch, commit.step) != (journal.book.epoch, journal.book.step) {
                return Err(format!("the journal is not one history: {commit:?} after {:?}", journal.book));
            }
            if !lost {
                journal.commits.push(commit.clone());
            }
        }
        journal.book.enter(&record);
        self.coordinator_input(coordinator::Input::Journaled(number));
        Ok(())
    }

    pub(crate) fn driver_input(&mut self, input: driver::Input) {
        let mut out = Vec::new();
        self.driver.change().handle(input, Time(self.now), &mut out);
        for driver::Command::Send(envelope) in out {
            self.post(envelope);
        }
    }

    // ---------------------------------------------------------------------------------- workers and hosts

    pub(crate) fn worker_input(&mut self, index: usize, input: worker::Input) -> Result<(), String> {
        let now = Time(self.now);
        let Some(node) = self.peers[index].node.as_mut() else { return Ok(()) };
        let mut out = Vec::new();
        node.change().0.handle(input, now, &mut out);
        out.into_iter().try_for_each(|command| self.carry_out(index, command))
    }

    pub(crate) fn host(&mut self, index: usize) -> &mut Host {
        let node = self.peers[index].node.as_mut();
        &mut node.expect("commands come only from machines that live").change().1
    }

    pub(crate) fn carry_out(&mut self, index: usize, command: worker::Command) -> Result<(), String> {
        use worker::{Command, Input};
        let sabotage = self.about.bounds.sabotage;
        match command {
            Command::Send(envelope) => self.post(envelope),
            Command::Forward { job, step, weights, microbatch, input } => {
                let handle = self.host(index).forward(job, step, weights, microbatch, input.handle, false);
                self.pend(index, Input::ForwardDone(job, Payload { handle, bytes: 1 }));
            }
            Command::Backward(job, gradient) => {
                let handle = self.host(index).backward(job, gradient.map(|payload| payload.handle));
                self.pend(index, Input::BackwardDone(job, Payload { handle, bytes: 1 }));
            }
            Command::Fold(job, lot) => {
                self.host(index).fold(job, lot);
                if sabotage == Some(Sabotage::Double) {
                    self.host(index).fold_again(lot);
                }
            }
            Command::Discard(job) => self.host(index).discard(job),
            Command::Forget(job) => self.host(index).forget(job),
            Command::DropLots(_) if sabotage == Some(Sabotage::KeepsDropped) => {}
            Command::DropLots(lots) => self.host(index).drop_lots(&lots),
            Command::DropBefore(step) => self.host(index).drop_before(step),
            Command::Deposit(_) | Command::Inherit(_) | Command::Release(_) => {} // Off: see `spec`.
            Command::BeginReduce(step) => self.host(index).begin_reduce(step),
            Command::Contribute(contribute) => {
                let piece = self.host(index).read(&contribute.nodes);
                let payload = self.keep(piece);
                self.post(contribute.message(payload));
            }
            Command::Sum(number, due) => {
                let come: Vec<_> =
                    due.come.into_iter().map(|(nodes, payload)| (nodes, self.piece(payload))).collect();
                let sum = self.host(index).sum(&due.own, &come, &due.into);
                let payload = self.keep(sum);
                self.pend(index, Input::Summed(number, due.part, payload));
            }
            Command::WriteReduced { step, start, end, payload, .. } => {
                let piece = self.piece(payload);
                self.host(index).write_reduced(start, end, &piece);
                if piece.counted != Counted::all(self.about.spec.lots) {
                    let what = "every microbatch is counted exactly once";
                    return Err(format!("{what}: not in {step} at peer {index}: {:?}", piece.counted));
                }
            }
            Command::Prepare(number) => return self.prepare(index, number),
            Command::SendUses { to, fence, stage } => {
                let Some(handle) = self.host(index).uses() else { return Ok(()) };
                let body = Body::Uses { stage, payload: Payload { handle, bytes: 1 } };
                let (from, to) = (address(index), Address::Worker(to));
                self.post(Envelope { protocol: PROTOCOL, from, to, fence, body });
            }
            Command::Settle(number, round, come) => {
                let come: Vec<(StageId, u64)> =
                    come.iter().map(|(stage, payload)| (*stage, payload.handle)).collect();
                let Some((hash, total)) = self.host(index).settle(&come) else { return Ok(()) };
                let (digest, summary) = (told(hash).0, told(total).1);
                self.pend(index, Input::Settled(number, round, digest, summary));
            }
            Command::Apply(of, commit) => return self.apply(index, of, commit),
            Command::CatchUp { of, payload, .. } => {
                self.host(index).catch_up(of.version, payload.handle);
                self.pend(index, Input::Loaded(of));
                return self.check(index, of.epoch, of.version);
            }
            Command::Load { of, from } => {
                let StateOf { stage, epoch, version } = of;
                let weights = match from {
                    LoadFrom::Seed => BTreeMap::from([(version, self.about.toy.initial(stage))]),
                    LoadFrom::Donor(payload) => BTreeMap::from([(version, payload.handle)]),
                    LoadFrom::Checkpoint => {
                        self.checkpoints.get(&(stage, version)).cloned().unwrap_or_default()
                    }
                };
                self.host(index).load(stage, weights);
                self.pend(index, Input::Loaded(of));
                return self.check(index, epoch, version);
            }
            Command::SendState { to, fence, stage, have } => {
                let payload = Payload { handle: self.host(index).newest().1, bytes: 1 };
                let body = Body::State { stage, payload, onto: have };
                let (from, to) = (address(index), Address::Worker(to));
                self.post(Envelope { protocol: PROTOCOL, from, to, fence, body });
            }
            Command::Save(of) => {
                let weights = self.host(index).weights().clone();
                self.checkpoints.change().insert((of.stage, of.version), weights);
                self.pend(index, Input::Saved(of));
            }
        }
        Ok(())
    }

    pub(crate) fn prepare(&mut self, index: usize, number: ReduceNo) -> Result<(), String> {
        let sabotage = self.about.bounds.sabotage;
        let hash = self.host(index).prepare().filter(|_| sabotage != Some(Sabotage::NeverPrepared));
        let Some(hash) = hash else { return Ok(()) };
        let (digest, summary) = told(hash);
        self.pend(index, worker::Input::Prepared(number, digest, summary));
        if sabotage == Some(Sabotage::ApplyAtPrepare) {
            let (epoch, step) = (self.journal.book.epoch, self.journal.book.step);
            let commit = Commit {
                term: Term(1),
                epoch,
                step,
                constants: vec![],
                digests: vec![],
                savers: vec![],
                skipped: false,
            };
            let of = StateOf { stage: number.stage, epoch, version: step.next() };
            return self.apply(index, of, Arc::new(commit));
        }
        Ok(())
    }

    pub(crate) fn apply(&mut self, index: usize, of: StateOf, commit: Arc<Commit>) -> Result<(), String> {
        if !self.journal.commits.contains(&commit) {
            return Err(format!("nothing is applied before its commit is journaled: {commit:?}"));
        }
        self.host(index).apply(&commit);
        self.pend(index, worker::Input::Applied(of));
        self.check(index, of.epoch, of.version)
    }

    /// A peer has these weights now: they are those of one process, and no older than what it had.
    pub(crate) fn check(&mut self, index: usize, epoch: Epoch, version: Step) -> Result<(), String> {
        let host = self.host(index);
        let (stage, newest) = (host.stage, host.newest());
        let expected = (version, self.about.reference.borrow_mut().weights(stage, version));
        if newest != expected {
            return Err(format!("peer {index}, {stage}: not the one-process result at version {version:?}"));
        }
        let peer = &mut self.peers[index];
        if (epoch, version) < peer.last {
            return Err(format!("peer {index} goes back from {:?} to {:?}", peer.last, (epoch, version)));
        }
        peer.last = (epoch, version);
        Ok(())
    }

    pub(crate) fn pend(&mut self, index: usize, input: worker::Input) {
        self.peers[index].pending.push(Printed::new(input));
    }

    pub(crate) fn keep(&mut self, piece: Piece) -> Payload {
        let handle = print_of(&piece) as u64;
        self.about.pieces.borrow_mut().insert(handle, piece);
        Payload { handle, bytes: 1 }
    }

    pub(crate) fn piece(&self, payload: Payload) -> Piece {
        self.about.pieces.borrow().get(&payload.handle).cloned().unwrap_or_default()
    }

    // ------------------------------------------------------------------------------------------- identity
}
