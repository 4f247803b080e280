//! `starling plan`: what a run would need and what would hold it up, before anything is trained.
//!
//! The square-cube law (Ryabinin et al., 2023): the work of a stage grows with the square of the width for every
//! token, what crosses its boundary only with the width; so the wider the model, the less the wire matters.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use starling_corpus::{CorpusFolder, Tokeniser, World};
use starling_model::pipeline::{self, StagePlan};
use starling_model::run::{Precision, Run};
use starling_model::transformer::Unit;

use crate::train;
use crate::units::Link;
use crate::weights::{self, Weights};
use crate::words;

/// Backward costs twice what forward does.
const PASSES: f64 = 3.0;

/// What a run would need, and what would hold it up
///
/// Cuts the model into stages, and says for each what a peer of it needs and how long it computes and sends, on
/// devices and links that you name. Trains nothing, and opens no connection.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  starling plan run.toml --stages 4 --link 200mbit,50ms --device 8\n  starling plan run.toml --stages 8 --wire-bytes 1"
)]
pub struct Arguments {
    /// A run file (.toml), or any text file
    input: PathBuf,
    /// Override a setting, as --set model.width=1024; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Stages to cut the model into [default: the run's]
    #[arg(long)]
    stages: Option<usize>,
    /// The link between two stages: rate and latency
    #[arg(long, default_value = "200mbit,50ms")]
    link: Link,
    /// What a peer's device computes, in TFLOP/s that it really reaches
    #[arg(long, default_value_t = 1.0)]
    device: f64,
    /// Bytes of an element on the wire: 4 as it is, 2 for bf16, 1 for 8 bits
    #[arg(long, default_value_t = 4.0)]
    wire_bytes: f64,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    if !(arguments.device > 0.0 && arguments.device.is_finite() && arguments.wire_bytes > 0.0) {
        bail!(
            "a device of {} TFLOP/s and {} bytes an element make no plan; use positive numbers",
            arguments.device,
            arguments.wire_bytes
        );
    }
    let mut overrides = arguments.set.clone();
    overrides.extend(arguments.stages.map(|stages| format!("train.stages={stages}")));
    let mut run = train::parse(&arguments.input, &overrides)?;
    weights::initial(&mut run)?;
    words::show(&report(&run, arguments)?)
}

/// How long one stage takes for one microbatch, forward and backward.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Times {
    compute_s: f64,
    /// On the wire towards the next stage, and the gradient back; 0 after the last.
    wire_s: f64,
}

impl Times {
    /// The share of time that the device computes, if enough microbatches are in flight to hide latency.
    fn busy(&self) -> f64 {
        self.compute_s / self.compute_s.max(self.wire_s)
    }
}

fn report(run: &Run, arguments: &Arguments) -> Result<String> {
    let stages = stages(run)?;
    let times = times(run, &stages, arguments);
    let mut out = heading(run, &stages, arguments);
    stage_table(&mut out, &stages, &times);
    verdict(&mut out, run, &stages, &times, arguments)?;
    Ok(out)
}

fn stages(run: &Run) -> Result<Vec<StagePlan>> {
    let architecture = run.model.architecture(vocabulary(run)?);
    Ok(pipeline::plan(&architecture, run.optimiser.rule(), &run.train, run.swarm.reduce)?)
}

fn vocabulary(run: &Run) -> Result<usize> {
    if let Some(initial) = &run.initial {
        return Ok(Weights::open(&initial.path)?.vocabulary);
    }
    let data = &run.data;
    if let Some(synthetic) = &data.synthetic {
        return Ok(World::new(synthetic).tokeniser().vocabulary());
    }
    match data.sources.iter().find(|source| source.path.is_dir()) {
        Some(source) => Ok(CorpusFolder::open(&source.path)?.tokeniser.vocabulary()),
        None => Ok(Tokeniser::Bytes.vocabulary()),
    }
}

fn times(run: &Run, stages: &[StagePlan], arguments: &Arguments) -> Vec<Times> {
    let tokens = f64::from(run.train.microbatch.min(run.train.batch)) * run.model.context as f64;
    let boundary_bytes = 2.0 * tokens * run.model.width as f64 * arguments.wire_bytes;
    let of = |(i, stage): (usize, &StagePlan)| Times {
        compute_s: PASSES * tokens * stage.forward_operations as f64 / (arguments.device * 1e12),
        wire_s: if i + 1 < stages.len() { boundary_bytes / arguments.link.bytes_per_s } else { 0.0 },
    };
    stages.iter().enumerate().map(of).collect()
}

fn heading(run: &Run, stages: &[StagePlan], arguments: &Arguments) -> String {
    let parameters: u64 = stages.iter().map(|stage| stage.parameters).sum();
    format!(
        "{}: {} parameters in {} stages; devices of {} TFLOP/s, links of {} Mbit/s and {} ms, {} bytes an element on the wire\n\n",
        run.name,
        words::count(parameters as f64),
        stages.len(),
        arguments.device,
        arguments.link.bytes_per_s * 8.0 / 1e6,
        arguments.link.latency_s * 1e3,
        arguments.wire_bytes,
    )
}

fn stage_table(out: &mut String, stages: &[StagePlan], times: &[Times]) {
    out.push_str("stage  units                  parameters     memory   compute/microbatch   wire/microbatch   busy at most\n");
    for (number, (stage, time)) in stages.iter().zip(times).enumerate() {
        let _ = writeln!(
            out,
            "{number:>5}  {:<22} {:>10} {:>10}   {:>18}   {:>15}   {:>10.1} %",
            named(&stage.units),
            words::count(stage.parameters as f64),
            words::bytes(stage.memory_bytes),
            words::seconds(time.compute_s),
            words::seconds(time.wire_s),
            100.0 * time.busy(),
        );
    }
}

fn verdict(
    out: &mut String,
    run: &Run,
    stages: &[StagePlan],
    times: &[Times],
    arguments: &Arguments,
) -> Result<()> {
    let (worst, time) = slowest(times);
    let pace = time.compute_s.max(time.wire_s);
    let in_flight = (1.0 + 2.0 * arguments.link.latency_s / pace).ceil();
    if time.wire_s > time.compute_s {
        let _ = writeln!(
            out,
            "\nBottleneck: the link after stage {worst}. It carries {} for every {} of compute: devices are busy at most {:.1} % of the time.",
            words::seconds(time.wire_s),
            words::seconds(time.compute_s),
            100.0 * time.busy(),
        );
    } else {
        let _ = writeln!(out, "\nBottleneck: the compute of stage {worst}. The links keep up.");
    }
    let _ = writeln!(out, "About {in_flight:.0} microbatches in flight hide the latency.");
    let size = if run.train.precision == Precision::F32 { 4 } else { 8 };
    let gradient = stages.iter().map(|stage| stage.gradient).max().unwrap_or(0) * size;
    let _ = writeln!(
        out,
        "A step's gradients, between two replicas of the largest stage over this link: {} in {}.",
        words::bytes(gradient),
        words::seconds(gradient as f64 / arguments.link.bytes_per_s),
    );
    let values = 1 + run.optimiser.rule().moments() as u64;
    let state = stages.iter().map(|stage| stage.parameters).max().unwrap_or(0) * values * size;
    let _ = writeln!(
        out,
        "A worker that hands its state to a joiner holds a copy of it meanwhile, and the updates since: up to {} more.",
        words::bytes(2 * state),
    );
    if stages.len() > 1 {
        square_cube(out, run, arguments)?;
    }
    Ok(())
}

/// The same cut at other widths: how the wire loses its weight.
fn square_cube(out: &mut String, run: &Run, arguments: &Arguments) -> Result<()> {
    out.push_str("\nThe square-cube law: the same model, wider (slowest stage)\n");
    out.push_str("   width   parameters   compute/microbatch   wire/microbatch   busy at most   at 1 byte an element\n");
    for factor in [1, 2, 4, 8, 16] {
        let mut wider = run.clone();
        wider.model.width *= factor;
        wider.model.inner = wider.model.inner.map(|inner| inner * factor);
        wider.model.head_width = wider.model.head_width.map(|width| width * factor);
        if !wider.problems().is_empty() {
            break;
        }
        let stages = stages(&wider)?;
        let times = times(&wider, &stages, arguments);
        let (_, time) = slowest(&times);
        let packed = Times { wire_s: time.wire_s / arguments.wire_bytes, ..time };
        let parameters: u64 = stages.iter().map(|stage| stage.parameters).sum();
        let _ = writeln!(
            out,
            "{:>8}   {:>10}   {:>18}   {:>15}   {:>10.1} %   {:>18.1} %",
            wider.model.width,
            words::count(parameters as f64),
            words::seconds(time.compute_s),
            words::seconds(time.wire_s),
            100.0 * time.busy(),
            100.0 * packed.busy(),
        );
    }
    Ok(())
}

/// The stage that everybody waits for.
fn slowest(times: &[Times]) -> (usize, Times) {
    let longest = |time: &Times| time.compute_s.max(time.wire_s);
    let (mut worst, mut slowest) = (0, times[0]);
    for (number, time) in times.iter().enumerate() {
        if longest(time) > longest(&slowest) {
            (worst, slowest) = (number, *time);
        }
    }
    (worst, slowest)
}

/// Units in few words: "embedding, blocks 0–3".
fn named(units: &[Unit]) -> String {
    let blocks: Vec<usize> =
        units.iter().filter_map(|unit| if let Unit::Block(n) = unit { Some(*n) } else { None }).collect();
    let mut parts = Vec::new();
    if units.contains(&Unit::Embedding) {
        parts.push("embedding".to_string());
    }
    match blocks[..] {
        [] => {}
        [one] => parts.push(format!("block {one}")),
        [first, .., last] => parts.push(format!("blocks {first}–{last}")),
    }
    if units.contains(&Unit::Head) {
        parts.push("head".to_string());
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(link: &str, device: f64) -> Arguments {
        Arguments {
            input: "a.toml".into(),
            set: vec![],
            stages: None,
            link: link.parse().unwrap(),
            device,
            wire_bytes: 4.0,
        }
    }

    fn run(width: usize) -> Run {
        let text = format!(
            "data = {{ synthetic = {{}} }}\ntrain = {{ stages = 4, batch = 8, microbatch = 2 }}\n\
             model = {{ width = {width}, heads = 8, layers = 6, context = 128 }}"
        );
        Run::parse(&text, "a.toml", &[]).unwrap()
    }

    #[test]
    fn compute_grows_with_the_square_of_the_width_and_the_wire_with_the_width() {
        let arguments = arguments("200mbit,50ms", 1.0);
        let at = |width| {
            let run = run(width);
            slowest(&times(&run, &stages(&run).unwrap(), &arguments)).1
        };
        let (narrow, wide) = (at(512), at(2048));
        assert!((wide.wire_s / narrow.wire_s - 4.0).abs() < 1e-9);
        assert!((13.0..16.5).contains(&(wide.compute_s / narrow.compute_s)), "{narrow:?} {wide:?}");
        assert!(wide.busy() > 3.0 * narrow.busy());
    }

    #[test]
    fn the_bottleneck_is_named() {
        let slow_wire = report(&run(64), &arguments("1mbit,50ms", 10.0)).unwrap();
        assert!(slow_wire.contains("Bottleneck: the link after stage"), "{slow_wire}");
        let slow_device = report(&run(64), &arguments("10gbit,1ms", 0.001)).unwrap();
        assert!(slow_device.contains("Bottleneck: the compute of stage"), "{slow_device}");
        assert!(slow_device.contains("embedding, block"), "{slow_device}");
    }
}
