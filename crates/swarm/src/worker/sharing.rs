//! Parameters that several stages use (rule 10): once every stage is prepared, each of their members fetches what the
//! other stages have of those parameters' gradients, and adds it up in the order of stages.
//!
//! Rounds are numbered. As soon as any stage is reduced again, the round is void, and another follows. Who cannot reach
//! the other stage asks those of its own: what has come to one, it passes on.

use std::collections::BTreeMap;

use crate::ids::*;
use crate::message::*;
use crate::refusal::Refusal;
use crate::time::{Span, Time};
use crate::worker::io::ReduceNo;
use crate::worker::{Command, Worker};

/// A round, as one member sees it.
#[derive(Clone, Debug)]
pub struct Sharing {
    round: Attempt,
    /// Who can be asked, by stage.
    sources: BTreeMap<StageId, Vec<PeerId>>,
    asked: BTreeMap<StageId, PeerId>,
    come: BTreeMap<StageId, Payload>,
    tries: u32,
    began: Time,
    retry_at: Time,
    settled: Option<(Digest, Vec<u8>)>,
}

impl Sharing {
    /// Whom to ask now: for every stage that is missing, unless one who is there was asked already.
    fn whom_to_ask(&mut self) -> Vec<(StageId, PeerId)> {
        let mut to_ask = Vec::new();
        for (&stage, peers) in self.sources.iter().filter(|(stage, _)| !self.come.contains_key(stage)) {
            if self.asked.get(&stage).is_some_and(|asked| peers.contains(asked)) {
                continue;
            }
            if let Some(&peer) = peers.get(self.tries as usize % peers.len().max(1)) {
                self.asked.insert(stage, peer);
                to_ask.push((stage, peer));
            }
        }
        to_ask
    }

    fn is_complete(&self) -> bool {
        self.come.len() == self.sources.len()
    }
}

impl Worker {
    /// The coordinator begins a round, or names others to ask.
    pub(super) fn on_share(&mut self, envelope: Envelope, now: Time, out: &mut Vec<Command>) {
        if !self.is_now(&envelope) {
            return;
        }
        let Fence { term, step, attempt: round, .. } = envelope.fence;
        let Body::Share { sources } = envelope.body else { return };
        let sources: BTreeMap<StageId, Vec<PeerId>> = sources.into_iter().collect();
        let partners = self.stage.map(|stage| self.spec.partners(stage)).unwrap_or_default();
        let sound = !partners.is_empty()
            && sources.keys().eq(&partners)
            && sources.values().all(|peers| !peers.is_empty());
        if !sound || step != self.version {
            return self.refusals.count(Refusal::Nonsense);
        }
        let retry_at = now + self.share_patience(0);
        let of_term = self.reduction.as_mut().filter(|reduction| reduction.term == term);
        let Some(reduction) = of_term.filter(|reduction| reduction.prepared.is_some()) else {
            return self.refusals.count(Refusal::OldAttempt); // If it is not old, our next beat asks for it again.
        };
        match &mut reduction.sharing {
            Some(sharing) if sharing.round > round => return self.refusals.count(Refusal::OldAttempt),
            Some(sharing) if sharing.round == round => sharing.sources = sources,
            slot => {
                let (asked, come) = (BTreeMap::new(), BTreeMap::new());
                *slot = Some(Sharing {
                    round,
                    sources,
                    asked,
                    come,
                    tries: 0,
                    began: now,
                    retry_at,
                    settled: None,
                });
            }
        }
        self.ask_for_uses(out);
        self.send_settled(out);
        self.look_again(now, out); // Requests may have overtaken the order.
    }

    /// Somebody asks for our uses, or sends what we asked for.
    pub(super) fn on_uses_message(&mut self, envelope: Envelope, out: &mut Vec<Command>) {
        if !self.is_now(&envelope) {
            return;
        }
        let (fence, ours) = (envelope.fence, self.round());
        let of_term = self.reduction.as_ref().is_some_and(|reduction| reduction.term == fence.term);
        match (&envelope.body, envelope.from) {
            (_, Address::Worker(_)) if of_term && ours > Some(fence.attempt) => {
                self.refusals.count(Refusal::OldAttempt);
            }
            (Body::UsesRequest { .. }, Address::Worker(_)) if !of_term || ours < Some(fence.attempt) => {
                self.keep_for_later(envelope);
            }
            (&Body::UsesRequest { stage }, Address::Worker(to)) if self.stage == Some(stage) => {
                out.push(Command::SendUses { to, fence, stage });
            }
            (&Body::UsesRequest { stage }, to) => {
                let come = self.sharing().and_then(|sharing| sharing.come.get(&stage).copied());
                match come {
                    Some(payload) => self.send(to, fence, Body::Uses { stage, payload }, out),
                    None => self.refusals.count(Refusal::OtherStage),
                }
            }
            (&Body::Uses { stage, payload }, Address::Worker(from))
                if of_term && ours == Some(fence.attempt) =>
            {
                self.on_uses(stage, from, payload, out);
            }
            _ => self.refusals.count(Refusal::Unasked),
        }
    }

    fn on_uses(&mut self, stage: StageId, from: PeerId, payload: Payload, out: &mut Vec<Command>) {
        let Some(reduction) = self.reduction.as_mut() else { return };
        let Some(sharing) = reduction.sharing.as_mut() else { return };
        let wanted = sharing.sources.get(&stage).is_some_and(|peers| peers.contains(&from));
        if !wanted || sharing.come.contains_key(&stage) {
            return self.refusals.count(Refusal::Unasked);
        }
        sharing.come.insert(stage, payload);
        if sharing.is_complete() {
            let (round, come) = (sharing.round, sharing.come.clone().into_iter().collect());
            let number = self.reduction.as_ref().map(|reduction| self.number_of(reduction));
            out.extend(number.map(|number| Command::Settle(number, round, come)));
        }
    }

    /// What is shared was added up: the coordinator may commit.
    pub(super) fn on_settled(
        &mut self,
        number: ReduceNo,
        round: Attempt,
        digest: Digest,
        summary: Vec<u8>,
        now: Time,
        out: &mut Vec<Command>,
    ) {
        if let Some(sharing) = self.sharing_of(number, round) {
            sharing.settled = Some((digest, summary));
            let took = now.since(sharing.began);
            self.share_time.observe(took);
            self.send_settled(out);
        }
    }

    /// What came cannot be added up: others are asked.
    pub(super) fn on_settle_failed(
        &mut self,
        number: ReduceNo,
        round: Attempt,
        now: Time,
        out: &mut Vec<Command>,
    ) {
        if let Some(sharing) = self.sharing_of(number, round) {
            sharing.come.clear();
            self.refusals.count(Refusal::Nonsense);
            self.ask_others(now, out);
        }
    }

    /// The round that the host speaks of, if it is the current one.
    fn sharing_of(&mut self, number: ReduceNo, round: Attempt) -> Option<&mut Sharing> {
        let awaited = self.reduction.as_ref().is_some_and(|reduction| self.number_of(reduction) == number);
        let sharing = self.reduction.as_mut().filter(|_| awaited)?.sharing.as_mut();
        sharing.filter(|sharing| sharing.round == round)
    }

    pub(super) fn send_settled(&mut self, out: &mut Vec<Command>) {
        let of_term = self.reduction.as_ref().filter(|reduction| reduction.term == self.term);
        let Some(sharing) = of_term.and_then(|reduction| reduction.sharing.as_ref()) else { return };
        if let (Some((digest, summary)), Some(stage)) = (sharing.settled.clone(), self.stage) {
            self.tell_coordinator(sharing.round, Body::Settled { stage, digest, summary }, out);
        }
    }

    /// The hash of all that our update would be made of: of the reduced gradient, or, if we share parameters, of that
    /// and of their sums.
    pub(super) fn update_digest(&self) -> Option<Digest> {
        let shares = self.stage.is_some_and(|stage| !self.spec.partners(stage).is_empty());
        let told = match shares {
            true => self.sharing().and_then(|sharing| sharing.settled.as_ref()),
            false => self.reduction.as_ref().and_then(|reduction| reduction.prepared.as_ref()),
        };
        told.map(|(digest, _)| *digest)
    }

    /// The round that we are in.
    pub(super) fn round(&self) -> Option<Attempt> {
        self.sharing().map(|sharing| sharing.round)
    }

    /// When somebody else is to be asked.
    pub(super) fn next_sharing(&self) -> Option<Time> {
        self.sharing().filter(|sharing| !sharing.is_complete()).map(|sharing| sharing.retry_at)
    }

    /// Asks others for what did not come.
    pub(super) fn retry_sharing(&mut self, now: Time, out: &mut Vec<Command>) {
        if self.next_sharing().is_some_and(|at| now >= at) {
            self.ask_others(now, out);
        }
    }

    fn ask_others(&mut self, now: Time, out: &mut Vec<Command>) {
        let Some(tries) = self.sharing().map(|sharing| sharing.tries + 1) else { return };
        let retry_at = now + self.share_patience(tries);
        if let Some(sharing) = self.reduction.as_mut().and_then(|reduction| reduction.sharing.as_mut()) {
            (sharing.tries, sharing.retry_at) = (tries, retry_at);
            sharing.asked.clear();
        }
        self.ask_for_uses(out);
    }

    fn share_patience(&self, tries: u32) -> Span {
        let tuning = self.spec.tuning;
        self.share_time.deadline(tuning.slack, tuning.unknown.times(4), tries)
    }

    fn ask_for_uses(&mut self, out: &mut Vec<Command>) {
        let Some(reduction) = self.reduction.as_mut() else { return };
        let term = reduction.term;
        let Some(sharing) = reduction.sharing.as_mut() else { return };
        let (round, to_ask) = (sharing.round, sharing.whom_to_ask());
        let fence = Fence { term, ..self.fence(round) };
        for (stage, peer) in to_ask {
            self.send(Address::Worker(peer), fence, Body::UsesRequest { stage }, out);
        }
    }

    fn sharing(&self) -> Option<&Sharing> {
        self.reduction.as_ref().and_then(|reduction| reduction.sharing.as_ref())
    }
}
