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

    /// What the run waits for, if it is this.
    pub fn why_waiting(&self) -> Option<String> {
        let evaluation = self.evaluation.as_ref()?;
        let (done, all) = evaluation.progress();
        Some(format!(
            "held-out text: {done} of {all} microbatches are tried with the weights of {}",
            evaluation.of.1
        ))
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
        let run = &self.charter.run;
        let (every, most) = (run.evaluate.every, run.evaluate.windows);
        let of = (self.machine.journal().epoch, step);
        let windows = if most == 0 { self.trying.windows } else { most.min(self.trying.windows) };
        let due = every > 0 && step.0 > 0 && step.0.is_multiple_of(every) && self.trying.last != Some(of);
        if !due || windows == 0 || run.train.device.is_emulated() {
            self.trying.evaluation = None;
            return self.tell(Input::Concluded(number, constants));
        }
        if self.trying.evaluation.as_ref().is_none_or(|evaluation| evaluation.of != of) {
            self.trying.evaluation = Some(Evaluation::new(of, windows, run.train.microbatch));
        }
        self.trying.held_back = Some((number, constants));
        self.try_on()
    }

    /// Goes on with what is being tried.
    pub(super) fn try_on(&mut self) -> Result<(), CoordinatorError> {
        let Some(evaluation) = &mut self.trying.evaluation else { return Ok(()) };
        let book = self.machine.journal();
        if evaluation.of != (book.epoch, book.step) {
            // The run has gone back, or on without it.
            (self.trying.evaluation, self.trying.held_back) = (None, None);
            return Ok(());
        }
        if let Some((loss, bits_per_byte)) = evaluation.outcome() {
            let (step, mean) = (evaluation.of.1.0, loss.mean());
            self.trying.loss = Some(mean);
            let event = Event::Evaluated { step, loss: mean, tokens: loss.tokens, bits_per_byte };
            self.log.append_at(self.clock, event)?;
            self.remember(format!("step {step}: held-out loss {mean:.4}, {bits_per_byte:.3} bits per byte"));
            return self.tried();
        }
        let workers = self.machine.overview().workers.iter().filter(|worker| worker.active).count();
        let next = evaluation.next(FOR_EACH * workers, Instant::now());
        if evaluation.is_hopeless() {
            let step = evaluation.of.1.0;
            self.say(format!("step {step}: held-out text was not looked at: peers come and go too fast"))?;
            return self.tried();
        }
        let (epoch, version) = evaluation.of;
        for (part, windows) in next {
            self.trying.sent += 1;
            if let Some((driver, route)) = self.route(self.trying.sent)
                && let Some((key, _)) = self.registry.by_number(driver.0)
            {
                self.write(
                    key,
                    Post::Try(Trial { epoch, version, part, windows, route, bytes: 0 }),
                    Vec::new(),
                );
            }
        }
        Ok(())
    }

    /// A microbatch is back, or could not be computed.
    pub(super) fn on_tried(&mut self, trial: &Trial, loss: Option<Loss>) -> Result<(), CoordinatorError> {
        let Some(evaluation) = &mut self.trying.evaluation else { return Ok(()) };
        match loss {
            Some(loss) => evaluation.tried(trial, loss, Instant::now()),
            None => evaluation.not_tried(trial),
        }
        self.try_on()
    }

    /// It is over: the step is closed.
    fn tried(&mut self) -> Result<(), CoordinatorError> {
        self.trying.last = self.trying.evaluation.take().map(|evaluation| evaluation.of);
        match self.trying.held_back.take() {
            Some((number, constants)) => self.tell(Input::Concluded(number, constants)),
            None => Ok(()),
        }
    }

    /// A driver, and a worker for every stage, in its site where there is one; others for every number.
    fn route(&self, number: usize) -> Option<(DriverId, Vec<u32>)> {
        let overview = self.machine.overview();
        let site = |number: u32| self.registry.by_number(number).map(|(_, guest)| guest.site);
        let driver = *overview.drivers.get(number % overview.drivers.len().max(1))?;
        let (near, turn) = (site(driver.0), number / overview.drivers.len());
        let mut route = Vec::new();
        for stage in (0..self.charter.spec.stages).map(StageId) {
            let holds = overview.workers.iter().filter(|worker| worker.active && worker.stage == Some(stage));
            let all: Vec<u32> = holds.map(|worker| worker.peer.0).collect();
            let here: Vec<u32> = all.iter().copied().filter(|&worker| site(worker) == near).collect();
            let holders = if here.is_empty() { all } else { here };
            route.push(*holders.get(turn % holders.len().max(1))?);
        }
        Some((driver, route))
    }
}
