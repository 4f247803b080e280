//! What a stage says it needs is what it takes: measured by an allocator that counts.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "an allocator is unsafe by nature; this one only counts and passes on")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use starling_model::config::ModelConfig;
use starling_model::engine::cpu::Cpu;
use starling_model::engine::naive::Naive;
use starling_model::engine::{Engine, Shape};
use starling_model::local::LocalStage;
use starling_model::lots::Lots;
use starling_model::optimiser::OptimiserConfig;
use starling_model::stage::{Commit, Input, Keep, Meta, Microbatch, Reduction, Stage};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test, because the counter is one for the process.
#[test]
fn the_plan_is_near_the_peak() {
    check(|| Naive::<f32>::new(1).unwrap(), 0.25);
    check(|| Cpu::new(1).unwrap(), 0.05);
    check(|| Cpu::new(3).unwrap(), 0.05);
}

fn check<E: Engine>(engine: impl Fn() -> E, most: f64) {
    for (layers, rows, in_flight, keep) in
        [(2, 8, 1, Keep::All), (2, 8, 4, Keep::All), (4, 16, 3, Keep::Input), (6, 2, 1, Keep::Input)]
    {
        let before = LIVE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let architecture =
            ModelConfig { context: 64, width: 96, layers, heads: 4, ..Default::default() }.architecture(500);
        let shape = Shape { rows, columns: 64 };
        let units = 0..architecture.units().len();
        let engine = Arc::new(engine());
        let class = engine.class();
        let mut stage = LocalStage::new(engine, architecture, units, OptimiserConfig::default().rule(), 1);
        let planned = stage.plan(shape, in_flight, keep);
        (0..2).for_each(|_| step(&mut stage, 500, shape, in_flight, keep));
        let peak = (PEAK.load(Ordering::Relaxed) - before) as u64;
        drop(stage);
        let ratio = planned as f64 / peak as f64;
        assert!(
            (ratio - 1.0).abs() <= most,
            "{class}: {layers} layers, {rows} rows, {in_flight} in flight, {keep:?}: planned {planned}, took {peak}"
        );
    }
}

/// All forwards, then all backwards, then an update: every buffer that a step can have.
fn step(stage: &mut dyn Stage, words: u32, shape: Shape, in_flight: usize, keep: Keep) {
    // The first microbatch is a lot of its own, sealed while the others are computed.
    let others = in_flight.max(2);
    let lots = Lots { microbatches: others as u32 + 1, lots: 2 };
    let (step, mut microbatch) = (stage.version(), 0);
    let mut forward = |stage: &mut dyn Stage| {
        let at = Microbatch { step, index: microbatch, version: step };
        microbatch += 1;
        let tokens = shape.tokens();
        let meta = Meta {
            shape,
            samples: vec![0; shape.rows],
            positions: (0..tokens as u32).map(|n| n % shape.columns as u32).collect(),
            documents: vec![0; tokens],
            targets: vec![1; tokens],
        };
        // All rows of the tables are used.
        let words = (0..tokens as u32).map(|n| (n * 7 + microbatch) % words).collect();
        stage.forward(at, Input::Tokens(words), meta, keep).unwrap().1
    };
    let last = forward(stage);
    let (_, pending) = stage.backward(last, None).unwrap();
    stage.fold(pending, lots).unwrap();
    for _ in 0..others / in_flight {
        let tickets: Vec<_> = (0..in_flight).map(|_| forward(stage)).collect();
        for ticket in tickets {
            let (_, pending) = stage.backward(ticket, None).unwrap();
            stage.fold(pending, lots).unwrap();
        }
    }
    let reduction = Reduction { step, attempt: 0 };
    stage.reduce_alone(reduction).unwrap();
    for shared in stage.shared() {
        stage.settle_alone(reduction, &shared.name).unwrap();
    }
    let update = OptimiserConfig::default().update(step, 10, step, 1, 1.0);
    stage.apply(&Commit { step, version: step, update: Some(update) }).unwrap();
}
