//! The simulator's figures: how much of what is possible the swarm does, what crosses the WAN, how fast the
//! simulator is. The numbers come from the example `figures` of `starling-sim`; what they must reach stands here.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::{Arguments, Figure, Must};
use xtask::tool::root;

/// One line of the example's output.
#[derive(Deserialize)]
struct Line {
    name: String,
    value: f64,
    unit: String,
}

/// What the figures whose names begin and end like this must reach.
const MUSTS: &[(&str, &str, Must)] = &[
    ("share of the sum of speeds 1-8, Delayed", "", Must::AtLeast(0.97)),
    ("share of the bound:", ", ours", Must::AtLeast(0.97)),
    ("WAN bytes", "sums alone", Must::AtMost(1.05)),
    ("coordinator", "", Must::AtMost(0.2)),
    ("1,000 peers, 24 h", " 24 h", Must::AtMost(60.0)),
    ("10,000 peers, 1 h", ": memory", Must::AtMost(4.0)),
];

pub fn run(arguments: &Arguments) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for which in ["wan", "coordinator", "speeds", "steps", "scale", "crowd"] {
        figures.extend(measure(&[which])?);
    }
    match &arguments.traces {
        Some(folder) => {
            let folder = folder.to_str().context("the folder of the traces has no readable name")?;
            figures.extend(measure(&["traces", folder])?);
        }
        None => println!("Without --traces FOLDER no preemption traces are replayed."),
    }
    Ok(figures)
}

fn measure(which: &[&str]) -> Result<Vec<Figure>> {
    println!("measuring {} …", which[0]);
    let output = Command::new("cargo")
        .args(["run", "--release", "--quiet", "--locked", "-p", "starling-sim", "--example", "figures", "--"])
        .args(which)
        .current_dir(root())
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(output.status.success(), "the figures `{}` did not finish", which[0]);
    let text = String::from_utf8(output.stdout).context("the figures are no text")?;
    text.lines().map(figure).collect()
}

fn figure(line: &str) -> Result<Figure> {
    let Line { name, value, unit } =
        serde_json::from_str(line).with_context(|| format!("this is no figure: {line}"))?;
    let must = MUSTS.iter().find(|(start, end, _)| name.starts_with(start) && name.ends_with(end));
    let must = must.map(|(_, _, must)| *must);
    Ok(Figure { name, value, unit, must })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_knows_what_it_must_reach() {
        let must = |name: &str| {
            let line = serde_json::json!({ "name": name, "value": 0.5, "unit": "share" }).to_string();
            figure(&line).unwrap().must.map(|must| must.to_string())
        };
        assert_eq!(must("share of the bound: p2, 125 M, 4 stages, ours").as_deref(), Some("at least 0.9700"));
        assert_eq!(must("share of the bound: p2, 125 M, 4 stages, never"), None);
        assert_eq!(must("1,000 peers, 24 h").as_deref(), Some("at most 60.00"));
        assert_eq!(must("1,000 peers, 24 h: events"), None);
        assert!(figure("no figure").is_err());
    }
}
