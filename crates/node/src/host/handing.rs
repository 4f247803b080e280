//! How a state is handed over: read into a parcel, put in place from one; and the last updates, for who missed them.
//!
//! While a state is on its way, the run goes on: who has it then lacks a few updates. They are smaller than the state, so
//! the one who gave it keeps them for a while; a joiner catches up as long as a step takes longer than its gradient's way.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use starling_model::memory;
use starling_model::stage::{self, Reduction, Shared, Stage, State};
use starling_swarm::ids::{Payload, Step};
use starling_swarm::journal::Commit;
use starling_swarm::worker::io::StateOf;

use super::{Host, HostError, VecDeque};
use crate::parcel::{Contents, Parcel, Update};
use crate::tensor::Tensor;

/// For so many steps after a state was given, updates are kept; of large gradients fewer fit into the bytes of a state.
const KEPT_FOR: u64 = 16;

/// The last updates, oldest first, each with its vectors: no more bytes than the state has, which is sent instead then.
#[derive(Default)]
pub(super) struct Updates {
    kept: VecDeque<(Update, Vec<Bytes>)>,
    /// The version that was given last.
    given: Option<Step>,
}

impl Updates {
    fn bytes(&self) -> u64 {
        self.kept.iter().flat_map(|(_, vectors)| vectors).map(|vector| vector.len() as u64).sum()
    }

    /// Those that make one version another, if all are here.
    fn between(&self, from: Step, to: Step) -> Option<Vec<&(Update, Vec<Bytes>)>> {
        let between: Vec<_> =
            self.kept.iter().filter(|(update, _)| (from.0..to.0).contains(&update.step)).collect();
        let all = from < to && between.iter().map(|(update, _)| update.step).eq(from.0..to.0);
        all.then_some(between)
    }
}

impl Host {
    /// What a joiner needs: the updates since the version that it has, or, if they are not here, everything.
    pub(super) fn hand_over(&mut self, of: StateOf, have: Option<Step>) -> Result<Parcel, HostError> {
        self.updates.given = Some(of.version);
        match have.and_then(|have| self.updates.between(have, of.version)) {
            Some(missed) => {
                let updates = missed.iter().map(|(update, _)| update.clone()).collect();
                let vectors: Vec<&Bytes> = missed.iter().flat_map(|(_, vectors)| vectors).collect();
                let lengths = vectors.iter().map(|vector| vector.len() as u64).collect();
                let read = |vector: usize, range: Range<u64>| {
                    Ok(vectors[vector].slice(range.start as usize..range.end as usize))
                };
                Parcel::pack(of, Contents::Updates(updates), lengths, read)
            }
            None => self.read_state(of),
        }
    }

    /// The state that is here.
    pub(super) fn read_state(&mut self, of: StateOf) -> Result<Parcel, HostError> {
        let stage = self.held()?;
        let size = stage.dtype().size();
        let lengths = vec![(stage.layout().len() * size) as u64; 1 + stage.moments()];
        Parcel::pack(of, Contents::State, lengths, |vector, range| {
            let piece = range.start as usize / size..range.end as usize / size;
            Ok(stage.read(of.version.0, vector_of(vector), piece)?.into())
        })
    }

    /// An update is about to be applied: keeps it for those who were given the state before it, if there is room.
    pub(super) fn remember(&mut self, commit: &Commit) {
        let wanted = self.updates.given.is_some_and(|given| commit.step.0 < given.0 + KEPT_FOR);
        if !wanted || !self.has_room() || self.try_to_remember(commit).is_err() {
            self.updates = Updates::default();
        }
    }

    /// Whether a copy of the state would fit into this machine's memory twice.
    pub(super) fn has_room(&self) -> bool {
        let state = self
            .stage
            .as_ref()
            .map_or(0, |stage| (stage.layout().len() * stage.dtype().size() * (1 + stage.moments())) as u64);
        memory::available_bytes().is_none_or(|available| available > 2 * state)
    }

    fn try_to_remember(&mut self, commit: &Commit) -> Result<(), HostError> {
        let (reducing, step) = (self.reducing, commit.step.0);
        let stage = self.held()?;
        let shared: Vec<String> = stage.shared().into_iter().map(|Shared { name, .. }| name).collect();
        let most = (stage.layout().len() * stage.dtype().size() * (1 + stage.moments())) as u64;
        let mut vectors = Vec::new();
        if !commit.skipped {
            vectors.push(stage.read_reduced(reducing, 0..stage.gradient_len())?.into());
            for name in &shared {
                vectors.push(stage.read_settled(reducing, name)?.into());
            }
        }
        let constants = (!commit.skipped).then(|| commit.constants.clone());
        self.updates.kept.push_back((Update { step, constants, shared }, vectors));
        while self.updates.bytes() > most {
            self.updates.kept.pop_front();
        }
        Ok(())
    }

    /// Puts updates that were missed onto the state that is here. Nothing is changed unless all of them fit.
    pub(super) fn catch_up(&mut self, of: StateOf, payload: Payload) -> Result<(), HostError> {
        let tensor = self.tensors.take(payload).ok_or(HostError::Gone)?;
        let Tensor::Parcel(parcel) = &*tensor else { return Err(HostError::Kind) };
        let Contents::Updates(updates) = &parcel.outline.contents else { return Err(HostError::Kind) };
        let stage = self.stage.as_mut().ok_or(HostError::Gone)?;
        let version = stage.version();
        if parcel.outline.of != of || !updates.iter().map(|update| update.step).eq(version..of.version.0) {
            return Err(HostError::Gone);
        }
        let commits = commits_of(parcel, updates, &**stage)?;
        self.updates = Updates::default();
        for (commit, gradient, totals) in commits {
            self.attempts += 1;
            let reduction = Reduction { step: commit.step, attempt: self.attempts };
            if commit.update.is_some() {
                stage.begin_reduce(reduction)?;
                stage.write_reduced(reduction, 0, &gradient)?;
                for (name, total) in totals {
                    stage.settle(reduction, &name, &total)?;
                }
            }
            stage.apply(&commit)?;
        }
        Ok(())
    }
}

/// A commit, the reduced gradient that it applies, and the sums over all uses of shared parameters.
type Missed = (stage::Commit, Bytes, Vec<(String, Bytes)>);

/// The updates of a parcel, checked against the stage.
fn commits_of(parcel: &Parcel, updates: &[Update], stage: &dyn Stage) -> Result<Vec<Missed>, HostError> {
    let size = stage.dtype().size();
    let shared: Vec<(String, usize)> =
        stage.shared().into_iter().map(|shared| (shared.name, shared.elements * size)).collect();
    let mut vectors = whole_vectors(parcel).into_iter();
    let mut next =
        |bytes: usize| vectors.next().filter(|vector| vector.len() == bytes).ok_or(HostError::Kind);
    let mut missed = Vec::new();
    for Update { step, constants, .. } in updates {
        let (mut gradient, mut totals, mut update) = (Bytes::new(), Vec::new(), None);
        if let Some(constants) = constants {
            update = Some(serde_json::from_slice(constants).map_err(|_| HostError::Kind)?);
            gradient = next(stage.gradient_len() * size)?;
            for (name, bytes) in &shared {
                totals.push((name.clone(), next(*bytes)?));
            }
        }
        missed.push((stage::Commit { step: *step, version: *step, update }, gradient, totals));
    }
    Ok(missed)
}

fn whole_vectors(parcel: &Parcel) -> Vec<Bytes> {
    let mut vectors = vec![BytesMut::new(); parcel.outline.vectors.len()];
    for (vector, _, chunk) in parcel.pieces() {
        vectors[vector].extend_from_slice(chunk);
    }
    vectors.into_iter().map(BytesMut::freeze).collect()
}

/// Puts a state in place, if it is of this stage.
pub(super) fn put_state(parcel: &Parcel, of: StateOf, stage: &mut dyn Stage) -> Result<(), HostError> {
    let (size, outline) = (stage.dtype().size(), &parcel.outline);
    let length = (stage.layout().len() * size) as u64;
    let fits = outline.of == of
        && outline.contents == Contents::State
        && outline.vectors.len() == 1 + stage.moments();
    if !fits || outline.vectors.iter().any(|&bytes| bytes != length) {
        return Err(HostError::Kind);
    }
    for (vector, start, chunk) in parcel.pieces() {
        stage.write(vector_of(vector), start as usize / size, chunk)?;
    }
    Ok(())
}

fn vector_of(vector: usize) -> State {
    vector.checked_sub(1).map_or(State::Weights, State::Moment)
}
