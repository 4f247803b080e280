//! A worker's book of lots: which it may fold, what is folded, what is sealed. Grant before fold (rule 3) and
//! 'nothing is ever subtracted' (rule 2) are kept here.
//!
//! The gradient that would complete a lot is withheld until the coordinator has accepted the seal. A holder
//! merges neighbouring sealed lots, and a merged sum cannot be taken apart: had the lot been merged before it
//! was accepted, a refusal (another peer was first) would cost the accepted neighbours too.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::*;
use crate::lots::Lots;
use crate::message::SealedLot;
use crate::spec::Reduce;

/// A job's number at its worker: what the host knows a forward pass, and later its gradient, by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// The lots of an open step.
#[derive(Clone, Debug)]
pub struct Book {
    lots: Lots,
    reduce: Reduce,
    entries: BTreeMap<Lot, Entry>,
    /// The lots that wait for their verdict.
    waiting: BTreeSet<Lot>,
}

#[derive(Clone, Debug)]
struct Entry {
    grant: Grant,
    folded: Folded,
    seal: Seal,
}

/// Which microbatches of a lot are in its sum: a bit for each, counted from the lot's first.
#[derive(Clone, Debug, Default)]
struct Folded {
    first: u64,
    /// Those after the first 64.
    more: Vec<u64>,
    len: usize,
}

impl Folded {
    /// Puts one in; whether it was not.
    fn insert(&mut self, index: u32) -> bool {
        let (word, bit) = (index as usize / 64, 1u64 << (index % 64));
        if self.more.len() < word {
            self.more.resize(word, 0);
        }
        let word = if word == 0 { &mut self.first } else { &mut self.more[word - 1] };
        let is_new = *word & bit == 0;
        *word |= bit;
        self.len += usize::from(is_new);
        is_new
    }

    fn contains(&self, index: u32) -> bool {
        let word = match index / 64 {
            0 => self.first,
            word => self.more.get(word as usize - 1).copied().unwrap_or(0),
        };
        word >> (index % 64) & 1 == 1
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Seal {
    Open,
    /// All gradients are here; the last one waits for the verdict.
    Waiting(JobId),
    Accepted,
}

/// What to do with a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fold {
    /// Add it to the lot.
    Add,
    /// Keep it: the lot is complete with it, and the seal is to be sent.
    Withhold,
    /// Throw it away: it is in already, or not wanted here.
    Discard,
}

/// What a grant leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granted {
    /// The lot may be folded under it.
    Yes,
    /// The lot may be folded under it, and what was folded before must be dropped.
    Instead,
    /// The lot is sealed here already: compute, fold nothing, and tell the coordinator of the seal again.
    Sealed,
    /// A later grant was seen: refuse.
    Old,
}

impl Book {
    /// An empty book.
    pub fn new(lots: Lots, reduce: Reduce) -> Book {
        Book { lots, reduce, entries: BTreeMap::new(), waiting: BTreeSet::new() }
    }

    /// Whether a microbatch is in its lot's sum.
    pub fn has(&self, lot: Lot, microbatch: Microbatch) -> bool {
        let index = microbatch.0.checked_sub(self.lots.microbatches_of(lot).start);
        let folded = |entry: &Entry| index.is_some_and(|index| entry.folded.contains(index));
        self.entries.get(&lot).is_some_and(folded)
    }

    /// Takes note of a grant.
    pub fn grant(&mut self, lot: Lot, grant: Grant) -> Granted {
        let fresh = Entry { grant, folded: Folded::default(), seal: Seal::Open };
        let Some(entry) = self.entries.get_mut(&lot) else {
            self.entries.insert(lot, fresh);
            return Granted::Yes;
        };
        if entry.seal != Seal::Open {
            return Granted::Sealed;
        }
        match grant.cmp(&entry.grant) {
            std::cmp::Ordering::Less => Granted::Old,
            std::cmp::Ordering::Equal => Granted::Yes,
            std::cmp::Ordering::Greater => {
                *entry = fresh;
                Granted::Instead
            }
        }
    }

    /// Decides what becomes of a gradient computed under `grant`.
    pub fn fold(&mut self, lot: Lot, microbatch: Microbatch, grant: Grant, job: JobId) -> Fold {
        let all = self.lots.microbatches_of(lot);
        let Some(entry) = self.entries.get_mut(&lot).filter(|_| all.contains(&microbatch.0)) else {
            return Fold::Discard;
        };
        let is_wanted = entry.grant == grant && entry.seal == Seal::Open;
        if !is_wanted || !entry.folded.insert(microbatch.0 - all.start) {
            return Fold::Discard;
        }
        if entry.folded.len < all.len() {
            return Fold::Add;
        }
        entry.seal = Seal::Waiting(job);
        self.waiting.insert(lot);
        Fold::Withhold
    }

    /// The coordinator counts this lot; returns the job whose gradient is now to be folded.
    pub fn accept(&mut self, lot: Lot) -> Option<JobId> {
        let entry = self.entries.get_mut(&lot)?;
        let Seal::Waiting(job) = entry.seal else { return None };
        entry.seal = Seal::Accepted;
        self.waiting.remove(&lot);
        Some(job)
    }

    /// A lot is here, whole, that another computed. There must be nothing of it yet.
    pub fn inherit(&mut self, lot: Lot) {
        let mut folded = Folded::default();
        for index in 0..self.lots.microbatches_of(lot).len() as u32 {
            folded.insert(index);
        }
        self.entries.entry(lot).or_insert(Entry { grant: Grant::default(), folded, seal: Seal::Accepted });
    }

    /// A lot that was inherited is not here after all; whether it was thought to be.
    pub fn disinherit(&mut self, lot: Lot) -> bool {
        self.is_accepted(lot) && self.entries.remove(&lot).is_some()
    }

    /// Whether a lot was accepted.
    pub fn is_accepted(&self, lot: Lot) -> bool {
        self.entries.get(&lot).is_some_and(|entry| entry.seal == Seal::Accepted)
    }

    /// Drops a lot whole, with the lots it was merged with; returns them, and the job that was withheld.
    pub fn drop_lot(&mut self, lot: Lot) -> (Vec<Lot>, Option<JobId>) {
        let Some(entry) = self.entries.get(&lot) else { return (Vec::new(), None) };
        match entry.seal {
            Seal::Open => {
                self.entries.remove(&lot);
                (vec![lot], None)
            }
            Seal::Waiting(job) => {
                self.entries.remove(&lot);
                self.waiting.remove(&lot);
                (vec![lot], Some(job))
            }
            Seal::Accepted => {
                let gone: Vec<Lot> = match self.reduce {
                    Reduce::Exact => self.lots.merged_with(lot, &self.accepted()).map(Lot).collect(),
                    Reduce::Fast => self.accepted().into_iter().collect(),
                };
                gone.iter().for_each(|lot| drop(self.entries.remove(lot)));
                (gone, None)
            }
        }
    }

    /// Drops the lot if it is not sealed and its grant is not later than this one.
    pub fn revoke(&mut self, lot: Lot, grant: Grant) -> bool {
        let revoked =
            self.entries.get(&lot).is_some_and(|entry| entry.seal == Seal::Open && entry.grant <= grant);
        if revoked {
            self.entries.remove(&lot);
        }
        revoked
    }

    /// The lots that were accepted.
    pub fn accepted(&self) -> BTreeSet<Lot> {
        let accepted = |(lot, entry): (&Lot, &Entry)| (entry.seal == Seal::Accepted).then_some(*lot);
        self.entries.iter().filter_map(accepted).collect()
    }

    /// The lots with anything in them.
    pub fn lots(&self) -> Vec<Lot> {
        self.entries.keys().copied().collect()
    }

    /// All seals.
    pub fn seals(&self, step: Step) -> Vec<SealedLot> {
        self.entries.keys().filter_map(|&lot| self.seal(step, lot)).collect()
    }

    /// The seals that wait for their verdict.
    pub fn waiting(&self, step: Step) -> Vec<SealedLot> {
        self.waiting.iter().filter_map(|&lot| self.seal(step, lot)).collect()
    }

    /// The seal of a lot, if it has one.
    pub fn seal(&self, step: Step, lot: Lot) -> Option<SealedLot> {
        let entry = self.entries.get(&lot).filter(|entry| entry.seal != Seal::Open)?;
        let accepted = entry.seal == Seal::Accepted;
        Some(SealedLot { at: LotOf { step, lot }, grant: entry.grant, accepted })
    }

    /// Lots with anything in them.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOT: Lot = Lot(0);

    fn grant(attempt: u32) -> Grant {
        Grant { lease: LeaseNo::default(), attempt: Attempt(attempt) }
    }

    fn book() -> Book {
        Book::new(Lots { microbatches: 4, lots: 2 }, Reduce::Exact)
    }

    #[test]
    fn a_gradient_without_a_grant_is_thrown_away() {
        assert_eq!(book().fold(LOT, Microbatch(0), grant(0), JobId(0)), Fold::Discard);
    }

    #[test]
    fn a_gradient_is_folded_once_and_only_under_the_current_grant() {
        let mut book = book();
        assert_eq!(book.grant(LOT, grant(1)), Granted::Yes);
        assert_eq!(book.fold(LOT, Microbatch(0), grant(0), JobId(0)), Fold::Discard);
        assert_eq!(book.fold(LOT, Microbatch(0), grant(1), JobId(1)), Fold::Add);
        assert_eq!(book.fold(LOT, Microbatch(0), grant(1), JobId(2)), Fold::Discard);
        assert_eq!(book.grant(LOT, grant(0)), Granted::Old);
    }

    #[test]
    fn a_later_grant_starts_the_lot_again() {
        let mut book = book();
        book.grant(LOT, grant(1));
        book.fold(LOT, Microbatch(0), grant(1), JobId(1));
        assert_eq!(book.grant(LOT, grant(2)), Granted::Instead);
        assert_eq!(book.fold(LOT, Microbatch(0), grant(2), JobId(2)), Fold::Add);
        assert_eq!(book.fold(LOT, Microbatch(1), grant(1), JobId(3)), Fold::Discard);
    }

    #[test]
    fn the_last_gradient_waits_for_the_verdict_and_a_sealed_lot_survives_a_later_grant() {
        let mut book = book();
        book.grant(LOT, grant(1));
        book.fold(LOT, Microbatch(1), grant(1), JobId(1));
        assert_eq!(book.fold(LOT, Microbatch(0), grant(1), JobId(2)), Fold::Withhold);
        assert_eq!(book.grant(LOT, grant(2)), Granted::Sealed);
        assert!(!book.revoke(LOT, grant(9)));
        assert_eq!(book.accept(LOT), Some(JobId(2)));
        assert_eq!(book.accept(LOT), None);
        assert_eq!(book.accepted(), [LOT].into());
    }

    #[test]
    fn a_refused_lot_gives_up_the_withheld_gradient_and_no_neighbour() {
        let mut book = book();
        for lot in [Lot(0), Lot(1)] {
            book.grant(lot, grant(1));
            for microbatch in 2 * lot.0..2 * lot.0 + 2 {
                book.fold(lot, Microbatch(microbatch), grant(1), JobId(microbatch.into()));
            }
        }
        book.accept(Lot(1));
        assert_eq!(book.drop_lot(Lot(0)), (vec![Lot(0)], Some(JobId(1))));
        assert_eq!(book.accepted(), [Lot(1)].into());
    }

    #[test]
    fn a_lot_of_more_than_64_microbatches_is_complete_when_all_are_in() {
        let mut book = Book::new(Lots { microbatches: 400, lots: 2 }, Reduce::Exact);
        book.grant(Lot(1), grant(1));
        for microbatch in (201..400).rev() {
            let job = JobId(microbatch.into());
            assert_eq!(book.fold(Lot(1), Microbatch(microbatch), grant(1), job), Fold::Add);
            assert_eq!(book.fold(Lot(1), Microbatch(microbatch), grant(1), job), Fold::Discard);
        }
        assert!(book.has(Lot(1), Microbatch(399)) && !book.has(Lot(1), Microbatch(200)));
        assert_eq!(book.fold(Lot(1), Microbatch(199), grant(1), JobId(0)), Fold::Discard, "another lot's");
        assert_eq!(book.fold(Lot(1), Microbatch(200), grant(1), JobId(0)), Fold::Withhold);
    }
}
