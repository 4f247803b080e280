//! The emulated engine: real shapes, modelled time, no arithmetic. Every number that it gives is zero, and everything
//! around it (tensors on the wire, sums, states) has its true size. It shows how a run would go on devices that are
//! not here, and many of them on one machine.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{Activation, Attention, Dtype, Engine, Linear, NO_TARGET, Norm, Shape, Span};
use crate::optimiser::{Rule, Update};
use crate::random::Dropout;

/// Operations that an update takes for each element.
const UPDATE: usize = 12;

/// See the module's head.
pub struct Emulated {
    operations_per_ns: f64,
    /// Operations whose time has not passed yet.
    owed: AtomicU64,
}

impl Emulated {
    /// A device that does so many 10¹² operations a second.
    pub fn new(tflops: f64) -> Emulated {
        Emulated { operations_per_ns: tflops * 1e3, owed: AtomicU64::new(0) }
    }

    fn owe(&self, operations: usize) {
        self.owed.fetch_add(operations as u64, Ordering::Relaxed);
    }

    /// Forward through a matrix: a multiplication and an addition for each weight and token.
    fn owe_product(&self, x: usize, linear: Linear) {
        self.owe(2 * x * linear.outputs);
    }
}

impl Engine for Emulated {
    /// Its length.
    type Buffer = usize;
    type Kept = ();

    /// The time of all operations passes at their end.
    fn inside<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        let began = Instant::now();
        let result = work();
        let nanoseconds = self.owed.swap(0, Ordering::Relaxed) as f64 / self.operations_per_ns;
        let time = Duration::from_nanos(nanoseconds as u64);
        std::thread::sleep(time.saturating_sub(began.elapsed()));
        result
    }

    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn class(&self) -> String {
        "emulated".into()
    }

    fn zeros(&self, len: usize) -> usize {
        len
    }

    fn copy(&self, _: &usize, span: Span) -> usize {
        span.len
    }

    fn len(&self, buffer: &usize) -> usize {
        *buffer
    }

    fn read(&self, _: &usize, span: Span) -> Vec<u8> {
        // Written, not only mapped: a copy from a device takes memory and time.
        std::iter::repeat_n(0, span.len * self.dtype().size()).collect()
    }

    fn write(&self, _: &mut usize, _: usize, _: &[u8]) {}

    fn add(&self, _: &mut usize, into: Span, _: &usize, _: Span) {
        self.owe(into.len);
    }

    fn sum_of_squares(&self, _: &usize, span: Span) -> f64 {
        self.owe(2 * span.len);
        0.0
    }

    fn embed(
        &self,
        shape: Shape,
        width: usize,
        _: &[u32],
        _: &[u32],
        _: &usize,
        _: Span,
        _: Option<Span>,
        _: Dropout<'_>,
    ) -> usize {
        self.owe(shape.tokens() * width);
        shape.tokens() * width
    }

    fn embed_backward(
        &self,
        shape: Shape,
        width: usize,
        _: &[u32],
        _: &[u32],
        _: Dropout<'_>,
        _: &usize,
        _: &mut usize,
        _: Span,
        _: Option<Span>,
    ) {
        self.owe(2 * shape.tokens() * width);
    }

    fn norm_linear(&self, x: &usize, _: &usize, _: Norm, linear: Linear) -> (usize, ()) {
        self.owe_product(*x, linear);
        (x / linear.inputs * linear.outputs, ())
    }

    fn norm_linear_backward(
        &self,
        x: &usize,
        (): &(),
        _: &usize,
        _: Norm,
        linear: Linear,
        _: &usize,
        _: &mut usize,
        _: &mut usize,
        _: Norm,
        _: Linear,
    ) {
        self.owe_product(2 * x, linear);
    }

    fn rotate(&self, attention: Attention<'_>, rotation: &usize, _: &mut usize, _: bool) {
        // Two products and a sum for each element of queries and keys.
        let tokens = rotation / attention.head_width;
        self.owe(3 * tokens * (attention.width() + attention.key_width()));
    }

    fn attention(&self, shape: Shape, attention: Attention<'_>, qkv: &usize, _: Dropout<'_>) -> (usize, ()) {
        // Scores and their mixture, over half of the square.
        self.owe(2 * shape.tokens() * shape.columns * attention.heads * attention.head_width);
        debug_assert_eq!(*qkv, shape.tokens() * attention.qkv_width());
        (shape.tokens() * attention.width(), ())
    }

    fn attention_backward(
        &self,
        shape: Shape,
        attention: Attention<'_>,
        qkv: &usize,
        _: &usize,
        (): &(),
        dropout: Dropout<'_>,
        _: &usize,
    ) -> usize {
        // Twice a forward pass, and probabilities are made again.
        for _ in 0..3 {
            self.attention(shape, attention, qkv, dropout);
        }
        *qkv
    }

    fn remember(&self, _: Attention<'_>, _: &usize, _: usize, _: &mut usize) {}

    fn recall(&self, attention: Attention<'_>, _: &usize, known: usize, _: &usize) -> usize {
        let width = attention.heads * attention.head_width;
        self.owe(4 * known * width);
        width
    }

    fn linear_residual(
        &self,
        _: Shape,
        activation: Activation,
        x: &usize,
        _: &usize,
        linear: Linear,
        _: Dropout<'_>,
        residual: &usize,
    ) -> (usize, ()) {
        self.owe_product(x / activation.takes(), linear);
        (*residual, ())
    }

    fn linear_residual_backward(
        &self,
        _: Shape,
        activation: Activation,
        x: &usize,
        (): &(),
        _: &usize,
        linear: Linear,
        _: Dropout<'_>,
        _: &usize,
        _: &mut usize,
        _: Linear,
    ) -> usize {
        self.owe_product(2 * x / activation.takes(), linear);
        *x
    }

    fn head_loss(&self, x: &usize, _: &usize, norm: Norm, table: Span, targets: &[u32]) -> f64 {
        self.owe(2 * targets.len() * table.len);
        debug_assert_eq!(*x, targets.len() * norm.weight.len);
        // All words are equally likely to who knows nothing.
        let words = (table.len / norm.weight.len) as f64;
        let tokens = targets.iter().filter(|&&target| target != NO_TARGET).count();
        tokens as f64 * words.ln()
    }

    fn head_loss_backward(
        &self,
        x: &usize,
        weights: &usize,
        norm: Norm,
        table: Span,
        targets: &[u32],
        _: &mut usize,
        _: Norm,
        _: Span,
    ) -> (f64, usize) {
        self.owe(4 * targets.len() * table.len);
        (self.head_loss(x, weights, norm, table, targets), *x)
    }

    fn head_logits(&self, _: &usize, _: &usize, norm: Norm, table: Span, chosen: &[usize]) -> Vec<f32> {
        self.owe(2 * chosen.len() * table.len);
        vec![0.0; chosen.len() * table.len / norm.weight.len]
    }

    fn kept_elements(&self, heads: usize) -> usize {
        heads
    }

    fn optimise(
        &self,
        _: &Rule,
        _: &Update,
        _: bool,
        _: &mut usize,
        _: &mut [usize],
        span: Span,
        _: &usize,
        _: Span,
    ) {
        self.owe(UPDATE * span.len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_take_their_time_together() {
        let engine = Emulated::new(1e-3);
        let began = Instant::now();
        engine.inside(|| (0..4).for_each(|_| engine.owe(10_000_000)));
        let took = began.elapsed();
        assert!(took >= Duration::from_millis(40), "4 × 10⁷ operations at 10⁹ a second: {took:?}");
        engine.inside(|| ());
        assert_eq!(engine.owed.load(Ordering::Relaxed), 0);
    }
}
