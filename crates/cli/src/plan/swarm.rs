//! Who would train: peers, their devices and the links between them, as the command line names them.

use std::str::FromStr;

use anyhow::{Result, anyhow, bail, ensure};
use starling_model::device;
use starling_model::pipeline;
use starling_model::run::Run;
use starling_model::transformer::Unit;

use crate::units::{Bytes, Link};

/// What a peer computes if nothing is said.
const TFLOPS: f64 = 1.0;
/// More than any device that is to come.
const MOST_TFLOPS: f64 = 1e6;
/// More peers take longer to simulate than anybody waits.
const MOST_PEERS: usize = 10_000;

/// Who is there, as a user says it.
#[derive(clap::Args, Clone, Debug)]
pub struct SwarmArguments {
    /// Sites that the peers stand in, as many in each as in the others [default: 2]
    #[arg(long, conflicts_with = "site")]
    sites: Option<usize>,
    /// Peers, all alike [default: two for every stage]
    #[arg(long, conflicts_with = "site")]
    peers: Option<usize>,
    /// A site and its peers, as 8x30 for eight of 30 TFLOP/s, or 8x30:24GB,2x60:80GB; once for every site
    #[arg(long, value_name = "PEERSxTFLOPS[:MEMORY]")]
    site: Vec<Site>,
    /// What a peer's device computes, in TFLOP/s that it really reaches; `here` measures this machine [default: what
    /// the run's device is if it is emulated, else 1]
    #[arg(long, value_name = "TFLOPS", conflicts_with = "site")]
    device: Option<Speed>,
    /// Memory of a peer of which nothing else is said, as 24GB [default: as much as it needs]
    #[arg(long)]
    memory: Option<Bytes>,
    /// The link between two sites: rate and latency. A peer has that rate for all that leaves its site
    #[arg(long, default_value = "200mbit,50ms")]
    link: Link,
    /// The link between two peers of one site
    #[arg(long, default_value = "10gbit,0.1ms")]
    lan: Link,
    /// Bytes of an activation's element on the wire: 4 as it is, 2 for bf16, 1 for 8 bits
    #[arg(long, default_value_t = 4.0)]
    wire_bytes: f64,
}

/// What a device computes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Speed {
    Tflops(f64),
    /// As much as this machine, measured.
    Here,
}

/// The peers of a site, in groups that are alike.
#[derive(Clone, Debug, PartialEq)]
struct Site(Vec<Group>);

#[derive(Clone, Copy, Debug, PartialEq)]
struct Group {
    count: usize,
    tflops: f64,
    memory: Option<Bytes>,
}

/// Who would train.
#[derive(Clone, Debug, PartialEq)]
pub struct Swarm {
    pub peers: Vec<Peer>,
    /// Between sites.
    pub link: Link,
    /// Inside them.
    pub lan: Link,
    pub wire_bytes: f64,
}

/// One peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peer {
    pub site: u16,
    pub tflops: f64,
    /// Unlimited if nothing is said.
    pub memory_bytes: Option<u64>,
}

impl SwarmArguments {
    /// The swarm for this run.
    pub fn resolve(&self, run: &Run, vocabulary: usize) -> Result<Swarm> {
        ensure!(
            (0.01..=64.0).contains(&self.wire_bytes),
            "an element of {} bytes makes no plan; --wire-bytes is 4 as it is, 2 for bf16, 1 for 8 bits",
            self.wire_bytes
        );
        let peers = if self.site.is_empty() { self.alike(run, vocabulary)? } else { self.named() };
        let there = peers.len();
        ensure!(
            there <= MOST_PEERS,
            "{there} peers are more than can be simulated; name at most {MOST_PEERS}"
        );
        Ok(Swarm { peers, link: self.link, lan: self.lan, wire_bytes: self.wire_bytes })
    }

    fn alike(&self, run: &Run, vocabulary: usize) -> Result<Vec<Peer>> {
        let sites = self.sites.unwrap_or(2);
        let count = self.peers.unwrap_or(2 * run.train.stages);
        ensure!((1..=1000).contains(&sites), "{sites} sites: peers stand in 1 to 1000 sites");
        ensure!(
            count <= MOST_PEERS,
            "{count} peers are more than can be simulated; name at most {MOST_PEERS}"
        );
        let tflops = match (self.device, run.train.device) {
            (Some(Speed::Tflops(tflops)), _) => tflops,
            (Some(Speed::Here), _) => measured(run, vocabulary)?,
            (None, device::Device::Emulated(tflops)) => tflops,
            (None, _) => TFLOPS,
        };
        let memory_bytes = self.memory.map(|memory| memory.0);
        Ok((0..count).map(|number| Peer { site: (number % sites) as u16, tflops, memory_bytes }).collect())
    }

    fn named(&self) -> Vec<Peer> {
        let sites = self.site.iter().zip(0..);
        let groups = sites.flat_map(|(site, number)| site.0.iter().map(move |group| (number, group)));
        let peers = groups.flat_map(|(site, group)| {
            let memory_bytes = group.memory.or(self.memory).map(|memory| memory.0);
            std::iter::repeat_n(Peer { site, tflops: group.tflops, memory_bytes }, group.count)
        });
        peers.collect()
    }
}

/// What this machine computes with the run's engine, in TFLOP/s. What is measured counts three passes over a block.
fn measured(run: &Run, vocabulary: usize) -> Result<f64> {
    let architecture = run.model.architecture(vocabulary);
    let per_s = pipeline::measure(&architecture, run.optimiser.rule(), &run.train)?;
    let passes = 3 * architecture.forward_operations(Unit::Block(0));
    let all = architecture.training_operations(Unit::Block(0));
    Ok(per_s * all as f64 / passes as f64 / 1e12)
}

impl Swarm {
    /// Sites in which anybody stands.
    pub fn sites(&self) -> usize {
        let sites: std::collections::BTreeSet<u16> = self.peers.iter().map(|peer| peer.site).collect();
        sites.len()
    }

    /// What a device computes on average.
    pub fn tflops(&self) -> f64 {
        let sum: f64 = self.peers.iter().map(|peer| peer.tflops).sum();
        sum / self.peers.len().max(1) as f64
    }

    /// In one line: "8 peers in 2 sites (4 + 4), 10 TFLOP/s each".
    pub fn named(&self) -> String {
        let mut counts = std::collections::BTreeMap::new();
        for peer in &self.peers {
            *counts.entry(peer.site).or_insert(0) += 1;
        }
        let counts: Vec<String> = counts.values().map(usize::to_string).collect();
        let fastest = self.peers.iter().map(|peer| peer.tflops).fold(0.0, f64::max);
        let slowest = self.peers.iter().map(|peer| peer.tflops).fold(f64::INFINITY, f64::min);
        let devices = match fastest > slowest {
            true => format!("{} to {} TFLOP/s", short(slowest), short(fastest)),
            false => format!("{} TFLOP/s each", short(fastest)),
        };
        match counts.len() {
            1 => format!("{} peers in 1 site, {devices}", self.peers.len()),
            sites => {
                format!("{} peers in {sites} sites ({}), {devices}", self.peers.len(), counts.join(" + "))
            }
        }
    }
}

/// A link in few words: "200 Mbit/s and 50 ms".
pub fn link(link: &Link) -> String {
    let rate = match link.bytes_per_s * 8.0 {
        bits if bits >= 1e9 => format!("{} Gbit/s", short(bits / 1e9)),
        bits => format!("{} Mbit/s", short(bits / 1e6)),
    };
    format!("{rate} and {} ms", short(link.latency_s * 1e3))
}

/// A link as it is written on the command line: "200mbit,50ms".
pub fn as_flag(link: &Link) -> String {
    format!("{}mbit,{}ms", short(link.bytes_per_s * 8e-6), short(link.latency_s * 1e3))
}

/// 10.000001 → "10", 0.0165 → "0.0165".
pub fn short(value: f64) -> String {
    format!("{}", (value * 1e5).round() / 1e5)
}

impl FromStr for Speed {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Speed> {
        if text == "here" {
            return Ok(Speed::Here);
        }
        tflops(text).map(Speed::Tflops)
    }
}

fn tflops(text: &str) -> Result<f64> {
    let tflops = text.trim().parse().ok().filter(|tflops| *tflops > 0.0 && *tflops <= MOST_TFLOPS);
    tflops.ok_or_else(|| {
        anyhow!("{text:?} is no speed; write TFLOP/s that the device really reaches, as 8 or 0.5")
    })
}

impl FromStr for Site {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Site> {
        let groups: Result<Vec<Group>> = text.split(',').map(group).collect();
        Ok(Site(groups?))
    }
}

fn group(text: &str) -> Result<Group> {
    let explain = "write a site's peers as 8x30 for eight of 30 TFLOP/s, or 8x30:24GB with their memory";
    let (peers, memory) = match text.split_once(':') {
        Some((peers, memory)) => (peers, Some(memory.parse()?)),
        None => (text, None),
    };
    let Some((count, speed)) = peers.split_once('x') else { bail!("{text:?} names no peers; {explain}") };
    let count = count.trim().parse().ok().filter(|count| (1..=MOST_PEERS).contains(count));
    let count = count.ok_or_else(|| anyhow!("{text:?} names no peers; {explain}"))?;
    Ok(Group { count, tflops: tflops(speed)?, memory })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_is_read_with_its_groups() {
        let site: Site = "8x30:24GB,2x0.5".parse().unwrap();
        let memory = Some(Bytes(24_000_000_000));
        let (fast, slow) =
            (Group { count: 8, tflops: 30.0, memory }, Group { count: 2, tflops: 0.5, memory: None });
        assert_eq!(site, Site(vec![fast, slow]));
        for wrong in ["", "8", "x30", "0x30", "8x", "8x-1", "8xfast", "8x30:", "8x30:24"] {
            assert!(wrong.parse::<Site>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn links_and_speeds_are_told_in_few_digits() {
        assert_eq!(link(&"200mbit,50ms".parse().unwrap()), "200 Mbit/s and 50 ms");
        assert_eq!(link(&"10gbit,0.1ms".parse().unwrap()), "10 Gbit/s and 0.1 ms");
        assert_eq!((short(0.0165), short(30.0)), ("0.0165".into(), "30".into()));
    }
}
