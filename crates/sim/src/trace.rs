//! Preemption traces: how many instances were alive when. Read at run time from wherever they are; bounded, and
//! refused as a whole if a line makes no sense.

use std::ops::Range;

use serde::Deserialize;
use starling_swarm::ids::{PeerId, SiteId};

use crate::fault::Fault;
use crate::rng::Rng;
use crate::scenario::{Peer, Scenario};

/// Most points of a trace.
const MOST_POINTS: usize = 1 << 20;
/// Most instances alive at once.
const MOST_ALIVE: u32 = 1 << 16;

/// How many instances were alive from each moment on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// (microseconds since the start, instances), times growing.
    points: Vec<(u64, u32)>,
}

/// Why a trace cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum BadTrace {
    #[error("line {line} of the trace is not 'time,count': {text:?}")]
    Line { line: usize, text: String },
    #[error("point {point} of the trace goes back in time")]
    Backwards { point: usize },
    #[error("point {point} of the trace has {alive} instances; at most {MOST_ALIVE} are simulated")]
    TooMany { point: usize, alive: u64 },
    #[error("the trace has more than {MOST_POINTS} points, or none")]
    Length,
    #[error("the trace is not the JSON that was expected: {0}")]
    Json(String),
}

#[derive(Deserialize)]
struct Gaps {
    metadata: Metadata,
    data: Vec<u64>,
}

#[derive(Deserialize)]
struct Metadata {
    gap_seconds: f64,
}

impl Trace {
    /// Reads `time,count` lines; `unit_s` is what one unit of time is in seconds.
    pub fn from_csv(text: &str, unit_s: f64) -> Result<Trace, BadTrace> {
        let mut points = Vec::new();
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let bad = || BadTrace::Line { line: index + 1, text: line.chars().take(60).collect() };
            let (time, count) = line.split_once(',').ok_or_else(bad)?;
            let time: f64 = time.trim().parse().map_err(|_| bad())?;
            let count: u64 = count.trim().parse().map_err(|_| bad())?;
            if !(0.0..1e9).contains(&(time * unit_s)) {
                return Err(bad());
            }
            points.push(((time * unit_s * 1e6) as u64, count));
        }
        Trace::from_points(points)
    }

    /// Reads a JSON object with `metadata.gap_seconds` and one count a gap in `data`.
    pub fn from_json(text: &str) -> Result<Trace, BadTrace> {
        let gaps: Gaps = serde_json::from_str(text).map_err(|error| BadTrace::Json(error.to_string()))?;
        let gap_us = gaps.metadata.gap_seconds * 1e6;
        if !(1.0..1e12).contains(&gap_us) {
            return Err(BadTrace::Json("gap_seconds is out of range".into()));
        }
        Trace::from_points(
            gaps.data.into_iter().zip(0u64..).map(|(alive, n)| (n * gap_us as u64, alive)).collect(),
        )
    }

    fn from_points(points: Vec<(u64, u64)>) -> Result<Trace, BadTrace> {
        if points.is_empty() || points.len() > MOST_POINTS {
            return Err(BadTrace::Length);
        }
        let mut checked: Vec<(u64, u32)> = Vec::with_capacity(points.len());
        for (point, (at, alive)) in points.into_iter().enumerate() {
            if alive > MOST_ALIVE.into() {
                return Err(BadTrace::TooMany { point, alive });
            }
            match checked.last_mut() {
                Some(last) if at < last.0 => return Err(BadTrace::Backwards { point }),
                Some(last) if at == last.0 => last.1 = alive as u32,
                _ => checked.push((at, alive as u32)),
            }
        }
        Ok(Trace { points: checked })
    }

    /// How long it is.
    pub fn length_us(&self) -> u64 {
        self.points.last().map_or(0, |point| point.0)
    }

    /// Instances alive at a moment; the trace starts again when it is over.
    pub fn alive(&self, at_us: u64) -> u32 {
        let at = at_us % self.length_us().max(1);
        let index = self.points.partition_point(|point| point.0 <= at);
        index.checked_sub(1).map_or(0, |index| self.points[index].1)
    }

    /// Puts `copies` of the trace, each shifted by its own random start (so that deaths are not correlated), into
    /// a scenario of this length: peers that join, and peers that are killed without notice.
    pub fn populate(&self, scenario: &mut Scenario, copies: u32, until_us: u64, speed: f64, rng: &mut Rng) {
        scenario.peers.clear();
        for _ in 0..copies {
            let shift = rng.below(self.length_us().max(1));
            let mut alive: Vec<PeerId> = Vec::new();
            for at in self.changes(shift, until_us) {
                let wanted = self.alive(at + shift) as usize;
                while alive.len() > wanted {
                    let peer = alive.swap_remove(rng.below(alive.len() as u64) as usize);
                    scenario.faults.push((at, Fault::Preempt { peer, notice_us: 0 }));
                }
                while alive.len() < wanted {
                    alive.push(PeerId(scenario.peers.len() as u32));
                    scenario.peers.push(Peer { site: SiteId(0), speed, jitter: 0.05, joins_us: at });
                }
            }
        }
        scenario.faults.sort_by_key(|(at, _)| *at);
    }

    /// The moments at which the shifted trace changes.
    fn changes(&self, shift: u64, until_us: u64) -> Vec<u64> {
        let length = self.length_us().max(1);
        let mut changes = vec![0];
        for round in 0..=(until_us + shift) / length {
            changes
                .extend(self.points.iter().filter_map(|point| (round * length + point.0).checked_sub(shift)));
        }
        changes.retain(|&at| at < until_us);
        changes.sort_unstable();
        changes.dedup();
        changes
    }
}

/// Microbatches of a swarm that loses no work and no time, but does not know who dies next: every joiner goes to the stage
/// that has the fewest, those included whose state is on its way, counts when its own is there, and stays. How much less
/// that is than [`bound`] is what no policy can do about joins that take time.
pub fn joins_alone(scenario: &Scenario, during_us: Range<u64>, speed: f64, join_us: u64) -> f64 {
    let stages = scenario.spec.stages as usize;
    // When, what, who: in the order of deaths, states that have come, joiners.
    let mut events: Vec<(u64, u8, usize)> = Vec::new();
    for (at, fault) in &scenario.faults {
        if let Fault::Preempt { peer, .. } = fault {
            events.push((*at, 0, peer.0 as usize));
        }
    }
    for (peer, about) in scenario.peers.iter().enumerate() {
        let ready_us = if about.joins_us == 0 { 0 } else { about.joins_us + join_us };
        events.extend([(about.joins_us, 2, peer), (ready_us.max(about.joins_us + 1), 1, peer)]);
    }
    events.push((during_us.end, 3, 0));
    events.sort_unstable();
    let mut stage_of: Vec<Option<usize>> = vec![None; scenario.peers.len()];
    let (mut assigned, mut active) = (vec![0u32; stages], vec![0u32; stages]);
    let mut is_active = vec![false; scenario.peers.len()];
    let (mut since, mut total) = (during_us.start, 0.0);
    for (at, what, peer) in events {
        let until = at.clamp(since, during_us.end);
        total += f64::from(active.iter().copied().min().unwrap_or(0)) * speed * (until - since) as f64 / 1e6;
        since = until;
        match (what, stage_of.get(peer).copied().flatten()) {
            (0, Some(stage)) => {
                assigned[stage] -= 1;
                active[stage] -= u32::from(is_active[peer]);
                stage_of[peer] = None;
            }
            (1, Some(stage)) => {
                active[stage] += 1;
                is_active[peer] = true;
            }
            (2, _) => {
                let fewest = (0..stages).min_by_key(|&stage| assigned[stage]).unwrap_or(0);
                assigned[fewest] += 1;
                stage_of[peer] = Some(fewest);
            }
            _ => {} // It died before its state came.
        }
    }
    total
}

/// Microbatches that nobody could surpass: at every moment the peers that are alive, and have been for as long as
/// a stage's state takes to get to them, spread over the stages as evenly as whole peers can be, all at work, with
/// commits that cost nothing. When nobody is alive, nothing can be done.
pub fn bound(scenario: &Scenario, during_us: Range<u64>, speed: f64, join_us: u64) -> f64 {
    let mut dies_us = vec![u64::MAX; scenario.peers.len()];
    for (at, fault) in &scenario.faults {
        if let Fault::Preempt { peer, .. } = fault {
            dies_us[peer.0 as usize] = *at;
        }
    }
    let mut changes: Vec<(u64, i64)> = Vec::new();
    for (peer, died_us) in scenario.peers.iter().zip(dies_us) {
        // Those who are there from the start make their state from the seed.
        let ready_us = if peer.joins_us == 0 { 0 } else { peer.joins_us + join_us };
        let (from, to) = (ready_us.max(during_us.start), died_us.min(during_us.end));
        if from < to {
            changes.extend([(from, 1), (to, -1)]);
        }
    }
    changes.sort_unstable();
    let (mut alive, mut since, mut total) = (0i64, during_us.start, 0.0);
    for (at, change) in changes {
        let stages = i64::from(scenario.spec.stages);
        total += (alive / stages) as f64 * speed * (at - since) as f64 / 1e6;
        alive += change;
        since = at;
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_kinds_of_traces_are_read() {
        let csv = Trace::from_csv("0,0\n0.5,0\n0.5,3\n1.0,1\n", 3600.0).unwrap();
        let json = Trace::from_json(r#"{"metadata": {"gap_seconds": 1800}, "data": [0, 3, 1]}"#).unwrap();
        assert_eq!(csv, json);
        assert_eq!([0, 1_800_000_000, 3_599_999_999].map(|at| csv.alive(at)), [0, 3, 3]);
    }

    #[test]
    fn nonsense_is_refused_with_its_line() {
        assert!(matches!(Trace::from_csv("0,1\nx,2", 1.0), Err(BadTrace::Line { line: 2, .. })));
        assert!(matches!(Trace::from_csv("0,1\nnan,2", 1.0), Err(BadTrace::Line { .. })));
        assert!(matches!(Trace::from_csv("5,1\n4,2", 1.0), Err(BadTrace::Backwards { point: 1 })));
        assert!(matches!(Trace::from_csv("0,99999999", 1.0), Err(BadTrace::TooMany { .. })));
        assert_eq!(Trace::from_csv("", 1.0), Err(BadTrace::Length));
        assert!(Trace::from_json(r#"{"metadata": {"gap_seconds": -1}, "data": [1]}"#).is_err());
    }

    #[test]
    fn who_does_not_know_the_future_does_less_than_the_bound_and_as_much_where_nobody_dies() {
        let (speed, join_us, during) = (2.0, 30_000_000, 0..600_000_000);
        for (text, least, most) in
            [("0,8\n600,8", 0.999, 1.0), ("0,8\n60,5\n70,8\n200,6\n210,8\n600,8", 0.6, 0.999)]
        {
            let mut scenario = Scenario::small(1, 2, 1);
            let trace = Trace::from_csv(text, 1.0).unwrap();
            trace.populate(&mut scenario, 3, during.end, speed, &mut Rng::new(3));
            let joins = joins_alone(&scenario, during.clone(), speed, join_us);
            let share = joins / bound(&scenario, during.clone(), speed, join_us);
            assert!((least..=most).contains(&share), "{text}: {share}");
        }
    }

    #[test]
    fn copies_start_at_different_moments_and_keep_the_numbers() {
        let trace = Trace::from_csv("0,2\n10,5\n20,1\n30,1", 1.0).unwrap();
        let mut scenario = Scenario::small(1, 1, 1);
        trace.populate(&mut scenario, 1, 60_000_000, 1.0, &mut Rng::new(3));
        let joined = scenario.peers.len();
        let died = scenario.faults.len();
        let alive_at_end = trace.alive(59_999_999 + Rng::new(3).below(30_000_000)) as usize;
        assert_eq!(joined - died, alive_at_end);
    }
}
