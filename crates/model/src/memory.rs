//! How much memory this machine can still give, and that it gets back what is not needed.

/// Bytes that can be had without swapping, where the system says so.
pub fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    parse(&text)
}

/// From now on what is freed goes back to the system, if it is large. Where nobody tells it, glibc's allocator learns
/// from the first large pieces that are freed to keep such ones: for every thread up to 64 MiB, which no plan can count. To
/// be called before there are other threads.
pub fn give_back_what_is_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const LARGE: libc::c_int = 1 << 20;
        #[allow(unsafe_code, reason = "a call of the C library")]
        // SAFETY: no other thread is told to be there; a value that it does not take changes nothing.
        let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) };
    }
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
