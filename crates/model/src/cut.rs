//! Cutting a model into stages of about equal work.

use std::ops::Range;

use crate::config::Architecture;

/// Cuts the model's units into `stages` contiguous runs so that the heaviest has as little work as possible.
/// There must be at least one unit for each stage.
pub fn cut(architecture: &Architecture, stages: usize) -> Vec<Range<usize>> {
    let work: Vec<u64> =
        architecture.units().into_iter().map(|u| architecture.forward_operations(u)).collect();
    let (mut low, mut high) = (work.iter().copied().max().unwrap_or(0), work.iter().sum::<u64>());
    // The least limit under which filling stages from the left needs no more than `stages`.
    while low < high {
        let limit = low + (high - low) / 2;
        if fill(&work, stages, limit).is_some() { high = limit } else { low = limit + 1 }
    }
    fill(&work, stages, high).expect("all the work in one stage is within the limit")
}

/// Fills stages from the left up to `limit`, leaving a unit for each stage still to come.
fn fill(work: &[u64], stages: usize, limit: u64) -> Option<Vec<Range<usize>>> {
    let mut cuts = Vec::with_capacity(stages);
    let mut start = 0;
    for stage in 0..stages {
        let last = work.len() - (stages - stage - 1);
        let mut end = start;
        let mut sum = 0;
        while end < last && sum + work[end] <= limit {
            sum += work[end];
            end += 1;
        }
        cuts.push(start..end);
        start = end;
    }
    (start == work.len() && cuts.iter().all(|cut| !cut.is_empty())).then_some(cuts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelConfig;

    #[test]
    fn every_unit_is_in_one_stage_and_no_stage_is_empty() {
        for layers in 1..9 {
            let architecture = ModelConfig { layers, ..Default::default() }.architecture(300);
            for stages in 1..=layers + 2 {
                let cuts = cut(&architecture, stages);
                assert_eq!(cuts.len(), stages);
                assert!(cuts.iter().all(|cut| !cut.is_empty()));
                assert_eq!(
                    cuts.iter().flat_map(Clone::clone).collect::<Vec<_>>(),
                    (0..layers + 2).collect::<Vec<_>>()
                );
            }
        }
    }
}
