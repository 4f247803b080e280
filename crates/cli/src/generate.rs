//! `starling generate`: lets a trained model write.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use starling_model::generate::{Choice, generate};

use crate::weights::Weights;
use crate::words;

/// Let a trained model write
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  starling generate runs/quickstart\n  starling generate runs/my --prompt 'Once upon' --tokens 300 --temperature 0.7\n  starling generate gpt2-folder --prompt 'Q: ' --top-p 0.9 --stop 'Q:'"
)]
pub struct Arguments {
    /// A run's folder, one of its checkpoints, or a folder that Hugging Face's transformers wrote
    path: PathBuf,
    /// What the text begins with
    #[arg(long, default_value = "")]
    prompt: String,
    /// Tokens at the most
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// 0 always takes the likeliest token; 1 draws as the model predicts
    #[arg(long, default_value_t = Choice::default().temperature)]
    temperature: f64,
    /// Draw from so many of the likeliest tokens; 0 means all
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Draw from the likeliest tokens that together have this probability; 1 means all
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// End the text before this; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Seed of the draws
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Threads; 0 means one for every core
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let weights = Weights::open(&arguments.path)?;
    let tokeniser = &weights.tokeniser;
    let mut tokens = vec![weights.begin];
    tokens.extend(tokeniser.encode(&arguments.prompt).context("the model does not know the prompt's words")?);
    let Arguments { temperature, top_k, top_p, seed, .. } = *arguments;
    if !(top_p > 0.0 && top_p <= 1.0) {
        bail!("--top-p {top_p} is not a probability; use more than 0, and 1 at the most");
    }
    let context = weights.run.model.context.min(tokens.len().saturating_add(arguments.tokens));
    let stages = weights.stages(context, arguments.threads)?;
    let mut shown = Shown::new(tokeniser, &tokens[1..], &arguments.stop)?;
    let choice = Choice { temperature, top_k, top_p, seed };
    let see = |token| shown.see(token);
    generate(&stages, context, tokens, arguments.tokens, choice, &weights.ends, see)?;
    shown.finish();
    words::show("\n")
}

/// Text as it comes: shown as far as it cannot change any more.
struct Shown<'a> {
    tokeniser: &'a starling_corpus::Tokeniser,
    stops: Vec<&'a str>,
    tokens: Vec<u32>,
    /// Bytes of the prompt, and of all that was shown.
    prompt: usize,
    bytes: usize,
}

impl<'a> Shown<'a> {
    fn new(
        tokeniser: &'a starling_corpus::Tokeniser,
        prompt: &[u32],
        stops: &'a [String],
    ) -> Result<Shown<'a>> {
        let text = tokeniser.decode(prompt);
        words::show(&text)?;
        let stops = stops.iter().map(String::as_str).filter(|stop| !stop.is_empty()).collect();
        Ok(Shown { tokeniser, stops, tokens: prompt.to_vec(), prompt: text.len(), bytes: text.len() })
    }

    /// Shows what is new; ends the text where it is to stop.
    fn see(&mut self, token: u32) -> ControlFlow<()> {
        self.tokens.push(token);
        let text = self.tokeniser.decode(&self.tokens);
        let new = text.get(self.prompt..).unwrap_or("");
        let (written, is_over) = up_to_stop(new, &self.stops);
        self.show(&text[..text.len() - new.len() + written]);
        if is_over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Shows what was held back.
    fn finish(&mut self) {
        let text = self.tokeniser.decode(&self.tokens);
        let new = text.get(self.prompt..).unwrap_or("");
        let stop = self.stops.iter().filter_map(|stop| new.find(stop)).min();
        self.show(&text[..text.len() - new.len() + stop.unwrap_or(new.len())]);
    }

    fn show(&mut self, text: &str) {
        // A character that is not whole yet ends the text as U+FFFD, and may still change.
        let whole = text.trim_end_matches('\u{FFFD}').len();
        if let Some(new) = text.get(self.bytes..whole) {
            let safe = if std::io::stdout().is_terminal() { words::printable(new) } else { new.to_string() };
            let _ = words::show(&safe); // What cannot be shown is lost on nobody.
            self.bytes = whole;
        }
    }
}

/// Bytes of a text that are surely before any of the stops, and whether one of them was reached: what may be the beginning
/// of one is held back.
fn up_to_stop(text: &str, stops: &[&str]) -> (usize, bool) {
    if let Some(at) = stops.iter().filter_map(|stop| text.find(stop)).min() {
        return (at, true);
    }
    let begins = |&at: &usize| stops.iter().any(|stop| stop.starts_with(&text[at..]));
    let ends = text.char_indices().map(|(at, _)| at);
    (ends.into_iter().find(begins).unwrap_or(text.len()), false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_held_back_while_it_may_be_the_beginning_of_a_stop() {
        let stops = ["\nQ:", "END"];
        for (text, expected) in [
            ("an answer", (9, false)),
            ("an answer\n", (9, false)),
            ("an answer\nQ", (9, false)),
            ("an answer\nQ:", (9, true)),
            ("an answer\nR", (11, false)),
            ("THE EN", (4, false)),
            ("THE END\nQ:", (4, true)),
            ("", (0, false)),
        ] {
            assert_eq!(up_to_stop(text, &stops), expected, "{text:?}");
        }
        assert_eq!(up_to_stop("anything", &[]), (8, false));
    }
}
