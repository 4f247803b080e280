//! What a worker of a swarm holds at a time, and so how much memory it needs. Whoever runs workers keeps to these bounds.

use crate::engine::{Engine, Shape};
use crate::local::Units;
use crate::lots::Lots;
use crate::run::{Reduce, SwarmConfig, TrainConfig};
use crate::stage::Keep;

/// Microbatches in flight for every peer of a pipeline.
pub const IN_FLIGHT: usize = 4;
/// Bytes of outputs, and of gradients of inputs, that a worker keeps until the step is closed, at the most: who does a
/// lot again in another stage is answered with them.
pub const KEPT_BYTES: u64 = 256 << 20;
/// What else a process takes: its code and threads, what comes in.
pub const PROCESS_BYTES: u64 = 72 << 20;

/// Microbatches between forward and backward at one worker, at the most; as many more may wait before it. Who has a lot
/// at work has room for the next two, so that it never waits between lots.
pub fn most_jobs(lots: Lots) -> usize {
    let largest = lots.microbatches.div_ceil(lots.lots.max(1));
    (3 * largest as usize).max(32)
}

/// Sums of sealed lots that a worker holds. Those that lie apart in the tree are kept apart; it gets neighbours, fewer and
/// fewer towards the end.
fn sealed(lots: Lots, reduce: Reduce) -> usize {
    match reduce {
        Reduce::Exact => lots.lots.max(2).ilog2() as usize,
        Reduce::Fast => 1,
    }
}

/// Gradients that a worker holds at a time, besides the one that it computes.
fn gradients(lots: Lots, reduce: Reduce) -> usize {
    // One, with which its lot is complete, waits for the verdict. Unless a lot is one microbatch, two lots are open, and
    // one more gradient waits until the device is done with what it got meanwhile.
    let open = if lots.microbatches <= lots.lots { 0 } else { 3 };
    sealed(lots, reduce) + 1 + open
}

/// Bytes that a worker of these units, the stage of this number, needs on its device. It takes them when it begins: what
/// does not fit is found out then, not in the middle of a run.
pub(crate) fn device_bytes<E: Engine>(
    units: &Units<E>,
    (moments, shape): (usize, Shape),
    train: &TrainConfig,
    swarm: SwarmConfig,
    (stage, keep): (usize, Keep),
) -> u64 {
    let lots = train.lots();
    // What is in flight behind a stage is held in it. In the last one backward follows forward, but a device has its next
    // job in time, so one more is forward before that.
    let behind = train.stages.saturating_sub(stage + 1);
    let in_flight = if behind == 0 { 2 } else { IN_FLIGHT * (behind + 1) };
    let in_flight = in_flight.min(most_jobs(lots)).min(lots.microbatches as usize);
    let shared: usize =
        units.uses.values().filter(|uses| uses.is_elsewhere()).map(|uses| uses.slots[0].len).sum();
    // The others' uses, ours, and their sum.
    // What is inherited stands beside our own sums, until it meets its neighbours.
    let inherited = if swarm.deposit_every_s > 0.0 { sealed(lots, swarm.reduce) } else { 0 };
    let gradients = (gradients(lots, swarm.reduce) + inherited) * units.gradient_len + 3 * shared;
    units.plan_with(moments, gradients, shape, in_flight, keep)
}

/// The same with what it needs besides.
pub(crate) fn worker_bytes<E: Engine>(
    units: &Units<E>,
    size: (usize, Shape),
    train: &TrainConfig,
    swarm: SwarmConfig,
    (stage, keep): (usize, Keep),
) -> u64 {
    let (element, lots) = (units.dtype().size() as u64, train.lots());
    let boundary = size.1.tokens() as u64 * units.architecture.width as u64 * element;
    let kept = boundary.saturating_mul(2 * u64::from(lots.microbatches)).min(KEPT_BYTES);
    // Inputs that wait. In the first stage those are tokens, which count for nothing.
    let waiting =
        if stage == 0 { 0 } else { most_jobs(lots).min(lots.microbatches as usize) as u64 * boundary };
    // Pieces of sums on their way, out and in: with two replicas half a gradient each, whatever the number of sums (measured
    // with 8 lots: what goes out is bounded, see `toll.rs` of the node, and what comes in is added up at once).
    let reducing = units.gradient_len as u64 * element;
    // A copy of ours on its way to whoever keeps it, what another has left here, two while keepers change, and the next of
    // those that is coming in.
    let copies = if swarm.deposit_every_s > 0.0 { 4 * sealed(lots, swarm.reduce) as u64 } else { 0 };
    let reducing = reducing * (1 + copies);
    let device = device_bytes(units, size, train, swarm, (stage, keep));
    device.saturating_add(kept).saturating_add(waiting).saturating_add(reducing).saturating_add(PROCESS_BYTES)
}
