//! `starling run`: a run over many machines, coordinated from here.

mod audit;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use starling_node::driver::{Driver, Text};
use starling_node::links::WanSource;
use starling_node::member::{Joining, Member};
use starling_swarm::coordinator::Order;
use starling_swarm::ids::Step;
use starling_transport::identity::Identity;
use starling_transport::ticket::Role;
use tokio::sync::Notify;

use crate::hosting::{Hosted, RunArguments};
use crate::interrupt::{self, Interrupt};
use crate::run_folder::RunFolder;
use crate::session::open_text;
use crate::status::{Target, show};
use crate::up::view::View;
use crate::{join, words};

/// Make a run for many machines, go on with one, or give it orders
#[derive(clap::Subcommand)]
pub enum Command {
    /// Make a run, print its tickets, and coordinate it from here
    New(New),
    /// Coordinate a run again after its coordinator ended, however that was
    Serve(Serve),
    /// Coordinate a run from another machine than before: copy its folder here first
    Adopt(Serve),
    /// Close the open step, save it, then wait
    Pause(Target),
    /// Go on after a pause
    Resume(Target),
    /// Let the open step be the last, and end in good order
    Stop(Target),
    /// Prove from the event logs that every sample was counted once in every stage and step
    Audit(audit::Arguments),
    /// Print the events of all processes in one order, in which nothing stands before its cause
    History(audit::Arguments),
}

#[derive(clap::Args)]
pub struct New {
    #[command(flatten)]
    run: RunArguments,
    #[command(flatten)]
    place: Place,
    /// Workers that must have joined before the run begins [default: one for every stage]
    #[arg(long, default_value_t = 1)]
    peers: usize,
}

#[derive(clap::Args)]
pub struct Serve {
    /// The run's folder
    folder: PathBuf,
    #[command(flatten)]
    place: Place,
}

/// Where a coordinator stands.
#[derive(clap::Args)]
pub struct Place {
    /// Where to listen; others must be able to reach it
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7700")]
    listen: SocketAddr,
    /// What others call this address, if not that
    #[arg(long, value_name = "HOST:PORT")]
    address: Vec<String>,
    /// The site of this machine
    #[arg(long, default_value = "here")]
    site: String,
    /// Emulate slow links between sites, as 200mbit,50ms; @FILE reads them from a file, whenever that changes
    #[arg(long, value_name = "RATE,LATENCY")]
    wan: Option<WanSource>,
    /// Feed the pipeline from other machines only (starling join with a driver's ticket)
    #[arg(long)]
    no_driver: bool,
}

pub fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::New(New { run, place, peers }) => coordinate(Hosted::open(&run, peers)?, place),
        Command::Serve(Serve { folder, place }) | Command::Adopt(Serve { folder, place }) => {
            let input = RunFolder::at(&folder).run_file();
            let run = RunArguments { input, resume: true, from: None, set: Vec::new(), out: Some(folder) };
            coordinate(Hosted::open(&run, 1)?, place)
        }
        Command::Pause(target) => order(&target, |_| Order::Pause),
        Command::Resume(target) => order(&target, |_| Order::Resume),
        Command::Audit(arguments) => audit::run(&arguments),
        Command::History(arguments) => audit::history(&arguments),
        Command::Stop(target) => order(&target, |step| Order::LastStep(Step(step + 1))),
    }
}

fn order(target: &Target, order: impl Fn(u64) -> Order) -> Result<ExitCode> {
    join::runtime(1)?.block_on(async {
        let mut operator = target.connect().await?;
        let status = operator.status().await?;
        show(&operator.order(order(status.step)).await?)
    })
}

fn coordinate(hosted: Hosted, place: Place) -> Result<ExitCode> {
    let interrupt = Interrupt::listen()?;
    join::runtime(2)?.block_on(serve(hosted, place, interrupt))
}

async fn serve(hosted: Hosted, place: Place, interrupt: Interrupt) -> Result<ExitCode> {
    let Place { listen, address, site, wan, no_driver } = place;
    if listen.ip().is_unspecified() && address.is_empty() {
        bail!("nobody can dial {}: say with --address HOST:PORT what others call this machine", listen.ip());
    }
    let coordinator = hosted.start(listen, address, &site, wan.clone().unwrap_or_default())?;
    let addresses = coordinator.addresses();
    hosted.leave_ticket(&addresses)?;
    let [worker, driver, operator] = [Role::Worker, Role::Driver, Role::Operator]
        .map(|role| hosted.ticket(addresses.clone(), role, None).to_string());
    words::show(&format!(
        "workers:   starling join {worker} --site NAME\n\
         drivers:   starling join {driver} --site NAME\n\
         operators: starling watch {operator}\n"
    ))?;
    if !no_driver {
        let ticket = hosted.ticket(coordinator.local_addresses(), Role::Driver, None);
        let (text, _) = open_text(&hosted.charter.run, &hosted.folder.corpus())?;
        tokio::spawn(drive(ticket, site, wan.unwrap_or_default(), text));
    }
    let mut status = coordinator.status();
    let mut run = std::pin::pin!(coordinator.run());
    let mut view = View::new();
    loop {
        tokio::select! {
            ended = &mut run => {
                view.show(&status.borrow_and_update(), None);
                view.finish();
                ended?;
                let shown = hosted.folder.path().display();
                words::tell(&format!("all steps are done. Try it: starling generate {shown}"));
                return Ok(ExitCode::SUCCESS);
            }
            () = tokio::time::sleep(Duration::from_millis(250)) => {}
        }
        view.show(&status.borrow_and_update(), None);
        if interrupt.asked() {
            view.finish();
            let shown = hosted.folder.path().display();
            words::tell(&format!(
                "the coordinator ends; the peers wait for it. Go on with:\n  starling run serve {shown}"
            ));
            return Ok(ExitCode::from(interrupt::EXIT));
        }
    }
}

/// A driver inside the coordinator's process, so that a run needs nobody else who has the corpus.
async fn drive(ticket: starling_transport::ticket::Ticket, site: String, wan: WanSource, text: Text) {
    let joining = Joining {
        identity: Arc::new(Identity::generate()),
        ticket,
        site,
        wan,
        patience: Duration::from_secs(10),
        tell: |_| {},
    };
    match Member::join(joining).await.context("the driver beside the coordinator could not join") {
        Ok((member, charter)) => Driver::new(member, charter, text, Arc::new(Notify::new())).run().await,
        Err(error) => words::tell(&format!("warning: {error:#}")),
    }
}
