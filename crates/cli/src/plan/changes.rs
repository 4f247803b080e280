//! What a user could change, each as a case of its own to be simulated.

use starling_model::run::Keeping;
use starling_model::run::{Reduce, Run};

use crate::plan::case::Case;
use crate::plan::forecast::{Budget, Forecast, forecast};
use crate::plan::swarm::{self, Peer};

/// A gain below this is not worth a change.
const WORTH: f64 = 0.03;

/// Something that could be changed.
pub struct Change {
    /// What, in few words.
    pub what: String,
    /// How to ask for it.
    pub how: String,
    /// What else it changes; nothing if nothing is said.
    pub price: &'static str,
    case: Case,
}

/// A change that was simulated.
pub struct Tried {
    pub change: Change,
    pub forecast: Forecast,
    /// Tokens a second against those without it, less 1.
    pub gain: f64,
}

impl Tried {
    pub fn is_worth_it(&self) -> bool {
        self.gain >= WORTH
    }
}

/// All that could be changed and would still train.
pub fn candidates(case: &Case) -> Vec<Change> {
    let mut changes = Vec::new();
    stages(case, &mut changes);
    sums(case, &mut changes);
    work(case, &mut changes);
    hardware(case, &mut changes);
    changes.retain(|change| change.case.run.problems().is_empty() && change.case.prepare().is_ok());
    changes
}

/// Simulates them all; those that gain most come first.
pub fn try_all(changes: Vec<Change>, before: &Forecast, budget: &mut Budget) -> Vec<Tried> {
    let mut tried = Vec::new();
    for change in changes {
        // What is too large to be simulated in time is no remedy.
        let Ok(forecast) = forecast(&change.case, &change.what, budget) else { continue };
        let gain = forecast.tokens_per_s / before.tokens_per_s - 1.0;
        tried.push(Tried { change, forecast, gain });
    }
    tried.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    tried
}

fn with(case: &Case, change: impl FnOnce(&mut Run)) -> Case {
    let mut case = case.clone();
    change(&mut case.run);
    case
}

fn stages(case: &Case, changes: &mut Vec<Change>) {
    let now = case.run.train.stages;
    for stages in [now.wrapping_sub(1), now + 1] {
        let noun = if stages == 1 { "stage" } else { "stages" };
        changes.push(Change {
            what: format!("{stages} {noun} instead of {now}"),
            how: format!("--stages {stages}"),
            price: "",
            case: with(case, |run| run.train.stages = stages),
        });
    }
}

fn sums(case: &Case, changes: &mut Vec<Change>) {
    let (reduce, name, price) = match case.run.swarm.reduce {
        Reduce::Exact => (Reduce::Fast, "fast", "the last bits depend on who computed what"),
        Reduce::Fast => (Reduce::Exact, "exact", ""),
    };
    changes.push(Change {
        what: format!("{name} sums"),
        how: format!("--set swarm.reduce={name}"),
        price,
        case: with(case, |run| run.swarm.reduce = reduce),
    });
    let lots = case.run.train.lots().lots;
    for (what, other) in [("twice the lots", 2 * lots), ("half the lots", lots / 2)] {
        if other > 0 && other <= case.run.train.lots().microbatches {
            changes.push(Change {
                what: format!("{what}, {other}"),
                how: format!("--set train.lots={other}"),
                price: "",
                case: with(case, |run| run.train.lots = other),
            });
        }
    }
}

fn work(case: &Case, changes: &mut Vec<Change>) {
    let train = &case.run.train;
    let size = train.microbatch.min(train.batch);
    for (what, other) in [("twice the microbatch", 2 * size), ("half the microbatch", size / 2)] {
        if other > 0 && other <= train.batch {
            changes.push(Change {
                what: format!("{what}, {other}"),
                how: format!("--set train.microbatch={other}"),
                price: "",
                case: with(case, |run| run.train.microbatch = other),
            });
        }
    }
    if train.keep == Keeping::Input {
        changes.push(Change {
            what: "nothing computed twice".into(),
            how: "--set train.keep=all".into(),
            price: "more memory",
            case: with(case, |run| run.train.keep = Keeping::All),
        });
    }
    if let Some(batch) = train.batch.checked_mul(2) {
        changes.push(Change {
            what: format!("twice the batch, {batch}"),
            how: format!("--set train.batch={batch}"),
            price: "another training",
            case: with(case, |run| run.train.batch = batch),
        });
    }
}

fn hardware(case: &Case, changes: &mut Vec<Change>) {
    let mut more = case.clone();
    let able = case.who_can_hold(&case.stages().unwrap_or_default()).map(|swarm| swarm.peers);
    if let Some(peer) = able.ok().and_then(|peers| one_more(&peers)) {
        more.swarm.peers.push(peer);
        changes.push(Change {
            what: "one more peer".into(),
            how: format!("{} peers; it goes to the bottleneck", more.swarm.peers.len()),
            price: "",
            case: more,
        });
    }
    let mut wider = case.clone();
    let (link, between) = match case.swarm.sites() {
        0 | 1 => (&mut wider.swarm.lan, "--lan"),
        _ => (&mut wider.swarm.link, "--link"),
    };
    link.bytes_per_s *= 2.0;
    let how = format!("{between} {}", swarm::as_flag(link));
    changes.push(Change { what: "links of twice the rate".into(), how, price: "", case: wider });
}

/// A peer like the last one, in the site that has fewest.
fn one_more(peers: &[Peer]) -> Option<Peer> {
    let sites: std::collections::BTreeSet<u16> = peers.iter().map(|peer| peer.site).collect();
    let there = |site: u16| peers.iter().filter(|peer| peer.site == site).count();
    let site = sites.into_iter().min_by_key(|&site| there(site))?;
    peers.iter().rev().find(|peer| peer.site == site).copied()
}
