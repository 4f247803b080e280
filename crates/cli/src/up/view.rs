//! What a person sees while a run goes on: how it stands, drawn again and again on a terminal, now and then a line
//! elsewhere.

use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use starling_node::status::Status;

use super::peers::Peers;
use crate::words;

/// Between two lines when nobody watches.
const QUIET: Duration = Duration::from_secs(5);
/// News that stay on the screen.
const MOST_NEWS: usize = 4;

pub struct View {
    is_terminal: bool,
    /// Lines that were drawn, to be drawn over.
    drawn: usize,
    last_line: Option<Instant>,
    told: BTreeSet<String>,
}

impl View {
    pub fn new() -> View {
        let is_terminal = std::io::stderr().is_terminal();
        View { is_terminal, drawn: 0, last_line: None, told: BTreeSet::new() }
    }

    pub fn show(&mut self, status: &Status, peers: Option<&Peers>) {
        if self.is_terminal {
            return self.draw(&lines(status, peers));
        }
        for news in &status.news {
            if self.told.insert(news.clone()) {
                words::tell(&words::printable(news));
            }
        }
        if self.last_line.is_none_or(|last| last.elapsed() >= QUIET) {
            self.last_line = Some(Instant::now());
            words::tell(&format!("{}; waits for {}", summary(status), status.waits_for));
        }
    }

    /// Leaves the last picture where it is.
    pub fn finish(&mut self) {
        self.drawn = 0;
    }

    fn draw(&mut self, lines: &[String]) {
        let mut text = String::new();
        if self.drawn > 0 {
            text.push_str(&format!("\x1b[{}A", self.drawn));
        }
        for line in lines {
            text.push_str(&format!("\x1b[2K{line}\n"));
        }
        for _ in lines.len()..self.drawn {
            text.push_str("\x1b[2K\n");
        }
        self.drawn = self.drawn.max(lines.len());
        let _ = write!(std::io::stderr().lock(), "{text}");
    }
}

fn summary(status: &Status) -> String {
    let loss = status.loss.map_or("–".into(), |loss| format!("{loss:.4}"));
    let held_out = status.held_out.map_or(String::new(), |loss| format!("  held-out {loss:.4}"));
    let left = status.steps.saturating_sub(status.step) as f64;
    let eta = match status.steps_per_s > 0.0 {
        true => words::time(Duration::from_secs_f64((left / status.steps_per_s).min(1e9))),
        false => "–".into(),
    };
    format!(
        "{}  step {}/{}  loss {loss}{held_out}  {} tokens/s  ETA {eta}",
        status.name,
        status.step,
        status.steps,
        words::count(status.tokens_per_s),
    )
}

/// How a run stands, and the processes on this machine if they are ours.
pub fn lines(status: &Status, peers: Option<&Peers>) -> Vec<String> {
    let mut lines = vec![summary(status)];
    for (number, stage) in status.stages.iter().enumerate() {
        let mut held: Vec<String> = Vec::new();
        for peer in &stage.peers {
            let mark = match (peer.active, peer.leaving) {
                (_, true) => "↓",
                (true, _) => "●",
                (false, _) => "○",
            };
            held.push(format!("{mark} {} {} q{}", peer.number, peer.site, peer.queued));
        }
        let held = if held.is_empty() { "nobody".into() } else { held.join("   ") };
        lines.push(format!("  stage {number}  {} open lots  {held}", stage.open_lots));
    }
    let ours = peers.map(|peers| format!(", {} processes, {} died so far", peers.alive(), peers.kills()));
    lines.push(format!(
        "  {} drivers{}; last checkpoint at step {}",
        status.drivers,
        ours.unwrap_or_default(),
        status.checkpoint
    ));
    lines.push(format!("  waits for {}", status.waits_for));
    let from = status.news.len().saturating_sub(MOST_NEWS);
    lines.extend(status.news[from..].iter().map(|news| format!("  · {news}")));
    lines.iter().map(|line| words::printable(line).chars().take(150).collect()).collect()
}
