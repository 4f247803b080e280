//! The guard of a run: which losses are spikes.
//!
//! A spike mostly comes of a bad update some steps before it. So all go back to the newest checkpoint, and when those steps
//! are done again, their updates and the spike's are left out. What is a spike depends on the losses before it only: in one
//! process and in a swarm the same steps are left out.

use std::collections::VecDeque;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use starling_corpus::Problem;

/// Updates left out one after another, at the most: more would look like a training that has diverged.
const MOST_LEFT_OUT: u64 = 8;
/// Losses that are remembered besides a window: a run that goes back must find those before that again.
const REMEMBERED: usize = 1 << 16;
/// Times that a run goes back to one checkpoint by itself.
const MOST_TIMES: u32 = 10;

/// The `[guard]` section: when a run goes back because its loss is too high.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GuardConfig {
    /// A loss is a spike if it is more than so many standard deviations above the mean of the last ones, or not finite;
    /// 0 means that none is.
    pub spike: f64,
    /// How many losses are the last ones; half as many must be there.
    pub window: usize,
    /// Updates that are left out: the spike's, and those before it.
    pub leave_out: u64,
}

impl Default for GuardConfig {
    fn default() -> Self {
        GuardConfig { spike: 0.0, window: 100, leave_out: 4 }
    }
}

impl GuardConfig {
    /// Whether it looks at all.
    pub fn is_on(&self) -> bool {
        self.spike > 0.0
    }

    /// What is wrong with it.
    pub fn problems(&self) -> Vec<Problem> {
        let GuardConfig { spike, window, leave_out } = *self;
        let mut problems = Vec::new();
        if !(spike.is_finite() && spike >= 0.0) {
            let message = format!("{spike} standard deviations cannot be");
            problems.push(Problem::new("guard.spike", message, "use about 6, or 0 for no guard"));
        }
        if !(4..=100_000).contains(&window) {
            let message = format!("of {window} losses nothing can be said");
            problems.push(Problem::new("guard.window", message, "use 4 to 100000"));
        }
        if !(1..=MOST_LEFT_OUT).contains(&leave_out) {
            let message = format!("{leave_out} updates cannot be left out");
            problems.push(Problem::new("guard.leave_out", message, format!("use 1 to {MOST_LEFT_OUT}")));
        }
        problems
    }
}

/// See the module's head.
#[derive(Clone, Debug)]
pub struct Guard {
    config: GuardConfig,
    /// The last losses that were no spikes, by step.
    last: VecDeque<(u64, f64)>,
    /// The checkpoint that the run went back to last, and how often.
    went_back: (u64, u32),
}

impl Guard {
    /// One that has seen nothing yet.
    pub fn new(config: &GuardConfig) -> Guard {
        Guard { config: config.clone(), last: VecDeque::new(), went_back: (0, 0) }
    }

    /// Whether the loss of a step is a spike; if not, it is one of the last from now on. A step that is done again takes
    /// the place of what came of it, and of all after it, before.
    pub fn is_spike(&mut self, step: u64, loss: f64) -> bool {
        if !self.config.is_on() {
            return false;
        }
        self.forget_from(step);
        let is_known = self.last.len() >= self.config.window.div_ceil(2);
        let is_spike = !loss.is_finite() || is_known && loss > self.bound();
        if !is_spike {
            self.last.push_back((step, loss));
            self.last.drain(..self.last.len().saturating_sub(self.config.window + REMEMBERED));
        }
        is_spike
    }

    /// This step and those after it will be done again.
    pub fn forget_from(&mut self, step: u64) {
        while self.last.pop_back_if(|(of, _)| *of >= step).is_some() {}
    }

    /// The loss of a step was a spike: the first of the steps whose updates are left out. What is in the checkpoint that was
    /// due last stays: not all may have to go back further.
    pub fn leave_out(&mut self, step: u64, checkpoint_every: u64) -> u64 {
        let due = step.checked_div(checkpoint_every).map_or(0, |times| times * checkpoint_every);
        let first = (step + 1).saturating_sub(self.config.leave_out).max(due);
        self.forget_from(first);
        first
    }

    /// The run is about to go back to a checkpoint. How often it did so before is told if that is enough.
    pub fn goes_back(&mut self, checkpoint: u64) -> Result<(), u32> {
        let times = if self.went_back.0 == checkpoint { self.went_back.1 } else { 0 };
        self.went_back = (checkpoint, times + 1);
        if times < MOST_TIMES { Ok(()) } else { Err(times) }
    }

    fn bound(&self) -> f64 {
        let losses = || self.last.iter().rev().take(self.config.window).map(|(_, loss)| loss);
        let count = losses().count() as f64;
        let mean = losses().sum::<f64>() / count;
        let variance = losses().map(|loss| (loss - mean) * (loss - mean)).sum::<f64>() / count;
        mean + self.config.spike * variance.sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> Guard {
        let mut guard = Guard::new(&GuardConfig { spike: 4.0, window: 8, leave_out: 3 });
        // Mean 2, deviation 0.1.
        (0..8).for_each(|step| assert!(!guard.is_spike(step, if step % 2 == 0 { 1.9 } else { 2.1 })));
        guard
    }

    #[test]
    fn a_loss_far_above_the_last_ones_is_a_spike_and_leaves_no_trace() {
        let mut guard = guard();
        assert!(guard.is_spike(8, 2.45));
        assert!(guard.is_spike(8, f64::NAN));
        assert!(!guard.is_spike(8, 2.35));
        assert!(!guard.is_spike(9, 0.1), "less is better");
    }

    #[test]
    fn updates_are_left_out_back_to_the_checkpoint_that_was_due() {
        let left_out = |step, every| guard().leave_out(step, every);
        assert_eq!((left_out(8, 0), left_out(1, 0)), (6, 0));
        assert_eq!((left_out(8, 7), left_out(8, 6), left_out(8, 8)), (7, 6, 8));
    }

    /// Whoever goes back, however far, decides the same.
    #[test]
    fn what_is_a_spike_depends_on_the_losses_before_it_only() {
        let loss = |step: u64| 2.0 + 0.1 * (step as f64).sin();
        let mut guards = [guard(), guard()];
        for (back_to, guard) in [10, 39].into_iter().zip(&mut guards) {
            (8..40).for_each(|step| assert!(!guard.is_spike(step, loss(step))));
            assert!(guard.is_spike(40, 9.0));
            assert_eq!(guard.leave_out(40, 0), 38);
            (back_to..38).for_each(|step| assert!(!guard.is_spike(step, loss(step))));
        }
        assert_eq!(guards[0].last, guards[1].last);
    }

    #[test]
    fn a_step_that_is_done_again_is_compared_with_those_before_it() {
        let mut guard = guard();
        assert!(!guard.is_spike(4, 2.3));
        assert_eq!(guard.last.len(), 5);
        assert!(!guard.is_spike(2, 99.0), "two say nothing");
    }

    #[test]
    fn a_run_does_not_go_back_to_one_checkpoint_for_ever() {
        let mut guard = guard();
        (0..MOST_TIMES).for_each(|_| assert_eq!(guard.goes_back(40), Ok(())));
        assert_eq!(guard.goes_back(40), Err(MOST_TIMES));
        assert_eq!(guard.goes_back(60), Ok(()));
    }

    #[test]
    fn without_it_nothing_is_a_spike() {
        let mut off = Guard::new(&GuardConfig::default());
        assert!((0..1000).all(|step| !off.is_spike(step, step as f64)));
        assert!(off.last.is_empty());
        assert!(!off.is_spike(1000, f64::NAN));
    }
}
