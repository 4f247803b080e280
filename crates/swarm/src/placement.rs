//! Which peer holds which stage. Pure; every decision comes with its reason.

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

/// Places the idle peers, the fastest first, each where the pipeline is slowest. `costs` are the stages' costs
/// against the average. If that leaves a stage without a holder, peers are taken from the stages that can best
/// spare one. `None`: there are fewer peers than stages, and nothing can be done but wait.
pub fn place(candidates: &[Candidate], costs: &[f64]) -> Option<Vec<Placing>> {
    if candidates.len() < costs.len() {
        return None;
    }
    let mut holds: BTreeMap<PeerId, StageId> =
        candidates.iter().filter_map(|c| Some((c.peer, c.stage?))).collect();
    let mut placings = Vec::new();
    let mut idle: Vec<&Candidate> = candidates.iter().filter(|c| c.stage.is_none()).collect();
    idle.sort_by(|a, b| b.speed.total_cmp(&a.speed).then(a.peer.cmp(&b.peer)));
    for candidate in idle {
        let capacity = capacities(candidates, &holds, costs);
        let stage = slowest(&capacity, candidates, &holds, candidate.site);
        let reason = format!(
            "{stage} was the bottleneck with {:.2} microbatches/s; {} adds {:.2}",
            capacity[stage.0 as usize], candidate.peer, candidate.speed
        );
        holds.insert(candidate.peer, stage);
        placings.push(Placing { peer: candidate.peer, stage, reason });
    }
    while let Some(empty) = empty_stage(&holds, costs.len()) {
        let peer = spare_peer(candidates, &holds, costs)?;
        holds.insert(peer, empty);
        placings.retain(|placing| placing.peer != peer);
        let reason = format!("{empty} had no holder left; {peer} could best be spared");
        placings.push(Placing { peer, stage: empty, reason });
    }
    Some(placings)
}

/// Microbatches a second that each stage can do.
fn capacities(candidates: &[Candidate], holds: &BTreeMap<PeerId, StageId>, costs: &[f64]) -> Vec<f64> {
    let mut capacity = vec![0.0; costs.len()];
    for candidate in candidates {
        if let Some(stage) = holds.get(&candidate.peer) {
            capacity[stage.0 as usize] += candidate.speed / costs[stage.0 as usize];
        }
    }
    capacity
}

/// The stage with the least capacity; among equals the one whose neighbours stand in the newcomer's site, so
/// that hops over the WAN are few; then the first.
fn slowest(
    capacity: &[f64],
    candidates: &[Candidate],
    holds: &BTreeMap<PeerId, StageId>,
    site: SiteId,
) -> StageId {
    let near = |stage: usize| {
        let neighbour = |held: StageId| (held.0 as usize).abs_diff(stage) == 1;
        candidates
            .iter()
            .filter(|c| c.site == site && holds.get(&c.peer).is_some_and(|&held| neighbour(held)))
            .count()
    };
    let better = |a: &usize, b: &usize| {
        capacity[*a].total_cmp(&capacity[*b]).then(near(*b).cmp(&near(*a))).then(a.cmp(b))
    };
    StageId((0..capacity.len()).min_by(better).unwrap_or(0) as u16)
}

fn empty_stage(holds: &BTreeMap<PeerId, StageId>, stages: usize) -> Option<StageId> {
    (0..stages as u16).map(StageId).find(|stage| !holds.values().any(|held| held == stage))
}

/// The slowest peer of the stage with the most capacity among those that have two holders or more.
fn spare_peer(candidates: &[Candidate], holds: &BTreeMap<PeerId, StageId>, costs: &[f64]) -> Option<PeerId> {
    let capacity = capacities(candidates, holds, costs);
    let holders = |stage: StageId| holds.values().filter(|held| **held == stage).count();
    let stage = (0..costs.len())
        .filter(|&stage| holders(StageId(stage as u16)) > 1)
        .max_by(|&a, &b| capacity[a].total_cmp(&capacity[b]).then(b.cmp(&a)))?;
    candidates
        .iter()
        .filter(|c| holds.get(&c.peer) == Some(&StageId(stage as u16)))
        .min_by(|a, b| a.speed.total_cmp(&b.speed).then(a.peer.cmp(&b.peer)))
        .map(|c| c.peer)
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
