//! How the run stands, for whoever watches it.

use std::time::Instant;

use crate::coordinator::{Coordinator, LOOK};
use crate::status::{PeerStatus, StageStatus, Status};

impl Coordinator {
    /// Looks again, and shows it.
    pub(super) fn look(&mut self) {
        self.next_look = Instant::now() + LOOK;
        let (book, overview) = (self.machine.journal(), self.machine.overview());
        let mut stages: Vec<StageStatus> = overview
            .open_lots
            .iter()
            .map(|&open_lots| StageStatus { open_lots, ..StageStatus::default() })
            .collect();
        let mut idle = Vec::new();
        for worker in &overview.workers {
            let (key, site) = match self.registry.by_number(worker.peer.0) {
                Some((key, guest)) => (key.short(), guest.site),
                None => Default::default(),
            };
            let status = PeerStatus {
                number: worker.peer.0,
                key,
                site,
                queued: worker.queued,
                active: worker.active,
                leaving: worker.leaving,
            };
            match worker.stage.and_then(|stage| stages.get_mut(stage.0 as usize)) {
                Some(stage) => stage.peers.push(status),
                None => idle.push(status),
            }
        }
        let tokens: u64 = self.recent.iter().skip(1).map(|(_, tokens)| tokens).sum();
        let span = match (self.recent.front(), self.recent.back()) {
            (Some((first, _)), Some((last, _))) => last.duration_since(*first).as_secs_f64(),
            _ => 0.0,
        };
        self.status.send_replace(Status {
            name: self.charter.run.name.clone(),
            step: book.step.0,
            steps: book.last_step.unwrap_or(self.charter.spec.steps).0,
            rollbacks: book.epoch.0.saturating_sub(1),
            checkpoint: book.checkpoint.0,
            loss: self.last_loss,
            tokens_per_s: if span > 0.0 { tokens as f64 / span } else { 0.0 },
            steps_per_s: if span > 0.0 { (self.recent.len() - 1) as f64 / span } else { 0.0 },
            waits_for: match self.trying.progress() {
                Some(progress) => format!("{progress}; {}", self.machine.why_waiting()),
                None => self.machine.why_waiting(),
            },
            held_out: self.trying.loss,
            paused: book.paused,
            finished: self.machine.is_finished(),
            stages,
            idle,
            drivers: overview.drivers.len() as u32,
            news: self.news.iter().cloned().collect(),
        });
    }
}
