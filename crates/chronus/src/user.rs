//! Users by name or number, from the sandbox's own files, which may hold anything.

use std::ffi::CStr;

use crate::sys;

/// Most bytes read from each file.
const MAX_FILE: u64 = 1024 * 1024;

/// Who runs a command.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: Vec<u8>,
    /// Login name, if it has one.
    pub name: Vec<u8>,
}

/// Files up to this size need no memory from the heap.
const SMALL: usize = 4096;

/// Read a regular file up to the limit and hand it on; anything else counts as empty.
fn with_file<T>(path: &CStr, f: impl FnOnce(&[u8]) -> T) -> T {
    let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY;
    let Ok(file) = sys::open_at(libc::AT_FDCWD, path, flags, 0) else {
        return f(&[]);
    };
    let size = sys::regular_size(&file).unwrap_or(0).min(MAX_FILE) as usize;
    let mut small = [0; SMALL];
    let mut large = Vec::new();
    let content = if size <= SMALL {
        &mut small[..size]
    } else {
        large.resize(size, 0);
        &mut large[..]
    };
    let mut len = 0;
    while len < size {
        match sys::read(&file, &mut content[len..]) {
            Ok(n) if n > 0 => len += n,
            _ => break,
        }
    }
    drop(file);
    f(&content[..len])
}

fn number(text: &[u8]) -> Option<u32> {
    if text.is_empty() || text.len() > 10 || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let value: u32 = std::str::from_utf8(text).ok()?.parse().ok()?;
    (value != u32::MAX).then_some(value)
}

/// The first `N` fields of a line, if it has so many.
fn fields<const N: usize>(line: &[u8]) -> Option<[&[u8]; N]> {
    let mut parts = line.split(|b| *b == b':');
    let mut found = [&line[..0]; N];
    for field in &mut found {
        *field = parts.next()?;
    }
    Some(found)
}

/// Resolve `user` (`name`, `uid`, `name:group`, `uid:gid`) in the given files.
///
/// # Errors
/// A sentence for the caller if there is no such user or group.
pub fn resolve_in(user: &[u8], passwd: &[u8], group: &[u8]) -> Result<User, String> {
    let mut parts = user.splitn(2, |b| *b == b':');
    let who = match parts.next() {
        None | Some([]) => b"0",
        Some(text) => text,
    };
    let wanted_group = parts.next().filter(|text| !text.is_empty());
    let wanted_uid = number(who);
    let mut found = None;
    for line in passwd.split(|b| *b == b'\n') {
        let Some([name, _, uid, gid, _, home]) = fields(line) else {
            continue;
        };
        let (Some(uid), Some(gid)) = (number(uid), number(gid)) else {
            continue;
        };
        if name == who || (found.is_none() && wanted_uid == Some(uid)) {
            found = Some((name, uid, gid, home));
            if name == who {
                break;
            }
        }
    }
    let mut result = User {
        home: b"/".to_vec(),
        ..User::default()
    };
    match (found, wanted_uid) {
        (Some((name, uid, gid, home)), _) => {
            result.uid = uid;
            result.gid = gid;
            result.name = name.to_vec();
            if home.starts_with(b"/") {
                result.home = home.to_vec();
            }
        }
        (None, Some(uid)) => result.uid = uid,
        (None, None) => return Err(format!("no user {:?} in the sandbox", String::from_utf8_lossy(who))),
    }
    if let Some(wanted) = wanted_group {
        let by_name = group.split(|b| *b == b'\n').find_map(|line| {
            let [name, _, gid] = fields(line)?;
            (name == wanted).then(|| number(gid)).flatten()
        });
        result.gid = by_name
            .or_else(|| number(wanted))
            .ok_or_else(|| format!("no group {:?} in the sandbox", String::from_utf8_lossy(wanted)))?;
    } else if !result.name.is_empty() {
        for line in group.split(|b| *b == b'\n') {
            let Some([_, _, gid, members]) = fields(line) else {
                continue;
            };
            let is_member = members.split(|b| *b == b',').any(|member| member == result.name);
            if is_member && result.groups.len() < 1024 {
                result.groups.extend(number(gid));
            }
        }
    }
    Ok(result)
}

/// Resolve `user` in the sandbox's own files.
///
/// # Errors
/// A sentence for the caller if there is no such user or group.
pub fn resolve(user: &[u8]) -> Result<User, String> {
    with_file(c"/etc/passwd", |passwd| {
        with_file(c"/etc/group", |group| resolve_in(user, passwd, group))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] =
        b"root:x:0:0:root:/root:/bin/sh\nbad\n:::\nalice:x:1000:100:,,,:/home/alice:/bin/bash\n7:x:1007:7::/seven:\n";
    const GROUP: &[u8] = b"root:x:0:\nwheel:x:10:bob,alice\naudio:x:29:alice\nodd:x:zz:alice\n";

    /// A name brings its group, supplementary groups and home.
    #[test]
    fn name_brings_groups() {
        let user = resolve_in(b"alice", PASSWD, GROUP).unwrap();
        assert_eq!((user.uid, user.gid, user.groups), (1000, 100, vec![10, 29]));
        assert_eq!(user.home, b"/home/alice");
    }

    /// A number needs no entry, and a name that is a number wins over the number.
    #[test]
    fn numbers() {
        let user = resolve_in(b"4242", PASSWD, GROUP).unwrap();
        assert_eq!((user.uid, user.gid, user.home), (4242, 0, b"/".to_vec()));
        assert_eq!(resolve_in(b"7", PASSWD, GROUP).unwrap().uid, 1007);
        assert_eq!(resolve_in(b"", PASSWD, GROUP).unwrap().home, b"/root");
    }

    /// An explicit group replaces the user's own and the supplementary ones.
    #[test]
    fn explicit_group() {
        let user = resolve_in(b"alice:wheel", PASSWD, GROUP).unwrap();
        assert_eq!((user.gid, user.groups), (10, vec![]));
        assert_eq!(resolve_in(b"1:2", b"", b"").unwrap().gid, 2);
    }

    /// Impossible users are refused.
    #[test]
    fn impossible() {
        for user in [
            &b"nobody"[..],
            b"99999999999",
            b"4294967295",
            b"-1",
            b"alice:nogroup",
            b"\xff",
        ] {
            assert!(resolve_in(user, PASSWD, GROUP).is_err(), "{user:?}");
        }
    }
}
