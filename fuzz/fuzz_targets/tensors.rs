//! Any bytes as the tensors of a checkpoint whose hashes are right: refused, and the stages are as before.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use starling_corpus::{DataConfig, SyntheticConfig, Tokeniser};
use starling_model::checkpoint::{Checkpoint, FORMAT, FileEntry, Manifest};
use starling_model::config::ModelConfig;
use starling_model::engine::Dtype;
use starling_model::reference::stages;
use starling_model::run::{Run, TrainConfig};

static RUN: LazyLock<Run> = LazyLock::new(|| Run {
    name: "fuzz".into(),
    model: ModelConfig { context: 2, width: 2, layers: 1, heads: 1, ..Default::default() },
    data: DataConfig { synthetic: Some(SyntheticConfig::default()), ..Default::default() },
    train: TrainConfig { threads: 1, ..Default::default() },
    ..Default::default()
});

fuzz_target!(|bytes: &[u8]| {
    let definition = RUN.definition(3, String::new());
    let manifest = Manifest {
        format: FORMAT,
        identity: definition.identity(),
        definition,
        run: RUN.clone(),
        tokeniser: Tokeniser::Bytes,
        step: 1,
        next_sample: 0,
        skipped: 0,
        next_lr: 0.0,
        dtype: Dtype::F32,
        class: String::new(),
        moments: 2,
        weights_hash: String::new(),
        files: vec![FileEntry {
            name: "stage-0.safetensors".into(),
            bytes: bytes.len() as u64,
            blake3: blake3::hash(bytes).to_hex().to_string(),
        }],
    };
    let checkpoint = Checkpoint::new(manifest, vec![bytes.to_vec()]).ok().expect("the hashes are right");
    let _ = checkpoint.tensors();
    let architecture = RUN.model.architecture(3);
    let mut stages = stages(&architecture, RUN.optimiser.rule(), &RUN.train, 0).expect("one thread");
    assert!(checkpoint.restore(&mut stages).is_err(), "no weights have an empty hash");
});
