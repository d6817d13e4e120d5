//! Read and write one regular file.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use chronus_proto::frame::MAX_DATA;
use chronus_proto::request::Write;

use super::dir::{self, Dir, Stat};
use super::{trees, Answer, At, Error, Input, Out, Result};
use crate::sys::{self, check};

/// Symbolic links followed to find the file to replace, as the kernel limits it.
const MAX_LINKS: usize = 40;

/// Stream a range of a file.
pub fn read(path: &[u8], offset: u64, length: Option<u64>) -> Result<Answer> {
    let file = dir::open_regular(path, libc::O_RDONLY, 0)?;
    let mut out = Out::default();
    let mut buf = vec![0; MAX_DATA];
    let mut position = offset;
    let end = offset.saturating_add(length.unwrap_or(u64::MAX));
    while position < end {
        let wanted = (end - position).min(buf.len() as u64) as usize;
        let n = match file.read_at(&mut buf[..wanted], position) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            other => other.at(path)?,
        };
        if n == 0 {
            break;
        }
        out.data(&buf[..n]);
        position += n as u64;
    }
    out.flush();
    Ok(Answer::Done)
}

/// Read a range of a small file at once; `None` if it is not known to be small.
pub fn read_small(path: &[u8], offset: u64, length: Option<u64>) -> Option<Result<Vec<u8>>> {
    let file = match dir::open_regular(path, libc::O_RDONLY, 0) {
        Ok(file) => file,
        Err(error) => return Some(Err(error)),
    };
    let size = dir::stat_fd(&file).ok()?.0.st_size as u64;
    // Files of the kernel (/proc, /sys) have no size, and reading them may take long.
    if size == 0 || size > MAX_DATA as u64 {
        return None;
    }
    let wanted = length.unwrap_or(u64::MAX).min(size.saturating_sub(offset)) as usize;
    let mut data = vec![0; wanted];
    let mut have = 0;
    while have < wanted {
        match file.read_at(&mut data[have..], offset + have as u64) {
            Ok(0) => break,
            Ok(n) => have += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Some(Err(e).at(path)),
        }
    }
    data.truncate(have);
    Some(Ok(data))
}

fn receive(file: &mut File, path: &[u8]) -> Result<u64> {
    let mut input = Input::default();
    let mut buf = vec![0; MAX_DATA];
    let mut total = 0;
    loop {
        let n = input.some(&mut buf)?;
        if n == 0 {
            return Ok(total);
        }
        file.write_all(&buf[..n]).at(path)?;
        total += n as u64;
    }
}

fn chmod(file: &File, mode: u32) -> io::Result<()> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::fchmod(file.as_raw_fd(), mode) }.into()).map(|_| ())
}

/// Receive a file.
pub fn write(path: &[u8], how: Write) -> Result<Answer> {
    if how.offset.is_some() && how.append {
        return Err(Error::invalid("a write has either an offset or appends"));
    }
    if how.parents {
        if let Some(slash) = path.iter().rposition(|b| *b == b'/').filter(|slash| *slash > 0) {
            trees::mkdir(&path[..slash], 0o755, true)?;
        }
    }
    if how.offset.is_some() || how.append {
        let append = if how.append { libc::O_APPEND } else { 0 };
        let flags = libc::O_WRONLY | libc::O_CREAT | append;
        let mut file = dir::open_regular(path, flags, how.mode.unwrap_or(0o644))?;
        if let Some(offset) = how.offset {
            file.seek(SeekFrom::Start(offset)).at(path)?;
        }
        let count = receive(&mut file, path)?;
        if let Some(mode) = how.mode {
            chmod(&file, mode).at(path)?;
        }
        return Ok(Answer::Count(count));
    }
    replace(path, how.mode).map(Answer::Count)
}

/// Follow symbolic links at the end of `path`, so that a link stays and what it names is replaced.
fn resolve(path: &[u8]) -> Result<Vec<u8>> {
    let mut path = path.to_vec();
    for _ in 0..MAX_LINKS {
        let (parent, name) = Dir::parent_of(&path).at(&path)?;
        match parent.stat(&name) {
            Ok(stat) if stat.is_link() => {
                let target = parent.read_link(&name).at(&path)?;
                if target.starts_with(b"/") {
                    path = target;
                } else {
                    let keep = path.len() - name.as_bytes().len();
                    path.truncate(keep);
                    path.extend_from_slice(&target);
                }
            }
            _ => return Ok(path),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP)).at(&path)
}

fn in_place(path: &[u8], mode: Option<u32>) -> Result<File> {
    let file = dir::open_regular(path, libc::O_WRONLY | libc::O_TRUNC, 0)?;
    if let Some(mode) = mode {
        chmod(&file, mode).at(path)?;
    }
    Ok(file)
}

/// Replace a file as a whole: no reader ever sees a part of it.
fn replace(path: &[u8], mode: Option<u32>) -> Result<u64> {
    if path.ends_with(b"/") {
        return Err(Error::from(io::Error::from_raw_os_error(libc::EISDIR)).at(path));
    }
    let path = &resolve(path)?;
    let (parent, name) = Dir::parent_of(path).at(path)?;
    let old = match parent.stat(&name) {
        Ok(stat) => Some(stat),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => None,
        Err(e) => return Err(e).at(path),
    };
    if let Some(old) = &old {
        dir::regular(old).at(path)?;
    }
    let mut random = [0; 8];
    sys::random(&mut random);
    let temporary = dir::c(format!(".opendsec-{:016x}", u64::from_ne_bytes(random)).as_bytes())?;
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    let file = match parent.file(&temporary, flags, 0o600) {
        Ok(file) => file,
        Err(e) if old.is_some() && matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS)) => {
            // The folder is closed to this user, the file may be open.
            let mut file = in_place(path, mode)?;
            return receive(&mut file, path);
        }
        Err(e) => return Err(e).at(path),
    };
    let result = fill(file, path, old.as_ref(), mode).and_then(|(file, count)| {
        match parent.rename(&temporary, &parent, &name) {
            Ok(()) => Ok(count),
            // A file that is a mount point (as /etc/hosts often is) can only be written in place.
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => copy_over(file, path, mode).map(|()| count),
            Err(e) => Err(e).at(path),
        }
    });
    // After a rename there is nothing of this name.
    let _ = parent.unlink(&temporary, false);
    result
}

fn fill(mut file: File, path: &[u8], old: Option<&Stat>, mode: Option<u32>) -> Result<(File, u64)> {
    let count = receive(&mut file, path)?;
    if let Some(old) = old {
        // SAFETY: takes no pointers. Keeping the owner is not always allowed, and no failure then.
        unsafe { libc::fchown(file.as_raw_fd(), old.0.st_uid, old.0.st_gid) };
    }
    let mode = mode.or(old.map(Stat::mode)).unwrap_or(0o644);
    chmod(&file, mode).at(path)?;
    Ok((file, count))
}

fn copy_over(mut from: File, path: &[u8], mode: Option<u32>) -> Result<()> {
    from.seek(SeekFrom::Start(0)).at(path)?;
    let mut to = in_place(path, mode)?;
    copy(&mut from, &mut to).at(path)
}

/// Copy the rest of one file to another.
pub fn copy(from: &mut File, to: &mut File) -> io::Result<()> {
    let mut buf = vec![0; 128 * 1024];
    loop {
        match from.read(&mut buf) {
            Ok(0) => return Ok(()),
            Ok(n) => to.write_all(&buf[..n])?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}
