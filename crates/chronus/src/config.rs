//! What is fixed for the life of the process.

use std::os::fd::OwnedFd;

/// Command line and what was found at start.
pub struct Config {
    /// Directory of the platform's own programs.
    pub tools: String,
    /// Accept peers from inside the process namespace (unit tests only).
    pub any_peer: bool,
    /// Capabilities that children may have at most.
    pub child_caps: Option<u64>,
    /// An empty file for standard input.
    pub null: OwnedFd,
    /// `/proc`, held open from before any workload ran.
    pub proc: Option<OwnedFd>,
    /// Children are to be killed before this process when memory runs out (and before the host's own processes). A host
    /// that may not lower scores (no `CAP_SYS_RESOURCE`) can still raise the children's.
    pub spare_from_oom: bool,
    /// Number of supplementary groups of this process.
    pub groups: usize,
    /// Random name of this life of chronus.
    pub boot_id: String,
}

impl Config {
    /// Path of one of the platform's own programs.
    pub fn tool(&self, name: &str) -> Vec<u8> {
        format!("{}/{name}", self.tools).into_bytes()
    }
}
