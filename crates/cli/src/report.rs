//! What is left of a run for people: `report.md` and the plot `loss.svg`, made from the event log.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use anyhow::Result;
use starling_corpus::ngram::DEFAULT_ORDER;
use starling_corpus::{NGram, Sampler};
use starling_model::pipeline;
use starling_node::events::{self, Event};

use crate::plot::{self, Series, Style};
use crate::run_folder::{RunFolder, write_whole};
use crate::session::Session;
use crate::words;

/// What a loss on generated languages can be compared with, in nats per token.
pub struct Yardsticks {
    /// A 5-gram model with Kneser-Ney smoothing, trained on the same documents.
    pub five_gram: f64,
    /// The generator's own probabilities: nobody can do better on average.
    pub bound: f64,
}

impl Yardsticks {
    /// Measures them on the held-out documents; `None` where the corpus was not generated.
    pub fn measure(sampler: &Sampler) -> Option<Yardsticks> {
        let corpus = sampler.corpus();
        let world = corpus.synthetic.as_ref()?;
        let (shard, _) = corpus.sources.first()?;
        let document = |index: u64| {
            let mut tokens = Vec::new();
            if let Some(range) = shard.document(index) {
                shard.read(range, &mut tokens);
            }
            tokens
        };
        let training = sampler.training_documents(0)?.map(document);
        let model = NGram::train(
            DEFAULT_ORDER,
            corpus.tokeniser.vocabulary(),
            corpus.tokeniser.end_of_text(),
            training,
        );
        let (mut tokens, mut bound, mut five_gram) = (0, 0.0, 0.0);
        for document in sampler.held_out_documents(0)?.map(document) {
            let truth = world.score(&document).ok()?;
            tokens += truth.len();
            bound -= truth.iter().sum::<f64>();
            five_gram -= model.log_probability(&document).iter().sum::<f64>();
        }
        (tokens > 0)
            .then(|| Yardsticks { five_gram: five_gram / tokens as f64, bound: bound / tokens as f64 })
    }

    /// How much of the way from the 5-gram model to the bound a loss has gone.
    pub fn closed(&self, loss: f64) -> f64 {
        (self.five_gram - loss) / (self.five_gram - self.bound)
    }
}

/// Another training that is laid beside the run's.
#[derive(Default)]
pub struct Beside {
    /// What it is called.
    pub name: String,
    /// Its loss, by step.
    pub losses: BTreeMap<u64, f64>,
    /// What is to be said of the two, a line each.
    pub lines: Vec<String>,
}

/// Writes report and plot; returns the report.
pub fn write(
    folder: &RunFolder,
    session: &Session,
    yardsticks: Option<&Yardsticks>,
    beside: &Beside,
) -> Result<String> {
    let history = History::read(folder)?;
    let name = &session.reference.run().name;
    write_whole(&folder.plot(), &history.plot(name, yardsticks, beside))?;
    let mut report = history.report(session, yardsticks);
    beside.lines.iter().for_each(|line| report.push_str(&format!("- {line}\n")));
    write_whole(&folder.report(), &report)?;
    Ok(report)
}

/// What the model's own operations come to, and how much that is of what this machine's cores can do (MFU).
fn speed(session: &Session, tokens_per_s: f64) -> Option<String> {
    let run = session.reference.run();
    let architecture = run.model.architecture(session.definition.vocabulary);
    let forward: u64 =
        architecture.units().into_iter().map(|unit| architecture.forward_operations(unit)).sum();
    // Backward is twice forward.
    let done = 3.0 * forward as f64 * tokens_per_s;
    let peak = pipeline::peak(&run.train).ok()??;
    Some(format!(
        "{}FLOP/s of the model's own, {:.0} % of the {}FLOP/s that this machine's cores can do (MFU)",
        words::count(done),
        100.0 * done / peak,
        words::count(peak),
    ))
}

/// Steps and evaluations of a run: what was done again after a crash counts once.
#[derive(Default)]
struct History {
    /// Step → (loss, tokens, seconds).
    steps: BTreeMap<u64, (f64, u64, f64)>,
    /// Steps done → (loss, bits per byte).
    evaluations: BTreeMap<u64, (f64, f64)>,
    starts: usize,
    weights: Option<String>,
}

impl History {
    fn read(folder: &RunFolder) -> Result<History> {
        let mut history = History::default();
        for line in events::read(&folder.events())?.lines {
            match line.event {
                Event::Started { step, .. } => {
                    history.starts += 1;
                    history.steps.split_off(&step);
                    history.evaluations.split_off(&(step + 1));
                }
                Event::Step { step, loss, tokens, seconds, weights, .. } => {
                    history.steps.insert(step, (loss, tokens, seconds));
                    history.weights = weights.or(history.weights);
                }
                Event::Evaluated { step, loss, bits_per_byte, .. } => {
                    history.evaluations.insert(step, (loss, bits_per_byte));
                }
                // Nobody may have been left to tell them in the end.
                Event::Weights { weights, .. } | Event::Finished { weights, .. } if !weights.is_empty() => {
                    history.weights = Some(weights)
                }
                Event::WentBack { to, .. } => drop(history.steps.split_off(&to)),
                _ => {}
            }
        }
        Ok(history)
    }

    fn report(&self, session: &Session, yardsticks: Option<&Yardsticks>) -> String {
        let run = session.reference.run();
        let tokens: u64 = self.steps.values().map(|step| step.1).sum();
        let seconds: f64 = self.steps.values().map(|step| step.2).sum();
        let mut out = format!("# {}\n\n", run.name);
        let _ = writeln!(
            out,
            "{} parameters, {} steps, {} tokens in {} ({} tokens/s){}\n",
            words::count(session.parameters() as f64),
            self.steps.len(),
            words::count(tokens as f64),
            words::time(Duration::from_secs_f64(seconds)),
            words::count(tokens as f64 / seconds.max(1e-9)),
            if self.starts > 1 {
                format!(", in {} processes one after another", self.starts)
            } else {
                String::new()
            },
        );
        if let Some(line) = speed(session, tokens as f64 / seconds.max(1e-9)) {
            let _ = writeln!(out, "{line}\n");
        }
        out.push_str("| | nats per token | perplexity | bits per byte |\n|---|---|---|---|\n");
        if let Some((loss, ..)) = self.steps.values().next_back() {
            let _ = writeln!(out, "| training loss, last step | {loss:.4} | {:.2} | |", loss.exp());
        }
        let held_out = self.evaluations.values().next_back();
        if let Some((loss, bits)) = held_out {
            let _ = writeln!(out, "| **held-out loss** | **{loss:.4}** | {:.2} | {bits:.3} |", loss.exp());
        }
        if let Some(yardsticks) = yardsticks {
            let Yardsticks { five_gram, bound } = yardsticks;
            let _ = writeln!(
                out,
                "| 5-gram, Kneser-Ney, same text | {five_gram:.4} | {:.2} | |",
                five_gram.exp()
            );
            let _ = writeln!(out, "| entropy of the language (bound) | {bound:.4} | {:.2} | |", bound.exp());
            if let Some((loss, _)) = held_out {
                let percent = 100.0 * yardsticks.closed(*loss);
                let verdict = if percent >= 0.0 {
                    format!(
                        "The model has gone {percent:.0} % of the way from the 5-gram model to the bound."
                    )
                } else {
                    "The model is still behind the 5-gram model: train it longer.".to_string()
                };
                let _ = writeln!(
                    out,
                    "
{verdict}"
                );
            }
        }
        if session.reference.skipped() > 0 {
            let _ = writeln!(
                out,
                "\n{} updates were skipped: the gradient was not finite, or was left out because of a spike of the loss.",
                session.reference.skipped()
            );
        }
        let _ = writeln!(out, "\n- run identity: `{}`", session.definition.identity());
        if let Some(weights) = &self.weights {
            let _ = writeln!(out, "- hash of the weights: `{weights}`");
        }
        out
    }

    fn plot(&self, name: &str, yardsticks: Option<&Yardsticks>, beside: &Beside) -> String {
        let losses: Vec<(f64, f64)> = self.steps.iter().map(|(step, s)| (*step as f64 + 1.0, s.0)).collect();
        let held_out = self.evaluations.iter().map(|(step, e)| (*step as f64, e.0)).collect();
        let window = (losses.len() / 50).max(1);
        let smooth = plot::smoothed(&losses, window);
        let series = |name: &str, colour, points, style| Series { name: name.into(), colour, points, style };
        let mut all = vec![
            series("training loss, each step", "#7aa6d8", plot::thinned(losses), Style::Thin),
            series("training loss, running mean", "#1f5fa8", plot::thinned(smooth), Style::Line),
            series("held-out loss", "#d1495b", held_out, Style::Dots),
        ];
        if !beside.losses.is_empty() {
            let points = beside.losses.iter().map(|(step, loss)| (*step as f64 + 1.0, *loss)).collect();
            all.push(series(&beside.name, "#e0a030", points, Style::Dots));
        }
        if let Some(Yardsticks { five_gram, bound }) = yardsticks {
            all.push(series("5-gram, Kneser-Ney", "#8a6d3b", vec![(0.0, *five_gram)], Style::Level));
            all.push(series("entropy of the language", "#2e7d32", vec![(0.0, *bound)], Style::Level));
        }
        plot::svg(&format!("{name}: loss"), "step", "nats per token", &all)
    }
}
