//! Why messages were refused, counted: the operator sees it, and tests assert on it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Why a machine did not act on a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Refusal {
    /// It breaks the rules of the protocol; see [`crate::message::BadMessage`].
    Malformed,
    /// It belongs to another run.
    OtherRun,
    /// It comes from an earlier coordinator's life.
    OldTerm,
    /// It comes from a history that was rolled back.
    OldEpoch,
    /// It is about a step that is closed.
    OldStep,
    /// Its lease, grant or attempt was replaced.
    OldAttempt,
    /// It was delivered before; the stored answer was given again if there is one.
    Repeated,
    /// The receiver does not hold that stage.
    OtherStage,
    /// It is ahead of the receiver, and the place for such messages is full.
    TooFarAhead,
    /// The queue is full.
    Busy,
    /// The sender is not a member.
    Stranger,
    /// It answers nothing that was asked.
    Unasked,
    /// The sender computes wrongly, and is not let in.
    Quarantined,
    /// The sender cannot take part in this run.
    Unfit,
    /// It names something that does not exist.
    Nonsense,
}

/// How many messages were refused, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusals(BTreeMap<Refusal, u64>);

impl Refusals {
    /// Counts one.
    pub fn count(&mut self, refusal: Refusal) {
        *self.0.entry(refusal).or_default() += 1;
    }

    /// How many were refused for this reason.
    pub fn of(&self, refusal: Refusal) -> u64 {
        self.0.get(&refusal).copied().unwrap_or(0)
    }

    /// All reasons that occurred.
    pub fn all(&self) -> impl Iterator<Item = (Refusal, u64)> + '_ {
        self.0.iter().map(|(reason, count)| (*reason, *count))
    }
}
