//! Which processes belong to an exec, and how to signal them.
//!
//! A process belongs to it if it is the main process or a descendant by parent id, if it is in the session that the
//! main process began, or if its environment carries the exec's id. No single sign is enough: a daemon leaves its
//! parent and session, a cleaned environment loses the id.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::config::Config;
use crate::spawn::EXEC_ID;
use crate::sys::{self, Pid};

/// What the processes of an exec are known by.
pub struct Marks<'a> {
    /// The main process, while it is not reaped.
    pub main: Option<Pid>,
    /// The session, while its number cannot have been given to another exec.
    pub session: Option<Pid>,
    /// The exec's id.
    pub id: &'a str,
}

struct Process {
    pid: Pid,
    parent: Pid,
    session: Pid,
    ended: bool,
    stopped: bool,
}

/// Parse `/proc/<pid>/stat`; the command name may hold any byte, also `)`.
fn parse_stat(pid: Pid, text: &[u8]) -> Option<Process> {
    let end = text.iter().rposition(|b| *b == b')')?;
    let rest = std::str::from_utf8(text.get(end + 2..)?).ok()?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let _group = fields.next()?;
    let session = fields.next()?.parse().ok()?;
    Some(Process {
        pid,
        parent,
        session,
        ended: matches!(state, "Z" | "X" | "x"),
        stopped: matches!(state, "T" | "t"),
    })
}

fn read_at(dir: &OwnedFd, name: &std::ffi::CStr, buf: &mut [u8]) -> io::Result<usize> {
    let file = sys::open_at(dir.as_raw_fd(), name, libc::O_RDONLY, 0)?;
    let mut len = 0;
    while len < buf.len() {
        match sys::read(&file, &mut buf[len..])? {
            0 => break,
            n => len += n,
        }
    }
    Ok(len)
}

/// Tell whether the environment of the process in `dir` names the exec.
fn is_marked(dir: &OwnedFd, id: &str, buf: &mut [u8]) -> bool {
    let len = match read_at(dir, c"environ", buf) {
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => match sys::owner(dir) {
            // Looking at another user's process takes that user's ids unless one may trace everything.
            Some((uid, gid)) if uid != 0 => sys::with_fs_ids(uid, gid, || read_at(dir, c"environ", buf)),
            _ => Err(error),
        },
        other => other,
    };
    let Ok(len) = len else {
        return false;
    };
    buf[..len]
        .split(|b| *b == 0)
        .any(|entry| entry.strip_prefix(EXEC_ID).and_then(|rest| rest.strip_prefix(b"=")) == Some(id.as_bytes()))
}

/// Processes, each with whether it is stopped.
type Members = BTreeMap<Pid, bool>;

fn scan(proc: &OwnedFd, marks: &Marks<'_>) -> io::Result<Members> {
    let listing = sys::open_at(proc.as_raw_fd(), c".", libc::O_RDONLY | libc::O_DIRECTORY, 0)?;
    let own = std::process::id() as Pid;
    let mut buf = vec![0; 32 * 1024];
    let mut members = BTreeSet::new();
    let mut others = Vec::new();
    sys::read_dir(&listing, |entry| -> io::Result<()> {
        let Some(pid) = entry.name.to_str().ok().and_then(|name| name.parse::<Pid>().ok()) else {
            return Ok(());
        };
        if pid == own {
            return Ok(());
        }
        let Ok(dir) = sys::open_at(proc.as_raw_fd(), &entry.name, libc::O_PATH | libc::O_DIRECTORY, 0) else {
            return Ok(());
        };
        let process = match read_at(&dir, c"stat", &mut buf) {
            Ok(len) => parse_stat(pid, &buf[..len]),
            Err(_) => None,
        };
        let Some(process) = process else {
            return Ok(());
        };
        let known = marks.main == Some(pid) || marks.session == Some(process.session);
        if known || (!process.ended && is_marked(&dir, marks.id, &mut buf)) {
            members.insert(pid);
        }
        others.push(process);
        Ok(())
    })?;
    // Parents usually come first, so this ends after one or two rounds.
    loop {
        let before = members.len();
        for process in &others {
            if members.contains(&process.parent) {
                members.insert(process.pid);
            }
        }
        if members.len() == before {
            break;
        }
    }
    let live = others.iter().filter(|p| !p.ended && members.contains(&p.pid));
    Ok(live.map(|process| (process.pid, process.stopped)).collect())
}

/// Without `/proc` only the session tells.
fn scan_blind(marks: &Marks<'_>) -> BTreeSet<Pid> {
    let mut members: BTreeSet<Pid> = marks.main.into_iter().collect();
    if let Some(session) = marks.session {
        members.extend((2..=65_536).filter(|pid| sys::session_of(*pid) == Some(session)));
    }
    members.retain(|pid| sys::kill(*pid, 0).is_ok());
    members
}

/// Live processes of an exec, each with whether it is stopped.
fn find(config: &Config, marks: &Marks<'_>) -> Members {
    match config.proc.as_ref().map(|proc| scan(proc, marks)) {
        Some(Ok(members)) => members,
        _ => scan_blind(marks).into_iter().map(|pid| (pid, true)).collect(),
    }
}

/// Return the live processes of an exec.
pub fn members(config: &Config, marks: &Marks<'_>) -> BTreeSet<Pid> {
    find(config, marks).into_keys().collect()
}

/// Send a signal to all processes of an exec and return how many there were.
pub fn signal(config: &Config, marks: &Marks<'_>, signal: i32) -> usize {
    let members = members(config, marks);
    for pid in &members {
        let _ = sys::kill(*pid, signal);
    }
    members.len()
}

/// Ask all processes of an exec to end, also those that are stopped, and return how many there were.
pub fn terminate(config: &Config, marks: &Marks<'_>) -> usize {
    let members = members(config, marks);
    for signal in [libc::SIGTERM, libc::SIGCONT] {
        for pid in &members {
            let _ = sys::kill(*pid, signal);
        }
    }
    members.len()
}

/// One round of killing: stop all until none runs that could fork away, then kill all.
///
/// Stopped processes keep their places under the process limit, so a fork bomb runs dry. `patience` is how many scans
/// may find running ones before killing begins all the same. Returns how many were found; 0 means that all are gone.
pub fn kill_round(config: &Config, marks: &Marks<'_>, patience: u32) -> usize {
    let mut members = find(config, marks);
    for _ in 0..patience {
        let mut running = false;
        for (pid, stopped) in &members {
            if !stopped {
                running = true;
                let _ = sys::kill(*pid, libc::SIGSTOP);
            }
        }
        if !running {
            break;
        }
        members = find(config, marks);
    }
    for pid in members.keys() {
        let _ = sys::kill(*pid, libc::SIGKILL);
    }
    members.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A command name with brackets, spaces and newlines does not shift the fields.
    #[test]
    fn hostile_names() {
        let p = parse_stat(5, b"5 (a) Z 9 9\n) R 3 5 7 0 -1").unwrap();
        assert_eq!((p.parent, p.session, p.ended), (3, 7, false));
        assert!(parse_stat(5, b"5 (x").is_none());
        assert!(parse_stat(5, b"5 (x)").is_none());
    }
}
