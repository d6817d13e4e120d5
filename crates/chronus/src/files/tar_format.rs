//! Headers of tar archives: POSIX pax, written and read; GNU long names and numbers, read.

/// Size of a block.
pub const BLOCK: usize = 512;
/// Largest extended header that is read.
pub const MAX_EXTENDED: u64 = 1024 * 1024;

/// What a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Regular file.
    File,
    /// Hard link to a member before.
    HardLink,
    /// Symbolic link.
    SymLink,
    /// Character device.
    Char,
    /// Block device.
    Block,
    /// Directory.
    Dir,
    /// FIFO.
    Fifo,
}

/// One member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Name, relative.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u64,
    /// Group.
    pub gid: u64,
    /// Bytes of content that follow.
    pub size: u64,
    /// Modification time: seconds and nanoseconds.
    pub mtime: (i64, i64),
    /// Target of a link.
    pub link: Vec<u8>,
    /// Device numbers.
    pub device: (u32, u32),
}

/// Bytes that fill the last block of `size` bytes.
pub fn padding(size: u64) -> usize {
    (BLOCK - (size % BLOCK as u64) as usize) % BLOCK
}

fn octal(field: &mut [u8], value: u64) -> bool {
    let digits = field.len() - 1;
    let fits = value >> (3 * digits).min(63) == 0;
    let mut rest = if fits { value } else { 0 };
    for byte in field[..digits].iter_mut().rev() {
        *byte = b'0' + (rest & 7) as u8;
        rest >>= 3;
    }
    fits
}

fn record(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    // The length counts its own digits.
    let base = key.len() + value.len() + 3;
    let mut len = base + 1;
    while len != base + len.to_string().len() {
        len = base + len.to_string().len();
    }
    out.extend_from_slice(format!("{len} {key}=").as_bytes());
    out.extend_from_slice(value);
    out.push(b'\n');
}

fn block(name: &[u8], kind: u8, m: &Member, records: &mut Vec<u8>) -> [u8; BLOCK] {
    let mut b = [0; BLOCK];
    let short = &name[..name.len().min(100)];
    b[..short.len()].copy_from_slice(short);
    octal(&mut b[100..108], u64::from(m.mode));
    if !octal(&mut b[108..116], m.uid) {
        record(records, "uid", m.uid.to_string().as_bytes());
    }
    if !octal(&mut b[116..124], m.gid) {
        record(records, "gid", m.gid.to_string().as_bytes());
    }
    if !octal(&mut b[124..136], m.size) {
        record(records, "size", m.size.to_string().as_bytes());
    }
    octal(&mut b[136..148], m.mtime.0.max(0) as u64);
    b[156] = kind;
    let link = &m.link[..m.link.len().min(100)];
    b[157..157 + link.len()].copy_from_slice(link);
    b[257..265].copy_from_slice(b"ustar\x0000");
    octal(&mut b[329..337], u64::from(m.device.0));
    octal(&mut b[337..345], u64::from(m.device.1));
    b[148..156].fill(b' ');
    let sum: u64 = b.iter().map(|byte| u64::from(*byte)).sum();
    octal(&mut b[148..155], sum);
    b
}

/// Append the header of a member, with an extended one before it if it needs that.
pub fn put_header(out: &mut Vec<u8>, m: &Member) {
    let mut records = Vec::new();
    if m.path.len() > 100 {
        record(&mut records, "path", &m.path);
    }
    if m.link.len() > 100 {
        record(&mut records, "linkpath", &m.link);
    }
    if m.mtime.1 != 0 || m.mtime.0 < 0 {
        let (seconds, nanos) = m.mtime;
        let text = if seconds < 0 && nanos > 0 {
            // -1.25 is two seconds back and three quarters forward.
            format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos)
        } else {
            format!("{seconds}.{nanos:09}")
        };
        record(&mut records, "mtime", text.as_bytes());
    }
    let kind = match m.kind {
        Kind::File => b'0',
        Kind::HardLink => b'1',
        Kind::SymLink => b'2',
        Kind::Char => b'3',
        Kind::Block => b'4',
        Kind::Dir => b'5',
        Kind::Fifo => b'6',
    };
    let main = block(&m.path, kind, m, &mut records);
    if !records.is_empty() {
        let extended = Member {
            path: b"PaxHeaders/x".to_vec(),
            kind: Kind::File,
            mode: 0o644,
            uid: 0,
            gid: 0,
            size: records.len() as u64,
            mtime: (0, 0),
            link: Vec::new(),
            device: (0, 0),
        };
        out.extend_from_slice(&block(&extended.path, b'x', &extended, &mut Vec::new()));
        out.extend_from_slice(&records);
        out.resize(out.len() + padding(records.len() as u64), 0);
    }
    out.extend_from_slice(&main);
}

/// A header as it was read: a member, or something about the next one.
#[derive(Debug, PartialEq, Eq)]
pub enum Header {
    /// A member; its content follows.
    Member(Member),
    /// Records for the next member (`x`) or all (`g`, ignored) of this size follow.
    Extended(u64, bool),
    /// GNU: the next member's name of this size follows.
    LongName(u64),
    /// GNU: the next member's link target of this size follows.
    LongLink(u64),
    /// An empty block.
    End,
}

/// What extended headers say of the next member.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Its name.
    pub path: Option<Vec<u8>>,
    /// Its link target.
    pub link: Option<Vec<u8>>,
    /// Its size.
    pub size: Option<u64>,
    /// Its owner.
    pub uid: Option<u64>,
    /// Its group.
    pub gid: Option<u64>,
    /// Its time.
    pub mtime: Option<(i64, i64)>,
}

fn number(field: &[u8]) -> Result<u64, String> {
    if field[0] & 0x80 != 0 {
        // GNU: big-endian binary. Negative numbers are of no use here.
        if field[0] & 0x40 != 0 {
            return Ok(0);
        }
        let mut value: u64 = u64::from(field[0] & 0x3f);
        for byte in &field[1..] {
            if value >> 56 != 0 {
                return Err("a number is too large".into());
            }
            value = value << 8 | u64::from(*byte);
        }
        return Ok(value);
    }
    let mut value: u64 = 0;
    for byte in field.iter().skip_while(|b| **b == b' ') {
        match byte {
            b'0'..=b'7' => value = value << 3 | u64::from(byte - b'0'),
            0 | b' ' => break,
            _ => return Err("a number is malformed".into()),
        }
    }
    Ok(value)
}

fn text(field: &[u8]) -> &[u8] {
    field.split(|b| *b == 0).next().unwrap_or(&[])
}

/// Decode one block.
///
/// # Errors
/// A sentence: it is no header.
pub fn parse(b: &[u8; BLOCK]) -> Result<Header, String> {
    if b.iter().all(|byte| *byte == 0) {
        return Ok(Header::End);
    }
    let sum: u64 = b
        .iter()
        .enumerate()
        .map(|(i, byte)| if (148..156).contains(&i) { 32 } else { u64::from(*byte) })
        .sum();
    if number(&b[148..156])? != sum {
        return Err("this is no tar archive, or it is damaged: a checksum is wrong".into());
    }
    let size = number(&b[124..136])?;
    let kind = match b[156] {
        0 | b'0' | b'7' => Kind::File,
        b'1' => Kind::HardLink,
        b'2' => Kind::SymLink,
        b'3' => Kind::Char,
        b'4' => Kind::Block,
        b'5' => Kind::Dir,
        b'6' => Kind::Fifo,
        b'x' => return Ok(Header::Extended(size, false)),
        b'g' => return Ok(Header::Extended(size, true)),
        b'L' => return Ok(Header::LongName(size)),
        b'K' => return Ok(Header::LongLink(size)),
        other => return Err(format!("members of type {:?} are not supported", char::from(other))),
    };
    let mut path = Vec::new();
    if &b[257..263] == b"ustar\x00" {
        let prefix = text(&b[345..500]);
        if !prefix.is_empty() {
            path.extend_from_slice(prefix);
            path.push(b'/');
        }
    }
    path.extend_from_slice(text(&b[..100]));
    // Before ustar, a slash at the end told a directory.
    let kind = if kind == Kind::File && path.ends_with(b"/") {
        Kind::Dir
    } else {
        kind
    };
    let has_content = matches!(kind, Kind::File);
    Ok(Header::Member(Member {
        path,
        kind,
        mode: (number(&b[100..108])? & 0o7777) as u32,
        uid: number(&b[108..116])?,
        gid: number(&b[116..124])?,
        size: if has_content { size } else { 0 },
        mtime: (i64::try_from(number(&b[136..148])?).unwrap_or(0), 0),
        link: text(&b[157..257]).to_vec(),
        device: (
            number(&b[329..337]).unwrap_or(0) as u32,
            number(&b[337..345]).unwrap_or(0) as u32,
        ),
    }))
}

fn decimal(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value).ok()?.parse().ok()
}

fn time(value: &[u8]) -> Option<(i64, i64)> {
    let value = std::str::from_utf8(value).ok()?;
    let (negative, value) = match value.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, value),
    };
    let (whole, part) = value.split_once('.').unwrap_or((value, ""));
    let seconds: i64 = whole.parse().ok()?;
    let mut nanos = 0;
    for i in 0..9 {
        let digit = part.as_bytes().get(i).copied().unwrap_or(b'0');
        nanos = nanos * 10 + i64::from(digit.is_ascii_digit().then(|| digit - b'0')?);
    }
    Some(match (negative, nanos) {
        (false, _) => (seconds, nanos),
        (true, 0) => (-seconds, 0),
        (true, _) => (-seconds - 1, 1_000_000_000 - nanos),
    })
}

impl Overrides {
    /// Take in the records of an extended header.
    ///
    /// # Errors
    /// A sentence: they are malformed.
    pub fn read(&mut self, mut records: &[u8]) -> Result<(), String> {
        let malformed = || "an extended header is malformed".to_string();
        while !records.is_empty() && records[0] != 0 {
            let space = records.iter().take(12).position(|b| *b == b' ').ok_or_else(malformed)?;
            let len = decimal(&records[..space]).ok_or_else(malformed)? as usize;
            if len <= space + 1 || len > records.len() || records[len - 1] != b'\n' {
                return Err(malformed());
            }
            let body = &records[space + 1..len - 1];
            let equals = body.iter().position(|b| *b == b'=').ok_or_else(malformed)?;
            let (key, value) = (&body[..equals], &body[equals + 1..]);
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(decimal(value).ok_or_else(malformed)?),
                b"uid" => self.uid = Some(decimal(value).ok_or_else(malformed)?),
                b"gid" => self.gid = Some(decimal(value).ok_or_else(malformed)?),
                b"mtime" => self.mtime = Some(time(value).ok_or_else(malformed)?),
                _ if key.starts_with(b"GNU.sparse.") => return Err("sparse members are not supported".into()),
                _ => {}
            }
            records = &records[len..];
        }
        Ok(())
    }

    /// Put them into the member they are for.
    pub fn apply(self, member: &mut Member) {
        if let Some(path) = self.path {
            member.path = path;
        }
        if let Some(link) = self.link {
            member.link = link;
        }
        if let (Some(size), Kind::File) = (self.size, member.kind) {
            member.size = size;
        }
        member.uid = self.uid.unwrap_or(member.uid);
        member.gid = self.gid.unwrap_or(member.gid);
        member.mtime = self.mtime.unwrap_or(member.mtime);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member() -> Member {
        Member {
            path: b"a/b".to_vec(),
            kind: Kind::File,
            mode: 0o4755,
            uid: 1000,
            gid: 100,
            size: 5,
            mtime: (1_700_000_000, 0),
            link: Vec::new(),
            device: (0, 0),
        }
    }

    fn round_trip(m: &Member) -> Member {
        let mut bytes = Vec::new();
        put_header(&mut bytes, m);
        assert_eq!(bytes.len() % BLOCK, 0);
        let mut overrides = Overrides::default();
        let mut blocks = bytes.as_slice();
        loop {
            let (head, rest) = blocks.split_first_chunk::<BLOCK>().unwrap();
            blocks = rest;
            match parse(head).unwrap() {
                Header::Extended(size, _) => {
                    let (records, rest) = blocks.split_at(size as usize + padding(size));
                    overrides.read(records).unwrap();
                    blocks = rest;
                }
                Header::Member(mut found) => {
                    overrides.apply(&mut found);
                    return found;
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// All that a member says survives, also what ustar alone cannot say.
    #[test]
    fn headers_round_trip() {
        let mut m = member();
        assert_eq!(round_trip(&m), m);
        m.path = [b'x'; 300].to_vec();
        m.mtime = (-2, 750_000_000);
        m.uid = 4_000_000_000;
        m.size = 1 << 40;
        assert_eq!(round_trip(&m), m);
        m.path = b"\xff\n=\x80 name".to_vec();
        m.kind = Kind::SymLink;
        m.size = 0;
        m.link = [b'\xfe'; 101].to_vec();
        assert_eq!(round_trip(&m), m);
        for len in 60..110 {
            m.link = vec![b'l'; len];
            assert_eq!(round_trip(&m), m);
        }
    }

    /// Random and damaged blocks are refused or read, never more.
    #[test]
    fn damaged_blocks() {
        let mut bytes = Vec::new();
        put_header(&mut bytes, &member());
        let good: [u8; BLOCK] = bytes.try_into().unwrap();
        let mut seed = 1u64;
        for _ in 0..20_000 {
            let mut block = good;
            for _ in 0..3 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                block[(seed >> 33) as usize % BLOCK] = (seed >> 56) as u8;
            }
            let sum: u64 = block
                .iter()
                .enumerate()
                .map(|(i, b)| if (148..156).contains(&i) { 32 } else { u64::from(*b) })
                .sum();
            octal(&mut block[148..155], sum);
            let _ = parse(&block);
            let _ = Overrides::default().read(&block);
        }
    }
}
