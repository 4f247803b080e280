//! How much memory this machine can still give.

/// Bytes that can be had without swapping, where the system says so.
pub fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    parse(&text)
}

fn parse(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_linux_says_is_understood() {
        assert_eq!(parse("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2_097_152));
        assert_eq!(parse("MemTotal: 9 kB\n"), None);
        assert_eq!(parse("MemAvailable: lots\n"), None);
    }
}
