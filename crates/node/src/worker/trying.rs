//! A worker's part in trying held-out text.

use std::sync::Arc;

use bytes::Bytes;

use super::Worker;
use crate::host::{Inferred, Task};
use crate::post::Post;
use crate::tensor::{Tensor, TensorHead};
use crate::trial::Trial;

impl Worker {
    /// Held-out text came.
    pub(super) fn on_infer(&mut self, trial: Trial, stage: u16, head: TensorHead, body: &Bytes) {
        if let Ok(tensor) = Tensor::decode(head, body) {
            self.compute.carry_out(Task::Infer(trial, stage, Arc::new(tensor)), self.member.clock());
        }
    }

    /// It was computed here.
    pub(super) fn on_inferred(&mut self, trial: Trial, stage: u16, inferred: Inferred) {
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
