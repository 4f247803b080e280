//! Workers and their hosts: commands carried out, and how long they take.

use std::collections::BTreeMap;
use std::sync::Arc;

use starling_swarm::ids::*;
use starling_swarm::lots::TreeNode;
use starling_swarm::message::{Body, Capability, Envelope, PROTOCOL};
use starling_swarm::worker::book::JobId;
use starling_swarm::worker::io::{LoadFrom, ReduceNo, StateOf};
use starling_swarm::worker::{Command, Input, Worker};

use crate::host::{Host, Piece};
use crate::invariants::Fact;
use crate::rng::mix2;
use crate::scenario::Sabotage;
use crate::toy::{Reference, told};
use crate::world::{Event, World};

/// What disks and checkpoint stores carry.
const STORE_BYTES_PER_S: f64 = 200e6;

impl World {
    pub(super) fn start_worker(&mut self, peer: PeerId) {
        let spec = self.spec.clone();
        let about = self.scenario.peers[peer.0 as usize];
        let host = Host::new(self.toy.clone());
        let actor = &mut self.workers[peer.0 as usize];
        if actor.machine.is_some() {
            return;
        }
        actor.start(self.now);
        let capability = Capability {
            site: about.site,
            speed: about.speed,
            memory_bytes: 1 << 40,
            link_bytes_per_s: self.scenario.inside.bytes_per_s,
            class: "toy".into(),
        };
        let incarnation = mix2(actor.life, peer.0.into()) >> 1;
        let machine = Worker::new(peer, incarnation, capability, spec, actor.time(self.now));
        let life = actor.life;
        actor.machine = Some((machine, host));
        self.worker_input(peer, life, Input::Wake);
    }

    pub(super) fn worker_input(&mut self, peer: PeerId, life: u64, input: Input) {
        let Some(actor) = self.workers.get_mut(peer.0 as usize).filter(|actor| actor.life == life) else {
            return;
        };
        if let Some(stopped) = &mut actor.stopped {
            return stopped.push(Event::Worker(peer, life, input));
        }
        if !matches!(input, Input::Message(_)) {
            self.history.event(self.now, Address::Worker(peer), 2);
        }
        let now = actor.time(self.now);
        let Some((machine, _)) = actor.machine.as_mut() else { return };
        let mut out = std::mem::take(&mut self.worker_commands);
        machine.handle(input, now, &mut out);
        let (wake, queues) = (machine.next_wake(), machine.queues());
        for command in out.drain(..) {
            self.worker_command(peer, life, command);
        }
        self.worker_commands = out;
        self.schedule_wake(Address::Worker(peer), wake);
        let longest = self.longest.0.longest(queues);
        if longest != self.longest.0 {
            self.longest.0 = longest;
            self.observe(Fact::WorkerQueues(peer, queues));
        }
    }

    fn worker_command(&mut self, peer: PeerId, life: u64, command: Command) {
        match command {
            Command::Send(envelope) => self.send(envelope),
            Command::Forward { job, step, weights, microbatch, input } => {
                let stale = step.0 > 0 && self.sabotaged(Sabotage::StaleFold, 3);
                let output = self.host(peer).forward(job, step, weights, microbatch, input.handle, stale);
                let payload = Payload { handle: output, bytes: self.scenario.sizes.activation };
                let (stage, _) = self.stage_and_step(peer);
                let done = if self.is_finite(peer) && self.toy.is_finite(stage, step, microbatch) {
                    Input::ForwardDone(job, payload)
                } else {
                    Input::NotFinite(job)
                };
                self.compute(peer, life, 1.0 / 3.0, done);
            }
            Command::Backward(job, gradient) => {
                let before = self.host(peer).backward(job, gradient.map(|payload| payload.handle));
                let payload = Payload { handle: before, bytes: self.scenario.sizes.activation };
                let done = if self.is_finite(peer) {
                    Input::BackwardDone(job, payload)
                } else {
                    Input::NotFinite(job)
                };
                self.compute(peer, life, 2.0 / 3.0, done);
            }
            Command::Fold(job, lot) => self.fold(peer, job, lot),
            Command::Discard(job) => self.host(peer).discard(job),
            Command::Forget(job) => self.host(peer).forget(job),
            Command::DropLots(lots) => self.host(peer).drop_lots(&lots),
            Command::DropBefore(step) => self.host(peer).drop_before(step),
            Command::Deposit(deposit) => {
                let copy = self.host(peer).copy(deposit.fence.step, &deposit.lots);
                let bytes = self.scenario.sizes.gradient * deposit.nodes.len() as u64;
                let handle = self.deposits.push((deposit.fence.step, copy));
                self.send(deposit.message(Payload { handle, bytes }));
            }
            Command::Inherit(inherited) => {
                if let Some((_, copy)) = self.deposits.remove(inherited.payload.handle) {
                    self.died_lots = self.died_lots.saturating_sub(copy.len() as u64);
                    self.host(peer).inherit(copy);
                }
            }
            Command::Release(payload) => drop(self.deposits.remove(payload.handle)),
            Command::BeginReduce(step) => self.host(peer).begin_reduce(step),
            Command::Contribute(contribute) => {
                let handle = self.read(peer, contribute.fence.step, &contribute.nodes);
                let elements = (contribute.end - contribute.start) * contribute.nodes.len() as u64;
                self.send(contribute.message(self.gradient(handle, elements)));
            }
            Command::Sum(number, due) => {
                let piece = |(nodes, payload)| Some((nodes, self.piece(payload)?));
                let come: Option<Vec<_>> = due.come.into_iter().map(piece).collect();
                // A process that slept for very long asks for pieces that are gone: so is its attempt.
                let Some(come) = come else { return };
                let sum = self.host(peer).sum(&due.own, &come, &due.into);
                let handle = self.keep_piece(number.step, sum);
                let payload = self.gradient(handle, (due.end - due.start) * due.into.len() as u64);
                self.after(peer, life, 1_000, Input::Summed(number, due.part, payload));
            }
            Command::WriteReduced { step, start, end, payload, .. } => {
                let Some(piece) = self.piece(payload) else { return };
                let host = self.host(peer);
                host.write_reduced(start, end, &piece);
                let stage = host.stage;
                self.observe(Fact::Reduced { stage, step, counted: piece.counted });
            }
            Command::Prepare(number) => self.prepare(peer, life, number),
            Command::SendUses { to, fence, stage } => {
                let Some(uses) = self.host(peer).uses() else { return };
                let payload = Payload { handle: uses, bytes: self.scenario.sizes.gradient / 4 };
                let (from, to) = (Address::Worker(peer), Address::Worker(to));
                self.send(Envelope {
                    protocol: PROTOCOL,
                    from,
                    to,
                    fence,
                    body: Body::Uses { stage, payload },
                });
            }
            Command::Settle(number, round, come) => {
                let come: Vec<(StageId, u64)> =
                    come.iter().map(|(stage, payload)| (*stage, payload.handle)).collect();
                let Some((hash, total)) = self.host(peer).settle(&come) else { return };
                let (digest, summary) = (told(hash).0, told(total).1);
                self.after(peer, life, 1_000, Input::Settled(number, round, digest, summary));
            }
            Command::Apply(of, commit) => {
                self.host(peer).apply(&commit);
                self.state_fact(peer, life, of.epoch, of.version, true);
                self.after(peer, life, 2_000, Input::Applied(of));
            }
            Command::CatchUp { of, payload, .. } => {
                self.host(peer).catch_up(of.version, payload.handle);
                self.state_fact(peer, life, of.epoch, of.version, false);
                self.after(peer, life, 1_000, Input::Loaded(of));
            }
            Command::Load { of, from } => self.load(peer, life, of, from),
            Command::SendState { to, fence, stage, have } => {
                // What came after one version is a gradient a step; otherwise everything goes.
                let sizes = self.scenario.sizes;
                let missed = have.map(|have| fence.step.0.saturating_sub(have.0));
                let bytes = missed.map_or(sizes.state, |missed| (missed * sizes.gradient).min(sizes.state));
                let payload = Payload { handle: self.host(peer).newest().1, bytes };
                let body = Body::State { stage, payload, onto: have };
                let (from, to) = (Address::Worker(peer), Address::Worker(to));
                self.send(Envelope { protocol: PROTOCOL, from, to, fence, body });
            }
            Command::Save(of) => {
                let weights = self.host(peer).weights().clone();
                self.checkpoints.insert((of.stage, of.version), weights);
                let us = (self.scenario.sizes.state as f64 / STORE_BYTES_PER_S * 1e6) as u64;
                self.after(peer, life, us, Input::Saved(of));
            }
        }
    }

    fn fold(&mut self, peer: PeerId, job: JobId, lot: LotOf) {
        if self.sabotaged(Sabotage::Drop, 5) {
            return self.host(peer).discard(job);
        }
        self.host(peer).fold(job, lot);
        if self.sabotaged(Sabotage::Double, 5) {
            self.host(peer).fold_again(lot);
        }
    }

    fn prepare(&mut self, peer: PeerId, life: u64, number: ReduceNo) {
        let Some(hash) = self.host(peer).prepare() else { return };
        let (digest, summary) = told(hash);
        if self.sabotaged(Sabotage::ApplyBeforeCommit, 2) {
            let (stage, step) = self.stage_and_step(peer);
            let weights = Reference::new(*self.toy).weights(stage, step.next());
            self.host(peer).catch_up(step.next(), weights);
            self.state_fact(peer, life, Epoch(1), step.next(), true);
        }
        self.after(peer, life, 1_000, Input::Prepared(number, digest, summary));
    }

    fn load(&mut self, peer: PeerId, life: u64, of: StateOf, from: LoadFrom) {
        let StateOf { stage, epoch, version } = of;
        let (weights, us) = match from {
            LoadFrom::Seed => (BTreeMap::from([(version, self.toy.initial(stage))]), 1_000),
            LoadFrom::Checkpoint => {
                let saved = self.checkpoints.get(&(stage, version)).cloned().unwrap_or_default();
                (saved, (self.scenario.sizes.state as f64 / STORE_BYTES_PER_S * 1e6) as u64)
            }
            LoadFrom::Donor(payload) => (BTreeMap::from([(version, payload.handle)]), 1_000),
        };
        self.host(peer).load(stage, weights);
        self.state_fact(peer, life, epoch, version, false);
        self.after(peer, life, us, Input::Loaded(of));
    }

    fn state_fact(&mut self, peer: PeerId, life: u64, epoch: Epoch, version: Step, applied: bool) {
        let host = self.host(peer);
        let (stage, weights) = (host.stage, host.newest().1);
        self.observe(Fact::State { peer, life, stage, epoch, version, weights, applied });
    }

    fn compute(&mut self, peer: PeerId, life: u64, share: f64, input: Input) {
        let about = self.scenario.peers[peer.0 as usize];
        let noise = 1.0 + about.jitter * (2.0 * self.rng.unit() - 1.0);
        let slow = f64::from(self.slowness[peer.0 as usize]);
        let (stage, _) = self.stage_and_step(peer);
        let us = (share * self.scenario.spec.cost(stage) / about.speed * noise * slow * 1e6) as u64;
        self.busy_us[peer.0 as usize] += us;
        self.stage_busy_us[stage.0 as usize] += us;
        // After what the device has before it.
        let (of, free_at) = &mut self.free_at[peer.0 as usize];
        let begins = if *of == life { self.now.max(*free_at) } else { self.now };
        (*of, *free_at) = (life, begins + us.max(1));
        self.after(peer, life, begins + us - self.now, input);
    }

    /// Whether a peer's next result is finite.
    fn is_finite(&mut self, peer: PeerId) -> bool {
        let spoiled = &mut self.spoiled[peer.0 as usize];
        let finite = *spoiled == 0;
        *spoiled = spoiled.saturating_sub(1);
        finite
    }

    fn after(&mut self, peer: PeerId, life: u64, us: u64, input: Input) {
        self.heap.push(self.now + us.max(1), Event::Worker(peer, life, input));
    }

    fn host(&mut self, peer: PeerId) -> &mut Host {
        let machine = self.workers.get_mut(peer.0 as usize).and_then(|actor| actor.machine.as_mut());
        &mut machine.expect("commands come only from machines that live").1
    }

    fn stage_and_step(&self, peer: PeerId) -> (StageId, Step) {
        let machine = self.workers.get(peer.0 as usize).and_then(|actor| actor.machine.as_ref());
        let worker = machine.map(|(worker, _)| worker);
        let stage = worker.and_then(|worker| worker.stage()).unwrap_or_default();
        (stage, worker.and_then(|worker| worker.version()).unwrap_or_default().1)
    }

    /// The sums at some nodes, as a piece; read again for every part, and kept once.
    fn read(&mut self, peer: PeerId, step: Step, nodes: &[TreeNode]) -> u64 {
        if let Some(handle) = self.host(peer).was_read(nodes) {
            return handle;
        }
        let piece = self.host(peer).read(nodes);
        let handle = self.keep_piece(step, piece);
        self.host(peer).note_read(nodes, handle);
        handle
    }

    fn keep_piece(&mut self, step: Step, piece: Piece) -> u64 {
        self.pieces.push((step, Arc::new(piece)))
    }

    /// Some elements of a stage's gradient on the wire.
    fn gradient(&self, handle: u64, elements: u64) -> Payload {
        Payload { handle, bytes: elements * self.scenario.sizes.gradient / self.toy.elements.max(1) }
    }

    fn piece(&self, payload: Payload) -> Option<Arc<Piece>> {
        self.pieces.get(payload.handle).map(|(_, piece)| piece.clone())
    }
}
