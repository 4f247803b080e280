//! What a worker of a swarm holds at a time, and so how much memory it needs. Whoever runs workers keeps to these bounds.

use crate::engine::{Engine, Shape};
use crate::local::Units;
use crate::lots::Lots;
use crate::run::{Reduce, TrainConfig};

/// Microbatches in flight for every peer of a pipeline.
pub const IN_FLIGHT: usize = 4;
/// Bytes of outputs, and of gradients of inputs, that a worker keeps until the step is closed, at the most: who does a
/// lot again in another stage is answered with them.
pub const KEPT_BYTES: u64 = 256 << 20;
/// What else a process takes: its code and threads, what is on its way in and out.
pub const PROCESS_BYTES: u64 = 96 << 20;

/// Microbatches between forward and backward at one worker, at the most. Who has a lot at work has room for the next
/// two, so that it never waits between lots.
pub fn most_jobs(lots: Lots) -> usize {
    let largest = lots.microbatches.div_ceil(lots.lots.max(1));
    (3 * largest as usize).max(32)
}

/// Gradients that a worker holds, in halves of one.
fn half_gradients(lots: Lots, reduce: Reduce) -> usize {
    // Sealed lots that lie apart in the tree are kept apart; a worker gets neighbours, fewer and fewer towards the end.
    let sealed = match reduce {
        Reduce::Exact => 2 * lots.lots.max(2).ilog2() as usize,
        Reduce::Fast => 2,
    };
    // One is being computed, and one, with which its lot is complete, waits for the verdict. Unless a lot is one microbatch,
    // two more lots are open, and those of who is given more at a time lie further apart: half the time one more, measured.
    let open = match reduce {
        _ if lots.microbatches <= lots.lots => 0,
        Reduce::Exact => 5,
        Reduce::Fast => 4,
    };
    let computing = 4 + open + sealed;
    // The reduced one, and the part of it that the worker has added up for the others; half of it, of two replicas.
    let reducing = sealed + 3;
    computing.max(reducing)
}

/// Bytes that a worker of these units, the stage of this number, needs.
pub(crate) fn worker_bytes<E: Engine>(
    units: &Units<E>,
    (moments, shape): (usize, Shape),
    train: &TrainConfig,
    reduce: Reduce,
    stage: usize,
) -> u64 {
    let (element, lots) = (units.dtype().size() as u64, train.lots());
    // What is in flight behind a stage is held in it; in the last one backward follows forward at once.
    let behind = train.stages.saturating_sub(stage + 1);
    let in_flight = if behind == 0 { 1 } else { IN_FLIGHT * (behind + 1) };
    let in_flight = in_flight.min(most_jobs(lots)).min(lots.microbatches as usize);
    let shared: usize =
        units.uses.values().filter(|uses| uses.is_elsewhere()).map(|uses| uses.slots[0].len).sum();
    // The others' uses, ours, and their sum.
    // That which is being computed is counted with what it is computed from.
    let gradients = ((half_gradients(lots, reduce) - 2) * units.gradient_len).div_ceil(2) + 3 * shared;
    let boundary = shape.tokens() as u64 * units.architecture.width as u64 * element;
    let kept = boundary.saturating_mul(2 * u64::from(lots.microbatches)).min(KEPT_BYTES);
    let computing = units.plan_with(moments, gradients, shape, in_flight, train.keep);
    computing.saturating_add(kept).saturating_add(PROCESS_BYTES)
}
