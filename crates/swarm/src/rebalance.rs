//! Whether moving a peer to another stage pays. Pure; every decision comes with its reason.
//!
//! A pipeline is as fast as its slowest stage. A move is worth what it gains until joiners would have brought the same.
//! It costs what the pipeline loses without the peer while the state travels (nothing, if its stage has more than it can
//! use), and what the peer has done since the last commit: its old stage does that again, and is the slower for it. By
//! the speeds that are known, no move makes the closing step end later. SWARM's rule, kept here for comparison, moves the
//! most underused peer every T seconds whatever it costs.

use serde::{Deserialize, Serialize};

use crate::ids::{PeerId, StageId};
use crate::time::Span;

/// A peer that holds a stage, or is about to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placed {
    /// Which peer.
    pub peer: PeerId,
    /// Which stage.
    pub stage: StageId,
    /// Microbatches of an average stage a second.
    pub speed: f64,
    /// Whether it may be moved: who still loads its state, or saves it, is not sent elsewhere.
    pub settled: bool,
    /// Microbatches that it has done since the last commit.
    pub holds: f64,
    /// How many of those are of the step that closes next.
    pub closing: f64,
    /// Whether it can compute that step.
    pub closes: bool,
}

/// What a move must be worth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// How long the state of a stage travels to its new holder.
    pub transfer: Span,
    /// When the next joiner is due. It has to load its state too, so whoever moves now is ahead of it by this.
    pub joiner: Span,
    /// How long it is from one joiner to the next.
    pub every: Span,
    /// No move is worth more than what it brings in this time.
    pub most: Span,
}

impl Terms {
    /// How long what a stage lacks will be missing, if nobody moves: joiners go where most is missing, one after the other.
    fn horizon_s(&self, missing: f64) -> f64 {
        (self.joiner.as_s_f64() + self.every.as_s_f64() * (missing - 1.0).max(0.0)).min(self.most.as_s_f64())
    }
}

/// What the pipeline is to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Task<'a> {
    /// The stages' costs against the average.
    pub costs: &'a [f64],
    /// Microbatches that are not yet done of the step that closes next, by stage.
    pub left: &'a [f64],
}

/// The least gain: this part of what the peer does, or of what the pipeline does. Measured speeds of peers that are alike
/// differ by as much, and a state does not travel for a mistake of the measurement.
const LEAST_GAIN_OF_PEER: f64 = 0.2;
const LEAST_GAIN_OF_ALL: f64 = 0.1;

/// What to do, and why.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Move this peer.
    Move {
        /// Who.
        peer: PeerId,
        /// To which stage.
        to: StageId,
        /// Why, in plain words.
        reason: String,
    },
    /// Leave everything as it is.
    Stay {
        /// Why, in plain words.
        reason: String,
    },
}

/// The best single move, if it pays.
pub fn decide(placed: &[Placed], task: Task<'_>, terms: Terms) -> Decision {
    let costs = task.costs;
    let capacity = capacities(placed, costs);
    let Some(slowest) = least(&capacity) else { return stay("there are no stages".into()) };
    let before = capacity[slowest];
    let average = capacity.iter().sum::<f64>() / capacity.len() as f64;
    let speed = placed.iter().map(|p| p.speed).sum::<f64>() / placed.len().max(1) as f64;
    let horizon_s = terms.horizon_s((average - before) * costs[slowest] / speed.max(1e-9));
    let mut best: Option<Worth> = None;
    let (closing, settled) = (Closing::new(placed, task), settled(placed, costs.len()));
    let can_leave = |p: &&Placed| {
        let from = p.stage.0 as usize;
        p.settled && from != slowest && settled.get(from).is_some_and(|&settled| settled > 1)
    };
    for &who in placed.iter().filter(can_leave) {
        if closing.is_later_without(who, task) {
            continue;
        }
        let again = who.holds / horizon_s.max(1e-3);
        let after = bottleneck_after(&capacity, costs, who, again, slowest);
        let gained = (after - before) * horizon_s;
        let lost = (before - bottleneck_without(&capacity, costs, who)) * terms.transfer.as_s_f64();
        let worth = Worth { who, after, gained, lost };
        if best.as_ref().is_none_or(|best| worth.is_better_than(best)) {
            best = Some(worth);
        }
    }
    let Some(Worth { who: candidate, after, gained, lost }) = best else {
        return stay(format!("nobody can leave a stage now for stage {slowest}, the bottleneck"));
    };
    let rate = |speed: f64| format!("{speed:.2} microbatches/s");
    let of_peer = LEAST_GAIN_OF_PEER * candidate.speed / costs[slowest];
    if after <= before + of_peer.min(LEAST_GAIN_OF_ALL * before) {
        let (now, then) = (rate(before), rate(after));
        return stay(format!(
            "stage {slowest} is the bottleneck with {now}; the best move would make it {then}"
        ));
    }
    if gained <= lost {
        return stay(format!(
            "moving {} would gain {gained:.0} microbatches and cost {lost:.0}",
            candidate.peer
        ));
    }
    let reason = format!(
        "stage {slowest} was the bottleneck with {}; with {} from {} it does {}: worth {gained:.0} microbatches, costs {lost:.0}",
        rate(before),
        candidate.peer,
        candidate.stage,
        rate(after)
    );
    Decision::Move { peer: candidate.peer, to: StageId(slowest as u16), reason }
}

/// When the open step closes, by the speeds that are known.
struct Closing {
    /// What those can do, stage by stage, who have the weights that it is computed with.
    capacity: Vec<f64>,
    in_s: f64,
}

impl Closing {
    fn new(placed: &[Placed], task: Task<'_>) -> Closing {
        let able: Vec<Placed> = placed.iter().filter(|p| p.closes).copied().collect();
        let capacity = capacities(&able, task.costs);
        let in_s = task.left.iter().zip(&capacity).map(|(left, capacity)| left / capacity.max(1e-9));
        Closing { in_s: in_s.fold(0.0, f64::max), capacity }
    }

    /// Whether that is later without this peer in its stage, and without what it has done there.
    fn is_later_without(&self, who: Placed, task: Task<'_>) -> bool {
        let from = who.stage.0 as usize;
        let its = if who.closes { who.speed / task.costs[from] } else { 0.0 };
        who.closing > 0.0 && task.left[from] + who.closing > self.in_s * (self.capacity[from] - its)
    }
}

/// What a move would bring and cost, in microbatches.
struct Worth {
    who: Placed,
    /// The pipeline's speed then.
    after: f64,
    gained: f64,
    lost: f64,
}

impl Worth {
    /// Among equals the slowest peer moves: its work is missed least.
    fn is_better_than(&self, other: &Worth) -> bool {
        let net = |worth: &Worth| worth.gained - worth.lost;
        net(self) > net(other) || (net(self) == net(other) && self.who.speed < other.who.speed)
    }
}

/// SWARM's own rule: every T seconds the most underused peer moves to the most loaded stage. A stage's load is
/// the inverse of its capacity; the most underused peer is the slowest of the stage with the most capacity.
pub fn swarm_rule(placed: &[Placed], costs: &[f64]) -> Decision {
    let capacity = capacities(placed, costs);
    let (Some(slowest), Some(fastest)) = (least(&capacity), most(&capacity)) else {
        return stay("there are no stages".into());
    };
    let is_last = settled(placed, costs.len())[fastest] < 2;
    let of_fastest = placed.iter().filter(|p| p.settled && p.stage.0 as usize == fastest && !is_last);
    let spare = of_fastest.min_by(|a, b| a.speed.total_cmp(&b.speed).then(a.peer.cmp(&b.peer)));
    match spare {
        Some(&spare) if bottleneck_after(&capacity, costs, spare, 0.0, slowest) > capacity[slowest] => {
            let reason = format!("stage {slowest} is the most loaded, stage {fastest} the least");
            Decision::Move { peer: spare.peer, to: StageId(slowest as u16), reason }
        }
        Some(_) => stay("the stages are as even as the peers allow".into()),
        None => stay(format!("stage {fastest}, the least loaded, can spare nobody")),
    }
}

/// How many are settled, stage by stage: the last of them cannot leave.
fn settled(placed: &[Placed], stages: usize) -> Vec<usize> {
    let mut settled = vec![0; stages];
    for p in placed.iter().filter(|p| p.settled && (p.stage.0 as usize) < stages) {
        settled[p.stage.0 as usize] += 1;
    }
    settled
}

fn stay(reason: String) -> Decision {
    Decision::Stay { reason }
}

fn capacities(placed: &[Placed], costs: &[f64]) -> Vec<f64> {
    let mut capacity = vec![0.0; costs.len()];
    for p in placed.iter().filter(|p| (p.stage.0 as usize) < costs.len()) {
        capacity[p.stage.0 as usize] += p.speed / costs[p.stage.0 as usize];
    }
    capacity
}

fn least(capacity: &[f64]) -> Option<usize> {
    (0..capacity.len()).min_by(|&a, &b| capacity[a].total_cmp(&capacity[b]).then(a.cmp(&b)))
}

fn most(capacity: &[f64]) -> Option<usize> {
    (0..capacity.len()).max_by(|&a, &b| capacity[a].total_cmp(&capacity[b]).then(b.cmp(&a)))
}

/// The pipeline's speed after a move, if the old stage has `again` microbatches a second to do once more.
fn bottleneck_after(capacity: &[f64], costs: &[f64], who: Placed, again: f64, to: usize) -> f64 {
    let from = who.stage.0 as usize;
    let speed = |stage: usize| match stage {
        stage if stage == from => capacity[stage] - who.speed / costs[stage] - again,
        stage if stage == to => capacity[stage] + who.speed / costs[stage],
        stage => capacity[stage],
    };
    (0..capacity.len()).map(speed).fold(f64::INFINITY, f64::min)
}

fn bottleneck_without(capacity: &[f64], costs: &[f64], who: Placed) -> f64 {
    let from = who.stage.0 as usize;
    let speed = |stage: usize| {
        if stage == from { capacity[stage] - who.speed / costs[stage] } else { capacity[stage] }
    };
    (0..capacity.len()).map(speed).fold(f64::INFINITY, f64::min)
}

/// When peers are moved.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Policy {
    /// Never.
    Never,
    /// When it pays, with this horizon.
    WhenItPays(Span),
    /// SWARM's rule, at this interval.
    Every(Span),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LONG: Span = Span::s(1800);
    const TERMS: Terms = Terms { transfer: Span::s(60), joiner: LONG, every: LONG, most: LONG };

    fn decide(placed: &[Placed], costs: &[f64], terms: Terms) -> Decision {
        super::decide(placed, Task { costs, left: &[1e9; 4][..costs.len()] }, terms)
    }

    fn placed(stages: &[(u16, f64)]) -> Vec<Placed> {
        let place = |((stage, speed), peer): (&(u16, f64), u32)| Placed {
            peer: PeerId(peer),
            stage: StageId(*stage),
            speed: *speed,
            settled: true,
            holds: 0.0,
            closing: 0.0,
            closes: true,
        };
        stages.iter().zip(0..).map(place).collect()
    }

    #[test]
    fn the_peer_whose_move_helps_most_goes_to_the_bottleneck_and_the_reason_says_why() {
        let peers = placed(&[(0, 1.0), (1, 1.0), (1, 1.0), (1, 1.0), (2, 2.0)]);
        let Decision::Move { peer, to, reason } = decide(&peers, &[1.0; 3], TERMS) else { panic!() };
        assert_eq!((peer, to), (PeerId(1), StageId(0)));
        assert!(reason.contains("bottleneck with 1.00"), "{reason}");
    }

    #[test]
    fn a_move_that_costs_more_than_it_gains_is_not_made() {
        let mut peers = placed(&[(0, 1.0), (1, 1.0), (1, 1.0), (1, 1.0)]);
        peers.iter_mut().for_each(|peer| peer.holds = 40.0 - f64::from(peer.peer.0));
        let soon_over = Terms { joiner: Span::s(30), ..TERMS };
        assert!(matches!(decide(&peers, &[1.0; 2], soon_over), Decision::Stay { .. }));
        let Decision::Move { peer, .. } = decide(&peers, &[1.0; 2], TERMS) else { panic!() };
        assert_eq!(peer, PeerId(3), "the one that has least to lose");
    }

    #[test]
    fn a_move_that_makes_the_step_close_later_is_put_off() {
        let mut peers = placed(&[(0, 1.0), (1, 1.0), (1, 1.0), (1, 1.0)]);
        peers.iter_mut().for_each(|peer| (peer.holds, peer.closing) = (20.0, 20.0));
        let decide = |left: [f64; 2]| super::decide(&peers, Task { costs: &[1.0; 2], left: &left }, TERMS);
        // Stage 0 closes in 100 s: so long two peers can do what is left of stage 1, and what the third has done.
        assert!(matches!(decide([100.0, 170.0]), Decision::Move { .. }));
        assert!(matches!(decide([100.0, 190.0]), Decision::Stay { .. }));
        assert!(matches!(decide([0.0, 0.0]), Decision::Stay { .. }), "the step is about to close");
        // One that came in the middle of the step cannot do anything for it.
        (peers[3].closes, peers[3].settled) = (false, false);
        let decide = |left: [f64; 2]| super::decide(&peers, Task { costs: &[1.0; 2], left: &left }, TERMS);
        assert!(matches!(decide([100.0, 75.0]), Decision::Move { .. }));
        assert!(matches!(decide([100.0, 90.0]), Decision::Stay { .. }));
    }

    #[test]
    fn nobody_is_moved_for_what_a_measurement_may_err_by() {
        let alike = placed(&[(0, 1.0), (1, 1.03), (1, 0.99)]);
        assert!(matches!(decide(&alike, &[1.0; 2], TERMS), Decision::Stay { .. }));
    }

    #[test]
    fn what_a_peer_has_done_is_done_again_by_its_old_stage() {
        let mut peers = placed(&[(0, 1.0), (1, 1.0), (1, 1.0), (1, 1.0)]);
        let terms = Terms { joiner: Span::s(20), every: Span::s(0), ..TERMS };
        let decide = |peers: &[Placed]| decide(peers, &[1.0; 2], terms);
        assert!(matches!(decide(&peers), Decision::Move { .. }));
        // Two peers that do 20 microbatches again in the 20 s until the next joiner are no faster than one.
        peers.iter_mut().for_each(|peer| peer.holds = 20.0);
        assert!(matches!(decide(&peers), Decision::Stay { .. }));
    }

    #[test]
    fn the_more_a_stage_lacks_the_longer_it_would_wait_for_joiners() {
        let peers = placed(&[(0, 1.0), (1, 1.0), (1, 1.0), (1, 1.0), (1, 1.0), (1, 1.0)]);
        let mut held = peers.clone();
        held.iter_mut().for_each(|peer| peer.holds = 60.0);
        let soon = Terms { joiner: Span::s(10), every: Span::s(10), ..TERMS };
        let Decision::Stay { .. } = decide(&held[..3], &[1.0; 2], soon) else { panic!() };
        let Decision::Move { .. } = decide(&held, &[1.0; 2], Terms { every: Span::s(60), ..soon }) else {
            panic!()
        };
    }

    #[test]
    fn even_stages_stay_even_under_both_rules() {
        let peers = placed(&[(0, 1.0), (0, 1.0), (1, 1.0), (1, 1.0)]);
        assert!(matches!(decide(&peers, &[1.0; 2], TERMS), Decision::Stay { .. }));
        assert!(matches!(swarm_rule(&peers, &[1.0; 2]), Decision::Stay { .. }));
    }

    proptest! {
        #[test]
        fn a_stage_is_never_emptied_and_moves_come_to_an_end(
            peers in prop::collection::vec((0u16..4, 0.5f64..8.0), 4..30),
        ) {
            let mut peers = placed(&peers);
            for stage in 0..4 {
                peers[stage as usize].stage = StageId(stage);
            }
            let costs = [1.0; 4];
            let mut speed = 0.0;
            for _ in 0..100 {
                let now = capacities(&peers, &costs).into_iter().fold(f64::INFINITY, f64::min);
                prop_assert!(now >= speed, "every move makes the pipeline faster");
                speed = now;
                let Decision::Move { peer, to, .. } = decide(&peers, &costs, TERMS) else { return Ok(()) };
                peers[peer.0 as usize].stage = to;
                prop_assert!((0..4).all(|stage| peers.iter().any(|p| p.stage == StageId(stage))));
            }
            prop_assert!(false, "a hundred moves and no end");
        }
    }
}
