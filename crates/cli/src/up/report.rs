//! What is left of a run on this machine: how good the model is, and whether the weights are those of one process.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::{Context, Result};
use starling_model::checkpoint::Checkpoint;
use starling_node::events::{self, Event, EventLog, guarded};

use crate::hosting::Hosted;
use crate::interrupt::Interrupt;
use crate::report::{self, Beside, Yardsticks};
use crate::session::Session;
use crate::words;

pub fn write(hosted: &Hosted, deaths: u32, compare: u64, interrupt: &Interrupt) -> Result<ExitCode> {
    let folder = &hosted.folder;
    let mut session = open(hosted)?;
    let (beside, is_same) = one_process(hosted, &mut session, compare, interrupt)?;
    let newest = folder.checkpoints_newest_first()?.into_iter().next().context("there is no checkpoint")?;
    session.restore(&Checkpoint::open(&newest)?)?;
    let step = session.reference.steps_done();
    let is_tried =
        |line: &events::Line| matches!(line.event, Event::Evaluated { step: of, .. } if of == step);
    let tried = events::read(&folder.events())?.lines.iter().any(is_tried);
    if !tried && let Some((loss, bits_per_byte)) = session.held_out(0)? {
        let event = Event::Evaluated { step, loss: loss.mean(), tokens: loss.tokens, bits_per_byte };
        EventLog::open(&folder.events())?.append(event)?;
    }
    let yardsticks = Yardsticks::measure(session.reference.sampler());
    let lines = [format!("{deaths} processes died on the way")].into_iter().chain(beside.lines);
    let beside = Beside { lines: lines.collect(), ..beside };
    let report = report::write(folder, &session, yardsticks.as_ref(), &beside)?;
    let shown = folder.path().display();
    words::show(&format!(
        "\n{report}\n- plot: {shown}/loss.svg\n- proof: starling run audit {shown}\n- try it: starling generate {shown}\n"
    ))?;
    Ok(if is_same { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn open(hosted: &Hosted) -> Result<Session> {
    let mut run = hosted.charter.run.clone();
    run.train.threads = 0;
    Session::open(run, &hosted.folder.corpus())
}

/// The first steps of the same training in one process, beside the swarm's; and whether the weights are the same.
fn one_process(
    hosted: &Hosted,
    session: &mut Session,
    compare: u64,
    interrupt: &Interrupt,
) -> Result<(Beside, bool)> {
    let steps = compare.min(hosted.charter.run.train.steps);
    if steps > 0 {
        words::tell(&format!("training the first {steps} steps in one process, to compare"));
    }
    let history = events::read(&hosted.folder.events())?;
    let (_, left_out) = guarded(&hosted.charter.run.guard, &history);
    left_out.into_iter().for_each(|step| session.reference.leave_out(step..=step));
    let swarm: BTreeMap<u64, String> = history
        .lines
        .into_iter()
        .filter_map(|line| match line.event {
            Event::Weights { step, weights } => Some((step, weights)),
            _ => None,
        })
        .collect();
    let (mut losses, mut compared, mut same) = (BTreeMap::new(), 0, 0);
    while session.reference.steps_done() < steps && !interrupt.asked() {
        let report = session.reference.step()?;
        losses.insert(report.step, report.loss.mean());
        if let Some(weights) = swarm.get(&report.step) {
            compared += 1;
            same += u64::from(*weights == session.reference.weights_hash());
        }
    }
    let verdict = match (compared, same == compared) {
        (0, _) => return Ok((Beside { name: "one process".into(), losses, lines: Vec::new() }, true)),
        (_, true) => "**the same, bit for bit**",
        (_, false) => "**NOT the same**",
    };
    let line = format!(
        "weights after each of the first {compared} steps against those of one process: {same} equal, {verdict}"
    );
    Ok((Beside { name: "one process".into(), losses, lines: vec![line] }, same == compared))
}
