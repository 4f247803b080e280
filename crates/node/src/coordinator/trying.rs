//! Held-out text: which versions are tried on it, by whom, and what comes of it.

use std::time::Instant;

use starling_model::stage::Loss;
use starling_swarm::coordinator::Input;
use starling_swarm::ids::*;

use crate::coordinator::{Coordinator, CoordinatorError};
use crate::events::Event;
use crate::post::Post;
use crate::trial::{Evaluation, Trial};

/// Microbatches of held-out text on their way, for each worker.
const FOR_EACH: usize = 2;

/// What is being tried.
#[derive(Default)]
pub(super) struct Trying {
    /// Windows of held-out text.
    windows: u64,
    evaluation: Option<Evaluation>,
    /// What closes the step, once that is over.
    held_back: Option<(u64, Option<Vec<u8>>)>,
    /// The version that was looked at last, whatever came of it.
    last: Option<(Epoch, Step)>,
    /// And its loss.
    pub loss: Option<f64>,
    /// Counts microbatches, so that all workers get some.
    sent: usize,
}

impl Trying {
    /// Of a run that holds so many windows out.
    pub fn new(windows: u64) -> Trying {
        Trying { windows, ..Trying::default() }
    }

    pub fn next_wake(&self) -> Option<Instant> {
        self.evaluation.as_ref()?.next_wake()
    }

    /// Whether something is being tried.
    pub fn is_under_way(&self) -> bool {
        self.evaluation.is_some()
    }

    /// How far that is.
    pub fn progress(&self) -> Option<String> {
        let evaluation = self.evaluation.as_ref()?;
        let (done, all) = evaluation.progress();
        Some(format!("held-out text with the weights of {}: {done} of {all} microbatches", evaluation.of.1))
    }
}

impl Coordinator {
    /// A step can be closed: first the version that it was computed with is tried on held-out text, if that is due.
    pub(super) fn conclude_when_tried(
        &mut self,
        number: u64,
        step: Step,
        constants: Option<Vec<u8>>,
    ) -> Result<(), CoordinatorError> {
        let every = self.charter.run.evaluate.every;
        if every == 0 || step.0 == 0 || !step.0.is_multiple_of(every) {
            return self.tell(Input::Concluded(number, constants));
        }
        self.trying.held_back = Some((number, constants));
        self.begin_trying(self.charter.run.evaluate.windows)
    }

    /// The open version is tried on so many windows at the most (0: all), unless it was before.
    pub(super) fn begin_trying(&mut self, most: u64) -> Result<(), CoordinatorError> {
        let (run, book) = (&self.charter.run, self.machine.journal());
        let of = (book.epoch, book.step);
        let windows = if most == 0 { self.trying.windows } else { most.min(self.trying.windows) };
        if windows == 0 || self.trying.last == Some(of) || run.train.device.is_emulated() {
            return self.go_on();
        }
        if self.trying.evaluation.as_ref().is_none_or(|evaluation| evaluation.of != of) {
            self.trying.evaluation = Some(Evaluation::new(of, windows, run.train.microbatch, Instant::now()));
        }
        self.try_on()
    }

    /// Goes on with what is being tried.
    pub(super) fn try_on(&mut self) -> Result<(), CoordinatorError> {
        let Some(evaluation) = &mut self.trying.evaluation else { return Ok(()) };
        let (book, now) = (self.machine.journal(), Instant::now());
        if evaluation.of != (book.epoch, book.step) {
            // The run has gone back, or on without it.
            (self.trying.evaluation, self.trying.held_back) = (None, None);
            return Ok(());
        }
        let step = evaluation.of.1.0;
        if let Some((loss, bits_per_byte)) = evaluation.outcome() {
            let mean = loss.mean();
            self.trying.loss = Some(mean);
            let event = Event::Evaluated { step, loss: mean, tokens: loss.tokens, bits_per_byte };
            self.log.append_at(self.clock, event)?;
            self.remember(format!("step {step}: held-out loss {mean:.4}, {bits_per_byte:.3} bits per byte"));
            return self.go_on();
        }
        let workers = self.machine.overview().workers.iter().filter(|worker| worker.active).count();
        let due = evaluation.due(FOR_EACH * workers, now);
        if evaluation.is_hopeless(now) {
            let (done, all) = evaluation.progress();
            self.say(format!(
                "step {step}: held-out text was not looked at; only {done} of {all} microbatches came back"
            ))?;
            return self.go_on();
        }
        for (part, tries) in due {
            self.send_trial(part, tries, now);
        }
        Ok(())
    }

    fn send_trial(&mut self, part: u32, tries: usize, now: Instant) {
        self.trying.sent += 1;
        let way = self.route(self.trying.sent, tries == 0);
        let way = way.and_then(|(driver, route)| Some((driver, self.registry.by_number(driver)?.0, route)));
        let Some(evaluation) = &mut self.trying.evaluation else { return };
        match way {
            None => evaluation.postpone(part, now),
            Some((driver, key, route)) => {
                if let Some(trial) = evaluation.send(part, route, driver, now) {
                    self.write(key, Post::Try(trial), Vec::new());
                }
            }
        }
    }

    /// A microbatch is back, or could not be computed, says the member of this number.
    pub(super) fn on_tried(
        &mut self,
        by: u32,
        trial: &Trial,
        loss: Option<Loss>,
    ) -> Result<(), CoordinatorError> {
        let Some(evaluation) = &mut self.trying.evaluation else { return Ok(()) };
        match loss {
            Some(loss) => evaluation.tried(trial, by, loss, Instant::now()),
            None => evaluation.not_tried(trial, by, Instant::now()),
        }
        self.try_on()
    }

    /// Nothing is being tried any more: the step is closed.
    fn go_on(&mut self) -> Result<(), CoordinatorError> {
        if let Some(evaluation) = self.trying.evaluation.take() {
            self.trying.last = Some(evaluation.of);
        }
        match self.trying.held_back.take() {
            Some((number, constants)) => self.tell(Input::Concluded(number, constants)),
            None => Ok(()),
        }
    }

    /// A driver, and a worker for every stage: near it, where there is one, or anybody; others for every number.
    fn route(&self, number: usize, near: bool) -> Option<(u32, Vec<u32>)> {
        let drivers = self.machine.overview().drivers;
        let driver = drivers.get(number % drivers.len().max(1))?.0;
        let (site, turn) = (self.site_of(driver), number / drivers.len());
        let mut route = Vec::new();
        for stage in (0..self.charter.spec.stages).map(StageId) {
            let holders = self.holders(stage, site.as_deref().filter(|_| near));
            route.push(*holders.get(turn % holders.len().max(1))?);
        }
        Some((driver, route))
    }
}
