//! Starling's side of `cargo xtask bench generate`: writes with a model of transformers' when it is told to.
//!
//! ```text
//! arguments  FOLDER THREADS
//! stdin      one number of tokens a line
//! stdout     one line of JSON each: {"seconds", "ids"}
//! ```

use std::error::Error;
use std::io::BufRead;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use starling_exchange::Pretrained;
use starling_model::generate::{Choice, generate};
use starling_model::optimiser::Rule;
use starling_model::pipeline;
use starling_model::run::TrainConfig;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("which folder has the model?")?;
    let threads = arguments.next().ok_or("how many threads?")?.parse()?;
    let pretrained = Pretrained::open(Path::new(&folder))?;
    let train = TrainConfig { threads, ..Default::default() };
    let architecture = pretrained.model.architecture(pretrained.vocabulary);
    let mut stages = pipeline::build(&architecture, Rule::Fixed, &train, 0)?;
    pretrained.put_into(&mut stages)?;
    let prompt: Vec<u32> = (0..32u32).map(|i| (7 * i * i + 3 * i) % 50257).collect();
    let cold = Choice { temperature: 0.0, ..Default::default() };
    for line in std::io::stdin().lock().lines() {
        let count = line?.trim().parse()?;
        let began = Instant::now();
        let go_on = |_| ControlFlow::Continue(());
        let ids = generate(&stages, pretrained.model.context, prompt.clone(), count, cold, &[], go_on)?;
        let seconds = began.elapsed().as_secs_f64();
        println!("{}", serde_json::json!({ "seconds": seconds, "ids": &ids[prompt.len()..] }));
    }
    Ok(())
}
