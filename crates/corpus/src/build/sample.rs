//! The text that a tokeniser is trained on: a bounded part of the inputs, chosen by seed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::BuildError;
use super::batches::{self, Batch, Enough, Position};
use super::inputs::Input;
use super::parallel::bad_document;
use super::records::text_of;
use crate::random::Key;

/// Draws batches evenly from all inputs until `budget_bytes` of text are there, in one pass.
///
/// Every batch draws a number from the seed; those with the smallest are kept. So the sample depends on the
/// inputs, the seed and the budget, and on nothing else. `watch` is called after each batch.
pub(super) fn draw(
    inputs: &[Input],
    (field, skip_bad): (&str, bool),
    budget_bytes: usize,
    seed: u64,
    count: &Arc<AtomicU64>,
    mut watch: impl FnMut() -> Result<(), BuildError>,
) -> Result<Vec<String>, BuildError> {
    let key = Key::new(seed, "tokeniser sample");
    let mut kept: BTreeMap<(u64, u64), (Vec<String>, usize)> = BTreeMap::new();
    let (mut number, mut bytes) = (0, 0);
    let mut failed = None;
    let mut keep = |batch: Batch| -> Result<(), BuildError> {
        let place = (key.with(number).number(), number);
        number += 1;
        let is_late = kept.last_key_value().is_some_and(|(last, _)| place > *last);
        if bytes < budget_bytes || !is_late {
            let texts = texts(&batch, &inputs[batch.input], field, skip_bad)?;
            let size = texts.iter().map(String::len).sum::<usize>();
            bytes += size;
            kept.insert(place, (texts, size));
        }
        // The last one may stand out: a sample is never less than what was asked for, if there is as much.
        while let Some(entry) = kept.last_entry()
            && bytes - entry.get().1 >= budget_bytes
        {
            bytes -= entry.remove().1;
        }
        watch()
    };
    let read = batches::read(inputs, Position::default(), count, |batch| {
        batch.and_then(&mut keep).map_err(|error| {
            failed = Some(error);
            Enough
        })
    });
    match (read, failed) {
        (_, Some(error)) => Err(error),
        _ => Ok(kept.into_values().flat_map(|(texts, _)| texts).collect()),
    }
}

fn texts(batch: &Batch, input: &Input, field: &str, skip_bad: bool) -> Result<Vec<String>, BuildError> {
    let mut texts = Vec::new();
    for (document, byte) in batch.documents() {
        match text_of(document, input.form, field) {
            Ok(text) => texts.push(text.into_owned()),
            Err(_) if skip_bad => {}
            Err(trouble) => return Err(bad_document(input, byte, trouble)),
        }
    }
    Ok(texts)
}
