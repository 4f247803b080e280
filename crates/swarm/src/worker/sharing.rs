//! Parameters that several stages use (rule 10): once every stage is prepared, each of their members fetches what the
//! other stages have of those parameters' gradients, and adds it up in the order of stages.
//!
//! Rounds are numbered. As soon as any stage is reduced again, the round is void, and another follows.

use std::collections::BTreeMap;

use crate::ids::*;
use crate::message::*;
use crate::refusal::Refusal;
use crate::time::Time;
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
        let retry_at = now + self.spec.tuning.unknown;
        let of_term = self.reduction.as_mut().filter(|reduction| reduction.term == term);
        let Some(reduction) = of_term.filter(|reduction| reduction.prepared.is_some()) else {
            return self.refusals.count(Refusal::OldAttempt); // If it is not old, our next beat asks for it again.
        };
        match &mut reduction.sharing {
            Some(sharing) if sharing.round > round => return self.refusals.count(Refusal::OldAttempt),
            Some(sharing) if sharing.round == round => sharing.sources = sources,
            slot => {
                let (asked, come) = (BTreeMap::new(), BTreeMap::new());
                *slot = Some(Sharing { round, sources, asked, come, tries: 0, retry_at, settled: None });
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
            (Body::UsesRequest { stage }, Address::Worker(_)) if self.stage != Some(*stage) => {
                self.refusals.count(Refusal::OtherStage);
            }
            (Body::UsesRequest { .. }, Address::Worker(_)) if !of_term || ours < Some(fence.attempt) => {
                self.keep_for_later(envelope);
            }
            (&Body::UsesRequest { stage }, Address::Worker(to)) => {
                out.push(Command::SendUses { to, fence, stage });
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
        out: &mut Vec<Command>,
    ) {
        let awaited = self.reduction.as_ref().is_some_and(|reduction| self.number_of(reduction) == number);
        let sharing = self.reduction.as_mut().filter(|_| awaited).and_then(|r| r.sharing.as_mut());
        if let Some(sharing) = sharing.filter(|sharing| sharing.round == round) {
            sharing.settled = Some((digest, summary));
            self.send_settled(out);
        }
    }

    pub(super) fn send_settled(&mut self, out: &mut Vec<Command>) {
        let of_term = self.reduction.as_ref().filter(|reduction| reduction.term == self.term);
        let Some(sharing) = of_term.and_then(|reduction| reduction.sharing.as_ref()) else { return };
        if let (Some((digest, summary)), Some(stage)) = (sharing.settled.clone(), self.stage) {
            self.tell_coordinator(sharing.round, Body::Settled { stage, digest, summary }, out);
        }
    }

    /// Whether nothing of what we share is missing.
    pub(super) fn has_settled(&self) -> bool {
        self.stage.is_none_or(|stage| self.spec.partners(stage).is_empty())
            || self.sharing().is_some_and(|sharing| sharing.settled.is_some())
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
        if self.next_sharing().is_none_or(|at| now < at) {
            return;
        }
        let unknown = self.spec.tuning.unknown;
        if let Some(sharing) = self.reduction.as_mut().and_then(|reduction| reduction.sharing.as_mut()) {
            sharing.tries += 1;
            sharing.retry_at = now + unknown.times(2 << sharing.tries.min(4));
            sharing.asked.clear();
        }
        self.ask_for_uses(out);
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
