//! Execs as the loop sees them: start, attach, input, output, end.

use chronus_proto::frame::{self, Kind};
use chronus_proto::request::{ExecStart, Exit};
use chronus_proto::{msgpack, Code};

use super::{token, Server, Violation, MS};
use crate::conn::Target;
use crate::exec::{Exec, Progress, State, Stdin, Stop};
use crate::spawn::{self, refuse, Refusal, Report};
use crate::sys;
use crate::tree;

/// Most execs whose records are held.
const MAX_EXECS: usize = 4096;
/// How long the news that a command runs may wait for its end: short commands then answer in one write.
const QUICK_NS: u64 = 1_000_000;

impl Server {
    pub(super) fn exec_start(&mut self, to: (u32, u32), command: &ExecStart<'_>) {
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
    pub(super) fn attach(&mut self, key: u32, to: (u32, u32), offsets: [u64; 2]) {
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

    pub(super) fn exec_attach(&mut self, to: (u32, u32), id: &str, offsets: [u64; 2]) {
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

    pub(super) fn exec_signal(&mut self, id: &str, signal: u64, whole: bool) -> Result<(), Refusal> {
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
    pub(super) fn stop(&mut self, key: u32, grace_ns: u64) {
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

    pub(super) fn on_exec_frame(
        &mut self,
        from: (u32, u32),
        key: u32,
        kind: Kind,
        payload: &[u8],
    ) -> Result<(), Violation> {
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

    pub(super) fn on_stdin(&mut self, key: u32) {
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

    pub(super) fn on_output(&mut self, key: u32, index: usize) {
        if let Some(exec) = self.execs.get_mut(&key) {
            let discard = exec.discards();
            exec.streams[index].read(&self.poll, &mut self.scratch, &mut self.kept, discard);
        }
        self.settle(key);
    }

    /// exec has succeeded or failed, as the status pipe tells.
    pub(super) fn on_status(&mut self, key: u32) {
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

    pub(super) fn reap(&mut self) {
        let mut info = [0; 128];
        let _ = sys::read(&self.signals, &mut info);
        while let Some(reaped) = sys::reap() {
            if let Some(Target::Exec(key)) = self.pids.remove(&reaped.pid) {
                self.ended(key, &reaped);
            }
        }
    }

    /// The main process of an exec is reaped.
    pub(super) fn ended(&mut self, key: u32, reaped: &sys::Reaped) {
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
    pub(super) fn settle(&mut self, key: u32) {
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

    pub(super) fn forget(&mut self, key: u32) {
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
}

pub(super) fn unknown_exec() -> Refusal {
    refuse(Code::NotFound, "no such command")
}

pub(super) fn marks(exec: &Exec) -> tree::Marks<'_> {
    tree::Marks {
        main: (!exec.has_ended()).then_some(exec.pid),
        session: (!exec.pid_reused).then_some(exec.pid),
        id: &exec.id,
    }
}
