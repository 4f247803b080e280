//! Copies of sums that a worker leaves with another of its stage, and what becomes of them when it is gone.

use std::sync::Arc;

use starling_model::lots::{self, Node};
use starling_swarm::ids::*;
use starling_swarm::lots::TreeNode;
use starling_swarm::worker::io::{Deposit, Inherited};
use starling_transport::endpoint::Limits;

use super::{Done, Host, HostError};
use crate::events::Event;
use crate::tensor::Tensor;

impl Host {
    /// Reads our sums of some lots as they are now, for our keeper.
    pub(super) fn deposit(&mut self, deposit: Deposit, done: &mut Vec<Done>) -> Result<(), HostError> {
        let (step, of) = (deposit.fence.step, self.holding.ok_or(HostError::Gone)?);
        let lots: Vec<u32> = deposit.lots.iter().map(|lot| lot.0).collect();
        let stage = self.held()?;
        let elements = stage.gradient_len();
        let bytes = elements as u64 * stage.dtype().size() as u64 * deposit.nodes.len() as u64;
        // A letter carries no more.
        if bytes > Limits::default().body_bytes
            || (deposit.nodes == [TreeNode::ALL] && stage.merged(step.0) != lots)
        {
            return Err(HostError::Gone);
        }
        let sums = self.read(step, &deposit.nodes, 0..elements)?;
        let microbatches = deposit.lots.iter().flat_map(|&lot| self.lots.microbatches_of(lot));
        let loss = |microbatch| Some((microbatch, *self.losses.get(&(step, microbatch))?));
        let losses = microbatches.filter_map(loss).collect();
        let copy = Tensor::Copy(sums.into_iter().map(|sum| sum.bytes).collect(), losses);
        let (stage, epoch, step) = (of.stage.0, of.epoch.0, step.0);
        done.push(Done::Note(Event::Deposited { stage, epoch, step, lots }));
        let message = deposit.message(Payload { handle: 0, bytes });
        done.push(Done::Send(message, Some(Arc::new(copy))));
        Ok(())
    }

    /// What another left here is ours. The machine has dropped what was here of these lots, so nothing is refused but what
    /// makes no sense, and that is found out before anything is entered.
    pub(super) fn inherit(&mut self, inherited: Inherited, done: &mut Vec<Done>) -> Result<(), HostError> {
        let Inherited { step, of, lots, nodes, payload, .. } = inherited;
        let here = self.holding.ok_or(HostError::Gone)?;
        let tensor = self.tensors.take(payload).ok_or(HostError::Gone)?;
        let Tensor::Copy(sums, losses) = &*tensor else { return Err(HostError::Kind) };
        let all: Vec<u32> = lots.iter().map(|lot| lot.0).collect();
        let microbatches =
            |microbatch: u32| lots.iter().any(|&lot| self.lots.contains(lot, Microbatch(microbatch)));
        let length = self.stage.as_ref().map_or(0, |stage| stage.gradient_len() * stage.dtype().size());
        if sums.len() != nodes.len()
            || sums.iter().any(|sum| sum.len() != length)
            || !losses.iter().all(|(microbatch, loss)| microbatches(*microbatch) && loss.sum.is_finite())
        {
            return Err(HostError::Kind);
        }
        let cut = lots::Lots { microbatches: self.lots.microbatches, lots: self.lots.lots };
        let stage = self.stage.as_mut().ok_or(HostError::Gone)?;
        for (&node, sum) in nodes.iter().zip(sums) {
            match node {
                TreeNode::ALL => stage.enter(step.0, cut, (None, &all), sum)?,
                TreeNode { level, index } => {
                    let node = Node { level, index };
                    let under: Vec<u32> = node.lots(cut.lots).collect();
                    stage.enter(step.0, cut, (Some(node), &under), sum)?;
                }
            }
        }
        self.losses.extend(losses.iter().map(|&(microbatch, loss)| ((step, microbatch), loss)));
        let (stage, epoch, step) = (here.stage.0, here.epoch.0, step.0);
        done.push(Done::Note(Event::Inherited { stage, epoch, step, from: of.0, lots: all }));
        Ok(())
    }
}
