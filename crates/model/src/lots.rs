//! Lots: how the gradients of a step are summed so that the bits do not depend on who computed what, or when.
//!
//! A step's microbatches form lots, contiguous runs of them. Within a lot the sum runs in the order of the
//! microbatches; over lots in a fixed binary tree. A holder merges neighbouring lots that it holds as soon as
//! both are sealed; the rest of the tree is summed by whoever reduces. Nothing is ever subtracted: revoking
//! drops a lot whole.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A step's microbatches cut into lots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lots {
    /// Microbatches of a step.
    pub microbatches: u32,
    /// Lots of a step; at least 1, at most as many as microbatches.
    pub lots: u32,
}

impl Lots {
    /// Whether a step can be cut like this; every other function may be asked only then.
    pub fn is_possible(&self) -> bool {
        (1..=self.microbatches).contains(&self.lots) && self.microbatches <= 1 << 31
    }

    /// The microbatches of a lot: as equal as can be, in order.
    pub fn microbatches_of(&self, lot: u32) -> Range<u32> {
        let bound = |lot: u32| (u64::from(lot) * u64::from(self.microbatches) / u64::from(self.lots)) as u32;
        bound(lot)..bound(lot + 1)
    }

    /// The lot of a microbatch.
    pub fn lot_of(&self, microbatch: u32) -> u32 {
        let guess = (u64::from(microbatch) * u64::from(self.lots) / u64::from(self.microbatches)) as u32;
        // The guess is the lot or the one before it: bounds are rounded down.
        if self.microbatches_of(guess).contains(&microbatch) { guess } else { guess + 1 }
    }
}

/// A node of the tree over lots: `index << level` is its first lot, `1 << level` the lots it spans at the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Node {
    /// Height above the lots.
    pub level: u8,
    /// Place among the nodes of its level.
    pub index: u32,
}

impl Node {
    /// The leaf of a lot.
    pub fn lot(lot: u32) -> Node {
        Node { level: 0, index: lot }
    }

    /// The root of the tree over `lots` lots.
    pub fn root(lots: u32) -> Node {
        Node { level: lots.next_power_of_two().trailing_zeros() as u8, index: 0 }
    }

    /// The lots under it, out of `lots`.
    pub fn lots(self, lots: u32) -> Range<u32> {
        // Wide enough for a node of any level and index that a stranger may name.
        let bound = |index: u128| (index << self.level.min(64)).min(u128::from(lots)) as u32;
        bound(self.index.into())..bound(u128::from(self.index) + 1)
    }

    fn parent(self) -> Node {
        Node { level: self.level + 1, index: self.index / 2 }
    }

    fn sibling(self) -> Node {
        Node { level: self.level, index: self.index ^ 1 }
    }
}

/// Sums at nodes of the tree over lots, merged as far as neighbours are at hand.
#[derive(Debug)]
pub struct Tree<S> {
    lots: u32,
    sums: BTreeMap<Node, S>,
}

impl<S> Tree<S> {
    /// An empty tree over `lots` lots.
    pub fn new(lots: u32) -> Tree<S> {
        Tree { lots, sums: BTreeMap::new() }
    }

    /// Whether the sum of this lot is in, alone or merged.
    pub fn holds(&self, lot: u32) -> bool {
        self.node_of(lot).is_some()
    }

    /// Enters the sum at `node`, and merges upwards: `add(left, right)` adds the right sum to the left one.
    /// Refuses, giving the sum back, what overlaps with a sum that is in.
    pub fn enter(&mut self, mut node: Node, mut sum: S, mut add: impl FnMut(&mut S, &S)) -> Result<(), S> {
        let lots = node.lots(self.lots);
        if lots.is_empty()
            || node.level > Node::root(self.lots).level
            || lots.clone().any(|lot| self.holds(lot))
        {
            return Err(sum);
        }
        while node != Node::root(self.lots) {
            let sibling = node.sibling();
            if let Some(other) = self.sums.remove(&sibling) {
                if sibling.index < node.index {
                    let mut left = other;
                    add(&mut left, &sum);
                    sum = left;
                } else {
                    add(&mut sum, &other);
                }
            } else if !sibling.lots(self.lots).is_empty() {
                break; // The neighbour exists, and is not in yet.
            }
            node = node.parent();
        }
        self.sums.insert(node, sum);
        Ok(())
    }

    /// Drops the sum that `lot` has entered, whole; returns the lots that are gone with it.
    pub fn drop_lot(&mut self, lot: u32) -> Range<u32> {
        match self.node_of(lot) {
            Some(node) => {
                self.sums.remove(&node);
                node.lots(self.lots)
            }
            None => 0..0,
        }
    }

    /// The nodes at which there are sums, in order.
    pub fn nodes(&self) -> impl Iterator<Item = Node> + '_ {
        self.sums.keys().copied()
    }

    /// Its nodes with their sums.
    pub fn into_sums(self) -> impl Iterator<Item = (Node, S)> {
        self.sums.into_iter()
    }

    /// The sum at a node.
    pub fn sum(&self, node: Node) -> Option<&S> {
        self.sums.get(&node)
    }

    /// The sum over all lots, once every lot is in.
    pub fn into_total(mut self) -> Option<S> {
        self.sums.remove(&Node::root(self.lots))
    }

    fn node_of(&self, lot: u32) -> Option<Node> {
        if lot >= self.lots {
            return None;
        }
        let mut node = Node::lot(lot);
        loop {
            if self.sums.contains_key(&node) {
                return Some(node);
            }
            if node == Node::root(self.lots) {
                return None;
            }
            node = node.parent();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_microbatch_is_in_exactly_one_lot(microbatches in 1u32..200, lots in 1u32..200) {
            let lots = Lots { microbatches, lots: lots.min(microbatches) };
            for microbatch in 0..microbatches {
                let owners: Vec<u32> =
                    (0..lots.lots).filter(|&lot| lots.microbatches_of(lot).contains(&microbatch)).collect();
                prop_assert_eq!(owners, vec![lots.lot_of(microbatch)]);
            }
            prop_assert!((0..lots.lots).all(|lot| !lots.microbatches_of(lot).is_empty()));
        }

        /// The sum is recorded as text, so that every association of the additions is visible.
        #[test]
        fn the_tree_is_the_same_for_any_order_and_any_holders(
            lots in 1u32..40,
            order in Just(()).prop_perturb(|(), mut rng| (0..40).map(|_| rng.random::<u32>()).collect::<Vec<_>>()),
            holders in 1u32..5,
        ) {
            let add = |left: &mut String, right: &String| *left = format!("({left}+{right})");
            let mut reference = Tree::new(lots);
            for lot in 0..lots {
                reference.enter(Node::lot(lot), lot.to_string(), add).unwrap();
            }
            let mut shuffled: Vec<u32> = (0..lots).collect();
            shuffled.sort_by_key(|&lot| order[lot as usize]);
            let mut held: Vec<Tree<String>> = (0..holders).map(|_| Tree::new(lots)).collect();
            for lot in shuffled {
                let holder = order[lot as usize] % holders;
                held[holder as usize].enter(Node::lot(lot), lot.to_string(), add).unwrap();
            }
            let mut total = Tree::new(lots);
            for tree in &held {
                for node in tree.nodes() {
                    total.enter(node, tree.sum(node).unwrap().clone(), add).unwrap();
                }
            }
            prop_assert_eq!(total.into_total(), reference.into_total());
        }
    }

    #[test]
    fn a_lot_entered_twice_is_refused() {
        let add = |left: &mut u32, right: &u32| *left += right;
        let mut tree = Tree::new(3);
        tree.enter(Node::lot(0), 1, add).unwrap();
        tree.enter(Node::lot(1), 1, add).unwrap();
        assert_eq!(tree.enter(Node::lot(1), 1, add), Err(1));
        assert_eq!(tree.enter(Node { level: 1, index: 0 }, 1, add), Err(1));
        assert_eq!(tree.enter(Node::lot(3), 1, add), Err(1));
        assert_eq!(tree.enter(Node { level: 9, index: 0 }, 1, add), Err(1));
    }

    #[test]
    fn revoking_a_merged_lot_gives_up_what_was_merged_with_it() {
        let add = |left: &mut u32, right: &u32| *left += right;
        let mut tree = Tree::new(4);
        (0..3).for_each(|lot| tree.enter(Node::lot(lot), 1, add).unwrap());
        assert_eq!(tree.drop_lot(1), 0..2);
        assert_eq!(tree.drop_lot(1), 0..0);
        assert!(tree.holds(2) && tree.into_total().is_none());
    }
}
