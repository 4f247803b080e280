//! How much of what unequal peers can do is used: `cargo run --release -p starling-sim --example speeds`.

use starling_sim::scenario::Scenario;
use starling_sim::world::World;
use starling_swarm::ids::Step;
use starling_swarm::lots::Lots;
use starling_swarm::spec::{Reduce, Sync};
use starling_swarm::time::Span;

fn main() {
    println!("sync     reduce  stages peers lots   share of the sum of speeds   events");
    let cases = [
        (1, 8, 256),
        (1, 8, 1024),
        (2, 8, 1024),
        (4, 8, 1024),
        (4, 16, 2048),
        (8, 16, 2048),
        (4, 16, 8192),
        (8, 16, 8192),
    ];
    for sync in [Sync::Step, Sync::Delayed] {
        for reduce in [Reduce::Exact, Reduce::Fast] {
            cases.iter().for_each(|&(stages, replicas, lots)| measure(sync, reduce, stages, replicas, lots));
        }
    }
}

fn measure(sync: Sync, reduce: Reduce, stages: u16, replicas: usize, lots: u32) {
    let mut scenario = Scenario::small(1, stages, replicas);
    let spec = &mut scenario.spec;
    (spec.sync, spec.reduce) = (sync, reduce);
    spec.lots = Lots { microbatches: lots, lots };
    spec.steps = Step(12);
    spec.checkpoint_every = 0;
    spec.tuning.beat = Span::s(1);
    spec.tuning.silence = Span::s(4);
    spec.tuning.slack = Span::s(2);
    spec.tuning.unknown = Span::s(60);
    spec.tuning.depth = std::env::var("DEPTH").map_or(3, |d| d.parse().expect("a number"));
    spec.tuning.jobs = 4 * spec.tuning.depth * stages as usize;
    scenario.patience_us = u64::MAX / 4;
    for (index, peer) in scenario.peers.iter_mut().enumerate() {
        peer.speed = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0][index / stages as usize % 8];
        peer.jitter = 0.05;
    }
    let sum: f64 = scenario.peers.iter().map(|peer| peer.speed).sum::<f64>() / f64::from(stages);
    let (result, told) = World::new(&scenario).run_with_log();
    if std::env::var("LOG").is_ok() {
        told.iter().for_each(|(at, what)| println!("{:.3} {what}", *at as f64 / 1e6));
    }
    match result {
        Ok(outcome) => {
            let ideal_s = f64::from(lots) * 11.0 / sum;
            let share = ideal_s / ((outcome.done_us - outcome.first_commit_us) as f64 / 1e6);
            println!(
                "{sync:<8?} {reduce:<7?} {stages:>6} {:>5} {lots:>4}   {share:>26.3} {:>8}",
                scenario.peers.len(),
                outcome.events
            );
        }
        Err(violation) => println!("{violation}"),
    }
}
