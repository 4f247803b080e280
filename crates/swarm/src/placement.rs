//! Which peer holds which stage. Pure; every decision comes with its reason.

mod sites;

use std::collections::BTreeMap;

use crate::ids::{PeerId, SiteId, StageId};

/// A peer that may be given a stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Which peer.
    pub peer: PeerId,
    /// Where it stands.
    pub site: SiteId,
    /// Microbatches of an average stage a second.
    pub speed: f64,
    /// The stage that it holds now.
    pub stage: Option<StageId>,
}

/// A place for a peer, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Placing {
    /// Which peer.
    pub peer: PeerId,
    /// Which stage.
    pub stage: StageId,
    /// Why, in plain words.
    pub reason: String,
}

/// A peer with this part of another's speed is taken for as fast: nobody measures much better.
const ALIKE: f64 = 0.9;

/// Places the idle peers, the fastest first, each where the pipeline is slowest; of those that are about as fast one
/// site after the other, so that each site gets as much of the pipeline as it can hold. `costs` are the stages' costs
/// against the average. If that leaves a stage without a holder, peers are taken from the stages that can best spare
/// one. Then newcomers that are alike exchange their places, so that links between sites have little to carry. `None`:
/// there are fewer peers than stages, and nothing can be done but wait.
pub fn place(candidates: &[Candidate], costs: &[f64]) -> Option<Vec<Placing>> {
    if candidates.len() < costs.len() {
        return None;
    }
    let mut stages = Stages::new(costs);
    for candidate in candidates {
        if let Some(stage) = candidate.stage {
            stages.add(candidate, stage);
        }
    }
    let mut placings = Vec::new();
    let mut idle: Vec<&Candidate> = candidates.iter().filter(|c| c.stage.is_none()).collect();
    idle.sort_by(|a, b| b.speed.total_cmp(&a.speed).then(a.peer.cmp(&b.peer)));
    let mut rest = &mut idle[..];
    while let Some(fastest) = rest.first().map(|candidate| candidate.speed) {
        let alike = rest.iter().take_while(|candidate| candidate.speed >= ALIKE * fastest).count();
        let (group, slower) = rest.split_at_mut(alike.max(1));
        group.sort_by_key(|candidate| (candidate.site, candidate.peer));
        rest = slower;
    }
    for candidate in idle {
        let stage = stages.slowest(candidate.site);
        let reason = format!(
            "{stage} was the bottleneck with {:.2} microbatches/s; {} adds {:.2}",
            stages.capacity[stage.0 as usize],
            candidate.peer,
            candidate.speed / costs[stage.0 as usize]
        );
        stages.add(candidate, stage);
        placings.push(Placing { peer: candidate.peer, stage, reason });
    }
    while let Some(empty) = stages.empty() {
        let spare = stages.spare()?;
        let peer = spare.peer;
        stages.add(&spare, empty);
        placings.retain(|placing| placing.peer != peer);
        let reason = format!("{empty} had no holder left; {peer} could best be spared");
        placings.push(Placing { peer, stage: empty, reason });
    }
    sites::exchange(candidates, &mut placings, costs.len());
    Some(placings)
}

/// Who holds what, while peers are placed.
struct Stages<'a> {
    costs: &'a [f64],
    /// Microbatches a second that each stage can do.
    capacity: Vec<f64>,
    holders: Vec<Vec<Candidate>>,
    /// How many holders of a stage stand in a site.
    in_site: BTreeMap<(SiteId, usize), usize>,
}

impl<'a> Stages<'a> {
    fn new(costs: &'a [f64]) -> Stages<'a> {
        let (capacity, holders) = (vec![0.0; costs.len()], vec![Vec::new(); costs.len()]);
        Stages { costs, capacity, holders, in_site: BTreeMap::new() }
    }

    fn add(&mut self, candidate: &Candidate, stage: StageId) {
        let stage = stage.0 as usize;
        self.capacity[stage] += candidate.speed / self.costs[stage];
        self.holders[stage].push(*candidate);
        *self.in_site.entry((candidate.site, stage)).or_default() += 1;
    }

    /// The stage with the least capacity; among equals the one whose neighbours stand in the newcomer's site, so
    /// that hops over the WAN are few; then the first.
    fn slowest(&self, site: SiteId) -> StageId {
        let in_site = |stage| self.in_site.get(&(site, stage)).copied().unwrap_or(0);
        let near = |stage: usize| stage.checked_sub(1).map_or(0, in_site) + in_site(stage + 1);
        let better = |a: &usize, b: &usize| {
            self.capacity[*a].total_cmp(&self.capacity[*b]).then(near(*b).cmp(&near(*a))).then(a.cmp(b))
        };
        StageId((0..self.capacity.len()).min_by(better).unwrap_or(0) as u16)
    }

    fn empty(&self) -> Option<StageId> {
        self.holders.iter().position(Vec::is_empty).map(|stage| StageId(stage as u16))
    }

    /// The slowest peer of the stage with the most capacity among those that have two holders or more; it does
    /// not hold that stage any more.
    fn spare(&mut self) -> Option<Candidate> {
        let stage = (0..self.costs.len())
            .filter(|&stage| self.holders[stage].len() > 1)
            .max_by(|&a, &b| self.capacity[a].total_cmp(&self.capacity[b]).then(b.cmp(&a)))?;
        let slower = |a: &Candidate, b: &Candidate| a.speed.total_cmp(&b.speed).then(a.peer.cmp(&b.peer));
        let holders = &mut self.holders[stage];
        let index = (0..holders.len()).min_by(|&a, &b| slower(&holders[a], &holders[b]))?;
        let spare = holders.remove(index);
        self.capacity[stage] -= spare.speed / self.costs[stage];
        *self.in_site.entry((spare.site, stage)).or_insert(1) -= 1;
        Some(spare)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(peer: u32, speed: f64, stage: Option<u16>) -> Candidate {
        Candidate { peer: PeerId(peer), site: SiteId(0), speed, stage: stage.map(StageId) }
    }

    #[test]
    fn unequal_peers_make_equal_stages() {
        let peers: Vec<Candidate> = [8.0, 4.0, 4.0, 2.0, 2.0, 2.0, 1.0, 1.0]
            .iter()
            .zip(0..)
            .map(|(&s, p)| candidate(p, s, None))
            .collect();
        let placings = place(&peers, &[1.0, 1.0, 1.0]).unwrap();
        let mut capacity = [0.0; 3];
        for placing in placings {
            capacity[placing.stage.0 as usize] += peers[placing.peer.0 as usize].speed;
        }
        assert_eq!(capacity, [8.0, 8.0, 8.0]);
    }

    #[test]
    fn a_site_that_can_holds_the_whole_pipeline_however_its_peers_were_measured() {
        let sites = 3;
        let peers: Vec<Candidate> = (0..24)
            .map(|peer| {
                let speed = 7.0 + 0.01 * f64::from(peer * 7 % 24);
                Candidate { site: SiteId(peer as u16 % sites), ..candidate(peer, speed, None) }
            })
            .collect();
        let mut holders = BTreeMap::new();
        for placing in place(&peers, &[1.0; 4]).unwrap() {
            *holders.entry((placing.stage, peers[placing.peer.0 as usize].site)).or_insert(0) += 1;
        }
        assert!(holders.len() == 12 && holders.values().all(|&count| count == 2), "{holders:?}");
    }

    #[test]
    fn a_newcomer_goes_to_the_bottleneck() {
        let peers = [candidate(0, 1.0, Some(0)), candidate(1, 3.0, Some(1)), candidate(2, 1.0, None)];
        let placings = place(&peers, &[1.0, 1.0]).unwrap();
        assert_eq!((placings[0].peer, placings[0].stage), (PeerId(2), StageId(0)));
        assert!(placings[0].reason.contains("bottleneck"), "{}", placings[0].reason);
    }

    #[test]
    fn an_empty_stage_is_filled_from_the_one_that_can_spare_a_peer() {
        let peers = [candidate(0, 1.0, Some(0)), candidate(1, 1.0, Some(1)), candidate(2, 2.0, Some(1))];
        let placings = place(&peers, &[1.0, 1.0, 1.0]).unwrap();
        assert_eq!((placings[0].peer, placings[0].stage), (PeerId(1), StageId(2)));
        assert_eq!(place(&peers, &[1.0; 4]), None);
    }
}
