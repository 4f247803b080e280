//! What is left of a run on this machine: the loss over that of one process, and whether the weights are its weights.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::ExitCode;

use anyhow::Result;
use starling_model::pipeline::weights_hash;
use starling_node::events::{self, Event};

use crate::hosting::Hosted;
use crate::interrupt::Interrupt;
use crate::plot::{self, Series, Style};
use crate::run_folder::write_whole;
use crate::session::Session;
use crate::words;

/// What the event log says of each step: the last word counts.
#[derive(Default)]
struct Curve {
    losses: BTreeMap<u64, f64>,
    weights: BTreeMap<u64, String>,
    tokens: u64,
    seconds: f64,
    went_back: u32,
}

pub fn write(hosted: &Hosted, kills: u32, compare: u64, interrupt: &Interrupt) -> Result<ExitCode> {
    let curve = Curve::read(hosted)?;
    let run = &hosted.charter.run;
    let reference = one_process(hosted, compare.min(run.train.steps), interrupt)?;
    let shown = hosted.folder.path().display();
    let mut out = format!("# {}\n\n", run.name);
    let last = curve.losses.values().next_back().copied().unwrap_or(f64::NAN);
    let _ = writeln!(
        out,
        "{} steps, {} tokens at {} tokens/s; last training loss {last:.4}\n",
        curve.losses.len(),
        words::count(curve.tokens as f64),
        words::count(curve.tokens as f64 / curve.seconds.max(1e-9)),
    );
    let _ = writeln!(
        out,
        "- {kills} processes died; {} times the run went back to a checkpoint",
        curve.went_back
    );
    let same = reference.weights.iter().filter(|(step, hash)| curve.weights.get(step) == Some(hash)).count();
    let compared = reference.weights.len();
    let known = reference.weights.keys().filter(|step| curve.weights.contains_key(step)).count();
    if compared > 0 {
        let verdict = if same == known && known > 0 { "the same, bit for bit" } else { "NOT the same" };
        let _ = writeln!(
            out,
            "- the first {compared} steps in one process: after {known} of them the weights were compared, {same} are the same: **{verdict}**"
        );
    }
    if let Some(weights) = curve.weights.values().next_back() {
        let _ = writeln!(out, "- hash of the weights: `{weights}`");
    }
    let points =
        |losses: &BTreeMap<u64, f64>| losses.iter().map(|(s, l)| (*s as f64 + 1.0, *l)).collect::<Vec<_>>();
    let series = |name: &str, colour, points, style| Series { name: name.into(), colour, points, style };
    let mut all = vec![series("the swarm", "#1f5fa8", plot::thinned(points(&curve.losses)), Style::Thin)];
    if compared > 0 {
        all.push(series("one process", "#d1495b", points(&reference.losses), Style::Dots));
    }
    let svg = plot::svg(&format!("{}: loss", run.name), "step", "nats per token", &all);
    write_whole(&hosted.folder.plot(), &svg)?;
    write_whole(&hosted.folder.report(), &out)?;
    words::show(&format!("\n{out}- plot: {shown}/loss.svg\n- try it: starling generate {shown}\n"))?;
    Ok(if same == known { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Curve {
    fn read(hosted: &Hosted) -> Result<Curve> {
        let mut curve = Curve::default();
        for line in events::read(&hosted.folder.events())?.lines {
            match line.event {
                Event::Step { step, loss, tokens, seconds, .. } => {
                    curve.losses.insert(step, loss);
                    curve.tokens += tokens;
                    curve.seconds += seconds;
                }
                Event::Weights { step, weights } => drop(curve.weights.insert(step, weights)),
                Event::WentBack { .. } => curve.went_back += 1,
                _ => {}
            }
        }
        Ok(curve)
    }
}

/// The same training in one process, for some steps.
fn one_process(hosted: &Hosted, steps: u64, interrupt: &Interrupt) -> Result<Curve> {
    let mut curve = Curve::default();
    if steps == 0 {
        return Ok(curve);
    }
    words::tell(&format!("training the first {steps} steps in one process, to compare"));
    let mut run = hosted.charter.run.clone();
    run.train.threads = 0;
    let mut session = Session::open(run, &hosted.folder.corpus())?;
    while session.reference.steps_done() < steps && !interrupt.asked() {
        let report = session.reference.step()?;
        curve.losses.insert(report.step, report.loss.mean());
        let hash = weights_hash(session.reference.stages().iter().map(|stage| stage.weight_hashes()));
        curve.weights.insert(report.step, hash);
    }
    Ok(curve)
}
