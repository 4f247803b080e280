//! The swarm's machines and the real model, joined in one thread: whoever is killed, the weights after every step are
//! those of the one-process loop, bit for bit.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use starling_corpus::{DataConfig, Sampler, SyntheticConfig};
use starling_model::config::ModelConfig;
use starling_model::optimiser::OptimiserConfig;
use starling_model::reference::Reference;
use starling_model::run::{Run, TrainConfig};
use starling_model::stage::Keep;
use starling_model::{batch, pipeline};
use starling_node::charter::Charter;
use starling_node::closing::conclude;
use starling_node::events::Event;
use starling_node::host::{Build, Done, Fetch, Host};
use starling_node::tensor::Tensor;
use starling_swarm::coordinator::{self, Coordinator};
use starling_swarm::driver::{self, Driver};
use starling_swarm::ids::*;
use starling_swarm::journal::JournalState;
use starling_swarm::lots::Lots;
use starling_swarm::message::{Body, Capability, Envelope};
use starling_swarm::spec::{Reduce, Spec, Sync, Tuning};
use starling_swarm::time::{Span, Time};
use starling_swarm::worker::{self, Worker};

type Hashes = BTreeMap<String, [u8; 32]>;

/// Dropout, clipping and merged lots make the order of every sum visible.
fn run() -> Run {
    Run {
        name: "in-process".into(),
        seed: 11,
        model: ModelConfig {
            context: 12,
            width: 16,
            layers: 4,
            heads: 2,
            tied: false,
            dropout: 0.1,
            init_std: 0.2,
            ..Default::default()
        },
        data: DataConfig {
            synthetic: Some(SyntheticConfig { documents: 60, ..Default::default() }),
            ..Default::default()
        },
        optimiser: OptimiserConfig { clip: 0.3, warmup_steps: 2, lr: 1e-2, ..Default::default() },
        train: TrainConfig {
            steps: 8,
            batch: 14,
            microbatch: 2,
            lots: 5,
            stages: 3,
            threads: 1,
            ..Default::default()
        },
        ..Default::default()
    }
}

/// Parts of checkpoints, which outlive every peer.
type Parts = Arc<Mutex<BTreeMap<(StageId, Step), Vec<u8>>>>;

struct Swarm {
    run: Run,
    spec: Spec,
    sampler: Sampler,
    build: Build,
    checkpoints: Parts,
    /// By version: the reference's weights.
    truth: Vec<Hashes>,
    now: Time,
    coordinator: Coordinator,
    driver: Driver,
    workers: BTreeMap<PeerId, (Worker, Host)>,
    away: Vec<(Time, PeerId)>,
    lives: u64,
    inbox: VecDeque<(Envelope, Option<Arc<Tensor>>)>,
    /// Versions that were compared.
    compared: u64,
    /// How many messages with uses of shared parameters are to be spoilt on their way.
    to_spoil: u32,
    /// So many steps are closed while a state is on its way; and the states that are.
    state_takes: u64,
    on_the_way: Vec<(Step, Envelope, Option<Arc<Tensor>>)>,
    /// How often updates were sent instead of a state.
    updates: u32,
    /// Lots that workers inherited from others that were gone.
    inherited: usize,
    /// Deposits that are to be spoilt on their way.
    deposits_to_spoil: u32,
    /// What hosts could not do.
    troubles: Vec<String>,
}

impl Drop for Swarm {
    fn drop(&mut self) {
        assert!(std::thread::panicking() || self.troubles.is_empty(), "{:?}", self.troubles);
    }
}

impl Swarm {
    fn new(run: Run, reduce: Reduce, peers: u32) -> Swarm {
        let folder = tempfile::tempdir().unwrap();
        let corpus = || starling_corpus::open(&run.data, folder.path(), folder.path()).unwrap();
        let vocabulary = corpus().tokeniser.vocabulary();
        let sampler = || Sampler::new(corpus(), run.data.held_out, run.model.context, run.seed).unwrap();
        let mut reference = Reference::new(run.clone(), vocabulary, sampler()).unwrap();
        let hashes = |reference: &Reference| -> Hashes {
            reference.stages().iter().flat_map(|stage| stage.weight_hashes()).collect()
        };
        let mut truth = vec![hashes(&reference)];
        for _ in 0..run.train.steps {
            reference.step().unwrap();
            truth.push(hashes(&reference));
        }
        let (architecture, rule) = (run.model.architecture(vocabulary), run.optimiser.rule());
        let (train, seed) = (run.train.clone(), run.seed);
        let build: Build =
            Arc::new(move |stage| pipeline::build_stage(&architecture, rule, &train, seed, stage.0.into()));
        let lots = run.train.lots();
        let stages = run.train.stages as u16;
        let charter = Charter::new(run.clone(), run.definition(vocabulary, String::new()), 1).unwrap();
        let spec = Spec {
            run: RunId(1),
            stages,
            costs: Vec::new(),
            lots: Lots { microbatches: lots.microbatches, lots: lots.lots },
            sync: Sync::Step,
            reduce,
            steps: Step(run.train.steps),
            checkpoint_every: 2,
            elements: (0..stages).map(|stage| build(StageId(stage)).unwrap().gradient_len() as u64).collect(),
            shared: charter.spec.shared,
            state_bytes: 1,
            memory_bytes: 1,
            tuning: Tuning {
                quorum: peers as usize,
                deposit: charter.spec.tuning.deposit,
                ..Tuning::default()
            },
        };
        let (now, mut out) = (Time(0), Vec::new());
        let coordinator = Coordinator::new(spec.clone(), JournalState::default(), 0, now, &mut out);
        let driver = Driver::new(DriverId(0), 1, SiteId(0), spec.clone(), now);
        let mut swarm = Swarm {
            sampler: sampler(),
            build,
            checkpoints: Arc::default(),
            truth,
            now,
            coordinator,
            driver,
            workers: BTreeMap::new(),
            away: (0..peers).map(|peer| (now, PeerId(peer))).collect(),
            lives: 0,
            inbox: VecDeque::new(),
            compared: 0,
            to_spoil: 0,
            state_takes: 0,
            on_the_way: Vec::new(),
            updates: 0,
            inherited: 0,
            deposits_to_spoil: 0,
            troubles: Vec::new(),
            spec,
            run,
        };
        swarm.coordinator_commands(out);
        swarm
    }

    /// One message, or, if there is none, what is due next; and all that is due by then.
    fn turn(&mut self) {
        let step = self.coordinator.journal().step;
        for (_, envelope, tensor) in self.on_the_way.extract_if(.., |(until, ..)| *until <= step) {
            self.inbox.push_back((envelope, tensor));
        }
        match self.inbox.pop_front() {
            Some((envelope, tensor)) => {
                self.now = self.now + Span(100);
                match envelope.to {
                    Address::Coordinator => self.tell_coordinator(coordinator::Input::Message(envelope)),
                    Address::Driver(_) => self.tell_driver(driver::Input::Message(envelope)),
                    Address::Worker(peer) => self.deliver(peer, envelope, tensor),
                }
            }
            None => {
                let workers = self.workers.values().map(|(worker, _)| worker.next_wake());
                let others = [self.coordinator.next_wake(), self.driver.next_wake()];
                let back = self.away.iter().map(|(at, _)| *at);
                self.now = self.now.max(workers.chain(others).chain(back).min().unwrap());
            }
        }
        self.bring_back();
        if self.coordinator.next_wake() <= self.now {
            self.tell_coordinator(coordinator::Input::Wake);
        }
        if self.driver.next_wake() <= self.now {
            self.tell_driver(driver::Input::Wake);
        }
        let late = self.workers.iter().filter(|(_, (worker, _))| worker.next_wake() <= self.now);
        let late: Vec<PeerId> = late.map(|(&peer, _)| peer).collect();
        late.into_iter().for_each(|peer| self.tell_worker(peer, worker::Input::Wake));
    }

    /// Starts those whose time has come.
    fn bring_back(&mut self) {
        let due: Vec<(Time, PeerId)> = self.away.extract_if(.., |(at, _)| *at <= self.now).collect();
        due.into_iter().for_each(|(_, peer)| self.start(peer));
    }

    fn start(&mut self, peer: PeerId) {
        self.lives += 1;
        let class = "naive".into();
        let capability =
            Capability { site: SiteId(0), speed: 1.0, memory_bytes: 1 << 40, link_bytes_per_s: 1e9, class };
        let worker = Worker::new(peer, self.lives, capability, self.spec.clone(), self.now);
        let (build, parts) = (self.build.clone(), self.checkpoints.clone());
        let fetch: Fetch = Arc::new(move |of, _| parts.lock().unwrap().get(&(of.stage, of.version)).cloned());
        let host = Host::new(peer, build, fetch, self.spec.lots, Keep::All);
        self.workers.insert(peer, (worker, host));
    }

    fn kill(&mut self, peer: PeerId) {
        if self.workers.remove(&peer).is_some() {
            self.away.push((self.now + Span::s(2), peer));
        }
    }

    fn deliver(&mut self, peer: PeerId, mut envelope: Envelope, mut tensor: Option<Arc<Tensor>>) {
        if matches!(envelope.body, Body::Uses { .. }) && self.to_spoil > 0 {
            self.to_spoil -= 1;
            let kinds =
                [Tensor::Uses(Vec::new()), Tensor::Uses(vec![("wte.weight".into(), vec![0; 7].into())])];
            tensor = Some(Arc::new(kinds[self.to_spoil as usize % 2].clone()));
        }
        if matches!(envelope.body, Body::Deposit { .. }) && self.deposits_to_spoil > 0 {
            self.deposits_to_spoil -= 1;
            tensor = Some(Arc::new(Tensor::Copy(vec![vec![0; 9].into()], Vec::new())));
        }
        if let Some((_, host)) = self.workers.get_mut(&peer) {
            host.tensors().receive(&mut envelope, tensor);
            self.tell_worker(peer, worker::Input::Message(envelope));
        }
    }

    fn tell_worker(&mut self, peer: PeerId, input: worker::Input) {
        let Some((worker, host)) = self.workers.get_mut(&peer) else { return };
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let (mut commands, mut all_done) = (Vec::new(), Vec::new());
            worker.handle(input, self.now, &mut commands);
            for command in commands {
                if let Err(error) = host.carry_out(command, &mut all_done) {
                    self.troubles.push(error.to_string());
                }
            }
            for done in all_done {
                match done {
                    Done::Send(envelope, tensor) => self.inbox.push_back((envelope, tensor)),
                    Done::Contribution(Some((envelope, sums))) => {
                        self.inbox.push_back((envelope, Some(Arc::new(Tensor::Sums(sums)))));
                    }
                    Done::Give(to, fence, parcel) => {
                        self.updates += u32::from(parcel.outline.onto().is_some());
                        let envelope = parcel.outline.message(peer, to, fence);
                        let takes = if parcel.outline.onto().is_some() { 0 } else { self.state_takes };
                        let until = Step(self.coordinator.journal().step.0 + takes);
                        self.on_the_way.push((until, envelope, Some(Arc::new(Tensor::Parcel(parcel)))));
                    }
                    Done::Note(Event::Inherited { lots, .. }) => self.inherited += lots.len(),
                    Done::Contribution(None) | Done::Hashed(..) | Done::Note(_) => {}
                    Done::Read(..) | Done::Inferred(..) | Done::NotGiven(_) => {}
                    Done::Save(of, part) => {
                        self.checkpoints.lock().unwrap().insert((of.stage, of.version), part.file);
                        inputs.push_back(worker::Input::Saved(of));
                    }
                    Done::Tell(input) => {
                        if let worker::Input::Applied(of) = &input {
                            let truth = &self.truth[of.version.0 as usize];
                            for (name, hash) in host.stage().unwrap().weight_hashes() {
                                assert_eq!(truth[&name], hash, "{name} of version {}, {peer}", of.version.0);
                            }
                            self.compared += 1;
                        }
                        inputs.push_back(input);
                    }
                }
            }
        }
    }

    fn tell_driver(&mut self, input: driver::Input) {
        let mut out = Vec::new();
        self.driver.handle(input, self.now, &mut out);
        for driver::Command::Send(envelope) in out {
            let tensor = match &envelope.body {
                Body::Begin(work, _) => Some(self.contents(envelope.fence.step, work.microbatch)),
                _ => None,
            };
            self.inbox.push_back((envelope, tensor));
        }
    }

    fn contents(&self, step: Step, microbatch: Microbatch) -> Arc<Tensor> {
        let (samples, mask) = (self.run.train.samples(step.0, microbatch.0), self.run.data.document_mask);
        let (input, meta) = batch::training(&self.sampler, samples, mask);
        Arc::new(Tensor::Activation(input, meta))
    }

    fn tell_coordinator(&mut self, input: coordinator::Input) {
        let mut out = Vec::new();
        self.coordinator.handle(input, self.now, &mut out);
        self.coordinator_commands(out);
    }

    fn coordinator_commands(&mut self, commands: Vec<coordinator::Command>) {
        for command in commands {
            match command {
                coordinator::Command::Send(envelope) => self.inbox.push_back((envelope, None)),
                coordinator::Command::Append(number, _) => {
                    self.tell_coordinator(coordinator::Input::Journaled(number));
                }
                coordinator::Command::Conclude(number, step, summaries) => {
                    let (_, constants) = conclude(&self.run, step, 0, &summaries).unwrap();
                    self.tell_coordinator(coordinator::Input::Concluded(number, constants));
                }
                coordinator::Command::Tell(_) => {}
            }
        }
    }

    fn train(&mut self, mut meanwhile: impl FnMut(&mut Swarm, u64)) {
        for turn in 0..2_000_000 {
            self.turn();
            meanwhile(self, turn);
            if self.coordinator.is_done() && self.inbox.is_empty() && self.on_the_way.is_empty() {
                return;
            }
        }
        panic!("it waits for {}", self.coordinator.why_waiting());
    }
}

#[test]
fn three_stages_on_six_peers_train_what_one_process_trains() {
    let mut swarm = Swarm::new(run(), Reduce::Exact, 6);
    swarm.train(|_, _| {});
    assert_eq!(swarm.compared, 6 * swarm.run.train.steps);
}

#[test]
fn whoever_is_killed_the_weights_are_those_of_one_process() {
    for seed in 1..=4_u64 {
        let mut swarm = Swarm::new(run(), Reduce::Exact, 6);
        let mut random = seed;
        let mut kills = 0;
        swarm.train(|swarm, turn| {
            if turn % 97 == 96 && kills < 20 {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                swarm.kill(PeerId((random >> 33) as u32 % 6));
                kills += 1;
            }
        });
        assert_eq!(kills, 20);
        assert!(swarm.compared >= swarm.run.train.steps * 3);
        let most = swarm.workers.values().map(|(_, host)| host.tensors().count()).max();
        assert!(most < Some(200), "tensors of closed steps are dropped: {most:?}");
    }
}

/// The embedding is the head's too, and blocks share their weights in pairs, which the cuts go through.
#[test]
fn parameters_that_several_stages_use_are_summed_over_all_of_them_whoever_is_killed() {
    for share_every in [1, 2, 3] {
        let mut run = run();
        run.model = ModelConfig { tied: true, share_every, ..run.model };
        let mut swarm = Swarm::new(run, Reduce::Exact, 6);
        assert!(swarm.spec.shared.contains(&vec![StageId(0), StageId(2)]), "{:?}", swarm.spec.shared);
        assert_eq!(share_every == 3, swarm.spec.shared.len() > 1, "{:?}", swarm.spec.shared);
        let mut kills = 0;
        swarm.train(|swarm, turn| {
            let victim = PeerId(turn as u32 / 61 % 6);
            let stage = swarm.workers.get(&victim).and_then(|(worker, _)| worker.stage());
            let holders =
                swarm.workers.values().filter(|(worker, _)| worker.is_active() && worker.stage() == stage);
            if turn % 61 == 60 && kills < 20 && holders.count() > 1 {
                swarm.kill(victim);
                kills += 1;
            }
        });
        assert!(kills > 5, "{kills}");
        assert!(swarm.compared >= swarm.run.train.steps * 3);
    }
}

/// A state takes longer than a step: whoever gets it has missed updates, which it gets then.
#[test]
fn who_missed_updates_while_its_state_was_on_its_way_catches_up_with_the_same_weights() {
    for tied in [false, true] {
        let mut run = run();
        run.train.steps = 30;
        run.model.tied = tied;
        let mut swarm = Swarm::new(run, Reduce::Exact, 6);
        swarm.state_takes = 2;
        let (joiner, mut joined, mut counted) = (PeerId(6), false, 0);
        swarm.train(|swarm, _| {
            if swarm.coordinator.journal().step == Step(3) && !joined {
                swarm.away.push((swarm.now, joiner));
                joined = true;
            }
            let counts = swarm.workers.get(&joiner).is_some_and(|(worker, _)| worker.is_active());
            counted += u32::from(counts);
        });
        assert!(swarm.updates > 0, "it got updates");
        assert!(counted > 0, "and counted");
    }
}

#[test]
fn uses_that_make_no_sense_are_asked_for_again() {
    let mut run = run();
    run.model.tied = true;
    let mut swarm = Swarm::new(run, Reduce::Exact, 6);
    swarm.to_spoil = 9;
    swarm.train(|_, _| {});
    assert_eq!((swarm.to_spoil, std::mem::take(&mut swarm.troubles).len()), (0, 9));
    assert!(swarm.compared >= swarm.run.train.steps * 3);
}

#[test]
fn a_stage_that_loses_all_its_holders_goes_on_from_its_checkpoint_with_the_same_weights() {
    let mut swarm = Swarm::new(run(), Reduce::Exact, 6);
    let mut killed = 0;
    swarm.train(|swarm, turn| {
        if turn == 1_200 {
            let holds = |worker: &Worker| worker.stage() == Some(StageId(1));
            let holders = swarm.workers.iter().filter(|(_, (worker, _))| holds(worker));
            let holders: Vec<PeerId> = holders.map(|(&peer, _)| peer).collect();
            assert!(swarm.coordinator.journal().step > Step(2), "there is a checkpoint to go back to");
            killed = holders.len();
            holders.into_iter().for_each(|peer| swarm.kill(peer));
        }
    });
    assert_eq!(killed, 2);
    assert!(swarm.coordinator.journal().epoch > Epoch(1), "everybody went back");
}

/// Steps of many lots, and copies of sums that are left with others all the while.
fn depositing(tied: bool) -> Swarm {
    let mut run = run();
    run.model.tied = tied;
    run.train = TrainConfig { batch: 96, lots: 24, steps: 5, ..run.train };
    run.swarm.deposit_every_s = 0.05;
    Swarm::new(run, Reduce::Exact, 8)
}

/// Kills whoever has left something with another, one after the other; returns how many.
fn kill_depositors(swarm: &mut Swarm) -> u32 {
    let (mut kills, mut last) = (0, 0);
    swarm.train(|swarm, turn| {
        let victim = PeerId(kills % 8);
        let stage = swarm.workers.get(&victim).and_then(|(worker, _)| worker.stage());
        let holders = swarm.workers.values().filter(|(w, _)| w.is_active() && w.stage() == stage).count();
        if turn > last + 500 && kills < 20 && holders > 1 {
            swarm.kill(victim);
            (kills, last) = (kills + 1, turn);
        }
    });
    kills
}

#[test]
fn what_the_dead_had_left_with_others_is_not_computed_again_and_changes_no_weight() {
    for tied in [false, true] {
        let mut swarm = depositing(tied);
        assert!(kill_depositors(&mut swarm) > 3);
        assert!(swarm.inherited > 5, "{} lots were inherited", swarm.inherited);
        assert!(swarm.compared >= swarm.run.train.steps * 3);
        let most = swarm.workers.values().map(|(_, host)| host.tensors().count()).max();
        assert!(most < Some(400), "tensors of closed steps are dropped: {most:?}");
    }
}

#[test]
fn what_was_left_and_makes_no_sense_is_computed_again() {
    let mut swarm = depositing(false);
    swarm.deposits_to_spoil = u32::MAX;
    assert!(kill_depositors(&mut swarm) > 3);
    let troubles = std::mem::take(&mut swarm.troubles);
    assert!(!troubles.is_empty() && swarm.inherited == 0, "{troubles:?}");
    assert!(swarm.compared >= swarm.run.train.steps * 3);
}
