//! The ledger: which peer's sum of which lot counts in which stage. The truth of 'exactly once', for one step.
//!
//! The first complete seal of (lot, stage) wins, whatever the grant: a complete lot is the same sum whoever made
//! it, so there is no reason to throw one away. A second one is refused, and its holder drops it. It belongs to
//! the coordinator, is never written down, and is rebuilt from the workers' seals after a restart.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::*;
use crate::lots::Lots;
use crate::small::SmallMap;

/// The ledger of the open step.
#[derive(Clone, Debug)]
pub struct Ledger {
    lots: Lots,
    holders: Vec<Vec<Option<PeerId>>>,
    open: Vec<u32>,
    /// How many lots each peer has sealed that count, of whatever stage.
    counts: SmallMap<PeerId, u32>,
}

impl Ledger {
    /// Everything open.
    pub fn new(stages: u16, lots: Lots) -> Ledger {
        let open = vec![lots.lots; stages as usize];
        let holders = vec![vec![None; lots.lots as usize]; stages as usize];
        Ledger { lots, holders, open, counts: SmallMap::default() }
    }

    /// A peer says that it has all of a lot; whether its sum counts. Saying it again changes nothing.
    pub fn seal(&mut self, stage: StageId, lot: Lot, peer: PeerId) -> bool {
        let Some(holder) = self.holders.get_mut(stage.0 as usize).and_then(|s| s.get_mut(lot.0 as usize))
        else {
            return false;
        };
        if holder.is_none() {
            *holder = Some(peer);
            self.open[stage.0 as usize] -= 1;
            *self.counts.get_or_insert_with(peer, || 0) += 1;
        }
        *holder == Some(peer)
    }

    /// Who has sealed a lot of a stage.
    pub fn holder(&self, stage: StageId, lot: Lot) -> Option<PeerId> {
        self.holders.get(stage.0 as usize)?.get(lot.0 as usize).copied().flatten()
    }

    /// A peer has lost a lot; whether it counted.
    pub fn reopen(&mut self, stage: StageId, lot: Lot, peer: PeerId) -> bool {
        let holder = self.holders.get_mut(stage.0 as usize).and_then(|s| s.get_mut(lot.0 as usize));
        match holder {
            Some(holder) if *holder == Some(peer) => {
                *holder = None;
                self.open[stage.0 as usize] += 1;
                if let Some(count) = self.counts.get_mut(peer) {
                    *count -= 1;
                }
                true
            }
            _ => false,
        }
    }

    /// Another peer has these lots of somebody's, all of them or none; whether they are its now.
    pub fn hand_over(&mut self, stage: StageId, lots: &[Lot], from: PeerId, to: PeerId) -> bool {
        let all = lots.iter().all(|&lot| self.holder(stage, lot) == Some(from));
        if all {
            for &lot in lots {
                self.reopen(stage, lot, from);
                self.seal(stage, lot, to);
            }
        }
        all
    }

    /// A peer is gone from a stage, with all its sums; the lots that are open again.
    pub fn drop_peer(&mut self, stage: StageId, peer: PeerId) -> Vec<Lot> {
        self.lots.all().filter(|&lot| self.reopen(stage, lot, peer)).collect()
    }

    /// Whether every lot of a stage is sealed.
    pub fn is_sealed(&self, stage: StageId) -> bool {
        self.open[stage.0 as usize] == 0
    }

    /// Lots of a stage that are not sealed.
    pub fn open_lots(&self, stage: StageId) -> u32 {
        self.open[stage.0 as usize]
    }

    /// Who has sealed a lot, stage by stage.
    pub fn held(&self, lot: Lot) -> Vec<Option<PeerId>> {
        self.holders.iter().map(|stage| stage.get(lot.0 as usize).copied().flatten()).collect()
    }

    /// Whether a lot is sealed in every stage.
    pub fn is_sealed_everywhere(&self, lot: Lot) -> bool {
        self.holders.iter().all(|stage| stage.get(lot.0 as usize).is_some_and(Option::is_some))
    }

    /// Whether every lot is sealed in every stage.
    pub fn is_done(&self) -> bool {
        self.open.iter().all(|&open| open == 0)
    }

    /// Whether nothing is sealed.
    pub fn is_untouched(&self) -> bool {
        self.open.iter().all(|&open| open == self.lots.lots)
    }

    /// The lots of each holder whose sums count in a stage.
    pub fn holdings(&self, stage: StageId) -> BTreeMap<PeerId, Vec<Lot>> {
        let mut holdings: BTreeMap<PeerId, Vec<Lot>> = BTreeMap::new();
        for (lot, holder) in self.lots.all().zip(&self.holders[stage.0 as usize]) {
            if let Some(holder) = holder {
                holdings.entry(*holder).or_default().push(lot);
            }
        }
        holdings
    }

    /// The lots of a holder whose sums count in a stage.
    pub fn lots_of(&self, stage: StageId, peer: PeerId) -> Vec<Lot> {
        let holders = self.lots.all().zip(&self.holders[stage.0 as usize]);
        holders.filter(|(_, holder)| **holder == Some(peer)).map(|(lot, _)| lot).collect()
    }

    /// How many lots of a stage count for this peer.
    pub fn count_of(&self, stage: StageId, peer: PeerId) -> usize {
        self.holders[stage.0 as usize].iter().filter(|holder| **holder == Some(peer)).count()
    }

    /// How many lots count for this peer, of whatever stage.
    pub fn count_of_all(&self, peer: PeerId) -> u32 {
        self.counts.get(peer).copied().unwrap_or(0)
    }

    /// Everybody whose sums count in a stage.
    pub fn peers(&self, stage: StageId) -> BTreeSet<PeerId> {
        self.holders[stage.0 as usize].iter().flatten().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_seal_counts_and_a_dead_holder_opens_its_lots_again() {
        let mut ledger = Ledger::new(2, Lots { microbatches: 4, lots: 2 });
        let (a, b) = (PeerId(1), PeerId(2));
        assert!(ledger.seal(StageId(0), Lot(0), a));
        assert!(ledger.seal(StageId(0), Lot(0), a), "said again");
        assert!(!ledger.seal(StageId(0), Lot(0), b), "the second one does not count");
        assert!(ledger.seal(StageId(0), Lot(1), b));
        assert!(ledger.is_sealed(StageId(0)) && !ledger.is_sealed(StageId(1)));
        assert_eq!(ledger.held(Lot(0)), [Some(a), None]);
        assert!(!ledger.is_sealed_everywhere(Lot(0)));
        assert_eq!(ledger.drop_peer(StageId(0), a), [Lot(0)]);
        assert_eq!(ledger.held(Lot(0)), [None, None]);
    }

    #[test]
    fn what_is_handed_over_is_handed_over_whole_or_not_at_all() {
        let mut ledger = Ledger::new(1, Lots { microbatches: 4, lots: 4 });
        let (stage, a, b) = (StageId(0), PeerId(1), PeerId(2));
        for (lot, peer) in [(0, a), (1, a), (2, b)] {
            ledger.seal(stage, Lot(lot), peer);
        }
        assert!(!ledger.hand_over(stage, &[0, 1, 3].map(Lot), a, b), "one of them is nobody's");
        assert_eq!(ledger.lots_of(stage, a), [0, 1].map(Lot));
        assert!(ledger.hand_over(stage, &[0, 1].map(Lot), a, b));
        assert_eq!((ledger.lots_of(stage, b), ledger.open_lots(stage)), ([0, 1, 2].map(Lot).to_vec(), 1));
        assert_eq!((ledger.count_of_all(a), ledger.count_of_all(b)), (0, 3));
    }

    #[test]
    fn lots_and_stages_that_do_not_exist_are_refused() {
        let mut ledger = Ledger::new(1, Lots { microbatches: 1, lots: 1 });
        assert!(!ledger.seal(StageId(1), Lot(0), PeerId(0)));
        assert!(!ledger.seal(StageId(0), Lot(1), PeerId(0)));
    }
}
