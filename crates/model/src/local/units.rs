//! The computing part of a stage: its units, where their parameters stand, forward and backward through them.
//!
//! It owns no weights and remembers nothing: what must be kept between forward and backward is handed out.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::config::Architecture;
use crate::engine::{Dtype, Engine, NO_TARGET, Norm, Shape, Span, Work};
use crate::layout::Layout;
use crate::local::gradient::{Bounds, Gradient};
use crate::stage::{Hidden, Input, Keep, Loss, Meta};
use crate::transformer::{BlockKept, Pass, Places, Unit, block_kept_elements, rotation};

/// A contiguous run of a model's units on an engine.
pub struct Units<E: Engine> {
    pub engine: Arc<E>,
    pub architecture: Architecture,
    /// Where parameters stand in weights and moments.
    pub layout: Layout,
    /// Where each parameter's gradients stand: a slot for each use.
    pub uses: BTreeMap<String, Uses>,
    pub gradient_len: usize,
    /// Where each unit's part of the gradient begins.
    pub bounds: Bounds,
    seed: u64,
    units: Vec<PlacedUnit>,
}

/// A unit with the places of its parameters: in the weights, and in its part of the gradient.
struct PlacedUnit {
    unit: Unit,
    weights: Places,
    gradient: Places,
    gradient_len: usize,
}

/// The uses of a parameter.
pub struct Uses {
    /// In this stage, in the order of units.
    pub slots: Vec<Span>,
    /// In the whole model.
    pub total: usize,
    /// Whether this stage has the model's first use, and so counts it in the norm.
    pub counted: bool,
}

impl Uses {
    /// Whether the whole model uses it more than once.
    pub fn is_shared(&self) -> bool {
        self.total > 1
    }

    /// Whether other stages use it too.
    pub fn is_elsewhere(&self) -> bool {
        self.total > self.slots.len()
    }
}

/// What units kept of a forward pass, in their order.
pub type Kept<E> = Vec<UnitKept<E>>;

/// A backward pass on its way: the gradient of the hidden states where it is, and the parts of the gradient behind, the
/// last unit's first.
pub struct Begun<E: Engine> {
    pub d_stream: E::Buffer,
    pub parts: Vec<E::Buffer>,
}

/// What one unit kept of its forward pass.
pub enum UnitKept<E: Engine> {
    /// A block's input: the rest is computed again.
    Input(E::Buffer),
    Embedding,
    Block(BlockKept<E>),
}

impl<E: Engine> Units<E> {
    /// Units `range` of the model.
    pub fn new(engine: Arc<E>, architecture: Architecture, range: Range<usize>, seed: u64) -> Units<E> {
        let mut layout = Layout::default();
        let mut uses = BTreeMap::new();
        let mut bounds = vec![0];
        let mut units = Vec::new();
        for (number, unit) in architecture.units().into_iter().enumerate() {
            let here = range.contains(&number);
            let (mut weights, mut gradient, mut len) = (Vec::new(), Vec::new(), 0);
            let begin = bounds[bounds.len() - 1];
            for parameter in architecture.parameters(unit) {
                let none = || Uses { slots: Vec::new(), total: 0, counted: here };
                let entry = uses.entry(parameter.name.clone()).or_insert_with(none);
                entry.total += 1;
                if here {
                    let slot = Span { start: len, len: parameter.elements() };
                    len += slot.len;
                    entry.slots.push(Span { start: begin + slot.start, ..slot });
                    gradient.push(slot);
                    weights.push(layout.place(&parameter));
                }
            }
            if here {
                let weights = Places::new(&architecture, unit, &weights);
                let gradient = Places::new(&architecture, unit, &gradient);
                units.push(PlacedUnit { unit, weights, gradient, gradient_len: len });
                bounds.push(begin + len);
            }
        }
        uses.retain(|_, uses| !uses.slots.is_empty());
        let (gradient_len, bounds) = (bounds[bounds.len() - 1], bounds.into());
        Units { engine, architecture, layout, uses, gradient_len, bounds, seed, units }
    }

    /// Whether tokens come in.
    pub fn is_first(&self) -> bool {
        self.units.first().is_some_and(|placed| placed.unit == Unit::Embedding)
    }

    /// Whether the loss comes out.
    pub fn is_last(&self) -> bool {
        self.last().is_some_and(|placed| placed.unit == Unit::Head)
    }

    /// Forward on a checked microbatch: the hidden states behind the last unit, in the last stage those before the head,
    /// and what units kept: nothing if `keep` is none, and then nothing is dropped out either.
    pub fn forward(
        &self,
        weights: &E::Buffer,
        meta: &Meta,
        input: &Input,
        keep: Option<Keep>,
    ) -> (E::Buffer, Kept<E>) {
        let pass = self.pass(weights, meta, input, keep.is_some());
        let mut x = match input {
            Input::Tokens(_) => None,
            Input::Hidden(hidden) => Some(self.upload(hidden)),
        };
        let mut kept = Vec::with_capacity(self.units.len());
        for placed in &self.units {
            match (placed.unit, &placed.weights, x.take()) {
                (Unit::Embedding, &Places::Embedding { tokens, positions }, None) => {
                    x = Some(pass.embed(tokens, positions));
                    kept.push(UnitKept::Embedding);
                }
                (Unit::Block(layer), Places::Block(places), Some(stream)) => {
                    let whole = Span { start: 0, len: self.engine.len(&stream) };
                    let input = (keep == Some(Keep::Input)).then(|| self.engine.copy(&stream, whole));
                    let (out, block) = pass.block(layer, places, stream);
                    x = Some(out);
                    kept.extend(match input {
                        Some(input) => Some(UnitKept::Input(input)),
                        None => keep.map(|_| UnitKept::Block(block)),
                    });
                }
                (Unit::Head, Places::Head { .. }, Some(stream)) => x = Some(stream),
                _ => unreachable!("units are in the model's order, and the input was checked"),
            }
        }
        (x.unwrap_or_else(|| unreachable!("a stage has units")), kept)
    }

    /// Room for what each block remembers of a text of so many tokens.
    pub fn memories(&self, tokens: usize) -> Vec<E::Buffer> {
        let of_token = 2 * self.architecture.attention(&[]).key_width();
        (0..self.blocks()).map(|_| self.engine.zeros(tokens * of_token)).collect()
    }

    /// Forward on the next tokens of a text, of which `known` are in `memories`: the hidden states as from
    /// [`Units::forward`].
    pub fn onward(
        &self,
        weights: &E::Buffer,
        meta: &Meta,
        input: &Input,
        known: usize,
        memories: &mut [E::Buffer],
    ) -> E::Buffer {
        let pass = self.pass(weights, meta, input, false);
        let places = self.units.iter().map(|placed| &placed.weights);
        let mut x = match (input, self.units.first().map(|placed| &placed.weights)) {
            (Input::Hidden(hidden), _) => self.upload(hidden),
            (Input::Tokens(_), Some(&Places::Embedding { tokens, positions })) => {
                pass.embed(tokens, positions)
            }
            _ => unreachable!("the input was checked"),
        };
        let blocks =
            places.filter_map(|places| if let Places::Block(block) = places { Some(block) } else { None });
        for (block, memory) in blocks.zip(memories) {
            x = pass.block_onward(block, &x, known, memory);
        }
        x
    }

    /// The loss from the hidden states before the head; the last stage's.
    pub fn loss(&self, weights: &E::Buffer, meta: &Meta, x: &E::Buffer) -> Loss {
        let (norm, table) = head(self.last().map(|last| &last.weights));
        let sum = self.engine.head_loss(x, weights, norm, table, &meta.targets);
        Loss { sum, tokens: tokens_with_loss(meta) }
    }

    /// The same with the head's part of backward.
    pub fn loss_backward(&self, weights: &E::Buffer, meta: &Meta, x: &E::Buffer) -> (Loss, Begun<E>) {
        let (norm, table) = head(self.last().map(|last| &last.weights));
        let (to_norm, to_table) = head(self.last().map(|last| &last.gradient));
        let (engine, targets) = (&self.engine, &meta.targets);
        let mut part = engine.zeros(self.last().map_or(0, |last| last.gradient_len));
        let (sum, d_stream) =
            engine.head_loss_backward(x, weights, norm, table, targets, &mut part, to_norm, to_table);
        (Loss { sum, tokens: tokens_with_loss(meta) }, Begun { d_stream, parts: vec![part] })
    }

    /// Logits at the last position of each row, from the hidden states before the head.
    pub fn next_token_logits(&self, weights: &E::Buffer, meta: &Meta, x: &E::Buffer) -> Vec<f32> {
        let (norm, table) = head(self.last().map(|last| &last.weights));
        let Shape { rows, columns } = meta.shape;
        let last: Vec<usize> = (1..=rows).map(|row| row * columns - 1).collect();
        self.engine.head_logits(x, weights, norm, table, &last)
    }

    /// Backward: the gradient of the parameters and, but for the first stage, that of its input. What a unit kept is gone as
    /// soon as it was used.
    pub fn backward(
        &self,
        weights: &E::Buffer,
        meta: &Meta,
        input: &Input,
        kept: Kept<E>,
        begun: Begun<E>,
    ) -> (Gradient<E>, Option<E::Buffer>) {
        let pass = self.pass(weights, meta, input, true);
        let Begun { mut d_stream, mut parts } = begun;
        for (placed, kept) in self.units[..kept.len()].iter().zip(kept).rev() {
            let mut part = self.engine.zeros(placed.gradient_len);
            match (kept, &placed.weights, &placed.gradient) {
                (kept, Places::Block(at), Places::Block(to)) => {
                    let block = match (kept, placed.unit) {
                        (UnitKept::Block(block), Unit::Block(layer)) => Some((layer, block)),
                        (UnitKept::Input(input), Unit::Block(layer)) => {
                            Some((layer, pass.block(layer, at, input).1))
                        }
                        _ => None,
                    };
                    let Some((layer, block)) = block else { unreachable!("a block kept what is a block's") };
                    pass.block_backward(layer, at, block, &mut d_stream, &mut part, to);
                }
                (UnitKept::Embedding, _, &Places::Embedding { tokens, positions }) => {
                    pass.embed_backward(&d_stream, &mut part, tokens, positions);
                }
                _ => unreachable!("units kept what belongs to them"),
            }
            parts.push(part);
        }
        parts.reverse();
        (Gradient::new(&self.bounds, parts), (!self.is_first()).then_some(d_stream))
    }

    /// Bytes to hidden states.
    pub fn upload(&self, hidden: &Hidden) -> E::Buffer {
        let mut buffer = self.engine.zeros(hidden.bytes.len() / hidden.dtype.size());
        self.engine.write(&mut buffer, 0, &hidden.bytes);
        buffer
    }

    /// Hidden states to bytes.
    pub fn download(&self, shape: Shape, buffer: &E::Buffer) -> Hidden {
        let whole = Span { start: 0, len: self.engine.len(buffer) };
        let bytes = self.engine.read(buffer, whole);
        Hidden { shape, width: self.architecture.width, dtype: self.engine.dtype(), bytes }
    }

    /// Bytes that a stage of these units needs, with `in_flight` microbatches of `shape` between forward and backward
    /// and so many `moments`. Without allocating any of it.
    pub fn plan(&self, moments: usize, shape: Shape, in_flight: usize, keep: Keep) -> u64 {
        // Besides the gradient of one microbatch: the sum of its lot, one of sealed lots. While reducing, when
        // activations are gone: two sums at the most, and the reduced gradient.
        self.plan_with(moments, 2 * self.gradient_len, shape, in_flight, keep)
    }

    /// The same with so many elements of gradients besides the one that is being computed.
    pub fn plan_with(
        &self,
        moments: usize,
        gradients: usize,
        shape: Shape,
        in_flight: usize,
        keep: Keep,
    ) -> u64 {
        let Architecture { width, heads, .. } = self.architecture;
        let work = self.work(shape);
        let tokens = work.tokens();
        let state = (self.layout.len() * (1 + moments) + gradients) as u128;
        let block = block_kept_elements(&self.architecture) + self.engine.kept_elements(heads);
        let kept = tokens * (self.blocks() * block) as u128;
        let stream = tokens * width as u128;
        let input = if self.is_first() { 0 } else { stream };
        // What is kept of a microbatch, and what one block takes besides while its backward computes that again.
        let (kept, again) = match keep {
            Keep::All => (kept, 0),
            Keep::Input => (self.blocks() as u128 * stream, tokens * block as u128),
        };
        // The head begins backward with forward.
        let waiting = input + kept + if self.is_last() { stream + self.part_elements(Unit::Head) } else { 0 };
        // Gradients grow as what was kept becomes less: there is most of both when backward begins or when it ends.
        let begin = kept + self.part_elements(Unit::Head) + self.part_elements(Unit::Block(0));
        let computing =
            input + again + begin.max(self.gradient_len as u128) + self.engine.working_elements(work);
        let elements = state + in_flight.saturating_sub(1) as u128 * waiting + computing;
        self.bytes(elements)
    }

    /// Bytes that it needs to be asked: it holds one block's activations at a time, and the keys and values of all.
    pub fn plan_to_ask(&self, shape: Shape) -> u64 {
        let work = self.work(shape);
        let Architecture { width, heads, .. } = self.architecture;
        let block = block_kept_elements(&self.architecture) + self.engine.kept_elements(heads);
        let remembered = 2 * self.architecture.attention(&[]).key_width() * self.blocks();
        let activations = work.tokens() * (block + remembered + 2 * width) as u128;
        let elements = self.layout.len() as u128 + activations + self.engine.working_elements(work);
        self.bytes(elements)
    }

    fn work(&self, shape: Shape) -> Work {
        let Architecture { width, vocabulary, .. } = self.architecture;
        let inner = self.architecture.activation.takes() * self.architecture.inner;
        let vocabulary = if self.is_last() { vocabulary } else { 0 };
        Work { shape, width, inner, attention: self.architecture.attention(&[]), vocabulary }
    }

    fn bytes(&self, elements: u128) -> u64 {
        u64::try_from(elements * self.dtype().size() as u128).unwrap_or(u64::MAX)
    }

    /// Elements of the largest part of the gradient that is of such a unit.
    fn part_elements(&self, unit: Unit) -> u128 {
        let alike =
            |placed: &&PlacedUnit| std::mem::discriminant(&placed.unit) == std::mem::discriminant(&unit);
        self.units.iter().filter(alike).map(|placed| placed.gradient_len as u128).max().unwrap_or(0)
    }

    /// How many of its units are blocks.
    pub fn blocks(&self) -> usize {
        self.units.iter().filter(|placed| matches!(placed.unit, Unit::Block(_))).count()
    }

    fn pass<'a>(
        &'a self,
        weights: &'a E::Buffer,
        meta: &'a Meta,
        input: &'a Input,
        training: bool,
    ) -> Pass<'a, E> {
        Pass {
            engine: &self.engine,
            architecture: &self.architecture,
            weights,
            shape: meta.shape,
            tokens: if let Input::Tokens(tokens) = input { tokens } else { &[] },
            positions: &meta.positions,
            rotation: rotation(&*self.engine, &self.architecture, &meta.positions),
            documents: &meta.documents,
            samples: &meta.samples,
            seed: self.seed,
            training,
        }
    }

    fn last(&self) -> Option<&PlacedUnit> {
        self.units.last()
    }

    /// How elements are stored.
    pub fn dtype(&self) -> Dtype {
        self.engine.dtype()
    }
}

fn head(places: Option<&Places>) -> (Norm, Span) {
    match places {
        Some(&Places::Head { norm, table }) => (norm, table),
        _ => unreachable!("only the last stage has a loss"),
    }
}

fn tokens_with_loss(meta: &Meta) -> u64 {
    meta.targets.iter().filter(|&&target| target != NO_TARGET).count() as u64
}
