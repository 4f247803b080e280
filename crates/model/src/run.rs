//! A run: everything a run file says, and the part of it that defines the training.

mod file;

use std::ops::Range;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use starling_corpus::{DataConfig, Problem};

pub use file::RunFileError;

use crate::config::ModelConfig;
use crate::device::Device;
use crate::engine::Dtype;
use crate::guard::GuardConfig;
use crate::lots::Lots;
use crate::memory;
use crate::optimiser::{Decay, OptimiserConfig};
use crate::stage::Keep;

/// A run file, every default filled in. [`Run::parse`] makes one from TOML.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Run {
    /// What the run is called; by default the name of its file.
    pub name: String,
    /// Seed of everything random: weights, order of samples, dropout.
    pub seed: u64,
    /// The weights to begin with; without this they are drawn from the seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initial: Option<InitialConfig>,
    /// The model.
    pub model: ModelConfig,
    /// What it is trained on.
    pub data: DataConfig,
    /// How it is trained.
    pub optimiser: OptimiserConfig,
    /// How long, and in what pieces.
    pub train: TrainConfig,
    /// When it is evaluated on held-out text.
    pub evaluate: EvaluateConfig,
    /// When its state is written down.
    pub checkpoint: CheckpointConfig,
    /// When it goes back because the loss is too high.
    pub guard: GuardConfig,
    /// How peers that train it together agree.
    pub swarm: SwarmConfig,
}

/// The `[initial]` section: the weights that training begins with.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct InitialConfig {
    /// A folder that Hugging Face's transformers wrote, a run's folder, or one of its checkpoints. The model is the one there;
    /// `[model]` may say less context, and dropout.
    pub path: PathBuf,
    /// The hash that the weights must have; filled in when the run is opened.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub weights: String,
    /// Keys of `[model]` that the run file says, if the run was read from one: the rest of the model is the one there.
    #[serde(skip)]
    pub said: Option<Vec<String>>,
}

/// The `[train]` section: how long, and in what pieces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Number of optimiser updates.
    pub steps: u64,
    /// Samples of one step.
    pub batch: u32,
    /// Samples computed together, at the most `batch`; only speed and the last bits depend on it.
    pub microbatch: u32,
    /// Lots that a step's microbatches form, at the most one for each; only the last bits depend on it.
    pub lots: u32,
    /// Stages that the model is cut into; nothing depends on it.
    pub stages: usize,
    /// What a stage keeps between forward and backward; nothing but memory and time depends on it.
    pub keep: Keeping,
    /// Memory that a process may take, in GB, at the most; 0: what the machine has available. Where everything does not
    /// fit, `keep = "auto"` keeps less.
    pub memory_gb: f64,
    /// Arithmetic of weights and activations.
    pub precision: Precision,
    /// Threads; 0 means one for every core. Nothing but time depends on it.
    pub threads: usize,
    /// What computes: "cpu", "naive" for the engine that judges the others, or "emulated:TFLOPS" for a device that takes
    /// its time and computes nothing.
    #[schemars(with = "String")]
    pub device: Device,
    /// Steps from one hash of the weights to the next; 0 never.
    pub hash_every: u64,
}

/// What a stage keeps between forward and backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Keeping {
    /// Everything that backward needs if there is memory for it, otherwise the inputs of its blocks.
    #[default]
    Auto,
    /// Everything that backward needs.
    All,
    /// The inputs of its blocks; backward computes the rest again, block by block.
    Input,
}

impl Keeping {
    /// What is kept, if it `fits`.
    pub fn or_less(self, fits: bool) -> Keep {
        match self {
            Keeping::All => Keep::All,
            Keeping::Auto if fits => Keep::All,
            Keeping::Auto | Keeping::Input => Keep::Input,
        }
    }
}

impl From<Keep> for Keeping {
    fn from(keep: Keep) -> Keeping {
        match keep {
            Keep::All => Keeping::All,
            Keep::Input => Keeping::Input,
        }
    }
}

impl Default for TrainConfig {
    fn default() -> Self {
        TrainConfig {
            steps: 500,
            batch: 16,
            microbatch: 4,
            lots: 4,
            stages: 1,
            keep: Keeping::Auto,
            memory_gb: 0.0,
            precision: Precision::F32,
            threads: 0,
            device: Device::Cpu,
            hash_every: 1,
        }
    }
}

impl TrainConfig {
    /// Bytes of memory that a process may take, if there is a bound. An emulated device takes none of this machine's.
    pub fn memory_bytes(&self) -> Option<u64> {
        let said = (self.memory_gb > 0.0).then_some((self.memory_gb * 1e9) as u64);
        let available = memory::available_bytes().filter(|_| !self.device.is_emulated());
        said.into_iter().chain(available).min()
    }

    /// The samples of a microbatch: numbered through the whole run, so that their contents are fixed.
    pub fn samples(&self, step: u64, microbatch: u32) -> Range<u64> {
        let (batch, size) = (u64::from(self.batch), u64::from(self.microbatch));
        let from = u64::from(microbatch) * size;
        step * batch + from..step * batch + (from + size).min(batch)
    }

    /// The same where nothing is trained: every machine can plan, hold and ask a model, also one whose training takes bf16.
    pub fn untrained(&self) -> TrainConfig {
        let precision = match self.precision {
            Precision::Bf16 => Precision::F32,
            precision => precision,
        };
        TrainConfig { precision, ..self.clone() }
    }

    /// The lots of a step.
    pub fn lots(&self) -> Lots {
        let microbatches = self.batch.div_ceil(self.microbatch);
        Lots { microbatches, lots: self.lots.min(microbatches) }
    }
}

/// Arithmetic of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Single.
    F32,
    /// Double.
    F64,
    /// Single, but linear layers and the head multiply numbers rounded to bf16; for `device = "cpu"` on processors with
    /// AVX512-BF16. Weights, sums and everything else stay single. It trains another model than `f32`; in the run that was
    /// measured the losses followed each other.
    Bf16,
}

impl Precision {
    /// How weights and gradients are stored.
    pub fn dtype(self) -> Dtype {
        match self {
            Precision::F32 | Precision::Bf16 => Dtype::F32,
            Precision::F64 => Dtype::F64,
        }
    }
}

/// The `[evaluate]` section: when the model is tried on held-out text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluateConfig {
    /// Steps from one evaluation to the next; 0 only at the end.
    pub every: u64,
    /// Held-out windows that one evaluation takes at the most; 0 means all.
    pub windows: u64,
    /// Tokens of generated text shown with each evaluation; 0 shows none.
    pub sample_tokens: u32,
}

impl Default for EvaluateConfig {
    fn default() -> Self {
        EvaluateConfig { every: 100, windows: 64, sample_tokens: 60 }
    }
}

/// The `[checkpoint]` section: when the state is written down, and what is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Steps from one checkpoint to the next; 0 only at the end.
    pub every: u64,
    /// Newest checkpoints that are kept.
    pub keep: usize,
    /// Checkpoints of steps divisible by this are kept for good; 0 keeps none.
    pub keep_every: u64,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        CheckpointConfig { every: 100, keep: 2, keep_every: 0 }
    }
}

/// The `[swarm]` section: how peers that train together agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SwarmConfig {
    /// How gradients are added up.
    pub reduce: Reduce,
    /// How often, in seconds, a worker leaves a copy of its sums with another worker of its stage, so that what it has
    /// computed outlives it; 0: never. Worth it where machines are taken away often: a copy is as large as the stage's
    /// gradient (with exact sums several times that), for the network and for the other's memory.
    pub deposit_every_s: f64,
}

/// How gradients are added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reduce {
    /// In the fixed tree over lots: the bits do not depend on who computed what.
    #[default]
    Exact,
    /// Every peer adds up all that it has before it sends: least traffic, and the last bits depend on who computed
    /// what.
    Fast,
}

impl Run {
    /// What is wrong with it, each with a remedy; nothing runs until there is none.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = self.model.problems();
        problems.extend(self.data.problems());
        problems.extend(self.optimiser.problems());
        problems.extend(self.guard.problems());
        let mut check = |ok: bool, key: &str, message: String, remedy: String| {
            if !ok {
                problems.push(Problem::new(key, message, remedy));
            }
        };
        let train = &self.train;
        let named = self.name.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c))
            && !self.name.starts_with('.');
        check(
            named,
            "name",
            format!("{:?} cannot name a folder", self.name),
            "use letters, digits, - and _".into(),
        );
        check(
            train.memory_gb >= 0.0 && train.memory_gb.is_finite(),
            "train.memory_gb",
            format!("{} GB is no amount of memory", train.memory_gb),
            "use 0 for what the machine has available, or a positive number".into(),
        );
        let every_s = self.swarm.deposit_every_s;
        check(
            every_s == 0.0 || (0.05..=86_400.0).contains(&every_s),
            "swarm.deposit_every_s",
            format!("{every_s} is not a number of seconds that makes sense"),
            "use 0 for never, or 0.05 to 86400".into(),
        );
        check(
            train.steps > 0,
            "train.steps",
            "a run of 0 steps trains nothing".into(),
            "use at least 1".into(),
        );
        check(
            train.batch > 0,
            "train.batch",
            "a step of 0 samples trains nothing".into(),
            "use at least 1".into(),
        );
        let message = "a microbatch of 0 samples computes nothing".to_string();
        check(train.microbatch > 0, "train.microbatch", message, "use at least 1".into());
        check(train.lots > 0, "train.lots", "a step has at least one lot".into(), "use at least 1".into());
        let units = self.model.layers.saturating_add(2);
        let message = format!(
            "a model of {} blocks, embedding and head cannot be cut into {} stages",
            self.model.layers, train.stages
        );
        check((1..=units).contains(&train.stages), "train.stages", message, format!("use 1 to {units}"));
        check(
            train.threads <= 4096,
            "train.threads",
            format!("{} threads are too many", train.threads),
            "use 0 for one on every core".into(),
        );
        check(
            train.precision != Precision::Bf16 || train.device != Device::Naive,
            "train.precision",
            "the naive engine does not compute with bf16".into(),
            "use \"f32\", or device = \"cpu\"".into(),
        );
        check(
            self.checkpoint.keep > 0,
            "checkpoint.keep",
            "keeping no checkpoint would lose the run".into(),
            "use at least 1".into(),
        );
        problems
    }

    /// Where two runs differ in any setting: key, this one's value, the other's.
    pub fn differences(&self, other: &Run) -> Vec<Difference> {
        differences_between(self, other)
    }

    /// What defines the training, given what the corpus turned out to hold.
    pub fn definition(&self, vocabulary: usize, corpus: String) -> Definition {
        // Without a decay it does not matter where the decay would end.
        let decay_steps = (self.optimiser.decay != Decay::Constant)
            .then(|| self.optimiser.decay_steps.unwrap_or(self.train.steps));
        let optimiser = OptimiserConfig { decay_steps, ..self.optimiser.clone() };
        Definition {
            seed: self.seed,
            vocabulary,
            model: self.model.clone(),
            corpus,
            held_out: self.data.held_out,
            document_mask: self.data.document_mask,
            optimiser,
            batch: self.train.batch,
            emulated: self.train.device.is_emulated(),
            initial: self.initial.as_ref().map(|initial| initial.weights.clone()),
            guard: Some(self.guard.clone()).filter(GuardConfig::is_on),
            precision: Some(self.train.precision).filter(|&precision| precision == Precision::Bf16),
        }
    }
}

/// What defines a training: two runs with equal definitions train the same model, wherever they write and
/// however they are cut. Its hash is the run's identity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// The run's seed.
    pub seed: u64,
    /// Tokens that the model knows.
    pub vocabulary: usize,
    /// The model.
    pub model: ModelConfig,
    /// Hash of the corpus's contents, its sources' weights included.
    pub corpus: String,
    /// Fraction of documents held out.
    pub held_out: f64,
    /// Whether attention stays inside documents.
    pub document_mask: bool,
    /// The optimiser, its schedule resolved.
    pub optimiser: OptimiserConfig,
    /// Samples of one step.
    pub batch: u32,
    /// Whether nothing is computed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub emulated: bool,
    /// The hash of the weights that it begins with, if they are not drawn from the seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial: Option<String>,
    /// The guard, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guard: Option<GuardConfig>,
    /// The precision, if it changes more than the last bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
}

impl Definition {
    /// The run's identity: BLAKE3 of the definition, in hexadecimal.
    pub fn identity(&self) -> String {
        let mut hasher = blake3::Hasher::new_derive_key("starling 2026 run identity");
        // Keys come in the order of the fields and numbers in their shortest form: the text is canonical.
        let text = serde_json::to_vec(self).expect("a definition is plain numbers and strings");
        hasher.update(&text);
        hasher.finalize().to_hex().to_string()
    }

    /// Where two definitions differ: key, this one's value, the other's.
    pub fn differences(&self, other: &Definition) -> Vec<Difference> {
        differences_between(self, other)
    }
}

/// A key, the value on one side, the value on the other.
pub type Difference = (String, String, String);

fn differences_between(a: &impl Serialize, b: &impl Serialize) -> Vec<Difference> {
    let json = |value: Result<serde_json::Value, _>| value.expect("settings are plain numbers and strings");
    let mut list = Vec::new();
    differences("", &json(serde_json::to_value(a)), &json(serde_json::to_value(b)), &mut list);
    list
}

fn differences(key: &str, a: &serde_json::Value, b: &serde_json::Value, list: &mut Vec<Difference>) {
    use serde_json::Value;
    match (a, b) {
        (Value::Object(x), Value::Object(y)) => {
            let keys: std::collections::BTreeSet<&String> = x.keys().chain(y.keys()).collect();
            for name in keys {
                let path = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                let none = Value::Null;
                differences(&path, x.get(name).unwrap_or(&none), y.get(name).unwrap_or(&none), list);
            }
        }
        _ if a == b => {}
        _ => list.push((key.to_string(), a.to_string(), b.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_follows_what_defines_the_training_and_nothing_else() {
        let run = Run::default();
        let identity = |run: &Run| run.definition(257, "c".into()).identity();
        let mut other = run.clone();
        other.name = "elsewhere".into();
        other.train.stages = 3;
        other.train.threads = 7;
        other.train.microbatch = 2;
        other.checkpoint.every = 1;
        other.train.precision = Precision::F64;
        assert_eq!(identity(&run), identity(&other));
        let rounded = Run {
            train: TrainConfig { precision: Precision::Bf16, ..TrainConfig::default() },
            ..run.clone()
        };
        assert_ne!(identity(&run), identity(&rounded));
        other.optimiser.lr = 1.0;
        assert_ne!(identity(&run), identity(&other));
        let (a, b) = (run.definition(257, "c".into()), other.definition(257, "c".into()));
        let named: Vec<String> = a.differences(&b).into_iter().map(|d| d.0).collect();
        assert_eq!(named, ["optimiser.lr"]);
    }
}
