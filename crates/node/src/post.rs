//! What nodes write to each other: the machines' messages with their tensors, and what hosts must settle besides.
//!
//! A letter's head is this, its body the elements of a tensor or a file. Every letter carries the sender's logical
//! clock, so that the event logs of all nodes can be put into one order in which no effect stands before its cause.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use starling_model::checkpoint::{PartHead, Piece};
use starling_model::stage::Loss;
use starling_swarm::coordinator::Order;
use starling_swarm::ids::{SiteId, StageId};
use starling_swarm::message::{Envelope, Urgency};
use starling_swarm::worker::io::StateOf;
use starling_transport::endpoint::Contact;
use starling_transport::letter::{Lane, Letter, MAX_HEAD_BYTES};
use starling_transport::ticket::{Pass, Role};

use crate::parcel::ParcelId;
use crate::status::Status;
use crate::tensor::{Tensor, TensorHead, TornTensor};
use crate::trial::Trial;

/// What a letter says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant, reason = "nearly every letter is the large one")]
pub enum Post {
    /// From machine to machine.
    Swarm(Envelope, Option<TensorHead>),
    /// Member → coordinator: how do I reach the member of this number?
    WhoIs(u32),
    /// Coordinator → member.
    ThisIs(u32, Option<Card>),
    /// Worker → coordinator: keep this part of a checkpoint. The body is its file.
    Keep(StateOf, PartHead),
    /// Coordinator → worker: it is safe.
    Kept(StateOf),
    /// Worker → coordinator: these parameters of a checkpoint, please.
    Fetch(StateOf, Vec<String>),
    /// Coordinator → worker: they are the body, if there is such a checkpoint.
    Fetched(StateOf, bool),
    /// Coordinator → driver: there is a checkpoint of this step; the body is its manifest.
    Checkpoint(u64),
    /// Driver → coordinator: this piece of that checkpoint, please.
    Read(u64, Piece),
    /// Coordinator → driver: it is the body, unless that checkpoint is gone.
    Piece(u64, Piece),
    /// Driver → coordinator: I have a copy of it.
    Copied(u64),
    /// Driver → coordinator: I could not copy one, and why.
    NotCopied(String),
    /// Worker → coordinator: who has the state of this stage?
    WhoHolds(StageId),
    /// Coordinator → worker: these have, in your site if there are any.
    Holders(StageId, Vec<u32>),
    /// Worker → worker: this chunk of that parcel, which makes this state, please; and whether it is the whole state.
    Want(StateOf, ParcelId, u32, bool),
    /// Worker → worker: it is the body.
    Chunk(ParcelId, u32),
    /// Worker → worker: I do not have that parcel.
    NoParcel(ParcelId),
    /// Coordinator → driver: read this held-out text, and send it on its way.
    Try(Trial),
    /// Driver or worker → worker: compute this in the stage of this number, and pass it on. The body is its tensor.
    Infer(Trial, u16, TensorHead),
    /// Last worker → coordinator: its loss.
    Tried(Trial, Loss),
    /// Driver or worker → coordinator: I cannot.
    NotTried(Trial),
    /// Worker → coordinator: the hashes of the weights of this state.
    Hashes(StateOf, BTreeMap<String, [u8; 32]>),
    /// Coordinator → worker: I know the hashes of this state.
    Noted(StateOf),
    /// Operator → coordinator: do this.
    Order(Order),
    /// Operator → coordinator: how does the run stand?
    Ask,
    /// Coordinator → operator: so. Or what came of an order.
    Told(Box<Status>),
    /// Coordinator → everybody: the run is over.
    Over,
}

/// How a member is reached, and who it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Card {
    /// Its key and addresses.
    pub contact: Contact,
    /// What it does.
    pub role: Role,
    /// Where it stands.
    pub site: String,
}

/// How a node introduces itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Introduction {
    /// The version of its binary.
    pub version: String,
    /// What lets it in.
    pub credential: Credential,
    /// Where it stands.
    pub site: String,
    /// Where others reach it.
    pub addresses: Vec<String>,
}

/// What lets a node in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Credential {
    /// To the coordinator: a ticket, as text.
    Ticket(String),
    /// To anybody: the coordinator's word on its key.
    Pass(Pass),
    /// From the coordinator itself, which stands at these addresses now: its key is enough.
    Authority,
}

/// What a coordinator answers who it lets in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Admission {
    /// The coordinator's word on the newcomer's key.
    pub pass: Pass,
    /// The number of its site.
    pub site: SiteId,
    /// Where the coordinator stands.
    pub coordinator_site: String,
    /// The [`crate::charter::Charter`], as JSON.
    pub charter: String,
}

/// Most bytes of an introduction.
pub const MAX_INTRODUCTION_BYTES: usize = 16 << 10;

#[derive(Serialize, Deserialize)]
struct Head {
    clock: u64,
    post: Post,
}

/// Why a letter cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// Its head is not of this protocol.
    #[error("it is not of this protocol; the sender is broken or of another version")]
    Head,
    /// Its tensor is torn.
    #[error(transparent)]
    Tensor(#[from] TornTensor),
}

impl Post {
    /// What it may wait behind.
    fn lane(&self) -> Lane {
        match self {
            Post::Swarm(envelope, _) => match envelope.urgency() {
                Urgency::Control => Lane::Control,
                Urgency::Work => Lane::Work,
                Urgency::Sum => Lane::Sum,
                Urgency::State => Lane::State,
            },
            Post::Infer(..) => Lane::Work,
            Post::Keep(..) | Post::Fetched(..) | Post::Checkpoint(_) | Post::Piece(..) | Post::Chunk(..) => {
                Lane::State
            }
            _ => Lane::Control,
        }
    }

    /// As a letter, with what belongs to it. None if it is larger than a letter may be.
    pub fn seal(self, clock: u64, body: Vec<Bytes>) -> Option<Letter> {
        let lane = self.lane();
        let head = postcard::to_stdvec(&Head { clock, post: self }).ok()?;
        (head.len() <= MAX_HEAD_BYTES).then(|| Letter { lane, head: head.into(), body })
    }

    /// A machine's message and its tensor.
    pub fn of(envelope: Envelope, tensor: Option<&Arc<Tensor>>) -> (Post, Vec<Bytes>) {
        let (head, body) = tensor.map(Tensor::encode).unzip();
        (Post::Swarm(envelope, head), body.unwrap_or_default())
    }

    /// Whether one member may write it to another; everything else is between members and the coordinator.
    pub fn is_between_members(&self) -> bool {
        matches!(self, Post::Want(..) | Post::Chunk(..) | Post::NoParcel(_) | Post::Infer(..))
    }

    /// Reads a letter: the sender's clock, what it says, and what belongs to it.
    pub fn open(letter: &Letter) -> Result<(u64, Post, Bytes), Unreadable> {
        let Head { clock, post } = postcard::from_bytes(&letter.head).map_err(|_| Unreadable::Head)?;
        Ok((clock, post, letter.body.first().cloned().unwrap_or_default()))
    }
}

/// Our logical clock after a letter. One that is absurdly far ahead would be a liar's, and is not followed.
pub fn next_clock(ours: u64, theirs: u64) -> u64 {
    let followed = if theirs.saturating_sub(ours) < 1 << 40 { theirs } else { ours };
    ours.max(followed).saturating_add(1)
}

/// The tensor that came with a message.
pub fn tensor(head: Option<TensorHead>, body: &Bytes) -> Result<Option<Arc<Tensor>>, TornTensor> {
    head.map(|head| Tensor::decode(head, body).map(Arc::new)).transpose()
}
