//! File operations as process 1 sees them: a helper child does the work, process 1 only moves frames.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};

use chronus_proto::frame::{self, Kind, HEADER, MAX_DATA, STREAM_WINDOW};
use chronus_proto::request::{self, FileRequest};
use chronus_proto::Code;

use crate::config::Config;
use crate::conn::Conn;
use crate::spawn::{self, Refusal};
use crate::sys::{self, Pid, Poll};
use crate::{files, user};

/// Most helpers at a time.
pub const MAX_OPS: usize = 64;

/// A stream to the helper: what the host sent, framed by `u32le` lengths; an empty frame is the end.
pub struct Input {
    fd: OwnedFd,
    waiting: VecDeque<u8>,
    window: usize,
    end: bool,
    /// It is in the poll set.
    watched: bool,
}

/// One operation.
pub struct Op {
    /// Connection and channel it belongs to.
    pub owner: (u32, u32),
    /// The helper.
    pub pid: Pid,
    output: Option<OwnedFd>,
    watched: bool,
    buffer: Vec<u8>,
    credit: usize,
    input: Option<Input>,
    changes_files: bool,
}

/// What relaying came to.
#[derive(PartialEq, Eq)]
pub enum Relay {
    /// More will come from the helper.
    Waiting,
    /// The connection has no room.
    Blocked,
    /// The answer is queued: nothing follows.
    Done,
}

impl Op {
    /// Fork a helper.
    ///
    /// # Errors
    /// The sandbox has no process, memory or descriptor left.
    pub fn start(config: &Config, owner: (u32, u32), request: &FileRequest<'_>) -> Result<Op, Refusal> {
        let lacking = |e| spawn::lacking("start a file operation", &e);
        let (out_read, out_write) = sys::pipe(0).map_err(lacking)?;
        let input = request
            .takes_input()
            .then(|| sys::pipe(0))
            .transpose()
            .map_err(lacking)?;
        let pid = sys::fork().map_err(lacking)?;
        if pid == 0 {
            let stdin = input
                .as_ref()
                .map_or(config.null.as_raw_fd(), |(read, _)| read.as_raw_fd());
            help(config, request, [stdin, out_write.as_raw_fd()]);
        }
        let _ = sys::set_nonblocking(&out_read);
        let input = input.map(|(_, fd)| {
            let _ = sys::set_nonblocking(&fd);
            Input {
                fd,
                waiting: VecDeque::new(),
                window: STREAM_WINDOW,
                end: false,
                watched: false,
            }
        });
        Ok(Op {
            owner,
            pid,
            output: Some(out_read),
            watched: false,
            buffer: Vec::new(),
            credit: STREAM_WINDOW,
            input,
            changes_files: request.takes_input(),
        })
    }

    /// Take what the helper has sent, if there is room for it.
    pub fn read(&mut self, poll: &Poll, scratch: &mut [u8]) {
        let Some(fd) = &self.output else {
            return;
        };
        if self.buffer.len() >= HEADER + MAX_DATA {
            return;
        }
        match sys::read(fd, scratch) {
            Ok(n) if n > 0 => self.buffer.extend_from_slice(&scratch[..n]),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            _ => {
                if self.watched {
                    poll.remove(fd);
                }
                self.output = None;
                self.watched = false;
            }
        }
    }

    /// Leave the poll set, so that no event comes after the descriptors are closed.
    pub fn close(&mut self, poll: &Poll) {
        if let (Some(fd), true) = (&self.output, self.watched) {
            poll.remove(fd);
        }
        if let Some(input) = self.input.as_ref().filter(|input| input.watched) {
            poll.remove(&input.fd);
        }
    }

    /// Queue whole frames as far as credit and the connection allow.
    pub fn relay(&mut self, conn: &mut Conn) -> Relay {
        let channel = self.owner.1;
        let mut used = 0;
        let result = loop {
            let rest = &self.buffer[used..];
            let header = match frame::parse(rest) {
                Ok(Some(header)) if rest.len() >= HEADER + header.len => header,
                Ok(_) if self.output.is_some() => break Relay::Waiting,
                // The helper was killed, or something has written into its pipe.
                _ => {
                    let mut payload = Vec::new();
                    let text = "the file operation was cut short: its process ended (out of memory?)";
                    request::put_error(&mut payload, Code::Unavailable, text);
                    frame::put(conn.queue(), Kind::Response, channel, &payload);
                    break Relay::Done;
                }
            };
            let payload = &rest[HEADER..HEADER + header.len];
            match header.kind {
                Kind::Data if header.len > self.credit => break Relay::Waiting,
                Kind::Data if !conn.has_room() => break Relay::Blocked,
                Kind::Data => {
                    self.credit -= header.len;
                    frame::put(conn.queue(), Kind::Data, channel, payload);
                    used += HEADER + header.len;
                }
                _ => {
                    frame::put(conn.queue(), Kind::Response, channel, payload);
                    break Relay::Done;
                }
            }
        };
        self.buffer.drain(..used);
        result
    }

    /// The host allows more bytes.
    pub fn add_credit(&mut self, count: u32) {
        self.credit = (self.credit + count as usize).min(STREAM_WINDOW);
    }

    /// Take bytes from the host; `false` if it sent more than it was allowed.
    pub fn push(&mut self, data: &[u8]) -> bool {
        let Some(input) = &mut self.input else {
            return false;
        };
        if data.len() > input.window {
            return false;
        }
        input.window -= data.len();
        if !input.end && !data.is_empty() {
            input.waiting.extend((data.len() as u32).to_le_bytes());
            input.waiting.extend(data);
        }
        true
    }

    /// The host has ended its stream.
    pub fn finish(&mut self) {
        if let Some(input) = &mut self.input {
            if !input.end {
                input.end = true;
                input.waiting.extend(0u32.to_le_bytes());
            }
        }
    }

    /// Write what the helper takes and return the credit to grant.
    pub fn flush(&mut self) -> usize {
        let Some(input) = &mut self.input else {
            return 0;
        };
        while !input.waiting.is_empty() {
            match sys::write(&input.fd, input.waiting.as_slices().0) {
                Ok(n) => {
                    input.waiting.drain(..n);
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => break,
                // The helper has ended; its answer tells why.
                Err(_) => input.waiting.clear(),
            }
        }
        let owed = STREAM_WINDOW.saturating_sub(input.waiting.len() + input.window);
        input.window += owed;
        owed
    }

    /// Keep the poll set in step with what is wanted.
    pub fn watch(&mut self, poll: &Poll, out_token: u64, in_token: u64) {
        if let Some(fd) = &self.output {
            let wanted = self.buffer.len() < HEADER + MAX_DATA;
            if wanted && !self.watched {
                self.watched = poll.add(fd, libc::EPOLLIN, out_token).is_ok();
            } else if !wanted && self.watched {
                poll.remove(fd);
                self.watched = false;
            }
        }
        if let Some(input) = &mut self.input {
            let wanted = !input.waiting.is_empty();
            if wanted && !input.watched {
                input.watched = poll.add(&input.fd, libc::EPOLLOUT, in_token).is_ok();
            } else if !wanted && input.watched {
                poll.remove(&input.fd);
                input.watched = false;
            }
        }
    }

    /// Nobody waits for it any more. A helper that writes files sees its input break off and cleans up.
    pub fn cancel(&self, running: bool) {
        if running && !self.changes_files {
            let _ = sys::kill(self.pid, libc::SIGKILL);
        }
    }
}

/// In the child: take on the user, do the work, answer, end.
fn help(config: &Config, request: &FileRequest<'_>, fds: [i32; 2]) -> ! {
    spawn::leave_privileges(config);
    let ready = sys::dup_to(fds[0], 0, false).and_then(|()| sys::dup_to(fds[1], 1, false));
    if ready.is_err() {
        sys::exit(1);
    }
    sys::close_from(3);
    sys::raise_files_limit();
    let result = become_user(config, request).and_then(|()| files::run(request));
    files::answer(result);
    sys::exit(0);
}

fn become_user(config: &Config, request: &FileRequest<'_>) -> Result<(), files::Error> {
    let who = user::resolve(files::place(request).user).map_err(files::Error::invalid)?;
    if config.child_caps.is_some() {
        sys::limit_caps(config.child_caps).map_err(|e| files::Error::from(e).at(b"capabilities"))?;
    }
    if who.uid != 0 || who.gid != 0 || who.groups.len() != config.groups || config.groups != 0 {
        sys::become_user(who.uid, who.gid, &who.groups).map_err(|e| files::Error::from(e).at(b"user"))?;
    }
    Ok(())
}
