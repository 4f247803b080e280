//! How a run stands, for people and programs: what `starling status`, `starling watch` and the live view show.

use serde::{Deserialize, Serialize};

/// See the module's head.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The run's name.
    pub name: String,
    /// Steps that are closed.
    pub step: u64,
    /// Steps to be done.
    pub steps: u64,
    /// Histories that were left because a stage lost all its holders.
    pub rollbacks: u64,
    /// The last version that is safe.
    pub checkpoint: u64,
    /// The loss of the last step.
    pub loss: Option<f64>,
    /// The loss on held-out text, when it was last looked at.
    pub held_out: Option<f64>,
    /// Tokens a second, over the last steps.
    pub tokens_per_s: f64,
    /// Steps a second, over the last steps.
    pub steps_per_s: f64,
    /// What the open step waits for.
    pub waits_for: String,
    /// Whether the run is paused.
    pub paused: bool,
    /// Whether everything is done.
    pub finished: bool,
    /// Stage by stage.
    pub stages: Vec<StageStatus>,
    /// Workers that hold nothing yet.
    pub idle: Vec<PeerStatus>,
    /// Drivers.
    pub drivers: u32,
    /// What the coordinator said last, newest last.
    pub news: Vec<String>,
}

/// How a stage stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageStatus {
    /// Who holds it.
    pub peers: Vec<PeerStatus>,
    /// Lots of the open step that are not sealed yet.
    pub open_lots: u32,
}

/// How a worker stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Its number.
    pub number: u32,
    /// The beginning of its key.
    pub key: String,
    /// Where it stands.
    pub site: String,
    /// Microbatches in its queue.
    pub queued: u32,
    /// Whether it counts, or still loads its state.
    pub active: bool,
    /// Whether it is about to leave.
    pub leaving: bool,
}
