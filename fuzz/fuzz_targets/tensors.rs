//! Any bytes as the tensors of a checkpoint whose hashes are right: refused, or loaded; never half.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;
use starling_corpus::{DataConfig, SyntheticConfig, Tokeniser};
use starling_model::checkpoint::{Checkpoint, FORMAT, FileEntry, Manifest};
use starling_model::config::ModelConfig;
use starling_model::engine::Dtype;
use starling_model::pipeline::{build, weights_hash};
use starling_model::run::{Run, TrainConfig};

static RUN: LazyLock<Run> = LazyLock::new(|| Run {
    name: "fuzz".into(),
    model: ModelConfig { context: 2, width: 2, layers: 1, heads: 1, ..Default::default() },
    data: DataConfig { synthetic: Some(SyntheticConfig::default()), ..Default::default() },
    train: TrainConfig { threads: 1, ..Default::default() },
    ..Default::default()
});

/// What the manifest would say if these were the tensors of a checkpoint.
fn hash_of_weights(bytes: &[u8]) -> String {
    let Ok(tensors) = SafeTensors::deserialize(bytes) else { return String::new() };
    let weights = tensors.tensors().into_iter().filter(|(name, _)| !name.starts_with("optimiser."));
    let hashes = weights.map(|(name, view)| (name, *blake3::hash(view.data()).as_bytes()));
    weights_hash(std::iter::once(hashes.collect()))
}

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
        weights_hash: hash_of_weights(bytes),
        files: vec![FileEntry {
            name: "stage-0.safetensors".into(),
            bytes: bytes.len() as u64,
            blake3: blake3::hash(bytes).to_hex().to_string(),
        }],
        checksum: String::new(),
    };
    let Ok(checkpoint) = Checkpoint::new(manifest, vec![bytes.to_vec()]) else { return };
    let architecture = RUN.model.architecture(3);
    let mut stages = build(&architecture, RUN.optimiser.rule(), &RUN.train, 0).expect("one thread");
    let before = stages[0].weight_hashes();
    if checkpoint.restore(&mut stages).is_err() {
        assert_eq!(stages[0].weight_hashes(), before);
    }
});
