//! Which of the newcomers that are about as fast gets which of the stages that were chosen for them all, so that few
//! hops leave a site, and fewest from the stages that have few peers: those carry the most over their links.

use std::collections::BTreeMap;

use crate::ids::{SiteId, StageId};
use crate::placement::{ALIKE, Candidate, Placing};

/// Exchanges that are looked at, at the most: with 64 peers about ten thousand are. More than this would take longer than
/// a coordinator may be silent, and what is found first is most of what there is.
const LOOKS: usize = 200_000;
/// The power of a link's load that counts: the busiest holds up all others.
const BUSIEST: i32 = 4;

/// Newcomers exchange their stages as long as that makes the links between sites less busy. The stages stay as strong as
/// they are, but for what peers that are alike differ. 64 peers in 8 sites at 200 Mbit/s, simulated: half the time a step.
pub(super) fn exchange(candidates: &[Candidate], placings: &mut [Placing], stages: usize) {
    let about: BTreeMap<_, _> = candidates.iter().map(|candidate| (candidate.peer, candidate)).collect();
    let mut links = Links { peers: BTreeMap::new(), all: vec![0.0; stages] };
    let moved = |candidate: &Candidate| placings.iter().any(|placing| placing.peer == candidate.peer);
    for candidate in candidates.iter().filter(|candidate| candidate.stage.is_some() && !moved(candidate)) {
        links.add(candidate.site, candidate.stage.unwrap_or_default().0 as usize);
    }
    // Newcomers, the fastest first; a holder that was taken from its stage for another stays what it is.
    let mut newcomers: Vec<(f64, SiteId, usize)> = Vec::new();
    for (index, placing) in placings.iter().enumerate() {
        let Some(candidate) = about.get(&placing.peer) else { continue };
        links.add(candidate.site, placing.stage.0 as usize);
        if candidate.stage.is_none() {
            newcomers.push((candidate.speed, candidate.site, index));
        }
    }
    newcomers.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.2.cmp(&b.2)));
    let mut rest = &newcomers[..];
    while let Some(&(fastest, ..)) = rest.first() {
        let alike = rest.iter().take_while(|(speed, ..)| *speed >= ALIKE * fastest).count();
        let (group, slower) = rest.split_at(alike.max(1));
        let group: Vec<(SiteId, usize)> = group.iter().map(|&(_, site, index)| (site, index)).collect();
        links.improve(&group, placings);
        rest = slower;
    }
}

/// How busy the links of sites are, each peer having one of its own: what it must send to, and gets from, peers of its
/// neighbouring stages that stand elsewhere, if all work stays at home that can.
#[derive(Clone)]
struct Links {
    /// How many peers of each stage stand in a site.
    peers: BTreeMap<SiteId, Vec<f64>>,
    /// How many of each stage there are.
    all: Vec<f64>,
}

impl Links {
    fn add(&mut self, site: SiteId, stage: usize) {
        self.all[stage] += 1.0;
        let stages = self.all.len();
        self.peers.entry(site).or_insert_with(|| vec![0.0; stages])[stage] += 1.0;
    }

    /// Newcomers that are alike exchange their stages: from where they are, and from where they would be if the pipeline
    /// was dealt out piece by piece, one site after the other. Where that leads to is often better, and not always.
    fn improve(&mut self, group: &[(SiteId, usize)], placings: &mut [Placing]) {
        let stages: Vec<usize> = group.iter().map(|&(_, index)| placings[index].stage.0 as usize).collect();
        let mut dealt = self.clone();
        let mut best = dealt.deal(group, &stages);
        dealt.climb(&mut best);
        let mut climbed: Vec<(SiteId, usize)> =
            group.iter().zip(&stages).map(|(&(site, _), &stage)| (site, stage)).collect();
        self.climb(&mut climbed);
        if dealt.all_loads() < self.all_loads() * (1.0 - 1e-9) {
            (*self, climbed) = (dealt, best);
        }
        for ((&(site, index), (_, stage)), before) in group.iter().zip(climbed).zip(stages) {
            if stage != before {
                let Placing { stage: of, peer, reason } = &mut placings[index];
                *of = StageId(stage as u16);
                *reason =
                    format!("{peer} in {site} leaves links least to carry in {of}, of peers that are alike");
            }
        }
    }

    /// The same stages as often as before, dealt out in as many copies of the pipeline as there are.
    fn deal(&mut self, group: &[(SiteId, usize)], stages: &[usize]) -> Vec<(SiteId, usize)> {
        let mut sites: Vec<SiteId> = group.iter().map(|&(site, _)| site).collect();
        for (&site, &stage) in sites.iter().zip(stages) {
            self.change(site, stage, -1.0);
        }
        let mut count = vec![0usize; self.all.len()];
        stages.iter().for_each(|&stage| count[stage] += 1);
        let copies = count.iter().copied().filter(|&count| count > 0).min().unwrap_or(1);
        let mut slots: Vec<(usize, usize)> = Vec::new();
        for (stage, &count) in count.iter().enumerate() {
            slots.extend((0..count).map(|slot| (slot * copies / count, stage)));
        }
        slots.sort_unstable();
        sites.sort_unstable();
        let dealt: Vec<(SiteId, usize)> =
            sites.into_iter().zip(slots).map(|(site, (_, stage))| (site, stage)).collect();
        dealt.iter().for_each(|&(site, stage)| self.change(site, stage, 1.0));
        // Each in its own place again.
        let mut by_site: BTreeMap<SiteId, Vec<usize>> = BTreeMap::new();
        dealt.into_iter().rev().for_each(|(site, stage)| by_site.entry(site).or_default().push(stage));
        let own =
            |&(site, _): &(SiteId, usize)| (site, by_site.get_mut(&site).and_then(Vec::pop).unwrap_or(0));
        group.iter().map(own).collect()
    }

    /// Exchanges as long as that is better.
    fn climb(&mut self, peers: &mut [(SiteId, usize)]) {
        // Peers of one site and one stage are the same to us.
        let mut alike: BTreeMap<(SiteId, usize), Vec<usize>> = BTreeMap::new();
        for (index, &place) in peers.iter().enumerate() {
            alike.entry(place).or_default().push(index);
        }
        let mut looks = LOOKS;
        let mut is_better = true;
        while std::mem::take(&mut is_better) {
            let places: Vec<(SiteId, usize)> = alike.keys().copied().collect();
            for (n, &a) in places.iter().enumerate() {
                for &b in places[n + 1..].iter().filter(|b| b.0 != a.0 && b.1 != a.1) {
                    if !alike.contains_key(&a) {
                        break;
                    }
                    if looks == 0 {
                        return;
                    }
                    looks -= 1;
                    if !alike.contains_key(&b) || !self.exchange_if_better(a, b) {
                        continue;
                    }
                    is_better = true;
                    for (from, to) in [(a, (a.0, b.1)), (b, (b.0, a.1))] {
                        let Some(here) = alike.get_mut(&from) else { continue };
                        let Some(peer) = here.pop() else { continue };
                        if here.is_empty() {
                            alike.remove(&from);
                        }
                        peers[peer].1 = to.1;
                        alike.entry(to).or_default().push(peer);
                    }
                }
            }
        }
    }

    /// A peer of one site and stage takes the place of one of another, and the other way round, if that is better.
    fn exchange_if_better(&mut self, a: (SiteId, usize), b: (SiteId, usize)) -> bool {
        let before = self.load(a.0) + self.load(b.0);
        self.exchange(a, b);
        let is_better = self.load(a.0) + self.load(b.0) < before * (1.0 - 1e-9);
        if !is_better {
            self.exchange((a.0, b.1), (b.0, a.1));
        }
        is_better
    }

    fn exchange(&mut self, a: (SiteId, usize), b: (SiteId, usize)) {
        for (site, from, to) in [(a.0, a.1, b.1), (b.0, b.1, a.1)] {
            self.change(site, from, -1.0);
            self.change(site, to, 1.0);
        }
    }

    fn change(&mut self, site: SiteId, stage: usize, by: f64) {
        if let Some(peers) = self.peers.get_mut(&site) {
            peers[stage] += by;
        }
    }

    fn all_loads(&self) -> f64 {
        self.peers.keys().map(|&site| self.load(site)).sum()
    }

    /// How busy the links of a site's peers are, the busiest counting most.
    fn load(&self, site: SiteId) -> f64 {
        let Some(peers) = self.peers.get(&site) else { return 0.0 };
        // The part of all work of a stage that is done here.
        let share = |stage: usize| peers.get(stage).map_or(0.0, |here| here / self.all[stage].max(1.0));
        let load = |stage: usize| {
            let (mine, here) = (share(stage), peers[stage]);
            let leaves = |neighbour: usize| mine - mine.min(share(neighbour));
            let before = stage.checked_sub(1).map_or(0.0, leaves);
            let after = if stage + 1 < peers.len() { leaves(stage + 1) } else { 0.0 };
            here * ((before + after) / here.max(1.0)).powi(BUSIEST)
        };
        (0..peers.len()).map(load).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PeerId;
    use crate::placement::place;

    /// How much of the work of each stage crosses to the next one over the WAN at the least.
    fn crossing(holders: &BTreeMap<SiteId, Vec<f64>>, stages: usize) -> Vec<f64> {
        let all = |stage: usize| holders.values().map(|peers| peers[stage]).sum::<f64>();
        let stays = |stage: usize| -> f64 {
            let part = |peers: &Vec<f64>| (peers[stage] / all(stage)).min(peers[stage + 1] / all(stage + 1));
            holders.values().map(part).sum()
        };
        (0..stages - 1).map(|stage| 1.0 - stays(stage)).collect()
    }

    #[test]
    fn sites_that_cannot_hold_the_whole_pipeline_hold_pieces_of_it() {
        let costs = [1.9, 1.4, 0.5, 0.5, 0.5, 0.5, 0.5, 2.2];
        let peers: Vec<Candidate> = (0..64)
            .map(|peer| {
                let speed = 1.0 + 0.001 * f64::from(peer * 7 % 64);
                Candidate { peer: PeerId(peer), site: SiteId(peer as u16 % 8), speed, stage: None }
            })
            .collect();
        let placings = place(&peers, &costs).unwrap();
        let (mut holders, mut strength) = (BTreeMap::new(), vec![0.0; 8]);
        for Placing { peer, stage, .. } in &placings {
            let site: &mut Vec<f64> =
                holders.entry(peers[peer.0 as usize].site).or_insert_with(|| vec![0.0; 8]);
            site[stage.0 as usize] += 1.0;
            strength[stage.0 as usize] += 1.0 / costs[stage.0 as usize];
        }
        assert_eq!(holders.values().flatten().sum::<f64>(), 64.0, "everybody has one place");
        let least = strength.iter().fold(f64::MAX, |least, &of| f64::min(least, of));
        assert!(least > 0.9 * 64.0 / 8.0, "no stage is weaker than it must be: {strength:?}");
        let crossing = crossing(&holders, 8);
        assert!(
            crossing.iter().sum::<f64>() < 2.0,
            "of seven hops fewer than two leave a site: {crossing:?}"
        );
        assert!(crossing[2..6].iter().all(|&of| of < 0.3), "hardly any between the few: {crossing:?}");
    }

    #[test]
    fn newcomers_exchange_and_who_holds_a_stage_keeps_it() {
        let peer = |peer: u32, site: u16, speed: f64, stage: Option<u16>| Candidate {
            peer: PeerId(peer),
            site: SiteId(site),
            speed,
            stage: stage.map(StageId),
        };
        // The first site has stage 1, the second stage 0, which is slower: so the first newcomer would go there.
        let peers = [
            peer(0, 0, 1.0, Some(1)),
            peer(1, 1, 1.05, Some(0)),
            peer(2, 0, 1.0, None),
            peer(3, 1, 1.0, None),
        ];
        let alone: Vec<StageId> =
            place(&peers[..3], &[1.0, 1.0]).unwrap().iter().map(|placing| placing.stage).collect();
        assert_eq!(alone, [StageId(1)], "the slower stage");
        let mut placings = place(&peers, &[1.0, 1.0]).unwrap();
        placings.sort_by_key(|placing| placing.peer);
        let places: Vec<(PeerId, StageId)> =
            placings.iter().map(|placing| (placing.peer, placing.stage)).collect();
        assert_eq!(
            places,
            [(PeerId(2), StageId(0)), (PeerId(3), StageId(1))],
            "each site has both stages then"
        );
        assert!(placings[0].reason.contains("least to carry"), "{}", placings[0].reason);
    }

    #[test]
    fn ten_thousand_peers_in_a_hundred_sites_are_placed_in_a_bounded_number_of_looks() {
        let peers: Vec<Candidate> = (0..10_000)
            .map(|peer| Candidate {
                peer: PeerId(peer),
                site: SiteId(peer as u16 % 100),
                speed: 1.0,
                stage: None,
            })
            .collect();
        let costs: Vec<f64> = (0..24).map(|stage| 0.5 + 0.05 * f64::from(stage)).collect();
        let placings = place(&peers, &costs).unwrap();
        let everybody: std::collections::BTreeSet<PeerId> =
            placings.iter().map(|placing| placing.peer).collect();
        assert_eq!(everybody.len(), 10_000);
    }
}
