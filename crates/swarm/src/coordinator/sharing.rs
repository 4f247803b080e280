//! Between prepared and concluded, if stages share parameters (rule 10): their members add up over stages what each
//! stage has of those parameters' gradients, in numbered rounds.

use std::collections::{BTreeMap, BTreeSet};

use crate::coordinator::{Closing, Command, Coordinator};
use crate::ids::*;
use crate::message::*;
use crate::refusal::Refusal;

/// A round.
#[derive(Clone, Debug, Default)]
pub(super) struct Sharing {
    /// Its number; none is ever used again in this term.
    pub round: Attempt,
    /// Who has not settled.
    pub awaited: BTreeSet<PeerId>,
    settled: BTreeMap<StageId, (Digest, Vec<u8>)>,
}

impl Coordinator {
    /// All stages are prepared: a round begins.
    pub(super) fn start_sharing(&mut self, out: &mut Vec<Command>) {
        self.closing = Closing::Sharing;
        let round = Attempt(self.sharing.round.0 + 1);
        let stages =
            (0..self.spec.stages).map(StageId).filter(|&stage| !self.spec.partners(stage).is_empty());
        let awaited = stages.flat_map(|stage| self.in_reduction(stage)).collect();
        self.sharing = Sharing { round, awaited, settled: BTreeMap::new() };
        self.send_shares(out);
    }

    /// Somebody is gone: it is not waited for, and others are asked in its place.
    pub(super) fn share_without(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        if self.closing == Closing::Sharing {
            self.sharing.awaited.remove(&peer);
            self.send_shares(out);
        }
    }

    /// A member may not have heard of the round.
    pub(super) fn resend_share(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        let knows = self.members.get(&peer).and_then(|member| member.status.sharing);
        let awaited = self.closing == Closing::Sharing && self.sharing.awaited.contains(&peer);
        if awaited && knows != Some(self.sharing.round) {
            self.send_share(peer, out);
        }
    }

    pub(super) fn on_settled(
        &mut self,
        peer: PeerId,
        fence: Fence,
        stage: StageId,
        digest: Digest,
        summary: Vec<u8>,
        out: &mut Vec<Command>,
    ) {
        let current = (fence.term, fence.epoch, fence.step, fence.attempt)
            == (self.term, self.book.epoch, self.book.step, self.sharing.round);
        if !current || self.closing != Closing::Sharing || !self.sharing.awaited.contains(&peer) {
            return self.refusals.count(Refusal::OldAttempt);
        }
        if self.members.get(&peer).is_none_or(|member| member.stage != Some(stage)) {
            return self.refusals.count(Refusal::Nonsense);
        }
        let told = (digest, summary);
        if self.sharing.settled.get(&stage).is_some_and(|other| *other != told) {
            out.push(Command::Tell(format!(
                "{peer} got another sum of what {stage} shares than the others: tried again"
            )));
            self.reduce_again(stage);
            return self.advance(out);
        }
        self.sharing.awaited.remove(&peer);
        self.sharing.settled.insert(stage, told);
        self.conclude(out);
    }

    /// The hash of all that the update of a stage that shares is made of.
    pub(super) fn shared_digest(&self, stage: StageId) -> Option<Digest> {
        let of_stage = self.sharing.settled.get(&stage).filter(|_| !self.spec.partners(stage).is_empty());
        of_stage.map(|(digest, _)| *digest)
    }

    /// What the stages that share have told of their sums, once nobody is waited for.
    pub(super) fn shared_summaries(&self) -> Option<Vec<Vec<u8>>> {
        let summaries = || self.sharing.settled.values().map(|(_, summary)| summary.clone()).collect();
        self.sharing.awaited.is_empty().then(summaries)
    }

    fn send_shares(&mut self, out: &mut Vec<Command>) {
        for peer in self.sharing.awaited.clone() {
            self.send_share(peer, out);
        }
    }

    fn send_share(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        let Some(member) = self.members.get(&peer) else { return };
        let Some(stage) = member.stage else { return };
        let site = member.capability.site;
        let mut sources = Vec::new();
        // Those of one's own stage may be in reach where the others are not.
        let own: Vec<PeerId> = self.in_reduction(stage).into_iter().filter(|other| *other != peer).collect();
        for partner in self.spec.partners(stage) {
            let mut peers = self.in_reduction(partner);
            // The nearest first, and not everybody the same one.
            let first = (peer.0 as usize).checked_rem(peers.len()).unwrap_or(0);
            peers.rotate_left(first);
            let is_far = |peer: &PeerId| self.members.get(peer).is_none_or(|m| m.capability.site != site);
            peers.sort_by_key(is_far);
            peers.extend(&own);
            sources.push((partner, peers));
        }
        self.send(Address::Worker(peer), self.sharing.round, Body::Share { sources }, out);
    }

    /// The members of a stage's reduction that are still there. Who was gone and came back has nothing of it.
    fn in_reduction(&self, stage: StageId) -> Vec<PeerId> {
        let life = &self.lives[stage.0 as usize];
        let members = life.reducing.iter().flat_map(|reducing| reducing.prepared.keys().copied());
        let holds = |peer: &PeerId| {
            let member = self.members.get(peer).filter(|member| member.is_active());
            member.is_some_and(|member| member.stage == Some(stage)) && !life.gone.contains(peer)
        };
        members.filter(holds).collect()
    }
}
