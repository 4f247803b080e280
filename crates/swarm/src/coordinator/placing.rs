//! Who gets which stage, when a joiner counts, and what happens when a stage has nobody left.

use std::collections::BTreeMap;

use crate::coordinator::members::Phase;
use crate::coordinator::{Closing, Command, Coordinator};
use crate::ids::*;
use crate::journal::{Place, Record};
use crate::message::*;
use crate::placement::{Candidate, Placing, place};

impl Coordinator {
    /// Gives idle members a stage; rolls back when a stage has nobody who has its state.
    pub(super) fn place_members(&mut self, out: &mut Vec<Command>) {
        if let Some(stage) = self.lost_stage() {
            return match self.who_sat_out(stage) {
                Some(peer) => self.reinstate(peer, out),
                None => self.fill_from_checkpoint(out),
            };
        }
        let idle = self.members.values().any(|member| member.phase == Phase::Idle && !member.draining);
        if !idle {
            return;
        }
        for Placing { peer, stage, reason } in self.placings().unwrap_or_default() {
            if let Some(donor) = self.donor(stage, peer) {
                out.push(Command::Tell(format!("{peer} joins {stage}: {reason}")));
                self.assign(peer, stage, Source::Donor(donor), out);
                self.note_join();
            }
        }
    }

    /// Whether every stage has somebody who counts.
    pub(super) fn every_stage_is_held(&self) -> bool {
        let mut held = vec![false; self.spec.stages as usize];
        for member in self.members.values().filter(|member| member.is_active()) {
            if let Some(stage) = member.stage {
                held[stage.0 as usize] = true;
            }
        }
        held.into_iter().all(|held| held)
    }

    /// Whether members still load what is safe, and not for too long: work that is given out before they are
    /// there all goes to the first.
    pub(super) fn is_filling(&self) -> bool {
        let loads = |phase| matches!(phase, Phase::Loading(Source::Seed | Source::Checkpoint));
        self.now.since(self.filled_at) < self.spec.tuning.pause
            && self.members.values().any(|member| loads(member.phase))
    }

    /// A stage that has neither a holder with the weights of the open step nor anybody who loads them from what
    /// is safe.
    fn lost_stage(&self) -> Option<StageId> {
        let mut lives = vec![false; self.spec.stages as usize];
        let to_compute = self.steps.front().is_some_and(|open| !open.ledger.is_done());
        for member in self.members.values() {
            let loads = matches!(member.phase, Phase::Loading(Source::Seed | Source::Checkpoint));
            let holds = member.is_whole() && !(to_compute && member.since() > self.book.step);
            if let Some(stage) = member.stage.filter(|_| loads || holds) {
                lives[stage.0 as usize] = true;
            }
        }
        lives.iter().position(|lives| !lives).map(|stage| StageId(stage as u16))
    }

    /// A member of the stage that was left out of this step's reduction, and still has the version that is open.
    fn who_sat_out(&self, stage: StageId) -> Option<PeerId> {
        let now_at = (self.book.epoch, self.book.step);
        let has = |member: &super::Member| {
            let whole = member.status.whole && member.since() <= now_at.1;
            member.stage == Some(stage) && whole && member.version == now_at
        };
        self.members.iter().find(|(_, member)| has(member)).map(|(&peer, _)| peer)
    }

    /// Whoever it could not talk to is gone: it counts again.
    fn reinstate(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        out.push(Command::Tell(format!("{peer} counts again: nobody else has the state of its stage")));
        if let Some(member) = self.members.get_mut(&peer) {
            member.sits_out = None;
        }
        self.activate(peer, out);
    }

    /// How many peers it takes to fill the stages: the quorum counts only until they were filled for the first time.
    pub(super) fn peers_to_start(&self) -> usize {
        let started = self.book.epoch > Epoch(0);
        (self.spec.stages as usize).max(if started { 0 } else { self.spec.tuning.quorum })
    }

    /// All holders of a stage are gone: everybody goes back to the last checkpoint, under a new epoch. The start
    /// of a run is the same thing: version 0 is a checkpoint that everybody can make from the seed.
    fn fill_from_checkpoint(&mut self, out: &mut Vec<Command>) {
        let staying = self.members.values().filter(|member| !member.draining).count();
        if self.members.len() < self.peers_to_start() || staying < self.spec.stages as usize {
            return;
        }
        if self.is_going_back() {
            return;
        }
        if self.is_being_saved(Step(0)) {
            return; // In a moment there is a later one to go back to.
        }
        let version = self.book.checkpoint;
        let epoch = Epoch(self.book.epoch.0 + 1);
        out.push(Command::Tell(match self.book.epoch {
            Epoch(0) => format!("{} peers are here: the run begins", self.members.len()),
            _ => format!("a stage has no holder left: all go back to the checkpoint of step {}", version.0),
        }));
        self.closing = Closing::Journaling;
        self.append(Record::Rollback(epoch, version), out);
    }

    /// The rollback is safe: everybody gets the state of the checkpoint.
    pub(super) fn on_rolled_back(&mut self, out: &mut Vec<Command>) {
        self.reset_steps();
        self.saved.clear();
        let Some(source) = self.safe_source() else { return };
        self.filled_at = self.now;
        // Who only waited for a donor is placed anew.
        let joiners =
            self.members.values_mut().filter(|m| matches!(m.phase, Phase::Loading(Source::Donor(_))));
        joiners.for_each(|member| (member.stage, member.phase) = (None, Phase::Idle));
        for Placing { peer, stage, .. } in self.placings().unwrap_or_default() {
            if let Some(member) = self.members.get_mut(&peer) {
                member.stage = Some(stage);
            }
        }
        for member in self.members.values_mut() {
            (member.behind, member.catches_up_from) = (false, None);
        }
        let placed: Vec<(PeerId, StageId)> =
            self.members.iter().filter_map(|(&peer, member)| Some((peer, member.stage?))).collect();
        for (peer, stage) in placed {
            self.assign(peer, stage, source, out);
        }
        self.new_view(out);
    }

    fn placings(&self) -> Option<Vec<Placing>> {
        let candidates: Vec<Candidate> = self
            .members
            .iter()
            .filter(|(_, member)| !member.draining)
            .map(|(&peer, member)| {
                let Capability { site, speed, .. } = member.capability;
                Candidate { peer, site, speed, stage: member.stage }
            })
            .collect();
        place(&candidates, &self.spec.all_costs())
    }

    /// A holder of the stage to fetch from: in the joiner's site if there is one, not about to leave, the one
    /// that the fewest fetch from already, with the best uplink.
    pub(super) fn donor(&self, stage: StageId, joiner: PeerId) -> Option<PeerId> {
        let site = self.members.get(&joiner)?.capability.site;
        let mut gives_to: BTreeMap<PeerId, usize> = BTreeMap::new();
        for member in self.members.values() {
            let loads_from = match member.phase {
                Phase::Loading(Source::Donor(donor)) => Some(donor),
                _ => None,
            };
            let catches_up_from = member.catches_up_from.filter(|donor| loads_from != Some(*donor));
            for donor in loads_from.into_iter().chain(catches_up_from) {
                *gives_to.entry(donor).or_default() += 1;
            }
        }
        let holders = self
            .members
            .iter()
            .filter(|(peer, member)| **peer != joiner && member.is_whole() && member.stage == Some(stage));
        let rank = |peer: PeerId, member: &super::Member| {
            let fetchers = gives_to.get(&peer).copied().unwrap_or(0);
            (member.capability.site != site, member.draining, fetchers)
        };
        holders
            .map(|(&peer, member)| (rank(peer, member), member.capability.link_bytes_per_s, peer))
            .min_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)).then(a.2.cmp(&b.2)))
            .map(|(_, _, peer)| peer)
    }

    pub(super) fn assign(&mut self, peer: PeerId, stage: StageId, source: Source, out: &mut Vec<Command>) {
        let Some(member) = self.members.get_mut(&peer) else { return };
        member.stage = Some(stage);
        member.phase = Phase::Loading(source);
        member.behind = false;
        let (number, incarnation) = (member.number, member.incarnation);
        let place = Place { member: number, incarnation, stage, capability: member.capability.clone() };
        self.append(Record::Placed(peer, place), out);
        let assign = Assign { member: number, stage, source, catch_up: false };
        self.send(Address::Worker(peer), Attempt(0), Body::Assign(assign), out);
    }

    /// The order again, with another donor if the old one is gone or has nothing to give.
    pub(super) fn resend_assign(&mut self, peer: PeerId, source: Source, out: &mut Vec<Command>) {
        let Some((stage, member)) = self.members.get(&peer).and_then(|m| Some((m.stage?, m.number))) else {
            return;
        };
        let source = match source {
            Source::Donor(donor) if self.can_give(donor, stage) => Some(source),
            Source::Donor(_) => self.donor(stage, peer).map(Source::Donor),
            // Everybody may have gone on since it was told to load what is safe.
            Source::Seed | Source::Checkpoint => {
                self.safe_source().or_else(|| self.donor(stage, peer).map(Source::Donor))
            }
        };
        let Some(source) = source else { return self.unplace(peer, out) };
        if let Some(member) = self.members.get_mut(&peer) {
            member.phase = Phase::Loading(source);
        }
        self.send(
            Address::Worker(peer),
            Attempt(0),
            Body::Assign(Assign { member, stage, source, catch_up: false }),
            out,
        );
    }

    /// Where the state of the open step can be had without a donor.
    fn safe_source(&self) -> Option<Source> {
        match self.book.step {
            Step(0) => Some(Source::Seed),
            step if step == self.book.checkpoint => Some(Source::Checkpoint),
            _ => None,
        }
    }

    /// There is nothing that a member could load for its stage: it has none, and if nobody has, all roll back.
    fn unplace(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        if let Some(member) = self.members.get_mut(&peer) {
            (member.stage, member.phase) = (None, Phase::Idle);
            self.append(Record::Removed(peer), out);
            self.advance(out);
        }
    }

    /// A joiner has the state of the open step. It counts, unless its stage is already being reduced and it
    /// could do nothing before that is over: it would lack the sum, and counts from the next step on.
    pub(super) fn activate_if_open(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        let open = self.members.get(&peer).and_then(|member| member.stage).is_some_and(|stage| {
            self.lives[stage.0 as usize].reducing.is_none() && self.closing == Closing::No
        });
        if open || self.spec.sync.lag() > 0 {
            self.activate(peer, out);
        }
    }

    pub(super) fn activate(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        let now_at = (self.book.epoch, self.book.step);
        if let Some(member) = self.members.get_mut(&peer).filter(|member| member.sits_out != Some(now_at)) {
            member.phase = Phase::Active;
            let behind = member.version != now_at;
            member.behind = behind;
            self.send(Address::Worker(peer), Attempt(0), Body::Activate, out);
            if behind {
                self.catch_up(peer, out);
            }
            self.new_view(out);
            self.advance(out);
        }
    }

    /// Whether a member has the weights of a version with which an open step is computed.
    pub(super) fn is_near(&self, peer: PeerId) -> bool {
        self.members.get(&peer).is_some_and(|member| {
            let (epoch, version) = member.version;
            member.status.whole
                && member.status.stage == member.stage
                && epoch == self.book.epoch
                && self.spec.sync.is_open(version, self.book.step)
        })
    }

    /// A member that works fetches the sums that it was not there for.
    pub(super) fn catch_up(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        let Some((stage, member)) = self.members.get(&peer).and_then(|m| Some((m.stage?, m.number))) else {
            return;
        };
        // It is not sent from donor to donor while one still gives.
        let before = self.members.get(&peer).and_then(|member| member.catches_up_from);
        let donor = before.filter(|&donor| self.can_give(donor, stage)).or_else(|| self.donor(stage, peer));
        if let Some(member) = self.members.get_mut(&peer) {
            member.catches_up_from = donor;
        }
        if let Some(donor) = donor {
            let assign = Assign { member, stage, source: Source::Donor(donor), catch_up: true };
            self.send(Address::Worker(peer), Attempt(0), Body::Assign(assign), out);
        }
    }

    fn can_give(&self, donor: PeerId, stage: StageId) -> bool {
        self.members.get(&donor).is_some_and(|member| member.is_whole() && member.stage == Some(stage))
    }

    /// A member is at the open step.
    pub(super) fn caught_up(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        if let Some(member) = self.members.get_mut(&peer).filter(|member| member.behind) {
            (member.behind, member.catches_up_from) = (false, None);
            self.new_view(out);
            self.advance(out);
        }
    }

    /// The members that work but were not in the reductions of the oldest step.
    pub(super) fn left_out(&self) -> Vec<PeerId> {
        let is_out = |(peer, member): &(&PeerId, &super::Member)| {
            let life = member.stage.map(|stage| &self.lives[stage.0 as usize]);
            let plan = life.and_then(|life| life.reducing.as_ref());
            member.is_active() && plan.is_some_and(|reducing| !reducing.plan.has_member(**peer))
        };
        self.members.iter().filter(is_out).map(|(&peer, _)| peer).collect()
    }

    /// A step was closed without these: they fetch its sum. Who lacked one before has no weights left that are
    /// of use, and is given the newest as a joiner is.
    pub(super) fn leave_behind(&mut self, left_out: Vec<PeerId>, out: &mut Vec<Command>) {
        for peer in left_out {
            let Some(member) = self.members.get_mut(&peer) else { continue };
            if member.behind || self.spec.sync.lag() == 0 {
                self.unseat(peer, out);
            } else {
                member.behind = true;
                self.catch_up(peer, out);
            }
        }
    }

    /// A member cannot take part in this step: what it holds does not count, and it is given the state of the
    /// next one, as a joiner is.
    pub(super) fn demote(&mut self, peer: PeerId, why: &str, out: &mut Vec<Command>) {
        out.push(Command::Tell(format!("{peer} sits out {}: {why}", self.book.step)));
        let now_at = (self.book.epoch, self.book.step);
        if let Some(member) = self.members.get_mut(&peer) {
            member.sits_out = Some(now_at);
        }
        self.unseat(peer, out);
    }

    /// A member's state is of no use any more: it gets the newest from a donor.
    fn unseat(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        let Some(member) = self.members.get_mut(&peer) else { return };
        let Some(stage) = member.stage.take() else { return };
        (member.phase, member.behind, member.catches_up_from) = (Phase::Idle, false, None);
        self.forget_holder(peer, stage, out);
        match self.donor(stage, peer) {
            Some(donor) => self.assign(peer, stage, Source::Donor(donor), out),
            None => self.append(Record::Removed(peer), out),
        }
        self.new_view(out);
    }

    /// Those with a notice hold nothing now that the step is closed.
    pub(super) fn let_leavers_go(&mut self, out: &mut Vec<Command>) {
        let leaving: Vec<PeerId> = self
            .members
            .iter()
            .filter(|(peer, member)| member.draining && self.can_spare(**peer))
            .map(|(&peer, _)| peer)
            .collect();
        for peer in leaving {
            self.remove(peer, "it asked to leave, and holds nothing that is needed", out);
        }
    }

    /// Whether its stage would have somebody without it who stays, and can compute what is open of the oldest step.
    pub(super) fn can_spare(&self, peer: PeerId) -> bool {
        let Some(stage) = self.members.get(&peer).and_then(|member| member.stage) else { return true };
        let to_compute = self.steps.front().is_some_and(|open| !open.ledger.is_done());
        let takes_its_place = |m: &super::Member| {
            let able = !to_compute || m.since() <= self.book.step;
            m.is_whole() && m.stage == Some(stage) && !m.draining && able
        };
        self.members.iter().any(|(&other, m)| other != peer && takes_its_place(m))
    }
}
