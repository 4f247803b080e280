//! The end of a step: what its commit carries, from what the stages tell of their reduced gradients.

use std::collections::{BTreeMap, BTreeSet};

use starling_model::cut::cut;
use starling_model::reference::StepReport;
use starling_model::run::Run;
use starling_swarm::ids::{StageId, Step};

use crate::charter::Charter;
use crate::host::Summary;

/// What a summary can be in this run; what comes from a peer is looked at before it counts.
pub struct Expected {
    /// Of each stage, the names of its parameters.
    parameters: Vec<BTreeSet<String>>,
    /// Of a step, at the most.
    tokens: u64,
}

impl Expected {
    /// What the stages of this run may tell.
    pub fn of(charter: &Charter) -> Expected {
        let (run, vocabulary) = (&charter.run, charter.definition.vocabulary);
        let architecture = run.model.architecture(vocabulary);
        let units = architecture.units();
        let names = |range: std::ops::Range<usize>| {
            let parameters = units[range].iter().flat_map(|&unit| architecture.parameters(unit));
            parameters.map(|parameter| parameter.name).collect()
        };
        let parameters = cut(&architecture, run.train.stages).into_iter().map(names).collect();
        Expected { parameters, tokens: u64::from(run.train.batch) * architecture.context as u64 }
    }

    /// Why this cannot be what a member of the stage found.
    pub fn check(&self, stage: StageId, summary: &[u8]) -> Result<(), BadSummary> {
        let Summary { sums_of_squares, loss } = postcard::from_bytes(summary)?;
        let own = self.parameters.get(usize::from(stage.0));
        let foreign = |name: &&String| own.is_none_or(|own| !own.contains(*name));
        if let Some(name) = sums_of_squares.keys().find(foreign) {
            return Err(BadSummary::Foreign(stage, name.chars().take(80).collect()));
        }
        if loss.tokens > self.tokens || sums_of_squares.values().any(|&square| square < 0.0) {
            return Err(BadSummary::Impossible(stage));
        }
        Ok(())
    }
}

/// What the step came to, and the commit's constants; none if the gradient is not finite. `skipped`: how many steps
/// before it were skipped. An error: a summary is not what this version writes.
pub fn conclude(
    run: &Run,
    step: Step,
    skipped: u64,
    summaries: &[Vec<u8>],
) -> Result<(StepReport, Option<Vec<u8>>), BadSummary> {
    let summaries: Vec<Summary> =
        summaries.iter().map(|summary| postcard::from_bytes(summary)).collect::<Result<_, _>>()?;
    // The last stage tells it; after the stages' summaries come those of what they share.
    let last = run.train.stages.saturating_sub(1);
    let loss = summaries.get(last).map(|summary| summary.loss).unwrap_or_default();
    // As in the one-process loop: parameter by parameter, in the order of names.
    let squares: BTreeMap<String, f64> = summaries.into_iter().flat_map(|s| s.sums_of_squares).collect();
    let norm = squares.values().sum::<f64>().sqrt() / loss.tokens as f64;
    let update = run.optimiser.update(step.0, run.train.steps, step.0 - skipped, loss.tokens, norm);
    let report = StepReport { step: step.0, loss, norm, lr: update.lr, skipped: !norm.is_finite() };
    let constants = norm.is_finite().then(|| serde_json::to_vec(&update)).transpose()?;
    Ok((report, constants))
}

/// What a stage told of its gradient, or the constants, cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum BadSummary {
    /// A summary.
    #[error(
        "what a stage told of its gradient cannot be read ({0}); its peer is of another version, or lies"
    )]
    Summary(#[from] postcard::Error),
    /// It tells of what its stage does not have.
    #[error("what was told of {0} is of {1:?}, which is not one of its parameters")]
    Foreign(StageId, String),
    /// Squares below zero, or more tokens than a step has.
    #[error("what was told of {0} cannot be: more tokens than the step has, or squares below zero")]
    Impossible(StageId),
    /// The constants.
    #[error("the commit's constants cannot be written: {0}")]
    Constants(#[from] serde_json::Error),
}

#[cfg(test)]
mod tests {
    use starling_model::stage::Loss;

    use super::*;

    #[test]
    fn a_gradient_that_is_not_finite_is_skipped_and_not_misread() {
        for square in [f64::NAN, f64::INFINITY, 4.0] {
            let sums_of_squares = BTreeMap::from([("w".to_string(), square)]);
            let summary = Summary { sums_of_squares, loss: Loss { sum: 3.0, tokens: 2 } };
            let bytes = postcard::to_stdvec(&summary).unwrap();
            let (report, constants) = conclude(&Run::default(), Step(0), 0, &[bytes]).unwrap();
            assert_eq!(constants.is_some(), square.is_finite());
            assert_eq!(report.skipped, !square.is_finite());
        }
        assert!(conclude(&Run::default(), Step(0), 0, &[vec![255; 3]]).is_err());
    }
}
