//! One worker's part in one attempt to reduce its stage: which contributions and parts have come, and who is
//! waited for. Out of place: nothing here touches the sums, so a void attempt costs nothing but time (rule 4).

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::*;
use crate::lots::TreeNode;
use crate::reduce::ReducePlan;
use crate::time::Time;

/// The attempt, as one member sees it.
#[derive(Clone, Debug)]
pub struct Reduction {
    /// Whose plan it is; with the attempt, its number.
    pub term: Term,
    /// Which attempt.
    pub attempt: Attempt,
    /// The plan.
    pub plan: ReducePlan,
    /// When it began here.
    pub began: Time,
    /// When to complain.
    pub patience: Time,
    /// Whether patience was once prolonged for an owner that may itself be waiting.
    pub doubted: bool,
    me: PeerId,
    own: BTreeSet<Lot>,
    own_parts: Vec<u32>,
    holders: BTreeSet<PeerId>,
    contributions: BTreeMap<u32, BTreeMap<PeerId, Sums>>,
    asked: BTreeSet<u32>,
    written: BTreeSet<u32>,
    /// What was prepared, once all parts are here.
    pub prepared: Option<(Digest, Vec<u8>)>,
}

/// A holder's sums of a part: where in the tree they stand, and what they are.
pub type Sums = (Vec<TreeNode>, Payload);

impl Reduction {
    /// Begins an attempt.
    pub fn new(
        me: PeerId,
        term: Term,
        attempt: Attempt,
        plan: ReducePlan,
        began: Time,
        patience: Time,
    ) -> Self {
        let own = plan.lots_of(me);
        let holders = plan.holders();
        let mine = |(index, _): (usize, _)| index as u32;
        let own_parts =
            plan.parts.iter().enumerate().filter(|(_, part)| part.owner == me).map(mine).collect();
        Reduction {
            own,
            own_parts,
            holders,
            term,
            attempt,
            plan,
            began,
            patience,
            doubted: false,
            me,
            contributions: BTreeMap::new(),
            asked: BTreeSet::new(),
            written: BTreeSet::new(),
            prepared: None,
        }
    }

    /// Whether the sum of a lot of ours counts.
    pub fn counts(&self, lot: Lot) -> bool {
        self.own.contains(&lot)
    }

    /// Takes a contribution to a part of ours; false if it is not wanted.
    pub fn contribute(&mut self, part: u32, holder: PeerId, sums: Sums) -> bool {
        let ours = self.plan.parts.get(part as usize).is_some_and(|part| part.owner == self.me);
        if !ours || !self.missing_holders(part).contains(&holder) {
            return false;
        }
        self.contributions.entry(part).or_default().insert(holder, sums);
        true
    }

    /// The parts of ours that became complete: each is to be added up, once.
    pub fn complete_parts(&mut self) -> Vec<(u32, Vec<Sums>)> {
        let mut complete = Vec::new();
        for part in self.own_parts.clone() {
            if self.missing_holders(part).is_empty() && self.asked.insert(part) {
                let sums = self.contributions.remove(&part).unwrap_or_default();
                complete.push((part, sums.into_values().collect()));
            }
        }
        complete
    }

    /// Takes note of a reduced part; false if it was here already or does not exist.
    pub fn write(&mut self, part: u32) -> bool {
        (part as usize) < self.plan.parts.len() && self.written.insert(part)
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
        let mut own = self.own_parts.iter();
        let holder = own.find_map(|&part| self.missing_holders(part).into_iter().next());
        if let Some(holder) = holder {
            return Some((holder, true));
        }
        let missing = |(index, _): &(usize, _)| !self.written.contains(&(*index as u32));
        let part = self.plan.parts.iter().enumerate().find(missing);
        part.filter(|(_, part)| part.owner != self.me).map(|(_, part)| (part.owner, false))
    }

    fn missing_holders(&self, part: u32) -> BTreeSet<PeerId> {
        let mut missing = if self.asked.contains(&part) { BTreeSet::new() } else { self.holders.clone() };
        missing.remove(&self.me);
        for holder in self.contributions.get(&part).into_iter().flat_map(|come| come.keys()) {
            missing.remove(holder);
        }
        missing
    }
}
