//! The end of a step: what its commit carries, from what the stages tell of their reduced gradients.

use std::collections::BTreeMap;

use starling_model::reference::StepReport;
use starling_model::run::Run;
use starling_swarm::ids::Step;

use crate::host::Summary;

/// What the step came to, and the commit's constants; none if the gradient is not finite. `skipped`: how many steps
/// before it were skipped. An error: a summary is not what this version writes.
pub fn conclude(
    run: &Run,
    step: Step,
    skipped: u64,
    summaries: &[Vec<u8>],
) -> Result<(StepReport, Option<Vec<u8>>), serde_json::Error> {
    let summaries: Vec<Summary> =
        summaries.iter().map(|summary| serde_json::from_slice(summary)).collect::<Result<_, _>>()?;
    let loss = summaries.last().map(|summary| summary.loss).unwrap_or_default();
    // As in the one-process loop: parameter by parameter, in the order of names.
    let squares: BTreeMap<String, f64> = summaries.into_iter().flat_map(|s| s.sums_of_squares).collect();
    let norm = squares.values().sum::<f64>().sqrt() / loss.tokens as f64;
    let update = run.optimiser.update(step.0, run.train.steps, step.0 - skipped, loss.tokens, norm);
    let report = StepReport { step: step.0, loss, norm, lr: update.lr, skipped: !norm.is_finite() };
    let constants = if norm.is_finite() { Some(serde_json::to_vec(&update)?) } else { None };
    Ok((report, constants))
}
