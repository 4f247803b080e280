//! A stage computed in this process, by an [`Engine`].

mod check;
mod reduced;
mod sums;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use self::reduced::Reduced;
use self::sums::StepSums;
use crate::config::Architecture;
use crate::engine::{Dtype, Engine, NO_TARGET, Shape, Span};
use crate::gpt2::{BlockKept, Pass, Places, Unit, block_kept_elements};
use crate::layout::{Initial, Layout, Parameter};
use crate::lots::{Lots, Node};
use crate::optimiser::Rule;
use crate::random;
use crate::stage::{
    Commit, Folded, Hidden, Input, Keep, Loss, Meta, Microbatch, Output, Pending, Prepared, Stage,
    StageError, State, Ticket, Want,
};

/// A contiguous run of a model's units on an engine.
pub struct LocalStage<E: Engine> {
    engine: Arc<E>,
    architecture: Architecture,
    rule: Rule,
    seed: u64,
    units: Vec<PlacedUnit>,
    /// Where parameters stand in weights and moments.
    layout: Layout,
    /// Where each parameter's gradients stand: a slot for each use.
    uses: BTreeMap<String, Uses>,
    gradient_len: usize,

    version: u64,
    weights: E::Buffer,
    moments: Vec<E::Buffer>,

    last_id: u64,
    waiting: BTreeMap<u64, Waiting<E::Buffer>>,
    pending: BTreeMap<u64, E::Buffer>,
    sums: Option<StepSums<E::Buffer>>,
    reduced: Option<Reduced<E::Buffer>>,
}

/// A unit with the places of its parameters.
struct PlacedUnit {
    unit: Unit,
    weights: Places,
    gradient: Places,
}

/// The uses of a parameter.
struct Uses {
    /// In this stage, in the order of units.
    slots: Vec<Span>,
    /// In the whole model.
    total: usize,
    /// Whether this stage has the model's first use, and so counts it in the norm.
    counted: bool,
}

/// A forward pass that waits for its backward.
struct Waiting<B> {
    microbatch: Microbatch,
    meta: Meta,
    input: Input,
    /// What units kept; `None` when it is to be computed again from the input.
    kept: Option<Vec<UnitKept<B>>>,
    loss: Option<Loss>,
}

/// What a unit kept of its forward pass.
enum UnitKept<B> {
    Embedding,
    Block(BlockKept<B>),
    /// The head's input.
    Head(B),
}

impl<E: Engine> LocalStage<E> {
    /// The stage of the model's units `range`, at version 0 with its initial weights.
    pub fn new(
        engine: Arc<E>,
        architecture: Architecture,
        range: Range<usize>,
        rule: Rule,
        seed: u64,
    ) -> LocalStage<E> {
        let mut layout = Layout::default();
        let mut uses = BTreeMap::new();
        let mut gradient_len = 0;
        let mut units = Vec::new();
        for (number, unit) in architecture.units().into_iter().enumerate() {
            let here = range.contains(&number);
            let (mut weights, mut gradient) = (Vec::new(), Vec::new());
            for parameter in architecture.parameters(unit) {
                let entry = uses.entry(parameter.name.clone()).or_insert_with(|| Uses {
                    slots: Vec::new(),
                    total: 0,
                    counted: here,
                });
                entry.total += 1;
                if here {
                    let slot = Span { start: gradient_len, len: parameter.elements() };
                    gradient_len += slot.len;
                    entry.slots.push(slot);
                    gradient.push(slot);
                    weights.push(layout.place(&parameter));
                }
            }
            if here {
                units.push(PlacedUnit {
                    unit,
                    weights: Places::new(&architecture, unit, &weights),
                    gradient: Places::new(&architecture, unit, &gradient),
                });
            }
        }
        uses.retain(|_, uses| !uses.slots.is_empty());
        let mut weights = engine.zeros(layout.len());
        for (parameter, span) in layout.entries() {
            engine.write(&mut weights, span.start, &initial_bytes(engine.dtype(), seed, parameter));
        }
        let moments = (0..rule.moments()).map(|_| engine.zeros(layout.len())).collect();
        LocalStage {
            engine,
            architecture,
            rule,
            seed,
            units,
            layout,
            uses,
            gradient_len,
            version: 0,
            weights,
            moments,
            last_id: 0,
            waiting: BTreeMap::new(),
            pending: BTreeMap::new(),
            sums: None,
            reduced: None,
        }
    }

    fn is_first(&self) -> bool {
        self.units.first().is_some_and(|placed| placed.unit == Unit::Embedding)
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Runs the units on a checked microbatch: hidden states (none from the last stage), and what units kept.
    fn run(
        &self,
        meta: &Meta,
        input: &Input,
        training: bool,
    ) -> (Option<E::Buffer>, Vec<UnitKept<E::Buffer>>) {
        let pass = self.pass(meta, input, training);
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
                    let (out, block) = pass.block(layer, places, stream);
                    x = Some(out);
                    kept.push(UnitKept::Block(block));
                }
                (Unit::Head, Places::Head { .. }, Some(stream)) => kept.push(UnitKept::Head(stream)),
                _ => unreachable!("units are in the model's order, and the input was checked"),
            }
        }
        (x, kept)
    }

    /// Runs the units backward; returns the gradient of the stage's input, but none from the first stage.
    fn run_backward(
        &self,
        meta: &Meta,
        input: &Input,
        kept: &[UnitKept<E::Buffer>],
        gradient: Option<&Hidden>,
        grads: &mut E::Buffer,
    ) -> Option<E::Buffer> {
        let pass = self.pass(meta, input, true);
        let mut d_stream = gradient.map(|hidden| self.upload(hidden));
        for (placed, kept) in self.units.iter().zip(kept).rev() {
            match (kept, &placed.weights, &placed.gradient, d_stream.as_mut()) {
                (
                    UnitKept::Head(x),
                    &Places::Head { norm, table },
                    &Places::Head { norm: to, table: to_table },
                    None,
                ) => {
                    d_stream = Some(self.engine.head_loss_backward(
                        x,
                        &self.weights,
                        norm,
                        table,
                        &meta.targets,
                        grads,
                        to,
                        to_table,
                    ));
                }
                (UnitKept::Block(block), Places::Block(at), Places::Block(to), Some(d_stream)) => {
                    let Unit::Block(layer) = placed.unit else {
                        unreachable!("a block's places are a block's")
                    };
                    pass.block_backward(layer, at, block, d_stream, grads, to);
                }
                (UnitKept::Embedding, _, &Places::Embedding { tokens, positions }, Some(d_out)) => {
                    pass.embed_backward(d_out, grads, tokens, positions);
                    d_stream = None;
                }
                _ => unreachable!("units kept what belongs to them, and the gradient was checked"),
            }
        }
        d_stream
    }

    fn pass<'a>(&'a self, meta: &'a Meta, input: &'a Input, training: bool) -> Pass<'a, E> {
        Pass {
            engine: &self.engine,
            architecture: &self.architecture,
            weights: &self.weights,
            shape: meta.shape,
            tokens: if let Input::Tokens(tokens) = input { tokens } else { &[] },
            positions: &meta.positions,
            documents: &meta.documents,
            samples: &meta.samples,
            seed: self.seed,
            training,
        }
    }

    /// The loss, if the last unit is the head and this is what it kept.
    fn loss(&self, meta: &Meta, kept: &[UnitKept<E::Buffer>]) -> Option<Loss> {
        let (Some(UnitKept::Head(x)), Some((norm, table))) = (kept.last(), self.head()) else { return None };
        let sum = self.engine.head_loss(x, &self.weights, norm, table, &meta.targets);
        let tokens = meta.targets.iter().filter(|&&target| target != NO_TARGET).count() as u64;
        Some(Loss { sum, tokens })
    }

    fn head(&self) -> Option<(crate::engine::Norm, Span)> {
        match self.units.last()?.weights {
            Places::Head { norm, table } => Some((norm, table)),
            _ => None,
        }
    }

    fn upload(&self, hidden: &Hidden) -> E::Buffer {
        let mut buffer = self.engine.zeros(hidden.bytes.len() / hidden.dtype.size());
        self.engine.write(&mut buffer, 0, &hidden.bytes);
        buffer
    }

    fn download(&self, shape: Shape, buffer: &E::Buffer) -> Hidden {
        let bytes = self.engine.read(buffer, self.whole(buffer));
        Hidden { shape, width: self.architecture.width, dtype: self.engine.dtype(), bytes }
    }

    fn whole(&self, buffer: &E::Buffer) -> Span {
        Span { start: 0, len: self.engine.len(buffer) }
    }

    fn check_version(&self, asked: u64) -> Result<(), StageError> {
        if asked == self.version { Ok(()) } else { Err(StageError::Version { asked, have: self.version }) }
    }

    fn state(&self, state: State) -> Result<&E::Buffer, StageError> {
        let unknown = || StageError::Unknown(format!("vector {state:?}"));
        match state {
            State::Weights => Ok(&self.weights),
            State::Moment(i) => self.moments.get(i).ok_or_else(unknown),
        }
    }

    /// The elements that `bytes`, written from `start` on, would cover in a vector of `len`.
    fn elements(&self, start: usize, bytes: &[u8], len: usize) -> Result<Range<usize>, StageError> {
        let size = self.engine.dtype().size();
        check::length("bytes of the last element", 0, bytes.len() % size)?;
        let end = start.saturating_add(bytes.len() / size);
        check::piece(start, end, len)?;
        Ok(start..end)
    }

    fn shared_uses(&self, name: &str) -> Result<&Uses, StageError> {
        let uses = self.uses.get(name).filter(|uses| uses.total > 1);
        uses.ok_or_else(|| StageError::Unknown(format!("shared parameter {name}")))
    }

    fn complete_reduced(&self) -> Result<&Reduced<E::Buffer>, StageError> {
        let reduced = self.reduced.as_ref().ok_or(StageError::Incomplete { missing: self.gradient_len })?;
        reduced.complete()?;
        for (name, uses) in &self.uses {
            if uses.total > 1 && !reduced.totals.contains_key(name) {
                return Err(StageError::Incomplete { missing: uses.slots[0].len });
            }
        }
        Ok(reduced)
    }

    /// Drops all work of the step.
    fn clear(&mut self) {
        self.waiting.clear();
        self.pending.clear();
        self.sums = None;
        self.reduced = None;
    }
}

/// A parameter's gradient in a complete reduction.
fn gradient_of<'a, B>(reduced: &'a Reduced<B>, name: &str, uses: &Uses, len: usize) -> (&'a B, Span) {
    match reduced.totals.get(name) {
        Some(total) => (total, Span { start: 0, len }),
        None => (&reduced.gradient, uses.slots[0]),
    }
}

impl<E: Engine> Stage for LocalStage<E> {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn gradient_len(&self) -> usize {
        self.gradient_len
    }

    fn dtype(&self) -> Dtype {
        self.engine.dtype()
    }

    fn class(&self) -> String {
        self.engine.class()
    }

    fn version(&self) -> u64 {
        self.version
    }

    fn moments(&self) -> usize {
        self.moments.len()
    }

    fn forward(
        &mut self,
        microbatch: Microbatch,
        input: Input,
        meta: Meta,
        keep: Keep,
    ) -> Result<(Output, Ticket), StageError> {
        self.check_version(microbatch.version)?;
        check::microbatch(&self.architecture, self.engine.dtype(), self.is_first(), &input, &meta)?;
        let (hidden, kept) = self.run(&meta, &input, true);
        let loss = self.loss(&meta, &kept);
        let output = match (hidden, loss) {
            (Some(hidden), _) => Output::Hidden(self.download(meta.shape, &hidden)),
            (None, loss) => Output::Loss(loss.unwrap_or_default()),
        };
        let kept = (keep == Keep::All).then_some(kept);
        let id = self.next_id();
        self.waiting.insert(id, Waiting { microbatch, meta, input, kept, loss });
        Ok((output, Ticket(id)))
    }

    fn backward(
        &mut self,
        ticket: Ticket,
        gradient: Option<Hidden>,
    ) -> Result<(Option<Hidden>, Pending), StageError> {
        let waiting = self.waiting.get(&ticket.0).ok_or(StageError::Ticket(ticket.0))?;
        match (&gradient, self.head()) {
            (None, Some(_)) => {}
            (Some(gradient), None) => {
                let (width, dtype) = (self.architecture.width, self.engine.dtype());
                check::hidden(width, dtype, waiting.meta.shape, gradient)?;
            }
            (None, None) => return Err(StageError::Kind { expected: "a gradient", got: "nothing" }),
            (Some(_), Some(_)) => return Err(StageError::Kind { expected: "nothing", got: "a gradient" }),
        }
        let Some(waiting) = self.waiting.remove(&ticket.0) else { return Err(StageError::Ticket(ticket.0)) };
        let Waiting { microbatch, meta, input, kept, loss } = waiting;
        let kept = kept.unwrap_or_else(|| self.run(&meta, &input, true).1);
        let mut grads = self.engine.zeros(self.gradient_len);
        let d_input = self.run_backward(&meta, &input, &kept, gradient.as_ref(), &mut grads);
        let id = self.next_id();
        self.pending.insert(id, grads);
        let d_input = d_input.map(|d_input| self.download(meta.shape, &d_input));
        Ok((d_input, Pending { id, microbatch, loss }))
    }

    fn infer(&self, input: Input, meta: &Meta, want: Want) -> Result<Output, StageError> {
        check::microbatch(&self.architecture, self.engine.dtype(), self.is_first(), &input, meta)?;
        let (hidden, kept) = self.run(meta, &input, false);
        match (hidden, want, kept.last(), self.head()) {
            (Some(hidden), ..) => Ok(Output::Hidden(self.download(meta.shape, &hidden))),
            (None, Want::NextToken, Some(UnitKept::Head(x)), Some((norm, table))) => {
                let Shape { rows, columns } = meta.shape;
                let last: Vec<usize> = (1..=rows).map(|row| row * columns - 1).collect();
                Ok(Output::Logits(self.engine.head_logits(x, &self.weights, norm, table, &last)))
            }
            _ => Ok(Output::Loss(self.loss(meta, &kept).unwrap_or_default())),
        }
    }

    fn fold(&mut self, pending: Pending, lots: Lots) -> Result<Folded, StageError> {
        let Pending { id, microbatch, .. } = pending;
        self.check_version(microbatch.version)?;
        let sums = self.sums.get_or_insert_with(|| StepSums::new(lots));
        sums.check(lots, microbatch.index)?;
        let gradient = self.pending.remove(&id).ok_or(StageError::Pending(id))?;
        let all = Span { start: 0, len: self.gradient_len };
        Ok(sums.fold(microbatch.index, gradient, |sum, gradient| self.engine.add(sum, all, gradient, all)))
    }

    fn discard(&mut self, pending: Pending) {
        self.pending.remove(&pending.id);
    }

    fn forget(&mut self, ticket: Ticket) {
        self.waiting.remove(&ticket.0);
    }

    fn revoke(&mut self, lot: u32) -> Range<u32> {
        self.sums.as_mut().map_or(0..0, |sums| sums.revoke(lot))
    }

    fn held(&self) -> Vec<Node> {
        self.sums.as_ref().map(StepSums::nodes).unwrap_or_default()
    }

    fn read_sum(&self, node: Node, piece: Range<usize>) -> Result<Vec<u8>, StageError> {
        let sum = self.sums.as_ref().and_then(|sums| sums.sum(node)).ok_or(StageError::Node(node))?;
        check::piece(piece.start, piece.end, self.gradient_len)?;
        Ok(self.engine.read(sum, Span { start: piece.start, len: piece.len() }))
    }

    fn begin_reduce(&mut self) {
        self.reduced = Some(Reduced::new(self.engine.zeros(self.gradient_len), self.gradient_len));
    }

    fn write_reduced(&mut self, start: usize, bytes: &[u8]) -> Result<(), StageError> {
        let piece = self.elements(start, bytes, self.gradient_len)?;
        let missing = StageError::Incomplete { missing: self.gradient_len };
        let reduced = self.reduced.as_mut().ok_or(missing)?;
        self.engine.write(&mut reduced.gradient, start, bytes);
        reduced.note(piece);
        Ok(())
    }

    fn shared(&self) -> Vec<String> {
        self.uses.iter().filter(|(_, uses)| uses.total > 1).map(|(name, _)| name.clone()).collect()
    }

    fn contribute(&self, name: &str, before: Option<&[u8]>) -> Result<Vec<u8>, StageError> {
        let uses = self.shared_uses(name)?;
        let reduced = self.reduced.as_ref().ok_or(StageError::Incomplete { missing: self.gradient_len })?;
        reduced.complete()?;
        let mut slots = uses.slots.iter();
        let whole = Span { start: 0, len: uses.slots[0].len };
        let mut sum = self.engine.zeros(whole.len);
        // The first use of all starts the sum; it is not added to zero, which would turn −0 into 0.
        let start = match before {
            Some(before) => before.to_vec(),
            None => slots.next().map(|&slot| self.engine.read(&reduced.gradient, slot)).unwrap_or_default(),
        };
        check::length("bytes of the sum", whole.len * self.engine.dtype().size(), start.len())?;
        self.engine.write(&mut sum, 0, &start);
        for &slot in slots {
            self.engine.add(&mut sum, whole, &reduced.gradient, slot);
        }
        Ok(self.engine.read(&sum, whole))
    }

    fn settle(&mut self, name: &str, total: &[u8]) -> Result<(), StageError> {
        let len = self.shared_uses(name)?.slots[0].len;
        check::length("bytes of the sum", len * self.engine.dtype().size(), total.len())?;
        let missing = StageError::Incomplete { missing: self.gradient_len };
        let reduced = self.reduced.as_mut().ok_or(missing)?;
        let mut buffer = self.engine.zeros(len);
        self.engine.write(&mut buffer, 0, total);
        reduced.totals.insert(name.to_string(), buffer);
        Ok(())
    }

    fn prepare(&self) -> Result<Prepared, StageError> {
        let reduced = self.complete_reduced()?;
        let mut hasher = blake3::Hasher::new();
        let mut sums_of_squares = BTreeMap::new();
        for (parameter, span) in self.layout.entries() {
            let uses = &self.uses[&parameter.name];
            let (gradient, at) = gradient_of(reduced, &parameter.name, uses, span.len);
            hasher.update(&self.engine.read(gradient, at));
            if uses.counted {
                sums_of_squares.insert(parameter.name.clone(), self.engine.sum_of_squares(gradient, at));
            }
        }
        Ok(Prepared { gradient_hash: *hasher.finalize().as_bytes(), sums_of_squares })
    }

    fn apply(&mut self, commit: &Commit) -> Result<u64, StageError> {
        if commit.version.checked_add(1) == Some(self.version) {
            return Ok(self.version); // Applied before.
        }
        self.check_version(commit.version)?;
        if let Some(update) = &commit.update {
            self.complete_reduced()?;
            let Some(reduced) = self.reduced.take() else { unreachable!("it was complete a line ago") };
            for (parameter, span) in self.layout.entries() {
                let uses = &self.uses[&parameter.name];
                let (gradient, at) = gradient_of(&reduced, &parameter.name, uses, span.len);
                let (weights, moments) = (&mut self.weights, &mut self.moments);
                let decays = parameter.decays();
                self.engine.optimise(&self.rule, update, decays, weights, moments, *span, gradient, at);
            }
        }
        self.clear();
        self.version += 1;
        Ok(self.version)
    }

    fn read(&self, state: State, piece: Range<usize>) -> Result<Vec<u8>, StageError> {
        check::piece(piece.start, piece.end, self.layout.len())?;
        Ok(self.engine.read(self.state(state)?, Span { start: piece.start, len: piece.len() }))
    }

    fn write(&mut self, state: State, start: usize, bytes: &[u8]) -> Result<(), StageError> {
        self.elements(start, bytes, self.layout.len())?;
        self.state(state)?;
        let vector = match state {
            State::Weights => &mut self.weights,
            State::Moment(i) => &mut self.moments[i],
        };
        self.engine.write(vector, start, bytes);
        Ok(())
    }

    fn restore(&mut self, version: u64) {
        self.clear();
        self.version = version;
    }

    fn weight_hashes(&self) -> BTreeMap<String, [u8; 32]> {
        let hash = |span: Span| *blake3::hash(&self.engine.read(&self.weights, span)).as_bytes();
        self.layout.entries().iter().map(|(p, span)| (p.name.clone(), hash(*span))).collect()
    }

    fn plan(&self, shape: Shape, in_flight: usize, keep: Keep) -> u64 {
        let blocks = self.units.iter().filter(|placed| matches!(placed.unit, Unit::Block(_))).count();
        let kept_blocks = match keep {
            Keep::All => blocks * block_kept_elements(&self.architecture),
            Keep::Input => 0,
        };
        let kept = shape.tokens() * (self.architecture.width + kept_blocks);
        let state = self.layout.len() * (1 + self.moments.len());
        // The gradient of one microbatch, the sum of its lot, one more of sealed lots, the reduced one.
        let gradients = 4 * self.gradient_len;
        ((state + gradients + in_flight * kept) * self.engine.dtype().size()) as u64
    }
}

/// The initial value of a parameter, as bytes.
fn initial_bytes(dtype: Dtype, seed: u64, parameter: &Parameter) -> Vec<u8> {
    let count = parameter.elements();
    let values: Box<dyn Iterator<Item = f64>> = match parameter.initial {
        Initial::Zeros => Box::new(std::iter::repeat_n(0.0, count)),
        Initial::Ones => Box::new(std::iter::repeat_n(1.0, count)),
        Initial::Normal(deviation) => {
            Box::new(random::normals(seed, &parameter.name, count).map(move |x| x * deviation))
        }
    };
    match dtype {
        Dtype::F32 => values.flat_map(|x| (x as f32).to_le_bytes()).collect(),
        Dtype::F64 => values.flat_map(f64::to_le_bytes).collect(),
    }
}
