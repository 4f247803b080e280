//! The coordinator as a process: the machine between the network, its journal and the checkpoints.

mod checkpoints;
mod guarding;
mod looking;
mod trying;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use starling_corpus::Tokeniser;
use starling_model::checkpoint::{Part, Progress};
use starling_model::guard::Guard;
use starling_model::pipeline::weights_hash;
use starling_model::reference::StepReport;
use starling_swarm::coordinator::{self, Command, Input, Order};
use starling_swarm::ids::*;
use starling_swarm::journal::{JournalState, Record};
use starling_swarm::message::Body;
use starling_swarm::time::Time;
use starling_swarm::worker::io::StateOf;
use starling_transport::endpoint::{Endpoint, Event as NetworkEvent, Limits, StartError};
use starling_transport::identity::{Identity, PublicKey};
use starling_transport::ticket::Role;
use tokio::sync::{mpsc, watch};

use self::trying::Trying;
use crate::charter::Charter;
use crate::closing::{BadSummary, Expected, conclude};
use crate::disk::{Disk, DiskError};
use crate::events::{Event, EventLog, History, LogError, guarded, read};
use crate::guests::Guest;
use crate::journal::{Journal, JournalError};
use crate::links::{Links, WanSource};
use crate::member::close;
use crate::post::{Credential, Introduction, Post, next_clock};
use crate::registry::Registry;
use crate::status::Status;

/// Events of the network, and orders, that wait for the loop, at the most.
const MOST_EVENTS: usize = 1024;
/// What the coordinator said last: as much of it as is shown.
const MOST_NEWS: usize = 20;
/// Versions whose hashes are remembered: a replica may tell them late.
const REMEMBERED: u64 = 64;
/// Steps over which the rate is measured.
const RECENT: usize = 20;
/// Characters of a reason that another gave.
const MOST_REASON: usize = 200;
/// Between two looks at how the run stands.
const LOOK: Duration = Duration::from_millis(200);
/// Updates skipped one after another after which a run is paused: it would not come back by itself.
const MOST_SKIPPED: u64 = 10;
/// Workers that a joiner is told of: more would not be faster.
const MOST_HOLDERS: usize = 8;
/// Members that are called at the start, those that came last.
const MOST_CALLS: usize = 1024;
/// How long members may take to hear that the run is over.
const FAREWELL: Duration = Duration::from_secs(3);

/// What a coordinator needs to know.
pub struct Settings {
    /// The run's folder: journal, members and checkpoints are in it.
    pub folder: PathBuf,
    /// Where it listens.
    pub listen: SocketAddr,
    /// Where others reach it, if not there.
    pub addresses: Vec<String>,
    /// Where it stands.
    pub site: String,
    /// Its key, which is the run's authority.
    pub authority: Arc<Identity>,
    /// What it tells who joins.
    pub charter: Charter,
    /// From text to tokens, for the checkpoints.
    pub tokeniser: Tokeniser,
    /// Windows of held-out text.
    pub held_out_windows: u64,
    /// What is emulated between sites.
    pub wan: WanSource,
}

/// The hashes of each stage's weights, by name.
type StageHashes = BTreeMap<StageId, BTreeMap<String, [u8; 32]>>;

/// See the module's head.
pub struct Coordinator {
    machine: coordinator::Coordinator,
    endpoint: Endpoint,
    events: mpsc::Receiver<NetworkEvent>,
    registry: Arc<Registry>,
    addresses: Vec<String>,
    disk: Disk,
    charter: Charter,
    expected: Expected,
    site: String,
    links: Links,
    log: EventLog,
    orders: (mpsc::Sender<Order>, mpsc::Receiver<Order>),
    status: watch::Sender<Status>,
    /// What came of steps whose commits are on their way to the journal.
    reports: BTreeMap<Step, StepReport>,
    /// The hashes of weights, as far as the stages have told them.
    hashes: BTreeMap<(Epoch, Step), StageHashes>,
    /// Sites that have a copy of a checkpoint, by its step.
    copies: BTreeMap<u64, BTreeSet<String>>,
    /// Parts of checkpoints that are safe, and not yet part of a whole one.
    kept: BTreeSet<(Epoch, Step, StageId)>,
    recent: VecDeque<(Instant, u64)>,
    last_loss: Option<f64>,
    trying: Trying,
    guard: Guard,
    news: VecDeque<String>,
    clock: u64,
    start: Instant,
    next_look: Instant,
}

impl Coordinator {
    /// Takes over what the journal in the folder says; a new folder is a new run.
    pub fn start(settings: Settings) -> Result<Coordinator, CoordinatorError> {
        let Settings {
            folder,
            listen,
            addresses,
            site,
            authority,
            charter,
            tokeniser,
            held_out_windows,
            wan,
        } = settings;
        let (journal, records) = Journal::open::<Record>(&folder.join("journal"))?;
        let registry = Registry::open(&folder.join("members"), authority.clone(), &site, &charter)?;
        let registry = Arc::new(registry);
        let (run, definition) = (charter.run.clone(), charter.definition.clone());
        let progress = Progress { run, definition, tokeniser, skipped: 0 };
        let disk = Disk::start(journal, &folder.join("checkpoints"), progress)?;
        let events = folder.join("events.jsonl");
        let history = match charter.run.guard.is_on() && events.exists() {
            true => read(&events)?,
            false => History::default(),
        };
        let (guard, _) = guarded(&charter.run.guard, &history);
        let mut log = EventLog::open(&events)?.with_curves(&folder.join("tensorboard"))?;
        let book = JournalState::replay(&records);
        log.append(Event::Started {
            version: env!("CARGO_PKG_VERSION").into(),
            identity: charter.definition.identity(),
            step: book.step.0,
            steps: charter.run.train.steps,
            parameters: charter.run.model.architecture(charter.definition.vocabulary).elements() as u64,
            stages: charter.spec.stages.into(),
        })?;
        let (sender, events) = mpsc::channel(MOST_EVENTS);
        let runtime = tokio::runtime::Handle::current();
        let endpoint =
            Endpoint::start(&runtime, authority, Some(listen), registry.clone(), Limits::default(), sender)?;
        let mut commands = Vec::new();
        let (spec, count) = (charter.spec.clone(), records.len() as u64);
        let machine = coordinator::Coordinator::new(spec, book, count, Time(0), &mut commands);
        let now = Instant::now();
        let mut coordinator = Coordinator {
            machine,
            endpoint,
            events,
            registry,
            addresses,
            disk,
            expected: Expected::of(&charter),
            charter,
            links: Links::new(&site, wan),
            site,
            log,
            orders: mpsc::channel(MOST_EVENTS),
            status: watch::channel(Status::default()).0,
            reports: BTreeMap::new(),
            hashes: BTreeMap::new(),
            copies: BTreeMap::new(),
            kept: BTreeSet::new(),
            recent: VecDeque::from([(now, 0)]),
            last_loss: None,
            trying: Trying::new(held_out_windows),
            guard,
            news: VecDeque::new(),
            clock: 0,
            start: now,
            next_look: now,
        };
        coordinator.carry_out(commands)?;
        coordinator.call_members();
        Ok(coordinator)
    }

    /// Where others reach it.
    pub fn addresses(&self) -> Vec<String> {
        match self.addresses.is_empty() {
            true => self.endpoint.address().iter().map(SocketAddr::to_string).collect(),
            false => self.addresses.clone(),
        }
    }

    /// Where this machine itself reaches it.
    pub fn local_addresses(&self) -> Vec<String> {
        let here = |at: SocketAddr| match (at.ip().is_unspecified(), at.is_ipv4()) {
            (false, _) => at,
            (true, true) => (Ipv4Addr::LOCALHOST, at.port()).into(),
            (true, false) => (Ipv6Addr::LOCALHOST, at.port()).into(),
        };
        self.endpoint.address().map(here).iter().map(SocketAddr::to_string).collect()
    }

    /// How the run stands, now and later.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    /// Where orders are given.
    pub fn orders(&self) -> mpsc::Sender<Order> {
        self.orders.0.clone()
    }

    /// Coordinates until the run is over.
    pub async fn run(mut self) -> Result<(), CoordinatorError> {
        let mut is_tried = false;
        loop {
            if self.machine.is_finished() && !is_tried {
                // What came of it all is tried on all that is held out.
                is_tried = true;
                self.begin_trying(0)?;
            }
            if self.machine.is_finished() && !self.trying.is_under_way() {
                return self.finish().await;
            }
            let wake = self.next_wake();
            tokio::select! {
                biased;
                kept = self.disk.next() => self.on_kept(kept?)?,
                Some(event) = self.events.recv() => self.on_event(event)?,
                Some(order) = self.orders.1.recv() => self.tell(Input::Operator(order))?,
                () = tokio::time::sleep_until(wake.into()) => self.on_wake()?,
            }
            if Instant::now() >= self.next_look {
                self.look();
            }
        }
    }

    fn next_wake(&self) -> Instant {
        let machine = self.start + Duration::from_micros(self.machine.next_wake().0.min(1 << 50));
        [self.links.next_wake(), self.trying.next_wake()].into_iter().flatten().fold(machine, Instant::min)
    }

    fn on_wake(&mut self) -> Result<(), CoordinatorError> {
        self.links.wake(&self.endpoint);
        self.try_on()?;
        match self.machine.next_wake() <= self.now() {
            true => self.tell(Input::Wake),
            false => Ok(()),
        }
    }

    async fn finish(mut self) -> Result<(), CoordinatorError> {
        let (epoch, version) = (self.machine.journal().epoch, self.machine.journal().step);
        // Not of all, if some were not told: who tells them may be gone by now.
        let all = |stages: &&StageHashes| stages.len() == usize::from(self.charter.spec.stages);
        let weights = self.hashes.get(&(epoch, version)).filter(all).map(|stages| self.combined(stages));
        self.log.append_at(
            self.clock,
            Event::Finished { step: version.0, weights: weights.unwrap_or_default() },
        )?;
        self.look();
        for key in self.connected() {
            self.write(key, Post::Over, Vec::new());
        }
        // They close when they have heard it.
        let until = Instant::now() + FAREWELL;
        while !self.connected().is_empty() {
            match tokio::time::timeout_at(until.into(), self.events.recv()).await {
                Ok(Some(_)) => {}
                _ => break,
            }
        }
        close(&self.endpoint, &mut self.events).await;
        Ok(())
    }

    /// Looks for members where they were: if we stand elsewhere than before, they do not know.
    fn call_members(&self) {
        let introduction = Introduction {
            version: env!("CARGO_PKG_VERSION").into(),
            credential: Credential::Authority,
            site: self.site.clone(),
            addresses: self.addresses(),
        };
        let introduction = postcard::to_stdvec(&introduction).unwrap_or_default();
        for contact in self.registry.contacts().into_iter().rev().take(MOST_CALLS) {
            self.endpoint.dial(contact, introduction.clone());
        }
    }

    fn connected(&self) -> Vec<PublicKey> {
        let overview = self.machine.overview();
        let workers = overview.workers.iter().map(|worker| worker.peer.0);
        let drivers = overview.drivers.iter().map(|driver| driver.0);
        let keys = workers.chain(drivers).filter_map(|number| Some(self.registry.by_number(number)?.0));
        keys.filter(|&key| self.endpoint.is_connected(key)).collect()
    }

    fn on_event(&mut self, event: NetworkEvent) -> Result<(), CoordinatorError> {
        match event {
            NetworkEvent::Letter { from, letter } => {
                let Ok((clock, post, body)) = Post::open(&letter) else { return Ok(()) };
                self.clock = next_clock(self.clock, clock);
                self.on_post(from, post, body)
            }
            NetworkEvent::Connected { with, .. } => {
                let Some(guest) = self.registry.get(with) else { return Ok(()) };
                self.links.met(&self.endpoint, with, &guest.site);
                if self.keeps_copies(with) {
                    self.disk.announce(with);
                }
                match guest.address() {
                    Some(address) => self.tell(Input::CalledAgain(address)),
                    None => Ok(()),
                }
            }
            NetworkEvent::Refused { key, at, why } => {
                let who = key.map_or("somebody without a key".into(), |key| key.short());
                let why: String = why.chars().take(MOST_REASON).collect();
                self.remember(format!("refused {who} at {at}: {why}"));
                Ok(self.log.append_at(self.clock, Event::Refused { who: format!("{who} at {at}"), why })?)
            }
            NetworkEvent::Closed { with, .. } => {
                match self.registry.get(with).and_then(|guest| guest.address()) {
                    Some(address) => self.tell(Input::HungUp(address)),
                    None => Ok(()),
                }
            }
            NetworkEvent::Unreachable { .. } => Ok(()),
        }
    }

    fn on_post(&mut self, from: PublicKey, post: Post, body: Bytes) -> Result<(), CoordinatorError> {
        let guest = self.registry.get(from);
        let is_worker = guest.as_ref().is_some_and(|guest| guest.role == Role::Worker);
        match post {
            // Nobody speaks in another's name.
            Post::Swarm(envelope, _) if guest.as_ref().and_then(Guest::address) == Some(envelope.from) => {
                // That something is saved is for us to know.
                if let Body::Saved { stage, version } = envelope.body
                    && !self.kept.contains(&(envelope.fence.epoch, version, stage))
                {
                    return Ok(());
                }
                if let Body::Prepared { stage, summary, .. } | Body::Settled { stage, summary, .. } =
                    &envelope.body
                    && let Err(bad) = self.expected.check(*stage, summary)
                    && let Address::Worker(peer) = envelope.from
                {
                    return self.tell(Input::Nonsense(peer, bad.to_string()));
                }
                self.tell(Input::Message(envelope))?;
            }
            Post::WhoIs(number) if guest.is_some() => {
                let card = self.registry.card(number);
                self.write(from, Post::ThisIs(number, card), Vec::new());
            }
            Post::Keep(of, head) if self.holds(from, of.stage) && self.is_believable(of, &head) => {
                self.disk.keep(from, of, Part { head, file: body.to_vec() });
            }
            Post::WhoHolds(stage) if is_worker => {
                // What crosses sites is dear.
                let (site, asker) = guest.map(|guest| (guest.site, guest.number)).unwrap_or_default();
                let mut holders = self.holders(stage, Some(&site));
                holders.retain(|&number| number != asker);
                holders.truncate(MOST_HOLDERS);
                self.write(from, Post::Holders(stage, holders), Vec::new());
            }
            Post::Fetch(of, parameters) if is_worker => self.disk.fetch(from, of, parameters),
            Post::Read(step, piece) if self.keeps_copies(from) => self.disk.read(from, step, piece),
            Post::Copied(step) if self.keeps_copies(from) => self.on_copied(from, step)?,
            Post::NotCopied(why) if self.keeps_copies(from) => {
                let why: String = why.chars().take(MOST_REASON).collect();
                self.say(format!("{} has no copy of a checkpoint: {why}", from.short()))?;
            }
            Post::Hashes(of, hashes) if self.holds(from, of.stage) => self.on_hashes(from, of, hashes)?,
            Post::Tried(trial, loss) if let Some(guest) = &guest => {
                self.on_tried(guest.number, &trial, Some(loss))?
            }
            Post::NotTried(trial) if let Some(guest) = &guest => self.on_tried(guest.number, &trial, None)?,
            // An operator has shown its ticket, or it would not be connected; members give no orders.
            Post::Order(order) if guest.is_none() => {
                self.tell(Input::Operator(order))?;
                self.answer(from);
            }
            Post::Ask if guest.is_none() => self.answer(from),
            _ => {}
        }
        Ok(())
    }

    /// Whether this is the key of a worker that was given this stage.
    fn holds(&self, key: PublicKey, stage: StageId) -> bool {
        let peer = self.registry.get(key).and_then(|guest| guest.address());
        let workers = self.machine.overview().workers;
        workers.iter().any(|worker| Some(Address::Worker(worker.peer)) == peer && worker.stage == Some(stage))
    }

    /// Who counts in a stage: those in this site, if there are any and one is named, or all.
    fn holders(&self, stage: StageId, site: Option<&str>) -> Vec<u32> {
        let workers = self.machine.overview().workers.into_iter();
        let holds = workers.filter(|worker| worker.active && worker.stage == Some(stage));
        let all: Vec<u32> = holds.map(|worker| worker.peer.0).collect();
        let is_near = |number: &u32| site.is_some() && self.site_of(*number).as_deref() == site;
        let near: Vec<u32> = all.iter().copied().filter(is_near).collect();
        if near.is_empty() { all } else { near }
    }

    fn site_of(&self, number: u32) -> Option<String> {
        self.registry.by_number(number).map(|(_, guest)| guest.site)
    }

    fn tell(&mut self, input: Input) -> Result<(), CoordinatorError> {
        let mut commands = Vec::new();
        let before = (self.machine.journal().step, self.machine.journal().epoch);
        let safe = self.machine.journal().checkpoint;
        self.machine.handle(input, self.now(), &mut commands);
        self.carry_out(commands)?;
        if self.machine.journal().checkpoint > safe {
            self.announce_checkpoint();
        }
        let book = self.machine.journal();
        if (book.step, book.epoch) != before {
            let (step, epoch) = (book.step, book.epoch);
            self.on_new_version(before, (step, epoch))?;
        }
        Ok(())
    }

    fn carry_out(&mut self, commands: Vec<Command>) -> Result<(), CoordinatorError> {
        for command in commands {
            match command {
                Command::Send(envelope) => {
                    let number = match envelope.to {
                        Address::Worker(peer) => peer.0,
                        Address::Driver(driver) => driver.0,
                        Address::Coordinator => continue,
                    };
                    if let Some((key, _)) = self.registry.by_number(number) {
                        self.write(key, Post::Swarm(envelope, None), Vec::new());
                    }
                }
                Command::Append(number, record) => {
                    // What a checkpoint says of skipped steps is of those before it.
                    let before = if let Record::Checkpoint(version) = &record { *version } else { Step(0) };
                    let skipped = self.machine.journal().skipped.range(..before).count() as u64;
                    self.disk.append(number, record, skipped)?;
                }
                Command::Conclude(number, step, summaries) => {
                    let book = self.machine.journal();
                    let (skipped, is_left_out) = (book.skipped.len() as u64, book.left_out.contains(&step));
                    let (mut report, mut constants) = conclude(&self.charter.run, step, skipped, &summaries)?;
                    if is_left_out {
                        (report.skipped, constants) = (true, None);
                    } else if let Some(first) = self.spike(&report)? {
                        self.tell(Input::Spiked(number, first))?;
                        continue;
                    }
                    self.reports.insert(step, report);
                    let (epoch, stages) = (self.machine.journal().epoch.0, self.machine.counted());
                    self.log.append_at(self.clock, Event::Counted { epoch, step: step.0, stages })?;
                    self.conclude_when_tried(number, step, constants)?;
                }
                Command::Tell(text) => self.say(text)?,
            }
        }
        Ok(())
    }

    /// A step was closed, or the run went back.
    fn on_new_version(
        &mut self,
        before: (Step, Epoch),
        after: (Step, Epoch),
    ) -> Result<(), CoordinatorError> {
        if after.1 != before.1 && after.0 <= before.0 && before.1 > Epoch(0) {
            self.log.append_at(self.clock, Event::WentBack { from: before.0.0, to: after.0.0 })?;
        }
        self.pause_if_nothing_is_learnt()?;
        let (epoch, safe) = (after.1, self.machine.journal().checkpoint);
        self.kept.retain(|(of, version, _)| *of == epoch && *version > safe);
        if after.1 != before.1
            && let Some(stages) = self.hashes.remove(&(before.1, after.0))
        {
            // What all go back to has the weights that it had.
            self.hashes.insert((after.1, after.0), stages);
        }
        self.hashes.retain(|(epoch, version), _| *epoch == after.1 && version.0 + REMEMBERED > after.0.0);
        let closed = after.0.0.checked_sub(1).and_then(|step| self.reports.remove(&Step(step)));
        let Some(report) = closed else { return Ok(()) };
        self.reports.clear();
        let now = Instant::now();
        let seconds = self.recent.back().map_or(0.0, |(then, _)| now.duration_since(*then).as_secs_f64());
        self.recent.push_back((now, report.loss.tokens));
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        self.last_loss = Some(report.loss.mean());
        self.log.append_at(
            self.clock,
            Event::Step {
                step: report.step,
                loss: report.loss.mean(),
                tokens: report.loss.tokens,
                lr: report.lr,
                norm: report.norm,
                seconds,
                weights: None,
                skipped: report.skipped,
            },
        )?;
        self.look();
        Ok(())
    }

    fn pause_if_nothing_is_learnt(&mut self) -> Result<(), CoordinatorError> {
        let book = self.machine.journal();
        let skipped = book.skipped.range(Step(book.step.0.saturating_sub(MOST_SKIPPED))..).count() as u64;
        if skipped < MOST_SKIPPED || book.paused {
            return Ok(());
        }
        self.say(format!(
            "paused: the gradient was not finite in {MOST_SKIPPED} steps one after another. The training has diverged, \
             or the only holder of a stage computes wrongly; go on with `starling run resume`"
        ))?;
        self.tell(Input::Operator(Order::Pause))
    }

    fn on_hashes(
        &mut self,
        from: PublicKey,
        of: StateOf,
        hashes: BTreeMap<String, [u8; 32]>,
    ) -> Result<(), CoordinatorError> {
        if self.compare(of, hashes)? {
            self.write(from, Post::Noted(of), Vec::new());
        }
        Ok(())
    }

    /// A replica tells the hashes of its weights: they must be those of the others. Whether it need not tell them again.
    fn compare(&mut self, of: StateOf, hashes: BTreeMap<String, [u8; 32]>) -> Result<bool, CoordinatorError> {
        let book = self.machine.journal();
        // After a restart a replica may be ahead of us, by a commit that our journal does not have yet.
        if (of.epoch, of.version) > (book.epoch, book.step) {
            return Ok(false);
        }
        if of.epoch != book.epoch || of.version.0 + REMEMBERED <= book.step.0 {
            return Ok(true);
        }
        let stages = self.hashes.entry((of.epoch, of.version)).or_default();
        match stages.get(&of.stage) {
            Some(known) if *known == hashes => return Ok(true),
            Some(_) => return Err(CoordinatorError::Diverged(of.stage, of.version.0)),
            // A parameter that several stages use is the same in all of them.
            None if stages
                .values()
                .flatten()
                .any(|(name, hash)| hashes.get(name).is_some_and(|h| h != hash)) =>
            {
                return Err(CoordinatorError::Diverged(of.stage, of.version.0));
            }
            None => stages.insert(of.stage, hashes),
        };
        if stages.len() == usize::from(self.charter.spec.stages) {
            let weights = self.hashes.get(&(of.epoch, of.version)).map(|stages| self.combined(stages));
            let step = of.version.0.saturating_sub(1);
            self.log.append_at(self.clock, Event::Weights { step, weights: weights.unwrap_or_default() })?;
        }
        Ok(true)
    }

    fn combined(&self, stages: &StageHashes) -> String {
        weights_hash(stages.values().cloned())
    }

    fn write(&mut self, to: PublicKey, post: Post, body: Vec<Bytes>) {
        self.clock += 1;
        if let Some(letter) = post.seal(self.clock, body) {
            // Lost if it is out of reach: whoever lacks something says so with its next beat.
            let _ = self.endpoint.send(to, letter);
        }
    }

    fn answer(&mut self, operator: PublicKey) {
        self.look();
        let status = self.status.borrow().clone();
        self.write(operator, Post::Told(Box::new(status)), Vec::new());
    }

    fn say(&mut self, text: String) -> Result<(), LogError> {
        self.remember(text.clone());
        self.log.append_at(self.clock, Event::News { text })
    }

    fn remember(&mut self, text: String) {
        self.news.push_back(text);
        if self.news.len() > MOST_NEWS {
            self.news.pop_front();
        }
    }

    fn now(&self) -> Time {
        Time(self.start.elapsed().as_micros() as u64)
    }
}

/// Why a coordinator ended before its run was over.
#[derive(Debug, thiserror::Error)]
pub enum CoordinatorError {
    /// The journal or the registry cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The disk failed.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The event log failed.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The network could not be started.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A commit's constants cannot be made.
    #[error(transparent)]
    Summary(#[from] BadSummary),
    /// Two replicas differ.
    #[error(
        "two replicas of {0} have different weights after {1} steps: one of them computes wrongly. The run stops rather \
         than train something else; go on from the last checkpoint"
    )]
    Diverged(StageId, u64),
}
