//! A worker as a process: the machine between the network and the thread that computes.

mod handing;
mod trying;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use bytes::Bytes;
use starling_model::pipeline::BuildError;
use starling_swarm::ids::PeerId;
use starling_swarm::message::Capability;
use starling_swarm::spec::Reduce;
use starling_swarm::time::Time;
use starling_swarm::worker::io::{Contribute, StateOf};
use starling_swarm::worker::{self, Command, Input};
use tokio::sync::{Notify, mpsc};

use crate::charter::Charter;
use crate::compute::Compute;
use crate::events::{EventLog, LogError, Note};
use crate::giving::{Giving, Next};
use crate::host::{Done, Fetch, Host, Task};
use crate::member::{Arrived, Member, new_life};
use crate::post::Post;
use crate::sabotage::Sabotage;
use crate::taking::Taking;
use crate::tensor::{Sum, Tensor};
use crate::tensors::Tensors;
use crate::toll::{Passage, Toll};

/// Versions whose hashes are kept until they are noted, at the most.
const MOST_HASHES: usize = 64;
/// How long a checkpoint may take to come from the coordinator, and after how long it is asked for again.
const FETCH: Duration = Duration::from_secs(600);
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// Of an element on the wire, as far as it matters to how much is on its way.
const ELEMENT_BYTES: u64 = 4;

/// See the module's head.
pub struct Worker {
    member: Member,
    machine: worker::Worker,
    compute: Compute,
    tensors: Tensors,
    /// Where the thread that computes asks for checkpoints.
    wanted: mpsc::Receiver<Wanted>,
    /// Who waits for which.
    fetching: BTreeMap<StateOf, SyncSender<Option<Bytes>>>,
    /// Sums that others wait for, and that are not read yet.
    contributions: VecDeque<Contribute>,
    /// Those that are being read, in order.
    passages: VecDeque<Passage>,
    toll: Toll,
    /// What others are given of our state, and what we take of theirs.
    giving: Giving,
    taking: Option<Taking>,
    /// Bytes of the largest state.
    state_bytes: u64,
    /// Rows of a microbatch, at the most; and microbatches of held-out text that are being computed.
    most_rows: usize,
    trials: usize,
    /// The hashes of the last versions' weights, and whether the coordinator has noted them.
    hashes: BTreeMap<StateOf, (BTreeMap<String, [u8; 32]>, bool)>,
    start: Instant,
    notice: Arc<Notify>,
    grace: Duration,
    leave_by: Option<Instant>,
    refused: Option<String>,
    is_over: bool,
}

/// How a worker is run.
pub struct Settings {
    /// Where it writes down what it does, if anywhere.
    pub log: Option<EventLog>,
    /// Told when the machine will be taken away.
    pub notice: Arc<Notify>,
    /// How long after that it is there at the most.
    pub grace: Duration,
    /// What it does wrong on purpose.
    pub sabotage: Option<Sabotage>,
}

/// A checkpoint that the thread that computes waits for.
struct Wanted {
    of: StateOf,
    parameters: Vec<String>,
    reply: SyncSender<Option<Bytes>>,
}

impl Worker {
    /// A worker of the run that `member` has joined.
    pub fn new(member: Member, charter: &Charter, settings: Settings) -> Result<Worker, WorkerError> {
        let Settings { mut log, notice, grace, sabotage } = settings;
        let needed = charter.spec.memory_bytes;
        let budget = charter.run.train.memory_bytes();
        let available = budget.unwrap_or(u64::MAX);
        if needed > available {
            return Err(WorkerError::Memory { needed, available });
        }
        log.note(member.clock(), member.joined())?;
        let me = PeerId(member.number());
        let (sender, wanted) = mpsc::channel(1);
        let keep = charter.keep(budget).map_err(WorkerError::Device)?;
        let (build, lots) = (charter.build(keep), charter.spec.lots);
        let mut host = Host::new(me, build, fetch_by(sender), lots, keep);
        host.hash_every(charter.run.train.hash_every);
        host.sabotage(sabotage);
        if charter.run.initial.is_some() {
            host.begin_at_checkpoint();
        }
        if charter.spec.reduce == Reduce::Fast {
            host.merge_all();
        }
        let tensors = host.tensors().clone();
        let (speed, class) = charter.measure().map_err(WorkerError::Device)?;
        let (site, memory_bytes, link_bytes_per_s) = (member.site(), available, 125e6);
        let capability = Capability { site, speed, memory_bytes, link_bytes_per_s, class };
        let machine = worker::Worker::new(me, new_life(), capability, charter.spec.clone(), Time(0));
        let compute = Compute::start(host, log).map_err(WorkerError::Thread)?;
        let (fetching, start) = (BTreeMap::new(), Instant::now());
        Ok(Worker {
            member,
            machine,
            compute,
            tensors,
            wanted,
            fetching,
            contributions: VecDeque::new(),
            passages: VecDeque::new(),
            toll: Toll::default(),
            giving: Giving::default(),
            taking: None,
            state_bytes: charter.spec.state_bytes,
            most_rows: charter.run.train.microbatch as usize,
            trials: 0,
            hashes: BTreeMap::new(),
            start,
            notice,
            grace,
            leave_by: None,
            refused: None,
            is_over: false,
        })
    }

    /// Works until the run is over.
    pub async fn run(mut self) -> Result<(), WorkerError> {
        while !self.is_over && !self.machine.has_left() {
            let wake = self.next_wake();
            tokio::select! {
                biased;
                outcome = self.compute.next() => self.on_outcome(outcome.ok_or(WorkerError::Compute)??),
                Some(wanted) = self.wanted.recv() => self.on_wanted(wanted),
                Some(event) = self.member.next() => {
                    if let Some(arrived) = self.member.on_event(event) {
                        self.on_arrived(arrived);
                    }
                }
                () = self.toll.less(), if !self.contributions.is_empty() => self.read_contributions(),
                () = self.notice.notified() => self.on_notice(),
                () = tokio::time::sleep_until(wake.into()) => self.on_wake(),
            }
            if let Some(why) = self.machine.unfit() {
                self.refused = Some(format!("does not let this peer take part: {why}"));
                self.is_over = true;
            }
        }
        self.member.close().await;
        match self.refused {
            Some(why) => Err(WorkerError::Refused(why)),
            None => Ok(()),
        }
    }

    fn next_wake(&self) -> Instant {
        let machine = self.start + Duration::from_micros(self.machine.next_wake().0.min(1 << 50));
        let taking = self.taking.as_ref().map(Taking::next_wake);
        let others = [self.member.next_wake(), self.leave_by, self.giving.next_wake(), taking];
        others.into_iter().flatten().fold(machine, Instant::min)
    }

    /// The machine will be taken away: what we hold is handed over, as far as the grace period allows.
    fn on_notice(&mut self) {
        self.leave_by = Some(Instant::now() + self.grace);
        self.tell(Input::Notice);
    }

    fn on_wake(&mut self) {
        self.is_over |= self.leave_by.is_some_and(|by| by <= Instant::now());
        self.member.wake();
        self.giving.tidy(Instant::now());
        self.ask_for_chunks();
        if self.machine.next_wake() <= self.now() {
            self.tell(Input::Wake);
            self.tell_hashes();
        }
    }

    fn on_arrived(&mut self, arrived: Arrived) {
        match arrived {
            Arrived::Swarm(envelope, tensor) => self.on_message(envelope, tensor),
            Arrived::Member(_, Post::Infer(trial, stage, head), body) => {
                self.on_infer(trial, stage, head, &body)
            }
            Arrived::Member(from, post, body) => self.on_member(from, post, body),
            Arrived::Post(Post::Holders(stage, numbers), _) => self.on_holders(stage, &numbers),
            Arrived::Post(Post::Kept(of), _) => self.tell(Input::Saved(of)),
            Arrived::Post(Post::Fetched(of, found), body) => {
                if let Some(reply) = self.fetching.remove(&of) {
                    let _ = reply.try_send(found.then_some(body));
                }
            }
            Arrived::Post(Post::Noted(of), _) => {
                self.hashes.entry(of).and_modify(|(_, noted)| *noted = true);
            }
            // It may be another one, which knows only what it is told.
            Arrived::Coordinator => {
                self.hashes.values_mut().for_each(|(_, noted)| *noted = false);
                self.tell_hashes();
            }
            Arrived::Post(Post::Over, _) => self.is_over = true,
            Arrived::Refused(why) => {
                self.refused = Some(why);
                self.is_over = true;
            }
            Arrived::Post(..) => {}
        }
    }

    fn on_outcome(&mut self, outcome: Vec<Done>) {
        for done in outcome {
            match done {
                Done::Note(_) => {} // The thread that computes has written it down.
                Done::Tell(input) => self.tell(input),
                Done::Send(envelope, tensor) => self.member.send(envelope, tensor.as_ref()),
                Done::Contribution(read) => {
                    // They are read in the order in which they were asked for.
                    if let (Some(passage), Some((envelope, sums))) = (self.passages.pop_front(), read) {
                        let passage = Arc::new(passage);
                        let carry = |sum: Sum| Sum { bytes: passage.carry(sum.bytes), ..sum };
                        let tensor = Arc::new(Tensor::Sums(sums.into_iter().map(carry).collect()));
                        self.member.send(envelope, Some(&tensor));
                    }
                    self.read_contributions();
                }
                Done::Give(to, fence, parcel) => self.give(to, fence, parcel),
                Done::Inferred(trial, stage, inferred) => self.on_inferred(trial, stage, inferred),
                Done::NotGiven(to) => self.giving.failed(to),
                Done::Read(of, parcel) => self.on_read(of, parcel),
                Done::Save(of, part) => {
                    self.member.tell_coordinator(Post::Keep(of, part.head), vec![part.file.into()]);
                }
                Done::Hashed(of, hashes) => {
                    self.member.tell_coordinator(Post::Hashes(of, hashes.clone()), Vec::new());
                    self.hashes.insert(of, (hashes, false));
                    while self.hashes.len() > MOST_HASHES {
                        self.hashes.pop_first();
                    }
                }
            }
        }
    }

    /// Tells all hashes that the coordinator has not noted.
    fn tell_hashes(&mut self) {
        for (&of, (hashes, _)) in self.hashes.iter().filter(|(_, (_, noted))| !noted) {
            self.member.tell_coordinator(Post::Hashes(of, hashes.clone()), Vec::new());
        }
    }

    fn on_wanted(&mut self, wanted: Wanted) {
        let Wanted { of, parameters, reply } = wanted;
        self.fetching.clear();
        self.fetching.insert(of, reply);
        self.member.tell_coordinator(Post::Fetch(of, parameters), Vec::new());
    }

    fn tell(&mut self, input: Input) {
        let mut commands = Vec::new();
        self.machine.handle(input, self.now(), &mut commands);
        for command in commands {
            match command {
                // Not by way of the thread that computes: what decides something never waits for arithmetic.
                Command::Send(envelope) => {
                    let tensor = envelope.payload().and_then(|payload| self.tensors.get(payload));
                    self.member.send(envelope, tensor.as_ref());
                }
                Command::Contribute(contribute) => {
                    // What an earlier attempt wanted of this part, or of other lots, is of no use any more.
                    let Contribute { part, stamp, .. } = contribute;
                    self.contributions.retain(|earlier| earlier.part != part && earlier.stamp == stamp);
                    self.contributions.push_back(contribute);
                }
                Command::SendState { to, fence, stage, have } => {
                    let ours = StateOf { stage, epoch: fence.epoch, version: fence.step };
                    match self.giving.next(to, ours, Instant::now()) {
                        Next::Read => {
                            let command = Command::SendState { to, fence, stage, have };
                            self.compute.carry_out(Task::Machine(command), self.member.clock());
                        }
                        Next::Tell(parcel) => self.tell_of(to, fence, &parcel),
                        Next::Wait => {}
                    }
                }
                command => {
                    match command {
                        Command::BeginReduce(_) => self.contributions.clear(),
                        Command::DropBefore(step) => self.contributions.retain(|of| of.fence.step >= step),
                        _ => {}
                    }
                    self.compute.carry_out(Task::Machine(command), self.member.clock());
                }
            }
        }
        self.read_contributions();
        self.take_no_more();
    }

    /// Has our next sums read for those who have taken the ones before.
    fn read_contributions(&mut self) {
        let has_room = |contribute: &Contribute| self.toll.has_room(contribute.to);
        while let Some(next) = self.contributions.iter().position(has_room)
            && let Some(contribute) = self.contributions.remove(next)
        {
            let bytes = ELEMENT_BYTES * (contribute.end - contribute.start) * contribute.nodes.len() as u64;
            self.passages.push_back(self.toll.count(contribute.to, bytes));
            self.compute.carry_out(Task::Machine(Command::Contribute(contribute)), self.member.clock());
        }
    }

    fn now(&self) -> Time {
        Time(self.start.elapsed().as_micros() as u64)
    }
}

/// How the thread that computes gets a checkpoint: by way of the loop, and it waits.
fn fetch_by(sender: mpsc::Sender<Wanted>) -> Fetch {
    Arc::new(move |of, parameters| {
        let until = Instant::now() + FETCH;
        while Instant::now() < until {
            // The question or the answer may have been lost.
            let (reply, answer) = sync_channel(1);
            sender.blocking_send(Wanted { of, parameters: parameters.clone(), reply }).ok()?;
            if let Ok(found) = answer.recv_timeout(ASK_AGAIN) {
                return found.map(|file| file.to_vec());
            }
        }
        None
    })
}

/// Why a worker ended before its run was over.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The run does not fit this machine.
    #[error(
        "a stage of the run needs about {:.1} GB of memory and {:.1} GB are available here; \
         use a machine with more, or cut the model into more stages (train.stages)",
        *.needed as f64 / 1e9, *.available as f64 / 1e9
    )]
    Memory {
        /// Bytes that a stage needs.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
    /// The coordinator does not want us any more.
    #[error("the coordinator {0}")]
    Refused(String),
    /// The event log failed.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The device could not be measured.
    #[error(transparent)]
    Device(BuildError),
    /// The thread that computes could not be started.
    #[error("the thread that computes could not be started: {0}")]
    Thread(std::io::Error),
    /// The thread that computes has died.
    #[error("the thread that computes has died, see above; the run goes on with other peers")]
    Compute,
}
