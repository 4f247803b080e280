//! What a run on a swarm would be like: some of its steps on virtual time, and where their time goes.
//!
//! Where it goes is found by leaving things out: a step is simulated as it is, then with sums that weigh nothing, then over
//! links that carry anything at once, then without their latency. What is faster without something was waiting for it.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use starling_sim::fault::Fault;
use starling_sim::rng::Rng;
use starling_sim::scenario::Scenario;
use starling_sim::world::{Sample, World};
use starling_swarm::ids::PeerId;

use crate::plan::case::{Case, Prepared};
use crate::words;

/// Steps before anything is measured: at first nobody knows how fast the others are.
const WARM: u64 = 3;
/// Steps that are measured: more of those that are simulated quickly, since no two steps are alike.
const MEASURED: std::ops::RangeInclusive<u64> = 8..=32;
/// Events of all steps that are measured, about.
const EVENTS: u64 = 400_000;
/// Events of a microbatch in a stage, about.
const EVENTS_OF_A_JOB: u64 = 14;
/// Looks at a step.
const LOOKS: f64 = 24.0;
/// Steps that take so many times as long as they should count as none.
const PATIENCE: f64 = 200.0;
/// Deaths that are waited for, to know what they cost.
const DEATHS: f64 = 24.0;
/// A death is felt in so many steps.
const FELT_STEPS: f64 = 6.0;
/// Bytes a second of a link that is never waited for.
const AT_ONCE: f64 = 1e15;
/// Every simulation may take as long as this.
const LEAST: Duration = Duration::from_millis(200);
/// Letters of what a swarm waits for.
const MOST_TOLD: usize = 200;
/// A progress bar appears after this.
const UNNOTICED: Duration = Duration::from_secs(1);

/// What a run would be like.
#[derive(Clone, Debug)]
pub struct Forecast {
    pub step_s: f64,
    pub tokens_per_s: f64,
    /// What a step would take if every device were at work all the time.
    pub ideal_s: f64,
    /// Steps that were measured.
    pub steps: u64,
    /// Whether fewer than were wanted, since it took too long to simulate.
    pub cut_off: bool,
    pub stages: Vec<StageAtWork>,
    pub wan_bytes: f64,
    /// Sites in which anybody takes part.
    pub sites: usize,
    /// Peers that have too little memory.
    pub left_out: usize,
}

/// A stage during a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageAtWork {
    pub peers: usize,
    /// The share of time that its devices compute.
    pub share: f64,
    /// How long each of them computes in a step.
    pub busy_s: f64,
}

/// Where the time of a step goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parts {
    /// What devices compute, as if all were at work all the time.
    pub computing_s: f64,
    /// What the slowest stage takes beyond that.
    pub uneven_s: f64,
    /// The pipeline fills and drains.
    pub filling_s: f64,
    /// Messages are on their way, however small they are.
    pub latency_s: f64,
    /// Activations and their gradients are on the wire.
    pub activations_s: f64,
    /// Sums are on the wire.
    pub sums_s: f64,
    /// The stage that everybody waits for.
    pub slowest: usize,
}

/// What churn does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Churn {
    pub tokens_per_s: f64,
    /// What a death costs the whole swarm.
    pub cost_s: f64,
    /// Deaths that were seen.
    pub deaths: usize,
    /// How long was looked at.
    pub span_s: f64,
    /// How often nobody was left who held some stage.
    pub stages_lost: u64,
    /// Whether fewer were seen than were wanted.
    pub cut_off: bool,
}

/// How long all that is simulated may take, and the bar that shows it.
pub struct Budget {
    began: Instant,
    patience: Duration,
    left: u32,
    bar: ProgressBar,
    is_shown: bool,
}

impl Budget {
    /// So long for so many simulations.
    pub fn new(patience: Duration, simulations: u32) -> Budget {
        let bar =
            ProgressBar::with_draw_target(Some(u64::from(simulations) * 1000), ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template("{bar:24.cyan/blue} simulating {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Budget { began: Instant::now(), patience, left: simulations, bar, is_shown: false }
    }

    /// So many more are to come.
    pub fn expect(&mut self, simulations: u32) {
        self.bar.inc_length(u64::from(simulations.saturating_sub(self.left)) * 1000);
        self.left = simulations;
    }

    /// The next simulation begins; when it has to end, and when even if nothing was seen by then.
    fn next(&mut self, what: &str) -> (Instant, Instant) {
        let now = Instant::now();
        self.bar.set_message(what.to_string());
        self.bar.set_position(self.bar.position().next_multiple_of(1000));
        let left = self.patience.saturating_sub(now - self.began);
        // Most take less than their share.
        let share = left.as_secs_f64() * (2.0 / f64::from(self.left.max(2))).max(0.2);
        self.left = self.left.saturating_sub(1);
        let until = now + Duration::from_secs_f64(share).max(LEAST);
        (until, until + self.patience)
    }

    /// The last simulation begins; when it has to end. It gets what is left, but not too little.
    fn last(&mut self, what: &str) -> Instant {
        let (now, (end, _)) = (Instant::now(), self.next(what));
        end.max(self.began + self.patience).max(now + self.patience / 3)
    }

    fn look(&mut self, from: u64, done: f64) {
        if !self.is_shown && self.began.elapsed() > UNNOTICED {
            self.is_shown = true;
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_position(from + (999.0 * done.clamp(0.0, 1.0)) as u64);
    }

    /// Since the first simulation began.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// The bar goes away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Simulates the case as it is.
pub fn forecast(case: &Case, what: &str, budget: &mut Budget) -> Result<Forecast> {
    let prepared = case.prepare()?;
    let mut seen = simulate(&prepared.scenario, prepared.ideal_s, what, budget)?;
    seen.step_s += prepared.uncounted_s;
    Ok(Forecast {
        step_s: seen.step_s,
        tokens_per_s: case.step_tokens() / seen.step_s,
        ideal_s: prepared.ideal_s,
        steps: seen.steps,
        cut_off: seen.cut_off,
        stages: seen.stages,
        wan_bytes: seen.wan_bytes,
        sites: prepared.scenario.drivers.len(),
        left_out: prepared.left_out,
    })
}

/// Where the time of its steps goes; and how many bytes cross between sites, which needs the same simulations.
pub fn parts(case: &Case, forecast: &mut Forecast, budget: &mut Budget) -> Result<Parts> {
    let Prepared { scenario, ideal_s, mean_gradient, .. } = case.prepare()?;
    let mut lighter = scenario;
    lighter.sizes.gradient = 0;
    let wire = simulate(&lighter, ideal_s, "sums that weigh nothing", budget)?;
    for link in [&mut lighter.inside, &mut lighter.between] {
        link.bytes_per_s = AT_ONCE;
    }
    let late = simulate(&lighter, ideal_s, "links that carry anything at once", budget)?;
    for link in [&mut lighter.inside, &mut lighter.between] {
        (link.latency_us, link.jitter_us) = (0, 0);
    }
    let free = simulate(&lighter, ideal_s, "links without latency", budget)?;
    // What is larger than the average stage's gradient was counted for every stage.
    forecast.wan_bytes = wire.wan_bytes + (forecast.wan_bytes - wire.wan_bytes).max(0.0) * mean_gradient;
    let busiest = |a: &(usize, &StageAtWork), b: &(usize, &StageAtWork)| a.1.busy_s.total_cmp(&b.1.busy_s);
    let (slowest, stage) = free.stages.iter().enumerate().max_by(busiest).unwrap_or((0, &forecast.stages[0]));
    let computing_s = ideal_s.min(forecast.step_s);
    // Two simulations differ by some chance too: no part is less than nothing, and all together are the step.
    let wire_s = wire.step_s.min(forecast.step_s);
    let late_s = late.step_s.min(wire_s);
    let free_s = free.step_s.clamp(computing_s.min(late_s), late_s);
    let uneven_s = (stage.busy_s.min(free_s) - computing_s).max(0.0);
    Ok(Parts {
        computing_s,
        uneven_s,
        filling_s: (free_s - computing_s - uneven_s).max(0.0),
        latency_s: late_s - free_s,
        activations_s: wire_s - late_s,
        sums_s: forecast.step_s - wire_s,
        slowest,
    })
}

/// The same run while peers die: each so often an hour, and back after a while.
///
/// Deaths of a real run are too far apart to wait for enough of them, so they come as often as they can without one being
/// felt in the next, and what one of them costs is seen. Checkpoints are written after every step meanwhile; what going
/// back to a real one costs is added for as many deaths as emptied a stage.
pub fn with_deaths(
    case: &Case,
    calm: &Forecast,
    deaths_per_hour: f64,
    back: Duration,
    budget: &mut Budget,
) -> Result<Churn> {
    let Prepared { mut scenario, uncounted_s, .. } = case.prepare()?;
    let peers = scenario.peers.len() as f64;
    let really_s = 3600.0 / (deaths_per_hour * peers);
    let load_s = scenario.sizes.state as f64 / scenario.inside.bytes_per_s.min(scenario.between.bytes_per_s);
    let apart_s = (FELT_STEPS * calm.step_s).max(2.0 * (back.as_secs_f64() + load_s)).min(really_s);
    let horizon_s = DEATHS * apart_s + FELT_STEPS * calm.step_s;
    scenario.faults = deaths(&scenario, apart_s * peers, back, horizon_s);
    scenario.spec.checkpoint_every = 1;
    let until = budget.last("peers that die");
    let from = budget.bar.position();
    let every_us = (calm.step_s * 1e6 / 4.0).max(1000.0) as u64;
    let mut end_us = 0;
    let (result, _) =
        World::new(&scenario).without_invariants().run_observed(every_us, &mut |sample: Sample| {
            budget.look(from, sample.at_us as f64 / 1e6 / horizon_s);
            end_us = sample.at_us;
            (end_us as f64) < horizon_s * 1e6 && Instant::now() < until
        });
    let outcome = result?;
    let (Some(&began_us), 2..) = (outcome.commits_us.first(), outcome.step) else {
        bail!(
            "in {} with such deaths, fewer than two steps are closed: it would not get anywhere",
            words::time(Duration::from_micros(end_us))
        );
    };
    // From the first commit on, so that the beginning does not count; steps that were done again count once.
    let seconds = end_us.saturating_sub(began_us) as f64 / 1e6;
    let useful_s = (outcome.step - 1) as f64 * (calm.step_s - uncounted_s);
    let died = scenario.faults.iter().filter(|(at, _)| *at <= end_us).count();
    let per_death = |value: f64| value / died.max(1) as f64;
    let every = case.run.checkpoint.every as f64;
    let going_back_s = per_death(outcome.rollbacks as f64) * every / 2.0 * calm.step_s;
    let cost_s = per_death((seconds - useful_s).max(0.0)) + going_back_s;
    let often = if apart_s < really_s { 1.0 / really_s } else { died as f64 / seconds.max(1e-9) };
    Ok(Churn {
        tokens_per_s: calm.tokens_per_s * (1.0 - often * cost_s).max(0.0),
        cost_s,
        deaths: died,
        span_s: seconds,
        stages_lost: outcome.rollbacks,
        cut_off: (end_us as f64) < 0.99 * horizon_s * 1e6,
    })
}

fn deaths(scenario: &Scenario, lifetime_s: f64, back: Duration, horizon_s: f64) -> Vec<(u64, Fault)> {
    let mut rng = Rng::new(scenario.seed ^ 0xc4);
    let mut faults = Vec::new();
    let back_after_us = back.as_micros() as u64;
    for peer in (0..scenario.peers.len() as u32).map(PeerId) {
        let mut at_s = 0.0;
        loop {
            at_s += -rng.unit().max(1e-12).ln() * lifetime_s;
            if at_s > horizon_s {
                break;
            }
            faults.push(((at_s * 1e6) as u64, Fault::Kill { peer, back_after_us }));
            at_s += back.as_secs_f64() + 1e-3;
        }
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}

/// What was seen of some steps.
struct Seen {
    step_s: f64,
    steps: u64,
    cut_off: bool,
    stages: Vec<StageAtWork>,
    wan_bytes: f64,
}

/// What is looked at, from one moment to another.
#[derive(Default)]
struct Window {
    first: Option<Sample>,
    last: Option<Sample>,
    /// By stage: holders × microseconds.
    held_us: Vec<f64>,
    held_at_last: Vec<f64>,
    before_us: u64,
}

impl Window {
    fn look(&mut self, sample: Sample) {
        let Some(first) = &self.first else {
            if sample.step >= WARM {
                (self.held_us, self.before_us) = (vec![0.0; sample.holders.len()], sample.at_us);
                self.held_at_last = self.held_us.clone();
                self.first = Some(sample);
            }
            return;
        };
        let passed = (sample.at_us - self.before_us) as f64;
        self.before_us = sample.at_us;
        self.held_us
            .iter_mut()
            .zip(&sample.holders)
            .for_each(|(us, &holders)| *us += holders as f64 * passed);
        let newest = self.last.as_ref().unwrap_or(first).step;
        if sample.step > newest {
            self.held_at_last.clone_from(&self.held_us);
            self.last = Some(sample);
        }
    }
}

fn simulate(scenario: &Scenario, ideal_s: f64, what: &str, budget: &mut Budget) -> Result<Seen> {
    let (until, at_last) = budget.next(what);
    let from = budget.bar.position();
    let latency_s = scenario.between.latency_us.max(scenario.inside.latency_us) as f64 / 1e6;
    let every_us = ((ideal_s + latency_s) * 1e6 / LOOKS).max(100.0) as u64;
    let sums_s =
        scenario.sizes.gradient as f64 / scenario.between.bytes_per_s.min(scenario.inside.bytes_per_s);
    let longest_us = (PATIENCE * (ideal_s + sums_s + latency_s) * 1e6 + 120e6) as u64;
    let spec = &scenario.spec;
    let step_events = EVENTS_OF_A_JOB * u64::from(spec.lots.microbatches) * u64::from(spec.stages);
    let wanted = WARM + (EVENTS / step_events.max(1)).clamp(*MEASURED.start(), *MEASURED.end());
    let (mut window, mut why, mut at_us, mut out_of_time) = (Window::default(), String::new(), 0, false);
    let (result, _) =
        World::new(scenario).without_invariants().run_observed(every_us, &mut |sample: Sample| {
            budget.look(from, sample.step as f64 / wanted as f64);
            let done = sample.step >= wanted;
            out_of_time = Instant::now() >= until && sample.step > WARM;
            let hopeless = sample.at_us > longest_us || Instant::now() >= at_last;
            at_us = sample.at_us;
            if hopeless {
                why.clone_from(&sample.why);
            }
            window.look(sample);
            !(done || out_of_time || hopeless)
        });
    let outcome = result?;
    let (Some(first), Some(last)) = (&window.first, &window.last) else {
        let why: String = why.chars().take(MOST_TOLD).collect();
        let remedy = match at_us > longest_us {
            true => format!(
                "Its devices could do a step in {}, so this swarm gets in its own way: try fewer peers or stages, smaller \
                 microbatches, or faster links",
                words::seconds(ideal_s)
            ),
            false => "Simulating it takes too long here: give it longer (--patience)".into(),
        };
        bail!(
            "in {} of simulated time, {} steps were closed, too few to say how long one takes; the swarm waited for {why}. \
             {remedy}",
            words::time(Duration::from_micros(at_us)),
            outcome.step
        );
    };
    let steps = last.step - first.step;
    let closed_us = |step: u64| outcome.commits_us.get(step as usize - 1).copied().unwrap_or(outcome.done_us);
    let step_s = (closed_us(last.step) - closed_us(first.step)) as f64 / steps as f64 / 1e6;
    let stage = |number: usize| {
        let busy_us = (last.busy_us[number] - first.busy_us[number]) as f64;
        let share = (busy_us / window.held_at_last[number].max(1.0)).min(1.0);
        StageAtWork { peers: last.holders[number], share, busy_s: share * step_s }
    };
    Ok(Seen {
        step_s,
        steps,
        cut_off: out_of_time && last.step < wanted,
        stages: (0..last.holders.len()).map(stage).collect(),
        wan_bytes: (last.wan_bytes - first.wan_bytes) as f64 / steps as f64,
    })
}
