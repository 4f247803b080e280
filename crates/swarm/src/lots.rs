//! How a step's microbatches form lots, and which lots a holder's sum merges.
//!
//! The arithmetic mirrors `model::lots` on purpose: the two crates never see each other, and what must agree
//! is small: the cut of microbatches into lots, and the fixed binary tree over lots.

use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::ids::{Lot, Microbatch};

/// A step's microbatches cut into lots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lots {
    /// Microbatches of a step.
    pub microbatches: u32,
    /// Lots of a step: at least 1, at most as many as microbatches.
    pub lots: u32,
}

impl Lots {
    /// The microbatches of a lot, in order.
    pub fn microbatches_of(&self, lot: Lot) -> Range<u32> {
        let bound = |lot: u64| (lot * u64::from(self.microbatches) / u64::from(self.lots)) as u32;
        bound(lot.0.into())..bound(u64::from(lot.0) + 1)
    }

    /// Microbatches of the largest lot.
    pub fn largest(&self) -> u32 {
        self.microbatches.div_ceil(self.lots.max(1))
    }

    /// Whether the lot exists, and the microbatch is in it.
    pub fn contains(&self, lot: Lot, microbatch: Microbatch) -> bool {
        lot.0 < self.lots && self.microbatches_of(lot).contains(&microbatch.0)
    }

    /// All lots.
    pub fn all(&self) -> impl Iterator<Item = Lot> + use<> {
        (0..self.lots).map(Lot)
    }

    /// The lots whose sums a holder of `sealed` has merged with that of `lot`: what is lost if it is dropped.
    pub fn merged_with(&self, lot: Lot, sealed: &BTreeSet<Lot>) -> Range<u32> {
        self.lots_under(self.node_of(lot, sealed))
    }

    /// The highest node over `lot` whose lots are all in `sealed`: where the holder has the sum.
    fn node_of(&self, lot: Lot, sealed: &BTreeSet<Lot>) -> TreeNode {
        let mut node = TreeNode { level: 0, index: lot.0 };
        while (1u32 << node.level) < self.lots {
            let parent = TreeNode { level: node.level + 1, index: node.index / 2 };
            if !self.lots_under(parent).all(|other| other == lot.0 || sealed.contains(&Lot(other))) {
                break;
            }
            node = parent;
        }
        node
    }
}

/// A node of the tree over lots: `index << level` is its first lot, `1 << level` the lots it spans at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TreeNode {
    /// Height above the lots.
    pub level: u8,
    /// Place among the nodes of its level.
    pub index: u32,
}

impl TreeNode {
    /// All that a holder has, whatever that is: how `fast` reduction names a holder's one sum.
    pub const ALL: TreeNode = TreeNode { level: u8::MAX, index: 0 };
}

impl Lots {
    /// The nodes at which the holder of exactly `sealed`, all of which exist, has its sums, in the order of lots.
    pub fn nodes(&self, sealed: &BTreeSet<Lot>) -> Vec<TreeNode> {
        let mut nodes = Vec::new();
        let mut next = 0;
        while let Some(&lot) = sealed.range(Lot(next)..).next() {
            let node = self.node_of(lot, sealed);
            next = self.lots_under(node).end;
            nodes.push(node);
        }
        nodes
    }

    /// The node over all lots.
    pub fn root(&self) -> TreeNode {
        TreeNode { level: self.lots.next_power_of_two().trailing_zeros() as u8, index: 0 }
    }

    /// The lots under a node.
    pub fn lots_under(&self, node: TreeNode) -> Range<u32> {
        let bound = |index: u64| (index << node.level.min(31)).min(self.lots.into()) as u32;
        bound(node.index.into())..bound(u64::from(node.index) + 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_nodes_of_a_holder_cover_its_lots_once(lots in 1u32..40, bits in any::<u64>()) {
            let cut = Lots { microbatches: lots, lots };
            let sealed: BTreeSet<Lot> = cut.all().filter(|lot| bits >> lot.0 & 1 == 1).collect();
            let covered: Vec<Lot> =
                cut.nodes(&sealed).into_iter().flat_map(|node| cut.lots_under(node)).map(Lot).collect();
            prop_assert_eq!(covered, sealed.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn every_microbatch_is_in_exactly_one_lot(microbatches in 1u32..200, lots in 1u32..200) {
            let cut = Lots { microbatches, lots: lots.min(microbatches) };
            for microbatch in (0..microbatches).map(Microbatch) {
                prop_assert_eq!(cut.all().filter(|&lot| cut.contains(lot, microbatch)).count(), 1);
            }
        }
    }

    #[test]
    fn dropping_a_merged_lot_loses_its_neighbours() {
        let cut = Lots { microbatches: 8, lots: 4 };
        let three: BTreeSet<Lot> = [0, 1, 2].map(Lot).into();
        assert_eq!(cut.merged_with(Lot(1), &three), 0..2);
        assert_eq!(cut.merged_with(Lot(2), &three), 2..3);
    }
}
