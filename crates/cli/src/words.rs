//! What people read: results on standard output, and numbers in few digits.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};

/// Prints a result. A reader that has seen enough (`| head`) is no error.
pub fn show(text: &str) -> Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot print the result"),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Tells something about the work. Nobody may be listening any more (a closed terminal): the work goes on.
pub fn tell(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Text that a terminal can show: what a model writes may hold control characters, which would act on it.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{FFFD}' } else { c }).collect()
}

/// 1234567 → "1.23 M".
pub fn count(value: f64) -> String {
    let (scaled, unit) = match value {
        v if v >= 1e9 => (v / 1e9, " G"),
        v if v >= 1e6 => (v / 1e6, " M"),
        v if v >= 1e3 => (v / 1e3, " k"),
        v => return format!("{v:.0}"),
    };
    let digits = if scaled >= 100.0 {
        0
    } else if scaled >= 10.0 {
        1
    } else {
        2
    };
    format!("{scaled:.digits$}{unit}")
}

/// 1234567 → "1.23 MB".
pub fn bytes(value: u64) -> String {
    let text = count(value as f64);
    if text.contains(' ') { text + "B" } else { text + " B" }
}

/// 0.0123 → "12.3 ms".
pub fn seconds(value: f64) -> String {
    match value {
        0.0 => "–".to_string(),
        v if v < 1e-3 => format!("{:.1} µs", v * 1e6),
        v if v < 1.0 => format!("{:.1} ms", v * 1e3),
        v => format!("{v:.1} s"),
    }
}

/// 3725 s → "1 h 02 min".
pub fn time(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\nc"), "a\u{FFFD}[2Jb\nc");
    }

    #[test]
    fn numbers_keep_three_digits() {
        assert_eq!(count(999.4), "999");
        assert_eq!(count(1234.0), "1.23 k");
        assert_eq!(count(123_456.0), "123 k");
        assert_eq!(count(12_345_678.0), "12.3 M");
        assert_eq!((bytes(12), bytes(2_500_000)), ("12 B".into(), "2.50 MB".into()));
        assert_eq!(
            (seconds(0.0), seconds(0.0123), seconds(2.0)),
            ("–".into(), "12.3 ms".into(), "2.0 s".into())
        );
        assert_eq!(time(Duration::from_secs(59)), "59 s");
        assert_eq!(time(Duration::from_secs(61)), "1 min 01 s");
        assert_eq!(time(Duration::from_secs(3725)), "1 h 02 min");
    }
}
