//! Results that are not finite (rule 11). Another peer computes the microbatch too. If its result is finite, the
//! first one computes wrongly, and is quarantined by name; if not, the data is at fault, and every stage skips the
//! update.
//!
//! The claim and the seal that refutes it come from the workers themselves, so no driver can have anybody
//! quarantined. Where a stage has a single holder there is nobody to compare with: the same result twice is believed.

use std::collections::BTreeMap;

use crate::coordinator::{Closing, Command, Coordinator};
use crate::ids::*;
use crate::journal::{Commit, Record};
use crate::message::*;
use crate::refusal::Refusal;

/// By stage, lot and microbatch: who found it not finite, and how often.
pub(super) type Doubts = BTreeMap<(StageId, Lot, Microbatch), BTreeMap<PeerId, u32>>;

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
        let lots = self.spec.lots;
        let sound = of.iter().filter(|of| lots.contains(of.at.lot, of.microbatch));
        for &NotFinite { at, microbatch, times } in sound {
            let Some(open) = self.open_step(at.step) else {
                self.refusals.count(Refusal::OldStep);
                continue;
            };
            match open.ledger.holder(stage, at.lot) {
                None => {
                    let claims = open.doubts.entry((stage, at.lot, microbatch)).or_default();
                    claims.insert(peer, times);
                }
                Some(other) if other != peer => return self.quarantine(peer, at, stage, other, out),
                Some(_) => {} // It has computed it once more since.
            }
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
        if self.is_quarantined(peer) {
            return;
        }
        let LotOf { step, lot } = at;
        let why = format!("its result of {lot} in {step}, {stage} was not finite, that of {other} is");
        out.push(Command::Tell(format!("{peer} is quarantined, for it computes wrongly: {why}")));
        self.append(Record::Quarantined(peer, true), out);
        self.remove(peer, &why, out);
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
        let found = self.steps[0].doubts.iter().find(|((stage, ..), claims)| self.agree(*stage, claims));
        // A step that is reduced is closed after all have applied the one before it; so is one that is not.
        let now_at = (self.book.epoch, self.book.step);
        let applied = || self.members.values().all(|member| !member.is_whole() || member.version == now_at);
        let may = |_: &_| self.closing != Closing::Journaling && applied();
        let Some((&(stage, _, microbatch), claims)) = found.filter(may) else { return false };
        let peers: Vec<String> = claims.keys().map(PeerId::to_string).collect();
        let (epoch, step) = now_at;
        let by = peers.join(", ");
        out.push(Command::Tell(format!(
            "{step}: {microbatch} is not finite in {stage}, as {by} found: the update is skipped"
        )));
        let (constants, digests, savers) = (Vec::new(), Vec::new(), self.savers());
        self.commit(Commit { epoch, step, constants, digests, savers, skipped: true }, out);
        true
    }

    /// Whether two peers found the same, or one did twice and no other can compute the open step.
    fn agree(&self, stage: StageId, claims: &BTreeMap<PeerId, u32>) -> bool {
        let other = |(peer, member): (&PeerId, &super::Member)| {
            let holds = member.is_active() && member.stage == Some(stage);
            holds && member.since() <= self.book.step && !claims.contains_key(peer)
        };
        let twice = || claims.values().any(|&times| times > 1);
        claims.len() > 1 || (twice() && !self.members.iter().any(other))
    }
}
