//! `starling generate`: lets a trained model write.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use starling_model::generate::{Choice, generate};

use crate::weights::Weights;
use crate::words;

/// Let a trained model write
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  starling generate runs/quickstart\n  starling generate runs/my --prompt 'Once upon' --tokens 300 --temperature 0.7"
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
    /// Seed of the draws
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Threads; 0 means one for every core
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let weights = Weights::open(&arguments.path)?;
    let stages = weights.stages(arguments.threads)?;
    let tokeniser = &weights.tokeniser;
    let end = tokeniser.end_of_text();
    let mut tokens = vec![end];
    tokens.extend(tokeniser.encode(&arguments.prompt).context("the model does not know the prompt's words")?);
    let Arguments { temperature, top_k, seed, .. } = *arguments;
    let mut shown = Shown::new(tokeniser, &tokens[1..])?;
    generate(
        &stages,
        weights.run.model.context,
        tokens,
        arguments.tokens,
        Choice { temperature, top_k, seed },
        Some(end),
        |token| shown.see(token),
    )?;
    words::show("\n")
}

/// Text as it comes: shown as far as its last character is whole.
struct Shown<'a> {
    tokeniser: &'a starling_corpus::Tokeniser,
    tokens: Vec<u32>,
    bytes: usize,
}

impl<'a> Shown<'a> {
    fn new(tokeniser: &'a starling_corpus::Tokeniser, prompt: &[u32]) -> Result<Shown<'a>> {
        let text = tokeniser.decode(prompt);
        words::show(&text)?;
        Ok(Shown { tokeniser, tokens: prompt.to_vec(), bytes: text.len() })
    }

    fn see(&mut self, token: u32) {
        self.tokens.push(token);
        let text = self.tokeniser.decode(&self.tokens);
        // A character that is not whole yet ends the text as U+FFFD, and may still change.
        let whole = text.trim_end_matches('\u{FFFD}').len();
        if whole > self.bytes {
            let new = &text[self.bytes..whole];
            let safe = if std::io::stdout().is_terminal() { words::printable(new) } else { new.to_string() };
            let _ = words::show(&safe); // What cannot be shown is lost on nobody.
            self.bytes = whole;
        }
    }
}
