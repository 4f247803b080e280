//! `starling join`: one peer of a run, on this machine.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use starling_model::device::Device;
use starling_model::memory::give_back_what_is_freed;
use starling_node::charter::Charter;
use starling_node::driver::{Driver, Text};
use starling_node::events::EventLog;
use starling_node::links::WanSource;
use starling_node::member::{Joining, Member};
use starling_node::sabotage::Sabotage;
use starling_node::worker::{self, Worker};
use starling_transport::identity::Identity;
use starling_transport::ticket::{Role, Ticket};
use tokio::sync::Notify;
use tokio::task::spawn_blocking;

use crate::{interrupt, session, words};

/// Take part in a run as a peer
///
/// The ticket says what this process does: a worker holds a stage of the model and computes, a driver feeds the
/// pipeline from the corpus. Ctrl-C, or the SIGTERM that precedes a preemption, hands over what the peer holds
/// before it leaves; a peer that is killed is replaced, and the training is the same.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  starling join starling-ticket-… --site paris\n  starling join starling-ticket-… --site paris --threads 8 --key my.key"
)]
pub struct Arguments {
    /// The ticket that `starling run new` printed; - takes it from the environment, STARLING_TICKET
    ticket: String,
    /// Where this machine stands: peers of one site are joined by a fast network
    #[arg(long, default_value = "here")]
    site: String,
    /// Threads that compute; 0 means one for every core
    #[arg(long)]
    threads: Option<usize>,
    /// What computes: cpu, or emulated:TFLOPS in a run that is emulated [default: as the run says]
    #[arg(long)]
    device: Option<Device>,
    /// The peer's key, made if it does not exist [default: a new one for this process]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Where this peer keeps its event log, and a driver its token shards and, if it is in another site than the
    /// coordinator, copies of checkpoints [default: no log, no copies, a temporary folder]
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// Emulate slow links between sites, as 200mbit,50ms; @FILE reads them from a file, whenever that changes
    #[arg(long, value_name = "RATE,LATENCY")]
    wan: Option<WanSource>,
    /// Seconds for which the coordinator may be out of reach at first
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    patience: u64,
    /// Seconds from a notice (Ctrl-C, SIGTERM) until this process is gone
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace: u64,
    /// Compute wrongly on purpose: a test that does not find it is worth nothing
    #[arg(long, hide = true)]
    sabotage: Option<Sabotage>,
    /// End when standard input ends: the process that started this one is gone
    #[arg(long, hide = true)]
    until_stdin_ends: bool,
}

/// The environment's name for a ticket.
pub const TICKET: &str = "STARLING_TICKET";

pub fn run(arguments: Arguments) -> Result<ExitCode> {
    give_back_what_is_freed();
    let text = match arguments.ticket.as_str() {
        "-" => std::env::var(TICKET).with_context(|| format!("there is no ticket in {TICKET}"))?,
        text => text.into(),
    };
    let ticket: Ticket = text.parse()?;
    if ticket.role == Role::Operator {
        bail!(
            "this ticket is for looking at the run (starling status, starling run …), not for taking part in it"
        );
    }
    let identity = match &arguments.key {
        Some(path) => Identity::load_or_generate(path)?,
        None => Identity::generate(),
    };
    if arguments.until_stdin_ends {
        std::thread::spawn(|| {
            let _ = std::io::stdin().lock().read_to_end(&mut Vec::new());
            std::process::exit(0);
        });
    }
    if let Some(dir) = &arguments.dir {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let notice = listen_for_notice()?;
    runtime(1)?.block_on(take_part(arguments, identity, ticket, notice))
}

async fn take_part(
    arguments: Arguments,
    identity: Identity,
    ticket: Ticket,
    notice: Arc<Notify>,
) -> Result<ExitCode> {
    let Arguments { site, threads, device, dir, wan, patience, grace, sabotage, .. } = arguments;
    let joining = Joining {
        identity: Arc::new(identity),
        ticket,
        site,
        wan: wan.unwrap_or_default(),
        patience: Duration::from_secs(patience),
        tell: words::tell,
    };
    let (member, mut charter) = Member::join(joining).await?;
    words::tell(&format!(
        "joined {} as {} {}; the run has {} stages and {} steps",
        charter.run.name,
        member.role(),
        member.number(),
        charter.spec.stages,
        charter.spec.steps.0
    ));
    let device = device.unwrap_or(charter.run.train.device);
    if device.is_emulated() != charter.run.train.device.is_emulated() {
        bail!(
            "the run is trained on {}, and this peer would be {device}; who computes and who only seems to cannot \
             train together",
            charter.run.train.device
        );
    }
    charter.run.train.device = device;
    charter.run.train.threads = threads.unwrap_or(charter.run.train.threads);
    match member.role() {
        Role::Worker => {
            let log = dir.map(|dir| EventLog::open(&dir.join("events.jsonl"))).transpose()?;
            let grace = Duration::from_secs(grace);
            let settings = worker::Settings { log, notice, grace, sabotage };
            // It measures this machine; meanwhile the network goes on.
            spawn_blocking(move || Worker::new(member, &charter, settings)).await??.run().await?;
        }
        Role::Driver => {
            let temporary = tempfile::tempdir().context("cannot make a temporary folder")?;
            let cache = dir.as_deref().unwrap_or(temporary.path()).join("corpus");
            let (text, charter) =
                spawn_blocking(move || text(&charter, &cache).map(|text| (text, charter))).await??;
            let mut driver = Driver::new(member, charter, text, notice);
            if let Some(dir) = &dir {
                driver.keep_copies(&dir.join("copies"))?;
            }
            driver.run().await;
        }
        Role::Operator => {}
    }
    words::tell("left the run in good order");
    Ok(ExitCode::SUCCESS)
}

/// Opens the run's corpus on this machine; it must be the one that the run was defined with.
fn text(charter: &Charter, cache: &Path) -> Result<Text> {
    let (text, hash) = session::open_text(&charter.run, cache)?;
    if hash != charter.definition.corpus {
        bail!(
            "the text on this machine is not the one that the run was made with; a driver must read the same files"
        );
    }
    Ok(text)
}

/// The first Ctrl-C or SIGTERM is a notice, the second ends at once.
fn listen_for_notice() -> Result<Arc<Notify>> {
    let notice = Arc::new(Notify::new());
    let told = notice.clone();
    interrupt::on_signal(move || {
        words::tell("leaving: handing over what this peer holds; once more to leave at once");
        told.notify_one();
    })?;
    Ok(notice)
}

/// Threads for the network; what computes has its own. With one of them, a message goes from the wire to whom it concerns
/// without waking another (48 peers on two cores: a fifth of all that they take).
pub fn runtime(threads: usize) -> Result<tokio::runtime::Runtime> {
    let mut builder = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    builder.worker_threads(threads).enable_all().build().context("cannot start the network's threads")
}
