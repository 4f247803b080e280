//! Reducing a step's gradients over the holders of a stage: the fixed tree over lots, in plain bytes.
//!
//! This is what a distributed reduction computes for each piece of the vector, and what the one-process loop
//! computes for the whole.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::engine::Dtype;
use crate::lots::Tree;
use crate::stage::{Stage, StageError};

/// Sums one piece of the gradient over all lots, whoever of `holders` holds them.
/// `None` if the holders do not hold every lot, or one twice.
pub fn reduce_piece(
    holders: &[&dyn Stage],
    lots: u32,
    piece: Range<usize>,
) -> Result<Option<Vec<u8>>, StageError> {
    let mut tree = Tree::new(lots);
    for holder in holders {
        let dtype = holder.dtype();
        for node in holder.held() {
            let sum = holder.read_sum(node, piece.clone())?;
            if tree.enter(node, sum, |left, right| add_bytes(dtype, left, right)).is_err() {
                return Ok(None);
            }
        }
    }
    Ok(tree.into_total())
}

/// Adds up every parameter that several stages, or several units of one, use: in the order of stages.
/// `replicas` are one or more copies of each stage; the first of each contributes, all settle.
pub fn settle_shared(stages: &mut [Vec<&mut dyn Stage>]) -> Result<(), StageError> {
    let mut totals: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for stage in stages.iter().filter_map(|replicas| replicas.first()) {
        for name in stage.shared() {
            let total = stage.contribute(&name, totals.get(&name).map(Vec::as_slice))?;
            totals.insert(name, total);
        }
    }
    for stage in stages.iter_mut().flatten() {
        for name in stage.shared() {
            stage.settle(&name, &totals[&name])?;
        }
    }
    Ok(())
}

/// `left += right`, element by element.
fn add_bytes(dtype: Dtype, left: &mut [u8], right: &[u8]) {
    macro_rules! add {
        ($type:ident) => {
            for (a, b) in left.as_chunks_mut().0.iter_mut().zip(right.as_chunks().0) {
                *a = ($type::from_le_bytes(*a) + $type::from_le_bytes(*b)).to_le_bytes();
            }
        };
    }
    match dtype {
        Dtype::F32 => add!(f32),
        Dtype::F64 => add!(f64),
    }
}
