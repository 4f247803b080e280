//! A whole run of real processes on this machine, for benchmarks: started, killed, cut off, and looked at.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use xtask::tool::root;

/// How long anything that is waited for may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// A run, its coordinator and its peers. Dropped, it kills them all.
pub struct Flock {
    folder: PathBuf,
    coordinator: Child,
    worker_ticket: String,
    driver_ticket: String,
    workers: Vec<(Child, String)>,
    drivers: Vec<Child>,
    lives: usize,
}

/// A step that was closed.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// When, in seconds since 1970.
    pub at: f64,
    /// Tokens that it had.
    pub tokens: f64,
}

/// This moment, in seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

impl Flock {
    /// A run of this file in a folder of its own, with a worker for every letter of `sites`, which names its site,
    /// and a driver in every site.
    pub fn start(name: &str, run: &str, sites: &str) -> Result<Flock> {
        let folder = root().join("target/bench/swarm").join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        fs::write(folder.join("run.toml"), run)?;
        fs::write(folder.join("links"), "")?;
        let mut coordinator = starling(&folder, "coordinator")?;
        coordinator.args([
            "run",
            "new",
            "run.toml",
            "--out",
            "run",
            "--listen",
            "127.0.0.1:0",
            "--site",
            "a",
        ]);
        coordinator.args(["--no-driver", "--wan", "@links", "--peers", &sites.len().to_string()]);
        let mut coordinator = coordinator.stdout(Stdio::piped()).spawn().context("cannot start starling")?;
        let mut tickets = Vec::new();
        if let Some(out) = coordinator.stdout.take() {
            for line in BufReader::new(out).lines().take(3) {
                let line = line?;
                let ticket = line.split_whitespace().find(|word| word.starts_with("starling-ticket"));
                tickets.push(ticket.context("the coordinator printed no ticket")?.to_string());
            }
        }
        let [worker_ticket, driver_ticket, _] = &tickets[..] else {
            bail!("the coordinator has ended, see {}", folder.join("coordinator.log").display());
        };
        let (worker_ticket, driver_ticket) = (worker_ticket.clone(), driver_ticket.clone());
        let (workers, drivers) = (Vec::new(), Vec::new());
        let mut flock =
            Flock { folder, coordinator, worker_ticket, driver_ticket, workers, drivers, lives: 0 };
        for (index, site) in sites.char_indices() {
            let site = site.to_string();
            if !sites[..index].contains(&site) {
                let driver = flock.join(&flock.driver_ticket.clone(), &site)?;
                flock.drivers.push(driver);
            }
            let worker = flock.join(&flock.worker_ticket.clone(), &site)?;
            flock.workers.push((worker, site));
        }
        Ok(flock)
    }

    fn join(&mut self, ticket: &str, site: &str) -> Result<Child> {
        self.lives += 1;
        let mut command = starling(&self.folder, &format!("peer-{}", self.lives))?;
        command.env("STARLING_TICKET", ticket);
        command.args(["join", "-", "--site", site, "--wan", "@links", "--threads", "1"]);
        command.args(["--dir", &format!("run/peers/{}", self.lives)]);
        command.stdout(Stdio::null()).spawn().context("cannot start a peer")
    }

    /// `kill -9`.
    pub fn kill(&mut self, worker: usize) -> Result<()> {
        let (child, _) = &mut self.workers[worker];
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Another process takes the place of one that was killed.
    pub fn replace(&mut self, worker: usize) -> Result<()> {
        let site = self.workers[worker].1.clone();
        self.workers[worker].0 = self.join(&self.worker_ticket.clone(), &site)?;
        Ok(())
    }

    /// What lies between sites from now on.
    pub fn links(&self, text: &str) -> Result<()> {
        let new = self.folder.join("links.new");
        fs::write(&new, text)?;
        Ok(fs::rename(&new, self.folder.join("links"))?) // Nobody reads half of it.
    }

    fn events(&self) -> Result<Vec<Value>> {
        let text = fs::read_to_string(self.folder.join("run/events.jsonl")).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }

    /// The steps that were closed, in order.
    pub fn steps(&self) -> Result<Vec<Step>> {
        let mut steps = Vec::new();
        for event in self.events()?.iter().filter(|event| event["event"] == "step") {
            let number = |key: &str| event[key].as_f64().unwrap_or(f64::NAN);
            steps.push(Step { at: number("time_ms") / 1e3, tokens: number("tokens") });
        }
        Ok(steps)
    }

    /// For each closed step, how many peers gave sums to its first stage.
    pub fn holders(&self) -> Result<Vec<usize>> {
        let events = self.events()?;
        let mut holders = Vec::new();
        for event in events.iter().filter(|event| event["event"] == "counted") {
            let step = event["step"].as_u64().unwrap_or(0) as usize;
            holders.resize(step, 0);
            holders.push(event["stages"][0].as_array().map_or(0, Vec::len));
        }
        Ok(holders)
    }

    /// What the coordinator said that contains this.
    pub fn news(&self, of: &str) -> Result<Vec<String>> {
        let events = self.events()?;
        let news = events.iter().filter(|event| event["event"] == "news");
        let texts = news.filter_map(|event| event["text"].as_str()).filter(|text| text.contains(of));
        Ok(texts.map(String::from).collect())
    }

    /// Waits until so many more steps are closed.
    pub fn go_on_for(&mut self, steps: usize) -> Result<()> {
        let (from, until) = (self.steps()?.len(), Instant::now() + PATIENCE);
        while self.steps()?.len() < from + steps {
            let log = self.folder.join("coordinator.log");
            if self.coordinator.try_wait()?.is_some() {
                bail!("the coordinator has ended, see {}", log.display());
            }
            if Instant::now() > until {
                bail!("no {steps} steps in {} s, see {}", PATIENCE.as_secs(), log.display());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Seconds of processor time that the coordinator has taken, and all its peers that live.
    pub fn processor_seconds(&self) -> Result<(f64, f64)> {
        let workers = self.workers.iter().map(|(child, _)| child);
        let peers = workers.chain(&self.drivers).map(processor_seconds).sum::<Result<f64>>()?;
        Ok((processor_seconds(&self.coordinator)?, peers))
    }

    /// The most bytes of memory that a worker has had.
    pub fn peak_bytes(&self, worker: usize) -> Result<f64> {
        let path = format!("/proc/{}/status", self.workers[worker].0.id());
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
        Ok(1024.0 * kilobytes.context("this system does not tell the peak of a process")?)
    }
}

/// User and system time of a process so far.
fn processor_seconds(child: &Child) -> Result<f64> {
    /// What `proc(5)` counts in, on every Linux that there is.
    const TICKS_PER_S: f64 = 100.0;
    let path = format!("/proc/{}/stat", child.id());
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    // After the name, which may hold anything, in parentheses.
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = fields.get(11..13).context("too few fields")?.iter().map(|field| field.parse::<f64>());
    Ok(ticks.sum::<Result<f64, _>>()? / TICKS_PER_S)
}

fn starling(folder: &std::path::Path, log: &str) -> Result<Command> {
    let path = folder.join(format!("{log}.log"));
    let log = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    let mut command = Command::new(root().join("target/release/starling"));
    command.current_dir(folder).stdin(Stdio::null()).stderr(log);
    Ok(command)
}

impl Drop for Flock {
    fn drop(&mut self) {
        let workers = self.workers.iter_mut().map(|(child, _)| child);
        for child in workers.chain(&mut self.drivers).chain([&mut self.coordinator]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
