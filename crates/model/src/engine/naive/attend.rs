//! Causal attention of one sample: one query after another, one head after another.

use std::ops::Range;

use super::product::dot;
use super::real::Real;
use crate::engine::Attention;
use crate::random::Dropout;

/// What is the same for all queries of one sample.
#[derive(Clone, Copy)]
pub struct Sample<'a, T> {
    pub attention: Attention<'a>,
    /// The sample's documents, `t`.
    pub documents: &'a [u32],
    /// `[t, (h+2k)·w]`: query, key, value.
    pub qkv: &'a [T],
    pub dropout: Dropout<'a>,
    /// The sample's row in the microbatch.
    pub row: usize,
}

impl<T: Real> Sample<'_, T> {
    /// Writes `out[t, h·w]` and the log-sum-exp `[h, t]`.
    pub fn forward(&self, out: &mut [T], log_sum_exp: &mut [T]) {
        let (columns, width, w) = self.sizes();
        for head in 0..self.attention.heads {
            for i in 0..columns {
                let seen = self.seen(i);
                let scores: Vec<T> = seen.clone().map(|j| self.score(head, i, j)).collect();
                // Not f32::max, which would hide a NaN.
                let max = scores.iter().copied().fold(scores[0], |m, s| if s > m { s } else { m });
                let sum = scores.iter().fold(T::ZERO, |sum, &s| sum + (s - max).exp());
                let lse = max + sum.ln();
                log_sum_exp[head * columns + i] = lse;
                let out_head = &mut out[i * width + head * w..][..w];
                for (j, &score) in seen.zip(&scores) {
                    let p = (score - lse).exp() * self.kept(head, i, j);
                    for (o, &v) in out_head.iter_mut().zip(self.part(2, head, j)) {
                        *o += p * v;
                    }
                }
            }
        }
    }

    /// Writes `d_qkv[t, (h+2k)·w]`, given what `forward` wrote and the gradient of `out`.
    pub fn backward(&self, out: &[T], log_sum_exp: &[T], d_out: &[T], d_qkv: &mut [T]) {
        let (columns, width, w) = self.sizes();
        let scale = self.scale();
        for head in 0..self.attention.heads {
            for i in 0..columns {
                let here = i * width + head * w..i * width + head * w + w;
                let (out_head, d_out_head) = (&out[here.clone()], &d_out[here]);
                let overall = dot(d_out_head, out_head);
                for j in self.seen(i) {
                    let p = (self.score(head, i, j) - log_sum_exp[head * columns + i]).exp();
                    let kept = self.kept(head, i, j);
                    let d_p = kept * dot(d_out_head, self.part(2, head, j));
                    let d_score = p * (d_p - overall) * scale;
                    for x in 0..w {
                        d_qkv[self.at(0, head, i) + x] += d_score * self.part(1, head, j)[x];
                        d_qkv[self.at(1, head, j) + x] += d_score * self.part(0, head, i)[x];
                        d_qkv[self.at(2, head, j) + x] += p * kept * d_out_head[x];
                    }
                }
            }
        }
    }

    fn sizes(&self) -> (usize, usize, usize) {
        let w = self.attention.head_width;
        (self.documents.len(), self.attention.heads * w, w)
    }

    /// The positions that position `i` attends to: those before it in its document, and itself.
    fn seen(&self, i: usize) -> Range<usize> {
        let document = self.documents[i];
        let first = self.documents[..i].iter().rposition(|&other| other != document).map_or(0, |j| j + 1);
        first..i + 1
    }

    fn score(&self, head: usize, i: usize, j: usize) -> T {
        dot(self.part(0, head, i), self.part(1, head, j)) * self.scale()
    }

    fn scale(&self) -> T {
        T::ONE / T::of(self.attention.head_width as f64).sqrt()
    }

    fn kept(&self, head: usize, i: usize, j: usize) -> T {
        let element = ((head as u64) << 20 | i as u64) << 20 | j as u64;
        T::of(self.dropout.factor(self.row, element))
    }

    /// Query (0), key (1) or value (2) of a head at a position.
    fn part(&self, which: usize, head: usize, position: usize) -> &[T] {
        &self.qkv[self.at(which, head, position)..][..self.attention.head_width]
    }

    fn at(&self, which: usize, head: usize, position: usize) -> usize {
        position * self.attention.qkv_width() + self.attention.place(which, head)
    }
}
