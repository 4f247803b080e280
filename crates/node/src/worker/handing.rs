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
use crate::parcel::{Contents, Outline, Parcel};
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
        if !outline.is_sound(self.state_bytes) || self.taking.as_ref().is_some_and(|t| t.is(donor, &outline))
        {
            return;
        }
        let (stage, whole) = (outline.of.stage, outline.contents == Contents::State);
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
        if let Some(taking) = ours.filter(|taking| taking.outline().contents == Contents::State) {
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
        let (of, id) = (taking.outline().of, taking.id());
        for (source, chunk) in taking.requests(Instant::now()) {
            self.member.tell_member(source, Post::Want(of, id, chunk), Vec::new());
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
            Post::Want(of, id, chunk) => self.on_want(Wanted { by: from, of, id, chunk }),
            Post::Chunk(id, chunk) => {
                let Some(taking) = self.taking.as_mut().filter(|taking| taking.id() == id) else { return };
                if taking.receive(from, chunk, body, Instant::now()) == Came::Forged {
                    (self.member.tell())(&format!(
                        "worker {from} sent something else than it should have; it is asked of others"
                    ));
                }
                self.ask_for_chunks();
            }
            Post::NoParcel(id) => {
                if let Some(taking) = self.taking.as_mut().filter(|taking| taking.id() == id) {
                    taking.refused(from);
                    self.ask_for_chunks();
                }
            }
            _ => {}
        }
    }

    /// A chunk is wanted of us. If its parcel was read for somebody else, or not at all, we may hold the same state.
    fn on_want(&mut self, wanted: Wanted) {
        if self.send_chunk(wanted) {
            return;
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
