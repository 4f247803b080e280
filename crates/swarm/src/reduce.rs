//! How the members of a stage sum their gradients: who owns which part of the flat vector, who sends what to
//! whom, and by which way round when two of them cannot talk. Pure.
//!
//! Every member owns a part. Holders of lots send their sums of a part to its owner, which adds them up in the
//! fixed tree over lots and sends the result to all members. A member that owns the fraction w of the vector
//! and is one of N sends 1 + (N − 2)·w vectors, so the parts that finish together solve
//! (1 + (N − 2)·wᵢ) / bᵢ = ξ with Σ wᵢ = 1, wᵢ ≥ 0: water filling, in closed form where hivemind runs a linear
//! program.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::ids::{Lot, PeerId, StageId};
use crate::lots::{Lots, TreeNode};
use crate::spec::Reduce;

/// One attempt to reduce one stage; the message's fence carries step and attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReducePlan {
    /// Which stage.
    pub stage: StageId,
    /// Everybody who needs the result, in order.
    pub members: Vec<PeerId>,
    /// Whose sum of each lot counts: all lots, in order. This is where 'exactly once' is made.
    pub holdings: Vec<(Lot, PeerId)>,
    /// Who adds up what.
    pub parts: Vec<Part>,
    /// Pairs that cannot talk, and who passes on between them.
    pub relays: Vec<Relay>,
    /// Why the plan is as it is, in plain words.
    pub reason: String,
}

/// A part of the flat vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Who adds it up.
    pub owner: PeerId,
    /// Its first element.
    pub start: u64,
    /// The element after its last.
    pub end: u64,
}

/// A way round an edge that failed, for both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Relay {
    /// One end; the smaller number.
    pub a: PeerId,
    /// The other end.
    pub b: PeerId,
    /// Who passes on.
    pub via: PeerId,
}

impl ReducePlan {
    /// The lots of a holder that count.
    pub fn lots_of(&self, holder: PeerId) -> BTreeSet<Lot> {
        self.holdings.iter().filter(|(_, peer)| *peer == holder).map(|(lot, _)| *lot).collect()
    }

    /// Where in the tree the sums of a holder stand.
    pub fn nodes_of(&self, holder: PeerId, lots: Lots, reduce: Reduce) -> Vec<TreeNode> {
        let own = self.lots_of(holder);
        match reduce {
            _ if own.is_empty() => Vec::new(),
            Reduce::Exact => lots.nodes(&own),
            Reduce::Fast => vec![TreeNode::ALL],
        }
    }

    /// Everybody whose sums count.
    pub fn holders(&self) -> BTreeSet<PeerId> {
        self.holdings.iter().map(|(_, peer)| *peer).collect()
    }

    /// Whom to hand a message from `from` for `to`.
    pub fn next_hop(&self, from: PeerId, to: PeerId) -> PeerId {
        let edge = (from.min(to), from.max(to));
        self.relays.iter().find(|relay| (relay.a, relay.b) == edge).map_or(to, |relay| relay.via)
    }

    /// Whether the plan makes sense: every part in order, every owner a member, every lot once.
    pub fn is_sound(&self, lots: Lots, elements: u64) -> bool {
        let mut at = 0;
        let members: BTreeSet<PeerId> = self.members.iter().copied().collect();
        for part in &self.parts {
            if part.start != at || part.end <= at || !members.contains(&part.owner) {
                return false;
            }
            at = part.end;
        }
        at == elements
            && members.len() == self.members.len()
            && self.holdings.iter().map(|(lot, _)| *lot).eq(lots.all())
            && self.holdings.iter().all(|(_, peer)| members.contains(peer))
            && self.relays.iter().all(|relay| members.contains(&relay.via))
    }
}

/// Makes the plan. `broken` names pairs that could not talk in an earlier attempt; a pair without a third
/// member to pass on is returned as an error, and its caller excludes one of the two.
pub fn plan(
    stage: StageId,
    members: &BTreeMap<PeerId, f64>,
    holdings: Vec<(Lot, PeerId)>,
    elements: u64,
    broken: &BTreeSet<(PeerId, PeerId)>,
) -> Result<ReducePlan, (PeerId, PeerId)> {
    let rates: Vec<f64> = members.values().copied().collect();
    // Below this many elements a part costs more in latency than it saves.
    let least = elements / (8 * members.len() as u64).max(1);
    let mut parts = Vec::new();
    let mut start = 0;
    for (&owner, len) in members.keys().zip(split(elements, &rates, least)) {
        if len > 0 {
            parts.push(Part { owner, start, end: start + len });
            start += len;
        }
    }
    let mut relays = Vec::new();
    for &(a, b) in broken {
        if members.contains_key(&a) && members.contains_key(&b) {
            let via = relay_for(a, b, members, broken).ok_or((a, b))?;
            relays.push(Relay { a, b, via });
        }
    }
    let reason = format!(
        "{} members share the sum by their uplinks; {} of them own parts, {} pairs go through a relay",
        members.len(),
        parts.len(),
        relays.len()
    );
    Ok(ReducePlan { stage, members: members.keys().copied().collect(), holdings, parts, relays, reason })
}

/// The fastest member that can talk to both.
fn relay_for(
    a: PeerId,
    b: PeerId,
    members: &BTreeMap<PeerId, f64>,
    broken: &BTreeSet<(PeerId, PeerId)>,
) -> Option<PeerId> {
    let talks = |x: PeerId, y: PeerId| !broken.contains(&(x.min(y), x.max(y)));
    members
        .iter()
        .filter(|&(&via, _)| via != a && via != b && talks(via, a) && talks(via, b))
        .max_by(|x, y| x.1.total_cmp(y.1).then(y.0.cmp(x.0)))
        .map(|(&via, _)| via)
}

/// Splits `elements` among members by their rates; parts below `least` are given up, if anybody has more.
pub fn split(elements: u64, rates: &[f64], least: u64) -> Vec<u64> {
    let mut shares = water_filling(rates);
    let threshold = least as f64 / elements.max(1) as f64;
    if shares.iter().any(|&share| share >= threshold) {
        shares.iter_mut().filter(|share| **share < threshold).for_each(|share| *share = 0.0);
    }
    apportion(elements, &shares)
}

/// The shares that make all members finish at once; who is too slow to own anything gets 0.
fn water_filling(rates: &[f64]) -> Vec<f64> {
    let n = rates.len();
    if n <= 2 {
        let total: f64 = rates.iter().sum();
        return rates.iter().map(|rate| rate / total).collect();
    }
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&a, &b| rates[b].total_cmp(&rates[a]).then(a.cmp(&b)));
    let mut total = 0.0;
    let mut level = f64::INFINITY;
    for (count, &index) in order.iter().enumerate() {
        // A member joins the owners only if it would be done with its own vector below the level of the others.
        if rates[index] * level <= 1.0 {
            break;
        }
        total += rates[index];
        level = (n as f64 - 2.0 + (count + 1) as f64) / total;
    }
    rates.iter().map(|rate| ((rate * level - 1.0) / (n as f64 - 2.0)).max(0.0)).collect()
}

/// Whole numbers in proportion to the shares that add up to `elements` (D'Hondt for the remainder).
fn apportion(elements: u64, shares: &[f64]) -> Vec<u64> {
    let total: f64 = shares.iter().sum();
    let mut parts: Vec<u64> = shares.iter().map(|s| (elements as f64 * s / total) as u64).collect();
    let mut left = elements.saturating_sub(parts.iter().sum());
    while left > 0 {
        let quotient = |index: usize| shares[index] / (parts[index] + 1) as f64;
        let best = (0..parts.len())
            .filter(|&index| shares[index] > 0.0)
            // Equal up to rounding: whoever has less.
            .max_by(|&a, &b| {
                let (x, y) = (quotient(a), quotient(b));
                if (x - y).abs() <= 1e-9 * x.max(y) { parts[b].cmp(&parts[a]) } else { x.total_cmp(&y) }
            })
            .unwrap_or(0);
        parts[best] += 1;
        left -= 1;
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_load_balance_vectors_of_hivemind_hold() {
        assert_eq!(split(60, &[0.55, 0.44, 0.40], 10), [41, 19, 0]);
        assert_eq!(split(60, &[0.32, 0.55, 0.44], 10), [0, 40, 20]);
        assert_eq!(split(2, &[0.55, 0.20, 0.44], 10), [1, 0, 1]);
    }

    #[test]
    fn a_pair_that_cannot_talk_goes_through_the_fastest_third() {
        let members: BTreeMap<PeerId, f64> = [(PeerId(1), 1.0), (PeerId(2), 1.0), (PeerId(3), 2.0)].into();
        let holdings = vec![(Lot(0), PeerId(1))];
        let broken = [(PeerId(1), PeerId(2))].into();
        let made = plan(StageId(0), &members, holdings, 100, &broken).unwrap();
        assert_eq!(made.next_hop(PeerId(2), PeerId(1)), PeerId(3));
        assert_eq!(made.next_hop(PeerId(2), PeerId(3)), PeerId(3));
        assert!(made.is_sound(Lots { microbatches: 1, lots: 1 }, 100));
    }

    #[test]
    fn a_pair_without_a_third_is_named() {
        let members: BTreeMap<PeerId, f64> = [(PeerId(1), 1.0), (PeerId(2), 1.0)].into();
        let broken = [(PeerId(1), PeerId(2))].into();
        let refused = plan(StageId(0), &members, Vec::new(), 100, &broken);
        assert_eq!(refused, Err((PeerId(1), PeerId(2))));
    }

    proptest! {
        #[test]
        fn parts_add_up_and_all_owners_finish_together(
            rates in prop::collection::vec(0.01f64..10.0, 1..20), elements in 1u64..10_000_000,
        ) {
            let parts = split(elements, &rates, 0);
            prop_assert_eq!(parts.iter().sum::<u64>(), elements);
            let n = rates.len() as f64;
            if n > 2.0 && elements > 100_000 {
                let time = |i: usize| (1.0 + (n - 2.0) * parts[i] as f64 / elements as f64) / rates[i];
                let owners: Vec<f64> = (0..rates.len()).filter(|&i| parts[i] > 1000).map(time).collect();
                let slowest = owners.iter().copied().fold(0.0, f64::max);
                prop_assert!(owners.iter().all(|t| *t > 0.98 * slowest), "{:?}", owners);
            }
        }
    }
}
