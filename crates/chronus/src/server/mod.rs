//! The poll loop: who gets which event, and when each timer runs.

mod execs;
mod files;
mod timers;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use chronus_proto::frame::{self, Header, Kind};
use chronus_proto::request::{self, Request};
use chronus_proto::{msgpack, Code, PROTOCOL};

use self::execs::unknown_exec;
use crate::config::Config;
use crate::conn::{Conn, Target};
use crate::exec::Exec;
use crate::ops::Op;
use crate::spawn::{refuse, Refusal};
use crate::sys::{self, Pid, Poll};

/// Most connections at a time; the oldest goes first.
const MAX_CONNS: usize = 8;
const MS: u64 = 1_000_000;

/// Meaning of the upper half of a poll token; the lower half is a key.
pub mod token {
    pub const LISTENER: u64 = 0;
    pub const SIGNAL: u64 = 1;
    pub const CONN: u64 = 2;
    pub const STDOUT: u64 = 3;
    pub const STDERR: u64 = 4;
    pub const STDIN: u64 = 5;
    pub const STATUS: u64 = 6;
    pub const OP_OUT: u64 = 7;
    pub const OP_IN: u64 = 8;

    pub fn of(kind: u64, key: u32) -> u64 {
        kind << 32 | u64::from(key)
    }
}

/// The frame breaks the protocol: its connection is closed.
struct Violation;

/// All state of chronus.
pub struct Server {
    config: Config,
    poll: Poll,
    listener: OwnedFd,
    signals: OwnedFd,
    /// Given up to accept a connection when no other descriptor is left.
    spare: Option<OwnedFd>,
    conns: BTreeMap<u32, Conn>,
    execs: BTreeMap<u32, Exec>,
    ops: BTreeMap<u32, Op>,
    ids: BTreeMap<Box<str>, u32>,
    pids: BTreeMap<Pid, Target>,
    next_key: u32,
    /// Bytes kept by all output streams.
    kept: usize,
    /// No timer runs out before; may be too early, never too late.
    next_timer: u64,
    shutting_down: bool,
    scratch: Vec<u8>,
}

impl Server {
    /// Set up the loop.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub fn new(config: Config, listener: OwnedFd) -> io::Result<Server> {
        let poll = Poll::new()?;
        let signals = sys::child_signals()?;
        poll.add(&listener, libc::EPOLLIN, token::of(token::LISTENER, 0))?;
        poll.add(&signals, libc::EPOLLIN, token::of(token::SIGNAL, 0))?;
        Ok(Server {
            spare: config.null.try_clone().ok(),
            config,
            poll,
            listener,
            signals,
            conns: BTreeMap::new(),
            execs: BTreeMap::new(),
            ops: BTreeMap::new(),
            ids: BTreeMap::new(),
            pids: BTreeMap::new(),
            next_key: 0,
            kept: 0,
            next_timer: u64::MAX,
            shutting_down: false,
            scratch: vec![0; frame::MAX_DATA],
        })
    }

    /// Serve until a host asks to shut down.
    pub fn run(&mut self) -> ExitCode {
        let mut events = [sys::Event { events: 0, u64: 0 }; 32];
        loop {
            let timeout = match self.next_timer {
                u64::MAX => -1,
                at => at.saturating_sub(sys::now_ns()).div_ceil(MS).min(60_000) as i32,
            };
            let ready = self.poll.wait(&mut events, timeout).to_vec();
            for event in ready {
                let key = event.u64 as u32;
                match event.u64 >> 32 {
                    token::LISTENER => self.accept(),
                    token::SIGNAL => self.reap(),
                    token::CONN => self.on_conn(key),
                    token::STDOUT => self.on_output(key, 0),
                    token::STDERR => self.on_output(key, 1),
                    token::STDIN => self.on_stdin(key),
                    token::STATUS => self.on_status(key),
                    token::OP_OUT => self.on_op_output(key),
                    token::OP_IN => self.settle_op(key),
                    _ => {}
                }
            }
            if self.next_timer != u64::MAX {
                self.run_timers();
            }
            self.flush();
            if self.shutting_down {
                return ExitCode::SUCCESS;
            }
        }
    }

    fn key(&mut self) -> u32 {
        self.next_key = self.next_key.wrapping_add(1);
        self.next_key
    }

    fn timer(&mut self, at: u64) {
        self.next_timer = self.next_timer.min(at);
    }

    // Connections

    fn accept(&mut self) {
        let fd = match sys::accept(&self.listener) {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                // Commands hold all descriptors: a new host is worth the spare one, or the oldest host's.
                if self.spare.take().is_none() {
                    if let Some(oldest) = self.conns.keys().next().copied() {
                        self.disconnect(oldest);
                        self.spare = None;
                    }
                }
                sys::accept(&self.listener)
            }
            other => other,
        };
        let Ok(fd) = fd else {
            return;
        };
        let outside = matches!(sys::peer(&fd), Ok((0, 0)));
        if !outside && !self.config.any_peer {
            return;
        }
        if self.conns.len() >= MAX_CONNS {
            if let Some(oldest) = self.conns.keys().next().copied() {
                self.disconnect(oldest);
            }
        }
        let key = self.key();
        if self.poll.add(&fd, libc::EPOLLIN, token::of(token::CONN, key)).is_err() {
            return;
        }
        let mut conn = Conn::new(fd);
        let mut hello = Vec::new();
        request::put_hello(&mut hello, env!("CARGO_PKG_VERSION"), &self.config.boot_id);
        frame::put(conn.queue(), Kind::Hello, 0, &hello);
        self.conns.insert(key, conn);
    }

    fn disconnect(&mut self, key: u32) {
        let Some(conn) = self.conns.remove(&key) else {
            return;
        };
        self.poll.remove(&conn.fd);
        drop(conn.fd);
        if self.spare.is_none() {
            self.spare = self.config.null.try_clone().ok();
        }
        for target in conn.channels.into_values() {
            match target {
                Target::Exec(exec_key) => {
                    if let Some(exec) = self.execs.get_mut(&exec_key) {
                        if exec.owner.is_some_and(|(owner, _)| owner == key) {
                            exec.owner = None;
                        }
                    }
                    self.settle(exec_key);
                }
                Target::Op(op) => self.cancel(op),
            }
        }
    }

    /// Read once from a connection and handle all whole frames.
    fn on_conn(&mut self, key: u32) {
        let Some(conn) = self.conns.get_mut(&key) else {
            return;
        };
        let mut scratch = std::mem::take(&mut self.scratch);
        let read = sys::read(&conn.fd, &mut scratch);
        let mut input = std::mem::take(&mut conn.input);
        let result = match read {
            Ok(0) => Err(Violation),
            Ok(n) if input.is_empty() => self.on_bytes(key, &scratch[..n]).map(|used| {
                input.extend_from_slice(&scratch[used..n]);
            }),
            Ok(n) => {
                input.extend_from_slice(&scratch[..n]);
                self.on_bytes(key, &input).map(|used| {
                    input.drain(..used);
                })
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(()),
            Err(_) => Err(Violation),
        };
        self.scratch = scratch;
        match result {
            Ok(()) => {
                if let Some(conn) = self.conns.get_mut(&key) {
                    if input.is_empty() {
                        input.shrink_to(0);
                    }
                    conn.input = input;
                }
            }
            Err(Violation) => self.disconnect(key),
        }
    }

    /// Handle whole frames and return how many bytes they had.
    fn on_bytes(&mut self, key: u32, bytes: &[u8]) -> Result<usize, Violation> {
        let mut used = 0;
        while let Some(header) = frame::parse(&bytes[used..]).map_err(|_| Violation)? {
            let begin = used + frame::HEADER;
            let Some(payload) = bytes.get(begin..begin + header.len) else {
                break;
            };
            used = begin + header.len;
            self.on_frame(key, header, payload)?;
        }
        Ok(used)
    }

    fn on_frame(&mut self, key: u32, header: Header, payload: &[u8]) -> Result<(), Violation> {
        let conn = self.conns.get_mut(&key).ok_or(Violation)?;
        let channel = header.channel;
        if !conn.greeted {
            let version = match header.kind {
                Kind::Hello => request::decode_hello(payload).map_err(|_| Violation)?,
                _ => return Err(Violation),
            };
            if version != PROTOCOL {
                return Err(Violation);
            }
            conn.greeted = true;
            return Ok(());
        }
        let target = conn.channels.get(&channel).copied();
        match header.kind {
            Kind::Request => self.on_request(key, channel, payload),
            // What is under way when a channel ends is harmless.
            Kind::Data | Kind::End | Kind::Credit | Kind::Cancel | Kind::Ack => match target {
                Some(Target::Exec(exec)) => self.on_exec_frame((key, channel), exec, header.kind, payload),
                Some(Target::Op(op)) => self.on_op_frame(op, header.kind, payload),
                None => Ok(()),
            },
            _ => Err(Violation),
        }
    }

    fn respond(&mut self, to: (u32, u32), payload: &[u8]) {
        if let Some(conn) = self.conns.get_mut(&to.0) {
            frame::put(conn.queue(), Kind::Response, to.1, payload);
        }
    }

    fn respond_error(&mut self, to: (u32, u32), refusal: &Refusal) {
        let mut payload = Vec::new();
        request::put_error(&mut payload, refusal.code, &refusal.message);
        self.respond(to, &payload);
    }

    fn respond_ok(&mut self, to: (u32, u32)) {
        self.respond(to, &[0x92, 0, 0xc0]);
    }

    fn on_request(&mut self, key: u32, channel: u32, payload: &[u8]) -> Result<(), Violation> {
        let to = (key, channel);
        let Ok(request) = request::decode(payload) else {
            self.respond_error(to, &refuse(Code::InvalidArgument, "malformed request"));
            return Ok(());
        };
        if self
            .conns
            .get(&key)
            .is_some_and(|conn| conn.channels.contains_key(&channel))
        {
            return Err(Violation);
        }
        match request {
            Request::ExecStart(command) => self.exec_start(to, &command),
            Request::ExecAttach(id, out, err) => self.exec_attach(to, id, [out, err]),
            Request::ExecSignal(id, signal, whole) => match self.exec_signal(id, signal, whole) {
                Ok(()) => self.respond_ok(to),
                Err(refusal) => self.respond_error(to, &refusal),
            },
            Request::ExecStop(id, grace) => match self.ids.get(id).copied() {
                Some(exec) => {
                    self.stop(exec, grace.saturating_mul(MS));
                    self.respond_ok(to);
                }
                None => self.respond_error(to, &unknown_exec()),
            },
            Request::ExecForget(id) => {
                if let Some(exec) = self.ids.get(id).copied() {
                    if let Some(exec) = self.execs.get_mut(&exec) {
                        exec.forgotten = true;
                    }
                    self.settle(exec);
                }
            }
            Request::ExecList => {
                let mut payload = vec![0x92, 0];
                msgpack::put_array(&mut payload, self.ids.len());
                for id in self.ids.keys() {
                    msgpack::put_str(&mut payload, id);
                }
                self.respond(to, &payload);
            }
            Request::Ping => self.respond_ok(to),
            Request::Shutdown => {
                self.respond_ok(to);
                self.shutting_down = true;
            }
            Request::File(request) => self.start_op(to, &request),
        }
        Ok(())
    }

    /// Send all that is queued, and let those go on that waited for room.
    fn flush(&mut self) {
        let keys: Vec<u32> = self.conns.keys().copied().collect();
        for key in keys {
            while let Some(conn) = self.conns.get_mut(&key) {
                if conn.queued() == 0 && conn.blocked.is_empty() {
                    break;
                }
                if conn.flush().is_err() {
                    self.disconnect(key);
                    break;
                }
                let full = conn.queued() > 0;
                if full != conn.wants_write {
                    let events = libc::EPOLLIN | if full { libc::EPOLLOUT } else { 0 };
                    let _ = self.poll.modify(&conn.fd, events, token::of(token::CONN, key));
                    conn.wants_write = full;
                }
                if !conn.has_room() || conn.blocked.is_empty() {
                    break;
                }
                for target in std::mem::take(&mut conn.blocked) {
                    match target {
                        Target::Exec(exec) => self.settle(exec),
                        Target::Op(op) => self.settle_op(op),
                    }
                }
            }
        }
    }
}
