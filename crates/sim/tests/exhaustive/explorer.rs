//! Every state that can be reached, depth first.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::Write;

use starling_swarm::ids::*;

use crate::*;

/// What came of an exploration.
#[derive(Debug, Default)]
pub(crate) struct Explored {
    /// Distinct states in which there was a choice, or nothing but time could go on.
    pub(crate) states: usize,
    /// All transitions, also those that were the only ones.
    pub(crate) transitions: usize,
    /// Distinct states in which all was done, and in how many of them all had gone back to a checkpoint.
    pub(crate) ends: usize,
    pub(crate) rolled_back: usize,
    pub(crate) complete: bool,
}

/// A state that must not be, and the choices that led to it.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) what: String,
    pub(crate) trace: Vec<Choice>,
}

/// A state on the path, what may happen in it, and which of that need not be looked at here.
pub(crate) struct Frame {
    pub(crate) state: State,
    pub(crate) choices: Vec<Choice>,
    pub(crate) next: usize,
    pub(crate) asleep: Asleep,
}

/// Visits every state that can be reached within the bounds, depth first.
pub(crate) fn explore(bounds: Bounds) -> Result<Explored, Broken> {
    let mut explored = Explored { complete: true, ..Explored::default() };
    let mut seen: HashMap<u128, Asleep> = HashMap::new();
    let root = State::new(bounds);
    let mut path = vec![Frame { choices: root.choices(), state: root, next: 0, asleep: Asleep::default() }];
    while let Some(frame) = path.last_mut() {
        let Some(&choice) = frame.choices.get(frame.next) else {
            path.pop();
            continue;
        };
        frame.next += 1;
        if frame.asleep.has(choice) {
            continue;
        }
        let asleep = frame.asleep.after(choice);
        frame.asleep.add(choice);
        let mut state = frame.state.clone();
        let taken = state.take(choice).and_then(|()| state.run_on());
        let (mut choices, forced) = match taken {
            Ok(taken) => taken,
            Err(what) => {
                let trace = path.iter().map(|frame| frame.choices[frame.next - 1]).collect();
                return Err(Broken { what, trace });
            }
        };
        explored.transitions += 1 + forced;
        let asleep = if forced == 0 { asleep } else { Asleep::default() };
        let asleep = match seen.entry(state.print()) {
            Entry::Vacant(new) => *new.insert(asleep),
            Entry::Occupied(mut known) => {
                // What slept there and does not now is left to be looked at.
                let before = *known.get();
                choices.retain(|&choice| before.has(choice) && !asleep.has(choice));
                if choices.is_empty() {
                    continue;
                }
                known.insert(before.and(asleep));
                before.and(asleep)
            }
        };
        let is_end = choices.is_empty();
        explored.ends += usize::from(is_end);
        explored.rolled_back += usize::from(is_end && state.journal.book.epoch > Epoch(1));
        explored.states = seen.len();
        if seen.len() > bounds.most_states {
            explored.complete = false;
            break;
        }
        path.push(Frame { state, choices, next: 0, asleep });
    }
    Ok(explored)
}

/// Choices that were looked at before and that nothing has touched since: to take them now leads to states
/// that are visited anyhow (the sleep sets of Godefroid). Two events are independent if they are at different
/// machines: each changes its machine, takes from the head of a wire to it, and adds to the tails of wires
/// from it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Asleep(u64);

impl Asleep {
    pub(crate) fn has(self, choice: Choice) -> bool {
        self.0 & bit(choice) != 0
    }

    pub(crate) fn add(&mut self, choice: Choice) {
        self.0 |= bit(choice);
    }

    /// What still sleeps after this choice: a fault or time wakes everything, an event those at its machine.
    pub(crate) fn after(self, choice: Choice) -> Asleep {
        match machine(choice) {
            Some(machine) => Asleep(self.0 & !(0xfff << (12 * machine))),
            None => Asleep(0),
        }
    }

    pub(crate) fn and(self, other: Asleep) -> Asleep {
        Asleep(self.0 & other.0)
    }
}

/// The machine at which something happens: 0 is the coordinator, 1 the driver, then the peers.
pub(crate) fn machine(choice: Choice) -> Option<u64> {
    match choice {
        Choice::Deliver(_, to) => Some(number(to)),
        Choice::Host(index, _) => Some(2 + index as u64),
        Choice::Synced | Choice::Concluded => Some(0),
        _ => None,
    }
}

/// A bit for everything that may sleep: twelve for each machine.
pub(crate) fn bit(choice: Choice) -> u64 {
    let nth = match choice {
        Choice::Deliver(from, _) => number(from),
        Choice::Host(_, nth) if nth < 5 => 5 + nth as u64,
        Choice::Synced => 10,
        Choice::Concluded => 11,
        _ => return 0,
    };
    machine(choice).map_or(0, |machine| 1 << (12 * machine + nth))
}

pub(crate) fn number(address: Address) -> u64 {
    match address {
        Address::Coordinator => 0,
        Address::Driver(_) => 1,
        Address::Worker(PeerId(peer)) => 2 + u64::from(peer),
    }
}

/// What happened on the way, in words.
pub(crate) fn tell(bounds: Bounds, trace: &[Choice]) -> String {
    let mut state = State::new(bounds);
    let mut told = String::new();
    for &choice in trace {
        let mut next = Some(choice);
        while let Some(choice) = next {
            let _ = writeln!(told, "{:>9} µs  {}", state.now, state.describe(choice));
            if state.take(choice).is_err() {
                return told;
            }
            next = state.forced();
        }
    }
    told
}
