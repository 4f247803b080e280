//! Copies of workers' sums, and who has them: the ledger gives the lots of somebody who is gone to whoever keeps its
//! deposit, as far as that goes. A deposit is only believed when it is needed: if the keeper does not have it after all, it says
//! so, and the lots are open again.

use std::collections::BTreeMap;

use crate::coordinator::members::Member;
use crate::coordinator::{Closing, Command, Coordinator};
use crate::ids::*;
use crate::message::*;
use crate::refusal::Refusal;
use crate::time::Span;

/// Who has a copy of somebody's sums of a step.
#[derive(Clone, Debug)]
pub(super) struct Deposit {
    keeper: PeerId,
    lots: Vec<Lot>,
}

/// The deposits of an open step, by stage and by whose they are.
pub(super) type Deposits = BTreeMap<(StageId, PeerId), Deposit>;

impl Coordinator {
    /// Who holds what has changed: holders of a stage stand in a ring, and everybody's keeper is the next one, in its own
    /// site if there is one. The ring is in no order that means anything: machines that came one after another, whose
    /// numbers are neighbours, are often taken away together.
    pub(super) fn name_keepers(&mut self, out: &mut Vec<Command>) {
        if self.spec.tuning.deposit == Span(0) {
            return;
        }
        // Of each stage a ring in every site, and one over all.
        let mut rings: BTreeMap<(StageId, Option<SiteId>), Vec<PeerId>> = BTreeMap::new();
        let staying = self.members.iter().filter(|(_, member)| member.is_whole() && !member.draining);
        for (&peer, member) in staying {
            let sites = [Some(member.capability.site), None];
            for ring in sites.into_iter().filter_map(|site| Some((member.stage?, site))) {
                rings.entry(ring).or_default().push(peer);
            }
        }
        rings.values_mut().for_each(|ring| ring.sort_by_key(|peer| place_in_ring(*peer)));
        let next = |peer: PeerId, ring: &Vec<PeerId>| {
            let after = ring.partition_point(|other| place_in_ring(*other) <= place_in_ring(peer));
            ring[after..].iter().chain(ring).copied().find(|other| *other != peer)
        };
        let keeper_of = |peer: PeerId, member: &Member| {
            let stage = member.stage.filter(|_| member.is_active())?;
            let sites = [Some(member.capability.site), None];
            sites.into_iter().find_map(|site| next(peer, rings.get(&(stage, site))?))
        };
        let named: Vec<(PeerId, Option<PeerId>)> =
            self.members.iter().map(|(&peer, member)| (peer, keeper_of(peer, member))).collect();
        for (peer, keeper) in named {
            if let Some(member) = self.members.get_mut(&peer).filter(|member| member.keeper != keeper) {
                member.keeper = keeper;
                self.send(Address::Worker(peer), Attempt(0), Body::Keeper { keeper }, out);
            }
        }
    }

    /// A member that does not know its keeper is told again.
    pub(super) fn rename_keeper(&self, peer: PeerId, out: &mut Vec<Command>) {
        let differs = self.members.get(&peer).filter(|member| member.status.keeper != member.keeper);
        if let Some(keeper) = differs.map(|member| member.keeper) {
            self.send(Address::Worker(peer), Attempt(0), Body::Keeper { keeper }, out);
        }
    }

    /// A member has a copy of another's sums.
    pub(super) fn on_deposited(&mut self, keeper: PeerId, fence: Fence, body: Body, out: &mut Vec<Command>) {
        let Body::Deposited { stage, of, lots } = body else { return };
        let holds = |peer| self.members.get(&peer).is_some_and(|m| m.is_active() && m.stage == Some(stage));
        let is_keeper = |m: &Member| m.keeper.is_none_or(|named| named == keeper);
        let sound = fence.epoch == self.book.epoch
            && holds(keeper)
            && holds(of)
            && self.members.get(&of).is_some_and(is_keeper)
            && keeper != of
            && lots.is_sorted_by(|a, b| a < b);
        let Some(open) = self.open_step(fence.step).filter(|_| sound) else {
            return self.refusals.count(Refusal::OldStep);
        };
        open.deposits.insert((stage, of), Deposit { keeper, lots });
        self.let_go_early(of, out);
    }

    /// Who asked to leave and has left all its sums with another does not wait for the end of the step.
    pub(super) fn let_go_early(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        let asked = self.members.get(&peer).is_some_and(|member| member.draining);
        if asked && self.spec.tuning.deposit > Span(0) && self.has_handed_over(peer) {
            self.remove(peer, "it asked to leave, and has left its sums with another", out);
            self.advance(out);
        }
    }

    /// Whether nothing would be lost if a member went now, but what is between forward and backward at others.
    fn has_handed_over(&self, peer: PeerId) -> bool {
        let Some((stage, member)) = self.members.get(&peer).and_then(|m| Some((m.stage?, m))) else {
            return true;
        };
        let is_safe = |open: &super::OpenStep| {
            let counted = open.ledger.lots_of(stage, peer);
            counted.is_empty() || self.left_by(peer, stage, &open.deposits) == Some(&counted[..])
        };
        let reduced = self.lives[stage.0 as usize].reducing.is_some() || self.closing != Closing::No;
        let savers = self.last_commit().map_or(&[][..], |commit| &commit.savers);
        let saves = savers.contains(&peer) && self.book.checkpoint < self.book.step;
        let is_free = member.status.queued == 0 && !reduced && !saves;
        is_free && self.can_spare(peer) && self.steps.iter().all(is_safe)
    }

    /// What a member has left with somebody who can take its place.
    fn left_by<'a>(&self, of: PeerId, stage: StageId, deposits: &'a Deposits) -> Option<&'a [Lot]> {
        let deposit = deposits.get(&(stage, of))?;
        let keeper = self.members.get(&deposit.keeper)?;
        let can_hold = keeper.is_whole() && keeper.stage == Some(stage) && !keeper.draining;
        can_hold.then_some(&deposit.lots)
    }

    /// How many of a member's lots of a step would be lost if it went now.
    pub(super) fn at_risk(&self, peer: PeerId, stage: StageId, open: &super::OpenStep) -> u32 {
        let left = self.left_by(peer, stage, &open.deposits).map_or(0, |lots| lots.len() as u32);
        open.ledger.count_of_all(peer).saturating_sub(left)
    }

    /// A holder is gone: what it left of this open step is its keeper's from now on.
    pub(super) fn hand_over(&mut self, of: PeerId, stage: StageId, index: usize, out: &mut Vec<Command>) {
        let step = Step(self.book.step.0 + index as u64);
        let may_hold = self.steps[index]
            .deposits
            .get(&(stage, of))
            .is_some_and(|_| self.left_by(of, stage, &self.steps[index].deposits).is_some());
        let open = &mut self.steps[index];
        let deposit = open.deposits.remove(&(stage, of)).filter(|_| may_hold);
        // What was kept there is gone, or will be asked for in vain.
        open.deposits.retain(|(at, _), deposit| *at != stage || deposit.keeper != of);
        let Some(Deposit { keeper, lots }) = deposit else { return };
        if !open.ledger.hand_over(stage, &lots, of, keeper) {
            return;
        }
        out.push(Command::Tell(format!(
            "{keeper} has the sums that {of} left: {} lots of {step}",
            lots.len()
        )));
        for &lot in &lots {
            if self.steps[index].is_leased(lot) {
                self.lease_again(LotOf { step, lot }, out); // To be passed through another.
            }
        }
        self.verdicts += 1;
        let fence = Fence { step, ..self.fence(Attempt(0)) };
        let body = Body::Inherit { number: self.verdicts, stage, of, lots };
        let (from, to) = (Address::Coordinator, Address::Worker(keeper));
        out.push(Command::Send(Envelope { protocol: PROTOCOL, from, to, fence, body }));
    }

    /// Nothing that a member summed is believed any more.
    pub(super) fn distrust(&mut self, peer: PeerId) {
        for open in &mut self.steps {
            open.deposits.retain(|(_, of), _| *of != peer);
        }
    }
}

/// A permutation of all numbers (a multiplication by an odd one, after which high bits are spread).
fn place_in_ring(peer: PeerId) -> u32 {
    let mixed = peer.0.wrapping_mul(0x9e37_79b1);
    (mixed ^ (mixed >> 15)).wrapping_mul(0x85eb_ca6b)
}
