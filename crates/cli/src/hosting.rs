//! The run that this process coordinates: its folder, its authority, its charter, its tickets.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use starling_corpus::{Sampler, Tokeniser};
use starling_model::checkpoint::{self, Checkpoint, Progress};
use starling_model::pipeline;
use starling_model::run::Run;
use starling_node::charter::Charter;
use starling_node::coordinator::{Coordinator, Settings};
use starling_node::guests::now_s;
use starling_node::journal::Journal;
use starling_node::links::WanSource;
use starling_swarm::ids::{Epoch, Step};
use starling_swarm::journal::{JournalState, Record};
use starling_transport::identity::Identity;
use starling_transport::ticket::{Role, Ticket};

use crate::run_folder::{Lock, RunFolder, write_private, write_whole};
use crate::session::{model_vocabulary, open_corpus};
use crate::train;
use crate::weights::{self, Weights};

/// How long a ticket is good.
const TICKET_S: u64 = 30 * 24 * 3600;

/// What a user says of the run to be coordinated.
#[derive(clap::Args, Clone)]
pub struct RunArguments {
    /// A run file (.toml), or any text file
    pub input: PathBuf,
    /// Go on with the run in its folder, with the settings recorded there; peers, stages and sites may be others
    #[arg(long)]
    pub resume: bool,
    /// Begin a new run at a checkpoint of the same training, such as a copy in another site or one of `starling train`
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "resume")]
    pub from: Option<PathBuf>,
    /// Override a setting, as --set optimiser.lr=1e-3; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// The run's folder [default: runs/NAME]
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,
}

/// See the module's head. The folder is ours as long as it lives.
pub struct Hosted {
    pub folder: RunFolder,
    pub charter: Charter,
    tokeniser: Tokeniser,
    held_out_windows: u64,
    authority: Arc<Identity>,
    _lock: Lock,
}

impl Hosted {
    /// Opens a new run, or the one in the folder. The run begins when `peers` workers are there.
    pub fn open(arguments: &RunArguments, peers: usize) -> Result<Hosted> {
        let named = train::parse(&arguments.input, &arguments.set);
        let folder = match train::folder_of(arguments.out.as_deref(), &named) {
            Some(folder) => folder,
            None => return Err(named.err().unwrap_or_else(|| anyhow::anyhow!("the run has no folder"))),
        };
        let (is_new, path) = (!folder.path().exists(), folder.path().to_path_buf());
        let lock = folder.claim()?;
        let opened = Hosted::open_in(arguments, named, folder, lock, peers);
        if opened.is_err() && is_new {
            let _ = std::fs::remove_dir_all(path); // Nothing is in it but what was made a moment ago.
        }
        opened
    }

    fn open_in(
        arguments: &RunArguments,
        named: Result<Run>,
        folder: RunFolder,
        lock: Lock,
        peers: usize,
    ) -> Result<Hosted> {
        let shown = folder.path().display().to_string();
        let recorded =
            folder.run_file().exists().then(|| train::parse(&folder.run_file(), &[])).transpose()?;
        if !arguments.resume && folder.is_used() {
            bail!(
                "{shown} holds a run already. Go on with it by --resume, or start another with --out FOLDER; \
                 nothing was changed"
            );
        }
        let run = match arguments.resume && recorded.is_some() {
            true => train::parse(&folder.run_file(), &arguments.set)?,
            false => named?,
        };
        let mut run = run;
        let initial = weights::initial(&mut run)?;
        let corpus = open_corpus(&run, &folder.corpus(), initial.as_ref())?;
        let tokeniser = corpus.tokeniser.clone();
        let vocabulary = model_vocabulary(&tokeniser, initial.as_ref().map(|weights| weights.vocabulary))?;
        let definition = run.definition(vocabulary, corpus.content_hash().to_hex().to_string());
        let sampler = Sampler::new(corpus, run.data.held_out, run.model.context, run.seed)
            .context("the corpus cannot be trained on as it is")?;
        let held_out_windows = sampler.held_out_windows();
        let charter = Charter::new(run, definition, peers)?;
        let authority = Arc::new(Identity::load_or_generate(&folder.path().join("run.key"))?);
        check_identity(&folder, &charter)?;
        if arguments.resume && folder.checkpoints().exists() && !folder.journal().exists() {
            bail!(
                "{shown} has checkpoints and no journal: it was not begun, or was damaged. Begin another run at one of \
                 them by --from, with --out FOLDER; nothing was changed"
            );
        }
        if let Some(weights) = initial.filter(|_| !folder.checkpoints().exists() && arguments.from.is_none())
        {
            begin_with(&weights, &folder, &charter, &tokeniser)?;
        }
        if let Some(checkpoint) = &arguments.from {
            begin_at_checkpoint(checkpoint, &folder, &charter)?;
        }
        if recorded.is_some_and(|recorded| is_cut_otherwise(&recorded, &charter.run)) {
            begin_again_from_checkpoint(&folder.journal())?;
        }
        write_whole(&folder.run_file(), &toml::to_string(&charter.run)?)?;
        Ok(Hosted { folder, charter, tokeniser, held_out_windows, authority, _lock: lock })
    }

    /// Starts the coordinator; `addresses` are where others reach it, if not where it listens.
    pub fn start(
        &self,
        listen: SocketAddr,
        addresses: Vec<String>,
        site: &str,
        wan: WanSource,
    ) -> Result<Coordinator> {
        Ok(Coordinator::start(Settings {
            addresses,
            folder: self.folder.path().to_path_buf(),
            listen,
            site: site.into(),
            authority: self.authority.clone(),
            charter: self.charter.clone(),
            tokeniser: self.tokeniser.clone(),
            held_out_windows: self.held_out_windows,
            wan,
        })?)
    }

    /// Leaves an operator's ticket in the folder, so that the folder can be named in place of a ticket.
    pub fn leave_ticket(&self, addresses: &[String]) -> Result<()> {
        let operator = self.ticket(addresses.to_vec(), Role::Operator, None);
        write_private(&self.folder.operator_ticket(), &format!("{operator}\n"))
    }

    /// A ticket of the run.
    pub fn ticket(&self, addresses: Vec<String>, role: Role, site: Option<String>) -> Ticket {
        let expires_s = now_s() + TICKET_S;
        Ticket::issue(&self.authority, self.charter.identity(), addresses, role, site, expires_s, 0)
    }
}

/// A folder holds one training: going on with another would spoil it.
fn check_identity(folder: &RunFolder, charter: &Charter) -> Result<()> {
    let (path, now) = (folder.path().join("identity"), charter.definition.identity());
    let shown = folder.path().display();
    match std::fs::read_to_string(&path) {
        Ok(recorded) if recorded.trim() != now => bail!(
            "{shown} holds another training: its text, model, optimiser, batch or seed was another. Set it back, or \
             start another with --out FOLDER; nothing was changed"
        ),
        Ok(_) => Ok(()),
        Err(_) if folder.is_used() => bail!(
            "{shown} was trained in one process, or is damaged. Go on with `starling train --resume`, or start \
             another with --out FOLDER (at a checkpoint of this one by --from); nothing was changed"
        ),
        Err(_) => write_whole(&path, &format!("{now}\n")),
    }
}

/// A new run begins with weights that its peers cannot make from the seed: they are its checkpoint of step 0.
fn begin_with(weights: &Weights, folder: &RunFolder, charter: &Charter, tokeniser: &Tokeniser) -> Result<()> {
    let Charter { run, definition, .. } = charter.clone();
    let architecture = run.model.architecture(definition.vocabulary);
    let mut stages = pipeline::build(&architecture, run.optimiser.rule(), &run.train.untrained(), run.seed)?;
    weights.put_into(&mut stages)?;
    let progress = Progress { run, definition, tokeniser: tokeniser.clone(), skipped: 0 };
    checkpoint::save(&folder.checkpoints(), &progress, &stages)?;
    Ok(())
}

/// A new run takes over the state of a checkpoint.
fn begin_at_checkpoint(path: &Path, folder: &RunFolder, charter: &Charter) -> Result<()> {
    let shown = path.display();
    let checkpoint = Checkpoint::open(path)?;
    let manifest = &checkpoint.manifest;
    if manifest.identity != charter.definition.identity() {
        bail!(
            "{shown} is of another training: its text, model, optimiser, batch or seed was another. Set it back; \
             nothing was changed"
        );
    }
    if manifest.run.train.precision != charter.run.train.precision {
        bail!(
            "{shown} was computed with train.precision = {:?}; set it to that. Nothing was changed",
            manifest.run.train.precision
        );
    }
    let step = Step(manifest.step);
    // Which steps were skipped is not known, and does not matter: how many were does.
    let skipped = (0..manifest.skipped).map(|step| Record::Skipped(Step(step)));
    let records: Vec<Record> =
        [Record::Checkpoint(step), Record::Rollback(Epoch(1), step)].into_iter().chain(skipped).collect();
    // The journal appears last and whole: without it there is no run in the folder that could be resumed.
    let (journal, new) = (folder.journal(), folder.journal().with_extension("new"));
    let _ = std::fs::remove_file(&new);
    let begun = checkpoint::copy(&checkpoint, &folder.checkpoints())
        .with_context(|| format!("cannot copy {shown}"))
        .and_then(|_| Ok(Journal::open::<Record>(&new)?.0.append(&records)?))
        .and_then(|()| {
            std::fs::rename(&new, &journal).with_context(|| format!("cannot write {}", journal.display()))
        });
    if begun.is_err() {
        let _ = std::fs::remove_dir_all(folder.checkpoints());
    }
    begun
}

/// Whether what the journal says of lots and stages means something else in the other run.
fn is_cut_otherwise(a: &Run, b: &Run) -> bool {
    let cut = |run: &Run| (run.train.stages, run.train.batch, run.train.microbatch, run.train.lots);
    cut(a) != cut(b)
}

/// A run that is cut in another way goes on from its last checkpoint: nobody holds anything of the new cut. The old
/// journal stays beside the new one, and at every instant there is one of the two.
fn begin_again_from_checkpoint(path: &Path) -> Result<()> {
    let book = JournalState::replay(&Journal::open::<Record>(path)?.1);
    let trouble = |path: &Path| format!("cannot write {}", path.display());
    let mut records = vec![
        Record::Term(book.term),
        Record::Checkpoint(book.checkpoint),
        Record::Rollback(Epoch(book.epoch.0 + 1), book.checkpoint),
        Record::Paused(book.paused),
    ];
    records.extend(book.skipped.range(..book.checkpoint).map(|&step| Record::Skipped(step)));
    let (epoch, checkpoint) = (Epoch(book.epoch.0 + 1), book.checkpoint);
    records.extend(book.left_out.iter().map(|&step| Record::LeftOut(epoch, checkpoint, (step, step))));
    records.extend(book.quarantined.iter().map(|&peer| Record::Quarantined(peer, true)));
    records.extend(book.last_step.map(Record::LastStep));
    records.extend(book.amendments.into_iter().map(|(step, settings)| Record::Amended(step, settings)));
    let new = path.with_extension("new");
    let _ = std::fs::remove_file(&new);
    Journal::open::<Record>(&new)?.0.append(&records)?;
    let old = (0..).map(|number| path.with_extension(format!("old-{number}"))).find(|path| !path.exists());
    if let Some(old) = old {
        std::fs::hard_link(path, &old).with_context(|| trouble(&old))?;
    }
    std::fs::rename(&new, path).with_context(|| trouble(path))
}
