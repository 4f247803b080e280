//! From sample numbers to the contents of a microbatch.

use std::ops::Range;

use starling_corpus::{Sampler, Window};

use crate::engine::{NO_TARGET, Shape};
use crate::stage::{Input, Meta};

/// Training samples `samples` as one microbatch: what it holds depends on their numbers alone.
pub fn training(sampler: &Sampler, samples: Range<u64>, document_mask: bool) -> (Input, Meta) {
    assemble(samples.clone().collect(), samples.map(|sample| sampler.window(sample)).collect(), document_mask)
}

/// Held-out windows `windows` as one microbatch.
pub fn held_out(sampler: &Sampler, windows: Range<u64>, document_mask: bool) -> (Input, Meta) {
    assemble(windows.clone().collect(), windows.map(|index| sampler.held_out(index)).collect(), document_mask)
}

/// One row of tokens for inference, without targets; the first of them stands at `position` of its text.
pub fn text(tokens: &[u32], position: usize) -> (Input, Meta) {
    let (columns, first) = (tokens.len(), position as u32);
    let meta = Meta {
        shape: Shape { rows: 1, columns },
        samples: vec![0],
        positions: (first..first + columns as u32).collect(),
        documents: vec![0; columns],
        targets: vec![NO_TARGET; columns],
    };
    (Input::Tokens(tokens.to_vec()), meta)
}

/// Pieces of one length of a text, a row each, whose first so many targets carry no loss: they are scored elsewhere, or
/// are there for the others to be read after.
pub fn scored(pieces: Vec<(Vec<u32>, usize)>) -> (Input, Meta) {
    let (pieces, unscored): (Vec<_>, Vec<_>) = pieces.into_iter().unzip();
    let window = |tokens: Vec<u32>| Window { documents: vec![0; tokens.len()], tokens };
    let samples = (0..pieces.len() as u64).collect();
    let (input, mut meta) = assemble(samples, pieces.into_iter().map(window).collect(), false);
    for (targets, unscored) in meta.targets.chunks_exact_mut(meta.shape.columns.max(1)).zip(unscored) {
        targets[..unscored].fill(NO_TARGET);
    }
    (input, meta)
}

/// Windows as rows; one that is shorter than the longest is filled up with tokens that carry no loss.
fn assemble(samples: Vec<u64>, windows: Vec<Window>, document_mask: bool) -> (Input, Meta) {
    let columns = windows.iter().map(|window| window.tokens.len().saturating_sub(1)).max().unwrap_or(0);
    let size = windows.len() * columns;
    let mut tokens = Vec::with_capacity(size);
    let mut meta = Meta {
        shape: Shape { rows: windows.len(), columns },
        samples,
        positions: Vec::with_capacity(size),
        documents: Vec::with_capacity(size),
        targets: Vec::with_capacity(size),
    };
    for window in &windows {
        let document = |i: usize| if document_mask { window.documents[i] } else { 0 };
        let mut start = 0;
        for i in 0..columns {
            if i + 1 >= window.tokens.len() {
                tokens.push(0);
                meta.positions.push((i - start) as u32);
                meta.documents.push(meta.documents.last().copied().unwrap_or(0));
                meta.targets.push(NO_TARGET);
                continue;
            }
            if i > 0 && document(i) != document(i - 1) {
                start = i;
            }
            tokens.push(window.tokens[i]);
            meta.positions.push((i - start) as u32);
            meta.documents.push(document(i));
            // The first word of the next document is nothing that this one could tell.
            let told = document(i + 1) == document(i);
            meta.targets.push(if told { window.tokens[i + 1] } else { NO_TARGET });
        }
    }
    (Input::Tokens(tokens), meta)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_mask_restarts_positions_and_drops_the_target_across_the_bound() {
        let window = || Window { tokens: vec![5, 6, 0, 7, 8], documents: vec![0, 0, 0, 1, 1] };
        let (input, meta) = assemble(vec![9], vec![window()], true);
        assert_eq!(input, Input::Tokens(vec![5, 6, 0, 7]));
        assert_eq!(meta.positions, [0, 1, 2, 0]);
        assert_eq!(meta.documents, [0, 0, 0, 1]);
        assert_eq!(meta.targets, [6, 0, NO_TARGET, 8]);
        let (_, meta) = assemble(vec![9], vec![window()], false);
        assert_eq!(meta.positions, [0, 1, 2, 3]);
        assert_eq!(meta.targets, [6, 0, 7, 8]);
    }

    #[test]
    fn targets_that_are_scored_elsewhere_carry_no_loss() {
        let (input, meta) = scored(vec![(vec![1, 2, 3, 4], 0), (vec![3, 4, 5, 6], 2)]);
        assert_eq!(input, Input::Tokens(vec![1, 2, 3, 3, 4, 5]));
        assert_eq!(meta.targets, [2, 3, 4, NO_TARGET, NO_TARGET, 6]);
    }

    #[test]
    fn a_short_window_is_filled_up_without_loss() {
        let long = Window { tokens: vec![5, 6, 7], documents: vec![0; 3] };
        let short = Window { tokens: vec![8, 9], documents: vec![0; 2] };
        let (input, meta) = assemble(vec![0, 1], vec![long, short], false);
        assert_eq!(input, Input::Tokens(vec![5, 6, 8, 0]));
        assert_eq!(meta.targets, [6, 7, 9, NO_TARGET]);
        assert_eq!(meta.positions, [0, 1, 0, 1]);
    }
}
