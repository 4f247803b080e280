//! `starling status` and `starling watch`: how a run stands.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use starling_node::operator::Operator;
use starling_node::status::Status;
use starling_transport::ticket::{Role, Ticket};

use crate::run_folder::RunFolder;
use crate::up::view::{self, View};
use crate::{join, words};

/// Which run is meant.
#[derive(clap::Args)]
pub struct Target {
    /// An operator's ticket, or the folder of a run that is coordinated on this machine
    #[arg(value_name = "TICKET|FOLDER")]
    run: String,
}

/// Say how a run stands, and what it waits for
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// Print it as JSON, for programs
    #[arg(long)]
    json: bool,
}

/// Show how a run stands, again and again, until it is over
#[derive(clap::Args)]
pub struct WatchArguments {
    #[command(flatten)]
    target: Target,
}

impl Target {
    /// Connects to the run's coordinator.
    pub async fn connect(&self) -> Result<Operator> {
        let path = Path::new(&self.run);
        let text = match path.is_dir() {
            true => {
                let file = RunFolder::at(path).operator_ticket();
                std::fs::read_to_string(&file).with_context(|| {
                    format!("{} is no folder of a run that was coordinated here", self.run)
                })?
            }
            false => self.run.clone(),
        };
        let ticket: Ticket = text.trim().parse()?;
        if ticket.role != Role::Operator {
            bail!("this is a {}'s ticket; asking and giving orders needs an operator's", ticket.role);
        }
        Ok(Operator::connect(&ticket).await?)
    }
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let asked = async { anyhow::Ok(arguments.target.connect().await?.status().await?) };
    let status = join::runtime(1)?.block_on(asked)?;
    match arguments.json {
        true => words::show(&format!("{}\n", serde_json::to_string_pretty(&status)?)),
        false => show(&status),
    }
}

/// Prints how a run stands.
pub fn show(status: &Status) -> Result<ExitCode> {
    words::show(&(view::lines(status, None).join("\n") + "\n"))
}

pub fn watch(arguments: &WatchArguments) -> Result<ExitCode> {
    join::runtime(1)?.block_on(async {
        let mut operator = arguments.target.connect().await?;
        let mut view = View::new();
        loop {
            let status = operator.status().await?;
            view.show(&status, None);
            if status.finished {
                return Ok(ExitCode::SUCCESS);
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    })
}
