//! `starling export`: a trained model as Hugging Face's transformers loads it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use starling_corpus::Tokeniser;
use starling_exchange::{Export, Format, export};
use starling_model::checkpoint::Checkpoint;

use crate::run_folder::checkpoint_at;
use crate::words;

/// Write a trained model as a folder that Hugging Face's transformers loads
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  starling export runs/my --out my-gpt2\n  python -c 'from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained(\"my-gpt2\")'"
)]
pub struct Arguments {
    /// A run's folder, or one of its checkpoints
    path: PathBuf,
    /// The folder to write; it must not exist
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// How numbers are stored
    #[arg(long, value_enum, default_value = "f32")]
    numbers: Numbers,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Numbers {
    F32,
    F16,
    Bf16,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let path = checkpoint_at(&arguments.path)?;
    let checkpoint = Checkpoint::open(&path)?;
    let tokeniser = &checkpoint.manifest.tokeniser;
    let written = match tokeniser {
        Tokeniser::HuggingFace(file) => Some((file.json().to_string(), file.end_of_text_name())),
        Tokeniser::Bytes => {
            Some((starling_exchange::byte_tokeniser(), starling_exchange::END_OF_TEXT.into()))
        }
        Tokeniser::Words { .. } | Tokeniser::Ids { .. } => None,
    };
    let format = match arguments.numbers {
        Numbers::F32 => Format::F32,
        Numbers::F16 => Format::F16,
        Numbers::Bf16 => Format::Bf16,
    };
    let files = written.as_ref().map(|(json, end)| (json.as_str(), end.as_str()));
    let what = Export { format, tokeniser: files, end_of_text: tokeniser.end_of_text() };
    for (key, value) in export(&checkpoint, &what, &arguments.out)? {
        words::tell(&format!(
            "note: transformers' config.json has no place for {key} = {value}; the model computes the same there, but training \
             goes on without it"
        ));
    }
    if written.is_none() {
        words::tell(
            "note: the model has no tokeniser that transformers knows; only its weights were written",
        );
    }
    words::show(&format!(
        "{}, step {}, written to {}\n",
        path.display(),
        checkpoint.manifest.step,
        arguments.out.display()
    ))
}
