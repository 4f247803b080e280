//! How a worker gets a stage's state: from the seed, a checkpoint or a donor; and how it gives it to others.

use crate::ids::*;
use crate::message::*;
use crate::refusal::Refusal;
use crate::time::{Span, Time};
use crate::worker::io::{LoadFrom, StateOf};
use crate::worker::{Command, Worker};

/// A state on its way to us.
#[derive(Clone, Debug)]
pub(super) struct Fetch {
    donor: Option<PeerId>,
    /// The version that is wanted, or a later one.
    wanted: Step,
    retry: u32,
    /// What is being put in place.
    loading: Option<StateOf>,
    /// The version onto which the state that is being loaded is put, if it is not whole.
    onto: Option<Step>,
    retry_at: Time,
}

impl Fetch {
    /// Whether this donor was asked, and what it told of has not come.
    fn awaits(&self, donor: PeerId) -> bool {
        self.donor == Some(donor) && self.loading.is_none()
    }

    pub(super) fn retry_at(&self) -> Option<Time> {
        (self.donor.is_some() && self.loading.is_none()).then_some(self.retry_at)
    }
}

impl Worker {
    pub(super) fn on_welcome(&mut self, member: MemberNo, incarnation: u64, out: &mut Vec<Command>) {
        if incarnation != self.incarnation {
            return self.refusals.count(Refusal::OldAttempt);
        }
        if self.member != Some(member) {
            self.member = Some(member);
            self.send_beat(out);
        }
    }

    /// The coordinator does not know us (any more): whatever we hold is worthless.
    pub(super) fn on_stranger(&mut self, member: Option<MemberNo>, now: Time, out: &mut Vec<Command>) {
        if member.is_none() || member != self.member {
            return self.refusals.count(Refusal::OldAttempt);
        }
        self.drop_all(out);
        self.member = None;
        self.stage = None;
        self.whole = false;
        self.active = false;
        self.fetch = None;
        self.applying = None;
        self.incarnation += 1;
        self.ahead.clear();
        self.next_beat = now;
    }

    /// Hold this stage at the fence's version.
    pub(super) fn on_assign(&mut self, fence: Fence, assign: Assign, now: Time, out: &mut Vec<Command>) {
        if self.member.is_some_and(|member| member > assign.member) || fence.epoch < self.epoch {
            return self.refusals.count(Refusal::OldEpoch);
        }
        let same = self.stage == Some(assign.stage) && self.member == Some(assign.member);
        if assign.catch_up && !(same && fence.epoch == self.epoch && self.whole) {
            return self.refusals.count(Refusal::OldAttempt);
        }
        if same && fence.epoch == self.epoch && !self.changes_source(assign.source) {
            return self.refusals.count(Refusal::Repeated);
        }
        let keep = same && fence.epoch == self.epoch && self.whole;
        if keep && self.version >= fence.step {
            return self.send_beat(out); // Already there: the coordinator has not heard of it yet.
        }
        if assign.catch_up && self.applying.is_some() {
            return self.refusals.count(Refusal::Repeated); // It can apply what it was thought to lack.
        }
        if !assign.catch_up {
            // An update that is under way changes the state without our word: nothing is put onto it.
            let keep = keep && self.applying.is_none();
            self.member = Some(assign.member);
            self.stage = Some(assign.stage);
            self.active = false;
            self.applying = None;
            self.drop_all(out);
            self.whole = keep;
            self.version = if keep { self.version } else { fence.step };
            self.epoch = fence.epoch;
        }
        self.start_fetch(fence, assign, now, out);
    }

    /// We count from now on.
    pub(super) fn on_activate(&mut self, fence: Fence, now: Time, out: &mut Vec<Command>) {
        let open = self.spec.sync.is_open(self.version, fence.step);
        if !self.whole || fence.epoch != self.epoch || !open {
            return self.refusals.count(Refusal::OldStep);
        }
        self.active = true;
        self.send_beat(out);
        self.look_again(now, out);
    }

    /// Somebody asks for our state, or sends what we asked for.
    pub(super) fn on_state_message(&mut self, envelope: Envelope, out: &mut Vec<Command>) {
        let fence = envelope.fence;
        match (envelope.body, envelope.from) {
            (Body::StateRequest { stage, have }, Address::Worker(joiner)) => {
                if self.stage != Some(stage) || !self.whole || fence.epoch != self.epoch {
                    return self.refusals.count(Refusal::OtherStage);
                }
                if self.applying.is_some() || self.is_loading() || fence.step > self.version {
                    // Half an update is no state, and an old one would take the joiner back: the request waits
                    // until we are there.
                    let body = Body::StateRequest { stage, have };
                    return self.keep_for_later(Envelope { body, ..envelope_of(joiner, self.me, fence) });
                }
                out.push(Command::SendState { to: joiner, fence: self.fence(Attempt(0)), stage, have });
            }
            (Body::State { stage, payload, onto }, Address::Worker(donor)) => {
                self.on_state(fence, donor, stage, payload, onto, out);
            }
            _ => self.refusals.count(Refusal::Malformed),
        }
    }

    /// The state is loaded.
    pub(super) fn on_loaded(&mut self, of: StateOf, now: Time, out: &mut Vec<Command>) {
        let Some(fetch) = self.fetch.take_if(|fetch| fetch.loading == Some(of)) else { return };
        let version = of.version;
        self.since = match fetch.donor {
            // Everything that the steps from this version on need is there.
            None => version,
            // The weights before are those that were here.
            Some(_) if self.whole && fetch.onto == Some(self.version) && version == self.version.next() => {
                self.since
            }
            Some(_) => self.spec.sync.first_step(version),
        };
        self.whole = true;
        self.version = version;
        self.drop_before(version, out);
        self.send_beat(out);
        self.look_again(now, out);
        self.compute(now, out);
    }

    /// The next order to hold the stage counts again.
    pub(super) fn on_load_failed(&mut self, of: StateOf) {
        self.fetch.take_if(|fetch| fetch.loading == Some(of));
    }

    /// The donor is asked anew in a moment: not at once, for it may have nothing to give for a while.
    pub(super) fn on_state_gone(&mut self, donor: PeerId, now: Time) {
        if let Some(fetch) = self.fetch.as_mut().filter(|fetch| fetch.awaits(donor)) {
            fetch.retry_at = now + Span::s(1);
        }
    }

    /// Whether this state, put onto that version if it is not whole, is what we wait for from this donor.
    pub fn awaits(&self, donor: PeerId, of: StateOf, onto: Option<Step>) -> bool {
        let fits = match onto {
            Some(onto) => self.whole && onto == self.version && of.version > onto,
            None => of.version >= self.version && !(self.whole && of.version == self.version),
        };
        let here = self.stage == Some(of.stage) && of.epoch == self.epoch;
        fits && here && self.fetch.as_ref().is_some_and(|fetch| fetch.awaits(donor))
    }

    /// Asks again for what did not come.
    pub(super) fn retry_fetch(&mut self, now: Time, out: &mut Vec<Command>) {
        let unknown = self.spec.tuning.unknown;
        let Some(fetch) = self.fetch.as_mut().filter(|fetch| fetch.retry_at().is_some_and(|at| now >= at))
        else {
            return;
        };
        fetch.retry += 1;
        fetch.retry_at = now + unknown.times(4 << fetch.retry.min(6));
        self.ask(out);
    }

    fn start_fetch(&mut self, fence: Fence, assign: Assign, now: Time, out: &mut Vec<Command>) {
        let donor = match assign.source {
            Source::Donor(peer) => Some(peer),
            Source::Seed | Source::Checkpoint => None,
        };
        let retry_at = now + self.spec.tuning.unknown.times(4);
        let of = StateOf { stage: assign.stage, epoch: fence.epoch, version: fence.step };
        let loading = donor.is_none().then_some(of);
        self.fetch = Some(Fetch { donor, wanted: fence.step, retry: 0, loading, onto: None, retry_at });
        match assign.source {
            Source::Donor(_) => self.ask(out),
            Source::Seed | Source::Checkpoint => {
                let from = if assign.source == Source::Seed { LoadFrom::Seed } else { LoadFrom::Checkpoint };
                out.push(Command::Load { of, from });
            }
        }
    }

    /// Asks the donor; one that is not yet at the version that is wanted answers when it is.
    fn ask(&mut self, out: &mut Vec<Command>) {
        let asked = self.fetch.as_ref().and_then(|fetch| Some((fetch.donor?, fetch.wanted)));
        if let (Some((donor, wanted)), Some(stage)) = (asked, self.stage) {
            let have = self.whole.then_some(self.version);
            let fence = Fence { step: wanted, ..self.fence(Attempt(0)) };
            self.send(Address::Worker(donor), fence, Body::StateRequest { stage, have }, out);
        }
    }

    /// Whether a state is being put in place.
    pub(super) fn is_loading(&self) -> bool {
        self.fetch.as_ref().is_some_and(|fetch| fetch.loading.is_some())
    }

    /// Whether the order names another source than the one that is being asked. A state that has come from
    /// the old one and is being loaded is as good.
    fn changes_source(&self, source: Source) -> bool {
        let donor = match source {
            Source::Donor(peer) => Some(peer),
            Source::Seed | Source::Checkpoint => None,
        };
        self.fetch.as_ref().is_none_or(|fetch| fetch.donor != donor && fetch.loading.is_none())
    }

    fn on_state(
        &mut self,
        fence: Fence,
        donor: PeerId,
        stage: StageId,
        payload: Payload,
        onto: Option<Step>,
        out: &mut Vec<Command>,
    ) {
        let asked = self.fetch.as_ref().is_some_and(|fetch| fetch.awaits(donor));
        if !asked || self.stage != Some(stage) || fence.epoch != self.epoch {
            return self.refusals.count(Refusal::Unasked);
        }
        let fits = onto.is_none_or(|onto| self.whole && onto == self.version);
        if !fits || fence.step < self.version {
            return self.refusals.count(Refusal::OldStep);
        }
        if fence.step == self.version && self.whole {
            self.fetch = None; // We got there by ourselves.
            return self.send_beat(out);
        }
        let of = StateOf { stage, epoch: fence.epoch, version: fence.step };
        if let Some(fetch) = self.fetch.as_mut() {
            (fetch.loading, fetch.onto) = (Some(of), onto);
        }
        if let Some(onto) = onto {
            return out.push(Command::CatchUp { of, payload, onto });
        }
        if self.whole {
            // The donor no longer knows what came after our version: we begin anew.
            self.drop_all(out);
            (self.whole, self.active) = (false, false);
        }
        let from = LoadFrom::Donor(payload);
        out.push(Command::Load { of, from });
    }
}

fn envelope_of(from: PeerId, to: PeerId, fence: Fence) -> Envelope {
    let (from, to) = (Address::Worker(from), Address::Worker(to));
    Envelope { protocol: PROTOCOL, from, to, fence, body: Body::Stranger { member: None } }
}
