//! Who is in: hello, beats, notice, silence, removal.

use crate::coordinator::{Closing, Command, Coordinator};
use crate::deadline::Estimate;
use crate::ids::*;
use crate::journal::{Place, Record};
use crate::message::*;
use crate::refusal::Refusal;
use crate::spec::Reduce;
use crate::time::{Span, Time};

/// A worker that is in.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub number: MemberNo,
    pub incarnation: u64,
    pub capability: Capability,
    pub stage: Option<StageId>,
    pub phase: Phase,
    pub draining: bool,
    /// The step in which it was left out of the reduction: it counts again from the next one on.
    pub sits_out: Option<(Epoch, Step)>,
    /// It works, but was not in a reduction that is committed: until it has fetched that sum, it is in none.
    pub behind: bool,
    /// Whom it fetches those sums from.
    pub catches_up_from: Option<PeerId>,
    /// Who keeps copies of its sums.
    pub keeper: Option<PeerId>,
    pub status: WorkerStatus,
    /// The version that its last beat told of.
    pub version: (Epoch, Step),
    last_heard: Time,
    last_beat: Time,
    rhythm: Estimate,
}

/// How far a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It has no stage.
    Idle,
    /// It gets the state of its stage; nobody else has to have it (seed, checkpoint) or a donor.
    Loading(Source),
    /// It counts.
    Active,
}

/// A driver that is in.
#[derive(Clone, Debug)]
pub(super) struct DriverMember {
    pub number: MemberNo,
    pub incarnation: u64,
    pub site: SiteId,
    pub view: u64,
    pub leases: usize,
    /// How many leases it may have.
    pub window: usize,
    last_heard: Time,
    rhythm: Estimate,
}

impl Member {
    pub(super) fn from_journal(place: &Place, now: Time) -> Member {
        Member {
            number: place.member,
            incarnation: place.incarnation,
            capability: place.capability.clone(),
            stage: Some(place.stage),
            // Until it says that it is whole, it is nobody's donor and holds nothing.
            phase: Phase::Loading(Source::Checkpoint),
            draining: false,
            sits_out: None,
            behind: false,
            catches_up_from: None,
            keeper: None,
            status: WorkerStatus::default(),
            version: Default::default(),
            last_heard: now,
            last_beat: now,
            rhythm: Estimate::default(),
        }
    }

    pub(super) fn welcome(&self) -> Body {
        Body::Welcome { member: self.number, incarnation: self.incarnation }
    }

    pub(super) fn heard(&mut self, now: Time) {
        self.last_heard = now;
    }

    pub(super) fn silence(&self, now: Time) -> Span {
        now.since(self.last_heard)
    }

    pub(super) fn forgive(&mut self, now: Time) {
        self.last_heard = now;
        self.last_beat = now;
    }

    pub(super) fn is_active(&self) -> bool {
        self.phase == Phase::Active
    }

    /// Whether it counts, and has the newest state or is about to: it may give it to others.
    pub(super) fn is_whole(&self) -> bool {
        self.is_active() && !self.behind
    }

    /// The first step for which it has the weights.
    pub(super) fn since(&self) -> Step {
        self.status.since
    }

    fn is_silent(&self, now: Time, silence: Span, beat: Span) -> bool {
        now.since(self.last_heard) > self.rhythm.deadline(silence, silence + beat.times(2), 0)
    }
}

impl DriverMember {
    pub(super) fn forgive(&mut self, now: Time) {
        self.last_heard = now;
    }
}

impl Coordinator {
    pub(super) fn on_worker_hello(
        &mut self,
        peer: PeerId,
        incarnation: u64,
        capability: Capability,
        out: &mut Vec<Command>,
    ) {
        if self.book.term < self.term {
            return;
        }
        if let Some(member) = self.members.get_mut(&peer) {
            if member.incarnation == incarnation {
                member.heard(self.now);
                let welcome = member.welcome();
                return self.send(Address::Worker(peer), Attempt(0), welcome, out);
            }
            self.remove(peer, "it has restarted", out);
        }
        if self.is_quarantined(peer) {
            return self.refusals.count(Refusal::Quarantined);
        }
        if !self.may_come_back(peer) {
            return self.refusals.count(Refusal::Busy);
        }
        if let Some(why) = self.unfit(&capability) {
            self.refusals.count(Refusal::Unfit);
            out.push(Command::Tell(format!("{peer} is not admitted: {why}")));
            return self.send(Address::Worker(peer), Attempt(0), Body::Unfit { why }, out);
        }
        let number = self.new_member_number();
        let member = Member {
            number,
            incarnation,
            capability,
            stage: None,
            phase: Phase::Idle,
            draining: false,
            sits_out: None,
            behind: false,
            catches_up_from: None,
            keeper: None,
            status: WorkerStatus::default(),
            version: Default::default(),
            last_heard: self.now,
            last_beat: self.now,
            rhythm: Estimate::default(),
        };
        self.send(Address::Worker(peer), Attempt(0), member.welcome(), out);
        self.members.insert(peer, member);
        self.advance(out);
    }

    /// Why a worker cannot take part.
    fn unfit(&self, capability: &Capability) -> Option<String> {
        let (has, needs) = (capability.memory_bytes, self.spec.memory_bytes);
        if has < needs {
            return Some(format!("it has {has} bytes of memory, and a stage of the run needs {needs}"));
        }
        // Of those that the journal names and nobody has heard of since, some may be gone for good.
        let heard = self.members.iter().filter(|(peer, _)| !self.unheard.contains(peer));
        let mut classes = heard.map(|(_, member)| &member.capability.class);
        let other = classes.find(|class| **class != capability.class)?;
        (self.spec.reduce == Reduce::Exact).then(|| {
            format!(
                "its arithmetic ({}) does not agree bit for bit with that of the others ({other}); a run with \
                 swarm.reduce = \"fast\" takes both",
                capability.class
            )
        })
    }

    /// Who was removed again and again waits longer each time, up to 64 beats.
    fn may_come_back(&self, peer: PeerId) -> bool {
        match self.crashes.get(&peer) {
            Some(&(count, last)) => {
                self.now.since(last) >= self.spec.tuning.beat.times((1 << count.min(6)) - 1)
            }
            None => true,
        }
    }

    pub(super) fn on_worker_beat(
        &mut self,
        peer: PeerId,
        fence: Fence,
        status: WorkerStatus,
        out: &mut Vec<Command>,
    ) {
        let Some(member) = self.members.get_mut(&peer) else { return };
        if status.member != Some(member.number) {
            // An admission that we do not know: it was before our time, and its record did not reach the journal.
            self.refusals.count(Refusal::Stranger);
            let stranger = Body::Stranger { member: status.member };
            return self.send(Address::Worker(peer), Attempt(0), stranger, out);
        }
        if status.number <= member.status.number {
            return self.refusals.count(Refusal::Repeated);
        }
        member.rhythm.observe(self.now.since(member.last_beat));
        member.last_beat = self.now;
        member.status = status;
        member.version = (fence.epoch, fence.step);
        if fence.term < self.term {
            // It has not heard of us. Its attempts are an earlier coordinator's; told of the term, it reports.
            member.status.reducing = None;
            let welcome = member.welcome();
            self.send(Address::Worker(peer), Attempt(0), welcome, out);
        }
        if self.adopt_commit(peer, out) {
            return;
        }
        self.reconcile(peer, out);
        let report = self.members.get_mut(&peer).and_then(|member| member.status.report.take());
        if let Some(seals) = report.filter(|_| fence.term == self.term) {
            self.on_report(peer, fence, &seals, out);
        }
    }

    /// All that a member holds, told after a restart of ours.
    fn on_report(&mut self, peer: PeerId, fence: Fence, seals: &[SealedLot], out: &mut Vec<Command>) {
        let holds =
            self.members.get(&peer).filter(|member| member.is_active()).and_then(|member| member.stage);
        match holds {
            Some(stage) => self.on_seals(peer, fence, stage, seals, out),
            None => self.send_verdict(peer, Vec::new(), Vec::new(), out),
        }
        self.heard_after_restart(peer, out);
    }

    /// A peer that knows a commit that the journal does not have: the journal lost its tail, and the commit
    /// is real, since nobody applies anything else. One is adopted; more means that the journal is not ours.
    fn adopt_commit(&mut self, peer: PeerId, out: &mut Vec<Command>) -> bool {
        let Some(commit) = self.members.get(&peer).and_then(|member| member.status.last_commit.clone())
        else {
            return false;
        };
        if commit.epoch != self.book.epoch || commit.step < self.book.step {
            return false;
        }
        // What our own term commits is in our journal before anybody hears of it; and who knows a commit has applied it.
        let version = self.members.get(&peer).map(|member| member.version);
        if commit.term >= self.term || version != Some((commit.epoch, commit.step.next())) {
            self.refusals.count(Refusal::Nonsense);
            return false;
        }
        if self.closing == Closing::Journaling {
            return true;
        }
        if commit.step > self.book.step {
            let (theirs, ours) = (commit.step, self.book.step);
            self.halt(
                format!("{peer} has applied {theirs}, the journal ends before {ours}: the journal is not this run's, or lost more than its last record; put the right one in place and start again"),
                out,
            );
            return true;
        }
        out.push(Command::Tell(format!(
            "{peer} is ahead of the journal by {}; its commit is adopted",
            commit.step
        )));
        self.closing = Closing::Journaling;
        self.append(Record::Commit(commit), out);
        true
    }

    /// Compares how a member stands with how it should, and sends what it lacks.
    fn reconcile(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        let Some(member) = self.members.get(&peer) else { return };
        let now_at = (self.book.epoch, self.book.step);
        let status = &member.status;
        let here = status.stage == member.stage && status.whole && member.version == now_at;
        match member.phase {
            Phase::Idle => {}
            // Closed while it, or we, were away; it may have all that is needed to apply it.
            _ if status.whole
                && status.active
                && !member.behind
                && self.lacks_last_commit(member.version) =>
            {
                if let Some(commit) = self.last_commit().cloned() {
                    self.send(Address::Worker(peer), Attempt(0), Body::Commit(commit), out);
                }
            }
            Phase::Loading(_) if here && status.active => self.activate(peer, out),
            Phase::Loading(_) if here || self.is_near(peer) => self.activate_if_open(peer, out),
            Phase::Loading(source) => self.resend_assign(peer, source, out),
            Phase::Active if here && status.active => {
                self.caught_up(peer, out);
                self.rename_keeper(peer, out);
                self.resend_reduce(peer, out);
                self.resend_share(peer, out);
                self.ask_to_save(peer, out);
                self.let_go_early(peer, out);
            }
            Phase::Active if member.behind && status.active && self.is_near(peer) => self.catch_up(peer, out),
            Phase::Active if here || (member.behind && self.is_near(peer)) => {
                self.send(Address::Worker(peer), Attempt(0), Body::Activate, out)
            }
            Phase::Active => self.demote(peer, "its state is behind and cannot catch up by a commit", out),
        }
    }

    fn lacks_last_commit(&self, version: (Epoch, Step)) -> bool {
        self.last_commit().is_some_and(|commit| (commit.epoch, commit.step) == version)
    }

    pub(super) fn on_leaving(&mut self, peer: PeerId, number: MemberNo, out: &mut Vec<Command>) {
        let Some(member) = self.members.get_mut(&peer).filter(|member| member.number == number) else {
            return;
        };
        if !member.draining {
            member.draining = true;
            out.push(Command::Tell(format!("{peer} will leave soon: it gets no new lots")));
            self.new_view(out);
        }
    }

    pub(super) fn on_driver(&mut self, driver: DriverId, body: Body, out: &mut Vec<Command>) {
        if self.book.term < self.term {
            return;
        }
        match (body, self.drivers.get_mut(&driver)) {
            (Body::Hello(Hello::Driver { incarnation, site }), known) => {
                match known {
                    Some(member) if member.incarnation == incarnation => member.last_heard = self.now,
                    _ => self.admit_driver(driver, incarnation, site, out),
                }
                if let Some(member) = self.drivers.get(&driver).map(|member| member.number) {
                    self.send(
                        Address::Driver(driver),
                        Attempt(0),
                        Body::Welcome { member, incarnation },
                        out,
                    );
                }
            }
            (Body::DriverBeat(status), Some(member)) if status.member == Some(member.number) => {
                member.rhythm.observe(self.now.since(member.last_heard));
                member.last_heard = self.now;
                self.reconcile_driver(driver, &status, out);
            }
            (Body::DriverBeat(DriverStatus { member, .. }), _) => {
                self.refusals.count(Refusal::Stranger);
                self.send(Address::Driver(driver), Attempt(0), Body::Stranger { member }, out);
            }
            _ => self.refusals.count(Refusal::Malformed),
        }
    }

    fn admit_driver(&mut self, driver: DriverId, incarnation: u64, site: SiteId, out: &mut Vec<Command>) {
        self.remove_driver(driver);
        let number = self.new_member_number();
        let member = DriverMember {
            number,
            incarnation,
            site,
            view: 0,
            leases: 0,
            window: 0,
            last_heard: self.now,
            rhythm: Estimate::default(),
        };
        self.drivers.insert(driver, member);
        self.new_view(out);
        self.advance(out);
    }

    fn new_member_number(&mut self) -> MemberNo {
        self.next_member += 1;
        // The term is journaled, so the number is unique for the life of the run without a record of its own.
        MemberNo(self.term.0 << 32 | self.next_member)
    }

    /// Who hangs up and does not call again is gone: that is known sooner than its silence tells.
    pub(super) fn remove_hung_up(&mut self, out: &mut Vec<Command>) {
        let due = |at: &Time| *at + self.spec.tuning.slack <= self.now;
        let gone: Vec<Address> = self.hung_up.iter().filter(|(_, at)| due(at)).map(|(&who, _)| who).collect();
        for who in gone {
            self.hung_up.remove(&who);
            match who {
                // The only holder of a stage is given the time that silence has: without it, all would go back.
                Address::Worker(peer) if self.can_spare(peer) => {
                    self.remove(peer, "its connection has ended", out);
                }
                Address::Worker(_) => {}
                Address::Driver(driver) if self.drivers.contains_key(&driver) => {
                    self.remove_driver(driver);
                    self.new_view(out);
                }
                Address::Driver(_) | Address::Coordinator => {}
            }
        }
    }

    pub(super) fn remove_silent(&mut self, out: &mut Vec<Command>) {
        let tuning = self.spec.tuning;
        let silent: Vec<PeerId> = self
            .members
            .iter()
            .filter(|(_, member)| member.is_silent(self.now, tuning.silence, tuning.beat))
            .map(|(&peer, _)| peer)
            .collect();
        for peer in silent {
            self.remove(peer, "it was silent for longer than its rhythm allows", out);
        }
        let late = |driver: &DriverMember| {
            self.now.since(driver.last_heard)
                > driver.rhythm.deadline(tuning.silence, tuning.silence + tuning.beat.times(2), 0)
        };
        let silent: Vec<DriverId> =
            self.drivers.iter().filter(|(_, d)| late(d)).map(|(&driver, _)| driver).collect();
        if !silent.is_empty() {
            silent.into_iter().for_each(|driver| self.remove_driver(driver));
            self.new_view(out);
        }
    }

    /// A member is gone, with all that it holds.
    pub(super) fn remove(&mut self, peer: PeerId, why: &str, out: &mut Vec<Command>) {
        let Some(member) = self.members.remove(&peer) else { return };
        out.push(Command::Tell(format!("{peer} is removed: {why}")));
        if !member.draining {
            let crash = self.crashes.entry(peer).or_insert((0, self.now));
            *crash = (crash.0 + 1, self.now);
        }
        if let Some(stage) = member.stage {
            self.append(Record::Removed(peer), out);
            self.forget_holder(peer, stage, out);
            self.new_view(out);
            self.uneven = true;
        }
        self.heard_after_restart(peer, out);
    }
}
