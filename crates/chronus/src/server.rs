//! The poll loop: who gets which event, and when each timer runs.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use chronus_proto::frame::{self, Header, Kind};
use chronus_proto::request::{self, ExecStart, Exit, Request};
use chronus_proto::{msgpack, Code, PROTOCOL};

use crate::config::Config;
use crate::conn::{Conn, Target};
use crate::exec::{Exec, Progress, State, Stdin, Stop};
use crate::files;
use crate::ops::{self, Op, Relay};
use crate::spawn::{self, refuse, Refusal, Report};
use crate::sys::{self, Pid, Poll};
use crate::tree;

/// Most execs whose records are held.
const MAX_EXECS: usize = 4096;
/// Most connections at a time; the oldest goes first.
const MAX_CONNS: usize = 8;
/// How long the news that a command runs may wait for its end: short commands then answer in one write.
const QUICK_NS: u64 = 1_000_000;
const MS: u64 = 1_000_000;

/// Meaning of the upper half of a poll token; the lower half is a key.
mod token {
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
        let Ok(fd) = sys::accept(&self.listener) else {
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
            loop {
                let Some(conn) = self.conns.get_mut(&key) else {
                    break;
                };
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

    // Execs

    fn exec_start(&mut self, to: (u32, u32), command: &ExecStart<'_>) {
        if let Some(key) = self.ids.get(command.id).copied() {
            self.attach(key, to, [0, 0]);
            return self.settle(key);
        }
        if self.execs.len() >= MAX_EXECS {
            let refusal = refuse(Code::Unavailable, format!("{MAX_EXECS} commands are already known"));
            return self.respond_error(to, &refusal);
        }
        let spawned = match spawn::spawn(&self.config, command) {
            Ok(spawned) => spawned,
            Err(refusal) => return self.respond_error(to, &refusal),
        };
        let now = sys::now_ns();
        let key = self.key();
        let mut exec = Exec::new(command.id, spawned, to, now);
        exec.check_at = now + QUICK_NS;
        exec.grace_ns = command.grace_ms.saturating_mul(MS);
        if let Some(timeout) = command.timeout_ms {
            exec.timeout_at = now.saturating_add(timeout.saturating_mul(MS)).max(1);
        }
        self.timer(exec.check_at);
        if exec.timeout_at != 0 {
            self.timer(exec.timeout_at);
        }
        for other in self.execs.values_mut() {
            if other.pid == exec.pid {
                other.pid_reused = true;
            }
        }
        self.ids.insert(command.id.into(), key);
        self.pids.insert(exec.pid, Target::Exec(key));
        self.execs.insert(key, exec);
        if let Some(conn) = self.conns.get_mut(&to.0) {
            conn.channels.insert(to.1, Target::Exec(key));
        }
    }

    /// Let an exec be received by another channel, and tell how much input it may send.
    fn attach(&mut self, key: u32, to: (u32, u32), offsets: [u64; 2]) {
        let Some(exec) = self.execs.get_mut(&key) else {
            return;
        };
        if let Some((conn, channel)) = exec.owner {
            if let Some(conn) = self.conns.get_mut(&conn) {
                conn.channels.remove(&channel);
            }
        }
        exec.attach(to, offsets, &mut self.kept);
        if let Some(conn) = self.conns.get_mut(&to.0) {
            conn.channels.insert(to.1, Target::Exec(key));
        }
    }

    fn exec_attach(&mut self, to: (u32, u32), id: &str, offsets: [u64; 2]) {
        let mut payload = vec![0x92, 0];
        let Some(key) = self.ids.get(id).copied() else {
            payload.push(0xc0);
            return self.respond(to, &payload);
        };
        self.attach(key, to, offsets);
        let window = self
            .execs
            .get(&key)
            .and_then(|exec| exec.stdin.as_ref())
            .map_or(0, Stdin::window);
        msgpack::put_uint(&mut payload, window as u64);
        self.respond(to, &payload);
        self.settle(key);
    }

    fn exec_signal(&mut self, id: &str, signal: u64, whole: bool) -> Result<(), Refusal> {
        let exec = self
            .ids
            .get(id)
            .and_then(|key| self.execs.get(key))
            .ok_or_else(unknown_exec)?;
        if !(1..=64).contains(&signal) {
            return Err(refuse(Code::InvalidArgument, format!("there is no signal {signal}")));
        }
        let signal = signal as i32;
        let ended = || refuse(Code::NotFound, "the command has ended");
        if whole {
            match tree::signal(&self.config, &marks(exec), signal) {
                0 => Err(ended()),
                _ => Ok(()),
            }
        } else if exec.has_ended() {
            Err(ended())
        } else {
            sys::kill(exec.pid, signal).map_err(|_| ended())
        }
    }

    /// TERM now, KILL after the grace; a stop that has begun is only made shorter.
    fn stop(&mut self, key: u32, grace_ns: u64) {
        let now = sys::now_ns();
        let at = now.saturating_add(grace_ns);
        let Some(exec) = self.execs.get_mut(&key) else {
            return;
        };
        match exec.stop {
            Stop::Killing(..) => return,
            Stop::Grace(until) if until <= at => return,
            _ => {}
        }
        if grace_ns == 0 {
            exec.stop = Stop::Killing(now, MS);
        } else if tree::terminate(&self.config, &marks(exec)) == 0 {
            exec.stop = Stop::No;
        } else {
            exec.stop = Stop::Grace(at);
        }
        self.timer(at);
    }

    fn on_exec_frame(&mut self, from: (u32, u32), key: u32, kind: Kind, payload: &[u8]) -> Result<(), Violation> {
        let Some(exec) = self.execs.get_mut(&key).filter(|exec| exec.owner == Some(from)) else {
            return Ok(());
        };
        match kind {
            Kind::Ack => {
                let (stream, offset) = frame::parse_ack(payload).ok_or(Violation)?;
                exec.acknowledge(stream, offset, &mut self.kept);
            }
            Kind::Data => {
                if exec.stdin.as_mut().is_some_and(|stdin| !stdin.push(payload)) {
                    return Err(Violation);
                }
                self.on_stdin(key);
            }
            Kind::End => {
                if let Some(stdin) = &mut exec.stdin {
                    stdin.finish();
                }
                self.on_stdin(key);
            }
            _ => {}
        }
        self.settle(key);
        Ok(())
    }

    fn on_stdin(&mut self, key: u32) {
        let Some(exec) = self.execs.get_mut(&key) else {
            return;
        };
        let Some(stdin) = &mut exec.stdin else {
            return;
        };
        let owed = stdin.flush();
        if let Some(fd) = &stdin.fd {
            if stdin.is_waiting() != stdin.watched {
                if stdin.watched {
                    self.poll.remove(fd);
                    stdin.watched = false;
                } else {
                    stdin.watched = self.poll.add(fd, libc::EPOLLOUT, token::of(token::STDIN, key)).is_ok();
                }
            }
        }
        if owed > 0 {
            if let Some((conn, channel)) = exec.owner {
                if let Some(conn) = self.conns.get_mut(&conn) {
                    frame::put(conn.queue(), Kind::Credit, channel, &(owed as u32).to_le_bytes());
                }
            }
        }
    }

    fn on_output(&mut self, key: u32, index: usize) {
        if let Some(exec) = self.execs.get_mut(&key) {
            let discard = exec.discards();
            exec.streams[index].read(&self.poll, &mut self.scratch, &mut self.kept, discard);
        }
        self.settle(key);
    }

    /// exec has succeeded or failed, as the status pipe tells.
    fn on_status(&mut self, key: u32) {
        let Some(exec) = self.execs.get_mut(&key) else {
            return;
        };
        let State::Starting(status) = &exec.state else {
            return;
        };
        self.poll.remove(status);
        let mut report = [0; spawn::MAX_REPORT];
        match sys::read(status, &mut report) {
            // The child is about to end; the report counts then.
            Ok(n) if n > 0 => exec.report = report[..n].to_vec(),
            _ => {
                exec.state = State::Running;
                self.settle(key);
            }
        }
    }

    fn reap(&mut self) {
        let mut info = [0; 128];
        let _ = sys::read(&self.signals, &mut info);
        while let Some(reaped) = sys::reap() {
            if let Some(Target::Exec(key)) = self.pids.remove(&reaped.pid) {
                self.ended(key, &reaped);
            }
        }
    }

    /// The main process of an exec is reaped.
    fn ended(&mut self, key: u32, reaped: &sys::Reaped) {
        let now = sys::now_ns();
        let Some(exec) = self.execs.get_mut(&key) else {
            return;
        };
        let mut exit = Exit {
            code: reaped.code.map_or(i64::from(128 + reaped.signal), i64::from),
            signal: reaped.signal as u64,
            timed_out: exec.timed_out,
            start_error: None,
            duration_us: now.saturating_sub(exec.forked_at) / 1000,
            cpu_us: reaped.cpu_us,
            peak_bytes: reaped.peak_bytes,
            offsets: (0, 0),
        };
        if let State::Starting(status) = &exec.state {
            let mut report = std::mem::take(&mut exec.report);
            if report.is_empty() {
                report = vec![0; spawn::MAX_REPORT];
                let n = sys::read(status, &mut report).unwrap_or(0);
                report.truncate(n);
            }
            match Report::decode(&report) {
                None => {}
                Some(Report::NotStarted(code, text)) => {
                    exit.code = code;
                    exec.streams[1].push(format!("opendsec: {text}\n").as_bytes(), &mut self.kept);
                    exit.start_error = Some(text);
                }
                Some(Report::Refused(refusal)) => {
                    if let Some(to) = exec.owner {
                        self.respond_error(to, &refusal);
                    }
                    return self.forget(key);
                }
            }
        }
        exec.state = State::Ended;
        exec.check_at = 0;
        exec.timeout_at = 0;
        exec.exit = Some(exit);
        let discard = exec.discards();
        for stream in &mut exec.streams {
            stream.mark_end();
            while stream.read(&self.poll, &mut self.scratch, &mut self.kept, discard) == Progress::Some {
                // A flood of children that live on must not hold us.
                if stream.room(self.kept) < frame::MAX_DATA {
                    break;
                }
            }
        }
        self.settle(key);
    }

    /// Watch what should be watched, queue what can be sent, and drop the record if nothing is left to do.
    fn settle(&mut self, key: u32) {
        let Some(exec) = self.execs.get_mut(&key) else {
            return;
        };
        if let Some((owner, channel)) = exec.owner {
            if let Some(conn) = self.conns.get_mut(&owner) {
                if !exec.pump(conn, channel) {
                    conn.block(Target::Exec(key));
                }
            }
        }
        if exec.is_over() {
            return self.forget(key);
        }
        if exec.discards() {
            exec.drop_kept(&mut self.kept);
        }
        if exec.check_at != 0 {
            return;
        }
        for (stream, kind) in exec.streams.iter_mut().zip([token::STDOUT, token::STDERR]) {
            let wanted = stream.room(self.kept) > 0;
            if let Some(fd) = &stream.fd {
                if wanted && !stream.watched {
                    stream.watched = self.poll.add(fd, libc::EPOLLIN, token::of(kind, key)).is_ok();
                } else if !wanted && stream.watched {
                    // Not only masked: an end of file would be reported all the same.
                    self.poll.remove(fd);
                    stream.watched = false;
                }
            }
        }
    }

    fn forget(&mut self, key: u32) {
        let Some(mut exec) = self.execs.remove(&key) else {
            return;
        };
        exec.drop_kept(&mut self.kept);
        self.ids.remove(&exec.id);
        if let Some((conn, channel)) = exec.owner {
            if let Some(conn) = self.conns.get_mut(&conn) {
                conn.channels.remove(&channel);
            }
        }
        if let State::Starting(status) = &exec.state {
            self.poll.remove(status);
        }
    }

    // Files

    fn start_op(&mut self, to: (u32, u32), request: &request::FileRequest<'_>) {
        if self.may_work_itself() {
            if let Some(payload) = files::quick(request) {
                return self.respond(to, &payload);
            }
        }
        if self.ops.len() >= ops::MAX_OPS {
            let text = format!("{} file operations are already under way", ops::MAX_OPS);
            return self.respond_error(to, &refuse(Code::Unavailable, text));
        }
        match Op::start(&self.config, to, request) {
            Ok(op) => {
                let key = self.key();
                self.pids.insert(op.pid, Target::Op(key));
                self.ops.insert(key, op);
                if let Some(conn) = self.conns.get_mut(&to.0) {
                    conn.channels.insert(to.1, Target::Op(key));
                }
                self.settle_op(key);
            }
            Err(refusal) => self.respond_error(to, &refusal),
        }
    }

    /// What this process may do to files must not be more than root of the sandbox may.
    fn may_work_itself(&self) -> bool {
        const DAC_OVERRIDE: u64 = 1 << 1;
        self.config.child_caps.map_or(true, |mask| mask & DAC_OVERRIDE != 0)
    }

    fn on_op_frame(&mut self, key: u32, kind: Kind, payload: &[u8]) -> Result<(), Violation> {
        let Some(op) = self.ops.get_mut(&key) else {
            return Ok(());
        };
        match kind {
            Kind::Data if !op.push(payload) => return Err(Violation),
            Kind::End => op.finish(),
            Kind::Credit => op.add_credit(frame::parse_credit(payload).ok_or(Violation)?),
            Kind::Cancel => {
                self.cancel(key);
                return Ok(());
            }
            _ => {}
        }
        self.settle_op(key);
        Ok(())
    }

    fn on_op_output(&mut self, key: u32) {
        if let Some(op) = self.ops.get_mut(&key) {
            op.read(&self.poll, &mut self.scratch);
        }
        self.settle_op(key);
    }

    /// Move what can be moved in both directions.
    fn settle_op(&mut self, key: u32) {
        let Some(op) = self.ops.get_mut(&key) else {
            return;
        };
        let Some(conn) = self.conns.get_mut(&op.owner.0) else {
            return;
        };
        let owed = op.flush();
        if owed > 0 {
            frame::put(conn.queue(), Kind::Credit, op.owner.1, &(owed as u32).to_le_bytes());
        }
        match op.relay(conn) {
            Relay::Done => return self.drop_op(key),
            Relay::Blocked => conn.block(Target::Op(key)),
            Relay::Waiting => {}
        }
        op.watch(&self.poll, token::of(token::OP_OUT, key), token::of(token::OP_IN, key));
    }

    fn cancel(&mut self, key: u32) {
        if let Some(op) = self.ops.get(&key) {
            op.cancel(self.pids.contains_key(&op.pid));
        }
        self.drop_op(key);
    }

    fn drop_op(&mut self, key: u32) {
        let Some(mut op) = self.ops.remove(&key) else {
            return;
        };
        op.close(&self.poll);
        if let Some(conn) = self.conns.get_mut(&op.owner.0) {
            conn.channels.remove(&op.owner.1);
        }
    }

    // Timers

    fn run_timers(&mut self) {
        let now = sys::now_ns();
        if now < self.next_timer {
            return;
        }
        self.next_timer = u64::MAX;
        let keys: Vec<u32> = self.execs.keys().copied().collect();
        for key in keys {
            self.run_timers_of(key, now);
        }
    }

    fn run_timers_of(&mut self, key: u32, now: u64) {
        let due = |at: u64| at != 0 && at <= now;
        let Some(exec) = self.execs.get_mut(&key) else {
            return;
        };
        if due(exec.check_at) {
            exec.check_at = 0;
            if let State::Starting(status) = &exec.state {
                let _ = self.poll.add(status, libc::EPOLLIN, token::of(token::STATUS, key));
            }
            self.settle(key);
        }
        let Some(exec) = self.execs.get_mut(&key) else {
            return;
        };
        if due(exec.timeout_at) {
            exec.timeout_at = 0;
            exec.timed_out = true;
            let grace = exec.grace_ns;
            self.stop(key, grace);
        }
        let Some(exec) = self.execs.get_mut(&key) else {
            return;
        };
        match exec.stop {
            Stop::Grace(at) if at <= now => exec.stop = Stop::Killing(now, MS),
            _ => {}
        }
        if let Stop::Killing(at, pause) = exec.stop {
            if at <= now {
                exec.stop = match tree::kill_round(&self.config, &marks(exec)) {
                    0 => Stop::No,
                    _ => Stop::Killing(now + pause, (pause * 2).min(200 * MS)),
                };
            }
        }
        let mut next = [exec.check_at, exec.timeout_at, 0];
        if let Stop::Grace(at) | Stop::Killing(at, _) = exec.stop {
            next[2] = at;
        }
        let over = exec.is_over();
        for at in next.into_iter().filter(|at| *at != 0) {
            self.timer(at);
        }
        if over {
            self.forget(key);
        }
    }
}

fn unknown_exec() -> Refusal {
    refuse(Code::NotFound, "no such command")
}

fn marks(exec: &Exec) -> tree::Marks<'_> {
    tree::Marks {
        main: (!exec.has_ended()).then_some(exec.pid),
        session: (!exec.pid_reused).then_some(exec.pid),
        id: &exec.id,
    }
}
