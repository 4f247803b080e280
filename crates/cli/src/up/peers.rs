//! The processes of a run on this machine: started, killed, started again.

use std::fs::{self, File, OpenOptions};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::join;

/// How long a process that died stays dead.
const REST: Duration = Duration::from_secs(1);
/// How long processes may take to end when the run is over.
const FAREWELL: Duration = Duration::from_secs(10);

/// See the module's head. Dropped, it kills them all.
pub struct Peers {
    folder: PathBuf,
    worker: String,
    driver: String,
    threads: usize,
    wan: Option<String>,
    all: Vec<Peer>,
    kills: u32,
}

struct Peer {
    role: Kind,
    site: usize,
    child: Child,
    died: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Worker,
    Driver,
}

/// The name of a site.
pub fn site(number: usize) -> String {
    match number {
        0..26 => char::from(b'a' + number as u8).to_string(),
        _ => format!("site{number}"),
    }
}

impl Peers {
    pub fn new(
        folder: PathBuf,
        worker: String,
        driver: String,
        threads: usize,
        wan: Option<String>,
    ) -> Peers {
        Peers { folder, worker, driver, threads, wan, all: Vec::new(), kills: 0 }
    }

    pub fn start_worker(&mut self, site: usize) -> Result<()> {
        self.add(Kind::Worker, site)
    }

    pub fn start_driver(&mut self, site: usize) -> Result<()> {
        self.add(Kind::Driver, site)
    }

    /// Processes that were killed, or died.
    pub fn kills(&self) -> u32 {
        self.kills
    }

    /// How many live.
    pub fn alive(&self) -> usize {
        self.all.iter().filter(|peer| peer.died.is_none()).count()
    }

    /// Kills one of those that live.
    pub fn kill(&mut self, number: usize) {
        let alive = self.alive();
        let mut living = self.all.iter_mut().filter(|peer| peer.died.is_none());
        if let Some(peer) = number.checked_rem(alive).and_then(|which| living.nth(which)) {
            let _ = peer.child.kill(); // It may have ended just now.
        }
    }

    /// Starts again what has died.
    pub fn restart_dead(&mut self) -> Result<()> {
        for index in 0..self.all.len() {
            let peer = &mut self.all[index];
            match peer.died {
                None if peer.child.try_wait().context("cannot look after a peer")?.is_some() => {
                    peer.died = Some(Instant::now());
                    self.kills += 1;
                }
                Some(died) if died.elapsed() >= REST => {
                    let (role, site) = (peer.role, peer.site);
                    self.all[index].child = self.spawn(index, role, site)?;
                    self.all[index].died = None;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// They end when they hear that the run is over.
    pub fn wait_for_all(&mut self) {
        let until = Instant::now() + FAREWELL;
        for peer in &mut self.all {
            while Instant::now() < until && matches!(peer.child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }

    fn add(&mut self, role: Kind, site: usize) -> Result<()> {
        let child = self.spawn(self.all.len(), role, site)?;
        self.all.push(Peer { role, site, child, died: None });
        Ok(())
    }

    fn spawn(&self, index: usize, role: Kind, place: usize) -> Result<Child> {
        let name = match role {
            Kind::Worker => "worker",
            Kind::Driver => "driver",
        };
        let folder = self.folder.join(format!("{name}-{index}"));
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let log = |name: &str| -> Result<File> {
            let path = folder.join(name);
            let file = OpenOptions::new().append(true).create(true).open(&path);
            file.with_context(|| format!("cannot write {}", path.display()))
        };
        let ticket = if role == Kind::Worker { &self.worker } else { &self.driver };
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut command = Command::new(program);
        // Not as an argument: those are for everybody on this machine to see.
        command.env(join::TICKET, ticket);
        command.args(["join", "-", "--site", &site(place), "--until-stdin-ends"]);
        command.args(["--threads", &self.threads.to_string()]);
        command.arg("--key").arg(folder.join("key"));
        if let Some(wan) = &self.wan {
            command.args(["--wan", wan]);
        }
        command.arg("--dir").arg(&folder);
        command.stdin(Stdio::piped()).stdout(log("log")?).stderr(log("log")?);
        detach(&mut command);
        command.spawn().context("cannot start a peer")
    }
}

/// Ctrl-C is for us: peers are told by us.
fn detach(command: &mut Command) {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    #[cfg(not(unix))]
    let _ = command;
}

impl Drop for Peers {
    fn drop(&mut self) {
        for peer in &mut self.all {
            let _ = peer.child.kill();
            let _ = peer.child.wait();
        }
    }
}
