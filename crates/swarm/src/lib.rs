//! Every decision of a Starling run, without a socket.
//!
//! Three state machines and a handful of pure planners. A machine takes what happened and says what is to be
//! done, `machine.handle(input, now, &mut commands)`; it has no socket, no clock, no randomness, no thread and no
//! tensor (those are handles with a size). `node` runs one of each for real, `sim` runs thousands on virtual time,
//! and it is the same code.
//!
//! | machine | decides |
//! |---|---|
//! | [`coordinator::Coordinator`] | who is in, who holds which stage, whose lots count, when a step is closed |
//! | [`driver::Driver`] | which peers compute a lot, and what to do when one is late |
//! | [`worker::Worker`] | what may be folded, sealed, reduced and applied at one peer |
//!
//! | planner | answers |
//! |---|---|
//! | [`placement`] | which peer holds which stage |
//! | [`rebalance`] | whether moving a peer to another stage pays |
//! | [`wiring`] | which peer computes the next lot |
//! | [`reduce`] | who adds up which part of a gradient, and by which way |
//! | [`deadline`] | how long to wait |
//!
//! # The protocol, in ten lines
//! 1. The coordinator *leases* a lot to one driver, naming the stages whose gradients are wanted.
//! 2. The driver picks a peer for each stage when a lot is to go there; the *grant* (lease, attempt) travels in the route.
//! 3. A worker folds a gradient only under the newest grant that it has seen for the lot, each microbatch once.
//! 4. With its last gradient a lot is *sealed*; the first seal of (lot, stage) enters the *ledger*, others are refused.
//! 5. A peer that is late is replaced under a later attempt: the lot is done again in that stage only.
//! 6. When all lots of a stage are sealed, the coordinator sends a numbered *reduce* plan, and tells each holder
//!    which of its lots count: that is where 'exactly once' is made. The sums are read, never changed.
//! 7. Members add up their parts in the fixed tree, exchange them, and say *prepared* with the result's hash.
//! 8. When all stages are prepared the commit is *journaled*, and only then sent; only then does anybody apply it.
//! 9. Who dies before that takes its lots back to open, but for those whose sums it had left with its *keeper*, another
//!    holder of the stage: the keeper inherits them. Who misses a commit fetches what it missed from a donor.
//! 10. If nobody holds a stage any more, all go back to the last whole checkpoint under the next epoch.
//!
//! Messages are small facts, fenced by (run, term, epoch, step, attempt); older ones are refused and counted.
//! Nothing waits for one particular message: a beat says how a member stands, and the answer is what it lacks.
//!
//! ```
//! use starling_swarm::coordinator::{Command, Coordinator};
//! use starling_swarm::{ids::*, journal::JournalState, lots::Lots, spec::{Reduce, Spec, Sync, Tuning}, time::Time};
//!
//! let spec = Spec {
//!     run: RunId(1), stages: 2, lots: Lots { microbatches: 8, lots: 4 }, sync: Sync::Step, reduce: Reduce::Exact,
//!     steps: Step(10), checkpoint_every: 5,
//!     costs: Vec::new(), elements: vec![1000], shared: Vec::new(), state_bytes: 12_000, memory_bytes: 0,
//!     tuning: Tuning::default(),
//! };
//! let mut commands = Vec::new();
//! let coordinator = Coordinator::new(spec, JournalState::default(), 0, Time(0), &mut commands);
//! assert!(matches!(commands[..], [Command::Append(0, _)]), "its term is journaled before anything else");
//! assert!(coordinator.why_waiting().contains("journal"));
//! ```

pub mod coordinator;
pub mod deadline;
pub mod driver;
pub mod feeding;
pub mod ids;
pub mod journal;
pub mod ledger;
pub mod lots;
pub mod message;
pub mod placement;
pub mod rebalance;
pub mod reduce;
pub mod refusal;
pub mod sequence;
pub mod small;
pub mod spec;
pub mod time;
pub mod wiring;
pub mod worker;
