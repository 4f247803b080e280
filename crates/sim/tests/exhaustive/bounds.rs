//! What is explored, and what may happen.

use starling_swarm::ids::*;
use starling_swarm::spec::Sync;

pub(crate) const PEERS: usize = 3;
pub(crate) const STAGES: u16 = 2;
pub(crate) const MICROBATCHES: u32 = 2;
/// How long a peer that dies stays away: longer than its silence is borne.
pub(crate) const AWAY_US: u64 = 3_000_000;
/// How late a stale message is: later than any deadline of a first try.
pub(crate) const STALE_US: u64 = 2_600_000;
/// A run that is not done by then hangs.
pub(crate) const PATIENCE_US: u64 = 120_000_000;
/// More events than this at one time, each the only one that can happen, are no progress.
pub(crate) const MOST_FORCED: usize = 10_000;

/// What is explored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) lots: u32,
    pub(crate) steps: u64,
    pub(crate) sync: Sync,
    pub(crate) faults: u32,
    pub(crate) kinds: &'static [Kind],
    pub(crate) order: Order,
    pub(crate) start: Start,
    /// Whether the first stage and the last share parameters.
    pub(crate) shares: bool,
    pub(crate) sabotage: Option<Sabotage>,
    /// More states than this are not looked at, and the exploration is not complete.
    pub(crate) most_states: usize,
}

/// In which order what is enabled happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Order {
    /// In every order, up to the first fault; then as with fast hosts.
    Any,
    /// Hosts first, then messages, by sender.
    FastHosts,
    /// Messages first, the other way round, and hosts last.
    SlowHosts,
    /// The same, and what a host did last it reports first.
    NewestFirst,
    /// One that is drawn from this seed: each host and each wire has its rank.
    Ranked(u64),
}

/// Where an exploration begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Start {
    /// All processes have just started.
    Cold,
    /// The peers hold their stages, and the driver has just started.
    Staffed,
    /// A stage is sealed, and the first order to reduce is on its way.
    Sealed,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// A message is lost.
    Drop,
    /// A message comes twice in a row.
    Twice,
    /// A message comes, and once more at any later time.
    Again,
    /// A message is overtaken by any later ones.
    Late,
    /// A message comes so late that it was given up long before.
    Stale,
    /// A peer dies and is back at once, as a stranger; what was on its way reaches its next life.
    Bounce,
    /// A peer dies, what is on its way to it is lost, and it is back after it was missed.
    Die,
}

pub(crate) const ALL_KINDS: &[Kind] =
    &[Kind::Drop, Kind::Twice, Kind::Bounce, Kind::Die, Kind::Stale, Kind::Again, Kind::Late];

/// What is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Sabotage {
    /// Gradients are folded twice.
    Double,
    /// Updates are applied as soon as they are prepared.
    ApplyAtPrepare,
    /// The journal says that a commit is safe, and loses it.
    LostCommit,
    /// Lots that are to be dropped are kept.
    KeepsDropped,
    /// Hosts look at the reduced gradient for ever.
    NeverPrepared,
}

/// One transition.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Choice {
    Deliver(Address, Address),
    Stray(usize),
    Host(usize, usize),
    Synced,
    Concluded,
    Time,
    Fault(Kind, Address, Address),
}
