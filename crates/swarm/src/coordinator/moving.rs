//! Peers that hold a stage are moved to another when it pays: after a commit, when they lose least, or when somebody has
//! gone from a stage and the others would wait for it.

use crate::coordinator::leasing::OpenStep;
use crate::coordinator::{Command, Coordinator};
use crate::ids::StageId;
use crate::message::Source;
use crate::rebalance::{Decision, Placed, Policy, Task, Terms, decide, swarm_rule};
use crate::time::{Span, Time};

/// Moves at a time, at the most: after the next commit or death, more is known.
const MOVES: usize = 4;
/// Gaps between joiners that are remembered, about.
const MOST_GAPS: u32 = 32;

/// How joiners came so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Joiners {
    /// When the last one came.
    last: Option<Time>,
    gaps: u32,
    /// How long it was from one to the next, and the square of that, averaged.
    mean_s: f64,
    square_s2: f64,
}

impl Joiners {
    fn observe(&mut self, now: Time) {
        let Some(last) = self.last.replace(now) else { return };
        let gap_s = now.since(last).as_s_f64();
        self.gaps = (self.gaps + 1).min(MOST_GAPS);
        let weight = 1.0 / f64::from(self.gaps);
        self.mean_s += weight * (gap_s - self.mean_s);
        self.square_s2 += weight * (gap_s * gap_s - self.square_s2);
    }

    /// How long it is from one to the next.
    fn every(&self) -> Span {
        if self.gaps == 0 { Span(u64::MAX) } else { Span::from_s_f64(self.mean_s) }
    }

    /// When the next one is due. Joiners come in bursts, so that is longer than half a gap: who looks at any moment
    /// looks most likely into a long gap. One that is late is not taken for one that never comes until it is late by much.
    fn due(&self, now: Time) -> Span {
        let Some(last) = self.last.filter(|_| self.gaps > 0) else { return Span(u64::MAX) };
        let residual = Span::from_s_f64(self.square_s2 / (2.0 * self.mean_s.max(1e-6)));
        residual.max(Span(now.since(last).0 / 4))
    }
}

impl Coordinator {
    /// Called when a step was closed, and when somebody has gone from a stage; whether somebody was moved.
    pub(super) fn rebalance(&mut self, out: &mut Vec<Command>) -> bool {
        self.uneven = false;
        if self.is_done() {
            return false;
        }
        let costs = self.spec.all_costs();
        match self.spec.tuning.rebalance {
            Policy::Never => false,
            Policy::Every(interval) if self.now.since(self.last_move) < interval => false,
            Policy::Every(_) => {
                self.last_move = self.now;
                let serving: Vec<Placed> =
                    self.placed().into_iter().filter(|placed| placed.settled).collect();
                self.move_peer(swarm_rule(&serving, &costs), out)
            }
            Policy::WhenItPays(most) => self.move_while_it_pays(&costs, most, out),
        }
    }

    fn move_while_it_pays(&mut self, costs: &[f64], most: Span, out: &mut Vec<Command>) -> bool {
        let (joiner, every) = (self.joiners.due(self.now), self.joiners.every());
        let terms = Terms { transfer: self.transfer_time(), joiner, every, most };
        for moves in 0..MOVES {
            // After a move somebody else may hold what the mover had left.
            let (mut placed, left) = (self.placed(), self.left());
            for of in &mut placed {
                // A reduction would be void.
                of.settled &= self.lives[of.stage.0 as usize].reducing.is_none();
            }
            let decision = decide(&placed, Task { costs, left: &left }, terms);
            if !self.move_peer(decision, out) {
                return moves > 0;
            }
        }
        true
    }

    /// Somebody has gone from a stage: if the others would wait for it, it is filled up before the step is over.
    pub(super) fn rebalance_if_uneven(&mut self, out: &mut Vec<Command>) {
        let moves = matches!(self.spec.tuning.rebalance, Policy::WhenItPays(_));
        if self.uneven && moves && self.is_staffed && self.rebalance(out) {
            self.new_view(out);
        }
    }

    /// Microbatches of the step that closes next that are not done, by stage.
    fn left(&self) -> Vec<f64> {
        let size = f64::from(self.spec.lots.largest());
        let open = |stage| f64::from(self.steps[0].ledger.open_lots(StageId(stage))) * size;
        (0..self.spec.stages).map(open).collect()
    }

    pub(super) fn move_peer(&mut self, decision: Decision, out: &mut Vec<Command>) -> bool {
        let Decision::Move { peer, to, reason } = decision else { return false };
        let Some(donor) = self.donor(to, peer) else { return false };
        out.push(Command::Tell(format!("{peer} moves to {to}: {reason}")));
        if let Some(from) = self.members.get_mut(&peer).and_then(|member| member.stage.take()) {
            self.forget_holder(peer, from, out);
        }
        self.assign(peer, to, Source::Donor(donor), out);
        true
    }

    pub(super) fn placed(&self) -> Vec<Placed> {
        let size = f64::from(self.spec.lots.largest());
        let at_risk = |step: &OpenStep, peer, stage| size * f64::from(self.at_risk(peer, stage, step));
        // Who saves the version that was just made is left alone.
        let savers = self.last_commit().map_or(&[][..], |commit| &commit.savers);
        let staying = self.members.iter().filter(|(_, member)| !member.draining);
        let placed = staying.filter_map(|(&peer, member)| {
            let (stage, speed) = (member.stage?, member.capability.speed);
            let closes = member.is_active() && member.since() <= self.book.step;
            // Who came in the middle of the step is no substitute for who has the weights that it is computed with.
            let settled = member.is_whole() && closes && !savers.contains(&peer);
            let holds = self.steps.iter().map(|step| at_risk(step, peer, stage)).sum();
            let closing = self.steps.front().map_or(0.0, |step| at_risk(step, peer, stage));
            Some(Placed { peer, stage, speed, settled, holds, closing, closes })
        });
        placed.collect()
    }

    /// How long a stage's state takes over the slowest uplink: the worst donor.
    fn transfer_time(&self) -> Span {
        let rates = self.members.values().map(|member| member.capability.link_bytes_per_s);
        let slowest = rates.fold(f64::INFINITY, f64::min);
        Span::from_s_f64(self.spec.state_bytes as f64 / slowest)
    }

    /// A joiner got its place.
    pub(super) fn note_join(&mut self) {
        self.joiners.observe(self.now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_a_joiner_waits_most_likely_in_a_long_gap() {
        let mut joiners = Joiners::default();
        assert_eq!(joiners.due(Time(0)), Span(u64::MAX));
        let mut now = Time(0);
        for burst in 0..10 {
            // However long the first ones were awaited.
            now = Time(0) + Span::s(4000 + 40 * burst);
            (0..4).for_each(|_| joiners.observe(now));
        }
        // Four at a time, every forty seconds: one in ten on average, but the next ones are due in twenty.
        let (every, due) = (joiners.every().as_s_f64(), joiners.due(now).as_s_f64());
        assert!((8.0..12.0).contains(&every), "{every}");
        assert!((19.0..21.0).contains(&due), "{due}");
        assert_eq!(joiners.due(now + Span::s(4000)), Span::s(1000), "it may be that nobody comes any more");
    }
}
