//! What the event logs prove: that every sample was counted once in every stage of every step.
//!
//! The journal says which steps are closed, and the coordinator's log which lots of which peers are in the sum of each
//! stage. A worker's log says which microbatches it added to each lot, which lots it dropped, and which it gave to a
//! reduction. For every step that counts in the end: the lots of a stage are all lots, each from one peer; that peer gave
//! exactly those; and each lot it gave held each of its microbatches once, with the samples that belong to it. A lot that
//! it inherited held them in the log of whoever had left it there.
//!
//! It believes what a log says of its own process. A peer that lies is found by the hashes of its weights, not here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use starling_model::run::TrainConfig;
use starling_swarm::ids::Lot;
use starling_swarm::journal::{Commit, Record};
use starling_swarm::lots::Lots;

use crate::events::{Event, Line};

/// What an audit found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Audit {
    /// Steps that count.
    pub steps: u64,
    /// The first of them: the journal of a run that was cut in another way begins at a checkpoint.
    pub first: u64,
    /// Of those: whose update was skipped, so that nothing was counted.
    pub skipped: u64,
    /// Microbatches that were found to be counted once, in every stage.
    pub counted: u64,
    /// What is wrong, each with step, stage and peer.
    pub wrong: Vec<String>,
    /// What cannot be told, because a log is missing.
    pub unknown: Vec<String>,
}

impl Audit {
    /// Whether everything is proved.
    pub fn is_proof(&self) -> bool {
        self.wrong.is_empty() && self.unknown.is_empty() && self.steps > 0
    }
}

/// Peer → what it gave.
type Gifts = BTreeMap<At, BTreeMap<u32, Gift>>;

/// (epoch, step, stage).
type At = (u64, u64, u16);

/// What each peer left with others, and when.
type Left = BTreeMap<u32, Vec<(u64, Gift)>>;

/// What a peer gave to a reduction, or left with another: lots, and what was in them.
#[derive(Clone, Debug, Default)]
struct Gift {
    lots: Vec<u32>,
    /// Those that it had not computed itself.
    inherited: Vec<Inheritance>,
    /// What is wrong with the others.
    wrong: Vec<String>,
}

/// Lots that a peer has from another.
#[derive(Clone, Debug)]
struct Inheritance {
    from: u32,
    /// As they were left there.
    lots: Vec<u32>,
    /// Of those: what was not dropped since.
    held: BTreeSet<u32>,
    clock: u64,
}

/// What workers' logs tell.
#[derive(Debug, Default)]
struct Known {
    /// Whose logs there are, and how far they go.
    peers: BTreeMap<u32, u64>,
    /// What was given to reductions: the last attempt is the one that counts.
    given: Gifts,
    /// What was left with others, and when.
    left: BTreeMap<At, Left>,
}

impl Known {
    /// Looks for lots that were inherited in the log of whoever had left them, who may itself have inherited some. Whatever
    /// was inherited was left before by the logical clocks, so this ends.
    fn trace(&self, at: At, inheritance: &Inheritance, place: &str, found: &mut Traced) {
        let Inheritance { from, lots, clock, .. } = inheritance;
        let Some(&known_until) = self.peers.get(from) else {
            return found
                .unknown
                .push(format!("{place}: there is no log of peer {from}, of whom was inherited"));
        };
        let mut of_peer = self.left.get(&at).and_then(|left| left.get(from)).into_iter().flatten();
        let last = of_peer.rfind(|(left, gift)| left < clock && gift.lots == *lots);
        let Some((left, gift)) = last else {
            let told = match known_until < *clock {
                true => (&mut found.unknown, "whose log ends before that and does not say so"),
                false => (&mut found.wrong, "which had not left just those"),
            };
            return told
                .0
                .push(format!("{place}: lots {lots:?} were inherited from peer {from}, {}", told.1));
        };
        if !found.seen.insert((*from, *left)) {
            return;
        }
        let wrong = gift.wrong.iter().map(|why| format!("{place}: inherited from peer {from}: {why}"));
        found.wrong.extend(wrong);
        gift.inherited.iter().for_each(|before| self.trace(at, before, place, found));
    }
}

/// What following lots from log to log has shown.
#[derive(Default)]
struct Traced {
    seen: BTreeSet<(u32, u64)>,
    wrong: Vec<String>,
    unknown: Vec<String>,
}

/// Looks at the journal, the coordinator's log and those of the workers.
pub fn audit(train: &TrainConfig, journal: &[Record], coordinator: &[Line], peers: &[Vec<Line>]) -> Audit {
    let lots = Lots { microbatches: train.lots().microbatches, lots: train.lots().lots };
    let mut known = Known::default();
    for log in peers {
        read_peer(train, lots, log, &mut known);
    }
    let mut audit = Audit::default();
    let closed = closed_steps(journal, &mut audit.wrong);
    // What was said last of a step is what was closed: before that, somebody had died.
    let counted: BTreeMap<(u64, u64), &Holders> = coordinator
        .iter()
        .filter_map(|line| match &line.event {
            Event::Counted { epoch, step, stages } => Some(((*epoch, *step), stages)),
            _ => None,
        })
        .collect();
    audit.steps = closed.len() as u64;
    audit.first = closed.keys().next().copied().unwrap_or(0);
    for (step, commit) in closed {
        if commit.skipped {
            audit.skipped += 1;
            continue;
        }
        let epoch = commit.epoch.0;
        let Some(stages) = counted.get(&(epoch, step)) else {
            audit
                .unknown
                .push(format!("step {step}: the coordinator's log does not say whose lots are in it"));
            continue;
        };
        if stages.len() != commit.digests.len() {
            audit.wrong.push(format!("step {step}: {} stages were counted, not all", stages.len()));
        }
        for (stage, holders) in stages.iter().enumerate() {
            check_stage(lots, (epoch, step, stage as u16), holders, &known, &mut audit);
        }
    }
    audit
}

/// Stage by stage: whose lots are in the sum.
type Holders = Vec<Vec<(u32, Vec<u32>)>>;

/// The steps that count in the end: what was done again counts once.
fn closed_steps(journal: &[Record], wrong: &mut Vec<String>) -> BTreeMap<u64, Arc<Commit>> {
    let mut closed: BTreeMap<u64, Arc<Commit>> = BTreeMap::new();
    let mut next = 0;
    for record in journal {
        match record {
            Record::Rollback(_, to) | Record::LeftOut(_, to, _) => {
                if to.0 > next && !closed.is_empty() {
                    wrong.push(format!("the run went from step {next} to step {}, which was not done", to.0));
                }
                closed.split_off(&to.0);
                next = to.0;
            }
            Record::Commit(commit) => {
                if commit.step.0 != next {
                    wrong.push(format!("step {} was closed when step {next} was open", commit.step.0));
                }
                next = commit.step.0 + 1;
                closed.insert(commit.step.0, commit.clone());
            }
            _ => {}
        }
    }
    closed
}

/// Follows one worker's log: what is in each of its lots, and what it gave away.
fn read_peer(train: &TrainConfig, lots: Lots, log: &[Line], known: &mut Known) {
    let mut me = None;
    // (step, lot) → microbatch → how often; and what was strange about it.
    let mut held: BTreeMap<(u64, u32), BTreeMap<u32, u32>> = BTreeMap::new();
    let mut strange: BTreeMap<(u64, u32), String> = BTreeMap::new();
    // By step: what was inherited.
    let mut inherited: BTreeMap<u64, Vec<Inheritance>> = BTreeMap::new();
    for line in log {
        let clock = line.clock;
        if let Some(known_until) = me.and_then(|me| known.peers.get_mut(&me)) {
            *known_until = clock.max(*known_until);
        }
        match &line.event {
            Event::Joined { number, .. } => {
                me = Some(*number);
                known.peers.entry(*number).or_insert(clock);
                held.clear();
                strange.clear();
                inherited.clear();
            }
            Event::Inherited { step, from, lots, .. } => {
                let (lots, held) = (lots.clone(), lots.iter().copied().collect());
                inherited.entry(*step).or_default().push(Inheritance { from: *from, lots, held, clock });
            }
            Event::Folded { step, lot, microbatch, first_sample, samples, .. } => {
                *held.entry((*step, *lot)).or_default().entry(*microbatch).or_default() += 1;
                if train.samples(*step, *microbatch) != (*first_sample..first_sample + samples) {
                    let why =
                        format!("microbatch {microbatch} held samples from {first_sample} on, not its own");
                    strange.insert((*step, *lot), why);
                }
            }
            Event::Dropped { step, lots } => {
                for lot in lots {
                    held.remove(&(*step, *lot));
                    strange.remove(&(*step, *lot));
                    inherited.entry(*step).or_default().retain_mut(|one| {
                        one.held.remove(lot);
                        !one.held.is_empty()
                    });
                }
            }
            Event::Voided | Event::Holds { loaded: true, .. } => {
                held.clear();
                strange.clear();
                inherited.clear();
            }
            Event::Holds { version, .. } => {
                held = held.split_off(&(*version, 0));
                strange = strange.split_off(&(*version, 0));
                inherited = inherited.split_off(version);
            }
            Event::Gave { stage, epoch, step, lots: given }
            | Event::Deposited { stage, epoch, step, lots: given } => {
                let Some(me) = me else { continue };
                let inherited = inherited.get(step).cloned().unwrap_or_default();
                let mut gift = Gift { lots: given.clone(), inherited, wrong: Vec::new() };
                for lot in given {
                    let empty = BTreeMap::new();
                    let inside = held.get(&(*step, *lot)).unwrap_or(&empty);
                    let times = gift.inherited.iter().filter(|one| one.held.contains(lot)).count();
                    if times == 1 && inside.is_empty() {
                        continue; // What was in it stands in another log.
                    }
                    if times > 0 {
                        gift.wrong
                            .push(format!("lot {lot} was computed, and inherited {times} times besides"));
                    }
                    gift.wrong.extend(lot_is_wrong(lots, *lot, inside));
                    gift.wrong.extend(strange.get(&(*step, *lot)).cloned());
                }
                let at = (*epoch, *step, *stage);
                match line.event {
                    Event::Gave { .. } => drop(known.given.entry(at).or_default().insert(me, gift)),
                    _ => known.left.entry(at).or_default().entry(me).or_default().push((clock, gift)),
                }
            }
            _ => {}
        }
    }
}

fn lot_is_wrong(lots: Lots, lot: u32, inside: &BTreeMap<u32, u32>) -> Option<String> {
    let expected = lots.microbatches_of(Lot(lot));
    if let Some((microbatch, times)) = inside.iter().find(|(_, times)| **times > 1) {
        return Some(format!("microbatch {microbatch} is in lot {lot} {times} times"));
    }
    if let Some(missing) = expected.clone().find(|microbatch| !inside.contains_key(microbatch)) {
        return Some(format!("microbatch {missing} is missing in lot {lot}"));
    }
    let stray = inside.keys().find(|microbatch| !expected.contains(microbatch));
    stray.map(|stray| format!("microbatch {stray} is in lot {lot}, where it does not belong"))
}

fn check_stage(lots: Lots, at: At, holders: &[(u32, Vec<u32>)], known: &Known, audit: &mut Audit) {
    let (_, step, stage) = at;
    let place = format!("step {step}, stage {stage}");
    let mut all: Vec<u32> = holders.iter().flat_map(|(_, lots)| lots.iter().copied()).collect();
    all.sort_unstable();
    if !all.iter().copied().eq(0..lots.lots) {
        audit.wrong.push(format!("{place}: the lots {all:?} were counted, not each of {} once", lots.lots));
    }
    for (peer, counted) in holders.iter().filter(|(_, lots)| !lots.is_empty()) {
        let Some(gift) = known.given.get(&at).and_then(|gifts| gifts.get(peer)) else {
            match known.peers.contains_key(peer) {
                true => audit
                    .wrong
                    .push(format!("{place}: peer {peer} gave nothing, and {counted:?} were counted")),
                false => audit.unknown.push(format!("{place}: there is no log of peer {peer}")),
            }
            continue;
        };
        if gift.lots != *counted {
            audit.wrong.push(format!(
                "{place}: peer {peer} gave lots {:?}, and {counted:?} were counted",
                gift.lots
            ));
        }
        audit.wrong.extend(gift.wrong.iter().map(|why| format!("{place}: peer {peer}: {why}")));
        let mut found = Traced::default();
        let from_peer = format!("{place}: peer {peer}");
        gift.inherited.iter().for_each(|one| known.trace(at, one, &from_peer, &mut found));
        audit.wrong.append(&mut found.wrong);
        audit.unknown.append(&mut found.unknown);
        let microbatches = counted.iter().map(|&lot| lots.microbatches_of(Lot(lot)).len() as u64);
        audit.counted += microbatches.sum::<u64>();
    }
}

/// All events in one order, in which nothing stands before what it is a consequence of: by logical clock, and events
/// that know nothing of each other by the name of their log. Each is (log, line).
pub fn merge<'a>(logs: impl IntoIterator<Item = (&'a str, &'a [Line])>) -> Vec<(&'a str, &'a Line)> {
    let mut all: Vec<(&str, &Line)> =
        logs.into_iter().flat_map(|(name, lines)| lines.iter().map(move |line| (name, line))).collect();
    // Inside a log the clock never goes back, and the sort is stable: its own order stays.
    all.sort_by_key(|(name, line)| (line.clock, *name));
    all
}

#[cfg(test)]
mod tests {
    use starling_swarm::ids::{Epoch, Step, Term};

    use super::*;

    /// One stage, two lots of one microbatch of two samples each; peer 0 has lot 0, peer 1 lot 1.
    fn logs() -> (TrainConfig, Vec<Record>, Vec<Line>, Vec<Vec<Line>>) {
        let train = TrainConfig { batch: 4, microbatch: 2, lots: 2, ..TrainConfig::default() };
        let line = |clock, event| Line { time_ms: 0, clock, event };
        let peer = |number: u32| {
            let (lot, microbatch) = (number, number);
            let first_sample = 2 * u64::from(number);
            vec![
                line(1, Event::Joined { number, role: "worker".into(), site: "a".into() }),
                line(
                    2,
                    Event::Folded { stage: 0, epoch: 1, step: 0, lot, microbatch, first_sample, samples: 2 },
                ),
                line(3, Event::Gave { stage: 0, epoch: 1, step: 0, lots: vec![lot] }),
            ]
        };
        let stages = vec![vec![(0, vec![0]), (1, vec![1])]];
        let coordinator = vec![line(9, Event::Counted { epoch: 1, step: 0, stages })];
        let commit = Commit {
            term: Term(1),
            epoch: Epoch(1),
            step: Step(0),
            constants: Vec::new(),
            digests: vec![[0; 32]],
            savers: Vec::new(),
            skipped: false,
        };
        (train, vec![Record::Commit(Arc::new(commit))], coordinator, vec![peer(0), peer(1)])
    }

    #[test]
    fn whole_logs_are_a_proof() {
        let (train, journal, coordinator, peers) = logs();
        let found = audit(&train, &journal, &coordinator, &peers);
        assert!(found.is_proof(), "{found:?}");
        assert_eq!((found.steps, found.counted), (1, 2));
    }

    #[test]
    fn whatever_is_wrong_is_named() {
        let (train, journal, coordinator, peers) = logs();
        let wrong = |peers: &[Vec<Line>]| audit(&train, &journal, &coordinator, peers).wrong.join("\n");

        let mut twice = peers.clone();
        twice[0].insert(2, peers[0][1].clone());
        assert_eq!(wrong(&twice), "step 0, stage 0: peer 0: microbatch 0 is in lot 0 2 times");

        let mut dropped = peers.clone();
        dropped[1]
            .insert(2, Line { event: Event::Dropped { step: 0, lots: vec![1] }, ..peers[1][1].clone() });
        assert_eq!(wrong(&dropped), "step 0, stage 0: peer 1: microbatch 1 is missing in lot 1");

        let mut other = peers.clone();
        let Event::Folded { first_sample, .. } = &mut other[1][1].event else { panic!() };
        *first_sample = 7;
        assert!(wrong(&other).contains("held samples from 7 on, not its own"));

        let mut silent = peers.clone();
        silent[0].truncate(2);
        assert!(wrong(&silent).contains("peer 0 gave nothing"));

        let found = audit(&train, &journal, &coordinator, &peers[..1]);
        assert_eq!(found.unknown, ["step 0, stage 0: there is no log of peer 1"]);
        assert!(!found.is_proof());

        let Event::Counted { epoch, step, .. } = coordinator[0].event else { panic!() };
        let stages = vec![vec![(0, vec![0])]];
        let half = [Line { event: Event::Counted { epoch, step, stages }, ..coordinator[0].clone() }];
        assert!(audit(&train, &journal, &half, &peers).wrong[0].contains("the lots [0] were counted"));
    }

    #[test]
    fn what_was_inherited_is_proved_by_the_log_of_whoever_left_it() {
        let (train, journal, coordinator, mut peers) = logs();
        let at = |clock, event| Line { clock, event, ..coordinator[0].clone() };
        let (stage, epoch, step) = (0, 1, 0);
        let left = |clock, lots| at(clock, Event::Deposited { stage, epoch, step, lots });
        let heir = |clock, from, lots| at(clock, Event::Inherited { stage, epoch, step, from, lots });
        // Peer 0 leaves its lot with peer 1 and is gone; peer 1 gives both.
        peers[0][2] = left(3, vec![0]);
        peers[1].insert(2, heir(5, 0, vec![0]));
        peers[1][3] = at(6, Event::Gave { stage, epoch, step, lots: vec![0, 1] });
        let counted = [at(9, Event::Counted { epoch, step, stages: vec![vec![(1, vec![0, 1])]] })];
        let audited = |peers: &[Vec<Line>]| audit(&train, &journal, &counted, peers);
        let found = audited(&peers);
        assert!(found.is_proof() && found.counted == 2, "{found:?}");

        let wrong = |peers: &[Vec<Line>]| audited(peers).wrong.join("\n");
        let mut twice = peers.clone();
        twice[0].insert(2, peers[0][1].clone());
        assert!(wrong(&twice).contains("inherited from peer 0: microbatch 0 is in lot 0 2 times"));
        // The copy that was inherited is the last one before, whatever an earlier one held.
        let mut later = twice.clone();
        later[0].insert(2, left(2, vec![0]));
        assert!(wrong(&later).contains("microbatch 0 is in lot 0 2 times"));
        let mut both = peers.clone();
        both[1].insert(2, peers[0][1].clone());
        assert!(wrong(&both).contains("lot 0 was computed, and inherited 1 times besides"));

        // A log that ends too early proves nothing; one that goes on and does not say it is wrong.
        let mut other = peers.clone();
        other[0].pop();
        assert!(audited(&other).unknown[0].contains("whose log ends before that"));
        other[0].push(at(7, Event::Voided));
        assert!(wrong(&other).contains("which had not left just those"));

        // Two that have it from each other, and nobody who computed it.
        let mut circle = peers.clone();
        circle[0].splice(1.., [heir(4, 1, vec![0]), left(4, vec![0])]);
        circle[1].insert(2, left(3, vec![0]));
        assert!(!audited(&circle).is_proof());

        // What was dropped of it is not wanted; the rest still counts.
        let (mut partly, mut half) = (peers.clone(), counted.clone());
        partly[0].insert(
            2,
            Line {
                event: Event::Folded {
                    stage,
                    epoch,
                    step,
                    lot: 1,
                    microbatch: 1,
                    first_sample: 2,
                    samples: 2,
                },
                ..peers[0][1].clone()
            },
        );
        partly[0][3] = left(3, vec![0, 1]);
        partly[1] = vec![
            peers[1][0].clone(),
            heir(5, 0, vec![0, 1]),
            at(5, Event::Dropped { step, lots: vec![1] }),
            peers[1][1].clone(),
            peers[1][3].clone(),
        ];
        half[0] = counted[0].clone();
        let found = audit(&train, &journal, &half, &partly);
        assert!(found.is_proof(), "{found:?}");
    }

    #[test]
    fn what_was_done_again_counts_once_and_the_history_is_in_the_order_of_causes() {
        let (train, mut journal, coordinator, peers) = logs();
        let commit = journal[0].clone();
        journal.push(commit.clone());
        let found = audit(&train, &journal, &coordinator, &peers);
        assert_eq!(found.wrong, ["step 0 was closed when step 1 was open"]);
        journal.insert(1, Record::Rollback(Epoch(2), Step(0)));
        assert!(audit(&train, &journal, &coordinator, &peers).is_proof());

        let merged = merge([("b", &peers[1][..]), ("coordinator", &coordinator[..]), ("a", &peers[0][..])]);
        let order: Vec<(&str, u64)> = merged.iter().map(|(name, line)| (*name, line.clock)).collect();
        let expected = [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3), ("coordinator", 9)];
        assert_eq!(order, expected);
    }
}
