//! One connection of a host: bytes in, bytes out.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;

use crate::sys;

/// Queued bytes above which streams wait.
const HIGH: usize = 192 * 1024;
/// Queued bytes above which a host that does not read its answers is cut off.
const MAX_QUEUE: usize = 16 * 1024 * 1024;
/// An empty buffer larger than this is given back.
const SPARE: usize = 16 * 1024;

/// What a channel of a connection belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// An exec, by key.
    Exec(u32),
    /// A file operation, by key.
    Op(u32),
}

/// One connection.
pub struct Conn {
    /// Its socket.
    pub fd: OwnedFd,
    /// Begin of a frame that is not complete.
    pub input: Vec<u8>,
    /// Who gets the frames of a channel.
    pub channels: BTreeMap<u32, Target>,
    /// The host has introduced itself.
    pub greeted: bool,
    /// Targets that wait for room.
    pub blocked: Vec<Target>,
    /// The poll set waits for room, too.
    pub wants_write: bool,
    out: Vec<u8>,
    head: usize,
}

impl Conn {
    /// A new connection.
    pub fn new(fd: OwnedFd) -> Conn {
        Conn {
            fd,
            input: Vec::new(),
            channels: BTreeMap::new(),
            greeted: false,
            blocked: Vec::new(),
            wants_write: false,
            out: Vec::new(),
            head: 0,
        }
    }

    /// Bytes that wait to be sent.
    pub fn queued(&self) -> usize {
        self.out.len() - self.head
    }

    /// Tell whether streams may queue more.
    pub fn has_room(&self) -> bool {
        self.queued() < HIGH
    }

    /// Where frames are appended.
    pub fn queue(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// Remember who waits for room.
    pub fn block(&mut self, target: Target) {
        if !self.blocked.contains(&target) {
            self.blocked.push(target);
        }
    }

    /// Send what the socket takes.
    ///
    /// # Errors
    /// The connection is broken, or the host does not read.
    pub fn flush(&mut self) -> io::Result<()> {
        while self.queued() > 0 {
            match sys::write(&self.fd, &self.out[self.head..]) {
                Ok(n) => self.head += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        if self.queued() == 0 {
            self.out.clear();
            self.head = 0;
            self.out.shrink_to(SPARE);
        } else if self.head > HIGH {
            self.out.drain(..self.head);
            self.head = 0;
        }
        if self.queued() > MAX_QUEUE {
            return Err(ErrorKind::OutOfMemory.into());
        }
        Ok(())
    }
}
