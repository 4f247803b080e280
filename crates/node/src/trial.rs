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

/// How long a microbatch may take at least, and how much longer than the slowest before it. With every try twice as long.
const PATIENCE: (Duration, u32) = (Duration::from_secs(5), 4);
/// Until a microbatch that could not be computed, or sent, is tried again.
const PAUSE: Duration = Duration::from_secs(1);
/// After so many tries of one microbatch the version is not looked at.
const MOST_TRIES: usize = 4;
/// And if it all takes longer than this, neither.
const LONGEST: Duration = Duration::from_secs(600);

/// One microbatch of held-out text on its way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// In which history.
    pub epoch: Epoch,
    /// Which weights.
    pub version: Step,
    /// Which of the version's microbatches.
    pub part: u32,
    /// Which try of it.
    pub attempt: u32,
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
    begun: Instant,
}

struct Part {
    windows: Range<u64>,
    /// The tries: who computes them, and who reads the text.
    routes: Vec<(Vec<u32>, u32)>,
    /// When the last try was sent, unless it came to nothing.
    asked: Option<Instant>,
    /// It is not tried before.
    rests: Instant,
    result: Option<(Loss, u64)>,
}

impl Evaluation {
    /// Of so many windows, so many at a time.
    pub fn new(of: (Epoch, Step), windows: u64, at_a_time: u32, now: Instant) -> Evaluation {
        let at_a_time = u64::from(at_a_time.max(1));
        let part = |first: u64| {
            let windows = first * at_a_time..windows.min((first + 1) * at_a_time);
            Part { windows, routes: Vec::new(), asked: None, rests: now, result: None }
        };
        let parts = (0..windows.div_ceil(at_a_time)).map(part).collect();
        Evaluation { of, parts, slowest: Duration::ZERO, begun: now }
    }

    /// The parts to send now, if so many may be on their way, and how often each was tried.
    pub fn due(&mut self, most: usize, now: Instant) -> Vec<(u32, usize)> {
        let slowest = self.slowest;
        for part in self.parts.iter_mut().filter(|part| part.result.is_none()) {
            let patience = part.patience(slowest);
            part.asked.take_if(|asked| now >= *asked + patience);
        }
        let under_way = self.parts.iter().filter(|part| part.is_under_way()).count();
        let is_due = |part: &&Part| part.is_waiting() && part.routes.len() < MOST_TRIES && now >= part.rests;
        let due = (0..).zip(&self.parts).filter(|(_, part)| is_due(part));
        due.take(most.saturating_sub(under_way)).map(|(number, part)| (number, part.routes.len())).collect()
    }

    /// A part is sent on its way, by this driver; none if there is no such part.
    pub fn send(&mut self, part: u32, route: Vec<u32>, driver: u32, now: Instant) -> Option<Trial> {
        let (epoch, version) = self.of;
        let entry = self.parts.get_mut(part as usize)?;
        entry.routes.push((route.clone(), driver));
        entry.asked = Some(now);
        let (attempt, windows) = (entry.routes.len() as u32, entry.windows.clone());
        Some(Trial { epoch, version, part, attempt, windows, route, bytes: 0 })
    }

    /// There is no way for a part just now.
    pub fn postpone(&mut self, part: u32, now: Instant) {
        if let Some(part) = self.parts.get_mut(part as usize) {
            part.rests = now + PAUSE;
        }
    }

    /// When something is to be tried again, whatever comes.
    pub fn next_wake(&self) -> Option<Instant> {
        let open = self.parts.iter().filter(|part| part.result.is_none());
        open.map(|part| part.asked.map_or(part.rests, |asked| asked + part.patience(self.slowest))).min()
    }

    /// A microbatch is back, from this worker: a late one is as good, if it was its to tell.
    pub fn tried(&mut self, trial: &Trial, by: u32, loss: Loss, now: Instant) {
        let Some((part, (route, _))) = self.part(trial) else { return };
        if route.last() != Some(&by) || part.result.is_some() {
            return;
        }
        part.result = Some((loss, trial.bytes));
        let took = part.asked.map_or(Duration::ZERO, |asked| now.saturating_duration_since(asked));
        self.slowest = self.slowest.max(took);
    }

    /// A microbatch could not be computed on its route, says somebody on it.
    pub fn not_tried(&mut self, trial: &Trial, by: u32, now: Instant) {
        if let Some((part, (route, driver))) = self.part(trial)
            && trial.attempt as usize == part.routes.len()
            && (route.contains(&by) || driver == by)
        {
            (part.asked, part.rests) = (None, now + PAUSE);
        }
    }

    /// Parts that are back, and all.
    pub fn progress(&self) -> (usize, usize) {
        (self.parts.iter().filter(|part| part.result.is_some()).count(), self.parts.len())
    }

    /// Whether some part was tried in vain too often, or all took too long.
    pub fn is_hopeless(&self, now: Instant) -> bool {
        let in_vain = |part: &Part| part.is_waiting() && part.routes.len() >= MOST_TRIES;
        self.parts.iter().any(in_vain) || now >= self.begun + LONGEST
    }

    /// The loss, and bits per byte of the text, if all is there: added up in order.
    pub fn outcome(&self) -> Option<(Loss, f64)> {
        let (mut loss, mut bytes) = (Loss::default(), 0u64);
        for part in &self.parts {
            let (of_part, text) = part.result?;
            loss.sum += of_part.sum;
            loss.tokens = loss.tokens.saturating_add(of_part.tokens);
            bytes = bytes.saturating_add(text);
        }
        Some((loss, loss.sum / std::f64::consts::LN_2 / bytes.max(1) as f64))
    }

    /// The part that a trial is of, and who computes that try of it; none if it was never sent.
    fn part(&mut self, trial: &Trial) -> Option<(&mut Part, (Vec<u32>, u32))> {
        let is_ours = (trial.epoch, trial.version) == self.of;
        let part = self
            .parts
            .get_mut(trial.part as usize)
            .filter(|part| is_ours && part.windows == trial.windows)?;
        let tried = part.routes.get((trial.attempt as usize).checked_sub(1)?)?.clone();
        Some((part, tried))
    }
}

impl Part {
    fn is_under_way(&self) -> bool {
        self.result.is_none() && self.asked.is_some()
    }

    fn is_waiting(&self) -> bool {
        self.result.is_none() && self.asked.is_none()
    }

    fn patience(&self, slowest: Duration) -> Duration {
        (PATIENCE.0 + PATIENCE.1 * slowest) * (1 << self.routes.len().saturating_sub(1).min(8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF: (Epoch, Step) = (Epoch(1), Step(40));
    const DRIVER: u32 = 9;

    fn loss(sum: f64, tokens: u64) -> Loss {
        Loss { sum, tokens }
    }

    /// Sends all that is due by way of these.
    fn send(evaluation: &mut Evaluation, most: usize, now: Instant) -> Vec<Trial> {
        let due = evaluation.due(most, now);
        let send = |(part, _)| evaluation.send(part, vec![1, 2], DRIVER, now);
        due.into_iter().filter_map(send).map(|trial| Trial { bytes: 10, ..trial }).collect()
    }

    #[test]
    fn every_window_is_tried_once_and_losses_are_added_in_order() {
        let now = Instant::now();
        let mut evaluation = Evaluation::new(OF, 7, 3, now);
        let trials = send(&mut evaluation, 2, now);
        let windows: Vec<Range<u64>> = trials.iter().map(|trial| trial.windows.clone()).collect();
        assert_eq!(windows, [0..3, 3..6]);
        assert_eq!(send(&mut evaluation, 2, now), []);
        evaluation.tried(&trials[1], 2, loss(2.0, 5), now);
        evaluation.tried(&trials[1], 2, loss(9.0, 9), now);
        let last = send(&mut evaluation, 2, now);
        assert_eq!(last[0].windows, 6..7);
        // Of another version, of a try that was never sent, and from somebody whose word it is not.
        evaluation.tried(&Trial { version: Step(41), ..trials[0].clone() }, 2, loss(9.0, 9), now);
        evaluation.tried(&Trial { attempt: 2, ..trials[0].clone() }, 2, loss(9.0, 9), now);
        evaluation.tried(&trials[0], 1, loss(9.0, 9), now);
        assert_eq!((evaluation.progress(), evaluation.outcome()), ((1, 3), None));
        evaluation.tried(&trials[0], 2, loss(1.0, 6), now);
        evaluation.tried(&last[0], 2, loss(1.5, 2), now);
        let bits = 4.5 / std::f64::consts::LN_2 / 30.0;
        assert_eq!(evaluation.outcome(), Some((loss(4.5, 13), bits)));
    }

    #[test]
    fn what_does_not_come_back_is_tried_again_but_not_for_ever() {
        let mut now = Instant::now();
        let mut evaluation = Evaluation::new(OF, 2, 1, now);
        let first = send(&mut evaluation, 9, now);
        evaluation.tried(&first[0], 2, loss(1.0, 1), now + Duration::from_secs(1));
        evaluation.not_tried(&first[1], 7, now);
        assert_eq!(send(&mut evaluation, 9, now), [], "who is not on the route has no say");
        let mut waited = Duration::ZERO;
        for attempt in 2..=MOST_TRIES as u32 {
            let wake = evaluation.next_wake().unwrap();
            assert!(wake - now > waited, "longer every time");
            (waited, now) = (wake - now, wake);
            let trials = send(&mut evaluation, 9, now);
            assert_eq!(trials.iter().map(|trial| trial.attempt).collect::<Vec<_>>(), [attempt]);
            assert!(!evaluation.is_hopeless(now));
        }
        now = evaluation.next_wake().unwrap();
        assert_eq!(send(&mut evaluation, 9, now), []);
        assert!(evaluation.is_hopeless(now));
        evaluation.tried(&first[1], 2, loss(1.0, 1), now);
        assert!(!evaluation.is_hopeless(now) && evaluation.outcome().is_some(), "a late one is as good");
    }

    #[test]
    fn what_cannot_be_computed_rests_and_then_goes_another_way() {
        let now = Instant::now();
        let mut evaluation = Evaluation::new(OF, 1, 1, now);
        for attempt in 0..MOST_TRIES as u32 {
            let now = now + PAUSE * attempt;
            assert_eq!(evaluation.due(9, now), [(0, attempt as usize)]);
            let trial = evaluation.send(0, vec![1, 2], DRIVER, now).unwrap();
            evaluation.not_tried(&trial, DRIVER, now);
            assert_eq!(evaluation.due(9, now), [], "it rests");
        }
        assert!(evaluation.is_hopeless(now));
        let mut evaluation = Evaluation::new(OF, 1, 1, now);
        evaluation.postpone(0, now);
        assert_eq!(evaluation.due(9, now), []);
        assert_eq!(evaluation.due(9, evaluation.next_wake().unwrap()), [(0, 0)], "nothing was tried");
        assert!(evaluation.is_hopeless(now + LONGEST));
    }
}
