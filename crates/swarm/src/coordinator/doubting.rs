//! Results that are not finite (rule 11). Another peer computes the microbatch too. If its result is finite, the
//! first one computes wrongly, and is quarantined by name; if not, the data is at fault, and every stage skips the
//! update. Who is the only holder of its stage is believed alone only if no other stage can spare a witness: one
//! broken device must not change what is trained.
//!
//! Both the claim and the seal that refutes it come from workers. What this cannot see: a peer whose results are
//! finite and wrong, and make another's overflow. Hosts refuse what is not finite when it arrives, so that much is
//! always blamed on its maker.

use std::collections::BTreeMap;

use crate::coordinator::members::Phase;
use crate::coordinator::{Command, Coordinator};
use crate::ids::*;
use crate::journal::{Commit, Record};
use crate::message::*;
use crate::rebalance::Decision;
use crate::refusal::Refusal;

/// How often one peer must find the same if no other can be asked.
const ALONE: u32 = 2;
/// The same where others hold the stage too, but for some reason have not computed it either.
const IN_VAIN: u32 = 4;

/// By stage, lot and microbatch: who found it not finite, and how often.
pub(super) type Doubts = BTreeMap<(StageId, Lot, Microbatch), BTreeMap<PeerId, u32>>;

/// Whether two peers found a microbatch of this lot not finite.
pub(super) fn is_believed(doubts: &Doubts, stage: StageId, lot: Lot) -> bool {
    let of_lot = doubts.range((stage, lot, Microbatch(0))..=(stage, lot, Microbatch(u32::MAX)));
    of_lot.into_iter().any(|(_, claims)| claims.len() > 1)
}

impl Coordinator {
    pub(super) fn on_not_finite(
        &mut self,
        peer: PeerId,
        fence: Fence,
        stage: StageId,
        of: &[NotFinite],
        out: &mut Vec<Command>,
    ) {
        if fence.epoch != self.book.epoch {
            return self.refusals.count(Refusal::OldEpoch);
        }
        let member = self.members.get(&peer);
        if member.is_none_or(|member| !member.is_active() || member.stage != Some(stage)) {
            return self.refusals.count(Refusal::OtherStage);
        }
        let mut refuted = None;
        for &NotFinite { at, microbatch, times, granted } in of {
            if !self.spec.lots.contains(at.lot, microbatch) {
                self.refusals.count(Refusal::Nonsense);
                continue;
            }
            let Some(open) = self.open_step(at.step) else {
                self.refusals.count(Refusal::OldStep);
                continue;
            };
            match open.ledger.holder(stage, at.lot) {
                // Who only passes a lot on that another holds is not asked for it again; that is all.
                Some(other) if other != peer => refuted = refuted.or(granted.then_some((at, other))),
                // It has computed it once more since, or cannot do again what it did before.
                Some(_) if times < ALONE => {}
                Some(_) => {
                    let step = at.step;
                    self.on_lost(peer, Fence { step, ..fence }, stage, &[at], out);
                }
                None => {
                    let claims = open.doubts.entry((stage, at.lot, microbatch)).or_default();
                    claims.insert(peer, times);
                }
            }
        }
        if let Some((at, other)) = refuted {
            self.quarantine(peer, at, stage, other, out);
        }
        self.advance(out);
    }

    /// A peer has sealed these lots: those who found one not finite, and were wrong.
    pub(super) fn refuted(&mut self, by: PeerId, stage: StageId, lots: &[LotOf]) -> Vec<(PeerId, LotOf)> {
        let mut wrong = Vec::new();
        for &at in lots {
            let Some(open) = self.open_step(at.step).filter(|open| !open.doubts.is_empty()) else { continue };
            let refuted = open.doubts.extract_if(.., |(of, lot, _), _| (*of, *lot) == (stage, at.lot));
            let peers = refuted.flat_map(|(_, claims)| claims.into_keys());
            wrong.extend(peers.filter(|peer| *peer != by).map(|peer| (peer, at)));
        }
        wrong
    }

    /// A peer's result was not finite, and another's of the same lot is.
    pub(super) fn quarantine(
        &mut self,
        peer: PeerId,
        at: LotOf,
        stage: StageId,
        other: PeerId,
        out: &mut Vec<Command>,
    ) {
        let LotOf { step, lot } = at;
        let why = format!("its result of {lot} in {step}, {stage} was not finite, that of {other} is");
        let spare = |(of, member): (&PeerId, &super::Member)| {
            *of != peer && member.is_whole() && member.stage == Some(stage)
        };
        if !self.members.iter().any(spare) {
            // Without it the whole run would roll back. It will be found out again.
            out.push(Command::Tell(format!("{peer} computes wrongly, and nobody can replace it: {why}")));
            return;
        }
        self.expel(peer, &format!("it computes wrongly: {why}"), out);
    }

    /// A worker of this version would not have said this. Nothing that it says is of use, so it goes even if nobody can
    /// replace it.
    pub(super) fn on_nonsense(&mut self, peer: PeerId, why: &str, out: &mut Vec<Command>) {
        self.refusals.count(Refusal::Nonsense);
        if self.members.contains_key(&peer) {
            self.expel(peer, why, out);
            self.advance(out);
        }
    }

    fn expel(&mut self, peer: PeerId, why: &str, out: &mut Vec<Command>) {
        out.push(Command::Tell(format!("{peer} is quarantined: {why}")));
        self.append(Record::Quarantined(peer, true), out);
        self.distrust(peer);
        for open in &mut self.steps {
            open.doubts.retain(|_, claims| {
                claims.remove(&peer);
                !claims.is_empty()
            });
        }
        self.remove(peer, why, out);
    }

    /// Whether a peer is not let in.
    pub(super) fn is_quarantined(&self, peer: PeerId) -> bool {
        let last = self.appended.values().rev().find_map(|record| match record {
            Record::Quarantined(of, quarantined) if *of == peer => Some(*quarantined),
            _ => None,
        });
        last.unwrap_or_else(|| self.book.quarantined.contains(&peer))
    }

    /// If the open step is not finite, whoever computes it: the update is skipped; whether it is.
    pub(super) fn skip_if_not_finite(&mut self, out: &mut Vec<Command>) -> bool {
        self.call_witness(out);
        let found = self.steps[0].doubts.iter().find(|((stage, ..), claims)| self.agree(*stage, claims));
        // A step that is reduced is closed after all have applied the one before it; so is one that is not.
        let now_at = (self.book.epoch, self.book.step);
        let applied = || self.members.values().all(|member| !member.is_whole() || member.version == now_at);
        let Some((&(stage, _, microbatch), claims)) = found.filter(|_| applied()) else { return false };
        let peers: Vec<String> = claims.keys().map(PeerId::to_string).collect();
        let ((epoch, step), by, term) = (now_at, peers.join(", "), self.term);
        out.push(Command::Tell(format!(
            "{step}: {microbatch} is not finite in {stage}, as {by} found: the update is skipped"
        )));
        let (constants, digests, savers) = (Vec::new(), Vec::new(), self.savers());
        self.commit(Commit { term, epoch, step, constants, digests, savers, skipped: true }, out);
        true
    }

    /// Whether two peers found the same, or one did so often enough.
    fn agree(&self, stage: StageId, claims: &BTreeMap<PeerId, u32>) -> bool {
        let other = |(peer, member): (&PeerId, &super::Member)| {
            let holds = member.is_active() && member.stage == Some(stage);
            holds && member.since() <= self.book.step && !claims.contains_key(peer)
        };
        let times = claims.values().copied().max().unwrap_or(0);
        let often = match self.members.iter().any(other) {
            true => times >= IN_VAIN,
            false => times >= ALONE && !self.is_witness_on_its_way(stage) && self.witness(stage).is_none(),
        };
        claims.len() > 1 || often
    }

    /// The only holder of a stage found a microbatch not finite, more than once: another peer goes there to look.
    fn call_witness(&mut self, out: &mut Vec<Command>) {
        let alone =
            |claims: &BTreeMap<PeerId, u32>| claims.len() == 1 && claims.values().all(|&n| n >= ALONE);
        let doubted = self.steps[0].doubts.iter().find(|(_, claims)| alone(claims));
        let Some((&(to, _, microbatch), claims)) = doubted else { return };
        if self.is_witness_on_its_way(to) {
            return;
        }
        let by: Vec<String> = claims.keys().map(PeerId::to_string).collect();
        if let Some(peer) = self.witness(to) {
            let by = by.join(", ");
            let reason =
                format!("{by}, its only holder, finds {microbatch} not finite, and another is to look");
            self.move_peer(Decision::Move { peer, to, reason }, out);
        }
    }

    fn is_witness_on_its_way(&self, stage: StageId) -> bool {
        let sits_out = Some((self.book.epoch, self.book.step));
        let comes = |m: &super::Member| {
            m.stage == Some(stage) && matches!(m.phase, Phase::Loading(_)) && m.sits_out != sits_out
        };
        self.joiners_can_compute() && self.members.values().any(comes)
    }

    /// Whether who comes to a stage now has the weights with which the open step is computed: a donor gives its newest, so
    /// in `delayed` sync it has not, and nobody waits for it.
    fn joiners_can_compute(&self) -> bool {
        self.spec.sync.first_step(self.book.step) <= self.book.step
    }

    /// Who could go to a stage that has one holder: of the stage with the most, who has least to do again.
    fn witness(&self, to: StageId) -> Option<PeerId> {
        let placed = self.placed();
        if !self.joiners_can_compute() || placed.iter().filter(|of| of.stage == to).count() > 1 {
            return None;
        }
        let settled = |stage: StageId| placed.iter().filter(|of| of.stage == stage && of.settled).count();
        let mut spare: Vec<_> =
            placed.iter().filter(|of| of.stage != to && of.settled && settled(of.stage) > 1).collect();
        spare.sort_by(|a, b| settled(b.stage).cmp(&settled(a.stage)).then(a.holds.total_cmp(&b.holds)));
        spare.first().map(|of| of.peer)
    }

    /// What nobody is sure of yet.
    pub(super) fn why_in_doubt(&self) -> Option<String> {
        let (&(stage, _, microbatch), claims) = self.steps[0].doubts.first_key_value()?;
        let by: Vec<String> = claims.keys().map(PeerId::to_string).collect();
        let by = by.join(", ");
        Some(format!("{stage}: {by} found {microbatch} not finite, another is to compute it too"))
    }
}
