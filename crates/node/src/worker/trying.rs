//! A worker's part in trying held-out text.

use std::sync::Arc;

use bytes::Bytes;

use super::Worker;
use crate::host::{Inferred, Task};
use crate::post::Post;
use crate::tensor::{Tensor, TensorHead};
use crate::trial::Trial;

/// Microbatches of held-out text that wait to be computed, at the most: an honest coordinator sends a few to each worker.
const MOST_TRIALS: usize = 64;

impl Worker {
    /// Held-out text came.
    pub(super) fn on_infer(&mut self, trial: Trial, stage: u16, head: TensorHead, body: &Bytes) {
        let is_ours = trial.route.get(usize::from(stage)) == Some(&self.member.number());
        let has_room = self.trials < MOST_TRIALS;
        match Tensor::decode(head, body) {
            Ok(Tensor::Activation(input, meta))
                if is_ours && has_room && meta.shape.rows <= self.most_rows =>
            {
                self.trials += 1;
                let tensor = Arc::new(Tensor::Activation(input, meta));
                self.compute.carry_out(Task::Infer(trial, stage, tensor), self.member.clock());
            }
            _ => self.member.tell_coordinator(Post::NotTried(trial), Vec::new()),
        }
    }

    /// It was computed here.
    pub(super) fn on_inferred(&mut self, trial: Trial, stage: u16, inferred: Inferred) {
        self.trials = self.trials.saturating_sub(1);
        let next = trial.route.get(usize::from(stage) + 1).copied();
        match (inferred, next) {
            (Inferred::Onward(tensor), Some(next)) => {
                let (head, body) = tensor.encode();
                self.member.tell_member(next, Post::Infer(trial, stage + 1, head), body);
            }
            (Inferred::Loss(loss), None) => {
                self.member.tell_coordinator(Post::Tried(trial, loss), Vec::new())
            }
            _ => self.member.tell_coordinator(Post::NotTried(trial), Vec::new()),
        }
    }
}
