//! Why the run waits, in plain words. There is always an answer.

use crate::coordinator::members::Phase;
use crate::coordinator::{Closing, Coordinator};
use crate::ids::*;
use crate::time::Span;

impl Coordinator {
    /// What the open step waits for.
    pub fn why_waiting(&self) -> String {
        if let Some(why) = &self.halted {
            return format!("stopped, the operator is needed: {why}");
        }
        if self.closing == Closing::Journaling {
            return "the journal's disk: a record that must be safe before anything else happens".into();
        }
        if self.is_done() {
            let unsaved = self.asked_to_save.values().map(|(peer, _)| peer.to_string());
            let unsaved: Vec<String> = unsaved.collect();
            return match (self.is_finished(), &unsaved[..]) {
                (true, _) => "nothing: all steps are done".into(),
                (false, []) => "the last version to be saved: nobody holds it yet who could".into(),
                (false, _) => format!("the last version to be saved by {}", unsaved.join(", ")),
            };
        }
        if self.collecting.is_some() {
            return format!("after a restart: {} of the members have not reported yet", self.unheard.len());
        }
        if let Some(stage) = self.stage_without_holder() {
            return self.why_nobody_holds(stage);
        }
        if self.drivers.is_empty() {
            return "no driver has joined: nobody feeds the pipeline".into();
        }
        if self.closing == Closing::Sharing {
            let awaited: Vec<String> = self.sharing.awaited.iter().map(PeerId::to_string).collect();
            return format!("{} to add up the parameters that stages share", awaited.join(", "));
        }
        if self.closing == Closing::Concluding {
            return format!("the constants of the commit of {}", self.book.step);
        }
        self.why_stages_wait()
    }

    fn stage_without_holder(&self) -> Option<StageId> {
        let held = |stage: StageId| {
            self.members.values().any(|member| member.is_active() && member.stage == Some(stage))
        };
        (0..self.spec.stages).map(StageId).find(|&stage| !held(stage))
    }

    fn why_nobody_holds(&self, stage: StageId) -> String {
        let loading: Vec<String> = self
            .members
            .iter()
            .filter(|(_, m)| m.stage == Some(stage) && matches!(m.phase, Phase::Loading(_)))
            .map(|(peer, _)| peer.to_string())
            .collect();
        let (members, needs) = (self.members.len(), self.peers_to_start());
        if !loading.is_empty() {
            return format!("{} to load the state of {stage}", loading.join(", "));
        }
        if members < needs {
            return format!("peers: {members} are here, {needs} are needed to start; {stage} has no holder");
        }
        format!("{stage} has no holder; a place for it is being made")
    }

    fn why_stages_wait(&self) -> String {
        let mut reasons: Vec<String> = self.why_in_doubt().into_iter().collect();
        for stage in (0..self.spec.stages).map(StageId) {
            let life = &self.lives[stage.0 as usize];
            let open = self.steps[0].ledger.open_lots(stage);
            if open > 0 {
                reasons.push(format!("{stage}: {open} of {} lots are not sealed", self.spec.lots.lots));
            } else if let Some(reducing) = &life.reducing {
                // Who is gone is not waited for.
                let waits = |peer: &PeerId| {
                    let there = self.members.get(peer).is_some_and(|member| member.stage == Some(stage));
                    there && !reducing.prepared.contains_key(peer)
                };
                let missing: Vec<String> =
                    reducing.plan.members().filter(waits).map(|peer| peer.to_string()).collect();
                if !missing.is_empty() {
                    let missing = missing.join(", ");
                    reasons
                        .push(format!("{stage}: the sum is not yet whole at {missing} ({})", life.attempt));
                }
            } else if self.waits_for_joiner(stage) {
                let since = life.sealed_at.map_or(Span(0), |at| self.now.since(at));
                reasons.push(format!("{stage}: a joiner that is nearly ready, for {since} so far"));
            }
        }
        match reasons.is_empty() {
            true if self.is_safe() => "the operator: the run is paused, and safe".into(),
            true if self.book.paused => "the operator: the run is paused".into(),
            true => "nothing: the step is about to close".into(),
            false if self.book.paused => format!("paused, and to close the step: {}", reasons.join("; ")),
            false => reasons.join("; "),
        }
    }
}
