//! Public preemption traces, copied to about 400 peers: how much of what is possible is done.

use std::ops::Range;

use starling_sim::rng::Rng;
use starling_sim::scenario::{Scenario, Sizes};
use starling_sim::trace::{Trace, bound, joins_alone};
use starling_sim::world::{Sample, World};
use starling_swarm::ids::Step;
use starling_swarm::lots::Lots;
use starling_swarm::rebalance::Policy;
use starling_swarm::spec::{Reduce, Sync};
use starling_swarm::time::Span;

use crate::figure;

/// A peer does a quarter of the model for one microbatch a second.
const QUARTERS_PER_S: f64 = 1.0;
/// 200 Mb/s.
const BYTES_PER_S: f64 = 25e6;

/// How long the start takes to settle.
const SETTLED_US: u64 = 600_000_000;

/// A model, as far as the network sees it.
struct Model {
    name: &'static str,
    parameters: f64,
    /// Bytes of a gradient's element on the wire.
    gradient_bytes: f64,
    /// Seconds that a step takes when all are there.
    step_s: f64,
}

const MODELS: [Model; 2] = [
    Model { name: "125 M, bf16 gradients", parameters: 125e6, gradient_bytes: 2.0, step_s: 40.0 },
    Model { name: "1 B, int8 gradients", parameters: 1e9, gradient_bytes: 1.0, step_s: 80.0 },
];

pub fn measure(folder: &str) -> Result<(), Box<dyn std::error::Error>> {
    let minutes: u64 = std::env::var("MINUTES").map_or(Ok(40), |minutes| minutes.parse())?;
    let only = std::env::var("ONLY").unwrap_or_default();
    let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}"));
    let traces = [
        ("g4dn", Trace::from_csv(&read("g4dn-us-east-1d.csv")?, 1.0)?),
        ("p2", Trace::from_csv(&read("p2-us-east.csv")?, 3600.0)?),
        ("v100", Trace::from_json(&read("v100-16node-us-west-2a.json")?)?),
    ];
    let policies = [
        ("ours", Policy::WhenItPays(Span::s(1800))),
        ("never", Policy::Never),
        ("SWARM, T = 60 s", Policy::Every(Span::s(60))),
        ("SWARM, T = 300 s", Policy::Every(Span::s(300))),
    ];
    for (trace_name, trace) in &traces {
        for model in &MODELS {
            for stages in [4, 8] {
                for (policy_name, policy) in policies {
                    let name = format!("{trace_name}, {}, {stages} stages, {policy_name}", model.name);
                    if name.contains(&only) {
                        replay((&name, policy_name), trace, model, stages, policy, minutes * 60_000_000);
                    }
                }
            }
        }
    }
    Ok(())
}

fn replay(
    (name, policy): (&str, &str),
    trace: &Trace,
    model: &Model,
    stages: u16,
    rebalance: Policy,
    until_us: u64,
) {
    // About 400 peers at a time on average, by independent copies with shifted starts.
    let mean = (0..10_000).map(|n| f64::from(trace.alive(trace.length_us() / 10_000 * n))).sum::<f64>() / 1e4;
    let copies = (400.0 / mean).round() as u32;
    let speed = QUARTERS_PER_S * f64::from(stages) / 4.0;
    let mut scenario = Scenario::small(1, stages, 1);
    trace.populate(&mut scenario, copies, until_us, speed, &mut Rng::new(5));
    let of_a_stage = model.parameters / f64::from(stages);
    scenario.sizes = Sizes {
        activation: 1 << 20,
        gradient: (of_a_stage * model.gradient_bytes) as u64,
        state: (of_a_stage * 12.0) as u64, // Weights and two moments, f32.
    };
    let spec = &mut scenario.spec;
    (spec.sync, spec.reduce) = (Sync::Delayed, Reduce::Fast);
    let microbatches = (400.0 * speed / f64::from(stages) * model.step_s) as u32;
    spec.lots = Lots { microbatches, lots: microbatches };
    spec.steps = Step(u64::MAX);
    spec.checkpoint_every = 4;
    // One of the simulator's elements stands for so many of the gradient's.
    let element = 1 << 18;
    spec.elements = vec![of_a_stage as u64 / element];
    spec.state_bytes = scenario.sizes.state;
    scenario.inside.bytes_per_s = BYTES_PER_S;
    scenario.inside.latency_us = 20_000;
    scenario.until_us = Some(until_us);
    let tuning = &mut spec.tuning;
    (tuning.beat, tuning.silence, tuning.slack) = (Span::ms(500), Span::ms(2500), Span::s(2));
    (tuning.unknown, tuning.pause) = (Span::s(60), Span::s(30));
    (tuning.jobs, tuning.leases) = (128, 1 << 15);
    tuning.keep_bytes = 4 << 30;
    (tuning.quorum, tuning.rebalance) = (stages as usize, rebalance);
    tuning.part_elements /= element;
    // A quarter of the uplink, at the most.
    tuning.deposit = Span::from_s_f64(4.0 * scenario.sizes.gradient as f64 / BYTES_PER_S);
    let join_us = (spec.state_bytes as f64 / BYTES_PER_S * 1e6) as u64;
    let mut samples = Vec::new();
    let (outcome, _) = World::new(&scenario).run_observed(1_000_000, &mut |sample| {
        samples.push(sample);
        true
    });
    let outcome = outcome.expect("every invariant holds");
    // From the first commit after the start has settled to the last one.
    let commits: Vec<u64> = outcome.commits_us.iter().copied().filter(|at| *at > SETTLED_US).collect();
    let (first, last) = (commits[0], commits[commits.len() - 1]);
    let best = bound(&scenario, first..last, speed, join_us);
    let done = (commits.len() - 1) as f64 * f64::from(microbatches);
    figure(&format!("share of the bound: {name}"), done / best, "share");
    if policy == "ours" {
        let joins = joins_alone(&scenario, first..last, speed, join_us);
        figure(&format!("what joins alone allow: {name}"), joins / best, "share of the bound");
    }
    let lost = Lost::new(&samples, first..last, best * f64::from(stages) / speed, done / best);
    figure(
        &format!("peers that should be at work and are not there: {name}"),
        lost.absent,
        "share of the bound",
    );
    figure(&format!("peers with nothing to do: {name}"), lost.idle, "share of the bound");
    figure(&format!("work in vain: {name}"), lost.in_vain, "share of the bound");
    let all = (outcome.step * u64::from(microbatches) * u64::from(stages)) as f64;
    let died = outcome.died_lots as f64;
    figure(&format!("work that died before its commit: {name}"), died / (all + died), "share");
}

/// Where the difference to the bound is, as shares of it.
struct Lost {
    /// Peers that should be at work by the bound, and are not there yet.
    absent: f64,
    /// Peers that are there, and have nothing to do.
    idle: f64,
    /// What was done and did not count.
    in_vain: f64,
}

impl Lost {
    /// From samples a second apart; `bound` in seconds of peers.
    fn new(samples: &[Sample], during_us: Range<u64>, bound: f64, share: f64) -> Lost {
        let inside: Vec<&Sample> = samples.iter().filter(|s| during_us.contains(&s.at_us)).collect();
        let there = inside.iter().flat_map(|sample| &sample.holders).sum::<usize>() as f64;
        let busy_s = |sample: &Sample| sample.busy_us.iter().sum::<u64>() as f64 / 1e6;
        let busy = busy_s(inside[inside.len() - 1]) - busy_s(inside[0]);
        let (there, busy) = (there / bound, busy / bound);
        Lost { absent: 1.0 - there, idle: there - busy, in_vain: busy - share }
    }
}
