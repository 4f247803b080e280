//! What crosses the WAN when two sites each hold all stages: sums, and nothing else.

use starling_sim::network::Link;
use starling_sim::scenario::{Scenario, Sizes};
use starling_sim::world::World;
use starling_swarm::ids::{SiteId, Step};
use starling_swarm::lots::Lots;
use starling_swarm::spec::{Reduce, Sync};
use starling_swarm::time::Span;

use crate::figure;

const STAGES: u16 = 4;
const STEPS: u64 = 20;

/// Peers of the second site are half as fast; 200 Mb/s and 50 ms between the sites.
pub fn measure() {
    let mut scenario = Scenario::small(1, STAGES, 4);
    for (index, peer) in scenario.peers.iter_mut().enumerate() {
        let second = index >= 8;
        (peer.site, peer.speed) = (SiteId(second.into()), if second { 2.0 } else { 4.0 });
    }
    scenario.drivers = vec![SiteId(0), SiteId(1)];
    scenario.between = Link { bytes_per_s: 25e6, latency_us: 50_000, jitter_us: 5_000, loss: 0.0 };
    let gradient = 62_500_000; // 125 M parameters in four stages, bf16.
    scenario.sizes = Sizes { activation: 1_000_000, gradient, state: 375_000_000 };
    scenario.patience_us = u64::MAX / 4;
    let spec = &mut scenario.spec;
    (spec.sync, spec.reduce) = (Sync::Delayed, Reduce::Fast);
    spec.lots = Lots { microbatches: 1024, lots: 1024 };
    spec.steps = Step(STEPS);
    spec.checkpoint_every = 0;
    spec.elements = vec![64];
    (spec.tuning.beat, spec.tuning.silence) = (Span::s(1), Span::s(4));
    (spec.tuning.slack, spec.tuning.unknown, spec.tuning.jobs) = (Span::s(2), Span::s(60), 128);
    let outcome = World::new(&scenario).run().expect("nothing fails here");
    // Every stage's sum once across, and its result once back.
    let sums = STEPS * u64::from(STAGES) * 2 * gradient;
    let everything = STEPS * 1024 * u64::from(STAGES - 1) * 2 * scenario.sizes.activation + sums;
    figure(
        "WAN bytes, two sites with all stages each, against the sums alone",
        ratio(&outcome, sums),
        "times",
    );
    figure(
        "the same against routes that do not look at sites, half of whose hops cross",
        ratio(&outcome, sums + (everything - sums) / 2),
        "times",
    );
}

fn ratio(outcome: &starling_sim::world::Outcome, bytes: u64) -> f64 {
    outcome.wan_bytes as f64 / bytes as f64
}
