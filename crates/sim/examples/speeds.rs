//! How much of what unequal peers can do is used: `cargo run --release -p starling-sim --example speeds`.

use starling_sim::scenario::Scenario;
use starling_sim::world::World;
use starling_swarm::ids::Step;
use starling_swarm::lots::Lots;
use starling_swarm::time::Span;

fn main() {
    println!("stages peers lots   share of the sum of speeds   events");
    for (stages, replicas, lots) in [(1, 8, 256), (1, 8, 1024), (2, 8, 1024), (4, 8, 1024), (4, 16, 2048)] {
        let mut scenario = Scenario::small(1, stages, replicas);
        scenario.spec.lots = Lots { microbatches: lots, lots };
        scenario.spec.steps = Step(12);
        scenario.spec.checkpoint_every = 0;
        scenario.patience_us = u64::MAX / 4;
        scenario.spec.tuning.beat = Span::s(1);
        scenario.spec.tuning.silence = Span::s(4);
        scenario.spec.tuning.slack = Span::s(2);
        scenario.spec.tuning.unknown = Span::s(60);
        scenario.spec.tuning.leases = 6 * replicas * stages as usize;
        scenario.spec.tuning.in_flight = 4 * replicas * stages as usize;
        for (index, peer) in scenario.peers.iter_mut().enumerate() {
            peer.speed = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0][index / stages as usize % 8];
            peer.jitter = 0.05;
        }
        let sum: f64 = scenario.peers.iter().map(|peer| peer.speed).sum::<f64>() / f64::from(stages);
        match World::new(&scenario).run() {
            Ok(outcome) => {
                let ideal_s = f64::from(scenario.spec.lots.microbatches) * 11.0 / sum;
                let share = ideal_s / ((outcome.done_us - outcome.first_commit_us) as f64 / 1e6);
                println!(
                    "{stages:>6} {:>5} {lots:>4}   {share:>26.3} {:>8}",
                    scenario.peers.len(),
                    outcome.events
                );
            }
            Err(violation) => println!("{violation}"),
        }
    }
}
