//! `starling up`: a whole run on this machine, with real processes.

mod chaos;
mod peers;
mod report;
pub mod view;

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use starling_node::coordinator::Coordinator;
use starling_node::links::WanSource;
use starling_swarm::coordinator::Order;
use starling_transport::ticket::Role;

use crate::hosting::{Hosted, RunArguments};
use crate::interrupt::{self, Interrupt};
use crate::{join, words};
use chaos::Chaos;
use peers::Peers;
use view::View;

/// Train a run on this machine, with one process for every peer
///
/// Peers stand in several sites, talk through real (and, with --wan, slow) connections, and may be killed at
/// any time, by you or by --chaos: the weights are those of a single machine, bit for bit, and the report says
/// so. Everything goes into one folder: events, checkpoints, a log for every peer, a plot and a report.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  starling up examples/quickstart.toml\n  starling up examples/quickstart.toml --peers 6 --wan 200mbit,50ms --chaos 'kill every 10s'"
)]
pub struct Arguments {
    #[command(flatten)]
    run: RunArguments,
    /// Sites that the peers stand in
    #[arg(long, default_value_t = 2)]
    sites: usize,
    /// Workers [default: two for every stage]
    #[arg(long)]
    peers: Option<usize>,
    /// Threads of each worker
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Emulate slow links between sites, as 200mbit,50ms; @FILE reads them from a file, whenever that changes
    #[arg(long, value_name = "RATE,LATENCY")]
    wan: Option<String>,
    /// Disturb the run, as 'kill every 10s'
    #[arg(long, value_name = "WHAT")]
    chaos: Option<Chaos>,
    /// Steps that are trained again in one process afterwards, to compare: 0 none
    #[arg(long, value_name = "STEPS", default_value_t = 50)]
    compare: u64,
}

/// How often peers and screen are looked at.
const LOOK: Duration = Duration::from_millis(250);

pub fn run(arguments: Arguments) -> Result<ExitCode> {
    let interrupt = Interrupt::listen()?;
    let wan: WanSource = arguments.wan.as_deref().map(str::parse).transpose()?.unwrap_or_default();
    if arguments.sites == 0 {
        bail!("peers stand somewhere: use --sites 1 or more");
    }
    let stages = |hosted: &Hosted| usize::from(hosted.charter.spec.stages);
    let mut hosted = Hosted::open(&arguments.run, 1)?;
    let count = arguments.peers.unwrap_or(2 * stages(&hosted));
    if count < stages(&hosted) {
        bail!("{} stages need at least as many peers, not {count}; use --peers {0}", stages(&hosted));
    }
    hosted.charter.spec.tuning.quorum = count;
    let outcome = join::runtime(2)?.block_on(train(&arguments, wan, &hosted, count, &interrupt))?;
    match outcome {
        Outcome::Finished { kills } => report::write(&hosted, kills, arguments.compare, &interrupt),
        Outcome::Interrupted { step, safe } => {
            let shown = arguments.run.input.display();
            let safety =
                if safe { "and saved there" } else { "; the steps after the last checkpoint are done again" };
            words::tell(&format!(
                "stopped at step {step} {safety}. Go on with:\n  starling up {shown} --resume"
            ));
            Ok(ExitCode::from(interrupt::EXIT))
        }
    }
}

enum Outcome {
    Finished { kills: u32 },
    Interrupted { step: u64, safe: bool },
}

async fn train(
    arguments: &Arguments,
    wan: WanSource,
    hosted: &Hosted,
    count: usize,
    interrupt: &Interrupt,
) -> Result<Outcome> {
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let coordinator = hosted.start(listen, Vec::new(), &peers::site(0), wan)?;
    let addresses = coordinator.addresses();
    let tickets = [Role::Worker, Role::Driver].map(|role| hosted.ticket(addresses.clone(), role, None));
    let [worker, driver] = tickets.map(|ticket| ticket.to_string());
    hosted.leave_ticket(&addresses)?;
    let folder = hosted.folder.path().join("peers");
    let mut peers = Peers::new(folder, worker, driver, arguments.threads, arguments.wan.clone());
    for number in 0..arguments.sites {
        peers.start_driver(number % arguments.sites)?;
    }
    for number in 0..count {
        peers.start_worker(number % arguments.sites)?;
    }
    attend(arguments, coordinator, peers, interrupt).await
}

/// Looks after the peers and the screen until the run is over.
async fn attend(
    arguments: &Arguments,
    coordinator: Coordinator,
    mut peers: Peers,
    interrupt: &Interrupt,
) -> Result<Outcome> {
    let (mut status, orders) = (coordinator.status(), coordinator.orders());
    let mut run = std::pin::pin!(coordinator.run());
    let mut view = View::new();
    let mut chaos = arguments.chaos.clone();
    let mut stopping = false;
    if arguments.run.resume {
        let _ = orders.try_send(Order::Resume);
    }
    loop {
        let ended = tokio::select! {
            ended = &mut run => Some(ended),
            () = tokio::time::sleep(LOOK) => None,
        };
        let now = status.borrow_and_update().clone();
        view.show(&now, Some(&peers));
        if let Some(ended) = ended {
            view.finish();
            ended?;
            peers.wait_for_all();
            return Ok(Outcome::Finished { kills: peers.kills() });
        }
        if interrupt.asked() && !stopping {
            stopping = true;
            let _ = orders.try_send(Order::Pause);
        }
        let safe = now.paused && now.checkpoint == now.step;
        if stopping && (safe || now.stages.iter().any(|stage| stage.peers.is_empty())) {
            view.finish();
            return Ok(Outcome::Interrupted { step: now.step, safe });
        }
        if !stopping {
            peers.restart_dead()?;
            if let Some(chaos) = &mut chaos {
                chaos.act(&mut peers);
            }
        }
    }
}
