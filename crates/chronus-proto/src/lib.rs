//! The chronus protocol: frames, MessagePack and messages, without any I/O.
//!
//! `docs/reference/chronus-protocol.md` describes it. Everything here works on byte slices that a hostile peer may
//! have made: nothing panics, and every size is bounded.

#![forbid(unsafe_code)]

pub mod frame;
pub mod msgpack;
pub mod request;

/// Version of the protocol; both sides send it in their `HELLO`.
pub const PROTOCOL: u64 = 1;

/// Codes of errors in a `RESPONSE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// An argument is malformed or out of range.
    InvalidArgument = 1,
    /// No such file, exec or process.
    NotFound = 2,
    /// The kernel refused it to this user.
    PermissionDenied = 3,
    /// The object exists or is of another kind.
    Conflict = 4,
    /// No space or quota left.
    DiskFull = 5,
    /// A passing lack (processes, memory, descriptors).
    Unavailable = 6,
    /// Anything else.
    Internal = 7,
}

impl Code {
    /// Return the code for its number.
    pub fn from_u8(value: u8) -> Option<Code> {
        Some(match value {
            1 => Code::InvalidArgument,
            2 => Code::NotFound,
            3 => Code::PermissionDenied,
            4 => Code::Conflict,
            5 => Code::DiskFull,
            6 => Code::Unavailable,
            7 => Code::Internal,
            _ => return None,
        })
    }
}
