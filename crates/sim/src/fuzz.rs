//! Random scenarios from one seed each, and the smallest that still fails.

use starling_swarm::coordinator::Order;
use starling_swarm::ids::*;
use starling_swarm::lots::Lots;
use starling_swarm::spec::{Reduce, Sync};
use starling_swarm::time::Span;

use crate::fault::Fault;
use crate::network::Link;
use crate::rng::Rng;
use crate::scenario::{Peer, Scenario};
use crate::world::{Outcome, Violation, World};

/// A scenario that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed that made the scenario.
    pub seed: u64,
    /// What was violated.
    pub violation: Violation,
    /// The scenario with all faults and peers taken away that it does not need to fail.
    pub smallest: Scenario,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "seed {}: {}", self.seed, self.violation)?;
        writeln!(f, "smallest: {} stages, {} peers", self.smallest.spec.stages, self.smallest.peers.len())?;
        for (at, fault) in &self.smallest.faults {
            writeln!(f, "  at {:.3} s {fault:?}", *at as f64 / 1e6)?;
        }
        write!(f, "replay it: starling sim replay {}", self.seed)
    }
}

/// The scenario of a seed.
pub fn scenario(seed: u64) -> Scenario {
    let mut rng = Rng::new(seed);
    let stages = rng.between(1, 4) as u16;
    let mut scenario = Scenario::small(seed, stages, rng.between(1, 3) as usize);
    let microbatches = rng.between(1, 12) as u32;
    scenario.spec.lots = Lots { microbatches, lots: rng.between(1, microbatches.into()) as u32 };
    scenario.spec.sync = if rng.chance(0.5) { Sync::Step } else { Sync::Delayed };
    scenario.spec.reduce = if rng.chance(0.7) { Reduce::Exact } else { Reduce::Fast };
    scenario.spec.tuning.keep_bytes = if rng.chance(0.8) { 1 << 30 } else { rng.below(1_000_000) };
    scenario.spec.steps = Step(rng.between(2, 6));
    scenario.spec.checkpoint_every = rng.below(3);
    scenario.spec.elements = vec![rng.between(1, 12)];
    scenario.spec.tuning.part_elements = rng.between(1, 6);
    scenario.between = if rng.chance(0.5) { Link::REGIONAL } else { Link::INTERCONTINENTAL };
    let sites = rng.between(1, 2);
    for peer in &mut scenario.peers {
        *peer = Peer {
            site: SiteId(rng.below(sites) as u16),
            speed: 5.0 + 35.0 * rng.unit(),
            jitter: 0.3 * rng.unit(),
            joins_us: if rng.chance(0.2) { rng.below(4_000_000) } else { 0 },
        };
    }
    scenario.drivers = (0..rng.between(1, 2)).map(|_| SiteId(rng.below(sites) as u16)).collect();
    let mut spare = scenario.peers.len() - stages as usize;
    for _ in 0..rng.below(6) {
        let at = rng.below(6_000_000);
        let fault = fault(&mut rng, &scenario, &mut spare);
        scenario.faults.push((at, fault));
    }
    // Who is taken away for good may go before the run starts.
    scenario.spec.tuning.quorum = stages as usize + rng.below(spare as u64 + 1) as usize;
    if rng.chance(0.125) {
        let order = Order::Amend(vec![rng.below(256) as u8]);
        scenario.faults.push((rng.below(3_000_000), Fault::Operator(order)));
    }
    if rng.chance(0.1) {
        let step = Step(rng.below(scenario.spec.steps.0));
        scenario.poison = Some((step, Microbatch(rng.below(microbatches.into()) as u32)));
    } else if spare > 0 && rng.chance(0.1) {
        // It may be quarantined for good. Of two that are wrong at once each would confirm the other.
        let peer = PeerId(rng.below(scenario.peers.len() as u64) as u32);
        scenario.faults.push((rng.below(4_000_000), Fault::Spoil { peer, results: 1 }));
    }
    if rng.chance(0.3) {
        let peer = PeerId(rng.below(scenario.peers.len() as u64) as u32);
        scenario.faults.push((rng.below(4_000_000), Fault::HangUp { peer }));
    }
    if rng.chance(0.1) {
        scenario.faults.push((rng.below(4_000_000), Fault::Spike));
    }
    if rng.chance(0.4) {
        scenario.share();
    }
    if rng.chance(0.5) {
        // Steps that are long enough for something to be left with another, and to be inherited.
        scenario.spec.tuning.deposit = Span::ms(rng.between(10, 200));
        let Lots { microbatches, lots } = scenario.spec.lots;
        scenario.spec.lots = Lots { microbatches: 6 * microbatches, lots: 6 * lots };
        scenario.patience_us *= 6;
    }
    scenario
}

fn fault(rng: &mut Rng, scenario: &Scenario, spare: &mut usize) -> Fault {
    let peer = PeerId(rng.below(scenario.peers.len() as u64) as u32);
    let other = PeerId(rng.below(scenario.peers.len() as u64) as u32);
    // Sometimes shorter than every deadline, sometimes longer.
    let for_us = if rng.chance(0.5) { rng.between(10_000, 500_000) } else { rng.between(500_000, 8_000_000) };
    match rng.below(15) {
        0 | 1 => Fault::Kill { peer, back_after_us: for_us },
        2 => Fault::KillStage {
            stage: StageId(rng.below(scenario.spec.stages.into()) as u16),
            back_after_us: for_us,
        },
        3 | 4 => Fault::KillCoordinator { back_after_us: for_us, torn_record_survives: rng.chance(0.5) },
        5 => Fault::KillDriver {
            driver: rng.below(scenario.drivers.len() as u64) as u32,
            back_after_us: for_us,
        },
        6 => Fault::Stop { peer, for_us },
        7 => Fault::StopCoordinator { for_us },
        8 => Fault::Partition { a: SiteId(0), b: SiteId(1), one_way: rng.chance(0.5), for_us },
        9 | 10 if peer != other => Fault::CutEdge { a: peer, b: other, for_us },
        11 => Fault::SlowDisk { sync_us: rng.between(10_000, 400_000), for_us },
        12 => Fault::ClockJump { peer, by_us: for_us },
        13 => Fault::CoordinatorClockJump { by_us: for_us },
        14 if *spare > 0 => {
            *spare -= 1;
            Fault::Preempt { peer, notice_us: for_us }
        }
        _ => Fault::Straggle { peer, factor: rng.between(2, 30) as u32, for_us },
    }
}

/// Runs one seed.
pub fn replay(seed: u64) -> Result<Outcome, Violation> {
    World::new(&scenario(seed)).run()
}

/// Runs many seeds; the first that fails, made as small as can be.
pub fn hunt(seeds: std::ops::Range<u64>) -> Result<(), Box<Failure>> {
    for seed in seeds {
        let scenario = scenario(seed);
        if let Err(violation) = World::new(&scenario).run() {
            let smallest = shrink(scenario);
            return Err(Box::new(Failure { seed, violation, smallest }));
        }
    }
    Ok(())
}

/// Takes away faults, then steps, one at a time, as long as it still fails in any way.
pub fn shrink(mut scenario: Scenario) -> Scenario {
    let fails = |scenario: &Scenario| World::new(scenario).run().is_err();
    let mut index = 0;
    while index < scenario.faults.len() {
        let mut smaller = scenario.clone();
        smaller.faults.remove(index);
        if fails(&smaller) {
            scenario = smaller;
        } else {
            index += 1;
        }
    }
    while scenario.spec.steps > Step(1) {
        let mut smaller = scenario.clone();
        smaller.spec.steps.0 -= 1;
        if !fails(&smaller) {
            break;
        }
        scenario = smaller;
    }
    scenario
}
