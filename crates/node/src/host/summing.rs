//! What a host adds up: the sums of lots, in the fixed tree, and what stages share, in their order.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use starling_model::lots::{self, Node};
use starling_model::reduce::{add_bytes, sum_of_uses};
use starling_model::stage::{Loss, Shared};
use starling_swarm::ids::*;
use starling_swarm::lots::TreeNode;
use starling_swarm::worker::Input;
use starling_swarm::worker::io::ReduceNo;
use starling_swarm::worker::reduction::Due;

use super::{Done, Host, HostError};
use crate::events::Event;
use crate::sabotage::{FROM_STEP, Sabotage};
use crate::tensor::{Sum, Tensor};

impl Host {
    /// Says once for all parts of a gradient which lots it gave.
    pub(super) fn note_given(&mut self, step: Step, nodes: &[TreeNode], done: &mut Vec<Done>) {
        let mut lots: Vec<u32> = nodes.iter().flat_map(|&node| self.lots.lots_under(node)).collect();
        if let (true, Some(stage)) = (nodes.contains(&TreeNode::ALL), &self.stage) {
            lots = stage.merged(step.0);
        }
        lots.sort_unstable();
        let given = Some((step, lots));
        if let (true, Some(of), Some((_, lots))) = (given != self.given, self.holding, &given) {
            let (stage, epoch, step, lots) = (of.stage.0, of.epoch.0, step.0, lots.clone());
            done.push(Done::Note(Event::Gave { stage, epoch, step, lots }));
        }
        self.given = given;
    }

    /// The sums of a piece at some nodes, of what we hold.
    pub(super) fn read(
        &mut self,
        step: Step,
        nodes: &[TreeNode],
        piece: Range<usize>,
    ) -> Result<Vec<Sum>, HostError> {
        let mut sums = Vec::new();
        for &node in nodes {
            let stage = self.held()?;
            let mut bytes = match node {
                TreeNode::ALL => stage.read_merged(step.0, piece.clone())?,
                TreeNode { level, index } => stage.read_sum(step.0, Node { level, index }, piece.clone())?,
            };
            match self.sabotage.filter(|_| step.0 >= FROM_STEP) {
                Some(Sabotage::Double) => {
                    let once = bytes.clone();
                    add_bytes(self.held()?.dtype(), &mut bytes, &once);
                }
                Some(Sabotage::Drop) => bytes.fill(0),
                _ => {}
            }
            sums.push(Sum { bytes: bytes.into(), loss: self.loss_under(step, node) });
        }
        Ok(sums)
    }

    /// The loss of the lots under a node that are in their sums.
    fn loss_under(&self, step: Step, node: TreeNode) -> Loss {
        let mut sum = Loss::default();
        for lot in self.lots.lots_under(node) {
            for microbatch in self.lots.microbatches_of(Lot(lot)) {
                sum += self.losses.get(&(step, microbatch)).copied().unwrap_or_default();
            }
        }
        sum
    }

    /// Adds up a part in the fixed tree over lots, or, if all of it is one sum each, in the order of holders.
    pub(super) fn sum(&mut self, number: ReduceNo, due: Due, done: &mut Vec<Done>) -> Result<(), HostError> {
        let Due { part, start, end, own, come, into } = due;
        let mine = self.read(number.step, &own, start as usize..end as usize)?;
        self.note_given(number.step, &own, done);
        let mut all: Vec<(TreeNode, Sum)> = own.into_iter().zip(mine).collect();
        for (nodes, payload) in come {
            // A part is added up once, and what it is made of is not needed any more.
            let tensor = self.tensors.take(payload).ok_or(HostError::Gone)?;
            let Tensor::Sums(sums) = Arc::unwrap_or_clone(tensor) else { return Err(HostError::Kind) };
            if sums.len() != nodes.len() {
                return Err(HostError::Kind);
            }
            all.extend(nodes.into_iter().zip(sums));
        }
        let dtype = self.held()?.dtype();
        let add = |left: &mut Sum, right: &Sum| left.add(dtype, right);
        let length = (end - start) as usize * dtype.size();
        if all.iter().any(|(_, sum)| sum.bytes.len() != length) {
            return Err(HostError::Kind);
        }
        let sums = match into[..] {
            [TreeNode::ALL] => {
                let mut sums = all.into_iter().map(|(_, sum)| sum);
                let mut total = sums.next().ok_or(HostError::Gone)?;
                sums.for_each(|sum| add(&mut total, &sum));
                vec![total]
            }
            _ => {
                let mut tree = lots::Tree::new(self.lots.lots);
                for (TreeNode { level, index }, sum) in all {
                    tree.enter(Node { level, index }, sum, add).map_err(|_| HostError::Kind)?;
                }
                let at = |&TreeNode { level, index }: &TreeNode| tree.sum(Node { level, index }).cloned();
                into.iter().map(at).collect::<Option<Vec<Sum>>>().ok_or(HostError::Gone)?
            }
        };
        let payload = self.tensors.store(number.step, Arc::new(Tensor::Sums(sums)));
        done.push(Done::Tell(Input::Summed(number, part, payload)));
        Ok(())
    }

    /// What we have of the gradients of parameters that other stages use too.
    pub(super) fn uses(&mut self) -> Result<Vec<(String, Bytes)>, HostError> {
        let reducing = self.reducing;
        let stage = self.held()?;
        let shared = stage.shared().into_iter().filter(|one| one.elsewhere);
        shared.map(|Shared { name, .. }| Ok((name.clone(), stage.uses(reducing, &name)?.into()))).collect()
    }

    /// Adds them up over stages, in their order; the hash of the whole gradient, and Σ g² of those that we count.
    pub(super) fn settle(
        &mut self,
        own: StageId,
        come: Vec<(StageId, Payload)>,
    ) -> Result<(Digest, BTreeMap<String, f64>), HostError> {
        let mut by_stage = BTreeMap::from([(own, Arc::new(Tensor::Uses(self.uses()?)))]);
        for (stage, payload) in come {
            by_stage.insert(stage, self.tensors.get(payload).ok_or(HostError::Gone)?);
        }
        let (reducing, gradient_hash) = (self.reducing, self.gradient_hash);
        let stage = self.held()?;
        let (dtype, mut hasher, mut squares) = (stage.dtype(), blake3::Hasher::new(), BTreeMap::new());
        // The update is made of both: this hash stands in the commit.
        hasher.update(&gradient_hash);
        for shared in stage.shared().into_iter().filter(|one| one.elsewhere) {
            let Shared { name, elements, uses: all, .. } = shared;
            let mut uses: Vec<&[u8]> = Vec::new();
            for tensor in by_stage.values() {
                let Tensor::Uses(of_stage) = &**tensor else { return Err(HostError::Kind) };
                uses.extend(of_stage.iter().filter(|(of, _)| *of == name).map(|(_, bytes)| &bytes[..]));
            }
            let length = elements * dtype.size();
            // Each use of the whole model once.
            if uses.iter().any(|bytes| bytes.len() % length != 0)
                || uses.iter().map(|bytes| bytes.len() / length).sum::<usize>() != all
            {
                return Err(HostError::Kind);
            }
            let total = sum_of_uses(dtype, elements, &uses);
            hasher.update(&total);
            let square = stage.settle(reducing, &name, &total)?;
            squares.extend(square.map(|square| (name, square)));
        }
        Ok((*hasher.finalize().as_bytes(), squares))
    }
}
