//! `starling run audit` and `starling run history`: what the event logs of a run prove, and say.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use starling_node::audit::{audit, merge};
use starling_node::events::{self, Line};
use starling_node::journal;
use starling_swarm::journal::Record;

use crate::run_folder::RunFolder;
use crate::{train, words};

/// Findings that are shown.
const MOST_SHOWN: usize = 20;
/// How deep the logs of peers may lie in a folder.
const DEPTH: u32 = 3;

#[derive(clap::Args)]
pub struct Arguments {
    /// The run's folder
    folder: PathBuf,
    /// Folders with the logs of peers on other machines (what they wrote into --dir)
    more: Vec<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let (coordinator, peers) = logs(arguments)?;
    let train = train::parse(&RunFolder::at(&arguments.folder).run_file(), &[])?.train;
    let peers: Vec<Vec<Line>> = peers.into_iter().map(|(_, lines)| lines).collect();
    let path = RunFolder::at(&arguments.folder).journal();
    let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let (journal, _) = journal::read::<Record>(&bytes)
        .map_err(|(line, why)| anyhow!("line {line} of {} is damaged: {why}", path.display()))?;
    let found = audit(&train, &journal, &coordinator, &peers);
    let mut text = format!(
        "{} steps from step {} on, {} microbatch passes counted exactly once, {} logs of peers",
        found.steps,
        found.first,
        words::count(found.counted as f64),
        peers.len()
    );
    if found.skipped > 0 {
        let _ = write!(text, ", {} steps skipped", found.skipped);
    }
    for (what, list) in [("wrong", &found.wrong), ("cannot be told", &found.unknown)] {
        for line in list.iter().take(MOST_SHOWN) {
            let _ = write!(text, "\n{what}: {line}");
        }
        if list.len() > MOST_SHOWN {
            let _ = write!(text, "\n… and {} more", list.len() - MOST_SHOWN);
        }
    }
    let verdict = match (found.is_proof(), found.wrong.is_empty()) {
        (true, _) => "every sample was counted once in every stage and step",
        (false, true) => "NOT PROVED: logs are missing; name the folders of the other machines' peers",
        (false, false) => "NOT SO: the training was changed",
    };
    words::show(&format!("{text}\n{verdict}\n"))?;
    Ok(if found.is_proof() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints all events in one order, in which nothing stands before its cause.
pub fn history(arguments: &Arguments) -> Result<ExitCode> {
    let (coordinator, peers) = logs(arguments)?;
    let all = peers.iter().map(|(name, lines)| (name.as_str(), &lines[..]));
    let mut text = String::new();
    for (name, line) in merge(all.chain([("coordinator", &coordinator[..])])) {
        let _ = writeln!(text, "{:>8} {name:<12} {}", line.clock, serde_json::to_string(&line.event)?);
    }
    words::show(&text)
}

/// A log, by the name of its folder.
type Named = (String, Vec<Line>);

fn logs(arguments: &Arguments) -> Result<(Vec<Line>, Vec<Named>)> {
    let path = RunFolder::at(&arguments.folder).events();
    if !path.exists() {
        bail!("{} has no event log; name the folder of a run", arguments.folder.display());
    }
    let coordinator = events::read(&path)?.lines;
    let mut peers = Vec::new();
    for folder in std::iter::once(&arguments.folder.join("peers")).chain(&arguments.more) {
        find(folder, DEPTH, &mut peers).with_context(|| format!("cannot read {}", folder.display()))?;
    }
    Ok((coordinator, peers))
}

fn find(folder: &Path, depth: u32, found: &mut Vec<Named>) -> Result<()> {
    let log = folder.join("events.jsonl");
    if log.exists() {
        let name =
            folder.file_name().map_or_else(|| "peer".into(), |name| name.to_string_lossy().into_owned());
        found.push((name, events::read(&log)?.lines));
    }
    if depth > 0 && folder.is_dir() {
        let mut inside: Vec<PathBuf> =
            std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
        inside.sort();
        for path in inside.iter().filter(|path| path.is_dir()) {
            find(path, depth - 1, found)?;
        }
    }
    Ok(())
}
