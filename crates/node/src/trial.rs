//! How good a version is on held-out text, tried across the pipeline while the run goes on.
//!
//! A step is not closed before the version that it was computed with has been tried: so the weights stay what they are, and
//! the result is that of one process, bit for bit. The coordinator names a route for every microbatch; a driver reads it, the
//! workers pass it on, and the last one tells the loss. What does not come back is tried on another route.

use std::ops::Range;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use starling_model::stage::Loss;
use starling_swarm::ids::{Epoch, StageId, Step};
use starling_swarm::worker::io::StateOf;

/// How long a microbatch may take at least, and how much longer than the slowest before it.
const PATIENCE: (Duration, u32) = (Duration::from_secs(5), 4);
/// After so many tries of one microbatch the version is not looked at.
const MOST_TRIES: u32 = 4;

/// One microbatch of held-out text on its way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// In which history.
    pub epoch: Epoch,
    /// Which weights.
    pub version: Step,
    /// Which of the version's microbatches.
    pub part: u32,
    /// Its windows of held-out text.
    pub windows: Range<u64>,
    /// Who computes it: the number of a worker for every stage.
    pub route: Vec<u32>,
    /// Bytes of text that it holds; the driver knows.
    pub bytes: u64,
}

impl Trial {
    /// The state that the worker of a stage must have.
    pub fn state(&self, stage: u16) -> StateOf {
        StateOf { stage: StageId(stage), epoch: self.epoch, version: self.version }
    }
}

/// All microbatches of one version; see the module's head. Pure.
pub struct Evaluation {
    /// Which version.
    pub of: (Epoch, Step),
    parts: Vec<Part>,
    slowest: Duration,
}

struct Part {
    windows: Range<u64>,
    tries: u32,
    asked: Option<Instant>,
    result: Option<(Loss, u64)>,
}

impl Evaluation {
    /// Of so many windows, so many at a time.
    pub fn new(of: (Epoch, Step), windows: u64, at_a_time: u32) -> Evaluation {
        let at_a_time = u64::from(at_a_time.max(1));
        let part = |first: u64| {
            let windows = first * at_a_time..windows.min((first + 1) * at_a_time);
            Part { windows, tries: 0, asked: None, result: None }
        };
        Evaluation {
            of,
            parts: (0..windows.div_ceil(at_a_time)).map(part).collect(),
            slowest: Duration::ZERO,
        }
    }

    /// What to send now, if so many may be on their way: part and windows.
    pub fn next(&mut self, most: usize, now: Instant) -> Vec<(u32, Range<u64>)> {
        let patience = self.patience();
        for part in self.parts.iter_mut().filter(|part| part.result.is_none()) {
            part.asked.take_if(|asked| now >= *asked + patience);
        }
        let under_way = self.parts.iter().filter(|part| part.is_under_way()).count();
        let waiting =
            (0..).zip(&mut self.parts).filter(|(_, part)| part.result.is_none() && part.asked.is_none());
        let mut next = Vec::new();
        for (number, part) in waiting.take(most.saturating_sub(under_way)) {
            (part.asked, part.tries) = (Some(now), part.tries + 1);
            next.push((number, part.windows.clone()));
        }
        next
    }

    /// When something is to be tried again, whatever comes.
    pub fn next_wake(&self) -> Option<Instant> {
        let asked = self.parts.iter().filter(|part| part.is_under_way()).filter_map(|part| part.asked);
        asked.min().map(|asked| asked + self.patience())
    }

    /// A microbatch is back.
    pub fn tried(&mut self, trial: &Trial, loss: Loss, now: Instant) {
        if let Some(part) = self.part(trial)
            && part.result.is_none()
        {
            part.result = Some((loss, trial.bytes));
            let took = part.asked.map_or(Duration::ZERO, |asked| now.saturating_duration_since(asked));
            self.slowest = self.slowest.max(took);
        }
    }

    /// A microbatch could not be computed on its route.
    pub fn not_tried(&mut self, trial: &Trial) {
        if let Some(part) = self.part(trial) {
            part.asked = None;
        }
    }

    /// Parts that are back, and all.
    pub fn progress(&self) -> (usize, usize) {
        (self.parts.iter().filter(|part| part.result.is_some()).count(), self.parts.len())
    }

    /// Whether some part was tried in vain too often.
    pub fn is_hopeless(&self) -> bool {
        self.parts
            .iter()
            .any(|part| part.result.is_none() && part.asked.is_none() && part.tries >= MOST_TRIES)
    }

    /// The loss, and bits per byte of the text, if all is there: added up in order.
    pub fn outcome(&self) -> Option<(Loss, f64)> {
        let (mut loss, mut bytes) = (Loss::default(), 0);
        for part in &self.parts {
            let (of_part, text) = part.result?;
            loss += of_part;
            bytes += text;
        }
        Some((loss, loss.sum / std::f64::consts::LN_2 / bytes.max(1) as f64))
    }

    fn patience(&self) -> Duration {
        PATIENCE.0 + PATIENCE.1 * self.slowest
    }

    /// The part that a trial is of, if it is of this version.
    fn part(&mut self, trial: &Trial) -> Option<&mut Part> {
        let is_ours = (trial.epoch, trial.version) == self.of;
        self.parts.get_mut(trial.part as usize).filter(|part| is_ours && part.windows == trial.windows)
    }
}

impl Part {
    fn is_under_way(&self) -> bool {
        self.result.is_none() && self.asked.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF: (Epoch, Step) = (Epoch(1), Step(40));

    fn trial(part: u32, windows: Range<u64>) -> Trial {
        Trial { epoch: OF.0, version: OF.1, part, windows, route: Vec::new(), bytes: 10 }
    }

    #[test]
    fn every_window_is_tried_once_and_losses_are_added_in_order() {
        let (mut evaluation, now) = (Evaluation::new(OF, 7, 3), Instant::now());
        assert_eq!(evaluation.next(2, now), [(0, 0..3), (1, 3..6)]);
        assert_eq!(evaluation.next(2, now), []);
        evaluation.tried(&trial(1, 3..6), Loss { sum: 2.0, tokens: 5 }, now);
        evaluation.tried(&trial(1, 3..6), Loss { sum: 9.0, tokens: 9 }, now);
        assert_eq!(evaluation.next(2, now), [(2, 6..7)]);
        let other = Trial { version: Step(41), ..trial(0, 0..3) };
        evaluation.tried(&other, Loss { sum: 9.0, tokens: 9 }, now);
        evaluation.tried(&trial(0, 0..2), Loss { sum: 9.0, tokens: 9 }, now);
        assert_eq!((evaluation.progress(), evaluation.outcome()), ((1, 3), None));
        evaluation.tried(&trial(0, 0..3), Loss { sum: 1.0, tokens: 6 }, now);
        evaluation.tried(&trial(2, 6..7), Loss { sum: 1.5, tokens: 2 }, now);
        let bits = 4.5 / std::f64::consts::LN_2 / 30.0;
        assert_eq!(evaluation.outcome(), Some((Loss { sum: 4.5, tokens: 13 }, bits)));
    }

    #[test]
    fn what_does_not_come_back_is_tried_again_but_not_for_ever() {
        let (mut evaluation, mut now) = (Evaluation::new(OF, 2, 1), Instant::now());
        assert_eq!(evaluation.next(9, now).len(), 2);
        evaluation.tried(&trial(0, 0..1), Loss::default(), now + Duration::from_secs(1));
        for _ in 1..MOST_TRIES {
            now = evaluation.next_wake().unwrap();
            assert!(!evaluation.is_hopeless());
            assert_eq!(evaluation.next(9, now), [(1, 1..2)]);
        }
        evaluation.not_tried(&trial(1, 1..2));
        assert!(evaluation.is_hopeless());
    }
}
