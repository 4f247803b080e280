//! One worker's part in one attempt to reduce its stage: which contributions and parts have come, and who is
//! waited for. Out of place: nothing here touches the sums, so a void attempt costs nothing but time (rule 4).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::ids::*;
use crate::lots::{Lots, TreeNode};
use crate::reduce::{Part, ReducePlan};
use crate::spec::Reduce;
use crate::time::Time;
use crate::worker::sharing::Sharing;

/// The attempt, as one member sees it.
#[derive(Clone, Debug)]
pub struct Reduction {
    /// Whose plan it is; with the attempt, its number.
    pub term: Term,
    /// Which attempt.
    pub attempt: Attempt,
    /// The plan.
    pub plan: Arc<ReducePlan>,
    /// When it began here.
    pub began: Time,
    /// When to complain.
    pub patience: Time,
    /// Whether patience was once prolonged for an owner that may itself be waiting.
    pub doubted: bool,
    me: PeerId,
    group: usize,
    own: BTreeSet<Lot>,
    /// The parts that are ours to add up in our group.
    gatherings: BTreeMap<u32, Gathering>,
    written: BTreeSet<u32>,
    /// The parts of others that we have sent, or are sending, our sums of.
    sent: BTreeSet<u32>,
    /// Members that were not in the attempt before.
    newcomers: Vec<PeerId>,
    /// What was prepared, once all parts are here.
    pub prepared: Option<(Digest, Vec<u8>)>,
    /// The last round of adding up what is shared with other stages, after that.
    pub sharing: Option<Sharing>,
}

/// A part of ours: what has come, and what has not.
#[derive(Clone, Debug)]
struct Gathering {
    missing: BTreeSet<PeerId>,
    come: BTreeMap<PeerId, Sums>,
    /// It was asked for: the nodes at which its sum will stand.
    asked: Option<Vec<TreeNode>>,
    /// The result, once it is there: who comes later gets it too.
    result: Option<Payload>,
}

/// Some sums of a part: where in the tree they stand, and what they are.
pub type Sums = (Vec<TreeNode>, Payload);

/// A part that is to be added up.
#[derive(Clone, Debug, PartialEq)]
pub struct Due {
    /// Which part.
    pub part: u32,
    /// Its first element.
    pub start: u64,
    /// The element after its last.
    pub end: u64,
    /// Our own nodes.
    pub own: Vec<TreeNode>,
    /// What came.
    pub come: Vec<Sums>,
    /// The nodes at which the sum is wanted.
    pub into: Vec<TreeNode>,
}

impl Gathering {
    fn new(missing: BTreeSet<PeerId>) -> Gathering {
        Gathering { missing, come: BTreeMap::new(), asked: None, result: None }
    }
}

impl Reduction {
    /// Takes over what an earlier attempt of the same step had, as far as it is still of use: parts whose owners
    /// stayed, and sums whose lots did. A part that was added up stays as it is, whoever of its holders is gone.
    /// Whether anything could be kept.
    pub fn take_over(&mut self, before: Reduction) -> bool {
        let same_cut = before.plan.parts.len() == self.plan.parts.len();
        if before.term != self.term || !same_cut {
            return false;
        }
        let kept: BTreeSet<u32> = (self.plan.parts.iter().zip(&before.plan.parts).zip(0..))
            .filter(|((now, then), _)| {
                (now.start, now.end, now.since) == (then.start, then.end, then.since)
                    && now.since <= before.attempt
            })
            .map(|(_, index)| index)
            .collect();
        // In an attempt between the two, of which we have not heard, our lots may have been others, and what we sent
        // of these thrown away.
        let unchanged = self.plan.stamp_of(self.me) == before.plan.stamp_of(self.me)
            && self.attempt.0 == before.attempt.0 + 1;
        self.sent = before.sent.into_iter().filter(|part| unchanged && kept.contains(part)).collect();
        self.written = before.written.into_iter().filter(|part| kept.contains(part)).collect();
        let joined = self.plan.joined.iter().filter(|(_, since)| *since > before.attempt);
        self.newcomers = joined.map(|(peer, _)| *peer).collect();
        for (part, earlier) in before.gatherings.into_iter().filter(|(part, _)| kept.contains(part)) {
            let Some(gathering) = self.gatherings.get_mut(&part) else { continue };
            if earlier.asked.is_some() {
                *gathering = Gathering { missing: BTreeSet::new(), ..earlier };
                continue;
            }
            for (holder, sums) in earlier.come {
                let same = self.plan.stamp_of(holder) == before.plan.stamp_of(holder);
                if same && gathering.missing.remove(&holder) {
                    gathering.come.insert(holder, sums);
                }
            }
        }
        !kept.is_empty()
    }

    /// Whether what an attempt sent of a part is still of use.
    pub fn is_current(&self, part: u32, attempt: Attempt) -> bool {
        let since = self.plan.parts.get(part as usize).map(|part| part.since);
        since.is_some_and(|since| since <= attempt) && attempt <= self.attempt
    }

    /// The results that newcomers lack and have from us.
    pub fn for_newcomers(&self) -> Vec<(u32, PeerId, Payload)> {
        let mut results = Vec::new();
        for (&part, gathering) in &self.gatherings {
            let newcomers = self.newcomers.iter().filter(|peer| **peer != self.me);
            results.extend(
                gathering
                    .result
                    .iter()
                    .flat_map(|&result| newcomers.clone().map(move |&peer| (part, peer, result))),
            );
        }
        results
    }

    /// Begins an attempt in which these lots of ours count; `None` if we are not in it.
    pub fn new(
        me: PeerId,
        (term, attempt): (Term, Attempt),
        plan: Arc<ReducePlan>,
        own: BTreeSet<Lot>,
        began: Time,
        patience: Time,
    ) -> Option<Reduction> {
        let group = plan.group_of(me)?;
        let mut gatherings = BTreeMap::new();
        for (part, index) in plan.parts.iter().zip(0..) {
            if part.owners.get(group) == Some(&me) {
                let missing = plan.contributors(part, group);
                gatherings.insert(index, Gathering::new(missing));
            }
        }
        Some(Reduction {
            term,
            attempt,
            plan,
            began,
            patience,
            doubted: false,
            me,
            group,
            own,
            gatherings,
            written: BTreeSet::new(),
            sent: BTreeSet::new(),
            newcomers: Vec::new(),
            prepared: None,
            sharing: None,
        })
    }

    /// Whether the sum of a lot of ours counts.
    pub fn counts(&self, lot: Lot) -> bool {
        self.own.contains(&lot)
    }

    /// Where in the tree our own sums stand.
    pub fn own_nodes(&self, lots: Lots, reduce: Reduce) -> Vec<TreeNode> {
        nodes(&self.own, lots, reduce)
    }

    /// The parts that we do not add up for our group, with who does, as far as our sums of them are not on their
    /// way, and the result is not here already: whatever has become of our lots since, an earlier attempt has added
    /// that part up, and it stays. Everybody begins with another owner, and goes round, so that nobody is flooded and
    /// nobody waits.
    pub fn to_send(&mut self) -> Vec<(u32, Part, PeerId)> {
        let mut to_send = Vec::new();
        let mut rounds: BTreeMap<PeerId, u32> = BTreeMap::new();
        for (part, index) in self.plan.parts.iter().zip(0..) {
            let owner = part.owners.get(self.group).copied().filter(|owner| *owner != self.me);
            let wanted = |_: &PeerId| !self.written.contains(&index) && self.sent.insert(index);
            if let Some(owner) = owner.filter(wanted) {
                let round = rounds.entry(owner).or_default();
                *round += 1;
                to_send.push(((*round, owner < self.me, owner), (index, part.clone(), owner)));
            }
        }
        to_send.sort_by_key(|(turn, _)| *turn);
        to_send.into_iter().map(|(_, send)| send).collect()
    }

    /// Takes a contribution to a part of ours; false if it is not wanted.
    pub fn contribute(&mut self, part: u32, holder: PeerId, sums: Sums) -> bool {
        let Some(gathering) = self.gatherings.get_mut(&part) else { return false };
        let wanted = gathering.missing.remove(&holder);
        if wanted {
            gathering.come.insert(holder, sums);
        }
        wanted
    }

    /// The parts of ours that became complete: each is to be added up, once.
    pub fn due(&mut self, lots: Lots, reduce: Reduce) -> Vec<Due> {
        let own = nodes(&self.own, lots, reduce);
        let mut due = Vec::new();
        for (&index, gathering) in &mut self.gatherings {
            let something = !own.is_empty() || !gathering.come.is_empty();
            if !something || !gathering.missing.is_empty() || gathering.asked.is_some() {
                continue;
            }
            let Some(part) = self.plan.parts.get(index as usize) else { continue };
            let come: Vec<Sums> = std::mem::take(&mut gathering.come).into_values().collect();
            let into = match (part.root as usize == self.group, reduce) {
                (_, Reduce::Fast) => vec![TreeNode::ALL],
                (true, Reduce::Exact) => vec![lots.root()],
                (false, Reduce::Exact) => {
                    let all = come.iter().flat_map(|(nodes, _)| nodes).chain(&own);
                    nodes(&all.flat_map(|&node| lots.lots_under(node)).map(Lot).collect(), lots, reduce)
                }
            };
            gathering.asked = Some(into.clone());
            let (start, end) = (part.start, part.end);
            due.push(Due { part: index, start, end, own: own.clone(), come, into });
        }
        due
    }

    /// The nodes at which the sum of a part was asked for.
    pub fn asked(&self, part: u32) -> Option<&[TreeNode]> {
        self.gatherings.get(&part).and_then(|gathering| gathering.asked.as_deref())
    }

    /// Whom the result of a part goes to from us: from the root to the other groups' owners, and from every owner
    /// to its group.
    pub fn recipients(&self, part: u32) -> Vec<PeerId> {
        let Some(part) = self.plan.parts.get(part as usize) else { return Vec::new() };
        if part.owners.get(self.group) != Some(&self.me) {
            return Vec::new();
        }
        let others = part.owners.iter().filter(|_| part.root as usize == self.group);
        let group = self.plan.groups[self.group].iter();
        let all: BTreeSet<PeerId> = others.chain(group).copied().filter(|peer| *peer != self.me).collect();
        let (before, after): (Vec<PeerId>, Vec<PeerId>) = all.into_iter().partition(|peer| *peer < self.me);
        after.into_iter().chain(before).collect()
    }

    /// Takes note of a reduced part; false if it was here already or does not exist.
    pub fn write(&mut self, part: u32, payload: Payload) -> bool {
        if let Some(gathering) = self.gatherings.get_mut(&part) {
            gathering.result = Some(payload);
        }
        (part as usize) < self.plan.parts.len() && self.written.insert(part)
    }

    /// Whether we add a part up for our group, and others get it from us.
    pub fn is_ours(&self, part: u32) -> bool {
        self.gatherings.contains_key(&part)
    }

    /// Whether the whole reduced gradient is here.
    pub fn is_whole(&self) -> bool {
        self.written.len() == self.plan.parts.len()
    }

    /// Who is waited for, and whether it is certain that this very peer is late: an owner may itself be waiting.
    pub fn waits_for(&self) -> Option<(PeerId, bool)> {
        if self.prepared.is_some() || self.is_whole() {
            return None;
        }
        let group = &self.plan.groups[self.group];
        let holder = self.gatherings.values().find_map(|gathering| gathering.missing.first().copied());
        if let Some(holder) = holder {
            return Some((holder, group.binary_search(&holder).is_ok()));
        }
        let (part, _) = self.plan.parts.iter().zip(0..).find(|(_, index)| !self.written.contains(index))?;
        let owner = part.owners.get(self.group).copied().filter(|owner| *owner != self.me);
        owner.or(part.root_owner()).filter(|owner| *owner != self.me).map(|owner| (owner, false))
    }
}

fn nodes(own: &BTreeSet<Lot>, lots: Lots, reduce: Reduce) -> Vec<TreeNode> {
    match reduce {
        _ if own.is_empty() => Vec::new(),
        Reduce::Exact => lots.nodes(own),
        Reduce::Fast => vec![TreeNode::ALL],
    }
}
