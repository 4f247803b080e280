//! How much of what unequal peers can do is used: peers of speeds 1 to 8, nobody fails.

use starling_sim::scenario::Scenario;
use starling_sim::world::World;
use starling_swarm::ids::Step;
use starling_swarm::lots::Lots;
use starling_swarm::spec::{Reduce, Sync};
use starling_swarm::time::Span;

use crate::figure;

pub fn measure() {
    for (sync, reduce) in [
        (Sync::Step, Reduce::Exact),
        (Sync::Step, Reduce::Fast),
        (Sync::Delayed, Reduce::Exact),
        (Sync::Delayed, Reduce::Fast),
    ] {
        for (stages, replicas, lots) in
            [(1, 8, 1024), (4, 16, 2048), (8, 16, 2048), (4, 16, 8192), (8, 16, 8192)]
        {
            share(sync, reduce, stages, replicas, lots);
        }
    }
}

/// Steps of lots of several microbatches, as a run of equal devices has them by default: what is used of the time.
pub fn steps() {
    for (sites, stages, replicas, microbatches, lots) in [
        (3, 2, 3, 210, 15),
        (3, 8, 6, 1680, 60),
        (1, 8, 6, 1680, 60),
        (1, 8, 6, 1680, 1680),
        (1, 4, 4, 256, 32),
        (1, 8, 2, 128, 32),
    ] {
        for reduce in [Reduce::Fast, Reduce::Exact] {
            let size = microbatches / lots;
            let name = format!(
                "at work, Step, {reduce:?}, {sites} sites, {stages} stages of {replicas}, {lots} lots of {size}"
            );
            if !name.contains(&std::env::var("ONLY").unwrap_or_default()) {
                continue;
            }
            let lots = Lots { microbatches, lots };
            let mut scenario = Scenario::alike(sites, stages, replicas, lots, reduce);
            scenario.spec.steps = Step(12);
            let outcome = World::new(&scenario).run().expect("nothing fails here");
            let commits = &outcome.commits_us[2..outcome.commits_us.len() - 1];
            let took_s = (commits[commits.len() - 1] - commits[0]) as f64 / 1e6;
            let best_s = f64::from(microbatches) * (commits.len() - 1) as f64 / (10.0 * replicas as f64);
            figure(&name, best_s / took_s, "share");
        }
    }
}

fn share(sync: Sync, reduce: Reduce, stages: u16, replicas: usize, lots: u32) {
    let name = format!("share of the sum of speeds 1-8, {sync:?}, {reduce:?}, {stages} stages, {lots} lots");
    if !name.contains(&std::env::var("ONLY").unwrap_or_default()) {
        return;
    }
    let mut scenario = Scenario::small(1, stages, replicas);
    let spec = &mut scenario.spec;
    (spec.sync, spec.reduce) = (sync, reduce);
    spec.lots = Lots { microbatches: lots, lots };
    spec.steps = Step(30);
    spec.checkpoint_every = 0;
    spec.elements = vec![256]; // Enough that every member can own a part.
    let tuning = &mut spec.tuning;
    (tuning.beat, tuning.silence) = (Span::s(1), Span::s(4));
    (tuning.slack, tuning.unknown) = (Span::s(2), Span::s(60));
    if sync == Sync::Delayed {
        tuning.depth = 6; // The next step's lots follow, so nothing drains.
    }
    tuning.jobs = 4 * tuning.depth * stages as usize;
    scenario.patience_us = u64::MAX / 4;
    for (index, peer) in scenario.peers.iter_mut().enumerate() {
        peer.speed = 1.0 + (index / stages as usize % 8) as f64;
        peer.jitter = 0.05;
    }
    let sum: f64 = scenario.peers.iter().map(|peer| peer.speed).sum::<f64>() / f64::from(stages);
    let outcome = World::new(&scenario).run().expect("nothing fails here");
    // From the end of the fifth step to the end of the last but one: neither the start nor the end counts.
    let commits = &outcome.commits_us[4..outcome.commits_us.len() - 1];
    let took_s = (commits[commits.len() - 1] - commits[0]) as f64 / 1e6;
    let share = f64::from(lots) * (commits.len() - 1) as f64 / sum / took_s;
    figure(&name, share, "share");
}
