//! How fast the simulator is: a thousand peers for a day, ten thousand for an hour.

use std::time::Instant;

use starling_sim::fault::Fault;
use starling_sim::rng::Rng;
use starling_sim::scenario::{Peer, Scenario};
use starling_sim::world::World;
use starling_swarm::ids::{PeerId, SiteId, Step};
use starling_swarm::lots::Lots;
use starling_swarm::spec::{Reduce, Sync};
use starling_swarm::time::Span;

use crate::figure;

/// A thousand peers.
pub fn a_day() {
    let hours: u64 = std::env::var("HOURS").map_or(24, |hours| hours.parse().expect("a number"));
    run("1,000 peers", 1_000, hours, 8192);
}

/// Ten thousand peers.
pub fn a_crowd() {
    run("10,000 peers", 10_000, 1, 16384);
}

/// Microbatches of 10 s, eight stages; a peer lives for eight hours on average, and another takes its place.
fn run(name: &str, peers: usize, hours: u64, lots: u32) {
    let until_us = hours * 3_600_000_000;
    let mut scenario = Scenario::small(1, 8, 1);
    let mut rng = Rng::new(7);
    scenario.peers = (0..peers)
        .map(|_| Peer { site: SiteId(0), speed: 0.1, jitter: 0.1, joins_us: rng.below(60_000_000) })
        .collect();
    for peer in 0..peers as u32 {
        let mut at = 0;
        loop {
            at += (-rng.unit().max(1e-9).ln() * 8.0 * 3.6e9) as u64;
            if at > until_us {
                break;
            }
            scenario.faults.push((at, Fault::Kill { peer: PeerId(peer), back_after_us: 60_000_000 }));
        }
    }
    scenario.faults.sort_by_key(|(at, _)| *at);
    let spec = &mut scenario.spec;
    (spec.sync, spec.reduce) = (Sync::Delayed, Reduce::Fast);
    spec.lots = Lots { microbatches: lots, lots };
    spec.steps = Step(u64::MAX);
    spec.checkpoint_every = 1;
    spec.elements = vec![peers as u64 / 4];
    let tuning = &mut spec.tuning;
    (tuning.beat, tuning.silence, tuning.slack) = (Span::s(10), Span::s(30), Span::s(20));
    (tuning.unknown, tuning.pause) = (Span::s(300), Span::s(120));
    (tuning.jobs, tuning.leases) = (96, 1 << 15);
    tuning.depth = 3;
    tuning.quorum = peers * 9 / 10;
    scenario.until_us = Some(until_us);
    let began = Instant::now();
    let outcome = World::new(&scenario).run().expect("every invariant holds");
    let took = began.elapsed().as_secs_f64();
    if let Some(bytes) = peak_memory() {
        figure(&format!("{name}, {hours} h: memory"), bytes / f64::from(1 << 30), "GiB");
    }
    if peers == 1_000 {
        let began = Instant::now();
        let unchecked = World::new(&scenario).without_invariants().run().expect("it was checked before");
        let unchecked_took = began.elapsed().as_secs_f64();
        assert_eq!(unchecked.history, outcome.history, "what is looked at does not change");
        figure(&format!("{name}, {hours} h: what the invariants cost"), took / unchecked_took - 1.0, "share");
    }
    figure(&format!("{name}, {hours} h"), took, "s");
    figure(&format!("{name}, {hours} h: events"), outcome.events as f64 / took, "1/s");
    let done = outcome.step as f64 * f64::from(lots) * 8.0 * 10.0 / (peers as f64 * hours as f64 * 3600.0);
    figure(
        &format!("{name}, {hours} h: share of the time in which peers were at useful work"),
        done,
        "share",
    );
}

/// The most memory that this process has had, where the system tells.
fn peak_memory() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok().map(|kib| kib * 1024.0)
}
