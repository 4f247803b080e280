//! `starling plan`: what a run would need, how it would go and what would hold it up, before anything is trained.
//!
//! What can be computed is computed ([`arithmetic`]); how a step goes is simulated ([`forecast`]) by the swarm's own code on
//! virtual time, and so is what could be changed ([`changes`]).

mod arithmetic;
mod case;
mod changes;
mod forecast;
mod story;
mod swarm;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use starling_corpus::{CorpusFolder, Tokeniser, World};
use starling_model::pipeline::StagePlan;
use starling_model::run::Run;

use crate::train;
use crate::units::Time;
use crate::weights::{self, Weights};
use crate::words;
use case::Case;
use forecast::{Budget, Churn};
use story::Story;
use swarm::SwarmArguments;

/// Simulations of a run as it is: with everything, and three with something left out.
const AS_IT_IS: u32 = 4;
/// More deaths than that of each peer in an hour leave no time to train.
const MOST_DEATHS: f64 = 360.0;

/// What a run would need, how it would go, and what would hold it up
///
/// Cuts the model into stages and says what a peer of each needs. Then the swarm's own code runs some steps on virtual time,
/// with the sizes of your model, on devices and links that you name: how long a step takes and where its time goes, what
/// the bottleneck is, and which changes would bring more. Trains nothing, and opens no connection.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  starling plan run.toml --stages 4 --peers 8 --device 8 --link 200mbit,50ms\n  \
        starling plan run.toml --site 8x30:24GB --site 4x60:80GB,2x30:24GB --link 1gbit,20ms\n  \
        starling plan run.toml --peers 16 --deaths-per-hour 0.5    # preemptible machines that live two hours\n  \
        starling plan run.toml --device here                       # as fast as this machine\n\n\
        What it does not count: trials on held-out text, updates, and what encrypting, copying and adding up tensors costs a\n\
        processor, which shows where microbatches take less than a tenth of a second. Name a speed that a device was seen to\n\
        reach with this model (--device here measures this machine), not that of its data sheet."
)]
pub struct Arguments {
    /// A run file (.toml), or any text file
    input: PathBuf,
    /// Override a setting, as --set model.width=1024; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Stages to cut the model into [default: the run's]
    #[arg(long)]
    stages: Option<usize>,
    /// Tokens that the model knows, if the corpus is not built yet [default: the data's]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..=10_000_000))]
    vocabulary: Option<u32>,
    #[command(flatten)]
    swarm: SwarmArguments,
    /// How often each peer dies in an hour, as 0.5 for machines that live two hours on average; each is replaced
    #[arg(long, value_name = "DEATHS")]
    deaths_per_hour: Option<f64>,
    /// How long after a death the peer's replacement is there
    #[arg(long, value_name = "TIME", default_value = "1m", requires = "deaths_per_hour")]
    replaced_after: Time,
    /// How long to simulate at the most; what could not be finished is said
    #[arg(long, value_name = "TIME", default_value = "30s")]
    patience: Time,
    /// Only what can be computed: no prediction
    #[arg(long, conflicts_with = "deaths_per_hour")]
    no_simulation: bool,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let deaths = arguments.deaths_per_hour;
    ensure!(
        deaths.is_none_or(|deaths| deaths > 0.0 && deaths <= MOST_DEATHS),
        "--deaths-per-hour is how often each peer dies: more than 0 and at most {MOST_DEATHS}, as 0.5 for one that lives \
         two hours on average"
    );
    let mut overrides = arguments.set.clone();
    overrides.extend(arguments.stages.map(|stages| format!("train.stages={stages}")));
    let mut run = train::parse(&arguments.input, &overrides)?;
    weights::initial(&mut run)?;
    let vocabulary = match arguments.vocabulary {
        Some(vocabulary) => vocabulary as usize,
        None => vocabulary(&run)?,
    };
    let swarm = arguments.swarm.resolve(&run, vocabulary)?;
    report(&Case { run, vocabulary, swarm }, arguments)
}

/// First what is known at once, then what has to be simulated.
fn report(case: &Case, arguments: &Arguments) -> Result<ExitCode> {
    let stages = case.stages()?;
    let mut out = story::heading(case, &stages);
    arithmetic::stage_table(&mut out, case, &stages);
    words::show(&out)?;
    let mut out = String::new();
    if arguments.no_simulation {
        arithmetic::verdict(&mut out, case, &stages);
    } else {
        out = predict(case, &stages, arguments).context("there is no prediction")?;
    }
    arithmetic::beside(&mut out, case, &stages)?;
    words::show(&out)
}

fn predict(case: &Case, stages: &[StagePlan], arguments: &Arguments) -> Result<String> {
    let churns = u32::from(arguments.deaths_per_hour.is_some());
    let mut budget = Budget::new(arguments.patience.0, AS_IT_IS + churns);
    let told = simulate(case, stages, arguments, &mut budget);
    budget.finish();
    told
}

fn simulate(case: &Case, stages: &[StagePlan], arguments: &Arguments, budget: &mut Budget) -> Result<String> {
    let candidates = changes::candidates(case);
    let churns = u32::from(arguments.deaths_per_hour.is_some());
    budget.expect(AS_IT_IS + churns + candidates.len() as u32);
    let mut forecast = forecast::forecast(case, "the run as it is", budget)?;
    let parts = forecast::parts(case, &mut forecast, budget)?;
    let back: Duration = arguments.replaced_after.0;
    let tried = changes::try_all(candidates, &forecast, budget);
    let deaths = arguments.deaths_per_hour;
    let churn: Option<Result<Churn>> =
        deaths.map(|deaths| forecast::with_deaths(case, &forecast, deaths, back, budget));
    let story = Story { case, stages, forecast: &forecast, parts: &parts };
    let mut out = story.prediction(budget.elapsed());
    story.parts(&mut out);
    story.stages(&mut out);
    story.bottleneck(&mut out);
    if let (Some(churn), Some(deaths)) = (churn, arguments.deaths_per_hour) {
        story.churn(&mut out, &churn, deaths, back);
    }
    story.changes(&mut out, &tried);
    Ok(out)
}

fn vocabulary(run: &Run) -> Result<usize> {
    if let Some(initial) = &run.initial {
        return Ok(Weights::open(&initial.path)?.vocabulary);
    }
    let data = &run.data;
    if let Some(synthetic) = &data.synthetic {
        return Ok(World::new(synthetic).tokeniser().vocabulary());
    }
    match data.sources.iter().find(|source| source.path.is_dir()) {
        Some(source) => Ok(CorpusFolder::open(&source.path)?.tokeniser.vocabulary()),
        None => Ok(Tokeniser::Bytes.vocabulary()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use starling_model::run::Keeping;
    use starling_model::stage::Keep;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: SwarmArguments,
    }

    /// Six blocks in four stages with one more setting, on the swarm that the flags name.
    pub fn case(setting: &str, flags: &str) -> Case {
        let text = "data = { synthetic = {} }\n\
            train = { stages = 4, batch = 64, microbatch = 2, lots = 8, steps = 1000 }\n\
            model = { width = 512, heads = 8, layers = 6, context = 128 }";
        let settings: Vec<String> =
            [setting].iter().filter(|s| !s.is_empty()).map(ToString::to_string).collect();
        let run = Run::parse(text, "a.toml", &settings).unwrap();
        let vocabulary = vocabulary(&run).unwrap();
        let line = Line::parse_from(["plan"].into_iter().chain(flags.split_whitespace()));
        let swarm = line.arguments.resolve(&run, vocabulary).unwrap();
        Case { run, vocabulary, swarm }
    }

    fn predicted(case: &Case) -> (forecast::Forecast, forecast::Parts) {
        let mut budget = Budget::new(Duration::from_secs(120), AS_IT_IS);
        let mut forecast = forecast::forecast(case, "", &mut budget).unwrap();
        let parts = forecast::parts(case, &mut forecast, &mut budget).unwrap();
        (forecast, parts)
    }

    fn told(case: &Case) -> String {
        let (forecast, parts) = predicted(case);
        let stages = case.stages().unwrap();
        let story = Story { case, stages: &stages, forecast: &forecast, parts: &parts };
        let mut out = story.prediction(Duration::ZERO);
        story.parts(&mut out);
        story.bottleneck(&mut out);
        out
    }

    const ONE_SITE: &str = "--sites 1 --lan 10gbit,0.1ms --device 0.05";

    #[test]
    fn the_stage_that_everybody_waits_for_is_named() {
        // Five blocks for four stages: one has two of them.
        let out = told(&case("model.layers=5", &format!("{ONE_SITE} --peers 4")));
        let (two, _) = case("model.layers=5", "")
            .stages()
            .unwrap()
            .into_iter()
            .enumerate()
            .max_by_key(|(_, stage)| stage.forward_operations)
            .unwrap();
        assert!(out.contains(&format!("Bottleneck: the compute of stage {two} (")), "{out}");
        assert!(out.contains(&format!("waiting for the slowest stage, {two} ")), "{out}");
    }

    #[test]
    fn a_slow_link_between_sites_is_waited_for() {
        let slow = case("", "--sites 2 --peers 8 --link 20mbit,10ms");
        let (forecast, parts) = predicted(&slow);
        assert!(parts.sums_s > 0.5 * forecast.step_s, "{parts:?}");
        assert!(told(&slow).contains("Bottleneck: the wire: the sums"));
        // One peer a stage: nothing is summed, and every other boundary crosses.
        let thin = case("", "--sites 2 --peers 4 --link 20mbit,10ms");
        assert!(told(&thin).contains("Bottleneck: the wire: activations"));
    }

    #[test]
    fn the_parts_are_the_step_and_none_is_less_than_nothing() {
        for flags in ["--peers 8", "--sites 1 --peers 4", "--sites 3 --peers 9 --link 1gbit,5ms --device 0.1"]
        {
            let (forecast, parts) = predicted(&case("", flags));
            let all = [
                parts.computing_s,
                parts.uneven_s,
                parts.filling_s,
                parts.latency_s,
                parts.activations_s,
                parts.sums_s,
            ];
            assert!(all.iter().all(|part| *part >= 0.0), "{flags}: {parts:?}");
            assert!((all.iter().sum::<f64>() / forecast.step_s - 1.0).abs() < 1e-6, "{flags}: {parts:?}");
        }
    }

    #[test]
    fn more_peers_train_more_tokens_a_second() {
        let speed = |peers: usize| {
            let case = case("train.batch=256", &format!("{ONE_SITE} --peers {peers}"));
            predicted(&case).0.tokens_per_s
        };
        let (four, eight, sixteen) = (speed(4), speed(8), speed(16));
        assert!(eight > 1.6 * four && sixteen > 1.6 * eight, "{four} {eight} {sixteen}");
    }

    #[test]
    fn what_is_computed_twice_takes_its_time() {
        let ideal = |keep: &str| case(&format!("train.keep={keep}"), ONE_SITE).prepare().unwrap().ideal_s;
        // Nearly a third more: attention's probabilities are made again anyhow.
        assert!(
            (1.31..1.334).contains(&(ideal("input") / ideal("all"))),
            "{} {}",
            ideal("input"),
            ideal("all")
        );
    }

    #[test]
    fn a_change_says_how_to_ask_for_it_and_what_it_brings() {
        let slow = case("", "--sites 2 --peers 8 --link 100mbit,10ms");
        let mut budget = Budget::new(Duration::from_secs(120), 16);
        let before = forecast::forecast(&slow, "", &mut budget).unwrap();
        let tried = changes::try_all(changes::candidates(&slow), &before, &mut budget);
        let link = tried.iter().find(|tried| tried.change.how == "--link 200mbit,10ms").unwrap();
        assert!(link.is_worth_it() && link.gain > 0.2, "{}", link.gain);
        assert!(tried.is_sorted_by(|a, b| a.gain >= b.gain));
        let hows: Vec<&str> = tried.iter().map(|tried| tried.change.how.as_str()).collect();
        for how in ["--stages 3", "--stages 5", "--set swarm.reduce=fast", "--set train.lots=16"] {
            assert!(hows.contains(&how), "{how}: {hows:?}");
        }
        for setting in hows.iter().filter_map(|how| how.strip_prefix("--set ")) {
            let asked = case(setting, "--sites 2 --peers 8 --link 100mbit,10ms");
            let forecast = forecast::forecast(&asked, "", &mut budget).unwrap();
            let of = tried.iter().find(|tried| tried.change.how.ends_with(setting)).unwrap();
            assert!((forecast.step_s / of.forecast.step_s - 1.0).abs() < 1e-9, "{setting}");
        }
    }

    #[test]
    fn peers_that_die_cost_something_and_not_everything() {
        let case = case("", &format!("{ONE_SITE} --peers 12"));
        let mut budget = Budget::new(Duration::from_secs(120), 2);
        let calm = forecast::forecast(&case, "", &mut budget).unwrap();
        let churn = forecast::with_deaths(&case, &calm, 20.0, Duration::from_secs(30), &mut budget).unwrap();
        assert!(churn.deaths >= 10, "{churn:?}");
        assert!((0.3..0.99).contains(&(churn.tokens_per_s / calm.tokens_per_s)), "{churn:?} {calm:?}");
    }

    #[test]
    fn what_would_never_begin_is_refused_with_a_way_out() {
        let refused = |setting: &str, flags: &str| case(setting, flags).prepare().err().unwrap().to_string();
        let few = refused("", "--peers 3");
        assert!(few.contains("4 stages need at least one peer each, and there are 3"), "{few}");
        assert!(few.contains("--peers 4") && few.contains("--stages 3"), "{few}");
        // What does not fit is computed again, unless the run file says that all is to be kept.
        let mut small = case("train.microbatch=16", "--peers 8 --memory 600MB");
        assert!(small.stages().unwrap().iter().all(|stage| stage.keep == Keep::Input));
        assert!(small.prepare().is_ok());
        small.run.train.keep = Keeping::All;
        let small = small.prepare().err().unwrap().to_string();
        assert!(small.contains("--set train.keep=input"), "{small}");
        assert!(small.contains("none of 8 peers have that much (the largest: 600 MB)"), "{small}");
        assert!(small.contains("--stages 6") && small.contains("--set train.microbatch=2"), "{small}");
        let tiny = refused("", "--peers 8 --memory 10MB");
        assert!(tiny.contains("use peers with more memory"), "{tiny}");
        let mixed = case("", "--site 4x1:64GB --site 2x1:10MB").prepare().unwrap();
        assert_eq!((mixed.scenario.peers.len(), mixed.left_out), (4, 2));
    }
}
