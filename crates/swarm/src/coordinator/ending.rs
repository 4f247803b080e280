//! The life of (step, stage): Open → Sealed → Reducing(attempt) → Prepared → journal Commit → applied.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::coordinator::doubting::is_believed;
use crate::coordinator::members::Phase;
use crate::coordinator::{Closing, Command, Coordinator};
use crate::ids::*;
use crate::journal::{Commit, Record};
use crate::message::*;
use crate::reduce::{self, ReducePlan};
use crate::refusal::Refusal;
use crate::time::{Span, Time};

/// One stage in the open step.
#[derive(Clone, Debug, Default)]
pub(super) struct Life {
    /// The last attempt to reduce; attempts of a step are never reused.
    pub attempt: Attempt,
    /// The attempt under way, or the one that succeeded.
    pub reducing: Option<Reducing>,
    /// When the last lot was sealed.
    pub sealed_at: Option<Time>,
    /// The last plan of this step, unless it failed for another reason than that somebody is gone.
    last: Option<Arc<ReducePlan>>,
    /// Who is gone since then, whether or not it came back.
    pub gone: BTreeSet<PeerId>,
    /// Pairs of members that could not talk in an earlier attempt of this step.
    pub broken: BTreeSet<(PeerId, PeerId)>,
}

#[derive(Clone, Debug)]
pub(super) struct Reducing {
    pub plan: Arc<ReducePlan>,
    pub prepared: BTreeMap<PeerId, (Digest, Vec<u8>)>,
    /// How many members, in the plan's order, are known to be prepared or gone.
    looked_at: usize,
}

impl Life {
    /// What all members that are still there have prepared, if they all have.
    fn prepared(&mut self, is_member: impl Fn(PeerId) -> bool) -> Option<&(Digest, Vec<u8>)> {
        let reducing = self.reducing.as_mut()?;
        let there = |peer: &PeerId| !is_member(*peer) || reducing.prepared.contains_key(peer);
        reducing.looked_at += reducing.plan.members().skip(reducing.looked_at).take_while(there).count();
        let complete = reducing.looked_at == reducing.plan.members().count();
        // Who was gone and came back has nothing of it.
        let any = || reducing.plan.members().any(|peer| is_member(peer) && !self.gone.contains(&peer));
        if complete && any() { reducing.prepared.values().next() } else { None }
    }
}

impl Coordinator {
    pub(super) fn on_seals(
        &mut self,
        peer: PeerId,
        fence: Fence,
        stage: StageId,
        seals: &[SealedLot],
        out: &mut Vec<Command>,
    ) {
        if fence.epoch != self.book.epoch {
            return self.refusals.count(Refusal::OldEpoch);
        }
        let Some(member) = self.members.get(&peer) else { return };
        if !member.is_active() || member.stage != Some(stage) {
            return self.refusals.count(Refusal::OtherStage); // It says so again with its next beat.
        }
        let (mut accepted, mut refused) = (Vec::new(), Vec::new());
        let closing = (self.closing == Closing::Journaling).then_some(self.book.step);
        let rebuilds = self.collecting.is_some();
        for &SealedLot { at, accepted: counted, .. } in seals {
            // While a ledger is rebuilt, those that counted before go first.
            if (rebuilds && !counted) || closing == Some(at.step) {
                continue;
            }
            let Some(open) = self.open_step(at.step) else {
                self.refusals.count(Refusal::OldStep);
                continue;
            };
            // Where two found it not finite, a third that did not is not believed.
            if !is_believed(&open.doubts, stage, at.lot) && open.ledger.seal(stage, at.lot, peer) {
                accepted.push(at);
            } else {
                refused.push(at);
            }
        }
        let wrong = self.refuted(peer, stage, &accepted);
        for &at in &accepted {
            if self.open_step(at.step).is_some_and(|open| open.ledger.is_sealed_everywhere(at.lot)) {
                self.end_lease(at, out);
            }
        }
        self.send_verdict(peer, accepted, refused, out);
        for (wrong, at) in wrong {
            self.quarantine(wrong, at, stage, peer, out);
        }
        if self.steps[0].ledger.is_sealed(stage) && self.lives[stage.0 as usize].sealed_at.is_none() {
            self.lives[stage.0 as usize].sealed_at = Some(self.now);
            return self.advance(out);
        }
        self.lease(out);
    }

    pub(super) fn send_verdict(
        &mut self,
        peer: PeerId,
        accepted: Vec<LotOf>,
        refused: Vec<LotOf>,
        out: &mut Vec<Command>,
    ) {
        self.verdicts += 1;
        let body = Body::Verdict { number: self.verdicts, accepted, refused };
        self.send(Address::Worker(peer), Attempt(0), body, out);
    }

    pub(super) fn on_lost(
        &mut self,
        peer: PeerId,
        fence: Fence,
        stage: StageId,
        lots: &[LotOf],
        out: &mut Vec<Command>,
    ) {
        if fence.epoch != self.book.epoch || stage.0 >= self.spec.stages {
            return self.refusals.count(Refusal::OldEpoch);
        }
        let closing = (self.closing == Closing::Journaling).then_some(self.book.step);
        for &at in lots.iter().filter(|at| closing != Some(at.step)) {
            let reopened = self.open_step(at.step).is_some_and(|o| o.ledger.reopen(stage, at.lot, peer));
            if reopened {
                if at.step == self.book.step {
                    self.reopen_stage(stage);
                }
                self.lease_again(at, out);
            }
        }
        self.advance(out);
    }

    /// A holder is gone. If all who are left have the whole reduced gradient, its sums are in it, and nothing
    /// has to be done again; otherwise its lots are open once more, and the attempt is void.
    pub(super) fn forget_holder(&mut self, peer: PeerId, stage: StageId, out: &mut Vec<Command>) {
        for index in 1..self.steps.len() {
            let step = Step(self.book.step.0 + index as u64);
            self.hand_over(peer, stage, index, out);
            for lot in self.steps[index].ledger.drop_peer(stage, peer) {
                self.lease_again(LotOf { step, lot }, out);
            }
        }
        let active = self.active_peers(stage);
        let life = &mut self.lives[stage.0 as usize];
        life.gone.insert(peer);
        if self.closing == Closing::Journaling {
            return;
        }
        if life.prepared(|member| active.contains(&member)).is_some() {
            return self.share_without(peer, out);
        }
        self.hand_over(peer, stage, 0, out);
        let life = &mut self.lives[stage.0 as usize];
        // Others may have gone before, while those who were left had the whole sum.
        let ledger = &mut self.steps[0].ledger;
        let gone = ledger.peers(stage).into_iter().filter(|holder| !active.contains(holder));
        let lots: Vec<Lot> = gone.flat_map(|holder| ledger.drop_peer(stage, holder)).collect();
        let was_member = life.reducing.as_ref().is_some_and(|r| r.plan.has_member(peer));
        if !lots.is_empty() || was_member {
            self.reopen_stage(stage);
        }
        let step = self.book.step;
        lots.into_iter().for_each(|lot| self.lease_again(LotOf { step, lot }, out));
    }

    fn reopen_stage(&mut self, stage: StageId) {
        let life = &mut self.lives[stage.0 as usize];
        life.reducing = None;
        if !self.steps[0].ledger.is_sealed(stage) {
            life.sealed_at = None;
        }
        self.closing = Closing::No;
    }

    /// Starts to reduce every stage that is sealed and not yet being reduced.
    pub(super) fn start_reductions(&mut self, out: &mut Vec<Command>) {
        for stage in (0..self.spec.stages).map(StageId) {
            let life = &self.lives[stage.0 as usize];
            if self.steps[0].ledger.is_sealed(stage)
                && life.reducing.is_none()
                && !self.waits_for_joiner(stage)
                && !self.waits_for_holder(stage, out)
            {
                self.start_reduction(stage, out);
            }
        }
    }

    /// A holder of lots that lacks the sum of the step before cannot be in the reduction. It is waited for, and
    /// if that takes too long, others do its lots again.
    fn waits_for_holder(&mut self, stage: StageId, out: &mut Vec<Command>) -> bool {
        if self.spec.sync.lag() == 0 {
            return false;
        }
        let members = self.reducing_peers(stage);
        let behind = self.steps[0].ledger.peers(stage).into_iter().filter(|peer| !members.contains_key(peer));
        let behind: Vec<PeerId> = behind.collect();
        let sealed_at = self.lives[stage.0 as usize].sealed_at.unwrap_or(self.now);
        if !behind.is_empty() && self.now.since(sealed_at) >= self.spec.tuning.pause {
            let step = self.book.step;
            for peer in &behind {
                for lot in self.steps[0].ledger.drop_peer(stage, *peer) {
                    self.lease_again(LotOf { step, lot }, out);
                }
            }
            self.reopen_stage(stage);
        }
        !behind.is_empty()
    }

    /// A joiner that lacks at most one step is worth a bounded pause: otherwise it might never catch up.
    pub(super) fn waits_for_joiner(&self, stage: StageId) -> bool {
        let sealed_at = self.lives[stage.0 as usize].sealed_at.unwrap_or(self.now);
        let (epoch, step) = (self.book.epoch, self.book.step);
        let nearly = |version: (Epoch, Step)| version.0 == epoch && version.1.0 + 1 >= step.0;
        self.spec.sync.lag() == 0
            && self.now.since(sealed_at) < self.spec.tuning.pause
            && self.members.values().any(|member| {
                member.stage == Some(stage)
                    && matches!(member.phase, Phase::Loading(Source::Donor(_)))
                    && member.status.whole
                    && member.status.stage == Some(stage)
                    && nearly(member.version)
            })
    }

    fn start_reduction(&mut self, stage: StageId, out: &mut Vec<Command>) {
        let members = self.reducing_peers(stage);
        if members.is_empty() {
            return; // The stage is lost; the rollback will see to it.
        }
        let mut holdings = self.steps[0].ledger.holdings(stage);
        let holders: Vec<(PeerId, u64)> =
            holdings.iter().map(|(&peer, lots)| (peer, reduce::stamp(lots))).collect();
        let size = (self.spec.elements(stage), self.part_elements(stage));
        let life = &mut self.lives[stage.0 as usize];
        life.attempt.0 += 1;
        let (attempt, broken, gone) = (life.attempt, life.broken.clone(), std::mem::take(&mut life.gone));
        let mended = life.last.take().filter(|_| broken.is_empty());
        let mended = mended.and_then(|last| reduce::mend(&last, attempt, &gone, &members, holders.clone()));
        let planned =
            mended.map_or_else(|| reduce::plan(stage, attempt, &members, holders, size, &broken), Ok);
        match planned {
            Ok(plan) => {
                let plan = Arc::new(plan);
                let life = &mut self.lives[stage.0 as usize];
                life.last = Some(plan.clone());
                life.reducing =
                    Some(Reducing { plan: plan.clone(), prepared: BTreeMap::new(), looked_at: 0 });
                for peer in plan.members() {
                    let lots = holdings.remove(&peer).unwrap_or_default();
                    let body = Body::Reduce { plan: plan.clone(), lots };
                    self.send(Address::Worker(peer), attempt, body, out);
                }
            }
            Err((a, b)) => {
                let out_sits = self.which_sits_out(stage, a, b);
                let why = format!("{a} and {b} cannot talk, and {stage} has no third member to pass on");
                self.demote(out_sits, &why, out);
            }
        }
    }

    /// Elements of a part, at the most. A vector is not cut into so many that a member which has not heard of the plan
    /// could not keep what comes ahead of it; otherwise the finer the better, since a part that was added up stays,
    /// whoever of its holders dies.
    fn part_elements(&self, stage: StageId) -> u64 {
        let tuning = self.spec.tuning;
        tuning.part_elements.max(self.spec.elements(stage) / (tuning.ahead as u64 / 2).max(1)).max(1)
    }

    /// Of two that cannot talk: the one that we have not heard of for longer than a beat, for it may be dead;
    /// otherwise the one that holds less.
    fn which_sits_out(&self, stage: StageId, a: PeerId, b: PeerId) -> PeerId {
        let beat = self.spec.tuning.beat;
        let silent =
            |peer| self.members.get(&peer).is_none_or(|m| m.silence(self.now) > beat + Span(beat.0 / 2));
        match (silent(a), silent(b)) {
            (true, false) => a,
            (false, true) => b,
            _ if self.steps[0].ledger.count_of(stage, a) <= self.steps[0].ledger.count_of(stage, b) => a,
            _ => b,
        }
    }

    pub(super) fn resend_reduce(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        let Some(member) = self.members.get(&peer) else { return };
        let Some(life) = member.stage.map(|stage| &self.lives[stage.0 as usize]) else { return };
        let Some(reducing) = &life.reducing else { return };
        let lacks = member.status.reducing != Some(life.attempt) && !reducing.prepared.contains_key(&peer);
        if lacks && reducing.plan.has_member(peer) {
            let lots = self.steps[0].ledger.lots_of(reducing.plan.stage, peer);
            let body = Body::Reduce { plan: reducing.plan.clone(), lots };
            self.send(Address::Worker(peer), life.attempt, body, out);
        }
    }

    pub(super) fn on_stuck(
        &mut self,
        peer: PeerId,
        fence: Fence,
        stage: StageId,
        on: PeerId,
        _certain: bool,
        out: &mut Vec<Command>,
    ) {
        let now_at = (self.book.epoch, self.book.step);
        let Some(life) = self.lives.get_mut(stage.0 as usize) else { return };
        let current = (fence.epoch, fence.step) == now_at && fence.attempt == life.attempt;
        let Some(reducing) = life.reducing.as_ref().filter(|_| current && fence.term == self.term) else {
            return self.refusals.count(Refusal::OldAttempt);
        };
        if self.closing == Closing::Journaling || !reducing.plan.has_member(on) || on == peer {
            return self.refusals.count(Refusal::Nonsense);
        }
        life.broken.insert((peer.min(on), peer.max(on)));
        self.reduce_again(stage);
        out.push(Command::Tell(format!(
            "{peer} waits for {on} in {stage}: the sum is tried again another way"
        )));
        self.advance(out);
    }

    pub(super) fn on_prepared(
        &mut self,
        peer: PeerId,
        fence: Fence,
        stage: StageId,
        digest: Digest,
        summary: Vec<u8>,
        out: &mut Vec<Command>,
    ) {
        let now_at = (self.book.epoch, self.book.step);
        let Some(life) = self.lives.get_mut(stage.0 as usize) else { return };
        let current = (fence.epoch, fence.step) == now_at && fence.attempt == life.attempt;
        let Some(reducing) = life.reducing.as_mut().filter(|_| current && fence.term == self.term) else {
            return self.refusals.count(Refusal::OldAttempt);
        };
        if !reducing.plan.has_member(peer) {
            return self.refusals.count(Refusal::Nonsense);
        }
        if reducing.prepared.values().any(|(other, _)| *other != digest) {
            out.push(Command::Tell(format!(
                "{peer} got another sum than the others of {stage}: tried again"
            )));
            self.reduce_again(stage);
            return self.advance(out);
        }
        reducing.prepared.insert(peer, (digest, summary));
        self.conclude(out);
    }

    /// What was tried came to nothing: the stage is reduced again, by another plan.
    pub(super) fn reduce_again(&mut self, stage: StageId) {
        let life = &mut self.lives[stage.0 as usize];
        (life.reducing, life.last) = (None, None);
        self.closing = Closing::No;
    }

    /// All stages are prepared, and what they share is added up: the host makes the constants of the commit.
    pub(super) fn conclude(&mut self, out: &mut Vec<Command>) {
        let open = matches!(self.closing, Closing::No | Closing::Sharing);
        if !open || self.halted.is_some() || self.collecting.is_some() || self.is_being_amended() {
            return;
        }
        let Some(prepared) = self.all_prepared() else { return };
        if !self.spec.shared.is_empty() && self.closing == Closing::No {
            return self.start_sharing(out);
        }
        let Some(shared) = self.shared_summaries() else { return };
        self.closing = Closing::Concluding;
        let summaries = prepared.into_iter().map(|(_, summary)| summary).chain(shared).collect();
        self.conclusions += 1;
        out.push(Command::Conclude(self.conclusions, self.book.step, summaries));
    }

    /// Whether an amendment is not yet safe: constants must not be made without it and replayed with it.
    fn is_being_amended(&self) -> bool {
        self.appended.values().any(|record| matches!(record, Record::Amended(..)))
    }

    pub(super) fn on_concluded(&mut self, number: u64, constants: Option<Vec<u8>>, out: &mut Vec<Command>) {
        let (epoch, step) = (self.book.epoch, self.book.step);
        if number != self.conclusions
            || self.closing != Closing::Concluding
            || constants.as_ref().is_some_and(|constants| constants.len() > MAX_SUMMARY_BYTES)
        {
            return self.refusals.count(Refusal::Unasked);
        }
        let Some(prepared) = self.all_prepared() else { return };
        let stages = (0..).map(StageId).zip(prepared);
        let digests =
            stages.map(|(stage, (digest, _))| self.shared_digest(stage).unwrap_or(digest)).collect();
        let skipped = constants.is_none();
        if skipped {
            let why = match self.book.left_out.contains(&step) {
                true => "the update is left out, as was decided",
                false => "the sum is not finite: the update is skipped",
            };
            out.push(Command::Tell(format!("{step}: {why}")));
        }
        let (term, constants, savers) = (self.term, constants.unwrap_or_default(), self.savers());
        self.commit(Commit { term, epoch, step, constants, digests, savers, skipped }, out);
    }

    /// The host finds the loss of the open step too high: it is not closed, and all go back to the checkpoint.
    pub(super) fn on_spiked(&mut self, number: u64, first: Step, out: &mut Vec<Command>) {
        let last = self.book.step;
        if number != self.conclusions || self.closing != Closing::Concluding || first > last {
            return self.refusals.count(Refusal::Unasked);
        }
        // A checkpoint on its way to the journal is there before this is.
        let saved = |record: &Record| if let Record::Checkpoint(of) = record { Some(*of) } else { None };
        let version = self.appended.values().filter_map(saved).next_back().unwrap_or(self.book.checkpoint);
        // What is in the checkpoint stays.
        let (epoch, first) = (Epoch(self.book.epoch.0 + 1), first.max(version));
        out.push(Command::Tell(format!(
            "{last}: the loss is a spike: all go back to the checkpoint of step {}, and the updates from step {} to {} \
             are left out",
            version.0, first.0, last.0
        )));
        self.closing = Closing::Journaling;
        self.append(Record::LeftOut(epoch, version, (first, last)), out);
    }

    /// Closes the step: from here on only the journal can stop it.
    pub(super) fn commit(&mut self, commit: Commit, out: &mut Vec<Command>) {
        self.closing = Closing::Journaling;
        self.append(Record::Commit(Arc::new(commit)), out);
    }

    fn all_prepared(&mut self) -> Option<Vec<(Digest, Vec<u8>)>> {
        let members = &self.members;
        // A member may have died and come back in another stage: it is not the same any more.
        let holds = |stage: usize, peer: PeerId| {
            let stage = Some(StageId(stage as u16));
            members.get(&peer).is_some_and(|member| member.is_active() && member.stage == stage)
        };
        let lives = self.lives.iter_mut().enumerate();
        lives.map(|(stage, life)| life.prepared(|peer| holds(stage, peer)).cloned()).collect()
    }

    /// If a checkpoint is due after the open step: the first of each stage's members that does not leave.
    pub(super) fn savers(&self) -> Vec<PeerId> {
        let every = self.spec.checkpoint_every;
        if every == 0 || !(self.book.step.0 + 1).is_multiple_of(every) {
            return Vec::new();
        }
        (0..self.spec.stages).filter_map(|stage| self.saver(StageId(stage))).collect()
    }

    fn saver(&self, stage: StageId) -> Option<PeerId> {
        let mut holders = self.members.iter().filter(|(_, m)| m.is_whole() && m.stage == Some(stage));
        holders.clone().find(|(_, m)| !m.draining).or_else(|| holders.next()).map(|(&peer, _)| peer)
    }

    /// When the run rests, after its last step or paused, its version is saved, whenever the last checkpoint was. Who
    /// fails at it is asked again, and who is gone is replaced.
    pub(super) fn ask_to_save(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        let Some(stage) = self.members.get(&peer).and_then(|member| member.stage) else { return };
        let version = self.book.step;
        let part_is_saved = self.saved.get(&version).is_some_and(|stages| stages.contains(&stage));
        let is_saved = part_is_saved || self.is_being_saved(version);
        let waits = |&(asked, at): &(PeerId, Time)| asked == peer && self.now < at + self.spec.tuning.pause;
        let was_asked = self.asked_to_save.get(&stage).is_some_and(waits);
        if self.rests() && !self.is_safe() && !is_saved && !was_asked && self.saver(stage) == Some(peer) {
            self.asked_to_save.insert(stage, (peer, self.now));
            self.send(Address::Worker(peer), Attempt(0), Body::Save, out);
        }
    }

    /// The commit is safe: from now on the step is closed, whatever happens to us.
    pub(super) fn on_committed(&mut self, commit: Arc<Commit>, out: &mut Vec<Command>) {
        let left_out = if commit.skipped { Vec::new() } else { self.left_out() };
        self.closing = Closing::No;
        self.next_step();
        self.reset_lives();
        // The commit asks its savers.
        let stage_of = |&peer: &PeerId| Some((self.members.get(&peer)?.stage?, (peer, self.now)));
        self.asked_to_save = commit.savers.iter().filter_map(stage_of).collect();
        let applies = |(peer, m): &(&PeerId, &super::Member)| m.is_whole() && !left_out.contains(peer);
        let apply: Vec<PeerId> = self.members.iter().filter(applies).map(|(&peer, _)| peer).collect();
        for peer in apply {
            self.send(Address::Worker(peer), Attempt(0), Body::Commit(commit.clone()), out);
        }
        self.leave_behind(left_out, out);
        self.let_leavers_go(out);
        self.rebalance(out);
        self.new_view(out);
    }

    /// Everything that was under way is void.
    pub(super) fn reset_steps(&mut self) {
        self.closing = Closing::No;
        self.clear_steps();
        self.reset_lives();
    }

    /// A new step is the oldest: its stages may be sealed already.
    fn reset_lives(&mut self) {
        self.lives = vec![Life::default(); self.spec.stages as usize];
        for stage in 0..self.spec.stages {
            if self.steps[0].ledger.is_sealed(StageId(stage)) {
                self.lives[stage as usize].sealed_at = Some(self.now);
            }
        }
    }

    pub(super) fn on_saved(&mut self, fence: Fence, stage: StageId, version: Step, out: &mut Vec<Command>) {
        let known =
            fence.epoch == self.book.epoch && version <= self.book.step && version > self.book.checkpoint;
        // A history that is about to be left has no checkpoints any more.
        if !known || self.is_going_back() || self.is_being_saved(version) || stage.0 >= self.spec.stages {
            return self.refusals.count(Refusal::OldStep);
        }
        let saved = self.saved.entry(version).or_default();
        saved.insert(stage);
        if saved.len() == self.spec.stages as usize {
            self.saved.retain(|&other, _| other > version);
            self.append(Record::Checkpoint(version), out);
        }
    }

    /// Whether the record of going back is on its way to the journal.
    pub(super) fn is_going_back(&self) -> bool {
        self.appended.values().any(|record| matches!(record, Record::Rollback(..) | Record::LeftOut(..)))
    }

    /// Whether the record of this checkpoint, or of a later one, is on its way to the journal.
    pub(super) fn is_being_saved(&self, version: Step) -> bool {
        self.appended.values().any(|record| matches!(record, Record::Checkpoint(of) if *of >= version))
    }

    /// The members of a stage that can be in a reduction.
    fn reducing_peers(&self, stage: StageId) -> BTreeMap<PeerId, reduce::Member> {
        let holds = |member: &super::Member| member.is_whole() && member.stage == Some(stage);
        let about = |member: &super::Member| {
            let Capability { site, link_bytes_per_s: bytes_per_s, .. } = member.capability;
            reduce::Member { site, bytes_per_s }
        };
        self.members.iter().filter(|(_, m)| holds(m)).map(|(&peer, m)| (peer, about(m))).collect()
    }

    /// The members of a stage that count.
    fn active_peers(&self, stage: StageId) -> BTreeSet<PeerId> {
        let holds = |member: &super::Member| member.is_active() && member.stage == Some(stage);
        self.members.iter().filter(|(_, m)| holds(m)).map(|(&peer, _)| peer).collect()
    }
}
