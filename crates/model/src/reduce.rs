//! Reducing a step's gradients over the holders of a stage: the fixed tree over lots, in plain bytes.
//!
//! This is what a distributed reduction computes for each piece of the vector, and what the one-process loop
//! computes for the whole.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::engine::Dtype;
use crate::lots::{Node, Tree};
use crate::stage::{Reduction, Shared, Stage, StageError};

/// Sums one piece of a step's gradient over all lots, whoever of `holders` holds them.
pub fn reduce_piece(
    holders: &[&dyn Stage],
    step: u64,
    lots: u32,
    piece: Range<usize>,
) -> Result<Vec<u8>, ReduceError> {
    let mut tree = Tree::new(lots);
    for (holder, stage) in holders.iter().enumerate() {
        let dtype = stage.dtype();
        for node in stage.held(step) {
            let sum = stage.read_sum(step, node, piece.clone())?;
            tree.enter(node, sum, |left, right| add_bytes(dtype, left, right))
                .map_err(|_| ReduceError::Twice { holder, node })?;
        }
    }
    let missing = (0..lots).filter(|&lot| !tree.holds(lot)).collect();
    tree.into_total().ok_or(ReduceError::Missing { lots: missing })
}

/// Adds up every parameter that several stages, or several units of one, use: in the order of `stages`, each given
/// with all its replicas, of which the first is asked. Returns Σ g² of each.
pub fn settle_shared(
    stages: &mut [Vec<&mut dyn Stage>],
    reduction: Reduction,
) -> Result<BTreeMap<String, f64>, StageError> {
    let mut uses: BTreeMap<String, Vec<Vec<u8>>> = BTreeMap::new();
    for stage in stages.iter().filter_map(|replicas| replicas.first()) {
        for Shared { name, .. } in stage.shared().into_iter().filter(|shared| shared.elsewhere) {
            let of_stage = stage.uses(reduction, &name)?;
            uses.entry(name).or_default().push(of_stage);
        }
    }
    let mut squares = BTreeMap::new();
    for stage in stages.iter_mut().flatten() {
        for Shared { name, elements, elsewhere, .. } in stage.shared() {
            if !elsewhere {
                let square = stage.settle_alone(reduction, &name)?;
                squares.insert(name, square);
                continue;
            }
            let total = sum_of_uses(stage.dtype(), elements, &uses[&name]);
            let square = stage.settle(reduction, &name, &total)?;
            squares.extend(square.map(|square| (name, square)));
        }
    }
    Ok(squares)
}

/// The sum over all uses of a parameter, one after another: those of each stage, in the order of stages. The first
/// starts the sum; it is not added to zero, which would turn −0 into 0.
pub fn sum_of_uses(dtype: Dtype, elements: usize, stages: &[impl AsRef<[u8]>]) -> Vec<u8> {
    let length = (elements * dtype.size()).max(1);
    let mut uses = stages.iter().flat_map(|stage| stage.as_ref().chunks(length));
    let mut total = uses.next().unwrap_or_default().to_vec();
    uses.for_each(|one| add_bytes(dtype, &mut total, one));
    total
}

/// Why a piece could not be reduced; nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum ReduceError {
    /// Lots that nobody holds.
    #[error("nobody holds lots {lots:?}; they must be computed again before the step can be reduced")]
    Missing {
        /// Which.
        lots: Vec<u32>,
    },
    /// A sum that overlaps with another holder's.
    #[error("holder {holder} holds lots at {node:?} that another holds too; one of them must be revoked")]
    Twice {
        /// Its place among the holders.
        holder: usize,
        /// Which sum.
        node: Node,
    },
    /// A holder refused.
    #[error(transparent)]
    Stage(#[from] StageError),
}

/// `left += right`, element by element, as far as both go.
pub fn add_bytes(dtype: Dtype, left: &mut [u8], right: &[u8]) {
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
