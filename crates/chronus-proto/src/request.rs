//! Requests of the host, and the fixed replies of chronus.
//!
//! A request is an array whose first element is its number. Elements after those known are ignored, so that fields
//! can be added at the end.

use crate::msgpack::{self, Malformed, Read, Reader};
use crate::{Code, PROTOCOL};

/// Most elements of `argv` and of `env`.
pub const MAX_STRINGS: usize = 65_536;
/// Most limits in one exec.
pub const MAX_RLIMITS: usize = 32;
/// Longest exec id.
pub const MAX_ID: usize = 100;
/// Longest path.
pub const MAX_PATH: usize = 16 * 1024;

/// A command to start.
#[derive(Debug, PartialEq, Eq)]
pub struct ExecStart<'a> {
    /// Chosen by the host; starting a known id attaches to it.
    pub id: &'a str,
    /// Program and arguments.
    pub argv: Vec<&'a [u8]>,
    /// Whole environment.
    pub env: Vec<(&'a [u8], &'a [u8])>,
    /// Working directory.
    pub cwd: &'a [u8],
    /// `name`, `uid`, `name:group`, `uid:gid`.
    pub user: &'a [u8],
    /// The host will send standard input.
    pub stdin: bool,
    /// Time after which the tree gets TERM.
    pub timeout_ms: Option<u64>,
    /// Time from TERM to KILL.
    pub grace_ms: u64,
    /// Name, soft and hard limit; -1 is infinite.
    pub rlimits: Vec<(&'a str, i64, i64)>,
}

/// A path and the user that acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// Path in the sandbox.
    pub path: &'a [u8],
    /// User, as in an exec.
    pub user: &'a [u8],
}

/// What a host may ask of the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileRequest<'a> {
    /// Describe one path.
    Stat(Place<'a>),
    /// List a directory, or a whole tree.
    List(Place<'a>, bool),
    /// Stream a range of a file.
    Read(Place<'a>, u64, Option<u64>),
    /// Receive a file.
    Write(Place<'a>, Write),
    /// Make a directory: mode, parents.
    Mkdir(Place<'a>, u32, bool),
    /// Remove: recursive.
    Remove(Place<'a>, bool),
    /// Rename to the second path.
    Move(Place<'a>, &'a [u8]),
    /// Stream a tree as tar.
    TarOut(Place<'a>),
    /// Receive a tree as tar.
    TarIn(Place<'a>),
}

/// How to write a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// Permission bits of the result.
    pub mode: Option<u32>,
    /// Write into the file from here, without replacing it.
    pub offset: Option<u64>,
    /// Write at its end.
    pub append: bool,
    /// Make missing directories.
    pub parents: bool,
}

/// A decoded request.
#[derive(Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Start a command.
    ExecStart(ExecStart<'a>),
    /// Receive a known command from these offsets.
    ExecAttach(&'a str, u64, u64),
    /// Send a signal: number, whole tree.
    ExecSignal(&'a str, u64, bool),
    /// TERM, then KILL after the milliseconds.
    ExecStop(&'a str, u64),
    /// The host has stored the result; not answered.
    ExecForget(&'a str),
    /// Ids of all execs.
    ExecList,
    /// Answer.
    Ping,
    /// End all processes and exit.
    Shutdown,
    /// Work on files.
    File(FileRequest<'a>),
}

impl FileRequest<'_> {
    /// Tell whether the host sends a stream.
    pub fn takes_input(&self) -> bool {
        matches!(self, FileRequest::Write(..) | FileRequest::TarIn(_))
    }
}

fn place<'a>(r: &mut Reader<'a>) -> Read<Place<'a>> {
    let path = r.bytes()?;
    let user = r.bytes()?;
    if path.len() > MAX_PATH || user.len() > 256 {
        return Err(Malformed);
    }
    Ok(Place { path, user })
}

fn id<'a>(r: &mut Reader<'a>) -> Read<&'a str> {
    let id = r.str()?;
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if id.is_empty() || id.len() > MAX_ID || !id.bytes().all(fine) {
        return Err(Malformed);
    }
    Ok(id)
}

fn mode(r: &mut Reader<'_>) -> Read<u32> {
    Ok(r.uint()? as u32 & 0o7777)
}

fn exec_start<'a>(r: &mut Reader<'a>) -> Read<ExecStart<'a>> {
    let id = id(r)?;
    let count = r.array()?;
    if count > MAX_STRINGS {
        return Err(Malformed);
    }
    let mut argv = Vec::new();
    for _ in 0..count {
        argv.push(r.bytes()?);
    }
    let count = r.map()?;
    if count > MAX_STRINGS {
        return Err(Malformed);
    }
    let mut env = Vec::new();
    for _ in 0..count {
        env.push((r.bytes()?, r.bytes()?));
    }
    let cwd = r.bytes()?;
    let user = r.bytes()?;
    if cwd.len() > MAX_PATH || user.len() > 256 {
        return Err(Malformed);
    }
    let stdin = r.bool()?;
    let timeout_ms = r.opt_uint()?;
    let grace_ms = r.uint()?;
    let count = r.map()?;
    if count > MAX_RLIMITS {
        return Err(Malformed);
    }
    let mut rlimits = Vec::new();
    for _ in 0..count {
        let name = r.str()?;
        if r.array()? != 2 {
            return Err(Malformed);
        }
        rlimits.push((name, r.int()?, r.int()?));
    }
    Ok(ExecStart {
        id,
        argv,
        env,
        cwd,
        user,
        stdin,
        timeout_ms,
        grace_ms,
        rlimits,
    })
}

/// Decode a request.
///
/// # Errors
/// It is malformed or over a limit.
pub fn decode(payload: &[u8]) -> Read<Request<'_>> {
    let r = &mut Reader::new(payload);
    r.array()?;
    Ok(match r.uint()? {
        1 => Request::ExecStart(exec_start(r)?),
        2 => Request::ExecAttach(id(r)?, r.uint()?, r.uint()?),
        3 => Request::ExecSignal(id(r)?, r.uint()?, r.bool()?),
        4 => Request::ExecStop(id(r)?, r.uint()?),
        5 => Request::ExecForget(id(r)?),
        6 => Request::ExecList,
        7 => Request::Ping,
        8 => Request::Shutdown,
        20 => Request::File(FileRequest::Stat(place(r)?)),
        21 => Request::File(FileRequest::List(place(r)?, r.bool()?)),
        22 => Request::File(FileRequest::Read(place(r)?, r.uint()?, r.opt_uint()?)),
        23 => Request::File(FileRequest::Write(
            place(r)?,
            Write {
                mode: r.opt_uint()?.map(|mode| mode as u32 & 0o7777),
                offset: r.opt_uint()?,
                append: r.bool()?,
                parents: r.bool()?,
            },
        )),
        24 => Request::File(FileRequest::Mkdir(place(r)?, mode(r)?, r.bool()?)),
        25 => Request::File(FileRequest::Remove(place(r)?, r.bool()?)),
        26 => {
            let from = place(r)?;
            let to = r.bytes()?;
            if to.len() > MAX_PATH {
                return Err(Malformed);
            }
            Request::File(FileRequest::Move(from, to))
        }
        27 => Request::File(FileRequest::TarOut(place(r)?)),
        28 => Request::File(FileRequest::TarIn(place(r)?)),
        _ => return Err(Malformed),
    })
}

/// Append the payload of chronus' `HELLO`.
pub fn put_hello(out: &mut Vec<u8>, version: &str, boot_id: &str) {
    msgpack::put_array(out, 4);
    msgpack::put_str(out, "chronus");
    msgpack::put_uint(out, PROTOCOL);
    msgpack::put_str(out, version);
    msgpack::put_str(out, boot_id);
}

/// Decode the protocol version of the host's `HELLO`.
///
/// # Errors
/// It is malformed.
pub fn decode_hello(payload: &[u8]) -> Read<u64> {
    let r = &mut Reader::new(payload);
    if r.array()? < 2 || r.str()? != "opendsec" {
        return Err(Malformed);
    }
    r.uint()
}

/// Append the payload of an error `RESPONSE`.
pub fn put_error(out: &mut Vec<u8>, code: Code, message: &str) {
    msgpack::put_array(out, 2);
    msgpack::put_uint(out, code as u64);
    msgpack::put_str(out, message);
}

/// How a command ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exit {
    /// Code, or 128 + signal.
    pub code: i64,
    /// Number of the signal, or 0.
    pub signal: u64,
    /// The timeout had passed.
    pub timed_out: bool,
    /// Why it could not be started.
    pub start_error: Option<String>,
    /// Time from fork to end, in microseconds.
    pub duration_us: u64,
    /// User and system time, in microseconds.
    pub cpu_us: u64,
    /// Largest resident set, in bytes.
    pub peak_bytes: u64,
    /// Bytes of stdout and stderr that were written before the end.
    pub offsets: (u64, u64),
}

impl Exit {
    /// Append it as the payload of an `EXIT`.
    pub fn put(&self, out: &mut Vec<u8>) {
        msgpack::put_array(out, 9);
        msgpack::put_int(out, self.code);
        msgpack::put_uint(out, self.signal);
        msgpack::put_bool(out, self.timed_out);
        match &self.start_error {
            Some(text) => msgpack::put_str(out, text),
            None => msgpack::put_nil(out),
        }
        msgpack::put_uint(out, self.duration_us);
        msgpack::put_uint(out, self.cpu_us);
        msgpack::put_uint(out, self.peak_bytes);
        msgpack::put_uint(out, self.offsets.0);
        msgpack::put_uint(out, self.offsets.1);
    }
}
