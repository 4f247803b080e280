//! The gradients of a step while they are summed: open lots, and the tree of sealed ones.

use std::collections::{BTreeMap, BTreeSet};

use crate::lots::{Lots, Node, Tree};
use crate::stage::{Folded, StageError};

/// The sums of one step; `B` is a gradient.
pub struct StepSums<B> {
    lots: Lots,
    open: BTreeMap<u32, OpenLot<B>>,
    sealed: Tree<B>,
    /// Sealed lots that were merged whatever their places in the tree.
    merged: Option<(BTreeSet<u32>, B)>,
}

/// A lot that lacks microbatches.
struct OpenLot<B> {
    /// The microbatch whose turn it is.
    next: u32,
    sum: Option<B>,
    /// Gradients that came before their turn.
    early: BTreeMap<u32, B>,
}

impl<B> StepSums<B> {
    pub fn new(lots: Lots) -> StepSums<B> {
        StepSums { lots, open: BTreeMap::new(), sealed: Tree::new(lots.lots), merged: None }
    }

    /// Whether the step is cut into lots like this, and has this microbatch.
    pub fn fits(&self, lots: Lots, microbatch: u32) -> bool {
        lots == self.lots && microbatch < lots.microbatches
    }

    /// Refuses a microbatch that is in already.
    pub fn check(&self, microbatch: u32) -> Result<(), StageError> {
        let lots = self.lots;
        let lot = lots.lot_of(microbatch);
        let counted = self.sealed.holds(lot)
            || self.merged.as_ref().is_some_and(|(lots, _)| lots.contains(&lot))
            || self.open.get(&lot).is_some_and(|o| microbatch < o.next || o.early.contains_key(&microbatch));
        if counted { Err(StageError::Twice { microbatch, lot }) } else { Ok(()) }
    }

    /// Folds a gradient that was checked: `add(sum, gradient)`.
    pub fn fold(&mut self, microbatch: u32, gradient: B, mut add: impl FnMut(&mut B, &B)) -> Folded {
        let lot = self.lots.lot_of(microbatch);
        let members = self.lots.microbatches_of(lot);
        let open = self.open.entry(lot).or_insert_with(|| OpenLot {
            next: members.start,
            sum: None,
            early: BTreeMap::new(),
        });
        open.early.insert(microbatch, gradient);
        while let Some(gradient) = open.early.remove(&open.next) {
            match &mut open.sum {
                Some(sum) => add(sum, &gradient),
                None => open.sum = Some(gradient),
            }
            open.next += 1;
        }
        if open.next < members.end {
            return Folded::Open;
        }
        if let Some(sum) = self.open.remove(&lot).and_then(|open| open.sum) {
            // It cannot overlap: `check` refuses microbatches of sealed lots.
            let _ = self.sealed.enter(Node::lot(lot), sum, add);
        }
        Folded::Sealed
    }

    /// Adds all sealed lots up into one sum, in the order in which they come.
    pub fn merge(&mut self, mut add: impl FnMut(&mut B, &B)) {
        let sealed = std::mem::replace(&mut self.sealed, Tree::new(self.lots.lots));
        for (node, sum) in sealed.into_sums() {
            let lots = node.lots(self.lots.lots);
            match &mut self.merged {
                Some((merged, total)) => {
                    add(total, &sum);
                    merged.extend(lots);
                }
                None => self.merged = Some((lots.collect(), sum)),
            }
        }
    }

    /// A lot of which something is here.
    pub fn begun(&self, lots: impl IntoIterator<Item = u32>) -> Option<u32> {
        let merged = |lot: &u32| self.merged.as_ref().is_some_and(|(merged, _)| merged.contains(lot));
        lots.into_iter().find(|lot| self.sealed.holds(*lot) || self.open.contains_key(lot) || merged(lot))
    }

    /// The sum of sealed lots, of which nothing was here, becomes one of ours: at its node of the tree, or, if it has
    /// none, merged with what was merged before.
    pub fn enter(
        &mut self,
        node: Option<Node>,
        lots: impl IntoIterator<Item = u32>,
        sum: B,
        mut add: impl FnMut(&mut B, &B),
    ) {
        match (node, &mut self.merged) {
            // It cannot overlap: nothing of it was here.
            (Some(node), _) => drop(self.sealed.enter(node, sum, add)),
            (None, Some((merged, total))) => {
                add(total, &sum);
                merged.extend(lots);
            }
            (None, merged) => *merged = Some((lots.into_iter().collect(), sum)),
        }
    }

    /// Drops a lot, open or sealed, whole; returns the lots that are gone with it.
    pub fn revoke(&mut self, lot: u32) -> Vec<u32> {
        if self.open.remove(&lot).is_some() {
            return vec![lot];
        }
        match self.merged.take_if(|(lots, _)| lots.contains(&lot)) {
            Some((lots, _)) => lots.into_iter().collect(),
            None => self.sealed.drop_lot(lot).collect(),
        }
    }

    /// Whether the sum over all lots is there.
    pub fn is_whole(&self) -> bool {
        self.nodes() == [Node::root(self.lots.lots)]
    }

    /// The sum over all lots.
    pub fn into_total(self) -> Option<B> {
        self.sealed.into_total()
    }

    /// What was merged.
    pub fn merged(&self) -> Option<&(BTreeSet<u32>, B)> {
        self.merged.as_ref()
    }

    pub fn nodes(&self) -> Vec<Node> {
        self.sealed.nodes().collect()
    }

    pub fn sum(&self, node: Node) -> Option<&B> {
        self.sealed.sum(node)
    }
}
