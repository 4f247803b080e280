//! What a stage says it needs is what it takes, measured by the pages of the process. And a step like those before it asks
//! for nothing new: an allocator tells the largest piece.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "an allocator is unsafe by nature; this one only looks and passes on")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use starling_model::config::{Family, ModelConfig};
use starling_model::engine::cpu::Cpu;
use starling_model::engine::naive::Naive;
use starling_model::engine::{Engine, Shape};
use starling_model::local::LocalStage;
use starling_model::lots::Lots;
use starling_model::optimiser::OptimiserConfig;
use starling_model::stage::{Commit, Input, Keep, Meta, Microbatch, Reduction, Stage, Ticket};

struct Watching;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// What the process takes at the most from now on, beyond what it has now.
struct Pages(u64);

impl Pages {
    fn read(name: &str) -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim_matches([':', '\t', ' ', 'k', 'B']).parse::<u64>().unwrap() * 1024
    }

    fn start() -> Pages {
        std::fs::write("/proc/self/clear_refs", "5").unwrap(); // Forgets the peak.
        Pages(Pages::read("VmRSS"))
    }

    fn peak(&self) -> u64 {
        Pages::read("VmHWM") - self.0
    }
}

/// One test, because there is one process.
#[test]
fn the_plan_is_near_the_peak() {
    if !cfg!(target_os = "linux") {
        return;
    }
    for family in [Family::Gpt2, Family::Llama] {
        check(|| Cpu::new(2).unwrap(), family, (96, 256, 3000), 0.05);
        nothing_is_allocated_in_a_steady_step(family);
    }
    // What it works with comes and goes, in pieces that the system's allocator may keep.
    check(|| Naive::<f32>::new(1).unwrap(), Family::Gpt2, (64, 128, 1000), 0.25);
}

fn check<E: Engine>(
    engine: impl Fn() -> E,
    family: Family,
    (context, width, vocabulary): (usize, usize, usize),
    most: f64,
) {
    let cases = [(2, 8, 4, Keep::All), (4, 16, 3, Keep::Input), (2, 8, 1, Keep::All), (6, 2, 1, Keep::Input)];
    // What keeps most is what a family changes.
    let cases = &cases[..if family == Family::Gpt2 { 4 } else { 2 }];
    for &(layers, rows, in_flight, keep) in cases {
        let meter = Pages::start();
        let key_heads = (family == Family::Llama).then_some(2);
        let config =
            ModelConfig { family, context, width, layers, heads: 4, key_heads, ..Default::default() };
        let architecture = config.architecture(vocabulary);
        let shape = Shape { rows, columns: context };
        let units = 0..architecture.units().len();
        let engine = Arc::new(engine());
        let class = engine.class();
        let mut stage = LocalStage::new(engine, architecture, units, OptimiserConfig::default().rule(), 1);
        let planned = stage.plan(shape, in_flight, keep);
        (0..2).for_each(|_| step(&mut stage, vocabulary as u32, shape, in_flight, keep));
        let peak = meter.peak();
        drop(stage);
        let ratio = planned as f64 / peak as f64;
        assert!(
            (ratio - 1.0).abs() <= most,
            "{class}, {family:?}: {layers} layers, {rows} rows, {in_flight} in flight, {keep:?}: planned {planned}, took {peak}"
        );
    }
}

fn nothing_is_allocated_in_a_steady_step(family: Family) {
    let config = ModelConfig { family, context: 96, width: 256, layers: 2, ..Default::default() };
    let (architecture, shape) = (config.architecture(3000), Shape { rows: 8, columns: 96 });
    let units = 0..architecture.units().len();
    let rule = OptimiserConfig::default().rule();
    let mut stage = LocalStage::new(Arc::new(Cpu::new(2).unwrap()), architecture, units, rule, 1);
    (0..2).for_each(|_| step(&mut stage, 3000, shape, 2, Keep::All));
    LARGEST.store(0, Ordering::Relaxed);
    let mapped = Pages::read("VmSize");
    step(&mut stage, 3000, shape, 2, Keep::All);
    assert_eq!(Pages::read("VmSize"), mapped, "{family:?}: the engine's memory has grown");
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest <= 4096, "{family:?}: {largest} bytes were allocated in a step like those before it");
}

/// A step of a pipeline that is kept full, and an update: every buffer that a step can have.
fn step(stage: &mut dyn Stage, words: u32, shape: Shape, in_flight: usize, keep: Keep) {
    // One lot is sealed while the other is computed.
    let microbatches = (3 * in_flight).max(4);
    let lots = Lots { microbatches: microbatches as u32, lots: 2 };
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
    let mut waiting = VecDeque::new();
    for _ in 0..microbatches {
        if waiting.len() == in_flight {
            one_back(stage, &mut waiting, lots);
        }
        waiting.push_back(forward(stage));
    }
    while !waiting.is_empty() {
        one_back(stage, &mut waiting, lots);
    }
    let reduction = Reduction { step, attempt: 0 };
    stage.reduce_alone(reduction).unwrap();
    for shared in stage.shared() {
        stage.settle_alone(reduction, &shared.name).unwrap();
    }
    let update = OptimiserConfig::default().update(step, 10, step, 1, 1.0);
    stage.apply(&Commit { step, version: step, update: Some(update) }).unwrap();
}

fn one_back(stage: &mut dyn Stage, waiting: &mut VecDeque<Ticket>, lots: Lots) {
    let (_, pending) = stage.backward(waiting.pop_front().unwrap(), None).unwrap();
    stage.fold(pending, lots).unwrap();
}
