//! `starling corpus import`.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use starling_corpus::build::import::{self, Options, Width};
use starling_corpus::{HuggingFace, Tokeniser};

use crate::interrupt::Interrupt;
use crate::words;

/// Make a corpus of tokens that nanoGPT or Megatron stored
///
/// A .bin with an .idx of the same name beside it is Megatron's; any other is taken for nanoGPT's, tokens in a row.
/// Documents end at the end-of-text token; longer ones than 65536 tokens are cut. A model can only be asked in
/// text if the tokenizer.json is given; with a vocabulary size alone, text is numbers.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  starling corpus import train.bin --tokeniser gpt2/tokenizer.json --out openwebtext\n  starling corpus import my_text_document.bin --vocabulary 50304 --end-of-text 50256 --out my-corpus"
)]
pub struct Arguments {
    /// The .bin file
    input: PathBuf,
    /// The corpus folder to make
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// The tokenizer.json that the tokens were made with
    #[arg(long, value_name = "FILE", conflicts_with = "vocabulary")]
    tokeniser: Option<PathBuf>,
    /// How many ids there are, if there is no tokenizer.json
    #[arg(long, value_name = "IDS", requires = "end_of_text")]
    vocabulary: Option<u32>,
    /// The token that stands between documents: its name in the tokenizer.json, or its id with --vocabulary
    #[arg(long, value_name = "TOKEN")]
    end_of_text: Option<String>,
    /// How nanoGPT stored a token; Megatron's index says it itself
    #[arg(long, value_enum, default_value_t = WidthName::U16)]
    width: WidthName,
    /// A shard ends when it has so many tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 1 << 25)]
    shard_tokens: u64,
    /// Throw away what an earlier build left in the folder
    #[arg(long)]
    restart: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum WidthName {
    /// Two bytes, unsigned
    U16,
    /// Four bytes, unsigned
    U32,
}

pub fn run(arguments: Arguments) -> Result<ExitCode> {
    let interrupt = Interrupt::listen()?;
    let options = Options {
        tokeniser: tokeniser(&arguments)?,
        input: arguments.input,
        width: match arguments.width {
            WidthName::U16 => Width::U16,
            WidthName::U32 => Width::U32,
        },
        out: arguments.out,
        shard_tokens: arguments.shard_tokens.max(1),
        restart: arguments.restart,
    };
    let manifest = import::import(&options, &mut |_| match interrupt.asked() {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    })?;
    words::show(&format!(
        "{}: {} tokens of {} documents, vocabulary {}\n",
        options.out.display(),
        words::count(manifest.tokens as f64),
        words::count(manifest.documents as f64),
        manifest.vocabulary,
    ))
}

fn tokeniser(arguments: &Arguments) -> Result<Tokeniser> {
    if let Some(path) = &arguments.tokeniser {
        let shown = path.display();
        let json =
            std::fs::read_to_string(path).with_context(|| format!("cannot read the tokeniser {shown}"))?;
        let read =
            HuggingFace::parse(&json, arguments.end_of_text.as_deref()).with_context(|| shown.to_string())?;
        return Ok(Tokeniser::HuggingFace(read));
    }
    let (Some(vocabulary), Some(end_of_text)) = (arguments.vocabulary, &arguments.end_of_text) else {
        bail!("say what the ids are: --tokeniser FILE, or --vocabulary IDS and --end-of-text ID");
    };
    match end_of_text.parse() {
        Ok(end_of_text) if end_of_text < vocabulary => Ok(Tokeniser::Ids { vocabulary, end_of_text }),
        _ => bail!("--end-of-text {end_of_text} is not an id below {vocabulary}; give its number"),
    }
}
