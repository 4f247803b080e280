//! Checkpoints: whole or not there, read back with any number of stages, refused when a byte is wrong.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use starling_corpus::{DataConfig, Sampler, SyntheticConfig, Tokeniser};
use starling_model::checkpoint::{self, Checkpoint, Manifest, Progress, RestoreError};
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
        if let Some((_, path)) = checkpoint::list(folder.path()).unwrap().pop() {
            part.reference.restore(&Checkpoint::open(&path).unwrap()).unwrap();
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
    assert!(checkpoint::list(folder.path()).unwrap().is_empty());
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
    assert!(error.contains("Older checkpoints, if any, are untouched"), "{error}");
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
    let error = other.reference.restore(&checkpoint).unwrap_err();
    assert!(matches!(error, RestoreError::Shape { .. }), "{error}");
    assert_eq!(other.reference.weights_hash(), before);

    let mut double = run();
    double.train.precision = starling_model::run::Precision::F64;
    let error = trainer(double).reference.restore(&checkpoint).unwrap_err();
    assert!(error.to_string().contains("train.precision"), "{error}");

    let mut deeper = run();
    deeper.model.layers = 5;
    let error = trainer(deeper).reference.restore(&checkpoint).unwrap_err();
    assert!(matches!(error, RestoreError::Missing { .. }), "{error}");
}

/// Writes a manifest that was changed, with a right checksum: as somebody would who knows the format.
fn forge(path: &Path, change: impl FnOnce(&mut Manifest)) {
    let file = path.join("manifest.json");
    let mut manifest = checkpoint::parse_manifest(&fs::read(&file).unwrap()).unwrap();
    change(&mut manifest);
    manifest.checksum = manifest.computed_checksum();
    fs::write(&file, serde_json::to_vec(&manifest).unwrap()).unwrap();
}

#[test]
fn a_forged_manifest_is_refused() {
    let refusal = |change: fn(&mut Manifest)| {
        let folder = tempfile::tempdir().unwrap();
        let path = saved(folder.path());
        forge(&path, change);
        Checkpoint::open(&path).err().expect("it must be refused").to_string()
    };
    let told = |change, part: &str| {
        let message = refusal(change);
        assert!(message.contains(part), "{message}");
    };
    told(|m| m.format = 7, "format 7");
    told(|m| m.files[0].name = "../stage-0.safetensors".into(), "no name of a checkpoint's file");
    told(|m| m.definition.seed = 9, "identity is not the hash");
    told(|m| m.run.seed = 9, "not the one that its definition defines");
    told(|m| m.step = 3, "does not belong to its step");
    told(|m| (m.step, m.next_sample) = (3, 12), "in another step's folder");
    told(|m| m.weights_hash = "00".into(), "do not have the hash");
    told(
        |m| {
            m.definition.vocabulary = usize::MAX;
            m.identity = m.definition.identity();
        },
        "larger than its files",
    );
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
        let refused = SAVED.with(|(_, path)| {
            let file = path.join(["manifest.json", "stage-0.safetensors"][which]);
            let good = fs::read(&file).unwrap();
            let mut bad = good.clone();
            let at = at.index(bad.len());
            if cut { bad.truncate(at) } else { bad[at] ^= 1 << bit }
            fs::write(&file, &bad).unwrap();
            let opened = Checkpoint::open(path);
            fs::write(&file, &good).unwrap();
            // White space between the manifest's words says nothing: the same manifest is no damage.
            let same = || checkpoint::parse_manifest(&bad).ok() == checkpoint::parse_manifest(&good).ok();
            opened.is_err() || (which == 0 && same())
        });
        prop_assert!(refused);
    }

    #[test]
    fn no_bytes_make_the_manifest_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(checkpoint::parse_manifest(&bytes).is_err());
    }

    /// A number that changed by its last bit on the way would make every checkpoint of a run unreadable.
    #[test]
    fn a_manifest_reads_back_as_it_was_written(lr in 1e-9f64..1.0, decay in 0.0f64..1.0, norm in 1e-9f64..1e-3) {
        thread_local!(static MANIFEST: Manifest = {
            let folder = tempfile::tempdir().unwrap();
            Checkpoint::open(&saved(folder.path())).unwrap().manifest
        });
        let mut manifest = MANIFEST.with(Clone::clone);
        (manifest.run.optimiser.lr, manifest.run.optimiser.weight_decay) = (lr, decay);
        manifest.run.model.norm_epsilon = norm;
        manifest.definition = manifest.run.definition(manifest.definition.vocabulary, manifest.definition.corpus);
        manifest.identity = manifest.definition.identity();
        manifest.checksum = manifest.computed_checksum();
        let bytes = serde_json::to_vec_pretty(&manifest).unwrap();
        prop_assert_eq!(checkpoint::parse_manifest(&bytes), Ok(manifest));
    }
}

#[test]
fn the_checkpoint_that_was_just_written_is_never_pruned() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = trainer(run());
    for _ in 0..2 {
        trainer.reference.step().unwrap();
    }
    let early = trainer.save(folder.path());
    // What looks newer, whatever it is, must not push it out.
    for step in [7, 8, 9] {
        fs::create_dir(folder.path().join(format!("step-{step:08}"))).unwrap();
    }
    trainer.save(folder.path());
    assert!(Checkpoint::open(&early).is_ok());
}

#[test]
fn a_damaged_checkpoint_is_replaced_and_a_whole_one_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = saved(folder.path());
    let written = || fs::metadata(path.join("manifest.json")).unwrap().modified().unwrap();
    let first = written();
    saved(folder.path());
    assert_eq!(written(), first);
    fs::write(path.join("manifest.json"), "{").unwrap();
    saved(folder.path());
    assert!(Checkpoint::open(&path).is_ok());
    assert!(folder.path().join("step-00000002.damaged").exists());
}

#[test]
fn the_tokeniser_travels_with_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&saved(folder.path())).unwrap();
    assert!(matches!(checkpoint.manifest.tokeniser, Tokeniser::Words { .. }));
    assert_eq!(checkpoint.manifest.next_sample, 8);
}
