//! Replays preemption traces: `cargo run --release -p starling-sim --example traces -- FOLDER [HOURS]`. Prints the
//! share of the bound of `trace::bound`, which charges nothing for joins, for each policy of rebalancing.

use starling_sim::rng::Rng;
use starling_sim::scenario::{Scenario, Sizes};
use starling_sim::trace::{Trace, bound};
use starling_sim::world::World;
use starling_swarm::ids::Step;
use starling_swarm::lots::Lots;
use starling_swarm::rebalance::Policy;
use starling_swarm::time::Span;

/// Microbatches a second of one peer.
const SPEED: f64 = 0.1;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).unwrap_or(".".into());
    let hours: u64 = std::env::args().nth(2).map_or(Ok(4), |hours| hours.parse())?;
    let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}"));
    let traces = [
        ("g4dn", Trace::from_csv(&read("g4dn-us-east-1d.csv")?, 1.0)?),
        ("p2", Trace::from_csv(&read("p2-us-east.csv")?, 3600.0)?),
        ("v100", Trace::from_json(&read("v100-16node-us-west-2a.json")?)?),
    ];
    println!("trace  policy     steps   share  rollbacks    events");
    for (name, trace) in &traces {
        for (policy, rebalance) in [
            ("never", Policy::Never),
            ("swarm 300", Policy::Every(Span::s(300))),
            ("pays", Policy::WhenItPays(Span::s(1800))),
        ] {
            replay(name, trace, policy, rebalance, hours * 3_600_000_000);
        }
    }
    Ok(())
}

fn replay(name: &str, trace: &Trace, policy: &str, rebalance: Policy, until_us: u64) {
    // About 400 peers at the trace's busiest moment, by independent copies with shifted starts.
    let busiest = (0..1000).map(|n| trace.alive(trace.length_us() / 1000 * n)).max().unwrap_or(1).max(1);
    let copies = 400u32.div_ceil(busiest);
    let mut scenario = Scenario::small(1, 4, 1);
    trace.populate(&mut scenario, copies, until_us, SPEED, &mut Rng::new(5));
    scenario.spec.lots = Lots { microbatches: 1024, lots: 256 };
    scenario.spec.steps = Step(u64::MAX);
    scenario.spec.checkpoint_every = 4;
    scenario.spec.elements = 512; // Enough that every member can own a part.
    scenario.sizes = Sizes { activation: 4 << 20, gradient: 128 << 20, state: 384 << 20 };
    scenario.spec.state_bytes = scenario.sizes.state;
    scenario.inside.bytes_per_s = 25e6;
    scenario.until_us = Some(until_us);
    let tuning = &mut scenario.spec.tuning;
    (tuning.beat, tuning.silence, tuning.slack) = (Span::s(5), Span::s(15), Span::s(20));
    (tuning.unknown, tuning.pause) = (Span::s(120), Span::s(60));
    (tuning.in_flight, tuning.leases, tuning.jobs) = (2048, 256, 64);
    (tuning.quorum, tuning.rebalance) = (4, rebalance);
    let best = bound(&scenario, until_us, SPEED);
    match World::new(&scenario).run() {
        Ok(outcome) => {
            let share = outcome.step as f64 * 1024.0 / best;
            let (steps, rollbacks, events) = (outcome.step, outcome.rollbacks, outcome.events);
            println!("{name:<6} {policy:<10} {steps:>5} {share:>7.3} {rollbacks:>10} {events:>9}");
        }
        Err(violation) => println!("{name:<6} {policy:<10} {violation}"),
    }
}
