//! What a payload stands for, and how it is written for the wire: a small head that says its shape, and its elements
//! as they are.

use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use starling_model::engine::{Dtype, Shape};
use starling_model::reduce::add_bytes;
use starling_model::stage::{Hidden, Input as StageInput, Loss, Meta};

use crate::parcel::{Outline, Parcel};

/// What a payload stands for.
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// What enters a stage, and what it must know of it.
    Activation(StageInput, Meta),
    /// The gradient of what a stage gave to the next.
    Gradient(Hidden),
    /// Sums of a part of the gradient at some nodes of the tree over lots.
    Sums(Vec<Sum>),
    /// Whole sums at some nodes of the tree over lots, in order, and the loss of each microbatch that is in them.
    Copy(Vec<Bytes>, Vec<(u32, Loss)>),
    /// What a state, or updates of it, will be made of.
    Outline(Outline),
    /// A state, or updates of it. It comes in chunks, never as a whole.
    Parcel(Arc<Parcel>),
    /// The reduced gradients of a stage's uses of what it shares with others, by name.
    Uses(Vec<(String, Bytes)>),
}

/// The sum of a part of the gradient over some lots, and their loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Sum {
    /// Little-endian elements.
    pub bytes: Bytes,
    /// The loss of those lots; only the last stage has one.
    pub loss: Loss,
}

impl Sum {
    /// Adds another one. What came over the wire is copied first: it is not ours to change.
    pub fn add(&mut self, dtype: Dtype, other: &Sum) {
        let mut bytes =
            std::mem::take(&mut self.bytes).try_into_mut().unwrap_or_else(|bytes| bytes[..].into());
        add_bytes(dtype, &mut bytes, &other.bytes);
        self.bytes = bytes.freeze();
        self.loss += other.loss;
    }
}

/// What the receiver must know to read the bytes that follow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum TensorHead {
    /// Token ids into the first stage.
    Tokens(Meta),
    /// Hidden states into any other.
    Hidden(Meta, HiddenHead),
    /// The gradient of hidden states.
    Gradient(HiddenHead),
    /// Sums: the bytes and the loss of each.
    Sums(Vec<(u64, Loss)>),
    /// Whole sums: the bytes of each, and the losses.
    Copy(Vec<u64>, Vec<(u32, Loss)>),
    /// What a state, or updates of it, will be made of.
    Outline(Outline),
    /// Uses of shared parameters: name and bytes of each.
    Uses(Vec<(String, u64)>),
}

/// The shape of hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HiddenHead {
    shape: Shape,
    width: usize,
    dtype: Dtype,
}

/// The bytes of a tensor are not what its head says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{got} bytes came where the tensor's head says {said}; the sender is broken or of another version")]
pub struct TornTensor {
    said: u128,
    got: usize,
}

impl Tensor {
    /// Bytes of its elements.
    pub fn bytes(&self) -> u64 {
        let bytes = match self {
            Tensor::Activation(StageInput::Tokens(tokens), _) => 4 * tokens.len(),
            Tensor::Activation(StageInput::Hidden(hidden), _) | Tensor::Gradient(hidden) => {
                hidden.bytes.len()
            }
            Tensor::Sums(sums) => sums.iter().map(|sum| sum.bytes.len()).sum(),
            Tensor::Copy(sums, _) => sums.iter().map(Bytes::len).sum(),
            Tensor::Outline(_) => 0,
            Tensor::Parcel(parcel) => parcel.chunks.iter().map(Bytes::len).sum(),
            Tensor::Uses(uses) => uses.iter().map(|(_, bytes)| bytes.len()).sum(),
        };
        bytes as u64
    }

    /// Its head, and its elements without a copy of them (but tokens, which are few).
    pub fn encode(self: &Arc<Tensor>) -> (TensorHead, Vec<Bytes>) {
        match &**self {
            Tensor::Activation(StageInput::Tokens(tokens), meta) => {
                let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
                (TensorHead::Tokens(meta.clone()), vec![bytes.into()])
            }
            Tensor::Activation(StageInput::Hidden(hidden), meta) => {
                (TensorHead::Hidden(meta.clone(), HiddenHead::of(hidden)), self.elements())
            }
            Tensor::Gradient(hidden) => (TensorHead::Gradient(HiddenHead::of(hidden)), self.elements()),
            Tensor::Sums(sums) => {
                let head = sums.iter().map(|sum| (sum.bytes.len() as u64, sum.loss)).collect();
                (TensorHead::Sums(head), sums.iter().map(|sum| sum.bytes.clone()).collect())
            }
            Tensor::Copy(sums, losses) => {
                let lengths = sums.iter().map(|sum| sum.len() as u64).collect();
                (TensorHead::Copy(lengths, losses.clone()), sums.clone())
            }
            Tensor::Outline(outline) => (TensorHead::Outline(outline.clone()), Vec::new()),
            Tensor::Parcel(parcel) => (TensorHead::Outline(parcel.outline.clone()), Vec::new()),
            Tensor::Uses(uses) => {
                let head = uses.iter().map(|(name, bytes)| (name.clone(), bytes.len() as u64)).collect();
                (TensorHead::Uses(head), uses.iter().map(|(_, bytes)| bytes.clone()).collect())
            }
        }
    }

    /// Puts head and elements together again; what is large is not copied. Whether the shape fits the model is for the
    /// stage to say.
    pub fn decode(head: TensorHead, body: &Bytes) -> Result<Tensor, TornTensor> {
        let exactly = |said: u128| {
            if said == body.len() as u128 { Ok(()) } else { Err(TornTensor { said, got: body.len() }) }
        };
        let sum = |lengths: &mut dyn Iterator<Item = u64>| lengths.map(u128::from).sum::<u128>();
        Ok(match head {
            TensorHead::Tokens(meta) => {
                exactly(4 * meta.targets.len() as u128)?;
                let tokens = body.as_chunks().0.iter().map(|&token| u32::from_le_bytes(token)).collect();
                Tensor::Activation(StageInput::Tokens(tokens), meta)
            }
            TensorHead::Hidden(meta, hidden) => {
                exactly(hidden.bytes())?;
                Tensor::Activation(StageInput::Hidden(hidden.whole(body)), meta)
            }
            TensorHead::Gradient(hidden) => {
                exactly(hidden.bytes())?;
                Tensor::Gradient(hidden.whole(body))
            }
            TensorHead::Sums(sums) => {
                exactly(sum(&mut sums.iter().map(|(length, _)| *length)))?;
                let mut pieces = Pieces(body.clone());
                let whole = |(length, loss)| Sum { bytes: pieces.next(length), loss };
                Tensor::Sums(sums.into_iter().map(whole).collect())
            }
            TensorHead::Copy(lengths, losses) => {
                exactly(sum(&mut lengths.iter().copied()))?;
                let mut pieces = Pieces(body.clone());
                Tensor::Copy(lengths.into_iter().map(|length| pieces.next(length)).collect(), losses)
            }
            TensorHead::Outline(outline) => {
                exactly(0)?;
                Tensor::Outline(outline)
            }
            TensorHead::Uses(uses) => {
                exactly(sum(&mut uses.iter().map(|(_, length)| *length)))?;
                let mut pieces = Pieces(body.clone());
                Tensor::Uses(uses.into_iter().map(|(name, length)| (name, pieces.next(length))).collect())
            }
        })
    }

    fn elements(self: &Arc<Tensor>) -> Vec<Bytes> {
        vec![Bytes::from_owner(Elements(self.clone()))]
    }
}

/// The elements of hidden states or their gradient, kept alive with the tensor.
struct Elements(Arc<Tensor>);

impl AsRef<[u8]> for Elements {
    fn as_ref(&self) -> &[u8] {
        match &*self.0 {
            Tensor::Activation(StageInput::Hidden(hidden), _) | Tensor::Gradient(hidden) => &hidden.bytes,
            _ => &[],
        }
    }
}

/// What is left of a body whose length was checked.
struct Pieces(Bytes);

impl Pieces {
    fn next(&mut self, length: u64) -> Bytes {
        self.0.split_to((length as usize).min(self.0.len()))
    }
}

impl HiddenHead {
    fn of(hidden: &Hidden) -> HiddenHead {
        HiddenHead { shape: hidden.shape, width: hidden.width, dtype: hidden.dtype }
    }

    fn bytes(&self) -> u128 {
        let elements = (self.shape.rows as u128).saturating_mul(self.shape.columns as u128);
        elements.saturating_mul(self.width as u128).saturating_mul(self.dtype.size() as u128)
    }

    fn whole(self, body: &[u8]) -> Hidden {
        Hidden { shape: self.shape, width: self.width, dtype: self.dtype, bytes: body.to_vec() }
    }
}
