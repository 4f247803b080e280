//! What a stage checks before it computes: whatever arrives may come from a stranger or another model.

use crate::config::Architecture;
use crate::engine::{Dtype, NO_TARGET, Shape};
use crate::stage::{Hidden, Input, Meta, StageError};

/// Checks a microbatch against the model; `first` says whether the stage takes tokens.
pub fn microbatch(
    architecture: &Architecture,
    dtype: Dtype,
    first: bool,
    input: &Input,
    meta: &Meta,
) -> Result<(), StageError> {
    let Architecture { context, vocabulary, .. } = *architecture;
    let Shape { rows, columns } = meta.shape;
    below("number of columns", columns as u64, context as u64 + 1)?;
    below("number of rows", rows as u64, 1 << 32)?;
    let tokens = meta.shape.tokens();
    if tokens == 0 {
        return Err(StageError::Empty);
    }
    length("samples", rows, meta.samples.len())?;
    length("positions", tokens, meta.positions.len())?;
    length("documents", tokens, meta.documents.len())?;
    length("targets", tokens, meta.targets.len())?;
    for &position in &meta.positions {
        below("position", position.into(), context as u64)?;
    }
    for &target in meta.targets.iter().filter(|&&target| target != NO_TARGET) {
        below("target", target.into(), vocabulary as u64)?;
    }
    match input {
        Input::Tokens(ids) if first => {
            length("tokens", tokens, ids.len())?;
            ids.iter().try_for_each(|&id| below("token", id.into(), vocabulary as u64))
        }
        Input::Hidden(states) if !first => hidden(architecture.width, dtype, meta.shape, states),
        Input::Tokens(_) => Err(StageError::Kind { expected: "hidden states", got: "tokens" }),
        Input::Hidden(_) => Err(StageError::Kind { expected: "tokens", got: "hidden states" }),
    }
}

/// Checks hidden states, or their gradient, against what the stage computes with.
pub fn hidden(width: usize, dtype: Dtype, shape: Shape, hidden: &Hidden) -> Result<(), StageError> {
    let describe = |shape: Shape, width: usize, dtype: Dtype, bytes: usize| {
        format!("{} × {} × {width} {dtype:?} in {bytes} bytes", shape.rows, shape.columns)
    };
    let expected = describe(shape, width, dtype, shape.tokens() * width * dtype.size());
    let got = describe(hidden.shape, hidden.width, hidden.dtype, hidden.bytes.len());
    if expected == got { Ok(()) } else { Err(StageError::Hidden { expected, got }) }
}

/// Checks that a piece lies inside a vector.
pub fn piece(start: usize, end: usize, len: usize) -> Result<(), StageError> {
    if start <= end && end <= len { Ok(()) } else { Err(StageError::Piece { start, end, len }) }
}

/// Checks a number of elements.
pub fn length(what: &'static str, expected: usize, got: usize) -> Result<(), StageError> {
    if expected == got { Ok(()) } else { Err(StageError::Length { what, expected, got }) }
}

fn below(what: &'static str, value: u64, limit: u64) -> Result<(), StageError> {
    if value < limit { Ok(()) } else { Err(StageError::Range { what, value, limit }) }
}
