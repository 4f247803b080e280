//! Peers that hold a stage are moved to another when it pays, and only right after a commit, when they lose least.

use std::collections::BTreeMap;

use crate::coordinator::{Command, Coordinator};
use crate::ids::PeerId;
use crate::message::Source;
use crate::rebalance::{Decision, Placed, Policy, Terms, decide, swarm_rule};
use crate::time::Span;

/// Moves after one step, at the most: after the next, more is known.
const MOVES: usize = 4;

impl Coordinator {
    /// Called when a step was closed.
    pub(super) fn rebalance(&mut self, out: &mut Vec<Command>) {
        if self.is_done() {
            return;
        }
        let costs = self.spec.all_costs();
        match self.spec.tuning.rebalance {
            Policy::Never => {}
            Policy::Every(interval) if self.now.since(self.last_move) < interval => {}
            Policy::Every(_) => {
                self.last_move = self.now;
                let serving: Vec<Placed> =
                    self.placed().into_iter().filter(|placed| placed.settled).collect();
                self.move_peer(swarm_rule(&serving, &costs), out);
            }
            Policy::WhenItPays(most) => {
                let terms = Terms { transfer: self.transfer_time(), horizon: self.joiner_due().min(most) };
                for _ in 0..MOVES {
                    let decision = decide(&self.placed(), &costs, terms);
                    if !self.move_peer(decision, out) {
                        break;
                    }
                }
            }
        }
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
        let size = self.spec.lots.largest();
        let mut holds: BTreeMap<PeerId, u32> = BTreeMap::new();
        for holder in self.steps.iter().flat_map(|open| open.ledger.all_holders()) {
            *holds.entry(holder).or_default() += size;
        }
        // Who saves the version that was just made is left alone.
        let savers = self.last_commit().map_or(&[][..], |commit| &commit.savers);
        let staying = self.members.iter().filter(|(_, member)| !member.draining);
        let placed = staying.filter_map(|(&peer, member)| {
            let (speed, settled) = (member.capability.speed, member.is_whole() && !savers.contains(&peer));
            let holds = holds.get(&peer).copied().unwrap_or(0).into();
            Some(Placed { peer, stage: member.stage?, speed, settled, holds })
        });
        placed.collect()
    }

    /// How long a stage's state takes over the slowest uplink: the worst donor.
    fn transfer_time(&self) -> Span {
        let rates = self.members.values().map(|member| member.capability.link_bytes_per_s);
        let slowest = rates.fold(f64::INFINITY, f64::min);
        Span::from_s_f64(self.spec.state_bytes as f64 / slowest)
    }

    /// When the next joiner may be expected, as they came so far. It will go where a peer is missing most, and no
    /// move is worth more than what it brings until then. Joiners come in bursts, so one that is late is not taken
    /// for one that never comes until it is late by much.
    fn joiner_due(&self) -> Span {
        let silence = self.now.since(self.last_join);
        self.joins.mean().map_or(Span(u64::MAX), |mean| mean.max(Span(silence.0 / 4)))
    }

    /// A joiner got its place.
    pub(super) fn note_join(&mut self) {
        self.joins.observe(self.now.since(self.last_join));
        self.last_join = self.now;
    }
}
