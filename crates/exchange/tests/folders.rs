//! What is exported comes back, whatever it is stored in; what cannot be right is refused with its name.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::{Path, PathBuf};

use starling_corpus::{DataConfig, SyntheticConfig, Tokeniser};
use starling_exchange::{Export, ExportError, Format, ImportError, Pretrained, export};
use starling_model::batch;
use starling_model::checkpoint::{self, Checkpoint, Progress};
use starling_model::config::{Family, ModelConfig, Rope, RopeScaling};
use starling_model::pipeline::{self, Stages};
use starling_model::run::{Run, TrainConfig};
use starling_model::stage::{Output, Want};

const VOCABULARY: usize = 37;

fn model() -> ModelConfig {
    ModelConfig {
        context: 12,
        width: 24,
        layers: 4,
        heads: 3,
        inner: Some(40),
        init_std: 0.3,
        dropout: 0.1,
        ..Default::default()
    }
}

fn llama() -> ModelConfig {
    let scaling = Some(RopeScaling::Llama3 { factor: 4.0, low: 1.0, high: 4.0, context: 8 });
    ModelConfig {
        family: Family::Llama,
        heads: 4,
        key_heads: Some(2),
        head_width: Some(10),
        rope: Some(Rope { theta: 100.0, scaling }),
        attention_bias: true,
        dropout: 0.0,
        ..model()
    }
}

fn stages(model: &ModelConfig, seed: u64, cut: usize) -> Stages {
    let train = TrainConfig { stages: cut, threads: 1, ..Default::default() };
    pipeline::build(&model.architecture(VOCABULARY), Run::default().optimiser.rule(), &train, seed).unwrap()
}

/// Writes a model with the weights of a seed as `transformers` would; returns its folder.
fn exported(model: &ModelConfig, format: Format, folder: &Path) -> PathBuf {
    exported_and_unsaid(model, format, folder).0
}

/// The same, and what the folder cannot say.
fn exported_and_unsaid(
    model: &ModelConfig,
    format: Format,
    folder: &Path,
) -> (PathBuf, Vec<(&'static str, String)>) {
    let data = DataConfig { synthetic: Some(SyntheticConfig::default()), ..Default::default() };
    let run = Run { name: "small".into(), model: model.clone(), data, ..Run::default() };
    let definition = run.definition(VOCABULARY, String::new());
    let progress = Progress { run, definition, tokeniser: Tokeniser::Bytes, skipped: 0 };
    let path = checkpoint::save(&folder.join("checkpoints"), &progress, &stages(model, 5, 2)).unwrap();
    let what = Export { format, tokeniser: None, end_of_text: 36 };
    let out = folder.join("exported");
    let unsaid = export(&Checkpoint::open(&path).unwrap(), &what, &out).unwrap();
    let again = export(&Checkpoint::open(&path).unwrap(), &what, &out);
    assert!(matches!(again, Err(ExportError::Exists(_))));
    (out, unsaid)
}

fn logits(stages: &Stages) -> Vec<f32> {
    let (input, meta) = batch::text(&[3, 1, 4, 1, 5, 9, 2, 6], 0);
    match pipeline::infer(stages, input, &meta, Want::NextToken).unwrap() {
        Output::Logits(logits) => logits,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_model_comes_back_bit_for_bit_however_it_is_cut_and_tied() {
    for model in [true, false]
        .into_iter()
        .flat_map(|tied| [ModelConfig { tied, ..model() }, ModelConfig { tied, mlp_bias: tied, ..llama() }])
    {
        let folder = tempfile::tempdir().unwrap();
        let pretrained = Pretrained::open(&exported(&model, Format::F32, folder.path())).unwrap();
        assert_eq!((&pretrained.model, pretrained.vocabulary), (&model, VOCABULARY));
        let mut back = stages(&model, 77, 3);
        assert_ne!(logits(&back), logits(&stages(&model, 5, 1)));
        pretrained.put_into(&mut back).unwrap();
        assert_eq!(logits(&back), logits(&stages(&model, 5, 1)));
    }
}

#[test]
fn a_model_may_have_less_context_and_nothing_else_that_is_other() {
    for theirs in [model(), llama()] {
        let folder = tempfile::tempdir().unwrap();
        let pretrained = Pretrained::open(&exported(&theirs, Format::F32, folder.path())).unwrap();
        let mut less = stages(&ModelConfig { context: 8, ..theirs.clone() }, 77, 2);
        pretrained.put_into(&mut less).unwrap();
        assert_eq!(logits(&less), logits(&stages(&theirs, 5, 1)));
        let mut other = stages(&ModelConfig { inner: Some(32), ..theirs }, 77, 1);
        assert!(matches!(pretrained.put_into(&mut other), Err(ImportError::Other { .. })));
    }
}

#[test]
fn texts_end_with_what_the_config_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = exported(&llama(), Format::F32, folder.path());
    let open = |ends: &str| {
        let config = path.join("config.json");
        let mut fields: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&config).unwrap()).unwrap();
        fields["eos_token_id"] = serde_json::from_str(ends).unwrap();
        std::fs::write(&config, fields.to_string()).unwrap();
        Pretrained::open(&path).map(|pretrained| pretrained.ends).map_err(|error| error.to_string())
    };
    assert_eq!(open("4"), Ok(vec![4]));
    assert_eq!(open("[4, 36]"), Ok(vec![4, 36]));
    assert_eq!(open("null"), Ok(vec![]));
    for strange in ["37", "-1", "\"x\"", "[4, 4.5]"] {
        assert!(open(strange).unwrap_err().contains("eos_token_id"), "{strange}");
    }
}

#[test]
fn layers_that_share_their_weights_are_written_out() {
    for model in [model(), llama()] {
        let (model, folder) = (ModelConfig { share_every: 2, ..model }, tempfile::tempdir().unwrap());
        let pretrained = Pretrained::open(&exported(&model, Format::F32, folder.path())).unwrap();
        let mut back = stages(&pretrained.model, 77, 1);
        pretrained.put_into(&mut back).unwrap();
        assert_eq!(logits(&back), logits(&stages(&model, 5, 1)));
    }
}

#[test]
fn dropouts_come_back_and_those_that_the_folder_cannot_say_are_told() {
    let rates = |model: ModelConfig| ModelConfig {
        dropout: 0.1,
        embedding_dropout: Some(0.2),
        attention_dropout: Some(0.3),
        ..model
    };
    let folder = tempfile::tempdir().unwrap();
    let (path, unsaid) = exported_and_unsaid(&rates(model()), Format::F32, folder.path());
    assert_eq!(unsaid, []);
    assert_eq!(Pretrained::open(&path).unwrap().model, rates(model()));
    let folder = tempfile::tempdir().unwrap();
    let (path, unsaid) = exported_and_unsaid(&rates(llama()), Format::F32, folder.path());
    assert_eq!(unsaid, [("model.dropout", "0.1".into()), ("model.embedding_dropout", "0.2".into())]);
    assert_eq!(
        Pretrained::open(&path).unwrap().model,
        ModelConfig { attention_dropout: Some(0.3), ..llama() }
    );
    let folder = tempfile::tempdir().unwrap();
    let shared = ModelConfig { share_every: 2, ..llama() };
    let unsaid = exported_and_unsaid(&shared, Format::F32, folder.path()).1;
    assert_eq!(unsaid, [("model.share_every", "2".into())]);
}

#[test]
fn half_the_bytes_give_nearly_the_same_model() {
    for (format, near) in [(Format::F16, 0.02), (Format::Bf16, 0.15)] {
        let (model, folder) = (model(), tempfile::tempdir().unwrap());
        let pretrained = Pretrained::open(&exported(&model, format, folder.path())).unwrap();
        let mut back = stages(&model, 77, 1);
        pretrained.put_into(&mut back).unwrap();
        let (was, is) = (logits(&stages(&model, 5, 1)), logits(&back));
        let largest = was.iter().zip(&is).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest > 0.0 && largest < near, "{format:?}: {largest}");
    }
}

#[test]
fn what_cannot_be_right_is_refused_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = exported(&model(), Format::F32, folder.path());
    let config = path.join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let refusal = |from: &str, to: &str| {
        assert!(text.contains(from), "{text}");
        std::fs::write(&config, text.replace(from, to)).unwrap();
        Pretrained::open(&path).map(|_| ()).unwrap_err().to_string()
    };
    assert!(refusal("\"gpt2\"", "\"bert\"").contains("model_type = bert"));
    assert!(refusal("\"n_layer\": 4", "\"n_layer\": 5").contains("h.4.ln_1.weight"));
    assert!(refusal("\"n_layer\": 4", "\"n_layer\": 3").contains("has no such tensor"));
    assert!(refusal("\"n_inner\": 40", "\"n_inner\": 41").contains("shape"));
    assert!(refusal("\"n_head\": 3", "\"n_head\": 0").contains("heads"));
    assert!(refusal("\"vocab_size\": ", "\"vocab_size\": 0, \"was\": ").contains("vocab_size = 0"));
    assert!(refusal("\"gelu_new\"", "\"relu\"").contains("activation_function = relu"));
    assert!(refusal("{", "").contains("JSON"));
    std::fs::write(&config, &text).unwrap();
    let weights = path.join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    assert!(matches!(Pretrained::open(&path), Err(ImportError::Format { .. })));
    std::fs::remove_file(&weights).unwrap();
    assert!(matches!(Pretrained::open(&path), Err(ImportError::NoWeights { .. })));
    let index = r#"{"weight_map": {"wte.weight": "../elsewhere.safetensors"}}"#;
    std::fs::write(path.join("model.safetensors.index.json"), index).unwrap();
    assert!(matches!(Pretrained::open(&path), Err(ImportError::Outside { .. })));
}

#[test]
fn a_tensor_that_stands_twice_or_not_where_the_index_says_is_refused_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = exported(&model(), Format::F32, folder.path());
    let bytes = std::fs::read(path.join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    std::fs::remove_file(path.join("model.safetensors")).unwrap();
    let lies_in_b = |name: &str| name.contains("h.3.");
    let norm = "transformer.h.3.ln_1.weight";
    // What each file holds, and the file that the index names.
    let open = |holds: &dyn Fn(&str, &str) -> bool, says: &dyn Fn(&str) -> &'static str| {
        for file in ["a", "b"] {
            let held = tensors.tensors().into_iter().filter(|(name, _)| holds(file, name));
            std::fs::write(path.join(file), safetensors::serialize(held, None).unwrap()).unwrap();
        }
        let map: std::collections::BTreeMap<String, &str> =
            tensors.names().into_iter().map(|name| (name.to_string(), says(name))).collect();
        let mut index = serde_json::json!({ "weight_map": map });
        index["weight_map"].as_object_mut().unwrap().retain(|_, file| file != "");
        std::fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
        Pretrained::open(&path).map(|_| ()).map_err(|error| error.to_string())
    };
    let right = |name: &str| if lies_in_b(name) { "b" } else { "a" };
    assert_eq!(open(&|file, name| right(name) == file, &right), Ok(()));
    let told = |result: Result<(), String>, why: &str| {
        let told = result.unwrap_err();
        assert!(told.contains(norm) && told.contains(why), "{told}");
    };
    told(open(&|file, name| right(name) == file || name == norm, &right), "is the same parameter");
    let elsewhere = |name: &str| if name == norm { "a" } else { right(name) };
    told(open(&|file, name| right(name) == file, &elsewhere), "the index says that a holds it");
    let nowhere = |name: &str| if name == norm { "" } else { right(name) };
    told(open(&|file, name| right(name) == file, &nowhere), "the index says that no file holds it");
    told(open(&|file, name| right(name) == file && name != norm, &right), "and it is not");
}
