//! What can be said without simulating: memory, compute and wire of each stage, and the square-cube law (Ryabinin et al.,
//! 2023): the work of a stage grows with the square of the width for every token, what crosses its boundary only with the
//! width; so the wider the model, the less the wire matters.

use std::fmt::Write;

use anyhow::Result;
use starling_model::pipeline::StagePlan;
use starling_model::transformer::Unit;

use crate::plan::case::{self, Case};
use crate::words;

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

/// On an average device, and if the next stage stands in another site.
fn times(case: &Case, stages: &[StagePlan]) -> Vec<Times> {
    let (run, swarm) = (&case.run, &case.swarm);
    let link = if swarm.sites() > 1 { swarm.link } else { swarm.lan };
    let tokens = case::tokens(run);
    let boundary_bytes = 2.0 * tokens * run.model.width as f64 * swarm.wire_bytes;
    let of = |(i, stage): (usize, &StagePlan)| Times {
        compute_s: case.operations(stage) / (swarm.tflops() * 1e12),
        wire_s: if i + 1 < stages.len() { boundary_bytes / link.bytes_per_s } else { 0.0 },
    };
    stages.iter().enumerate().map(of).collect()
}

/// What each stage is and takes.
pub fn stage_table(out: &mut String, case: &Case, stages: &[StagePlan]) {
    out.push_str("stage  units                    parameters     memory   compute/microbatch   wire/microbatch   busy at most\n");
    for (number, (stage, time)) in stages.iter().zip(times(case, stages)).enumerate() {
        let _ = writeln!(
            out,
            "{number:>5}  {:<24} {:>10} {:>10}   {:>18}   {:>15}   {:>10.1} %",
            named(&stage.units),
            words::count(stage.parameters as f64),
            words::bytes(stage.memory_bytes),
            words::seconds(time.compute_s),
            words::seconds(time.wire_s),
            100.0 * time.busy(),
        );
    }
    if stages.len() > 1 {
        let place = if case.swarm.sites() > 1 {
            "if the next stage stands in another site"
        } else {
            "to the next stage"
        };
        let _ = writeln!(out, "(wire: {place}; busy: if nothing else held a stage up)");
    }
}

/// What a joiner and a reduction cost, and how the wire loses its weight.
pub fn beside(out: &mut String, case: &Case, stages: &[StagePlan]) -> Result<()> {
    let size = case::element_bytes(&case.run);
    let link = if case.swarm.sites() > 1 { case.swarm.link } else { case.swarm.lan };
    let gradient = stages.iter().map(|stage| stage.gradient).max().unwrap_or(0) * size;
    let _ = writeln!(
        out,
        "\nA step's gradients, between two replicas of the largest stage over {} Mbit/s: {} in {}.",
        link.bytes_per_s * 8.0 / 1e6,
        words::bytes(gradient),
        words::seconds(gradient as f64 / link.bytes_per_s),
    );
    let values = 1 + case.run.optimiser.rule().moments() as u64;
    let state = stages.iter().map(|stage| stage.parameters).max().unwrap_or(0) * values * size;
    let _ = writeln!(
        out,
        "A worker that hands its state to a joiner holds a copy of it meanwhile, and the updates since: up to {} more.",
        words::bytes(2 * state),
    );
    if stages.len() > 1 {
        square_cube(out, case)?;
    }
    Ok(())
}

/// The bottleneck as far as it can be told without simulating.
pub fn verdict(out: &mut String, case: &Case, stages: &[StagePlan]) {
    let (worst, time) = slowest(&times(case, stages));
    if time.wire_s > time.compute_s {
        let _ = writeln!(
            out,
            "\nBottleneck, if every stage stood in another site: the link after stage {worst}. It carries {} for every {} of \
             compute: devices would be busy at most {:.1} % of the time.",
            words::seconds(time.wire_s),
            words::seconds(time.compute_s),
            100.0 * time.busy(),
        );
    } else {
        let _ = writeln!(out, "\nBottleneck: the compute of stage {worst}. The links keep up.");
    }
}

/// The same cut at other widths: how the wire loses its weight.
fn square_cube(out: &mut String, case: &Case) -> Result<()> {
    out.push_str("\nThe square-cube law: the same model, wider (slowest stage)\n");
    out.push_str("   width   parameters   compute/microbatch   wire/microbatch   busy at most   at 1 byte an element\n");
    for factor in [1, 2, 4, 8, 16] {
        let mut wider = case.clone();
        let model = &mut wider.run.model;
        model.width *= factor;
        model.inner = model.inner.map(|inner| inner * factor);
        model.head_width = model.head_width.map(|width| width * factor);
        if !wider.run.problems().is_empty() {
            break;
        }
        let stages = wider.stages()?;
        let (_, time) = slowest(&times(&wider, &stages));
        let packed = Times { wire_s: time.wire_s / case.swarm.wire_bytes, ..time };
        let _ = writeln!(
            out,
            "{:>8}   {:>10}   {:>18}   {:>15}   {:>10.1} %   {:>18.1} %",
            wider.run.model.width,
            words::count(wider.parameters()),
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
pub fn named(units: &[Unit]) -> String {
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
    use crate::plan::tests::case;

    use super::*;

    #[test]
    fn compute_grows_with_the_square_of_the_width_and_the_wire_with_the_width() {
        let at = |width| {
            let case = case(&format!("model.width={width}"), "--peers 8");
            slowest(&times(&case, &case.stages().unwrap())).1
        };
        let (narrow, wide) = (at(512), at(2048));
        assert!((wide.wire_s / narrow.wire_s - 4.0).abs() < 1e-9);
        assert!((13.0..16.5).contains(&(wide.compute_s / narrow.compute_s)), "{narrow:?} {wide:?}");
        assert!(wide.busy() > 3.0 * narrow.busy());
    }

    #[test]
    fn the_bottleneck_is_named() {
        let told = |arguments| {
            let (case, mut out) = (case("model.width=64", arguments), String::new());
            let stages = case.stages().unwrap();
            stage_table(&mut out, &case, &stages);
            verdict(&mut out, &case, &stages);
            out
        };
        let slow_wire = told("--link 1mbit,50ms --device 10");
        assert!(slow_wire.contains("the link after stage"), "{slow_wire}");
        let slow_device = told("--link 10gbit,1ms --device 0.001");
        assert!(slow_device.contains("Bottleneck: the compute of stage"), "{slow_device}");
        assert!(slow_device.contains("embedding, block"), "{slow_device}");
    }
}
