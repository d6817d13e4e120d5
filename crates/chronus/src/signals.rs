//! What this process inherited of signals.

/// Give all signals that whoever started this process ignored their default again, `SIGPIPE` aside, which Rust ignores.
///
/// By the system call: C libraries keep 32 to 34 to themselves and refuse to touch them.
pub fn default_signals() {
    // The kernel's `struct sigaction` with `SIG_DFL`, no flags and an empty mask; its set of signals has 8 bytes.
    let default = [0u64; 4];
    for signal in (1..=64).filter(|&signal| signal != libc::SIGPIPE) {
        // SAFETY: `default` is a valid action that outlives the call; failing for SIGKILL and SIGSTOP is fine.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                std::ptr::null::<u64>(),
                8,
            )
        };
    }
}
