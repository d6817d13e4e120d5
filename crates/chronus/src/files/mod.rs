//! The work of a helper: files of the sandbox, as the user that asks.
//!
//! Runs in a child with its answer on descriptor 1 and, for what takes a stream, its input on descriptor 0; it may
//! block. Everything found on disk may be the work of an adversary.

mod content;
mod dir;
mod tar_format;
mod tar_in;
mod tar_out;
mod trees;

use std::io;
use std::os::fd::RawFd;

use chronus_proto::frame::{self, Kind, MAX_DATA};
use chronus_proto::msgpack;
use chronus_proto::request::{self, FileRequest, Place};
use chronus_proto::Code;

use crate::spawn::reason;
use crate::sys;

/// Why an operation failed.
#[derive(Debug)]
pub struct Error {
    /// Kind for the host.
    pub code: Code,
    /// Sentence for the caller.
    pub message: String,
}

/// Result of an operation or a part of it.
pub type Result<T> = std::result::Result<T, Error>;

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        let errno = error.raw_os_error().unwrap_or(0);
        let code = match errno {
            libc::ENOENT => Code::NotFound,
            libc::EACCES | libc::EPERM | libc::EROFS => Code::PermissionDenied,
            libc::ENOSPC | libc::EDQUOT => Code::DiskFull,
            libc::EEXIST | libc::ENOTEMPTY | libc::ENOTDIR | libc::EISDIR | libc::EBUSY | libc::ETXTBSY => {
                Code::Conflict
            }
            libc::EINVAL | libc::ENAMETOOLONG | libc::ELOOP | libc::EFBIG | libc::ENXIO => Code::InvalidArgument,
            libc::EAGAIN | libc::ENOMEM | libc::EMFILE | libc::ENFILE => Code::Unavailable,
            _ => Code::Internal,
        };
        Error {
            code,
            message: reason(&error),
        }
    }
}

impl Error {
    /// The request cannot be granted as it is.
    pub fn invalid(message: impl Into<String>) -> Error {
        Error {
            code: Code::InvalidArgument,
            message: message.into(),
        }
    }

    /// Name what it is about.
    #[must_use]
    pub fn at(mut self, path: &[u8]) -> Error {
        let shown = &path[..path.len().min(1024)];
        self.message = format!("{:?}: {}", String::from_utf8_lossy(shown), self.message);
        self
    }
}

/// Adds the path to an error.
pub trait At<T> {
    /// Name what an error is about.
    fn at(self, path: &[u8]) -> Result<T>;
}

impl<T, E: Into<Error>> At<T> for std::result::Result<T, E> {
    fn at(self, path: &[u8]) -> Result<T> {
        self.map_err(|error| error.into().at(path))
    }
}

/// The result that is sent when all went well.
pub enum Answer {
    /// Nothing to tell.
    Done,
    /// A number.
    Count(u64),
    /// Encoded bytes.
    Bytes(Vec<u8>),
}

fn write_all(mut bytes: &[u8]) {
    const OUT: RawFd = 1;
    while !bytes.is_empty() {
        match sys::write(&OUT, bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // Nobody listens any more.
            Err(_) => sys::exit(1),
        }
    }
}

/// Collects output into frames.
#[derive(Default)]
pub struct Out {
    pending: Vec<u8>,
}

impl Out {
    /// Send bytes of a stream.
    pub fn data(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = MAX_DATA - self.pending.len();
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.pending.extend_from_slice(now);
            bytes = later;
            if self.pending.len() == MAX_DATA {
                self.flush();
            }
        }
    }

    /// Send what is collected as one frame.
    pub fn flush(&mut self) {
        if !self.pending.is_empty() {
            let pending = std::mem::take(&mut self.pending);
            self.frame(&pending);
        }
    }

    /// Send exactly these bytes as one frame.
    pub fn frame(&mut self, bytes: &[u8]) {
        let mut framed = Vec::with_capacity(frame::HEADER + bytes.len());
        frame::put(&mut framed, Kind::Data, 0, bytes);
        write_all(&framed);
    }
}

/// The host's stream.
#[derive(Default)]
pub struct Input {
    left: usize,
    ended: bool,
}

impl Input {
    fn read(buf: &mut [u8]) -> usize {
        const IN: RawFd = 0;
        loop {
            match sys::read(&IN, buf) {
                Ok(n) => return n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return 0,
            }
        }
    }

    /// Read some bytes; 0 at the end.
    ///
    /// # Errors
    /// The stream broke off.
    pub fn some(&mut self, buf: &mut [u8]) -> Result<usize> {
        let broken = || Error {
            code: Code::Unavailable,
            message: "the upload broke off".into(),
        };
        if self.ended || buf.is_empty() {
            return Ok(0);
        }
        if self.left == 0 {
            let mut head = [0; 4];
            let mut have = 0;
            while have < 4 {
                match Self::read(&mut head[have..]) {
                    0 => return Err(broken()),
                    n => have += n,
                }
            }
            self.left = u32::from_le_bytes(head) as usize;
            if self.left == 0 {
                self.ended = true;
                return Ok(0);
            }
        }
        let wanted = buf.len().min(self.left);
        match Self::read(&mut buf[..wanted]) {
            0 => Err(broken()),
            n => {
                self.left -= n;
                Ok(n)
            }
        }
    }
}

/// Path and user of a request.
pub fn place<'a>(request: &FileRequest<'a>) -> Place<'a> {
    match *request {
        FileRequest::Stat(place)
        | FileRequest::List(place, _)
        | FileRequest::Read(place, ..)
        | FileRequest::Write(place, _)
        | FileRequest::Mkdir(place, ..)
        | FileRequest::Remove(place, _)
        | FileRequest::Move(place, _)
        | FileRequest::TarOut(place)
        | FileRequest::TarIn(place) => place,
    }
}

/// Do the work.
///
/// # Errors
/// As the kernel has it.
pub fn run(request: &FileRequest<'_>) -> Result<Answer> {
    let path = place(request).path;
    if path.is_empty() || path.contains(&0) {
        return Err(Error::invalid("a path is empty or contains a NUL byte"));
    }
    match *request {
        FileRequest::Stat(_) => trees::stat(path),
        FileRequest::List(_, recursive) => trees::list(path, recursive),
        FileRequest::Read(_, offset, length) => content::read(path, offset, length),
        FileRequest::Write(_, how) => content::write(path, how),
        FileRequest::Mkdir(_, mode, parents) => trees::mkdir(path, mode, parents),
        FileRequest::Remove(_, recursive) => trees::remove(path, recursive),
        FileRequest::Move(_, target) => trees::rename(path, target),
        FileRequest::TarOut(_) => tar_out::pack(path),
        FileRequest::TarIn(_) => tar_in::unpack(path),
    }
}

fn put_answer(out: &mut Vec<u8>, result: Result<Answer>) {
    match result {
        Ok(answer) => {
            msgpack::put_array(out, 2);
            msgpack::put_uint(out, 0);
            match answer {
                Answer::Done => msgpack::put_nil(out),
                Answer::Count(count) => msgpack::put_uint(out, count),
                Answer::Bytes(bytes) => msgpack::put_bin(out, &bytes),
            }
        }
        Err(error) => request::put_error(out, error.code, &error.message),
    }
}

/// Send the end.
pub fn answer(result: Result<Answer>) {
    let mut payload = Vec::new();
    put_answer(&mut payload, result);
    let mut framed = Vec::new();
    frame::put(&mut framed, Kind::Response, 0, &payload);
    write_all(&framed);
}

/// What `quick` found: bytes to send before the answer, and the answer.
pub type Quick = (Vec<u8>, Vec<u8>);

/// Do at once, in process 1, what a few system calls do; `None` if it needs a helper.
pub fn quick(request: &FileRequest<'_>) -> Option<Quick> {
    let place = place(request);
    if !matches!(place.user, b"0" | b"root" | b"") || place.path.is_empty() || place.path.contains(&0) {
        return None;
    }
    let mut data = Vec::new();
    let result = match *request {
        FileRequest::Stat(_) => trees::stat(place.path),
        FileRequest::Mkdir(_, mode, false) => trees::mkdir(place.path, mode, false),
        FileRequest::Read(_, offset, length) => content::read_small(place.path, offset, length)?.map(|bytes| {
            data = bytes;
            Answer::Done
        }),
        _ => return None,
    };
    let mut payload = Vec::new();
    put_answer(&mut payload, result);
    Some((data, payload))
}
