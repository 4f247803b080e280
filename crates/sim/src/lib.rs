//! The swarm's own code on virtual time.
//!
//! A [`world::World`] runs the machines of `starling-swarm`, exactly as `node` does, over a simulated network with
//! simulated hosts; compute and transfer take modelled time, so that it also predicts. Toy arithmetic ([`toy`])
//! stands in for tensors: every value depends on all that a real one would, so 'exactly once' and 'equal to one
//! process' are checked by value, at every update of every replica. What must hold is in [`invariants`], one file
//! each; what can go wrong has a name in [`fault`]; [`fuzz`] makes random schedules of it from one seed each, and
//! takes away what a failing one does not need.
//!
//! ```
//! use starling_sim::{fault::Fault, scenario::Scenario, world::World};
//! use starling_swarm::ids::PeerId;
//!
//! // Three stages, two replicas each; one peer dies in the middle of the first step and is back after a second.
//! let mut scenario = Scenario::small(42, 3, 2);
//! scenario.faults.push((400_000, Fault::Kill { peer: PeerId(0), back_after_us: 1_000_000 }));
//! let outcome = World::new(&scenario).run().expect("all invariants hold");
//! assert_eq!(outcome.rollbacks, 0);
//! ```

pub mod fault;
pub mod fuzz;
pub mod heap;
pub mod history;
pub mod host;
pub mod invariants;
pub mod network;
pub mod rng;
pub mod scenario;
pub mod toy;
pub mod trace;
pub mod world;
