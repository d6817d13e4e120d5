//! One command: its output windows, its input, its end. No system calls but those on its own pipes.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;

use chronus_proto::frame::{self, Kind, MAX_DATA, OUTPUT_WINDOW, STDIN_WINDOW};
use chronus_proto::request::Exit;

use crate::conn::Conn;
use crate::sys::{self, Pid, Poll};

/// Window of each stream while all execs together keep more than `KEPT_HIGH`.
const SMALL_WINDOW: usize = 16 * 1024;
/// Bytes kept by all execs together above which windows shrink.
const KEPT_HIGH: usize = 8 * 1024 * 1024;
/// A buffer that is empty and larger than this is given back.
const SPARE: usize = 8 * 1024;

/// One output stream: bytes that were read and not yet acknowledged.
pub struct Stream {
    /// Read end, until end of file.
    pub fd: Option<OwnedFd>,
    /// It is in the poll set.
    pub watched: bool,
    kept: VecDeque<u8>,
    /// Offset of the first byte kept.
    base: u64,
    /// Offset up to which the owner was sent.
    sent: u64,
    /// Offset that must have been sent before `EXIT`.
    target: u64,
}

/// What a read brought.
#[derive(PartialEq, Eq)]
pub enum Progress {
    /// Bytes; there may be more.
    Some,
    /// Nothing now.
    Empty,
    /// End of file.
    End,
    /// The window is full.
    Full,
}

impl Stream {
    /// A stream that reads from `fd`.
    pub fn new(fd: OwnedFd) -> Stream {
        Stream {
            fd: Some(fd),
            watched: false,
            kept: VecDeque::new(),
            base: 0,
            sent: 0,
            target: 0,
        }
    }

    fn total(&self) -> u64 {
        self.base + self.kept.len() as u64
    }

    /// Bytes that may still be read.
    pub fn room(&self, kept_by_all: usize) -> usize {
        let window = if kept_by_all < KEPT_HIGH {
            OUTPUT_WINDOW
        } else {
            SMALL_WINDOW
        };
        window.saturating_sub(self.kept.len())
    }

    /// Read once; `discard` drops what comes.
    pub fn read(&mut self, poll: &Poll, scratch: &mut [u8], kept_by_all: &mut usize, discard: bool) -> Progress {
        let Some(fd) = &self.fd else {
            return Progress::End;
        };
        let room = self.room(*kept_by_all).min(scratch.len());
        if room == 0 {
            return Progress::Full;
        }
        match sys::read(fd, &mut scratch[..room]) {
            Ok(n) if n > 0 => {
                if discard {
                    self.base += n as u64;
                    self.sent = self.base;
                } else {
                    self.kept.extend(&scratch[..n]);
                    *kept_by_all += n;
                }
                Progress::Some
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                // Whatever was counted at the end of the main process is here, or someone else has read it.
                self.target = self.target.min(self.total());
                Progress::Empty
            }
            _ => {
                self.target = self.target.min(self.total());
                if self.watched {
                    poll.remove(fd);
                }
                self.fd = None;
                self.watched = false;
                Progress::End
            }
        }
    }

    /// Fix the offset that counts as the end of the main process' output.
    pub fn mark_end(&mut self) {
        self.target = self.total() + self.fd.as_ref().map_or(0, sys::bytes_waiting);
    }

    /// Add text of our own.
    pub fn push(&mut self, text: &[u8], kept_by_all: &mut usize) {
        self.kept.extend(text);
        *kept_by_all += text.len();
    }

    fn acknowledge(&mut self, offset: u64, kept_by_all: &mut usize) {
        let offset = offset.clamp(self.base, self.total());
        let n = (offset - self.base) as usize;
        self.kept.drain(..n);
        *kept_by_all -= n;
        self.base = offset;
        self.sent = self.sent.max(offset);
        if self.kept.is_empty() && self.kept.capacity() > SPARE {
            self.kept = VecDeque::new();
        }
    }

    fn pieces(&self, from: u64, len: usize) -> (&[u8], &[u8]) {
        let start = (from - self.base) as usize;
        let (a, b) = self.kept.as_slices();
        if start < a.len() {
            let in_a = len.min(a.len() - start);
            (&a[start..start + in_a], &b[..len - in_a])
        } else {
            (&b[start - a.len()..start - a.len() + len], &[])
        }
    }
}

/// Standard input on its way to the command.
pub struct Stdin {
    /// Write end; `None` once closed or broken.
    pub fd: Option<OwnedFd>,
    /// It is in the poll set.
    pub watched: bool,
    waiting: VecDeque<u8>,
    end: bool,
    window: usize,
}

impl Stdin {
    /// Input that goes to `fd`.
    pub fn new(fd: OwnedFd) -> Stdin {
        Stdin {
            fd: Some(fd),
            watched: false,
            waiting: VecDeque::new(),
            end: false,
            window: STDIN_WINDOW,
        }
    }

    /// Take bytes from the host; `false` if it sent more than it was allowed.
    pub fn push(&mut self, data: &[u8]) -> bool {
        // Twice: a host that starts a known id again does not know what still waits.
        if self.waiting.len() + data.len() > 2 * STDIN_WINDOW {
            return false;
        }
        self.window = self.window.saturating_sub(data.len());
        if self.end {
            return true;
        }
        self.waiting.extend(data);
        true
    }

    /// The host has ended it.
    pub fn finish(&mut self) {
        self.end = true;
    }

    /// Bytes that the host may send now.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Tell whether bytes wait for the command.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Write what the pipe takes and return the credit to grant.
    pub fn flush(&mut self) -> usize {
        while let (Some(fd), false) = (&self.fd, self.waiting.is_empty()) {
            match sys::write(fd, self.waiting.as_slices().0) {
                Ok(n) => {
                    self.waiting.drain(..n);
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => break,
                Err(_) => self.fd = None,
            }
        }
        if self.fd.is_none() {
            self.waiting = VecDeque::new();
            self.watched = false;
        }
        if self.waiting.is_empty() {
            self.waiting.shrink_to(SPARE);
            if self.end {
                self.fd = None;
                self.watched = false;
            }
        }
        let owed = STDIN_WINDOW.saturating_sub(self.waiting.len() + self.window);
        self.window += owed;
        owed
    }
}

/// Where the main process stands.
pub enum State {
    /// Forked; the pipe tells whether exec succeeds.
    Starting(OwnedFd),
    /// The program runs.
    Running,
    /// Reaped.
    Ended,
}

/// How far stopping it has come.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Nobody asked.
    No,
    /// TERM was sent; KILL follows at this time.
    Grace(u64),
    /// Killing goes on until nothing is left: time of the next round, and the pause after it.
    Killing(u64, u64),
}

/// One command.
pub struct Exec {
    /// Chosen by the host.
    pub id: Box<str>,
    /// Main process.
    pub pid: Pid,
    /// Where the main process stands.
    pub state: State,
    /// stdout and stderr.
    pub streams: [Stream; 2],
    /// Input, if asked for.
    pub stdin: Option<Stdin>,
    /// Connection and channel that receive it.
    pub owner: Option<(u32, u32)>,
    /// How it ended.
    pub exit: Option<Exit>,
    /// What the child reported instead of exec.
    pub report: Vec<u8>,
    /// The host has stored the result.
    pub forgotten: bool,
    /// Time of the fork.
    pub forked_at: u64,
    /// When to look whether exec has succeeded; 0 if it is done.
    pub check_at: u64,
    /// When its time is up; 0 if never.
    pub timeout_at: u64,
    /// Time from TERM to KILL.
    pub grace_ns: u64,
    /// Its time was up.
    pub timed_out: bool,
    /// How far stopping it has come.
    pub stop: Stop,
    /// The number of its main process was given to another exec.
    pub pid_reused: bool,
    /// The owner knows that it runs.
    pub started_sent: bool,
    exit_sent: bool,
    closed_sent: bool,
}

impl Exec {
    /// A command that was just forked.
    pub fn new(id: &str, spawned: crate::spawn::Spawned, owner: (u32, u32), now: u64) -> Exec {
        Exec {
            id: id.into(),
            pid: spawned.pid,
            state: State::Starting(spawned.status),
            streams: spawned.output.map(Stream::new),
            stdin: spawned.stdin.map(Stdin::new),
            owner: Some(owner),
            exit: None,
            report: Vec::new(),
            forgotten: false,
            forked_at: now,
            check_at: 0,
            timeout_at: 0,
            grace_ns: 0,
            timed_out: false,
            stop: Stop::No,
            pid_reused: false,
            started_sent: false,
            exit_sent: false,
            closed_sent: false,
        }
    }

    /// Tell whether the program runs or ran.
    pub fn has_started(&self) -> bool {
        match &self.state {
            State::Starting(_) => false,
            State::Running => true,
            State::Ended => self.exit.as_ref().is_some_and(|exit| exit.start_error.is_none()),
        }
    }

    /// Tell whether the main process is reaped.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// Tell whether nothing about it can change or be sent any more.
    pub fn is_over(&self) -> bool {
        let closed = self.streams.iter().all(|stream| stream.fd.is_none());
        self.forgotten
            && self.has_ended()
            && closed
            && self.stop == Stop::No
            && (self.owner.is_none() || self.closed_sent)
    }

    /// Nobody will ever want its output.
    pub fn discards(&self) -> bool {
        self.forgotten && self.owner.is_none()
    }

    /// Begin to send to another owner, from these offsets.
    pub fn attach(&mut self, owner: (u32, u32), offsets: [u64; 2], kept_by_all: &mut usize) {
        self.owner = Some(owner);
        self.exit_sent = false;
        self.closed_sent = false;
        self.started_sent = false;
        for (stream, offset) in self.streams.iter_mut().zip(offsets) {
            stream.sent = stream.base;
            stream.acknowledge(offset, kept_by_all);
        }
    }

    /// The host has stored a stream up to `offset`.
    pub fn acknowledge(&mut self, stream: u8, offset: u64, kept_by_all: &mut usize) {
        if let Some(stream) = self.streams.get_mut(usize::from(stream).wrapping_sub(1)) {
            let sent = stream.sent;
            stream.acknowledge(offset.min(sent), kept_by_all);
        }
    }

    /// Give up all that is kept.
    pub fn drop_kept(&mut self, kept_by_all: &mut usize) {
        for stream in &mut self.streams {
            *kept_by_all -= stream.kept.len();
            stream.base = stream.total();
            stream.sent = stream.base;
            stream.kept = VecDeque::new();
        }
    }

    /// Queue what the owner may get now. Returns `false` if its connection has no room for all of it.
    pub fn pump(&mut self, conn: &mut Conn, channel: u32) -> bool {
        if let State::Starting(_) = self.state {
            return true;
        }
        if !self.started_sent && self.has_started() {
            frame::put(conn.queue(), Kind::Started, channel, &(self.pid as u32).to_le_bytes());
        }
        self.started_sent = true;
        for (index, stream) in self.streams.iter_mut().enumerate() {
            while stream.sent < stream.total() {
                if !conn.has_room() {
                    return false;
                }
                let len = (stream.total() - stream.sent).min(MAX_DATA as u64) as usize;
                let data = stream.pieces(stream.sent, len);
                frame::put_output(conn.queue(), channel, index as u8 + 1, stream.sent, data);
                stream.sent += len as u64;
            }
        }
        if let (Some(exit), false) = (&mut self.exit, self.exit_sent) {
            if self.streams.iter().all(|stream| stream.sent >= stream.target) {
                exit.offsets = (self.streams[0].target, self.streams[1].target);
                let mut payload = Vec::with_capacity(48);
                exit.put(&mut payload);
                frame::put(conn.queue(), Kind::Exit, channel, &payload);
                self.exit_sent = true;
            }
        }
        let ended = self.streams.iter().all(|s| s.fd.is_none() && s.sent == s.total());
        if self.exit_sent && ended && !self.closed_sent {
            frame::put(conn.queue(), Kind::Closed, channel, &[]);
            self.closed_sent = true;
        }
        true
    }
}
