//! Links: rate, latency, jitter and loss between sites; one uplink queue and one downlink queue a host, inside its site
//! and beyond; and what can be cut: two sites from each other, one way or both, or one edge between two hosts that both
//! live.
//!
//! The transport below the machines is reliable as long as a path lives, so loss costs time (a retransmission),
//! and only a cut loses messages. Control waits behind nothing, tensors of work only behind each other, sums get
//! what those leave, and states what is left then. Tensors of a kind arrive in the order in which they were sent.

use std::collections::{BTreeSet, VecDeque};

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

/// One host's place, and its ways.
#[derive(Clone, Debug, Default)]
struct Host {
    site: SiteId,
    /// Inside its site, and beyond: a slow way out is no hindrance to what stays at home.
    up: [Way; 2],
    down: [Way; 2],
    /// When the last tensor arrives that is on its way from here, by whom it is for and how urgent it is: a connection
    /// keeps its order. Few are on their way at a time, so they are looked through.
    sent: Vec<((Address, Urgency), u64)>,
    /// How many those were when the ones that have arrived were last forgotten.
    swept: usize,
}

impl Host {
    /// Something leaves for `to` and would arrive at that time; when it does.
    fn in_order(&mut self, to: Address, urgency: Urgency, now: u64, arrives: u64) -> u64 {
        let key = (to, urgency);
        if let Some((_, last)) = self.sent.iter_mut().find(|(sent, _)| *sent == key) {
            *last = arrives.max(*last);
            return *last;
        }
        if self.sent.len() > 2 * self.swept + 8 {
            self.sent.retain(|(_, at)| *at > now);
            self.swept = self.sent.len();
        }
        self.sent.push((key, arrives));
        arrives
    }
}

/// A host's uplink or downlink.
#[derive(Clone, Debug, Default)]
struct Way {
    /// What tensors of work take of it; then what those and sums do, then what all do.
    taken: [Taken; 3],
}

impl Way {
    /// Something takes the way for so long, from `from` on at the earliest; when it is through. What it overtakes
    /// is later by as much, except for what was already promised to be through by then.
    fn take(&mut self, urgency: Urgency, now: u64, from: u64, duration_us: u64) -> u64 {
        let class = match urgency {
            Urgency::Control | Urgency::Work => 0,
            Urgency::Sum => 1,
            Urgency::State => 2,
        };
        let mut through = from;
        for (taken, place) in self.taken[class..].iter_mut().zip(class..) {
            let end = taken.take(now, from, duration_us);
            if place == class {
                through = end;
            }
        }
        through
    }
}

/// The times that are taken already: apart from each other, in order. A sender says at once when all that waits in its
/// queue will arrive, so what is said later may well arrive earlier, in the gaps.
#[derive(Clone, Debug, Default)]
struct Taken {
    spans: VecDeque<(u64, u64)>,
}

impl Taken {
    /// Takes the first `duration_us` that are free from `from` on, in several pieces if need be; when they are over.
    fn take(&mut self, now: u64, from: u64, duration_us: u64) -> u64 {
        while self.spans.front().is_some_and(|(_, end)| *end < now) {
            self.spans.pop_front();
        }
        // As a rule it comes after all that is known, and touches the last of it or nothing.
        if self.spans.back().is_none_or(|(_, end)| *end <= from) {
            match self.spans.back_mut().filter(|(_, end)| *end == from) {
                Some((_, end)) => *end += duration_us,
                None => self.spans.push_back((from, from + duration_us)),
            }
            return from + duration_us;
        }
        let first = self.spans.partition_point(|(_, end)| *end < from);
        let (mut at, mut left, mut next) = (from, duration_us, first);
        while let Some(&(start, end)) =
            self.spans.get(next).filter(|(start, _)| *start < at + left || *start <= at)
        {
            left -= start.saturating_sub(at);
            at = end.max(at);
            next += 1;
        }
        let start =
            self.spans.get(first).filter(|_| next > first).map_or(from, |(start, _)| from.min(*start));
        self.spans.drain(first..next);
        self.spans.insert(first, (start, at + left));
        at + left
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
        let sent = self.host_mut(from)?.up[usize::from(far)].take(urgency, now, now, duration_us);
        let down = &mut self.host_mut(to)?.down[usize::from(far)];
        let arrives = down.take(urgency, now, sent + latency_us - duration_us, duration_us);
        Some(self.host_mut(from)?.in_order(to, urgency, now, arrives))
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

#[cfg(test)]
mod tests {
    use starling_swarm::ids::PeerId;

    use super::*;

    #[test]
    fn what_is_said_later_and_arrives_earlier_goes_into_the_gaps() {
        let mut taken = Taken::default();
        assert_eq!(taken.take(0, 50, 10), 60);
        assert_eq!(taken.take(0, 0, 10), 10);
        assert_eq!(taken.take(0, 45, 10), 65, "five before the first, five after it");
        assert_eq!(taken.take(0, 5, 40), 55 + 20 - 10 + 5, "around all that is taken");
        assert_eq!(taken.spans, [(0, 70)]);
        assert_eq!(taken.take(71, 80, 5), 85);
        assert_eq!(taken.spans, [(80, 85)], "what is over is forgotten");
    }

    #[test]
    fn a_connection_keeps_its_order_and_another_one_does_not_care() {
        let (mut host, to) = (Host::default(), Address::Worker(PeerId(1)));
        assert_eq!(host.in_order(to, Urgency::Work, 0, 50), 50);
        assert_eq!(host.in_order(to, Urgency::Work, 10, 40), 50);
        assert_eq!(host.in_order(to, Urgency::Sum, 10, 40), 40);
        assert_eq!(host.in_order(Address::Worker(PeerId(2)), Urgency::Work, 10, 40), 40);
        for peer in 0..1000 {
            host.in_order(
                Address::Worker(PeerId(peer)),
                Urgency::Work,
                100 + u64::from(peer),
                101 + u64::from(peer),
            );
            assert!(host.sent.len() < 20, "what has arrived is forgotten");
        }
    }

    #[test]
    fn a_way_is_never_idle_while_something_waits() {
        let mut rng = Rng::new(3);
        let mut taken = Taken::default();
        let all: Vec<(u64, u64)> = (0..200).map(|_| (rng.below(1000), 1 + rng.below(20))).collect();
        let last = all.iter().map(|&(from, duration)| taken.take(0, from, duration)).max();
        // The same work in the order of arrival.
        let mut sorted = all.clone();
        sorted.sort_unstable();
        let end = sorted.iter().fold(0, |end: u64, &(from, duration)| end.max(from) + duration);
        assert_eq!(last, Some(end));
        assert!(taken.spans.iter().zip(taken.spans.iter().skip(1)).all(|(a, b)| a.1 <= b.0));
        let sum: u64 = taken.spans.iter().map(|(start, end)| end - start).sum();
        assert_eq!(sum, all.iter().map(|(_, duration)| duration).sum::<u64>());
    }
}
