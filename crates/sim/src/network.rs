//! Links: rate, latency, jitter and loss between sites; one uplink queue and one downlink queue a host; and what
//! can be cut: two sites from each other, one way or both, or one edge between two hosts that both live.
//!
//! The transport below the machines is reliable as long as a path lives, so loss costs time (a retransmission),
//! and only a cut loses messages. Control waits behind nothing, tensors of work only behind each other, sums get
//! what those leave, and states what is left then.

use std::collections::BTreeSet;

use starling_swarm::ids::{Address, SiteId};
use starling_swarm::message::Urgency;

use crate::rng::Rng;

/// What a link can do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// What one host gets through it.
    pub bytes_per_s: f64,
    /// One way.
    pub latency_us: u64,
    /// Added at random, up to this.
    pub jitter_us: u64,
    /// Share of messages that need a second try.
    pub loss: f64,
}

impl Link {
    /// A machine room.
    pub const LOCAL: Link = Link { bytes_per_s: 1.25e9, latency_us: 100, jitter_us: 50, loss: 0.0 };
    /// Two cities.
    pub const REGIONAL: Link = Link { bytes_per_s: 125e6, latency_us: 8_000, jitter_us: 1_000, loss: 1e-4 };
    /// Two continents: 200 Mb/s, 80 ms one way, one message in a hundred sent again.
    pub const INTERCONTINENTAL: Link =
        Link { bytes_per_s: 25e6, latency_us: 80_000, jitter_us: 10_000, loss: 0.01 };
}

/// One host's place, and its two ways.
#[derive(Clone, Copy, Debug, Default)]
struct Host {
    site: SiteId,
    up: Way,
    down: Way,
}

/// A host's uplink or downlink.
#[derive(Clone, Copy, Debug, Default)]
struct Way {
    /// When all tensors of work that were sent are through; then the same for sums, and for states.
    free: [u64; 3],
}

impl Way {
    /// Something takes the way for so long, from `from` on at the earliest; when it is through. What it overtakes
    /// is later by as much, except for what was already promised to be through by then.
    fn take(&mut self, urgency: Urgency, from: u64, duration_us: u64) -> u64 {
        let class = match urgency {
            Urgency::Control | Urgency::Work => 0,
            Urgency::Sum => 1,
            Urgency::State => 2,
        };
        for free in &mut self.free[class..] {
            *free = from.max(*free) + duration_us;
        }
        self.free[class]
    }
}

/// All links of a simulated world.
#[derive(Clone, Debug)]
pub struct Network {
    inside: Link,
    between: Link,
    coordinator: Host,
    /// By the driver's number.
    drivers: Vec<Host>,
    /// By the peer's number.
    workers: Vec<Host>,
    cut_sites: BTreeSet<(SiteId, SiteId)>,
    cut_edges: BTreeSet<(Address, Address)>,
    /// Bytes that crossed from one site to another.
    pub wan_bytes: u64,
    /// All bytes.
    pub bytes: u64,
}

impl Network {
    /// Links inside sites and between them.
    pub fn new(inside: Link, between: Link) -> Network {
        Network {
            inside,
            between,
            coordinator: Host::default(),
            drivers: Vec::new(),
            workers: Vec::new(),
            cut_sites: BTreeSet::new(),
            cut_edges: BTreeSet::new(),
            wan_bytes: 0,
            bytes: 0,
        }
    }

    /// A host stands in a site.
    pub fn place(&mut self, host: Address, site: SiteId) {
        let (hosts, index) = match host {
            Address::Coordinator => return self.coordinator.site = site,
            Address::Driver(driver) => (&mut self.drivers, driver.0 as usize),
            Address::Worker(peer) => (&mut self.workers, peer.0 as usize),
        };
        if hosts.len() <= index {
            hosts.resize(index + 1, Host::default());
        }
        hosts[index].site = site;
    }

    /// Sends `bytes` at `now`; returns when they arrive, or `None` if they are lost.
    pub fn send(
        &mut self,
        from: Address,
        to: Address,
        bytes: u64,
        urgency: Urgency,
        now: u64,
        rng: &mut Rng,
    ) -> Option<u64> {
        if self.is_cut(from, to) {
            return None;
        }
        let far = self.site(from) != self.site(to);
        let link = if far { self.between } else { self.inside };
        self.bytes += bytes;
        self.wan_bytes += if far { bytes } else { 0 };
        let mut latency_us = link.latency_us + rng.below(link.jitter_us + 1);
        if link.loss > 0.0 && rng.chance(link.loss) {
            latency_us += 2 * link.latency_us;
        }
        if urgency == Urgency::Control {
            return Some(now + latency_us);
        }
        let duration_us = (bytes as f64 / link.bytes_per_s * 1e6) as u64;
        let sent = self.host_mut(from)?.up.take(urgency, now, duration_us);
        let down = &mut self.host_mut(to)?.down;
        Some(down.take(urgency, sent + latency_us - duration_us, duration_us))
    }

    /// Whether nothing gets from one to the other.
    pub fn is_cut(&self, from: Address, to: Address) -> bool {
        (!self.cut_edges.is_empty() && self.cut_edges.contains(&(from, to)))
            || (!self.cut_sites.is_empty() && self.cut_sites.contains(&(self.site(from), self.site(to))))
    }

    /// Cuts or heals the way from one site to another.
    pub fn cut_site(&mut self, from: SiteId, to: SiteId, cut: bool) {
        if cut {
            self.cut_sites.insert((from, to))
        } else {
            self.cut_sites.remove(&(from, to))
        };
    }

    /// Cuts or heals the way from one host to another.
    pub fn cut_edge(&mut self, from: Address, to: Address, cut: bool) {
        if cut {
            self.cut_edges.insert((from, to))
        } else {
            self.cut_edges.remove(&(from, to))
        };
    }

    fn site(&self, host: Address) -> SiteId {
        let host = match host {
            Address::Coordinator => Some(&self.coordinator),
            Address::Driver(driver) => self.drivers.get(driver.0 as usize),
            Address::Worker(peer) => self.workers.get(peer.0 as usize),
        };
        host.map_or(SiteId(0), |host| host.site)
    }

    fn host_mut(&mut self, host: Address) -> Option<&mut Host> {
        match host {
            Address::Coordinator => Some(&mut self.coordinator),
            Address::Driver(driver) => self.drivers.get_mut(driver.0 as usize),
            Address::Worker(peer) => self.workers.get_mut(peer.0 as usize),
        }
    }
}
