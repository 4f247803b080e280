//! `generate`: how fast a GPT-2 of 124 M parameters writes, beside `transformers.generate`, turn by turn.

use std::fs;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::sides::{PAIRS, Side, mean_and_bound};
use super::{Arguments, Figure, Must};
use crate::python;
use xtask::tool::{program, root, run as run_tool, tool};

/// Tokens of a turn.
const TOKENS: u64 = 64;

#[derive(Deserialize)]
struct Turn {
    seconds: f64,
    ids: Vec<u32>,
}

pub fn run(_: &Arguments) -> Result<Vec<Figure>> {
    let python = python::environment(&["torch", "transformers"])?;
    run_tool(&mut tool("cargo build --release --package starling-exchange --example generate"))?;
    let folder = root().join("target/bench/generate");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let script = root().join("bench/python/generate.py");
    run_tool(program(&python).arg(&script).arg("make").arg(&folder))?;
    let mut figures = Vec::new();
    for threads in ["1", "2"] {
        let ours = root().join("target/release/examples/generate");
        let mut ours = Side::start(program(ours).arg(&folder).arg(threads))?;
        let mut theirs = Side::start(program(&python).arg(&script).arg("write").arg(&folder).arg(threads))?;
        let (mut ratios, mut speeds, mut alike) = (Vec::new(), Vec::new(), 0);
        for pair in 0..=PAIRS {
            let (a, b): (Turn, Turn) = (ours.turn(TOKENS)?, theirs.turn(TOKENS)?);
            if pair > 0 {
                ratios.push((b.seconds / a.seconds).ln());
                speeds.push(TOKENS as f64 / a.seconds);
            }
            alike = a.ids.iter().zip(&b.ids).filter(|(a, b)| a == b).count();
            eprintln!("{threads} threads: {:.2} s, transformers {:.2} s", a.seconds, b.seconds);
        }
        let (mean, low) = mean_and_bound(&ratios);
        speeds.sort_by(f64::total_cmp);
        let figure = |what: &str, value, unit: &str, must| {
            let name = format!("GPT-2 124 M, {threads} threads: {what}");
            Figure { name, value, unit: unit.into(), must }
        };
        figures.extend([
            figure("tokens/s ÷ transformers'", mean.exp(), "", Some(Must::AtLeast(1.0))),
            figure("lower 95 % bound", low.exp(), "", None),
            figure("median speed", speeds[speeds.len() / 2], "tokens/s", None),
            figure("tokens that are the same", alike as f64 / TOKENS as f64, "", None),
        ]);
    }
    Ok(figures)
}
