//! Checkpoints: whole or not there, read back with any number of stages, refused when a byte is wrong.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use starling_corpus::{DataConfig, Sampler, SyntheticConfig, Tokeniser};
use starling_model::checkpoint::{self, Checkpoint, OpenError, Progress, RestoreError};
use starling_model::config::ModelConfig;
use starling_model::reference::Reference;
use starling_model::run::{CheckpointConfig, Run, TrainConfig};

fn run() -> Run {
    Run {
        name: "checkpoints".into(),
        model: ModelConfig {
            context: 8,
            width: 8,
            layers: 3,
            heads: 2,
            share_every: 2,
            dropout: 0.1,
            ..Default::default()
        },
        data: DataConfig {
            synthetic: Some(SyntheticConfig { documents: 40, ..Default::default() }),
            ..Default::default()
        },
        train: TrainConfig { steps: 6, batch: 4, microbatch: 2, lots: 2, threads: 1, ..Default::default() },
        checkpoint: CheckpointConfig { every: 1, keep: 2, keep_every: 4 },
        ..Default::default()
    }
}

struct Trainer {
    reference: Reference,
    progress: Progress,
    _cache: tempfile::TempDir,
}

fn trainer(run: Run) -> Trainer {
    let cache = tempfile::tempdir().unwrap();
    let corpus = starling_corpus::open(&run.data, cache.path(), cache.path()).unwrap();
    let tokeniser = corpus.tokeniser.clone();
    let definition = run.definition(tokeniser.vocabulary(), corpus.content_hash().to_hex().to_string());
    let sampler = Sampler::new(corpus, run.data.held_out, run.model.context, run.seed).unwrap();
    let reference = Reference::new(run.clone(), tokeniser.vocabulary(), sampler).unwrap();
    let progress = Progress { run, definition, tokeniser, skipped: 0 };
    Trainer { reference, progress, _cache: cache }
}

impl Trainer {
    fn save(&self, folder: &Path) -> PathBuf {
        checkpoint::save(folder, &self.progress, self.reference.stages()).unwrap()
    }
}

/// A checkpoint after two steps.
fn saved(folder: &Path) -> PathBuf {
    let mut trainer = trainer(run());
    for _ in 0..2 {
        trainer.reference.step().unwrap();
    }
    trainer.save(folder)
}

#[test]
fn training_goes_on_with_other_stages_as_if_nothing_had_happened() {
    let folder = tempfile::tempdir().unwrap();
    let mut whole = trainer(run());
    let expected: Vec<String> = (0..6)
        .map(|_| {
            whole.reference.step().unwrap();
            whole.reference.weights_hash()
        })
        .collect();
    let mut hashes = Vec::new();
    for stages in [1, 5, 2, 3, 4, 1] {
        let mut run = run();
        run.train.stages = stages;
        let mut part = trainer(run);
        if let Some(path) = checkpoint::latest(folder.path()).unwrap() {
            Checkpoint::open(&path).unwrap().restore(part.reference.stages_mut()).unwrap();
        }
        part.reference.step().unwrap();
        hashes.push(part.reference.weights_hash());
        part.save(folder.path());
    }
    assert_eq!(hashes, expected);
}

#[test]
fn the_newest_and_the_marked_ones_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = trainer(run());
    for _ in 0..6 {
        trainer.reference.step().unwrap();
        trainer.save(folder.path());
    }
    let steps: Vec<u64> =
        checkpoint::list(folder.path()).unwrap().into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [4, 5, 6]);
}

#[test]
fn what_a_crash_left_is_swept_and_a_checkpoint_can_be_written_again() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("step-00000001.writing/deep")).unwrap();
    fs::create_dir_all(folder.path().join("step-00000000.old")).unwrap();
    assert!(checkpoint::latest(folder.path()).unwrap().is_none());
    let first = saved(folder.path());
    let again = saved(folder.path());
    assert_eq!(first, again);
    let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["step-00000002"]);
    assert!(Checkpoint::open(&again).is_ok());
}

#[test]
fn a_folder_that_cannot_be_written_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("in-the-way");
    fs::write(&file, "a file, not a folder").unwrap();
    let trainer = trainer(run());
    let error =
        checkpoint::save(&file, &trainer.progress, trainer.reference.stages()).unwrap_err().to_string();
    assert!(error.contains("Older checkpoints are untouched"), "{error}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "a file, not a folder");
}

#[test]
fn another_model_or_precision_is_refused_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&saved(folder.path())).unwrap();
    let mut wider = run();
    wider.model.width = 16;
    let mut other = trainer(wider);
    let before = other.reference.weights_hash();
    let error = checkpoint.restore(other.reference.stages_mut()).unwrap_err();
    assert!(matches!(error, RestoreError::Shape { .. }), "{error}");
    assert_eq!(other.reference.weights_hash(), before);

    let mut double = run();
    double.train.precision = starling_model::run::Precision::F64;
    let error = checkpoint.restore(trainer(double).reference.stages_mut()).unwrap_err();
    assert!(error.to_string().contains("train.precision"), "{error}");

    let mut deeper = run();
    deeper.model.layers = 5;
    let error = checkpoint.restore(trainer(deeper).reference.stages_mut()).unwrap_err();
    assert!(matches!(error, RestoreError::Missing { .. }), "{error}");
}

#[test]
fn a_manifest_of_another_format_or_with_a_path_in_it_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = saved(folder.path());
    let manifest = path.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    for (from, to, part) in [
        ("\"format\": 1", "\"format\": 7", "format 7"),
        ("stage-0.safetensors", "../stage-0.safetensors", "no name of a checkpoint's file"),
        ("\"seed\": 0", "\"seed\": 1", "identity is not the hash"),
        ("\"step\": 2", "\"step\": \"two\"", "invalid type"),
    ] {
        assert!(text.contains(from), "{from}");
        fs::write(&manifest, text.replacen(from, to, 1)).unwrap();
        let error = Checkpoint::open(&path).err().expect("it must be refused").to_string();
        assert!(error.contains(part), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// One byte changed, or the end cut off, anywhere in any file.
    #[test]
    fn a_damaged_checkpoint_is_refused(which in 0usize..2, at in any::<prop::sample::Index>(), bit in 0u8..8, cut: bool) {
        thread_local!(static SAVED: (tempfile::TempDir, PathBuf) = {
            let folder = tempfile::tempdir().unwrap();
            let path = saved(folder.path());
            (folder, path)
        });
        SAVED.with(|(_, path)| {
            let file = path.join(["manifest.json", "stage-0.safetensors"][which]);
            let good = fs::read(&file).unwrap();
            let mut bad = good.clone();
            let at = at.index(bad.len());
            if cut { bad.truncate(at) } else { bad[at] ^= 1 << bit }
            fs::write(&file, &bad).unwrap();
            let opened = Checkpoint::open(path);
            let verdict = match opened {
                // A changed manifest may still be one (a digit of the learning rate, say): then it must load.
                Ok(checkpoint) => which == 0 && checkpoint.tensors().is_ok(),
                Err(OpenError::Altered { .. }) => true,
                Err(_) => which == 0,
            };
            fs::write(&file, good).unwrap();
            prop_assert!(verdict);
            Ok(())
        })?;
    }

    #[test]
    fn no_bytes_make_the_manifest_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(checkpoint::parse_manifest(&bytes).is_err());
    }
}

#[test]
fn the_tokeniser_travels_with_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&saved(folder.path())).unwrap();
    assert!(matches!(checkpoint.manifest.tokeniser, Tokeniser::Words { .. }));
    assert_eq!(checkpoint.manifest.next_sample, 8);
}
