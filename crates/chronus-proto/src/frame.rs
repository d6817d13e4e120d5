//! Frames: `u32le payload length, u8 kind, u32le channel, payload`.

/// Bytes before the payload.
pub const HEADER: usize = 9;
/// Most payload bytes of data in one `DATA` or `OUTPUT` frame.
pub const MAX_DATA: usize = 64 * 1024;
/// Most payload bytes of a `REQUEST` or `RESPONSE`.
pub const MAX_CONTROL: usize = 4 * 1024 * 1024;
/// Bytes of a `DATA` stream that may be under way before the receiver grants more.
pub const STREAM_WINDOW: usize = 256 * 1024;
/// Bytes of standard input that may be under way before chronus grants more.
pub const STDIN_WINDOW: usize = 64 * 1024;
/// Bytes of one output stream that chronus keeps until they are acknowledged.
pub const OUTPUT_WINDOW: usize = 256 * 1024;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// First frame of each side.
    Hello = 1,
    /// Host asks; the channel is new and names everything that belongs to the request.
    Request = 2,
    /// chronus answers; ends the channel unless it is an exec.
    Response = 3,
    /// Bytes of a stream.
    Data = 4,
    /// End of the host's stream on this channel.
    End = 5,
    /// The receiver of a stream allows `u32le` more bytes.
    Credit = 6,
    /// Host gives up a request.
    Cancel = 7,
    /// The main process of an exec runs: `u32le` pid.
    Started = 8,
    /// Output of an exec: `u8` stream, `u64le` offset, bytes.
    Output = 9,
    /// Host has stored output: `u8` stream, `u64le` offset of the first byte not stored.
    Ack = 10,
    /// The main process ended: MessagePack.
    Exit = 11,
    /// Both output streams of an exec are at their end.
    Closed = 12,
}

impl Kind {
    /// Return the kind for its number.
    pub fn from_u8(value: u8) -> Option<Kind> {
        Some(match value {
            1 => Kind::Hello,
            2 => Kind::Request,
            3 => Kind::Response,
            4 => Kind::Data,
            5 => Kind::End,
            6 => Kind::Credit,
            7 => Kind::Cancel,
            8 => Kind::Started,
            9 => Kind::Output,
            10 => Kind::Ack,
            11 => Kind::Exit,
            12 => Kind::Closed,
            _ => return None,
        })
    }

    /// Return the largest payload a frame of this kind may have.
    pub fn max_payload(self) -> usize {
        match self {
            Kind::Request | Kind::Response => MAX_CONTROL,
            Kind::Data => MAX_DATA,
            Kind::Output => MAX_DATA + 9,
            Kind::Hello | Kind::Exit => 4096,
            Kind::Credit | Kind::Started => 4,
            Kind::Ack => 9,
            Kind::End | Kind::Cancel | Kind::Closed => 0,
        }
    }
}

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the frame is.
    pub kind: Kind,
    /// What it belongs to.
    pub channel: u32,
    /// Bytes of payload that follow.
    pub len: usize,
}

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// The kind is not known.
    UnknownKind(u8),
    /// The payload would be larger than its kind allows.
    TooLarge(Kind, usize),
}

/// Decode a header; `None` if more bytes are needed.
///
/// # Errors
/// The kind is unknown or the length is over the limit of the kind.
pub fn parse(buf: &[u8]) -> Result<Option<Header>, FrameError> {
    let Some(head) = buf.first_chunk::<HEADER>() else {
        return Ok(None);
    };
    let [l0, l1, l2, l3, kind, c0, c1, c2, c3] = *head;
    let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    let kind = Kind::from_u8(kind).ok_or(FrameError::UnknownKind(kind))?;
    if len > kind.max_payload() {
        return Err(FrameError::TooLarge(kind, len));
    }
    Ok(Some(Header {
        kind,
        channel: u32::from_le_bytes([c0, c1, c2, c3]),
        len,
    }))
}

/// Append a header for a payload of `len` bytes.
pub fn put_header(out: &mut Vec<u8>, kind: Kind, channel: u32, len: usize) {
    let [l0, l1, l2, l3] = (len as u32).to_le_bytes();
    let [c0, c1, c2, c3] = channel.to_le_bytes();
    out.extend_from_slice(&[l0, l1, l2, l3, kind as u8, c0, c1, c2, c3]);
}

/// Append a whole frame.
pub fn put(out: &mut Vec<u8>, kind: Kind, channel: u32, payload: &[u8]) {
    put_header(out, kind, channel, payload.len());
    out.extend_from_slice(payload);
}

/// Append an `OUTPUT` frame whose data is in two pieces.
pub fn put_output(out: &mut Vec<u8>, channel: u32, stream: u8, offset: u64, data: (&[u8], &[u8])) {
    put_header(out, Kind::Output, channel, 9 + data.0.len() + data.1.len());
    out.push(stream);
    out.extend_from_slice(&offset.to_le_bytes());
    out.extend_from_slice(data.0);
    out.extend_from_slice(data.1);
}

/// Decode the payload of an `ACK`: stream and offset.
pub fn parse_ack(payload: &[u8]) -> Option<(u8, u64)> {
    let (stream, offset) = payload.split_first()?;
    Some((*stream, u64::from_le_bytes(offset.try_into().ok()?)))
}

/// Decode the payload of a `CREDIT`.
pub fn parse_credit(payload: &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(payload.try_into().ok()?))
}
