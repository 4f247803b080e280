//! A stage computed in this process, by an [`Engine`]: its state, and the bookkeeping of steps.

mod check;
mod gradient;
mod reduced;
mod sums;
mod units;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use self::gradient::Gradient;
use self::reduced::Reduced;
use self::sums::StepSums;
pub(crate) use self::units::Units;
use self::units::{Begun, Kept, Uses};
use crate::config::Architecture;
use crate::engine::{Dtype, Engine, Shape, Span};
use crate::layout::{Initial, Layout, Parameter};
use crate::lots::{Lots, Node};
use crate::optimiser::Rule;
use crate::random;
use crate::stage::{
    Commit, Folded, Hidden, Input, Keep, Loss, Memory, Meta, Microbatch, Output, Pending, Prepared,
    Reduction, Shared, Stage, StageError, State, Ticket, Want,
};

/// A contiguous run of a model's units on an engine.
pub struct LocalStage<E: Engine> {
    units: Units<E>,
    rule: Rule,

    version: u64,
    weights: E::Buffer,
    moments: Vec<E::Buffer>,

    last_id: u64,
    waiting: BTreeMap<u64, Waiting<E>>,
    pending: BTreeMap<u64, (Microbatch, Gradient<E>)>,
    /// Sums by step: of the next one, and of the one after it while the next is reduced.
    sums: BTreeMap<u64, StepSums<Gradient<E>>>,
    reduced: BTreeMap<u64, ReducedOf<E>>,
}

/// A reduced gradient, and the vectors in which uses of shared parameters are summed.
type ReducedOf<E> = Reduced<Gradient<E>, <E as Engine>::Buffer>;

/// A forward pass that waits for its backward.
struct Waiting<E: Engine> {
    microbatch: Microbatch,
    meta: Meta,
    input: Input,
    kept: Kept<E>,
    begun: Option<Begun<E>>,
    loss: Option<Loss>,
}

/// What the blocks remember of a text.
struct Remembered<E: Engine> {
    known: usize,
    capacity: usize,
    of_blocks: Vec<E::Buffer>,
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
        LocalStage::with(Units::new(engine, architecture, range, seed), rule, seed)
    }

    /// The same from units that were laid out before.
    pub(crate) fn with(units: Units<E>, rule: Rule, seed: u64) -> LocalStage<E> {
        let mut weights = units.engine.zeros(units.layout.len());
        // What is only asked gets its weights from elsewhere.
        let drawn = units.layout.entries().iter().filter(|_| rule != Rule::Fixed);
        for (parameter, span) in drawn {
            units.engine.write(&mut weights, span.start, &initial_bytes(units.dtype(), seed, parameter));
        }
        let moments = (0..rule.moments()).map(|_| units.engine.zeros(units.layout.len())).collect();
        LocalStage {
            units,
            rule,
            version: 0,
            weights,
            moments,
            last_id: 0,
            waiting: BTreeMap::new(),
            pending: BTreeMap::new(),
            sums: BTreeMap::new(),
            reduced: BTreeMap::new(),
        }
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn check_version(&self, asked: u64) -> Result<(), StageError> {
        if asked == self.version { Ok(()) } else { Err(StageError::Version { asked, have: self.version }) }
    }

    /// A stage works on the next step, and on the one after it while the next is reduced; never on more.
    fn check_step(&self, step: u64) -> Result<(), StageError> {
        match step.checked_sub(self.version) {
            Some(0 | 1) => Ok(()),
            _ => Err(StageError::Step { step, version: self.version }),
        }
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
        let size = self.dtype().size();
        check::length("bytes of the last element", 0, bytes.len() % size)?;
        let end = start.saturating_add(bytes.len() / size);
        check::piece(start, end, len)?;
        Ok(start..end)
    }

    fn shared_uses(&self, name: &str) -> Result<&Uses, StageError> {
        let uses = self.units.uses.get(name).filter(|uses| uses.is_shared());
        uses.ok_or_else(|| StageError::Unknown(format!("shared parameter {name}")))
    }

    fn reduced(&self, reduction: Reduction) -> Result<&ReducedOf<E>, StageError> {
        let current =
            self.reduced.get(&reduction.step).filter(|reduced| reduced.attempt == reduction.attempt);
        current.ok_or(StageError::Reduction(reduction))
    }

    fn reduced_mut(&mut self, reduction: Reduction) -> Result<&mut ReducedOf<E>, StageError> {
        let current =
            self.reduced.get_mut(&reduction.step).filter(|reduced| reduced.attempt == reduction.attempt);
        current.ok_or(StageError::Reduction(reduction))
    }

    /// Refuses while any element of the gradient, or the sum over uses of a shared parameter, is missing.
    fn check_complete(&self, reduced: &ReducedOf<E>) -> Result<(), StageError> {
        reduced.complete()?;
        for (name, uses) in &self.units.uses {
            if uses.is_shared() && !reduced.totals.contains_key(name) {
                return Err(StageError::Incomplete { missing: uses.slots[0].len });
            }
        }
        Ok(())
    }

    /// Hashes a vector's bytes a piece at a time: a copy of all of them would be as large as the model.
    fn hash(&self, hasher: &mut blake3::Hasher, buffer: &E::Buffer, span: Span) {
        const PIECE: usize = 64 * 1024;
        for start in span.range().step_by(PIECE) {
            let len = PIECE.min(span.range().end - start);
            hasher.update(&self.units.engine.read(buffer, Span { start, len }));
        }
    }

    /// Drops all work of a step and of those before it.
    fn clear_up_to(&mut self, step: u64) {
        self.waiting.retain(|_, waiting| waiting.microbatch.step > step);
        self.pending.retain(|_, (microbatch, _)| microbatch.step > step);
        self.sums.retain(|&of, _| of > step);
        self.reduced.retain(|&of, _| of > step);
    }
}

/// A parameter's gradient in a complete reduction.
fn gradient_of<'a, E: Engine>(
    reduced: &'a ReducedOf<E>,
    name: &str,
    uses: &Uses,
    len: usize,
) -> (&'a E::Buffer, Span) {
    match reduced.totals.get(name) {
        Some(total) => (total, Span { start: 0, len }),
        None => reduced.gradient.slot(uses.slots[0]),
    }
}

impl<E: Engine> Stage for LocalStage<E> {
    fn layout(&self) -> &Layout {
        &self.units.layout
    }

    fn gradient_len(&self) -> usize {
        self.units.gradient_len
    }

    fn dtype(&self) -> Dtype {
        self.units.dtype()
    }

    fn class(&self) -> String {
        self.units.engine.class()
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
        self.check_step(microbatch.step)?;
        let units = &self.units;
        check::microbatch(&units.architecture, units.dtype(), units.is_first(), &input, &meta)?;
        let weights = &self.weights;
        let (hidden, kept, begun, loss) = units.engine.inside(|| {
            let (hidden, kept) = units.forward(weights, &meta, &input, Some(keep));
            if !units.is_last() {
                return (hidden, kept, None, None);
            }
            let (loss, begun) = units.loss_backward(weights, &meta, &hidden);
            (hidden, kept, Some(begun), Some(loss))
        });
        let output = match loss {
            None => Output::Hidden(units.download(meta.shape, &hidden)),
            Some(loss) => Output::Loss(loss),
        };
        let id = self.next_id();
        self.waiting.insert(id, Waiting { microbatch, meta, input, kept, begun, loss });
        Ok((output, Ticket(id)))
    }

    fn backward(
        &mut self,
        ticket: Ticket,
        gradient: Option<Hidden>,
    ) -> Result<(Option<Hidden>, Pending), StageError> {
        let waiting = self.waiting.get(&ticket.0).ok_or(StageError::Ticket(ticket.0))?;
        match (&gradient, self.units.is_last()) {
            (None, true) => {}
            (Some(gradient), false) => {
                check::hidden(self.units.architecture.width, self.dtype(), waiting.meta.shape, gradient)?;
            }
            (None, false) => return Err(StageError::Kind { expected: "a gradient", got: "nothing" }),
            (Some(_), true) => return Err(StageError::Kind { expected: "nothing", got: "a gradient" }),
        }
        let Some(waiting) = self.waiting.remove(&ticket.0) else { return Err(StageError::Ticket(ticket.0)) };
        let Waiting { microbatch, meta, input, kept, begun, loss } = waiting;
        let (units, weights) = (&self.units, &self.weights);
        let (gradient, d_input) = units.engine.inside(|| {
            let upload = || gradient.map_or_else(|| units.engine.zeros(0), |hidden| units.upload(&hidden));
            let begun = begun.unwrap_or_else(|| Begun { d_stream: upload(), parts: Vec::new() });
            units.backward(weights, &meta, &input, kept, begun)
        });
        let d_input = d_input.map(|d_input| units.download(meta.shape, &d_input));
        let id = self.next_id();
        self.pending.insert(id, (microbatch, gradient));
        Ok((d_input, Pending { id, microbatch, loss }))
    }

    fn infer(&self, input: Input, meta: &Meta, want: Want) -> Result<Output, StageError> {
        let units = &self.units;
        check::microbatch(&units.architecture, units.dtype(), units.is_first(), &input, meta)?;
        let weights = &self.weights;
        Ok(units.engine.inside(|| {
            let (hidden, _) = units.forward(weights, meta, &input, None);
            match want {
                _ if !units.is_last() => Output::Hidden(units.download(meta.shape, &hidden)),
                Want::Loss => Output::Loss(units.loss(weights, meta, &hidden)),
                Want::NextToken => Output::Logits(units.next_token_logits(weights, meta, &hidden)),
            }
        }))
    }

    fn memory(&self, tokens: usize) -> Memory {
        let of_blocks = self.units.memories(tokens);
        Memory(Box::new(Remembered::<E> { known: 0, capacity: tokens, of_blocks }))
    }

    fn proceed(&self, memory: &mut Memory, input: Input, meta: &Meta) -> Result<Output, StageError> {
        let units = &self.units;
        check::microbatch(&units.architecture, units.dtype(), units.is_first(), &input, meta)?;
        let foreign = || StageError::Unknown("memory that another stage has made".into());
        let memory: &mut Remembered<E> = memory.0.downcast_mut().ok_or_else(foreign)?;
        let Shape { rows, columns } = meta.shape;
        check::length("texts", 1, rows)?;
        check::length("next tokens", if memory.known == 0 { columns } else { 1 }, columns)?;
        check::piece(memory.known, memory.known + columns, memory.capacity)?;
        check::length("memories", units.blocks(), memory.of_blocks.len())?;
        let Remembered { known, of_blocks, .. } = memory;
        let weights = &self.weights;
        let output = units.engine.inside(|| {
            let hidden = units.onward(weights, meta, &input, *known, of_blocks);
            match units.is_last() {
                true => Output::Logits(units.next_token_logits(weights, meta, &hidden)),
                false => Output::Hidden(units.download(meta.shape, &hidden)),
            }
        });
        *known += columns;
        Ok(output)
    }

    fn fold(&mut self, pending: Pending, lots: Lots) -> Result<Folded, StageError> {
        let (microbatch, _) = self.pending.get(&pending.id).ok_or(StageError::Pending(pending.id))?;
        let Microbatch { step, index, .. } = *microbatch;
        let refuse = StageError::Lots { microbatches: lots.microbatches, lots: lots.lots };
        let known = self.sums.get(&step);
        let fits = known.map_or(index < lots.microbatches, |sums| sums.fits(lots, index));
        if !lots.is_possible() || !fits {
            return Err(refuse);
        }
        let checked = known.map_or(Ok(()), |sums| sums.check(index));
        let Some((_, gradient)) = self.pending.remove(&pending.id) else {
            return Err(StageError::Pending(pending.id));
        };
        checked?; // The gradient of a microbatch that is in already is dropped here.
        let sums = self.sums.entry(step).or_insert_with(|| StepSums::new(lots));
        let engine = &self.units.engine;
        Ok(sums.fold(index, gradient, |sum, gradient| sum.add(engine, gradient)))
    }

    fn discard(&mut self, pending: Pending) {
        self.pending.remove(&pending.id);
    }

    fn forget(&mut self, ticket: Ticket) {
        self.waiting.remove(&ticket.0);
    }

    fn merge(&mut self, step: u64) {
        let engine = &self.units.engine;
        if let Some(sums) = self.sums.get_mut(&step) {
            sums.merge(|sum, gradient| sum.add(engine, gradient));
        }
    }

    fn revoke(&mut self, step: u64, lot: u32) -> Vec<u32> {
        self.sums.get_mut(&step).map(|sums| sums.revoke(lot)).unwrap_or_default()
    }

    fn enter(
        &mut self,
        step: u64,
        lots: Lots,
        (node, of): (Option<Node>, &[u32]),
        bytes: &[u8],
    ) -> Result<(), StageError> {
        self.check_step(step)?;
        let refuse = StageError::Lots { microbatches: lots.microbatches, lots: lots.lots };
        let fits = self.sums.get(&step).is_none_or(|sums| sums.fits(lots, 0));
        let covers = node.is_none_or(|node| node.lots(lots.lots).eq(of.iter().copied()));
        if !lots.is_possible() || !fits || !covers || of.iter().any(|&lot| lot >= lots.lots) {
            return Err(refuse);
        }
        check::length("bytes of the sum", self.gradient_len() * self.dtype().size(), bytes.len())?;
        let sums = self.sums.entry(step).or_insert_with(|| StepSums::new(lots));
        if let Some(lot) = sums.begun(of.iter().copied()) {
            return Err(StageError::Twice { microbatch: lots.microbatches_of(lot).start, lot });
        }
        let engine = &self.units.engine;
        let mut sum = Gradient::zeros(&**engine, &self.units.bounds);
        sum.write(engine, 0, bytes);
        sums.enter(node, of.iter().copied(), sum, |sum, gradient| sum.add(engine, gradient));
        Ok(())
    }

    fn merged(&self, step: u64) -> Vec<u32> {
        let merged = self.sums.get(&step).and_then(StepSums::merged);
        merged.map(|(lots, _)| lots.iter().copied().collect()).unwrap_or_default()
    }

    fn read_merged(&self, step: u64, piece: Range<usize>) -> Result<Vec<u8>, StageError> {
        let merged = self.sums.get(&step).and_then(StepSums::merged);
        let (_, sum) = merged.ok_or_else(|| StageError::Unknown("sum of merged lots".into()))?;
        check::piece(piece.start, piece.end, self.gradient_len())?;
        Ok(sum.read(&self.units.engine, piece))
    }

    fn held(&self, step: u64) -> Vec<Node> {
        self.sums.get(&step).map(StepSums::nodes).unwrap_or_default()
    }

    fn read_sum(&self, step: u64, node: Node, piece: Range<usize>) -> Result<Vec<u8>, StageError> {
        let sum = self.sums.get(&step).and_then(|sums| sums.sum(node)).ok_or(StageError::Node(node))?;
        check::piece(piece.start, piece.end, self.gradient_len())?;
        Ok(sum.read(&self.units.engine, piece))
    }

    fn begin_reduce(&mut self, reduction: Reduction) -> Result<(), StageError> {
        self.check_step(reduction.step)?;
        let len = self.gradient_len();
        if self.reduced.get(&reduction.step).is_some_and(|reduced| reduced.attempt > reduction.attempt) {
            return Err(StageError::Reduction(reduction));
        }
        let gradient = Gradient::zeros(&*self.units.engine, &self.units.bounds);
        self.reduced.insert(reduction.step, Reduced::new(reduction.attempt, gradient, len));
        Ok(())
    }

    fn reduce_alone(&mut self, reduction: Reduction) -> Result<(), StageError> {
        self.check_step(reduction.step)?;
        let len = self.gradient_len();
        let Reduction { step, attempt } = reduction;
        let missing = StageError::Incomplete { missing: len };
        if !self.sums.get(&step).is_some_and(StepSums::is_whole) {
            return Err(missing);
        }
        let total = self.sums.remove(&step).and_then(StepSums::into_total).ok_or(missing)?;
        let mut reduced = Reduced::new(attempt, total, len);
        reduced.note(0..len);
        self.reduced.insert(step, reduced);
        Ok(())
    }

    fn write_reduced(&mut self, reduction: Reduction, start: usize, bytes: &[u8]) -> Result<(), StageError> {
        let piece = self.elements(start, bytes, self.gradient_len())?;
        let engine = self.units.engine.clone();
        let reduced = self.reduced_mut(reduction)?;
        reduced.gradient.write(&engine, start, bytes);
        reduced.note(piece);
        Ok(())
    }

    fn shared(&self) -> Vec<Shared> {
        let shared = self.units.uses.iter().filter(|(_, uses)| uses.is_shared());
        let about = |(name, uses): (&String, &Uses)| Shared {
            name: name.clone(),
            elements: uses.slots[0].len,
            uses: uses.total,
            elsewhere: uses.is_elsewhere(),
            first: uses.counted,
        };
        shared.map(about).collect()
    }

    fn uses(&self, reduction: Reduction, name: &str) -> Result<Vec<u8>, StageError> {
        let uses = self.shared_uses(name)?;
        let reduced = self.reduced(reduction)?;
        reduced.complete()?;
        let read = |slot: &Span| reduced.gradient.read(&self.units.engine, slot.range());
        Ok(uses.slots.iter().flat_map(read).collect())
    }

    fn settle(&mut self, reduction: Reduction, name: &str, total: &[u8]) -> Result<Option<f64>, StageError> {
        let uses = self.shared_uses(name)?;
        let (whole, counted) = (Span { start: 0, len: uses.slots[0].len }, uses.counted);
        check::length("bytes of the sum", whole.len * self.dtype().size(), total.len())?;
        let engine = self.units.engine.clone();
        let mut buffer = engine.zeros(whole.len);
        engine.write(&mut buffer, 0, total);
        let square = counted.then(|| engine.sum_of_squares(&buffer, whole));
        self.reduced_mut(reduction)?.totals.insert(name.to_string(), buffer);
        Ok(square)
    }

    fn read_reduced(&self, reduction: Reduction, piece: Range<usize>) -> Result<Vec<u8>, StageError> {
        let reduced = self.reduced(reduction)?;
        check::piece(piece.start, piece.end, self.gradient_len())?;
        Ok(reduced.gradient.read(&self.units.engine, piece))
    }

    fn read_settled(&self, reduction: Reduction, name: &str) -> Result<Vec<u8>, StageError> {
        let len = self.shared_uses(name)?.slots[0].len;
        let total = self.reduced(reduction)?.totals.get(name);
        let total = total.ok_or(StageError::Incomplete { missing: len })?;
        Ok(self.units.engine.read(total, Span { start: 0, len }))
    }

    fn settle_alone(&mut self, reduction: Reduction, name: &str) -> Result<f64, StageError> {
        let uses = self.shared_uses(name)?;
        if uses.is_elsewhere() {
            return Err(StageError::Unknown(format!("parameter {name} that is not used elsewhere")));
        }
        let (slots, engine) = (uses.slots.clone(), self.units.engine.clone());
        let reduced = self.reduced_mut(reduction)?;
        reduced.complete()?;
        let whole = Span { start: 0, len: slots[0].len };
        let (first, at) = reduced.gradient.slot(slots[0]);
        let mut total = engine.copy(first, at);
        for &slot in &slots[1..] {
            let (next, at) = reduced.gradient.slot(slot);
            engine.add(&mut total, whole, next, at);
        }
        let square = engine.sum_of_squares(&total, whole);
        reduced.totals.insert(name.to_string(), total);
        Ok(square)
    }

    fn sums_of_squares(&self, reduction: Reduction) -> Result<BTreeMap<String, f64>, StageError> {
        let reduced = self.reduced(reduction)?;
        reduced.complete()?;
        let alone = self.units.uses.iter().filter(|(_, uses)| !uses.is_shared());
        let square = |uses: &Uses| {
            let (part, at) = reduced.gradient.slot(uses.slots[0]);
            self.units.engine.sum_of_squares(part, at)
        };
        Ok(alone.map(|(name, uses)| (name.clone(), square(uses))).collect())
    }

    fn prepare(&self, reduction: Reduction) -> Result<Prepared, StageError> {
        let sums_of_squares = self.sums_of_squares(reduction)?;
        let reduced = self.reduced(reduction)?;
        let mut hasher = blake3::Hasher::new();
        for (parameter, _) in self.units.layout.entries() {
            for &slot in &self.units.uses[&parameter.name].slots {
                let (part, at) = reduced.gradient.slot(slot);
                self.hash(&mut hasher, part, at);
            }
        }
        Ok(Prepared { gradient_hash: *hasher.finalize().as_bytes(), sums_of_squares })
    }

    fn apply(&mut self, commit: &Commit) -> Result<u64, StageError> {
        if commit.version.checked_add(1) == Some(self.version) {
            return Ok(self.version); // Applied before.
        }
        self.check_version(commit.version)?;
        self.check_step(commit.step)?;
        if let Some(update) = &commit.update {
            let missing = StageError::Incomplete { missing: self.gradient_len() };
            let reduced = self.reduced.get(&commit.step).ok_or(missing)?;
            self.check_complete(reduced)?;
            for (parameter, span) in self.units.layout.entries() {
                let uses = &self.units.uses[&parameter.name];
                let (gradient, at) = gradient_of::<E>(reduced, &parameter.name, uses, span.len);
                let (weights, moments) = (&mut self.weights, &mut self.moments);
                let decays = parameter.decays();
                self.units.engine.optimise(&self.rule, update, decays, weights, moments, *span, gradient, at);
            }
        }
        self.clear_up_to(commit.step);
        self.version += 1;
        Ok(self.version)
    }

    fn read(&self, version: u64, state: State, piece: Range<usize>) -> Result<Vec<u8>, StageError> {
        self.check_version(version)?;
        check::piece(piece.start, piece.end, self.units.layout.len())?;
        Ok(self.units.engine.read(self.state(state)?, Span { start: piece.start, len: piece.len() }))
    }

    fn write(&mut self, state: State, start: usize, bytes: &[u8]) -> Result<(), StageError> {
        self.elements(start, bytes, self.units.layout.len())?;
        self.state(state)?;
        let vector = match state {
            State::Weights => &mut self.weights,
            State::Moment(i) => &mut self.moments[i],
        };
        self.units.engine.write(vector, start, bytes);
        Ok(())
    }

    fn restore(&mut self, version: u64) {
        self.clear_up_to(u64::MAX);
        self.version = version;
    }

    fn weight_hashes(&self) -> BTreeMap<String, [u8; 32]> {
        let hash = |span: Span| {
            let mut hasher = blake3::Hasher::new();
            self.hash(&mut hasher, &self.weights, span);
            *hasher.finalize().as_bytes()
        };
        self.units.layout.entries().iter().map(|(p, span)| (p.name.clone(), hash(*span))).collect()
    }

    fn plan(&self, shape: Shape, in_flight: usize, keep: Keep) -> u64 {
        self.units.plan(self.moments.len(), shape, in_flight, keep)
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
