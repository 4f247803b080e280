//! Scenario files: who is there, what it does, and what goes wrong, as a user writes it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use starling_sim::fault::Fault;
use starling_sim::network;
use starling_sim::rng::Rng;
use starling_sim::scenario::{Peer, Scenario, Sizes};
use starling_sim::trace::Trace;
use starling_swarm::ids::{PeerId, SiteId, StageId, Step};
use starling_swarm::lots::Lots;
use starling_swarm::rebalance::Policy;
use starling_swarm::spec::{Reduce, Sync};
use starling_swarm::time::Span;

use crate::units::{Link, Time};

const MOST_PEERS: usize = 100_000;
const MOST_FAULTS: usize = 1_000_000;
const MOST_COPIES: u32 = 10_000;
const MOST_LOTS: u32 = 1 << 20;

/// What is in a scenario file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    stages: u16,
    /// What a microbatch costs each stage, against an average of 1.
    #[serde(default)]
    costs: Vec<f64>,
    /// Microbatches of a step.
    microbatches: u32,
    /// Lots of a step; as many as microbatches if nothing is said.
    lots: Option<u32>,
    length: Time,
    #[serde(default)]
    sync: Sync,
    #[serde(default)]
    reduce: Reduce,
    #[serde(default)]
    rebalance: RebalanceName,
    /// How often a worker leaves a copy of its sums with another; never if nothing is said.
    #[serde(default)]
    deposit: Time,
    #[serde(default)]
    seed: u64,
    #[serde(default = "one")]
    checkpoint_every: u64,
    model: Model,
    #[serde(default)]
    links: Links,
    #[serde(default)]
    peers: Vec<Peers>,
    #[serde(default)]
    traces: Vec<TraceOf>,
    churn: Option<Churn>,
    #[serde(default)]
    faults: Vec<FaultAt>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum RebalanceName {
    #[default]
    WhenItPays,
    Never,
}

/// The model, as far as the network and the devices feel it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Model {
    /// Of all stages.
    parameters: f64,
    /// Bytes of a gradient's element on the wire.
    #[serde(default = "four")]
    gradient_bytes: f64,
    /// Bytes that a joiner has to fetch for every parameter: weights and moments.
    #[serde(default = "twelve")]
    state_bytes: f64,
    /// Bytes of one microbatch at the boundary of two stages.
    activation_bytes: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Links {
    inside: Option<Link>,
    between: Option<Link>,
}

/// Some peers that are alike.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Peers {
    count: usize,
    #[serde(default)]
    site: u16,
    /// Microbatches of one stage a second, forward and backward.
    speed: f64,
    #[serde(default = "twentieth")]
    jitter: f64,
    #[serde(default)]
    joins: Time,
}

/// Peers that come and go as in a trace.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TraceOf {
    /// Lines of time and count (.csv), or counts at a fixed gap (.json); from the scenario's folder.
    file: PathBuf,
    /// Seconds of the csv's unit of time.
    #[serde(default = "one_f64")]
    unit_s: f64,
    #[serde(default = "one_u32")]
    copies: u32,
    speed: f64,
}

/// Peers die at random and come back.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Churn {
    /// How long a peer lives on average.
    lifetime: Time,
    back: Time,
}

/// Something that goes wrong.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultAt {
    at: Time,
    #[serde(flatten)]
    what: What,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum What {
    Kill { peer: u32, back: Time },
    KillStage { stage: u16, back: Time },
    KillCoordinator { back: Time },
    KillDriver { driver: u32, back: Time },
    Stop { peer: u32, r#for: Time },
    Partition { a: u16, b: u16, r#for: Time },
    CutEdge { a: u32, b: u32, r#for: Time },
    Straggle { peer: u32, factor: u32, r#for: Time },
    SlowDisk { sync: Time, r#for: Time },
    Preempt { peer: u32, notice: Time },
    Spoil { peer: u32, results: u32 },
    Spike {},
    HangUp { peer: u32 },
}

fn one() -> u64 {
    1
}

fn one_u32() -> u32 {
    1
}

fn one_f64() -> f64 {
    1.0
}

fn four() -> f64 {
    4.0
}

fn twelve() -> f64 {
    12.0
}

fn twentieth() -> f64 {
    0.05
}

/// Reads a scenario file.
pub fn read(path: &Path) -> Result<Scenario> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let file: File = toml::from_str(&text).with_context(|| format!("{} is no scenario", path.display()))?;
    file.scenario(folder).with_context(|| format!("{} makes no sense", path.display()))
}

impl File {
    fn scenario(self, folder: &Path) -> Result<Scenario> {
        self.check()?;
        let mut scenario = Scenario::small(self.seed, self.stages, 1);
        let length_us = self.length.us();
        scenario.until_us = Some(length_us);
        self.people(&mut scenario, folder)?;
        let of_a_stage = self.model.parameters / f64::from(self.stages);
        scenario.sizes = Sizes {
            activation: self.model.activation_bytes,
            gradient: (of_a_stage * self.model.gradient_bytes) as u64,
            state: (of_a_stage * self.model.state_bytes) as u64,
        };
        let link = |link: Link, like: network::Link| network::Link {
            bytes_per_s: link.bytes_per_s,
            latency_us: (link.latency_s * 1e6) as u64,
            jitter_us: (link.latency_s * 1e5) as u64,
            ..like
        };
        let links = &self.links;
        scenario.inside = links.inside.map_or(scenario.inside, |inside| link(inside, network::Link::LOCAL));
        scenario.between =
            links.between.map_or(scenario.between, |between| link(between, network::Link::INTERCONTINENTAL));
        let sites: std::collections::BTreeSet<SiteId> = scenario.peers.iter().map(|p| p.site).collect();
        scenario.drivers = sites.into_iter().collect();
        self.spec(&mut scenario);
        self.faults(&mut scenario)?;
        Ok(scenario)
    }

    fn check(&self) -> Result<()> {
        let lots = self.lots.unwrap_or(self.microbatches);
        ensure!(self.stages > 0 && self.stages <= 1024, "stages: from 1 to 1024, not {}", self.stages);
        let costs = self.costs.len();
        ensure!(
            costs == 0 || costs == self.stages as usize,
            "costs: one for each of the {} stages",
            self.stages
        );
        ensure!(self.costs.iter().all(|cost| (1e-3..=1e3).contains(cost)), "costs: from 0.001 to 1000");
        let mean = self.costs.iter().sum::<f64>() / costs.max(1) as f64;
        ensure!(costs == 0 || (mean - 1.0).abs() < 1e-3, "costs: their average must be 1, not {mean:.3}");
        ensure!(self.microbatches > 0, "microbatches: at least 1");
        ensure!(
            lots > 0 && lots <= self.microbatches.min(MOST_LOTS),
            "lots: from 1 to {}",
            self.microbatches
        );
        ensure!(self.length.us() > 0, "length: some time, as 30m");
        let sizes = [self.model.parameters, self.model.gradient_bytes, self.model.state_bytes];
        ensure!(sizes.iter().all(|size| (0.0..1e15).contains(size)), "model: sizes from 0 to 1e15");
        let speeds = self.peers.iter().map(|p| p.speed).chain(self.traces.iter().map(|t| t.speed));
        for speed in speeds {
            ensure!(
                (1e-6..=1e6).contains(&speed),
                "speed: from 1e-6 to 1e6 microbatches a second, not {speed}"
            );
        }
        ensure!(self.peers.iter().all(|p| (0.0..1.0).contains(&p.jitter)), "jitter: from 0 to less than 1");
        let most = self.peers.iter().map(|p| p.count).fold(0, usize::saturating_add);
        ensure!(most <= MOST_PEERS, "{most} peers are more than {MOST_PEERS}");
        Ok(())
    }

    /// Who is there and when.
    fn people(&self, scenario: &mut Scenario, folder: &Path) -> Result<()> {
        scenario.peers.clear();
        let mut rng = Rng::new(self.seed ^ 0x7ace);
        for trace in &self.traces {
            let path = folder.join(&trace.file);
            let text =
                std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let json = path.extension().is_some_and(|extension| extension == "json");
            let read = if json { Trace::from_json(&text) } else { Trace::from_csv(&text, trace.unit_s) };
            let read = read.with_context(|| format!("{} is no trace", path.display()))?;
            ensure!(trace.copies <= MOST_COPIES, "copies: at most {MOST_COPIES}, not {}", trace.copies);
            let mut part = scenario.clone();
            read.populate(&mut part, trace.copies, self.length.us(), trace.speed, &mut rng);
            let before = scenario.peers.len() as u32;
            scenario.peers.extend(part.peers);
            scenario
                .faults
                .extend(part.faults.into_iter().map(|(at, fault)| (at, renumbered(fault, before))));
            ensure!(scenario.peers.len() <= MOST_PEERS, "the traces have more than {MOST_PEERS} peers");
        }
        for peers in &self.peers {
            let joins_us = peers.joins.us();
            let peer = Peer { site: SiteId(peers.site), speed: peers.speed, jitter: peers.jitter, joins_us };
            scenario.peers.extend(std::iter::repeat_n(peer, peers.count));
        }
        let (there, stages) = (scenario.peers.len(), self.stages as usize);
        ensure!(there >= stages, "{there} peers cannot hold {stages} stages: at least one a stage is needed");
        Ok(())
    }

    fn spec(&self, scenario: &mut Scenario) {
        let at_start = scenario.peers.iter().filter(|peer| peer.joins_us == 0).count();
        let slowest = scenario.peers.iter().map(|peer| peer.speed).fold(f64::INFINITY, f64::min);
        let microbatch = Span::from_s_f64(1.0 / slowest);
        let spec = &mut scenario.spec;
        (spec.sync, spec.reduce) = (self.sync, self.reduce);
        spec.costs = self.costs.clone();
        let lots = self.lots.unwrap_or(self.microbatches);
        spec.lots = Lots { microbatches: self.microbatches, lots };
        spec.steps = Step(u64::MAX);
        spec.checkpoint_every = self.checkpoint_every;
        // Enough that every member of a stage can own a part.
        spec.elements = vec![(2 * scenario.peers.len() / self.stages as usize).max(8) as u64];
        spec.state_bytes = scenario.sizes.state;
        spec.tuning = starling_swarm::spec::Tuning {
            unknown: microbatch.times(30).max(Span::s(10)),
            slack: microbatch.times(2).max(Span::ms(500)),
            jobs: 128,
            leases: 1 << 15,
            keep_bytes: 4 << 30,
            quorum: at_start.max(self.stages as usize),
            rebalance: match self.rebalance {
                RebalanceName::WhenItPays => Policy::WhenItPays(Span::s(1800)),
                RebalanceName::Never => Policy::Never,
            },
            deposit: Span(self.deposit.us()),
            ..Default::default()
        };
    }

    fn faults(&self, scenario: &mut Scenario) -> Result<()> {
        for FaultAt { at, what } in &self.faults {
            let fault = self.fault(what, scenario.peers.len() as u32, scenario.drivers.len() as u32)?;
            scenario.faults.push((at.us(), fault));
        }
        if let Some(churn) = &self.churn {
            ensure!(churn.lifetime.us() > 0, "churn: a lifetime of 0 leaves nobody");
            let mut rng = Rng::new(self.seed ^ 0xc4);
            for peer in (0..scenario.peers.len() as u32).map(PeerId) {
                let mut at = scenario.peers[peer.0 as usize].joins_us;
                loop {
                    at += (-rng.unit().max(1e-12).ln() * churn.lifetime.us() as f64) as u64 + 1;
                    if at > self.length.us() {
                        break;
                    }
                    let back_after_us = churn.back.us();
                    scenario.faults.push((at, Fault::Kill { peer, back_after_us }));
                    at += back_after_us;
                    ensure!(scenario.faults.len() <= MOST_FAULTS, "more than {MOST_FAULTS} deaths");
                }
            }
        }
        scenario.faults.sort_by_key(|(at, _)| *at);
        Ok(())
    }

    fn fault(&self, what: &What, peers: u32, drivers: u32) -> Result<Fault> {
        let peer = |number: u32| match number < peers {
            true => Ok(PeerId(number)),
            false => bail!("there is no peer {number}: they are numbered from 0 to {}", peers - 1),
        };
        Ok(match *what {
            What::Kill { peer: who, back } => Fault::Kill { peer: peer(who)?, back_after_us: back.us() },
            What::KillStage { stage, back } => {
                ensure!(stage < self.stages, "there is no stage {stage}: they are numbered from 0");
                Fault::KillStage { stage: StageId(stage), back_after_us: back.us() }
            }
            What::KillCoordinator { back } => {
                Fault::KillCoordinator { back_after_us: back.us(), torn_record_survives: false }
            }
            What::KillDriver { driver, back } => {
                ensure!(driver < drivers, "there is no driver {driver}: there is one a site, from 0");
                Fault::KillDriver { driver, back_after_us: back.us() }
            }
            What::Stop { peer: who, r#for } => Fault::Stop { peer: peer(who)?, for_us: r#for.us() },
            What::Partition { a, b, r#for } => {
                Fault::Partition { a: SiteId(a), b: SiteId(b), one_way: false, for_us: r#for.us() }
            }
            What::CutEdge { a, b, r#for } => Fault::CutEdge { a: peer(a)?, b: peer(b)?, for_us: r#for.us() },
            What::Straggle { peer: who, factor, r#for } => {
                Fault::Straggle { peer: peer(who)?, factor: factor.max(1), for_us: r#for.us() }
            }
            What::SlowDisk { sync, r#for } => Fault::SlowDisk { sync_us: sync.us(), for_us: r#for.us() },
            What::Spoil { peer: who, results } => Fault::Spoil { peer: peer(who)?, results },
            What::Spike {} => Fault::Spike,
            What::HangUp { peer: who } => Fault::HangUp { peer: peer(who)? },
            What::Preempt { peer: who, notice } => {
                Fault::Preempt { peer: peer(who)?, notice_us: notice.us() }
            }
        })
    }
}

/// A trace's fault, for peers that are numbered after others.
fn renumbered(fault: Fault, before: u32) -> Fault {
    match fault {
        Fault::Preempt { peer, notice_us } => Fault::Preempt { peer: PeerId(peer.0 + before), notice_us },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "stages = 2\nmicrobatches = 16\nlength = \"30s\"\n\
        model = { parameters = 1e6, activation_bytes = 1000 }\npeers = [{ count = 4, speed = 10 }]\n";

    fn parse(more: &str) -> Result<Scenario> {
        let file: File = toml::from_str(&format!("{SMALL}{more}"))?;
        file.scenario(Path::new("."))
    }

    #[test]
    fn a_scenario_says_what_its_file_says() {
        let scenario = parse(
            "sync = \"delayed\"\n[[faults]]\nat = \"3s\"\nkill = { peer = 1, back = \"2s\" }\n\
             [links]\nbetween = \"100mbit,20ms\"\n",
        )
        .unwrap();
        assert_eq!(scenario.peers.len(), 4);
        assert_eq!(scenario.spec.sync, Sync::Delayed);
        let kill = Fault::Kill { peer: PeerId(1), back_after_us: 2_000_000 };
        assert_eq!(scenario.faults, [(3_000_000, kill)]);
        assert_eq!((scenario.between.bytes_per_s, scenario.between.latency_us), (12.5e6, 20_000));
        assert_eq!(scenario.sizes.gradient, 2_000_000);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (more, named) in [
            ("[[faults]]\nat = \"3s\"\nkill = { peer = 9, back = \"2s\" }", "no peer 9"),
            ("lots = 17", "lots"),
            ("costs = [1.0]", "costs"),
            ("speed = 1", "speed"),
            ("[churn]\nlifetime = \"0s\"\nback = \"1s\"", "lifetime"),
            ("[[traces]]\nfile = \"no.csv\"\nspeed = 1", "no.csv"),
        ] {
            let error = format!("{:#}", parse(more).unwrap_err());
            assert!(error.contains(named), "{more}: {error}");
        }
    }
}
