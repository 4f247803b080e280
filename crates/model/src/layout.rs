//! Flat layouts: which parameter stands where in a stage's vectors.
//!
//! A stage has two. The *weights* layout holds each parameter once; weights, moments and gradients that are
//! ready to apply follow it. The *uses* layout has a slot for each use of a parameter by a unit: where blocks
//! share weights, or the head uses the embeddings, a parameter has several. Gradients are summed per use, over
//! microbatches and lots, and only then over uses, in the order of the units: so the bits of the sum do not
//! depend on where the model is cut into stages.

use std::collections::BTreeMap;

use crate::engine::Span;

/// The table of learnt positions: of all parameters only this one depends on a model's context.
pub(crate) const POSITIONS: &str = "wpe.weight";

/// A parameter: what it is called, its shape, how it starts.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its name, Hugging Face's.
    pub name: String,
    /// Its shape, row-major.
    pub shape: Vec<usize>,
    /// How it starts.
    pub initial: Initial,
}

impl Parameter {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// What it takes of a tensor of this shape: all, or of more positions than it has the first. None if that is of
    /// another model.
    pub fn part_of<'a>(&self, shape: &[usize], bytes: &'a [u8]) -> Option<&'a [u8]> {
        if shape == self.shape {
            return Some(bytes);
        }
        let is_longer = matches!((shape, &self.shape[..]), ([had, a], [rows, b]) if had > rows && a == b);
        let rows = *self.shape.first().filter(|_| is_longer && self.name == POSITIONS)?;
        bytes.get(..bytes.len() / shape[0] * rows)
    }

    /// Whether weight decay concerns it: matrices yes, biases and norms no.
    pub fn decays(&self) -> bool {
        self.shape.len() > 1
    }
}

/// The initial value of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initial {
    /// All zeros.
    Zeros,
    /// All ones.
    Ones,
    /// Normal with this standard deviation.
    Normal(f64),
}

/// Parameters one after another in one flat vector, each once.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    entries: Vec<(Parameter, Span)>,
    by_name: BTreeMap<String, usize>,
    len: usize,
}

impl Layout {
    /// Places `parameter` at the end, unless one of that name has a place already; returns its place.
    pub fn place(&mut self, parameter: &Parameter) -> Span {
        if let Some(span) = self.span(&parameter.name) {
            return span;
        }
        let span = Span { start: self.len, len: parameter.elements() };
        self.len += span.len;
        self.by_name.insert(parameter.name.clone(), self.entries.len());
        self.entries.push((parameter.clone(), span));
        span
    }

    /// Where the parameter of that name stands.
    pub fn span(&self, name: &str) -> Option<Span> {
        self.by_name.get(name).map(|&entry| self.entries[entry].1)
    }

    /// All parameters and their places, in order.
    pub fn entries(&self) -> &[(Parameter, Span)] {
        &self.entries
    }

    /// Elements of the flat vector.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no parameter.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
