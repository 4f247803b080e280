//! However a model is cut, whatever is kept, whoever holds which lots, in whatever order microbatches arrive, on
//! however many threads: the weights after every step have the same hash.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::ops::Range;
use std::sync::Arc;

use starling_corpus::{DataConfig, Sampler, SyntheticConfig};
use starling_model::batch;
use starling_model::config::{Family, ModelConfig};
use starling_model::device::Device;
use starling_model::engine::cpu::Cpu;
use starling_model::engine::naive::Naive;
use starling_model::local::LocalStage;
use starling_model::lots::Lots;
use starling_model::optimiser::{Kind, OptimiserConfig};
use starling_model::pipeline::weights_hash;
use starling_model::reduce::{reduce_piece, settle_shared};
use starling_model::reference::Reference;
use starling_model::run::{Precision, Run, TrainConfig};
use starling_model::stage::{Commit, Input, Keep, Loss, Microbatch, Output, Reduction, Stage};

/// What computes, and with what numbers.
type Arithmetic = (Device, Precision);

const FAST: Arithmetic = (Device::Cpu, Precision::F32);
const NAIVE: Arithmetic = (Device::Naive, Precision::F32);
const BF16: Arithmetic = (Device::Cpu, Precision::Bf16);

/// All that this processor has.
fn arithmetics() -> Vec<Arithmetic> {
    match Cpu::bf16(1) {
        Ok(_) => vec![FAST, NAIVE, BF16],
        Err(why) => {
            eprintln!("not tried with bf16: {why}");
            vec![FAST, NAIVE]
        }
    }
}

/// Everything that could make the order of a sum visible: tied weights, shared layers, dropout, clipping.
fn run((device, precision): Arithmetic) -> Run {
    Run {
        name: "same-bits".into(),
        seed: 11,
        model: ModelConfig {
            context: 12,
            width: 16,
            layers: 4,
            heads: 2,
            share_every: 2,
            tied: true,
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
            steps: 4,
            batch: 14,
            microbatch: 2,
            lots: 5,
            threads: 1,
            device,
            precision,
            ..Default::default()
        },
        ..Default::default()
    }
}

fn sampler(run: &Run) -> (Sampler, usize, tempfile::TempDir) {
    let cache = tempfile::tempdir().unwrap();
    let corpus = starling_corpus::open(&run.data, cache.path(), cache.path()).unwrap();
    let vocabulary = corpus.tokeniser.vocabulary();
    let sampler = Sampler::new(corpus, run.data.held_out, run.model.context, run.seed).unwrap();
    (sampler, vocabulary, cache)
}

fn reference_hashes(run: &Run) -> Vec<String> {
    let (sampler, vocabulary, _cache) = sampler(run);
    let mut reference = Reference::new(run.clone(), vocabulary, sampler).unwrap();
    (0..run.train.steps)
        .map(|_| {
            let report = reference.step().unwrap();
            assert!(report.norm > run.optimiser.clip, "clipping must be active: norm {}", report.norm);
            reference.weights_hash()
        })
        .collect()
}

#[test]
fn any_number_of_stages_and_threads_and_every_keep() {
    for arithmetic in arithmetics() {
        let expected = reference_hashes(&run(arithmetic));
        assert_eq!(expected.iter().collect::<std::collections::BTreeSet<_>>().len(), expected.len());
        for stages in 1..=6 {
            for keep in [Keep::All, Keep::Input] {
                for threads in [1, 2, 3] {
                    let mut run = run(arithmetic);
                    (run.train.stages, run.train.keep, run.train.threads) = (stages, keep.into(), threads);
                    let case = format!("{arithmetic:?}: {stages} stages, {keep:?}, {threads} threads");
                    assert_eq!(reference_hashes(&run), expected, "{case}");
                }
            }
        }
    }
}

#[test]
fn every_optimiser_and_an_untied_head_in_three_stages() {
    for (arithmetic, kind) in arithmetics()
        .into_iter()
        .flat_map(|arithmetic| [Kind::Adamw, Kind::Sgd, Kind::Lamb].map(|kind| (arithmetic, kind)))
    {
        let mut run = run(arithmetic);
        run.optimiser.kind = kind;
        run.model.tied = kind == Kind::Sgd;
        run.data.document_mask = true;
        let expected = reference_hashes(&run);
        run.train.stages = 3;
        assert_eq!(reference_hashes(&run), expected, "{arithmetic:?} {kind:?}");
    }
}

#[test]
fn a_llama_in_any_number_of_stages() {
    for arithmetic in arithmetics() {
        let mut run = run(arithmetic);
        run.model = ModelConfig {
            family: Family::Llama,
            heads: 4,
            key_heads: Some(2),
            head_width: Some(6),
            attention_bias: true,
            ..run.model
        };
        run.data.document_mask = true;
        let expected = reference_hashes(&run);
        for (stages, keep, threads) in [(2, Keep::All, 2), (3, Keep::Input, 1), (6, Keep::All, 3)] {
            (run.train.stages, run.train.keep, run.train.threads) = (stages, keep.into(), threads);
            assert_eq!(reference_hashes(&run), expected, "{arithmetic:?}: {stages} stages");
        }
    }
}

/// One peer's copy of a stage.
type Replica = Box<dyn Stage>;

/// Stages with replicas, trained by hand: lots go to replicas, microbatches come in any order.
struct Swarm {
    run: Run,
    sampler: Sampler,
    stages: Vec<Vec<Replica>>,
}

impl Swarm {
    fn new(run: Run, cuts: &[Range<usize>], replicas: usize) -> (Swarm, tempfile::TempDir) {
        let (sampler, vocabulary, cache) = sampler(&run);
        let architecture = run.model.architecture(vocabulary);
        let (rule, seed) = (run.optimiser.rule(), run.seed);
        let cpu = match run.train.precision {
            Precision::Bf16 => Cpu::bf16(1),
            _ => Cpu::new(1),
        };
        let (cpu, naive) = (Arc::new(cpu.unwrap()), Arc::new(Naive::<f32>::new(1).unwrap()));
        let replica = |cut: &Range<usize>| -> Replica {
            let (architecture, cut) = (architecture.clone(), cut.clone());
            match run.train.device {
                Device::Naive => Box::new(LocalStage::new(naive.clone(), architecture, cut, rule, seed)),
                _ => Box::new(LocalStage::new(cpu.clone(), architecture, cut, rule, seed)),
            }
        };
        let stages = cuts.iter().map(|cut| (0..replicas).map(|_| replica(cut)).collect()).collect();
        (Swarm { run, sampler, stages }, cache)
    }

    /// `holder(stage, lot)` names the replica; microbatches run in the given order, all forwards first.
    fn step(&mut self, step: u64, order: &[u32], holder: impl Fn(usize, u32) -> usize) -> String {
        let lots = self.run.train.lots();
        let mut loss = Loss::default();
        let mut flights = Vec::new();
        for &index in order {
            flights.push((index, self.forward(step, index, lots, &holder, &mut loss)));
        }
        // Backward in another order than forward.
        flights.reverse();
        for (index, tickets) in flights {
            let mut gradient = None;
            for (stage, ticket) in tickets.into_iter().enumerate().rev() {
                let replica = &mut self.stages[stage][holder(stage, lots.lot_of(index))];
                let (before, pending) = replica.backward(ticket, gradient).unwrap();
                replica.fold(pending, lots).unwrap();
                gradient = before;
            }
        }
        self.commit(step, lots, loss)
    }

    fn forward(
        &mut self,
        step: u64,
        index: u32,
        lots: Lots,
        holder: &impl Fn(usize, u32) -> usize,
        loss: &mut Loss,
    ) -> Vec<starling_model::stage::Ticket> {
        let TrainConfig { batch, microbatch, .. } = self.run.train;
        let first = step * u64::from(batch) + u64::from(index * microbatch);
        let (mut input, meta) = batch::training(&self.sampler, first..first + u64::from(microbatch), false);
        let mut tickets = Vec::new();
        for stage in 0..self.stages.len() {
            let keep = if index.is_multiple_of(2) { Keep::All } else { Keep::Input };
            let replica = &mut self.stages[stage][holder(stage, lots.lot_of(index))];
            let microbatch = Microbatch { step, index, version: step };
            let (output, ticket) = replica.forward(microbatch, input, meta.clone(), keep).unwrap();
            tickets.push(ticket);
            input = match output {
                Output::Hidden(hidden) => Input::Hidden(hidden),
                Output::Loss(sum) => {
                    *loss += sum;
                    Input::Tokens(Vec::new())
                }
                Output::Logits(_) => unreachable!("nobody asked for logits"),
            };
        }
        tickets
    }

    fn commit(&mut self, step: u64, lots: Lots, loss: Loss) -> String {
        let reduction = Reduction { step, attempt: 3 };
        for replicas in &mut self.stages {
            // In three uneven pieces, each reduced by itself, as several owners would.
            let len = replicas[0].gradient_len();
            for piece in [0..len / 7, len / 7..len / 2, len / 2..len] {
                let holders: Vec<&dyn Stage> = replicas.iter().map(|r| &**r).collect();
                let sum = reduce_piece(&holders, step, lots.lots, piece.clone()).unwrap();
                for replica in replicas.iter_mut() {
                    if piece.start == 0 {
                        replica.begin_reduce(reduction).unwrap();
                    }
                    replica.write_reduced(reduction, piece.start, &sum).unwrap();
                }
            }
        }
        let mut all: Vec<Vec<&mut dyn Stage>> = self
            .stages
            .iter_mut()
            .map(|rs| rs.iter_mut().map(|r| &mut **r as &mut dyn Stage).collect())
            .collect();
        let mut squares = settle_shared(&mut all, reduction).unwrap();
        for replicas in &all {
            let prepared = replicas[0].prepare(reduction).unwrap();
            assert!(replicas.iter().all(|replica| replica.prepare(reduction).unwrap() == prepared));
            squares.extend(prepared.sums_of_squares);
        }
        let norm = squares.values().sum::<f64>().sqrt() / loss.tokens as f64;
        let update = self.run.optimiser.update(step, self.run.train.steps, step, loss.tokens, norm);
        let mut hashes = Vec::new();
        for stage in all.into_iter().flatten() {
            stage.apply(&Commit { step, version: step, update: Some(update) }).unwrap();
            hashes.push(stage.weight_hashes());
        }
        weights_hash(hashes.into_iter())
    }
}

#[test]
#[allow(clippy::single_range_in_vec_init, reason = "one stage is a cut too")]
fn any_assignment_of_lots_to_holders_and_any_order_of_arrival() {
    for arithmetic in arithmetics() {
        let expected = reference_hashes(&run(arithmetic));
        // Cuts through the shared pairs of blocks (1,2) and (3,4), and through the tied embedding.
        let cuts: [&[Range<usize>]; 4] =
            [&[0..6], &[0..2, 2..6], &[0..1, 1..4, 4..6], &[0..1, 1..2, 2..3, 3..4, 4..5, 5..6]];
        for (case, cuts) in cuts.into_iter().enumerate() {
            let (mut swarm, _cache) = Swarm::new(run(arithmetic), cuts, 3);
            for (step, expected) in expected.iter().enumerate() {
                let mut order: Vec<u32> = (0..7).collect();
                order.sort_by_key(|i| (i * 5 + step as u32 * 3 + case as u32) % 7);
                let holder = |stage: usize, lot: u32| (lot as usize * 7 + stage * 3 + step * 5 + case) % 3;
                let found = swarm.step(step as u64, &order, holder);
                assert_eq!(&found, expected, "{arithmetic:?}: cuts {cuts:?}, step {step}");
            }
        }
    }
}

/// A change that should not alter the computation leaves this alone, on every platform. One that should says so in its
/// commit, and puts the new hash here.
#[test]
fn the_golden_run_ends_with_its_weights() {
    let hashes = reference_hashes(&run(NAIVE));
    assert_eq!(hashes[3], "4b12c37b4602da0d914e8d56cdd3249ebe09a554c498d0104b0fdd821dcbc494");
}

/// The comparison must be able to fail: what must never happen changes the hash.
#[test]
fn a_microbatch_counted_at_another_place_changes_the_hash() {
    let expected = reference_hashes(&run(FAST));
    let mut other = run(FAST);
    other.seed = 12;
    assert_ne!(reference_hashes(&other)[0], expected[0]);
    // Microbatch 6 computed from the samples of microbatch 5: a double and a drop.
    let (mut swarm, _cache) = Swarm::new(run(FAST), &[0..3, 3..6], 1);
    let lots = swarm.run.train.lots();
    let mut loss = Loss::default();
    for index in 0..lots.microbatches {
        let contents = if index == 6 { 5 } else { index };
        let first = u64::from(contents) * 2;
        let (input, meta) = batch::training(&swarm.sampler, first..first + 2, false);
        let microbatch = Microbatch { step: 0, index, version: 0 };
        let (front, back) = swarm.stages.split_at_mut(1);
        let (front, back) = (&mut front[0][0], &mut back[0][0]);
        let (output, first_ticket) = front.forward(microbatch, input, meta.clone(), Keep::All).unwrap();
        let Output::Hidden(hidden) = output else { panic!("the first stage gives hidden states") };
        let (output, ticket) = back.forward(microbatch, Input::Hidden(hidden), meta, Keep::All).unwrap();
        let Output::Loss(sum) = output else { panic!("the last stage gives the loss") };
        loss += sum;
        let (gradient, pending) = back.backward(ticket, None).unwrap();
        back.fold(pending, lots).unwrap();
        let (_, pending) = front.backward(first_ticket, gradient).unwrap();
        front.fold(pending, lots).unwrap();
    }
    assert_ne!(swarm.commit(0, lots, loss), expected[0]);
}
