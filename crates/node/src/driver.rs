//! A driver as a process: the machine between the network and the corpus.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use starling_corpus::{Sampler, Tokeniser};
use starling_model::batch;
use starling_model::engine::NO_TARGET;
use starling_swarm::driver::{self, Command, Input};
use starling_swarm::ids::{DriverId, Microbatch, Step};
use starling_swarm::message::Body;
use starling_swarm::time::Time;
use tokio::sync::Notify;

use crate::charter::Charter;
use crate::copies::Copies;
use crate::member::{Arrived, Member, new_life};
use crate::post::Post;
use crate::tensor::Tensor;
use crate::trial::Trial;

/// What a driver reads.
pub struct Text {
    /// Its samples.
    pub sampler: Sampler,
    /// What its tokens stand for.
    pub tokeniser: Tokeniser,
}

/// See the module's head.
pub struct Driver {
    member: Member,
    machine: driver::Driver,
    text: Text,
    charter: Charter,
    start: Instant,
    notice: Arc<Notify>,
    copies: Option<Copies>,
    is_over: bool,
}

impl Driver {
    /// A driver of the run that `member` has joined, which takes its samples from here. `notice` ends it.
    pub fn new(member: Member, charter: Charter, text: Text, notice: Arc<Notify>) -> Driver {
        let (me, site) = (DriverId(member.number()), member.site());
        let machine = driver::Driver::new(me, new_life(), site, charter.spec.clone(), Time(0));
        let (start, copies) = (Instant::now(), None);
        Driver { member, machine, text, charter, start, notice, copies, is_over: false }
    }

    /// From now on it keeps copies of the run's checkpoints, if it stands in another site than the coordinator: in a
    /// folder of this one that is named after the training, since steps of another may have the same numbers.
    pub fn keep_copies(&mut self, folder: &Path) -> std::io::Result<()> {
        let identity = self.charter.definition.identity();
        let name: String = identity.chars().take(16).collect();
        self.copies = Some(Copies::start(&folder.join(name), identity)?);
        Ok(())
    }

    /// Feeds the pipeline until the run is over.
    pub async fn run(mut self) {
        while !self.is_over {
            let wake = self.next_wake();
            tokio::select! {
                biased;
                Some(event) = self.member.next() => match self.member.on_event(event) {
                    Some(Arrived::Swarm(envelope, _)) => self.tell(Input::Message(envelope)),
                    Some(Arrived::Post(Post::Over, _) | Arrived::Refused(_)) => self.is_over = true,
                    Some(Arrived::Post(Post::Try(trial), _)) => self.try_out(trial),
                    Some(Arrived::Post(post, body)) => {
                        if let Some(copies) = &self.copies {
                            copies.receive(&post, body);
                        }
                    }
                    Some(Arrived::Coordinator | Arrived::Member(..)) | None => {}
                },
                post = next_post(&mut self.copies) => self.member.tell_coordinator(post, Vec::new()),
                // Its lots are leased to others as soon as its silence is noticed; it holds nothing that could be lost.
                () = self.notice.notified() => self.is_over = true,
                () = tokio::time::sleep_until(wake.into()) => {
                    self.member.wake();
                    if self.machine.next_wake() <= self.now() {
                        self.tell(Input::Wake);
                    }
                }
            }
        }
        self.member.close().await;
    }

    fn next_wake(&self) -> Instant {
        let machine = self.start + Duration::from_micros(self.machine.next_wake().0.min(1 << 50));
        self.member.next_wake().map_or(machine, |wake| wake.min(machine))
    }

    fn tell(&mut self, input: Input) {
        let mut commands = Vec::new();
        self.machine.handle(input, self.now(), &mut commands);
        for Command::Send(envelope) in commands {
            let tensor = match &envelope.body {
                Body::Begin(work, _) => Some(self.contents(envelope.fence.step, work.microbatch)),
                _ => None,
            };
            self.member.send(envelope, tensor.as_ref());
        }
    }

    fn contents(&self, step: Step, microbatch: Microbatch) -> Arc<Tensor> {
        let run = &self.charter.run;
        let samples = run.train.samples(step.0, microbatch.0);
        let (input, meta) = batch::training(&self.text.sampler, samples, run.data.document_mask);
        Arc::new(Tensor::Activation(input, meta))
    }

    /// Sends held-out text on its way.
    fn try_out(&mut self, mut trial: Trial) {
        let sampler = &self.text.sampler;
        let most = u64::from(self.charter.run.train.microbatch);
        let fits = trial.windows.end <= sampler.held_out_windows()
            && trial.windows.end.saturating_sub(trial.windows.start) <= most;
        let Some(&first) = trial.route.first().filter(|_| fits && !trial.windows.is_empty()) else {
            return self.member.tell_coordinator(Post::NotTried(trial), Vec::new());
        };
        let (input, meta) =
            batch::held_out(sampler, trial.windows.clone(), self.charter.run.data.document_mask);
        let targets = meta.targets.iter().filter(|&&target| target != NO_TARGET);
        trial.bytes = targets.map(|&target| self.text.tokeniser.bytes_of(target)).sum();
        let (head, body) = Arc::new(Tensor::Activation(input, meta)).encode();
        self.member.tell_member(first, Post::Infer(trial, 0, head), body);
    }

    fn now(&self) -> Time {
        Time(self.start.elapsed().as_micros() as u64)
    }
}

async fn next_post(copies: &mut Option<Copies>) -> Post {
    match copies {
        Some(copies) => copies.next().await,
        None => std::future::pending().await,
    }
}
