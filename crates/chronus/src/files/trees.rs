//! Describe, list, make, remove and move.

use std::ffi::{CStr, CString};
use std::io;

use chronus_proto::frame::MAX_DATA;

use super::content;
use super::dir::{c, Dir, Stat};
use super::{Answer, At, Error, Out, Result};

/// Levels of directories that are walked; deeper trees are refused, or flattened on removal.
pub const MAX_DEPTH: usize = 256;
/// Entries are sent when they have this many bytes.
const LISTING_STEP: usize = MAX_DATA / 2;

/// Join a directory's path and a name.
pub fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    let mut joined = path.to_vec();
    if !joined.is_empty() && !joined.ends_with(b"/") {
        joined.push(b'/');
    }
    joined.extend_from_slice(name);
    joined
}

/// Refuse to walk deeper.
pub fn check_depth(depth: usize, path: &[u8]) -> Result<()> {
    if depth >= MAX_DEPTH {
        return Err(Error::invalid(format!("more than {MAX_DEPTH} levels of directories")).at(path));
    }
    Ok(())
}

/// Describe one path.
pub fn stat(path: &[u8]) -> Result<Answer> {
    let mut entry = Vec::new();
    if path.iter().all(|b| *b == b'/') || path.ends_with(b"/.") || path.ends_with(b"/..") {
        Dir::open(path)
            .and_then(|dir| dir.stat_self())
            .at(path)?
            .put(&mut entry, path, None);
        return Ok(Answer::Bytes(entry));
    }
    let (parent, name) = Dir::parent_of(path).at(path)?;
    let stat = parent.stat(&name).at(path)?;
    let target = if stat.is_link() {
        parent.read_link(&name).ok()
    } else {
        None
    };
    stat.put(&mut entry, path, target.as_deref());
    Ok(Answer::Bytes(entry))
}

/// Entries that wait to be sent.
#[derive(Default)]
struct Listing {
    entries: Vec<u8>,
    count: u32,
    out: Out,
}

impl Listing {
    fn add(&mut self, dir: &Dir, name: &CStr, path: &[u8], stat: &Stat) {
        let target = if stat.is_link() { dir.read_link(name).ok() } else { None };
        stat.put(&mut self.entries, path, target.as_deref());
        self.count += 1;
        if self.entries.len() >= LISTING_STEP {
            self.send();
        }
    }

    fn send(&mut self) {
        if self.count > 0 {
            let mut frame = vec![0xdd];
            frame.extend_from_slice(&self.count.to_be_bytes());
            frame.append(&mut self.entries);
            self.out.frame(&frame);
            self.count = 0;
        }
    }

    fn walk(&mut self, dir: &Dir, path: &[u8], recursive: bool, depth: usize) -> Result<()> {
        check_depth(depth, path)?;
        for name in dir.names().at(path)? {
            let full = join(path, name.as_bytes());
            // What has vanished in the meantime is not there.
            let Ok(stat) = dir.stat(&name) else {
                continue;
            };
            self.add(dir, &name, &full, &stat);
            if recursive && stat.is_dir() {
                match dir.child(&name) {
                    Ok(child) => self.walk(&child, &full, true, depth + 1)?,
                    Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {}
                    Err(e) => return Err(e).at(&full),
                }
            }
        }
        Ok(())
    }
}

/// List a directory, or with `recursive` the whole tree, each directory before its content.
pub fn list(path: &[u8], recursive: bool) -> Result<Answer> {
    let dir = Dir::open(path).at(path)?;
    let mut listing = Listing::default();
    let result = listing.walk(&dir, path, recursive, 0);
    listing.send();
    result.map(|()| Answer::Done)
}

/// Make a directory with exactly this mode; those above it, if they are made, get 755.
pub fn mkdir(path: &[u8], mode: u32, parents: bool) -> Result<Answer> {
    if parents {
        let mut end = 0;
        while let Some(next) = path[end..].iter().position(|b| *b != b'/') {
            let start = end + next;
            end = path[start..]
                .iter()
                .position(|b| *b == b'/')
                .map_or(path.len(), |n| start + n);
            let last = path[end..].iter().all(|b| *b == b'/');
            match make(&path[..end], if last { mode } else { 0o755 }) {
                Ok(()) => {}
                Err(_) if Dir::open(&path[..end]).is_ok() => {}
                Err(e) => return Err(e).at(&path[..end]),
            }
        }
        return Ok(Answer::Done);
    }
    make(path, mode).at(path)?;
    Ok(Answer::Done)
}

fn make(path: &[u8], mode: u32) -> io::Result<()> {
    let (parent, name) = Dir::parent_of(path)?;
    parent.mkdir(&name, mode)?;
    if mode & 0o7022 != 0 {
        parent.chmod(&name, mode)?;
    }
    Ok(())
}

/// Remove an entry, or with `recursive` a tree.
pub fn remove(path: &[u8], recursive: bool) -> Result<Answer> {
    let (parent, name) = Dir::parent_of(path).at(path)?;
    let stat = parent.stat(&name).at(path)?;
    if recursive && stat.is_dir() {
        remove_tree(&parent, &name).at(path)?;
    } else {
        parent.unlink(&name, stat.is_dir()).at(path)?;
    }
    Ok(Answer::Done)
}

fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other,
    }
}

fn remove_tree(parent: &Dir, name: &CStr) -> io::Result<()> {
    let top = parent.child(name)?;
    let mut serial = 0;
    // Directories that were too deep come up to the top, until none is left.
    while empty(&top, &top, 0, &mut serial)? {}
    gone(parent.unlink(name, true))
}

/// Remove all in `dir`; `true` if something was moved to the top instead.
fn empty(dir: &Dir, top: &Dir, depth: usize, serial: &mut u64) -> io::Result<bool> {
    let mut moved = false;
    for name in dir.names()? {
        match dir.unlink(&name, false) {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EISDIR | libc::EPERM)) => {}
            other => {
                gone(other)?;
                continue;
            }
        }
        if depth >= MAX_DEPTH {
            *serial += 1;
            let mut random = [0; 8];
            crate::sys::random(&mut random);
            let text = format!(".opendsec-{:016x}-{serial}", u64::from_ne_bytes(random));
            gone(dir.rename(&name, top, &c(text.as_bytes())?))?;
            moved = true;
            continue;
        }
        let child = match dir.child(&name) {
            Ok(child) => child,
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => continue,
            Err(e) => return Err(e),
        };
        moved |= empty(&child, top, depth + 1, serial)?;
        gone(dir.unlink(&name, true))?;
    }
    Ok(moved)
}

/// Rename; across file systems, copy to a temporary name beside the target, rename that, remove the source.
pub fn rename(source: &[u8], target: &[u8]) -> Result<Answer> {
    if target.is_empty() || target.contains(&0) {
        return Err(Error::invalid("a path is empty or contains a NUL byte"));
    }
    let (from, from_name) = Dir::parent_of(source).at(source)?;
    let (to, to_name) = Dir::parent_of(target).at(target)?;
    match from.rename(&from_name, &to, &to_name) {
        Ok(()) => return Ok(Answer::Done),
        Err(e) if e.raw_os_error() == Some(libc::EXDEV) => {}
        Err(e) => {
            let missing = from.stat(&from_name).is_err();
            return Err(e).at(if missing { source } else { target });
        }
    }
    let mut random = [0; 8];
    crate::sys::random(&mut random);
    let temporary = c(format!(".opendsec-{:016x}", u64::from_ne_bytes(random)).as_bytes())?;
    let copied = copy_entry(&from, &from_name, &to, &temporary, source, 0)
        .and_then(|()| to.rename(&temporary, &to, &to_name).at(target));
    if let Err(error) = copied {
        let _ = discard(&to, &temporary);
        return Err(error);
    }
    discard(&from, &from_name).at(source)?;
    Ok(Answer::Done)
}

fn discard(dir: &Dir, name: &CStr) -> io::Result<()> {
    if dir.stat(name)?.is_dir() {
        remove_tree(dir, name)
    } else {
        dir.unlink(name, false)
    }
}

fn copy_entry(from: &Dir, name: &CStr, to: &Dir, target: &CString, path: &[u8], depth: usize) -> Result<()> {
    check_depth(depth, path)?;
    let stat = from.stat(name).at(path)?;
    if stat.is_dir() {
        to.mkdir(target, 0o700).at(path)?;
        let (source, copy) = (from.child(name).at(path)?, to.child(target).at(path)?);
        for entry in source.names().at(path)? {
            let full = join(path, entry.as_bytes());
            copy_entry(&source, &entry, &copy, &entry, &full, depth + 1)?;
        }
    } else if stat.is_link() {
        let text = c(&from.read_link(name).at(path)?)?;
        to.symlink(&text, target).at(path)?;
    } else if stat.is_file() {
        let mut source = from.file(name, libc::O_RDONLY, 0).at(path)?;
        let mut copy = to
            .file(target, libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL, 0o600)
            .at(path)?;
        content::copy(&mut source, &mut copy).at(path)?;
    } else {
        to.mknod(target, stat.kind() | 0o600, stat.0.st_rdev).at(path)?;
    }
    // Another user's file becomes the mover's own.
    let _ = to.chown(target, stat.0.st_uid, stat.0.st_gid);
    if !stat.is_link() {
        to.chmod(target, stat.mode()).at(path)?;
    }
    to.set_mtime(target, stat.0.st_mtime, stat.0.st_mtime_nsec);
    Ok(())
}
