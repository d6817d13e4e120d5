//! The part of MessagePack that the protocol uses, read from a slice and written to a vector.

/// The bytes are not what was expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// Result of reading.
pub type Read<T> = Result<T, Malformed>;

/// Reads values one after the other.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Read from `buf`.
    pub fn new(buf: &'a [u8]) -> Self {
        Reader { rest: buf }
    }

    /// Tell whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    fn take(&mut self, n: usize) -> Read<&'a [u8]> {
        if n > self.rest.len() {
            return Err(Malformed);
        }
        let (head, tail) = self.rest.split_at(n);
        self.rest = tail;
        Ok(head)
    }

    fn byte(&mut self) -> Read<u8> {
        let (first, tail) = self.rest.split_first().ok_or(Malformed)?;
        self.rest = tail;
        Ok(*first)
    }

    fn number(&mut self, width: usize) -> Read<u64> {
        Ok(self.take(width)?.iter().fold(0, |sum, b| sum << 8 | u64::from(*b)))
    }

    fn length(&mut self, width: usize) -> Read<usize> {
        Ok(self.number(width)? as usize)
    }

    /// Read the length of an array.
    pub fn array(&mut self) -> Read<usize> {
        match self.byte()? {
            b @ 0x90..=0x9f => Ok(usize::from(b & 15)),
            0xdc => self.length(2),
            0xdd => self.length(4),
            _ => Err(Malformed),
        }
    }

    /// Read the length of a map.
    pub fn map(&mut self) -> Read<usize> {
        match self.byte()? {
            b @ 0x80..=0x8f => Ok(usize::from(b & 15)),
            0xde => self.length(2),
            0xdf => self.length(4),
            _ => Err(Malformed),
        }
    }

    /// Read a signed or unsigned integer that fits `i64`.
    pub fn int(&mut self) -> Read<i64> {
        Ok(match self.byte()? {
            b @ 0..=0x7f => i64::from(b),
            b @ 0xe0..=0xff => i64::from(b as i8),
            0xcc => self.number(1)? as i64,
            0xcd => self.number(2)? as i64,
            0xce => self.number(4)? as i64,
            0xcf => i64::try_from(self.number(8)?).map_err(|_| Malformed)?,
            0xd0 => i64::from(self.number(1)? as i8),
            0xd1 => i64::from(self.number(2)? as i16),
            0xd2 => i64::from(self.number(4)? as i32),
            0xd3 => self.number(8)? as i64,
            _ => return Err(Malformed),
        })
    }

    /// Read an integer that is not negative.
    pub fn uint(&mut self) -> Read<u64> {
        u64::try_from(self.int()?).map_err(|_| Malformed)
    }

    /// Read an integer or nil.
    pub fn opt_uint(&mut self) -> Read<Option<u64>> {
        if self.nil() {
            return Ok(None);
        }
        self.uint().map(Some)
    }

    /// Read a boolean.
    pub fn bool(&mut self) -> Read<bool> {
        match self.byte()? {
            0xc2 => Ok(false),
            0xc3 => Ok(true),
            _ => Err(Malformed),
        }
    }

    /// Skip a nil if one comes next, and tell whether it did.
    pub fn nil(&mut self) -> bool {
        match self.rest.split_first() {
            Some((0xc0, tail)) => {
                self.rest = tail;
                true
            }
            _ => false,
        }
    }

    /// Read a byte string or text.
    pub fn bytes(&mut self) -> Read<&'a [u8]> {
        let len = match self.byte()? {
            b @ 0xa0..=0xbf => usize::from(b & 31),
            0xc4 | 0xd9 => self.length(1)?,
            0xc5 | 0xda => self.length(2)?,
            0xc6 | 0xdb => self.length(4)?,
            _ => return Err(Malformed),
        };
        self.take(len)
    }

    /// Read text.
    pub fn str(&mut self) -> Read<&'a str> {
        std::str::from_utf8(self.bytes()?).map_err(|_| Malformed)
    }
}

/// Append the head of an array.
pub fn put_array(out: &mut Vec<u8>, len: usize) {
    match len {
        0..=15 => out.push(0x90 | len as u8),
        16..=0xffff => {
            out.push(0xdc);
            out.extend_from_slice(&(len as u16).to_be_bytes());
        }
        _ => {
            out.push(0xdd);
            out.extend_from_slice(&(len as u32).to_be_bytes());
        }
    }
}

/// Append an integer.
pub fn put_uint(out: &mut Vec<u8>, value: u64) {
    match value {
        0..=0x7f => out.push(value as u8),
        0x80..=0xff => out.extend_from_slice(&[0xcc, value as u8]),
        0x100..=0xffff => {
            out.push(0xcd);
            out.extend_from_slice(&(value as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            out.push(0xce);
            out.extend_from_slice(&(value as u32).to_be_bytes());
        }
        _ => {
            out.push(0xcf);
            out.extend_from_slice(&value.to_be_bytes());
        }
    }
}

/// Append an integer that may be negative.
pub fn put_int(out: &mut Vec<u8>, value: i64) {
    match u64::try_from(value) {
        Ok(value) => put_uint(out, value),
        Err(_) => {
            out.push(0xd3);
            out.extend_from_slice(&value.to_be_bytes());
        }
    }
}

/// Append a floating point number.
pub fn put_f64(out: &mut Vec<u8>, value: f64) {
    out.push(0xcb);
    out.extend_from_slice(&value.to_bits().to_be_bytes());
}

/// Append a boolean.
pub fn put_bool(out: &mut Vec<u8>, value: bool) {
    out.push(if value { 0xc3 } else { 0xc2 });
}

/// Append nil.
pub fn put_nil(out: &mut Vec<u8>) {
    out.push(0xc0);
}

/// Append a byte string.
pub fn put_bin(out: &mut Vec<u8>, value: &[u8]) {
    match value.len() {
        len @ 0..=0xff => out.extend_from_slice(&[0xc4, len as u8]),
        len @ 0x100..=0xffff => {
            out.push(0xc5);
            out.extend_from_slice(&(len as u16).to_be_bytes());
        }
        len => {
            out.push(0xc6);
            out.extend_from_slice(&(len as u32).to_be_bytes());
        }
    }
    out.extend_from_slice(value);
}

/// Append text.
pub fn put_str(out: &mut Vec<u8>, value: &str) {
    match value.len() {
        len @ 0..=31 => out.push(0xa0 | len as u8),
        len @ 32..=0xff => out.extend_from_slice(&[0xd9, len as u8]),
        len @ 0x100..=0xffff => {
            out.push(0xda);
            out.extend_from_slice(&(len as u16).to_be_bytes());
        }
        len => {
            out.push(0xdb);
            out.extend_from_slice(&(len as u32).to_be_bytes());
        }
    }
    out.extend_from_slice(value.as_bytes());
}
