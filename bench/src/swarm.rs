//! `cargo xtask bench swarm`: what it costs that anything may fail. Real processes of the release build on this
//! machine; the devices are emulated (true sizes, modelled time, no arithmetic), so that two cores are enough.

mod flock;
mod hivemind;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};

use starling_model::pipeline;
use starling_model::run::Run;
use starling_model::stage::Keep;

use self::flock::{Flock, Step, now};
use super::{Arguments, Figure, Must};
use xtask::tool::{run as run_tool, tool};

/// What measures a part.
type Part = fn() -> Result<Vec<Figure>>;

/// The parts, in the order in which they are measured.
const PARTS: &[(&str, Part)] = &[
    ("kill", after_a_kill),
    ("silence", after_silence),
    ("overhead", overhead),
    ("failures", failure_a_minute),
    ("sum", all_reduce),
    ("many", many_peers),
    ("memory", memory),
    ("load", under_load),
];

pub fn run(arguments: &Arguments) -> Result<Vec<Figure>> {
    let wanted = |name: &str| arguments.only.as_deref().is_none_or(|only| only.split(',').any(|o| o == name));
    if !PARTS.iter().any(|(name, _)| wanted(name)) {
        let names: Vec<&str> = PARTS.iter().map(|(name, _)| *name).collect();
        bail!("swarm has the parts {}", names.join(", "));
    }
    run_tool(&mut tool("cargo build --release --locked --package starling"))?;
    let mut figures = Vec::new();
    for (name, measure) in PARTS.iter().filter(|(name, _)| wanted(name)) {
        eprintln!("{name} …");
        let measured = measure()?;
        for figure in &measured {
            eprintln!("  {} = {:.4} {}", figure.name, figure.value, figure.unit);
        }
        figures.extend(measured);
    }
    Ok(figures)
}

/// Two stages of about 20 ms a microbatch for eight peers, in steps of 32 microbatches: about 0.2 s.
const SMALL: &str = r#"
model = { context = 64, width = 64, layers = 8, heads = 2 }
data = { synthetic = { documents = 200 } }
train = { steps = 1000000, batch = 128, microbatch = 4, lots = 8, stages = 2, hash_every = 0, device = "emulated:0.0165" }
checkpoint = { every = 0 }
"#;

fn figure(name: impl Into<String>, value: f64, unit: &str, must: Option<Must>) -> Figure {
    Figure { name: name.into(), value, unit: unit.into(), must }
}

/// Seconds from each closed step to the next, with the moment of the latter.
fn durations(steps: &[Step]) -> Vec<(f64, f64)> {
    steps.windows(2).map(|pair| (pair[1].at, pair[1].at - pair[0].at)).collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// For each moment, by how much the longest of the steps that were open in the seconds after it took longer than the
/// median of all.
fn excess(steps: &[Step], moments: &[f64], within: f64) -> Vec<f64> {
    let durations = durations(steps);
    let usual = median(durations.iter().map(|(_, seconds)| *seconds).collect());
    let longest = |moment: &f64| {
        let began_by = |(end, seconds): &&(f64, f64)| *end > *moment && end - seconds < moment + within;
        durations.iter().filter(began_by).map(|(_, seconds)| seconds - usual).reduce(f64::max)
    };
    moments.iter().filter_map(longest).collect()
}

fn recovery(name: &str, moments: &[f64], steps: &[Step], must: f64) -> Vec<Figure> {
    // A kill at the very end of a step is noticed in the next.
    const WITHIN: f64 = 1.0;
    let excess = excess(steps, moments, WITHIN);
    let worst = excess.iter().copied().fold(f64::NAN, f64::max);
    vec![
        figure(format!("{name}: longest of {}", excess.len()), worst, "s", Some(Must::AtMost(must))),
        figure(format!("{name}: median"), median(excess), "s", None),
    ]
}

/// From `kill -9` until the step is closed, beyond what a step takes: an upper bound of the time until every lost
/// microbatch is counted again, since what is computed again is in it.
fn after_a_kill() -> Result<Vec<Figure>> {
    let mut flock = Flock::start("kill", SMALL, "aaaaaaaa")?;
    flock.go_on_for(20)?;
    let mut moments = Vec::new();
    for round in 0..12 {
        moments.push(now());
        flock.kill(round % 8)?;
        std::thread::sleep(Duration::from_millis(2500));
        flock.replace(round % 8)?;
        // Not always at the same place of a step.
        std::thread::sleep(Duration::from_millis(2500 + 37 * round as u64));
        flock.go_on_for(5)?;
    }
    Ok(recovery("kill -9 until the step is closed, beyond a usual step", &moments, &flock.steps()?, 2.0))
}

/// The same for a peer whose packets are dropped.
fn after_silence() -> Result<Vec<Figure>> {
    let mut flock = Flock::start("silence", SMALL, "aaaaaaac")?;
    flock.go_on_for(20)?;
    let (mut moments, mut healed) = (Vec::new(), Vec::new());
    for round in 0..6 {
        moments.push(now());
        flock.links("a-c=cut")?;
        flock.go_on_for(20)?;
        healed.push(now());
        flock.links("")?;
        std::thread::sleep(Duration::from_millis(8000 + 41 * round));
        flock.go_on_for(20)?;
    }
    let steps = flock.steps()?;
    let mut figures =
        recovery("silence until the step is closed, beyond a usual step", &moments, &steps, 5.0);
    // Who comes back must not hold the others up.
    let after = durations(&steps)
        .into_iter()
        .filter(|(end, _)| healed.iter().any(|at| (*at..*at + 8.0).contains(end)));
    let longest = after.map(|(_, seconds)| seconds).fold(f64::NAN, f64::max);
    figures.push(figure("the longest step while the silent one comes back", longest, "s", None));
    Ok(figures)
}

/// Ten minutes with twenty threads that do nothing but compute: is anybody removed who lives?
fn under_load() -> Result<Vec<Figure>> {
    const MINUTES: u64 = 10;
    let mut flock = Flock::start("load", SMALL, "aaaaaaaa")?;
    flock.go_on_for(20)?;
    let over = Arc::new(AtomicBool::new(false));
    for _ in 0..20 {
        let over = over.clone();
        std::thread::spawn(move || while !over.load(Ordering::Relaxed) {});
    }
    for _ in 0..MINUTES {
        std::thread::sleep(Duration::from_secs(60));
        flock.go_on_for(1)?; // It is alive, and works.
    }
    over.store(true, Ordering::Relaxed);
    let removed = flock.news("is removed")?;
    removed.iter().for_each(|text| eprintln!("  {text}"));
    let name = format!("false removals in {MINUTES} minutes at a load of 20");
    Ok(vec![figure(name, removed.len() as f64, "", Some(Must::AtMost(0.0)))])
}

/// What a step takes if computing takes nothing and tensors are small.
fn overhead() -> Result<Vec<Figure>> {
    let run = SMALL.replace("emulated:0.0165", "emulated:1000").replace("width = 64", "width = 16");
    let mut figures = Vec::new();
    for (microbatches, must) in [(8, Some(Must::AtMost(50.0))), (32, None)] {
        let run =
            run.replace("batch = 128, microbatch = 4", &format!("batch = {microbatches}, microbatch = 1"));
        let mut flock = Flock::start("overhead", &run, "aaaaaaaa")?;
        flock.go_on_for(300)?;
        let steps = flock.steps()?;
        let steps = durations(&steps[100..]).iter().map(|(_, seconds)| 1e3 * seconds).collect();
        let name = format!("a step of {microbatches} microbatches that costs nothing, 8 peers in a site");
        figures.push(figure(name, median(steps), "ms", must));
    }
    Ok(figures)
}

/// Minutes with one failure and minutes without, in turns; who was killed is back after five seconds.
fn failure_a_minute() -> Result<Vec<Figure>> {
    let mut flock = Flock::start("failures", SMALL, "aaaaaaaa")?;
    flock.go_on_for(50)?;
    let (mut calm, mut rough) = (0.0, 0.0);
    for minute in 0..8 {
        let began = now();
        if minute % 2 == 1 {
            let victim = (3 * minute + 1) % 8;
            std::thread::sleep(Duration::from_millis(10_000 + 977 * minute as u64));
            flock.kill(victim)?;
            std::thread::sleep(Duration::from_secs(5));
            flock.replace(victim)?;
        }
        std::thread::sleep(Duration::from_secs_f64((began + 60.0 - now()).max(0.0)));
        let until = began + 60.0;
        let tokens: f64 = flock
            .steps()?
            .iter()
            .filter(|step| (began..until).contains(&step.at))
            .map(|step| step.tokens)
            .sum();
        *(if minute % 2 == 1 { &mut rough } else { &mut calm }) += tokens;
    }
    let name = "throughput with a failure a minute ÷ without, spare replicas";
    Ok(vec![
        figure(name, rough / calm, "", Some(Must::AtLeast(0.93))),
        figure("the same, without", calm / 240.0, "tokens/s", None),
    ])
}

/// A step of one stage with 25 M parameters and four holders, in which computing takes nothing: it is a sum over all
/// holders, and everything else that a step is, but what a device would take to add and update (hivemind does not do
/// that either; it does copy what came).
fn all_reduce() -> Result<Vec<Figure>> {
    let run = |reduce: &str| {
        format!(
            "model = {{ context = 8, width = 512, layers = 8, heads = 8 }}\n\
             data = {{ synthetic = {{ documents = 200 }} }}\n\
             train = {{ steps = 1000000, batch = 16, microbatch = 1, lots = 16, stages = 1, hash_every = 0, \
             device = \"emulated:1000\" }}\ncheckpoint = {{ every = 0 }}\nswarm = {{ reduce = \"{reduce}\" }}\n"
        )
    };
    let mut figures = Vec::new();
    let (mut seconds, mut theirs) = (Vec::new(), Vec::new());
    for reduce in ["fast", "exact"] {
        theirs.push(hivemind::all_reduce()?);
        let mut flock = Flock::start("sum", &run(reduce), "aaaa")?;
        flock.go_on_for(12)?;
        let (steps, holders) = (flock.steps()?, flock.holders()?);
        // Only steps to whose sum all four have something to give.
        let whole =
            durations(&steps).into_iter().zip(&holders[1..]).skip(1).filter(|(_, holders)| **holders == 4);
        let whole: Vec<f64> = whole.map(|((_, seconds), _)| seconds).collect();
        if whole.len() < 5 {
            bail!("only {} of {} steps were summed over all four peers", whole.len(), steps.len());
        }
        let typical = median(whole);
        seconds.push(typical);
        let name = format!("a whole step with a sum of 25 M f32 over 4 peers, {reduce}");
        figures.push(figure(name, typical, "s", None));
    }
    // Before and after ours: the machine is not the same all the time.
    let theirs = (theirs[0] + theirs[1]) / 2.0;
    figures.push(figure("hivemind: the sum alone, group and all ready", theirs, "s", None));
    let name = "hivemind's time ÷ that of a whole step, fast";
    figures.push(figure(name, theirs / seconds[0], "", Some(Must::AtLeast(3.0))));
    Ok(figures)
}

/// Forty-eight peers in eight stages against six in two, the same model, work for each peer the same. The model is so
/// deep that the head, which stands in one stage of eight, makes that stage the slowest by no more than three percent.
fn many_peers() -> Result<Vec<Figure>> {
    let run = |reduce: &str, (batch, lots, stages): (u32, u32, u32)| {
        format!(
            "model = {{ context = 64, width = 128, layers = 64, heads = 4 }}\n\
             data = {{ synthetic = {{ documents = 200 }} }}\n\
             train = {{ steps = 1000000, batch = {batch}, microbatch = 1, lots = {lots}, stages = {stages}, \
             hash_every = 0, device = \"emulated:0.00678\" }}\ncheckpoint = {{ every = 0 }}\n\
             swarm = {{ reduce = \"{reduce}\" }}\n"
        )
    };
    let mut figures = Vec::new();
    for reduce in ["fast", "exact"] {
        let mut rates = Vec::new();
        for (peers, cut) in [(6, (210, 15, 2)), (48, (1680, 60, 8))] {
            let name = format!("many-{peers}-{reduce}");
            let mut flock = Flock::start(&name, &run(reduce, cut), &"abc".repeat(peers / 3))?;
            flock.go_on_for(2)?;
            let (began, (coordinator, all)) = (now(), flock.processor_seconds()?);
            flock.go_on_for(4)?;
            let (seconds, (coordinator_after, all_after)) = (now() - began, flock.processor_seconds()?);
            let steps = flock.steps()?;
            let (first, last) = (steps[1], steps[steps.len() - 1]);
            let tokens: f64 = steps[2..].iter().map(|step| step.tokens).sum();
            rates.push(tokens / (last.at - first.at) / peers as f64);
            if peers == 48 {
                let share = 100.0 * (coordinator_after - coordinator) / seconds;
                let name = format!("control plane with 48 peers, of one core, {reduce}");
                figures.push(figure(name, share, "%", Some(Must::AtMost(10.0))));
                let all = 100.0 * (all_after - all) / seconds;
                figures.push(figure(format!("all 48 peers, of one core, {reduce}"), all, "%", None));
            }
        }
        let name = format!("tokens/s for each of 48 peers ÷ of 6, {reduce}");
        // In exact mode this one machine has to encrypt, move and add up several times as much, for all 48 at once.
        let must = (reduce == "fast").then_some(Must::AtLeast(0.95));
        figures.push(figure(name, rates[1] / rates[0], "", must));
    }
    Ok(figures)
}

/// What a worker of a real model takes, against what the plan says: with lots of one microbatch and of four.
fn memory() -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let runs =
        [("cpu", "exact", 4, 4), ("cpu", "exact", 32, 8), ("cpu", "fast", 32, 8), ("naive", "exact", 32, 8)];
    for (device, reduce, batch, lots) in runs {
        let text = format!(
            "model = {{ context = 16, width = 512, layers = 16, heads = 8 }}\n\
             data = {{ synthetic = {{ documents = 200 }} }}\n\
             train = {{ steps = 1000000, batch = {batch}, microbatch = 1, lots = {lots}, stages = 2, hash_every = 0, \
             device = \"{device}\" }}\n\
             checkpoint = {{ every = 0 }}\nswarm = {{ reduce = \"{reduce}\" }}\n"
        );
        let run = Run::parse(&text, "memory.toml", &[])?;
        let (architecture, rule) = (run.model.architecture(257), run.optimiser.rule());
        let stages = pipeline::plan(&architecture, rule, (&run.train, run.swarm), Keep::All)?;
        let planned = stages.iter().map(|stage| stage.memory_bytes).max().unwrap_or(0) as f64;
        let mut flock = Flock::start("memory", &text, "aaaa")?;
        flock.go_on_for(8)?;
        let peaks: Vec<f64> = (0..4).map(|worker| flock.peak_bytes(worker)).collect::<Result<_>>()?;
        let most = peaks.into_iter().fold(0.0, f64::max);
        let of = format!("{device}, {reduce}, lots of {}", batch / lots);
        let name = format!("a worker's memory ÷ what plan says, the largest of 4, {of}");
        figures.push(figure(name, most / planned, "", Some(Must::NearOne(0.05))));
        figures.push(figure(format!("what plan says, {of}"), planned / 1e6, "MB", None));
    }
    Ok(figures)
}
