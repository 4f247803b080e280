//! What `cargo xtask bench` runs. Benchmarks print figures, keep them in `target/bench`, and know what they must reach.

mod corpus;
mod exchange;
mod generate;
mod python;
mod sides;
mod sim;
mod step;
mod swarm;
mod torch_band;
mod torch_parity;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Parser;
use serde::Serialize;

use xtask::tool::root;

/// Measure Starling, beside its peers where there are any
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Arguments {
    /// The benchmark; without it the benchmarks are listed
    name: Option<String>,
    /// Fail if a figure is not what it must be
    #[arg(long, requires = "name")]
    check: bool,
    /// A plain text file for benchmarks that read text; generated languages without it
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Only these parts of `swarm`, or sizes of `step`, separated by commas
    #[arg(long, value_name = "PARTS")]
    only: Option<String>,
    /// In `step`, PyTorch is compiled (torch.compile) and not eager: then nothing is demanded
    #[arg(long)]
    compiled: bool,
    /// In `step`, products take bf16 on both sides, and on a third they are Starling's in f32: then nothing is demanded
    #[arg(long)]
    bf16: bool,
    /// A folder with preemption traces for `sim`; it replays none without it
    #[arg(long, value_name = "FOLDER")]
    traces: Option<PathBuf>,
}

/// A benchmark, as the list shows it.
struct Benchmark {
    name: &'static str,
    about: &'static str,
    run: fn(&Arguments) -> Result<Vec<Figure>>,
}

const BENCHMARKS: &[Benchmark] = &[
    Benchmark {
        name: "corpus",
        about: "text to tokens on disk, beside the Python package `tokenizers` with the same tokenizer.json",
        run: corpus::run,
    },
    Benchmark {
        name: "exchange",
        about: "models that transformers wrote, and models exported for it: are the logits the same on both sides?",
        run: exchange::run,
    },
    Benchmark {
        name: "generate",
        about: "how fast a GPT-2 writes, beside transformers' generate",
        run: generate::run,
    },
    Benchmark {
        name: "sim",
        about: "how much of what is possible the swarm does, what crosses the WAN, how fast the simulator is",
        run: sim::run,
    },
    Benchmark {
        name: "step",
        about: "training steps of the fast engine and of PyTorch, turn by turn: which is faster, and in how much memory?",
        run: step::run,
    },
    Benchmark {
        name: "swarm",
        about: "real processes: how soon a failure is made up for, what a step costs, sums, many peers, memory",
        run: swarm::run,
    },
    Benchmark {
        name: "torch-band",
        about: "the same model trained by Starling and by PyTorch, five seeds each: do the losses lie in the same band?",
        run: torch_band::run,
    },
    Benchmark {
        name: "torch-parity",
        about: "the same model, weights and batches trained by Starling and by PyTorch: do the losses agree?",
        run: torch_parity::run,
    },
];

/// One measured number.
#[derive(Debug, Serialize)]
struct Figure {
    pub name: String,
    pub value: f64,
    pub unit: String,
    pub must: Option<Must>,
}

/// What a figure has to reach.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code, reason = "which of them are in use changes with the benchmarks")]
enum Must {
    AtMost(f64),
    AtLeast(f64),
    /// So far from 1 at the most.
    NearOne(f64),
}

fn main() -> ExitCode {
    xtask::exit(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<()> {
    let Some(name) = &arguments.name else {
        list();
        return Ok(());
    };
    let Some(benchmark) = BENCHMARKS.iter().find(|benchmark| benchmark.name == name) else {
        bail!("there is no benchmark `{name}`; `cargo xtask bench` lists them");
    };
    let figures =
        (benchmark.run)(arguments).with_context(|| format!("the benchmark `{name}` did not finish"))?;
    print_table(&figures);
    save(benchmark.name, &figures)?;
    if arguments.check { demand(&figures) } else { Ok(()) }
}

fn list() {
    for benchmark in BENCHMARKS {
        println!("{:<16}{}", benchmark.name, benchmark.about);
    }
}

fn print_table(figures: &[Figure]) {
    let width = figures.iter().map(|figure| figure.name.chars().count()).max().unwrap_or(0).max("name".len());
    println!("{:<width$}  {:>12}  {:<10}{:<18}met?", "name", "value", "unit", "must");
    for figure in figures {
        let must = figure.must.map_or(String::new(), |must| must.to_string());
        let met = match figure.must {
            None => "",
            Some(must) if must.is_met_by(figure.value) => "yes",
            Some(_) => "NO",
        };
        println!("{:<width$}  {:>12}  {:<10}{must:<18}{met}", figure.name, short(figure.value), figure.unit);
    }
}

/// `target/bench/NAME.json`: the list of figures. A value that is not a number is written as null.
fn save(name: &str, figures: &[Figure]) -> Result<()> {
    let directory = root().join("target/bench");
    let path = directory.join(format!("{name}.json"));
    fs::create_dir_all(&directory)
        .and_then(|()| fs::write(&path, serde_json::to_string_pretty(figures)? + "\n"))
        .with_context(|| format!("cannot keep the figures in {}", path.display()))
}

fn demand(figures: &[Figure]) -> Result<()> {
    let missed: Vec<String> = figures
        .iter()
        .filter_map(|figure| {
            let must = figure.must.filter(|must| !must.is_met_by(figure.value))?;
            Some(format!("{} is {} {}, but must be {must}", figure.name, short(figure.value), figure.unit))
        })
        .collect();
    if !missed.is_empty() {
        bail!("{}", missed.join("\n"));
    }
    Ok(())
}

impl Must {
    /// NaN meets nothing.
    fn is_met_by(self, value: f64) -> bool {
        match self {
            Self::AtMost(bound) => value <= bound,
            Self::AtLeast(bound) => value >= bound,
            Self::NearOne(bound) => (value - 1.0).abs() <= bound,
        }
    }
}

impl std::fmt::Display for Must {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtMost(bound) => write!(f, "at most {}", short(*bound)),
            Self::AtLeast(bound) => write!(f, "at least {}", short(*bound)),
            Self::NearOne(bound) => write!(f, "1 ± {}", short(*bound)),
        }
    }
}

/// Four significant digits, with an exponent where plain digits would be hard to read.
fn short(value: f64) -> String {
    if value == 0.0 || (1e-3..1e6).contains(&value.abs()) {
        let decimals = if value == 0.0 { 0 } else { (3 - value.abs().log10().floor() as i32).max(0) };
        format!("{value:.*}", decimals as usize)
    } else {
        format!("{value:.3e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(value: f64, must: Option<Must>) -> Figure {
        Figure { name: "largest difference".into(), value, unit: "nat".into(), must }
    }

    #[test]
    fn figures_that_reach_what_they_must_pass() {
        let met = [
            figure(1e-5, Some(Must::AtMost(1e-4))),
            figure(1.2, Some(Must::AtLeast(1.15))),
            figure(9.0, None),
        ];
        assert!(demand(&met).is_ok());
    }

    #[test]
    fn a_missed_figure_is_named_with_its_bound() {
        let error = demand(&[figure(2e-4, Some(Must::AtMost(1e-4)))]).unwrap_err().to_string();
        assert_eq!(error, "largest difference is 2.000e-4 nat, but must be at most 1.000e-4");
    }

    #[test]
    fn not_a_number_reaches_nothing() {
        assert!(demand(&[figure(f64::NAN, Some(Must::AtMost(1.0)))]).is_err());
        assert!(demand(&[figure(f64::NAN, Some(Must::AtLeast(1.0)))]).is_err());
    }

    #[test]
    fn a_figure_is_written_with_its_bound_by_name() {
        let written = serde_json::to_value(figure(0.5, Some(Must::AtLeast(1.15)))).unwrap();
        let expected = serde_json::json!({
            "name": "largest difference", "value": 0.5, "unit": "nat", "must": { "at_least": 1.15 }
        });
        assert_eq!(written, expected);
    }
}
