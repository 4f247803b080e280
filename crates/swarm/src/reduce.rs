//! How the members of a stage sum their gradients: who owns which part of the flat vector, who sends what to
//! whom, and by which way round when two of them cannot talk. Pure.
//!
//! The members of a site are a group. In each group every member owns a part of the vector: the group's holders
//! of lots send their sums of it to the owner. With more than one group, one of a part's owners is its root: the
//! others send it what their groups' sums come to, and it sends the result back; so every sum crosses the WAN
//! once, and every result once. The root adds up in the fixed tree over lots.
//!
//! A member that owns the fraction w of the vector and is one of N in its group sends 1 + (N − 2)·w vectors, so
//! the parts that finish together solve (1 + (N − 2)·wᵢ) / bᵢ = ξ with Σ wᵢ = 1, wᵢ ≥ 0: water filling, in closed
//! form where hivemind runs a linear program.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::ids::{Attempt, Lot, PeerId, SiteId, StageId};

/// One attempt to reduce one stage; the message's fence carries step and attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReducePlan {
    /// Which stage.
    pub stage: StageId,
    /// Everybody who needs the result: a group a site, each in order.
    pub groups: Vec<Vec<PeerId>>,
    /// The members that came after the plan was first made, in order, with the attempt since which they are in it:
    /// they lack what was sent before. Somebody who went and came back is one of them.
    pub joined: Vec<(PeerId, Attempt)>,
    /// Everybody whose sums count, in order, each with a stamp of which of its lots do: that is where 'exactly
    /// once' is made.
    pub holders: Vec<(PeerId, u64)>,
    /// Who adds up what.
    pub parts: Vec<Part>,
    /// Pairs that cannot talk, and who passes on between them.
    pub relays: Vec<Relay>,
    /// Why the plan is as it is, in plain words.
    pub reason: String,
}

/// A part of the flat vector.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Its first element.
    pub start: u64,
    /// The element after its last.
    pub end: u64,
    /// Who adds it up, group by group.
    pub owners: Vec<PeerId>,
    /// The group whose owner adds up the groups' sums.
    pub root: u16,
    /// The attempt in which its owners were chosen. What was sent of it since then is still of use.
    pub since: Attempt,
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

/// A member of a stage that can be in a reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Member {
    /// Where it stands.
    pub site: SiteId,
    /// What its uplink carries.
    pub bytes_per_s: f64,
}

impl Part {
    /// The same in equal parts of so many elements at the most.
    fn cut(self, most: u64) -> impl Iterator<Item = Part> {
        let len = self.end - self.start;
        let parts = len.div_ceil(most.max(1));
        let at =
            move |number: u64| self.start + (u128::from(len) * u128::from(number) / u128::from(parts)) as u64;
        let (owners, root, since) = (self.owners, self.root, self.since);
        (0..parts).map(move |n| Part { start: at(n), end: at(n + 1), owners: owners.clone(), root, since })
    }

    /// Who adds up the groups' sums.
    pub fn root_owner(&self) -> Option<PeerId> {
        self.owners.get(self.root as usize).copied()
    }
}

impl ReducePlan {
    /// Everybody who needs the result.
    pub fn members(&self) -> impl Iterator<Item = PeerId> {
        self.groups.iter().flatten().copied()
    }

    /// The group of a member.
    pub fn group_of(&self, peer: PeerId) -> Option<usize> {
        self.groups.iter().position(|group| group.binary_search(&peer).is_ok())
    }

    /// Whether a peer needs the result.
    pub fn has_member(&self, peer: PeerId) -> bool {
        self.group_of(peer).is_some()
    }

    /// Whether a peer's sums count.
    pub fn has_holder(&self, peer: PeerId) -> bool {
        self.stamp_of(peer).is_some()
    }

    /// The stamp of a holder's lots.
    pub fn stamp_of(&self, peer: PeerId) -> Option<u64> {
        let index = self.holders.binary_search_by_key(&peer, |(holder, _)| *holder).ok()?;
        Some(self.holders[index].1)
    }

    /// Who waits for a peer's sums of a part: the owner in its group, or for that owner the root.
    pub fn gatherer(&self, part: &Part, peer: PeerId) -> Option<PeerId> {
        let owner = part.owners.get(self.group_of(peer)?).copied()?;
        if owner == peer { part.root_owner() } else { Some(owner) }
    }

    /// Whose sums of a part its owner in a group waits for.
    pub fn contributors(&self, part: &Part, group: usize) -> BTreeSet<PeerId> {
        let Some(&owner) = part.owners.get(group) else { return BTreeSet::new() };
        let of = |group: &[PeerId]| group.iter().copied().filter(|peer| self.has_holder(*peer)).collect();
        let mut contributors: BTreeSet<PeerId> = of(&self.groups[group]);
        if part.root as usize == group {
            let others =
                self.groups.iter().zip(&part.owners).enumerate().filter(|(index, _)| *index != group);
            let holding =
                others.filter(|(_, (members, _))| members.iter().any(|peer| self.has_holder(*peer)));
            contributors.extend(holding.map(|(_, (_, owner))| *owner));
        }
        contributors.remove(&owner);
        contributors
    }

    /// Whom to hand a message from `from` for `to`.
    pub fn next_hop(&self, from: PeerId, to: PeerId) -> PeerId {
        let edge = (from.min(to), from.max(to));
        self.relays.iter().find(|relay| (relay.a, relay.b) == edge).map_or(to, |relay| relay.via)
    }

    /// Whether the plan makes sense: every part in order, its owners of their groups, nobody in two groups.
    pub fn is_sound(&self, elements: u64) -> bool {
        let members: BTreeSet<PeerId> = self.members().collect();
        let ordered = |peers: &[PeerId]| peers.windows(2).all(|pair| pair[0] < pair[1]);
        let mut at = 0;
        for part in &self.parts {
            let owned = part.owners.len() == self.groups.len()
                && part
                    .owners
                    .iter()
                    .zip(&self.groups)
                    .all(|(owner, group)| group.binary_search(owner).is_ok());
            if part.start != at || part.end <= at || !owned || part.root_owner().is_none() {
                return false;
            }
            at = part.end;
        }
        at == elements
            && members.len() == self.groups.iter().map(Vec::len).sum::<usize>()
            && self.groups.iter().all(|group| ordered(group))
            && self.joined.iter().all(|(peer, _)| members.contains(peer))
            && self.holders.windows(2).all(|pair| pair[0].0 < pair[1].0)
            && self.holders.iter().all(|(peer, _)| members.contains(peer))
            && self.relays.iter().all(|relay| members.contains(&relay.via))
    }
}

/// What tells a set of lots, in order, from another (FNV-1a).
pub fn stamp(lots: &[Lot]) -> u64 {
    lots.iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, lot| (hash ^ u64::from(lot.0)).wrapping_mul(0x0100_0000_01b3))
}

/// Makes the plan for so many elements, in parts of `most` at the most. `broken` names pairs that could not talk in an earlier attempt; a pair without a third
/// member to pass on is returned as an error, and its caller excludes one of the two.
pub fn plan(
    stage: StageId,
    attempt: Attempt,
    members: &BTreeMap<PeerId, Member>,
    holders: Vec<(PeerId, u64)>,
    (elements, most): (u64, u64),
    broken: &BTreeSet<(PeerId, PeerId)>,
) -> Result<ReducePlan, (PeerId, PeerId)> {
    let mut sites: BTreeMap<SiteId, Vec<(PeerId, f64)>> = BTreeMap::new();
    for (&peer, member) in members {
        sites.entry(member.site).or_default().push((peer, member.bytes_per_s));
    }
    let groups: Vec<Vec<(PeerId, f64)>> = sites.into_values().collect();
    let parts = parts(&groups, elements, attempt);
    let parts: Vec<Part> = parts.into_iter().flat_map(|part| part.cut(most)).collect();
    let mut relays = Vec::new();
    for &(a, b) in broken {
        if members.contains_key(&a) && members.contains_key(&b) {
            let via = relay_for(a, b, members, broken).ok_or((a, b))?;
            relays.push(Relay { a, b, via });
        }
    }
    let across = if groups.len() > 1 { ", then across them" } else { "" };
    let reason = format!(
        "{} members in {} sites share the sum by their uplinks, in each site{across}; {} parts, {} pairs go \
         through a relay",
        members.len(),
        groups.len(),
        parts.len(),
        relays.len()
    );
    let groups = groups.iter().map(|group| group.iter().map(|(peer, _)| *peer).collect()).collect();
    Ok(ReducePlan { stage, groups, joined: Vec::new(), holders, parts, relays, reason })
}

/// The same again after some are `gone`, of whom some may have come back: only the parts of who is gone get other
/// owners, and all else that was sent is still of use. `None`: it cannot be mended, and a new plan is needed.
/// Within one group only: a group's sum that is on its way to the root would have to be taken back.
pub fn mend(
    before: &ReducePlan,
    attempt: Attempt,
    gone: &BTreeSet<PeerId>,
    members: &BTreeMap<PeerId, Member>,
    holders: Vec<(PeerId, u64)>,
) -> Option<ReducePlan> {
    let mut sites = members.values().map(|member| member.site);
    let site = sites.next()?;
    if before.groups.len() != 1 || !before.relays.is_empty() || sites.any(|other| other != site) {
        return None;
    }
    let stayed = |peer: &PeerId| before.has_member(*peer) && !gone.contains(peer);
    let since = |peer| before.joined.iter().find(|(joined, _)| joined == peer).map(|(_, since)| *since);
    let joined = members.keys().filter_map(|peer| {
        let since = if stayed(peer) { since(peer) } else { Some(attempt) };
        Some((*peer, since?))
    });
    let joined = joined.collect();
    let mut owned: BTreeMap<PeerId, u32> = members.keys().map(|&peer| (peer, 0)).collect();
    let mut parts = before.parts.clone();
    for owner in parts.iter().flat_map(|part| &part.owners).filter(|owner| stayed(owner)) {
        owned.entry(*owner).and_modify(|count| *count += 1);
    }
    let mut changed = 0;
    for part in &mut parts {
        if part.owners.iter().any(|owner| !stayed(owner) || !members.contains_key(owner)) {
            let (&heir, count) = owned.iter_mut().min_by_key(|(peer, count)| (**count, **peer))?;
            *count += 1;
            (part.owners, part.since) = (vec![heir], attempt);
            changed += 1;
        }
    }
    let reason = format!("somebody is gone: {changed} of {} parts have another owner", parts.len());
    let groups = vec![members.keys().copied().collect()];
    Some(ReducePlan { stage: before.stage, groups, joined, holders, parts, relays: Vec::new(), reason })
}

/// The vector cut so that a part has one owner in each group, and one of them as its root.
fn parts(groups: &[Vec<(PeerId, f64)>], elements: u64, since: Attempt) -> Vec<Part> {
    let owned: Vec<Vec<(u64, PeerId)>> = groups.iter().map(|group| ends(group, elements)).collect();
    let cuts: BTreeSet<u64> = owned.iter().flatten().map(|(end, _)| *end).collect();
    let weights: Vec<f64> = groups.iter().map(|group| group.iter().map(|(_, rate)| rate).sum()).collect();
    let mut parts = Vec::new();
    let mut start = 0;
    for cut in cuts {
        let owner =
            |ends: &Vec<(u64, PeerId)>| ends.iter().find(|(end, _)| *end >= cut).map(|(_, peer)| *peer);
        let owners: Vec<PeerId> = owned.iter().filter_map(owner).collect();
        for (root, len) in apportion(cut - start, &weights).into_iter().enumerate() {
            if len > 0 {
                let (end, owners) = (start + len, owners.clone());
                parts.push(Part { start, end, owners, root: root as u16, since });
                start += len;
            }
        }
    }
    parts
}

/// Who of a group owns the vector up to where.
fn ends(group: &[(PeerId, f64)], elements: u64) -> Vec<(u64, PeerId)> {
    let rates: Vec<f64> = group.iter().map(|(_, rate)| *rate).collect();
    // Below this many elements a part costs more in latency than it saves.
    let least = elements / (8 * group.len() as u64).max(1);
    let mut end = 0;
    let mut ends = Vec::new();
    for (&(owner, _), len) in group.iter().zip(split(elements, &rates, least)) {
        if len > 0 {
            end += len;
            ends.push((end, owner));
        }
    }
    ends
}

/// The fastest member that can talk to both.
fn relay_for(
    a: PeerId,
    b: PeerId,
    members: &BTreeMap<PeerId, Member>,
    broken: &BTreeSet<(PeerId, PeerId)>,
) -> Option<PeerId> {
    let talks = |x: PeerId, y: PeerId| !broken.contains(&(x.min(y), x.max(y)));
    members
        .iter()
        .filter(|&(&via, _)| via != a && via != b && talks(via, a) && talks(via, b))
        .max_by(|x, y| x.1.bytes_per_s.total_cmp(&y.1.bytes_per_s).then(y.0.cmp(x.0)))
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

    fn members(of: &[(u32, u16, f64)]) -> BTreeMap<PeerId, Member> {
        let member =
            |&(peer, site, bytes_per_s): &_| (PeerId(peer), Member { site: SiteId(site), bytes_per_s });
        of.iter().map(member).collect()
    }

    #[test]
    fn with_two_sites_every_sum_crosses_once_and_every_result_once() {
        let members = members(&[(0, 0, 1.0), (1, 0, 1.0), (2, 0, 1.0), (3, 1, 1.0), (4, 1, 2.0)]);
        let holders = members.keys().map(|&peer| (peer, 0)).collect();
        let made = plan(StageId(0), Attempt(1), &members, holders, (1000, 1000), &BTreeSet::new()).unwrap();
        assert!(made.is_sound(1000));
        let mut crossing = 0;
        for part in &made.parts {
            for group in 0..2 {
                for peer in made.contributors(part, group) {
                    assert_eq!(made.gatherer(part, peer), Some(part.owners[group]));
                    crossing += if made.group_of(peer) == Some(group) { 0 } else { part.end - part.start };
                }
            }
        }
        assert_eq!(crossing, 1000);
    }

    #[test]
    fn long_parts_are_cut_and_nothing_else_changes() {
        let members = members(&[(0, 0, 1.0), (1, 0, 3.0), (2, 1, 2.0)]);
        let cut = |most| plan(StageId(0), Attempt(1), &members, Vec::new(), (1000, most), &BTreeSet::new());
        let (whole, cut) = (cut(1000).unwrap(), cut(99).unwrap());
        assert!(cut.is_sound(1000) && cut.parts.iter().all(|part| part.end - part.start <= 99));
        for part in &cut.parts {
            let of = whole.parts.iter().find(|whole| whole.start <= part.start && part.end <= whole.end);
            let of = of.expect("a part lies in one of those that it was cut from");
            assert_eq!((&part.owners, part.root), (&of.owners, of.root));
        }
    }

    #[test]
    fn the_load_balance_vectors_of_hivemind_hold() {
        assert_eq!(split(60, &[0.55, 0.44, 0.40], 10), [41, 19, 0]);
        assert_eq!(split(60, &[0.32, 0.55, 0.44], 10), [0, 40, 20]);
        assert_eq!(split(2, &[0.55, 0.20, 0.44], 10), [1, 0, 1]);
    }

    #[test]
    fn when_an_owner_is_gone_only_its_parts_change() {
        let all = members(&[(0, 0, 1.0), (1, 0, 1.0), (2, 0, 1.0), (3, 0, 1.0)]);
        let holders: Vec<(PeerId, u64)> = all.keys().map(|&peer| (peer, 7)).collect();
        let made = plan(StageId(0), Attempt(1), &all, holders.clone(), (400, 40), &BTreeSet::new()).unwrap();
        let mut left = all.clone();
        left.remove(&PeerId(2));
        let gone = [PeerId(2)].into();
        // Whether it came back makes no difference to its parts: what was sent to it is lost.
        for (members, joined) in [(left, vec![]), (all, vec![(PeerId(2), Attempt(2))])] {
            let mended = mend(&made, Attempt(2), &gone, &members, holders[..2].to_vec()).unwrap();
            assert!(mended.is_sound(400));
            assert_eq!(mended.joined, joined);
            for (before, after) in made.parts.iter().zip(&mended.parts) {
                assert_eq!(after.since, Attempt(if before.owners == [PeerId(2)] { 2 } else { 1 }));
            }
            let again = mend(&mended, Attempt(3), &BTreeSet::new(), &members, holders[..2].to_vec()).unwrap();
            assert_eq!((again.joined, again.parts), (joined, mended.parts));
        }
    }

    #[test]
    fn a_pair_that_cannot_talk_goes_through_the_fastest_third() {
        let members = members(&[(1, 0, 1.0), (2, 0, 1.0), (3, 0, 2.0)]);
        let broken = [(PeerId(1), PeerId(2))].into();
        let made = plan(StageId(0), Attempt(1), &members, vec![(PeerId(1), 0)], (100, 100), &broken).unwrap();
        assert_eq!(made.next_hop(PeerId(2), PeerId(1)), PeerId(3));
        assert_eq!(made.next_hop(PeerId(2), PeerId(3)), PeerId(3));
        assert!(made.is_sound(100));
    }

    #[test]
    fn a_pair_without_a_third_is_named() {
        let broken = [(PeerId(1), PeerId(2))].into();
        let members = members(&[(1, 0, 1.0), (2, 0, 1.0)]);
        let refused = plan(StageId(0), Attempt(1), &members, Vec::new(), (100, 100), &broken);
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
