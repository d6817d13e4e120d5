//! Start a command: what the parent prepares, and what the child does between fork and exec.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use chronus_proto::request::ExecStart;
use chronus_proto::Code;
use libc::c_char;

use crate::config::Config;
use crate::sys;
use crate::user;

/// Directories searched if the command's environment has no `PATH`.
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Most bytes of a report on the status pipe: written at once, whole or not at all.
pub const MAX_REPORT: usize = 1024;
/// Where the child has its status pipe.
const STATUS: RawFd = 3;
/// Variable that marks all processes of an exec.
pub const EXEC_ID: &[u8] = b"OPENDSEC_EXEC_ID";

/// A typed refusal.
#[derive(Debug)]
pub struct Refusal {
    /// Kind of error.
    pub code: Code,
    /// Sentence for the caller.
    pub message: String,
}

/// Make a refusal.
pub fn refuse(code: Code, message: impl Into<String>) -> Refusal {
    Refusal {
        code,
        message: message.into(),
    }
}

/// Text of an operating system error without its number.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_lowercase(),
        None => text,
    }
}

/// What the child reports before it gives up; nothing is reported once exec has succeeded.
pub enum Report {
    /// The command could not be started: exit code and reason.
    NotStarted(i64, String),
    /// The request itself is wrong.
    Refused(Refusal),
}

impl Report {
    /// Decode what was read from the status pipe.
    pub fn decode(bytes: &[u8]) -> Option<Report> {
        let [kind, code, text @ ..] = bytes else {
            return None;
        };
        let text = String::from_utf8_lossy(text).into_owned();
        Some(match (kind, Code::from_u8(*code)) {
            (2, Some(code)) => Report::Refused(refuse(code, text)),
            _ => Report::NotStarted(i64::from(*code), text),
        })
    }
}

/// A child that is about to run a command.
pub struct Spawned {
    /// Its process id, also the id of its session.
    pub pid: sys::Pid,
    /// Read ends of its output, non-blocking.
    pub output: [OwnedFd; 2],
    /// Write end of its input, non-blocking.
    pub stdin: Option<OwnedFd>,
    /// Ends when exec has succeeded; a report comes before if it has not. Blocks: read only when it has something.
    pub status: OwnedFd,
}

/// Strings with their ends marked, one after the other, to be pointed into.
#[derive(Default)]
struct Strings {
    bytes: Vec<u8>,
    starts: Vec<usize>,
}

impl Strings {
    fn push(&mut self, parts: &[&[u8]]) -> Result<(), Refusal> {
        self.starts.push(self.bytes.len());
        for part in parts {
            if part.contains(&0) {
                return Err(refuse(
                    Code::InvalidArgument,
                    "an argument or variable contains a NUL byte",
                ));
            }
            self.bytes.extend_from_slice(part);
        }
        self.bytes.push(0);
        Ok(())
    }

    /// Null-terminated array of pointers; valid as long as `self` is neither changed nor dropped.
    fn pointers(&self, spare: usize) -> Vec<*const c_char> {
        let mut pointers = Vec::with_capacity(self.starts.len() + spare + 1);
        for start in &self.starts {
            pointers.push(self.bytes[*start..].as_ptr().cast());
        }
        pointers.push(std::ptr::null());
        pointers
    }
}

struct Plan<'a> {
    command: &'a ExecStart<'a>,
    program: Vec<u8>,
    argv: Strings,
    env: Strings,
    path: &'a [u8],
    missing: Vec<&'static [u8]>,
    cwd: CString,
    rlimits: Vec<(u32, u64, u64)>,
}

// The constants are i32 with musl and u32 with glibc.
#[allow(clippy::unnecessary_cast)]
fn resource(name: &str) -> Option<u32> {
    Some(match name {
        "cpu" => libc::RLIMIT_CPU,
        "fsize" => libc::RLIMIT_FSIZE,
        "data" => libc::RLIMIT_DATA,
        "stack" => libc::RLIMIT_STACK,
        "core" => libc::RLIMIT_CORE,
        "rss" => libc::RLIMIT_RSS,
        "nproc" => libc::RLIMIT_NPROC,
        "nofile" => libc::RLIMIT_NOFILE,
        "memlock" => libc::RLIMIT_MEMLOCK,
        "as" => libc::RLIMIT_AS,
        "locks" => libc::RLIMIT_LOCKS,
        "sigpending" => libc::RLIMIT_SIGPENDING,
        "msgqueue" => libc::RLIMIT_MSGQUEUE,
        "nice" => libc::RLIMIT_NICE,
        "rtprio" => libc::RLIMIT_RTPRIO,
        "rttime" => libc::RLIMIT_RTTIME,
        _ => return None,
    } as u32)
}

fn limit(value: i64) -> Option<u64> {
    match value {
        -1 => Some(u64::MAX),
        value => u64::try_from(value).ok(),
    }
}

fn plan<'a>(config: &Config, command: &'a ExecStart<'a>) -> Result<Plan<'a>, Refusal> {
    let invalid = |message: &str| refuse(Code::InvalidArgument, message);
    let Some((first, rest)) = command.argv.split_first() else {
        return Err(invalid("the command has no program"));
    };
    let (program, name) = match *first {
        b"@sh" => (config.tool("sh"), &b"sh"[..]),
        b"@bash" => (config.tool("bash"), &b"bash"[..]),
        other => (other.to_vec(), other),
    };
    let mut argv = Strings::default();
    argv.push(&[name])?;
    for argument in rest {
        argv.push(&[argument])?;
    }
    let mut env = Strings::default();
    env.push(&[EXEC_ID, b"=", command.id.as_bytes()])?;
    let mut path = DEFAULT_PATH;
    let mut missing: Vec<&'static [u8]> = vec![b"HOME", b"USER", b"LOGNAME"];
    for (key, value) in &command.env {
        if key.is_empty() || key.contains(&b'=') {
            return Err(invalid("a variable's name is empty or contains '='"));
        }
        if *key == EXEC_ID {
            continue;
        }
        if *key == b"PATH" {
            path = value;
        }
        missing.retain(|name| name != key);
        env.push(&[key, b"=", value])?;
    }
    let cwd = if command.cwd.is_empty() { b"/" } else { command.cwd };
    let cwd = CString::new(cwd).map_err(|_| invalid("the working directory contains a NUL byte"))?;
    let mut rlimits = Vec::new();
    for (name, soft, hard) in &command.rlimits {
        match (resource(name), limit(*soft), limit(*hard)) {
            (Some(resource), Some(soft), Some(hard)) => rlimits.push((resource, soft, hard)),
            _ => return Err(refuse(Code::InvalidArgument, format!("impossible limit {name:?}"))),
        }
    }
    Ok(Plan {
        command,
        program,
        argv,
        env,
        path,
        missing,
        cwd,
        rlimits,
    })
}

/// Map a failure of fork or pipe.
pub fn lacking(what: &str, error: &io::Error) -> Refusal {
    let code = match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOMEM | libc::EMFILE | libc::ENFILE) => Code::Unavailable,
        _ => Code::Internal,
    };
    refuse(code, format!("cannot {what} in the sandbox: {}", reason(error)))
}

/// Fork a child that runs `command`.
///
/// # Errors
/// The request is malformed, or the sandbox has no process, memory or descriptor left.
pub fn spawn(config: &Config, command: &ExecStart<'_>) -> Result<Spawned, Refusal> {
    let mut plan = plan(config, command)?;
    let pipes = || -> io::Result<_> {
        let out = sys::pipe(0)?;
        let err = sys::pipe(0)?;
        let status = sys::pipe(0)?;
        let stdin = command.stdin.then(|| sys::pipe(0)).transpose()?;
        Ok((out, err, status, stdin))
    };
    let (out, err, status, stdin) = pipes().map_err(|e| lacking("make a pipe", &e))?;
    let pid = sys::fork().map_err(|e| lacking("start a process", &e))?;
    if pid == 0 {
        let input = stdin
            .as_ref()
            .map_or(config.null.as_raw_fd(), |(read, _)| read.as_raw_fd());
        let stdio = [input, out.1.as_raw_fd(), err.1.as_raw_fd(), status.1.as_raw_fd()];
        let report = run(config, &mut plan, stdio);
        let (kind, code, text) = match &report {
            Report::NotStarted(code, text) => (1, *code as u8, text),
            Report::Refused(refusal) => (2, refusal.code as u8, &refusal.message),
        };
        let mut bytes = vec![kind, code];
        bytes.extend_from_slice(text.as_bytes());
        bytes.truncate(MAX_REPORT);
        let _ = sys::write(&STATUS, &bytes);
        sys::exit(127);
    }
    let stdin = stdin.map(|(_, write)| write);
    for fd in [&out.0, &err.0].into_iter().chain(&stdin) {
        let _ = sys::set_nonblocking(fd);
    }
    Ok(Spawned {
        pid,
        output: [out.0, err.0],
        stdin,
        status: status.0,
    })
}

/// In the child: make this process an ordinary one of the sandbox. Also used by helpers.
pub fn leave_privileges(config: &Config) {
    if config.spare_from_oom {
        if let Some(proc) = &config.proc {
            if let Ok(file) = sys::open_at(proc.as_raw_fd(), c"self/oom_score_adj", libc::O_WRONLY, 0) {
                let _ = sys::write(&file, b"500");
            }
        }
    }
    sys::reset_signals();
}

fn run(config: &Config, plan: &mut Plan<'_>, files: [RawFd; 4]) -> Report {
    let not_started = |what: &str, error: &io::Error| Report::NotStarted(126, format!("{what}: {}", reason(error)));
    sys::new_session();
    leave_privileges(config);
    for (target, fd) in files.into_iter().enumerate() {
        if let Err(error) = sys::dup_to(fd, target as RawFd, target as RawFd == STATUS) {
            return not_started("cannot set up standard streams", &error);
        }
    }
    sys::close_from(STATUS as u32 + 1);
    for (resource, soft, hard) in &plan.rlimits {
        if let Err(error) = sys::set_rlimit(*resource, *soft, *hard) {
            let message = format!("cannot set a limit: {}", reason(&error));
            return Report::Refused(refuse(Code::InvalidArgument, message));
        }
    }
    let who = match user::resolve(plan.command.user) {
        Ok(who) => who,
        Err(message) => return Report::Refused(refuse(Code::InvalidArgument, message)),
    };
    for name in std::mem::take(&mut plan.missing) {
        let value = match name {
            b"HOME" => &who.home,
            _ => &who.name,
        };
        if !value.is_empty() {
            let _ = plan.env.push(&[name, b"=", value]);
        }
    }
    if who.uid != 0 || who.gid != 0 || who.groups.len() != config.groups || config.groups != 0 {
        if let Err(error) = sys::become_user(who.uid, who.gid, &who.groups) {
            let message = format!("cannot become the user: {}", reason(&error));
            return Report::Refused(refuse(Code::InvalidArgument, message));
        }
    }
    if plan.cwd.as_bytes() != b"/" {
        if let Err(error) = sys::chdir(&plan.cwd) {
            return not_started(&format!("cannot enter {:?}", plan.cwd), &error);
        }
    }
    let (code, error) = exec_in_path(plan);
    let name = String::from_utf8_lossy(&plan.program).into_owned();
    Report::NotStarted(code, format!("cannot run {name:?}: {}", reason(&error)))
}

/// Try to become the program; returns what to report if that fails.
fn exec_in_path(plan: &Plan<'_>) -> (i64, io::Error) {
    let argv = plan.argv.pointers(0);
    let env = plan.env.pointers(0);
    let try_one = |path: &CStr| sys::exec(path, &argv, &env);
    let not_found = || io::Error::from_raw_os_error(libc::ENOENT);
    if plan.program.is_empty() {
        return (127, not_found());
    }
    if plan.program.contains(&b'/') {
        let error = match CString::new(plan.program.clone()) {
            Ok(path) => try_one(&path),
            Err(_) => not_found(),
        };
        return (exit_code(&error), error);
    }
    let mut result = not_found();
    for dir in plan.path.split(|b| *b == b':') {
        let mut path = Vec::with_capacity(dir.len() + plan.program.len() + 2);
        path.extend_from_slice(if dir.is_empty() { b"." } else { dir });
        path.push(b'/');
        path.extend_from_slice(&plan.program);
        let Ok(path) = CString::new(path) else {
            continue;
        };
        let error = try_one(&path);
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG | libc::ELOOP) => {}
            Some(libc::EACCES) => result = error,
            _ => return (exit_code(&error), error),
        }
    }
    (exit_code(&result), result)
}

fn exit_code(error: &io::Error) -> i64 {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG | libc::ELOOP) => 127,
        _ => 126,
    }
}
