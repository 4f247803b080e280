//! Peers that hold a stage are moved to another when it pays: one at a time, and only between two steps, when
//! nobody holds a lot.

use crate::coordinator::members::Phase;
use crate::coordinator::{Command, Coordinator};
use crate::message::Source;
use crate::rebalance::{Decision, Placed, Policy, Terms, decide, swarm_rule};
use crate::time::Span;

/// The least gain for which a peer is moved, as a share of the pipeline's speed.
const HYSTERESIS: f64 = 0.02;

impl Coordinator {
    /// Called when a step was closed.
    pub(super) fn rebalance(&mut self, out: &mut Vec<Command>) {
        let joining = self.members.values().any(|member| matches!(member.phase, Phase::Loading(_)));
        if joining || self.is_done() {
            return; // One change at a time: a joiner may already be the answer.
        }
        let placed = self.placed();
        let costs = vec![1.0; self.spec.stages as usize];
        let decision = match self.spec.tuning.rebalance {
            Policy::Never => return,
            Policy::Every(interval) if self.now.since(self.last_move) < interval => return,
            Policy::Every(_) => {
                self.last_move = self.now;
                swarm_rule(&placed, &costs)
            }
            Policy::WhenItPays(horizon) => {
                let terms = Terms { transfer: self.transfer_time(), horizon, hysteresis: HYSTERESIS };
                decide(&placed, &costs, terms)
            }
        };
        if let Decision::Move { peer, to, reason } = decision
            && let Some(donor) = self.donor(to, peer)
        {
            out.push(Command::Tell(format!("{peer} moves to {to}: {reason}")));
            if let Some(from) = self.members.get_mut(&peer).and_then(|member| member.stage.take()) {
                self.forget_holder(peer, from, out);
            }
            self.assign(peer, to, Source::Donor(donor), out);
        }
    }

    fn placed(&self) -> Vec<Placed> {
        let mut placed = Vec::new();
        for (&peer, member) in self.members.iter().filter(|(_, m)| m.is_whole() && !m.draining) {
            if let Some(stage) = member.stage {
                placed.push(Placed { peer, stage, speed: member.capability.speed });
            }
        }
        placed
    }

    /// How long a stage's state takes over the slowest uplink: the worst donor.
    fn transfer_time(&self) -> Span {
        let rates = self.members.values().map(|member| member.capability.link_bytes_per_s);
        let slowest = rates.fold(f64::INFINITY, f64::min);
        Span::from_s_f64(self.spec.state_bytes as f64 / slowest)
    }
}
