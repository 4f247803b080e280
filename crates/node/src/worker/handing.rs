//! A worker that hands its state to others, or takes theirs.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use starling_swarm::ids::{Address, PeerId, StageId};
use starling_swarm::message::{Body, Envelope, Fence};
use starling_swarm::worker::Input;
use starling_swarm::worker::io::StateOf;

use super::Worker;
use crate::events::Event;
use crate::giving::Wanted;
use crate::host::Task;
use crate::parcel::{Outline, Parcel};
use crate::post::Post;
use crate::taking::{Came, Taking};
use crate::tensor::Tensor;

impl Worker {
    /// A machine's message came. What tells of a parcel waits until that is here.
    pub(super) fn on_message(&mut self, mut envelope: Envelope, tensor: Option<Arc<Tensor>>) {
        match (&envelope.body, envelope.from, tensor.as_deref()) {
            (Body::StateRequest { have, .. }, Address::Worker(joiner), _) => {
                self.giving.note(joiner, envelope.fence.step, *have);
            }
            (_, Address::Worker(donor), Some(Tensor::Outline(outline))) => {
                return self.on_outline(envelope, donor.0, outline.clone());
            }
            _ => {}
        }
        self.tensors.receive(&mut envelope, tensor);
        self.tell(Input::Message(envelope));
    }

    /// Somebody will give us this.
    fn on_outline(&mut self, envelope: Envelope, donor: u32, outline: Outline) {
        let awaited = self.machine.awaits(PeerId(donor), outline.of, outline.onto());
        let is_told =
            outline.message(PeerId(donor), PeerId(self.member.number()), envelope.fence) == envelope;
        if !awaited || !is_told || !outline.is_sound(self.state_bytes) {
            return;
        }
        if self.taking.as_ref().is_some_and(|taking| taking.is(donor, &outline)) {
            return;
        }
        let (stage, whole) = (outline.of.stage, outline.is_state());
        self.taking = Some(Taking::new(envelope, donor, outline, self.taking.take(), Instant::now()));
        if whole {
            // Updates are kept by the one alone who gave the state before them.
            self.member.tell_coordinator(Post::WhoHolds(stage), Vec::new());
        }
        self.ask_for_chunks();
    }

    /// These hold what we take, too.
    pub(super) fn on_holders(&mut self, stage: StageId, numbers: &[u32]) {
        let ours = self.taking.as_mut().filter(|taking| taking.outline().of.stage == stage);
        if let Some(taking) = ours.filter(|taking| taking.outline().is_state()) {
            taking.add_sources(numbers, Instant::now());
            self.ask_for_chunks();
        }
    }

    /// Asks for what is missing, or has it put in place if nothing is.
    pub(super) fn ask_for_chunks(&mut self) {
        let Some(taking) = &mut self.taking else { return };
        if taking.is_complete() {
            return self.put_in_place();
        }
        let (of, id, is_state) = (taking.outline().of, taking.id(), taking.outline().is_state());
        for (source, chunk) in taking.requests(Instant::now()) {
            self.member.tell_member(source, Post::Want(of, id, chunk, is_state), Vec::new());
        }
    }

    /// What the machine does not wait for any more is not taken any further.
    pub(super) fn take_no_more(&mut self) {
        let machine = &self.machine;
        self.taking.take_if(|taking| {
            let outline = taking.outline();
            !machine.awaits(PeerId(taking.first()), outline.of, outline.onto())
        });
    }

    /// The one that told of it has nothing to give: it is asked anew.
    fn give_up(&mut self) {
        if let Some(taking) = self.taking.take() {
            self.tell(Input::StateGone(PeerId(taking.first())));
        }
    }

    fn put_in_place(&mut self) {
        let Some(taking) = self.taking.take() else { return };
        let StateOf { stage, epoch, version } = taking.outline().of;
        let chunks = taking.came().iter().map(|(&worker, &chunks)| (worker, chunks)).collect();
        let onto = taking.outline().onto().map(|onto| onto.0);
        let took = Event::Took { stage: stage.0, epoch: epoch.0, version: version.0, onto, chunks };
        self.compute.carry_out(Task::Note(took), self.member.clock());
        if let Some((mut envelope, parcel)) = taking.finish() {
            self.tensors.receive(&mut envelope, Some(Arc::new(Tensor::Parcel(Arc::new(parcel)))));
            self.tell(Input::Message(envelope));
        }
    }

    /// Another worker's host wrote.
    pub(super) fn on_member(&mut self, from: u32, post: Post, body: Bytes) {
        match post {
            Post::Want(of, id, chunk, is_state) => self.on_want(Wanted { by: from, of, id, chunk }, is_state),
            Post::Chunk(id, chunk) => {
                let Some(taking) = self.taking.as_mut().filter(|taking| taking.id() == id) else { return };
                if taking.receive(from, chunk, body, Instant::now()) == Came::Forged {
                    (self.member.tell())(&format!("worker {from} sent something else than it should have"));
                    if from == taking.first() {
                        return self.give_up();
                    }
                }
                self.ask_for_chunks();
            }
            Post::NoParcel(id) => {
                let Some(taking) = self.taking.as_mut().filter(|taking| taking.id() == id) else { return };
                match taking.refused(from) {
                    true => self.ask_for_chunks(),
                    false => self.give_up(),
                }
            }
            _ => {}
        }
    }

    /// A chunk is wanted of us. If its parcel was told of by another, we may hold the same state.
    fn on_want(&mut self, wanted: Wanted, is_state: bool) {
        if self.send_chunk(wanted) {
            return;
        }
        if !is_state || self.giving.has_state(wanted.of) {
            return self.member.tell_member(wanted.by, Post::NoParcel(wanted.id), Vec::new());
        }
        if self.giving.wait(wanted) {
            self.compute.carry_out(Task::Read(wanted.of), self.member.clock());
        }
    }

    fn send_chunk(&mut self, wanted: Wanted) -> bool {
        let Some(chunk) = self.giving.chunk(wanted, Instant::now()) else { return false };
        self.member.tell_member(wanted.by, Post::Chunk(wanted.id, wanted.chunk), vec![chunk]);
        true
    }

    /// Our state was read, or is another one.
    pub(super) fn on_read(&mut self, of: StateOf, parcel: Option<Arc<Parcel>>) {
        if let Some(parcel) = parcel {
            self.giving.keep(parcel, None, Instant::now());
        }
        for wanted in self.giving.waited(of) {
            if !self.send_chunk(wanted) {
                self.member.tell_member(wanted.by, Post::NoParcel(wanted.id), Vec::new());
            }
        }
    }

    /// What a joiner asked for was read.
    pub(super) fn give(&mut self, to: PeerId, fence: Fence, parcel: Arc<Parcel>) {
        self.giving.keep(parcel.clone(), Some(to), Instant::now());
        self.tell_of(to, fence, &parcel);
    }

    /// Tells a joiner what it is given.
    pub(super) fn tell_of(&mut self, to: PeerId, fence: Fence, parcel: &Arc<Parcel>) {
        let envelope = parcel.outline.message(PeerId(self.member.number()), to, fence);
        self.member.send(envelope, Some(&Arc::new(Tensor::Parcel(parcel.clone()))));
    }
}
