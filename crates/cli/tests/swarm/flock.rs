//! A whole run of real processes on loopback: started, killed, stopped, cut off, and compared with one process.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use starling_model::checkpoint;
use starling_node::events::{self, Event};
use starling_node::status::Status;

use crate::process::Place;

/// Three stages, the first and the last share their embedding, four lots, dropout and clipping: whatever is counted
/// twice, dropped or added in another order shows.
const RUN: &str = r#"
seed = 5
model = { context = 16, width = 16, layers = 4, heads = 2, dropout = 0.1 }
data = { synthetic = { documents = 200 } }
optimiser = { lr = 1e-2, clip = 0.5, warmup_steps = 10, decay_steps = 400 }
train = { steps = 1000000, batch = 14, microbatch = 2, lots = 4, stages = 3, threads = 1 }
checkpoint = { every = 20 }
"#;

/// How long anything that is waited for may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// A run, its coordinator and its peers. Dropped, it kills them all.
pub struct Flock {
    pub place: Place,
    settings: String,
    coordinator: Option<Child>,
    tickets: Tickets,
    peers: Vec<Peer>,
    lives: usize,
}

#[derive(Default)]
struct Tickets {
    worker: String,
    driver: String,
}

struct Peer {
    child: Child,
    /// Which of all that were started it is.
    life: usize,
    driver: bool,
    site: String,
}

impl Flock {
    /// A coordinator in site a, of a run that begins with so many workers. Everything that crosses sites goes by what is written with [`Flock::links`].
    pub fn new(settings: &str, peers: usize) -> Flock {
        let place = Place::new();
        place.write("flock.toml", RUN);
        place.write("links", "");
        let mut flock = Flock {
            place,
            settings: settings.into(),
            coordinator: None,
            tickets: Tickets::default(),
            peers: Vec::new(),
            lives: 0,
        };
        flock.coordinate(&format!("run new flock.toml --out run {settings} --peers {peers}"));
        flock
    }

    /// With as many workers as there are letters in `sites`, each in the site of its letter, and a driver in every site.
    pub fn with_workers(settings: &str, sites: &str) -> Flock {
        let mut flock = Flock::new(settings, sites.len());
        let mut driven = Vec::new();
        for site in sites.chars().map(String::from) {
            if !driven.contains(&site) {
                flock.start_driver(&site);
                driven.push(site.clone());
            }
            flock.start_worker(&site);
        }
        flock
    }

    fn coordinate(&mut self, command: &str) {
        let command = format!("{command} --listen 127.0.0.1:0 --site a --no-driver --wan @links");
        let mut child = self.spawn(&command, "coordinator", Stdio::piped());
        let out = child.stdout.take().unwrap();
        for line in BufReader::new(out).lines().map_while(Result::ok).take(3) {
            let ticket = line.split_whitespace().find(|word| word.starts_with("starling-ticket")).unwrap();
            match line.split(':').next() {
                Some("workers") => self.tickets.worker = ticket.into(),
                Some("drivers") => self.tickets.driver = ticket.into(),
                _ => {}
            }
        }
        assert!(!self.tickets.driver.is_empty(), "no tickets: {}", self.log("coordinator"));
        self.coordinator = Some(child);
    }

    /// Starts a process that writes into a log of its own.
    fn spawn(&mut self, command: &str, log: &str, out: Stdio) -> Child {
        let file = File::options().append(true).create(true).open(self.place.path(&format!("{log}.log")));
        self.place.command(command).stdin(Stdio::null()).stdout(out).stderr(file.unwrap()).spawn().unwrap()
    }

    pub fn worker_ticket(&self) -> &str {
        &self.tickets.worker
    }

    pub fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.place.path(&format!("{name}.log"))).unwrap_or_default()
    }

    pub fn start_worker(&mut self, site: &str) -> usize {
        self.start(false, site, "")
    }

    pub fn start_driver(&mut self, site: &str) -> usize {
        self.start(true, site, "")
    }

    /// A worker that computes wrongly on purpose.
    pub fn start_saboteur(&mut self, site: &str, how: &str) -> usize {
        self.start(false, site, &format!("--sabotage {how}"))
    }

    fn start(&mut self, driver: bool, site: &str, more: &str) -> usize {
        let child = self.spawn_peer(driver, site, more);
        self.peers.push(Peer { child, life: self.lives, driver, site: site.into() });
        self.peers.len() - 1
    }

    fn spawn_peer(&mut self, driver: bool, site: &str, more: &str) -> Child {
        let ticket = if driver { &self.tickets.driver } else { &self.tickets.worker };
        self.lives += 1;
        let dir = format!("run/peers/{}", self.lives);
        let command = format!("join {ticket} --site {site} --wan @links --threads 1 --dir {dir} {more}");
        self.spawn(&command, &format!("peer-{}", self.lives), Stdio::null())
    }

    /// Peers, by their places.
    pub fn peers(&self) -> std::ops::Range<usize> {
        0..self.peers.len()
    }

    pub fn is_driver(&self, peer: usize) -> bool {
        self.peers[peer].driver
    }

    /// `kill -9`.
    pub fn kill(&mut self, peer: usize) {
        self.peers[peer].child.kill().unwrap();
        self.peers[peer].child.wait().unwrap();
    }

    /// Another process takes its place.
    pub fn replace(&mut self, peer: usize) {
        let (driver, site) = (self.peers[peer].driver, self.peers[peer].site.clone());
        self.peers[peer].child = self.spawn_peer(driver, &site, "");
        self.peers[peer].life = self.lives;
    }

    /// Sends a signal to a peer.
    pub fn signal(&self, peer: usize, signal: &str) {
        send(&self.peers[peer].child, signal);
    }

    /// Waits until a peer has ended by itself; returns its exit code.
    pub fn ended(&mut self, peer: usize) -> Option<i32> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.peers[peer].child.try_wait().unwrap() {
                Some(status) => return status.code(),
                None if Instant::now() > until => panic!("peer {peer} does not end; {}", self.state()),
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Memory of the coordinator, in MB.
    pub fn coordinator_mb(&self) -> u64 {
        memory_mb(self.coordinator.as_ref().unwrap())
    }

    /// Memory of each peer, in MB.
    pub fn peers_mb(&self) -> Vec<(usize, u64)> {
        self.peers.iter().map(|peer| memory_mb(&peer.child)).enumerate().collect()
    }

    /// What lies between sites from now on.
    pub fn links(&self, text: &str) {
        // Written aside and renamed: nobody reads half of it.
        self.place.write("links.new", text);
        std::fs::rename(self.place.path("links.new"), self.place.path("links")).unwrap();
    }

    /// `kill -9` of the coordinator; another one takes over from its journal, on another port.
    pub fn restart_coordinator(&mut self) {
        let mut child = self.coordinator.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        self.coordinate("run serve run");
    }

    /// Pauses the run, and waits until it rests and is safe.
    pub fn pause(&self) {
        self.place.good("run pause run");
        let until = Instant::now() + PATIENCE;
        loop {
            let (status, _) = self.place.good("status run --json");
            let status: Status = serde_json::from_str(&status).unwrap();
            if status.paused && status.checkpoint == status.step {
                break;
            }
            assert!(Instant::now() < until, "it does not come to rest; {}", self.state());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Pauses the run, ends every process, and begins again with other settings and nobody there.
    pub fn begin_again(&mut self, settings: &str, peers: usize) {
        self.pause();
        self.end_all();
        self.peers.clear();
        self.coordinate(&format!("run new flock.toml --out run --resume {settings} --peers {peers}"));
        self.place.good("run resume run");
    }

    /// Waits until another site has a copy of a checkpoint; then all machines are gone, and with them all but the copy,
    /// at which a new run begins. Returns its step.
    pub fn lose_all_but_a_copy(&mut self, peers: usize) -> u64 {
        let until = Instant::now() + PATIENCE;
        let (copy, step) = loop {
            let folders = (1..=self.lives).map(|life| self.place.path(&format!("run/peers/{life}/copies")));
            let trainings = folders.filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
            let copies = trainings.filter_map(|training| checkpoint::list(&training.path()).ok());
            if let Some((step, path)) = copies.flatten().next() {
                break (path, step);
            }
            assert!(Instant::now() < until, "there is no copy; {}", self.state());
            std::thread::sleep(Duration::from_millis(20));
        };
        self.end_all();
        self.peers.clear();
        let name = copy.file_name().unwrap().to_str().unwrap().to_string();
        std::fs::rename(&copy, self.place.path(&name)).unwrap();
        std::fs::remove_dir_all(self.place.path("run")).unwrap();
        self.coordinate(&format!("run new flock.toml --out run --from {name} --peers {peers}"));
        step
    }

    fn end_all(&mut self) {
        let peers = self.peers.iter_mut().map(|peer| &mut peer.child);
        for child in peers.chain(&mut self.coordinator) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub fn stop_coordinator_for(&self, time: Duration) {
        let child = self.coordinator.as_ref().unwrap();
        send(child, "STOP");
        std::thread::sleep(time);
        send(child, "CONT");
    }

    /// Steps that are closed: what the end of the log says.
    pub fn step(&self) -> u64 {
        let mut end = Vec::new();
        if let Ok(mut file) = File::open(self.place.path("run/events.jsonl")) {
            let length = file.seek(SeekFrom::End(0)).unwrap();
            file.seek(SeekFrom::Start(length.saturating_sub(1 << 14))).unwrap();
            file.read_to_end(&mut end).unwrap();
        }
        let lines = events::parse(&end[..]).unwrap().lines.into_iter();
        let mut steps = lines.filter_map(|line| match line.event {
            Event::Step { step, .. } => Some(step + 1),
            Event::WentBack { to, .. } => Some(to),
            _ => None,
        });
        steps.next_back().unwrap_or(0)
    }

    pub fn events(&self) -> Vec<Event> {
        match events::read(&self.place.path("run/events.jsonl")) {
            Ok(history) => history.lines.into_iter().map(|line| line.event).collect(),
            Err(_) => Vec::new(),
        }
    }

    /// Waits until one of these workers has left two copies of its sums with another from now on, so that the first of them
    /// is there; returns which.
    pub fn wait_for_copies(&self, of: &[usize]) -> usize {
        let log = |peer: usize| self.place.path(&format!("run/peers/{}/events.jsonl", self.peers[peer].life));
        let length = |peer| std::fs::metadata(log(peer)).map_or(0, |about| about.len());
        let from: Vec<(usize, u64)> = of.iter().map(|&peer| (peer, length(peer))).collect();
        let copies = |peer: usize, from: u64| -> std::io::Result<usize> {
            let (mut file, mut text) = (File::open(log(peer))?, Vec::new());
            file.seek(SeekFrom::Start(from))?;
            file.read_to_end(&mut text)?;
            let lines = events::parse(&text[..]).map(|history| history.lines).unwrap_or_default();
            Ok(lines.iter().filter(|line| matches!(line.event, Event::Deposited { .. })).count())
        };
        let until = Instant::now() + PATIENCE;
        loop {
            let found = from.iter().find(|(peer, from)| copies(*peer, *from).is_ok_and(|copies| copies >= 2));
            if let Some((peer, _)) = found {
                return *peer;
            }
            assert!(Instant::now() < until, "nobody leaves copies; {}", self.state());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What all peers' logs say, one after the other.
    pub fn events_of_peers(&self) -> impl Iterator<Item = Event> {
        let logs = (1..=self.lives).map(|life| self.place.path(&format!("run/peers/{life}/events.jsonl")));
        let histories = logs.filter_map(|log| events::read(&log).ok());
        histories.flat_map(|history| history.lines).map(|line| line.event)
    }

    /// Waits until the log of the process that was started last says what is looked for.
    pub fn wait_for<T>(&self, what: &str, find: impl Fn(&[Event]) -> Option<T>) -> T {
        let path = self.place.path(&format!("run/peers/{}/events.jsonl", self.lives));
        let until = Instant::now() + PATIENCE;
        loop {
            let lines = events::read(&path).map(|history| history.lines).unwrap_or_default();
            let events: Vec<Event> = lines.into_iter().map(|line| line.event).collect();
            if let Some(found) = find(&events) {
                return found;
            }
            assert!(Instant::now() < until, "{what}: {events:?}; {}", self.state());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until so many more steps are closed.
    pub fn go_on_for(&mut self, steps: u64) {
        let (from, until) = (self.step(), Instant::now() + PATIENCE);
        while self.step() < from + steps {
            assert!(Instant::now() < until, "stuck at step {}; {}", self.step(), self.state());
            let ended = self.coordinator.as_mut().unwrap().try_wait().unwrap();
            assert!(ended.is_none(), "the coordinator has ended: {}", self.log("coordinator"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What one would look at.
    fn state(&self) -> String {
        let output = self.place.run("status run");
        let (status, error) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let mut text = format!("{status}{error}\ncoordinator: {}", self.log("coordinator"));
        for life in 1..=self.lives {
            text += &format!("\npeer {life}: {}", self.log(&format!("peer-{life}")));
        }
        text
    }

    /// Ends the run in good order: returns the hash of the weights after every step.
    pub fn finish(&mut self) -> BTreeMap<u64, String> {
        self.place.good("run stop run");
        let until = Instant::now() + PATIENCE;
        let status = loop {
            match self.coordinator.as_mut().unwrap().try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > until => panic!("the run does not end; {}", self.state()),
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        assert!(status.success(), "{}", self.log("coordinator"));
        let weights = self.events().into_iter().filter_map(|event| match event {
            Event::Weights { step, weights } => Some((step, weights)),
            _ => None,
        });
        weights.collect()
    }

    /// Ends the run: the weights after every step must be those of one process. Returns how many were compared.
    pub fn finish_as_one_process(&mut self) -> u64 {
        let weights = self.finish();
        let steps = *weights.keys().next_back().expect("at least one step was done") + 1;
        assert_eq!(self.first_difference(&weights), None, "the weights are those of one process");
        self.place.good("checkpoint verify run");
        let (proof, _) = self.place.good("run audit run");
        assert!(proof.contains("every sample was counted once in every stage and step"), "{proof}");
        steps
    }

    /// The first step after which the weights are not those of one process.
    pub fn first_difference(&self, weights: &BTreeMap<u64, String>) -> Option<u64> {
        self.first_difference_from(0, weights)
    }

    /// The same, of the steps from this one on.
    pub fn first_difference_from(&self, first: u64, weights: &BTreeMap<u64, String>) -> Option<u64> {
        let expected = self.train_in_one_process(weights.keys().next_back().map_or(1, |last| last + 1));
        let hashes = self.place.hashes(&expected);
        let step =
            (first..hashes.len() as u64).find(|step| weights.get(step) != hashes.get(*step as usize))?;
        println!("step {step}: {:?}, expected {:?}", weights.get(&step), hashes.get(step as usize));
        Some(step)
    }

    /// Trains the same run in one process; returns its folder.
    pub fn train_in_one_process(&self, steps: u64) -> String {
        let set = format!("{} --set train.steps={steps} --set checkpoint.every=0", self.settings);
        self.place.good(&format!("train flock.toml --out whole {set}"));
        "whole".into()
    }

    /// The losses on held-out text in a folder, by version.
    pub fn held_out(&self, folder: &str) -> BTreeMap<u64, f64> {
        let lines = events::read(&self.place.path(folder).join("events.jsonl")).unwrap().lines;
        let losses = lines.into_iter().filter_map(|line| match line.event {
            Event::Evaluated { step, loss, .. } => Some((step, loss)),
            _ => None,
        });
        losses.collect()
    }
}

/// 0 where the system does not say.
fn memory_mb(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0");
    line.split_whitespace().next().and_then(|kb| kb.parse::<u64>().ok()).unwrap_or(0) / 1024
}

fn send(child: &Child, signal: &str) {
    let status = std::process::Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
    assert!(status.unwrap().success());
}

impl Drop for Flock {
    fn drop(&mut self) {
        self.end_all();
    }
}
