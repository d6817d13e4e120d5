//! Unpack a tar, never outside its target.
//!
//! Every member's directory is looked up below the target by the kernel (`openat2`, `RESOLVE_BENEATH`), so no symbolic
//! link that the archive or the workload has placed leads out, not even in a race.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::dir::{c, Dir};
use super::tar_format::{self, Header, Kind, Member, Overrides, BLOCK};
use super::trees::MAX_DEPTH;
use super::{Answer, At, Error, Input, Result};
use crate::sys::check;

/// Longest name of a member.
const MAX_NAME: usize = 16 * 1024;

struct Unpacker {
    input: Input,
    root: Dir,
    /// Directory of the member before, by name.
    last: Option<(Vec<u8>, Dir)>,
    /// Directories whose mode and time are set at the end, when nothing is put into them any more.
    later: Vec<Member>,
    is_root: bool,
    buf: Vec<u8>,
}

/// Receive a tree and unpack it below `path`, which is made if it is missing.
pub fn unpack(path: &[u8]) -> Result<Answer> {
    super::trees::mkdir(path, 0o755, true)?;
    let mut unpacker = Unpacker {
        input: Input::default(),
        root: Dir::open(path).at(path)?,
        last: None,
        later: Vec::new(),
        is_root: crate::sys::euid() == 0,
        buf: vec![0; 64 * 1024],
    };
    unpacker.run()?;
    Ok(Answer::Done)
}

fn refused(member: &Member, why: &str) -> Error {
    Error::invalid(why).at(&member.path)
}

/// Cut a member's name into parts; `None` if it is absolute or climbs.
fn parts(path: &[u8]) -> Option<Vec<&[u8]>> {
    if path.starts_with(b"/") || path.contains(&0) {
        return None;
    }
    let parts: Vec<&[u8]> = path
        .split(|b| *b == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
        .collect();
    (!parts.iter().any(|part| *part == b"..")).then_some(parts)
}

impl Unpacker {
    fn fill(&mut self, len: usize) -> Result<()> {
        let mut have = 0;
        while have < len {
            match self.input.some(&mut self.buf[have..len])? {
                0 => return Err(Error::invalid("the archive ends in the middle of a member")),
                n => have += n,
            }
        }
        Ok(())
    }

    fn block(&mut self) -> Result<Option<[u8; BLOCK]>> {
        let mut block = [0; BLOCK];
        let mut have = 0;
        while have < BLOCK {
            match self.input.some(&mut block[have..])? {
                0 if have == 0 => return Ok(None),
                0 => return Err(Error::invalid("the archive ends in the middle of a block")),
                n => have += n,
            }
        }
        Ok(Some(block))
    }

    fn extension(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > tar_format::MAX_EXTENDED {
            return Err(Error::invalid("an extended header is too large"));
        }
        let mut content = Vec::new();
        let mut left = size as usize;
        while left > 0 {
            let step = left.min(self.buf.len());
            self.fill(step)?;
            content.extend_from_slice(&self.buf[..step]);
            left -= step;
        }
        self.fill(tar_format::padding(size))?;
        Ok(content)
    }

    fn run(&mut self) -> Result<()> {
        let mut overrides = Overrides::default();
        while let Some(block) = self.block()? {
            match tar_format::parse(&block).map_err(Error::invalid)? {
                Header::Extended(size, global) => {
                    let records = self.extension(size)?;
                    let mut ignored = Overrides::default();
                    let target = if global { &mut ignored } else { &mut overrides };
                    target.read(&records).map_err(Error::invalid)?;
                }
                Header::LongName(size) => overrides.path = Some(until_nul(self.extension(size)?)),
                Header::LongLink(size) => overrides.link = Some(until_nul(self.extension(size)?)),
                Header::Member(mut member) => {
                    std::mem::take(&mut overrides).apply(&mut member);
                    self.member(member)?;
                }
                Header::End => break,
            }
        }
        // The second empty block, and what some programs fill up their last record with.
        while self.input.some(&mut self.buf)? > 0 {}
        self.last = None;
        for member in std::mem::take(&mut self.later).into_iter().rev() {
            self.finish_dir(&member)?;
        }
        Ok(())
    }

    /// Open a directory below the root, making what is missing.
    fn directory(&self, parts: &[&[u8]]) -> io::Result<Dir> {
        let whole = if parts.is_empty() {
            b".".to_vec()
        } else {
            parts.join(&b'/')
        };
        match self.beneath(&whole) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) && !parts.is_empty() => {
                let parent = self.directory(&parts[..parts.len() - 1])?;
                match parent.mkdir(&c(parts[parts.len() - 1])?, 0o755) {
                    Err(e) if e.raw_os_error() != Some(libc::EEXIST) => Err(e),
                    _ => self.beneath(&whole),
                }
            }
            other => other,
        }
    }

    fn beneath(&self, path: &[u8]) -> io::Result<Dir> {
        #[repr(C)]
        struct How {
            flags: u64,
            mode: u64,
            resolve: u64,
        }
        const RESOLVE: u64 = 0x08 | 0x02; // RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS
        let how = How {
            flags: (libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC) as u64,
            mode: 0,
            resolve: RESOLVE,
        };
        let text = c(path)?;
        // SAFETY: `text` ends with NUL, `how` has the size that is told.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_openat2,
                self.root.0.as_raw_fd(),
                text.as_ptr(),
                &raw const how,
                std::mem::size_of::<How>(),
            )
        };
        match check(fd) {
            // SAFETY: the kernel has just returned this descriptor.
            Ok(fd) => Ok(Dir(unsafe { OwnedFd::from_raw_fd(fd as i32) })),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => self.without_links(path),
            Err(e) => Err(e),
        }
    }

    /// Where the kernel has no `openat2`: part by part, through no symbolic link at all.
    fn without_links(&self, path: &[u8]) -> io::Result<Dir> {
        let mut dir = self.root.child(c".")?;
        for part in path.split(|b| *b == b'/') {
            dir = dir.child(&c(part)?)?;
        }
        Ok(dir)
    }

    fn member(&mut self, member: Member) -> Result<()> {
        let Some(parts) = parts(&member.path) else {
            return Err(refused(&member, "the name leads out of the target"));
        };
        if member.path.len() > MAX_NAME || parts.len() > MAX_DEPTH {
            return Err(refused(&member, "the name is too long"));
        }
        let Some((name, above)) = parts.split_last() else {
            // The root of the archive: its mode and time are those of the target.
            if member.kind != Kind::Dir {
                return Err(refused(&member, "the member has no name"));
            }
            self.later.push(member);
            return Ok(());
        };
        let above_name = above.join(&b'/');
        if self.last.as_ref().is_none_or(|(last, _)| *last != above_name) {
            let dir = self.directory(above).map_err(|e| self.leads_out(&member, e))?;
            self.last = Some((above_name, dir));
        }
        let name = c(name).at(&member.path)?;
        let Some((_, dir)) = self.last.take() else {
            return Ok(());
        };
        let result = self.place(&dir, &name, &member);
        self.last = Some((above.join(&b'/'), dir));
        result?;
        if member.kind == Kind::Dir {
            self.last = None;
            self.later.push(member);
        }
        Ok(())
    }

    fn leads_out(&self, member: &Member, error: io::Error) -> Error {
        match error.raw_os_error() {
            Some(libc::EXDEV | libc::ELOOP) => refused(member, "a symbolic link leads out of the target"),
            _ => Error::from(error).at(&member.path),
        }
    }

    /// Make one entry in the directory that holds it.
    fn place(&mut self, dir: &Dir, name: &CString, member: &Member) -> Result<()> {
        let path = &member.path;
        if member.kind == Kind::Dir {
            return self.place_dir(dir, name, member);
        }
        match dir.stat(name) {
            // Never written through: a new file takes the name.
            Ok(stat) => dir.unlink(name, stat.is_dir()).at(path)?,
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {}
            Err(e) => return Err(e).at(path),
        }
        match member.kind {
            Kind::File => return self.place_file(dir, name, member),
            Kind::HardLink => return self.place_link(dir, name, member),
            Kind::SymLink => {
                let target = c(&member.link).map_err(|_| refused(member, "the target contains a NUL byte"))?;
                dir.symlink(&target, name).at(path)?;
            }
            Kind::Fifo => dir.mknod(name, libc::S_IFIFO | 0o600, 0).at(path)?,
            Kind::Char | Kind::Block => {
                let kind = if member.kind == Kind::Char {
                    libc::S_IFCHR
                } else {
                    libc::S_IFBLK
                };
                let device = libc::makedev(member.device.0, member.device.1);
                dir.mknod(name, kind | 0o600, device).at(path)?;
            }
            Kind::Dir => {}
        }
        self.own(dir, name, member);
        if member.kind != Kind::SymLink {
            dir.chmod(name, member.mode).at(path)?;
        }
        dir.set_mtime(name, member.mtime.0, member.mtime.1);
        Ok(())
    }

    fn own(&self, dir: &Dir, name: &CString, member: &Member) {
        if self.is_root {
            // As tar does for root; a kernel that refuses it (no such id here) leaves root as owner.
            let _ = dir.chown(name, member.uid as u32, member.gid as u32);
        }
    }

    fn place_dir(&self, dir: &Dir, name: &CString, member: &Member) -> Result<()> {
        let path = &member.path;
        match dir.mkdir(name, 0o700) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {
                let stat = dir.stat(name).at(path)?;
                if stat.is_link() {
                    // A link to a directory below the target stays.
                    let parts = parts(path).unwrap_or_default();
                    self.beneath(&parts.join(&b'/'))
                        .map_err(|e| self.leads_out(member, e))?;
                } else if !stat.is_dir() {
                    dir.unlink(name, false).at(path)?;
                    dir.mkdir(name, 0o700).at(path)?;
                }
            }
            Err(e) => return Err(e).at(path),
        }
        Ok(())
    }

    fn place_file(&mut self, dir: &Dir, name: &CString, member: &Member) -> Result<()> {
        let path = &member.path;
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
        let mut file: File = dir.file(name, flags, 0o600).at(path)?;
        let mut left = member.size;
        while left > 0 {
            let step = left.min(self.buf.len() as u64) as usize;
            self.fill(step)?;
            file.write_all(&self.buf[..step]).at(path)?;
            left -= step as u64;
        }
        self.fill(tar_format::padding(member.size))?;
        self.own(dir, name, member);
        dir.chmod(name, member.mode).at(path)?;
        drop(file);
        dir.set_mtime(name, member.mtime.0, member.mtime.1);
        Ok(())
    }

    fn place_link(&self, dir: &Dir, name: &CString, member: &Member) -> Result<()> {
        let target = parts(&member.link).filter(|parts| !parts.is_empty());
        let Some((last, above)) = target.as_deref().and_then(<[_]>::split_last) else {
            return Err(refused(member, "the link leads out of the target"));
        };
        let whole = if above.is_empty() {
            b".".to_vec()
        } else {
            above.join(&b'/')
        };
        let from = self.beneath(&whole).map_err(|e| self.leads_out(member, e))?;
        dir.link(name, &from, &c(last).at(&member.path)?).at(&member.path)
    }

    fn finish_dir(&self, member: &Member) -> Result<()> {
        let parts = parts(&member.path).unwrap_or_default();
        let whole = if parts.is_empty() {
            b".".to_vec()
        } else {
            parts.join(&b'/')
        };
        let dir = match self.beneath(&whole) {
            Ok(dir) => dir,
            // A later member has replaced it.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => return Ok(()),
            Err(e) => return Err(self.leads_out(member, e)),
        };
        self.own(&dir, &CString::from(c"."), member);
        dir.chmod(c".", member.mode).at(&member.path)?;
        dir.set_mtime(c".", member.mtime.0, member.mtime.1);
        Ok(())
    }
}

fn until_nul(mut text: Vec<u8>) -> Vec<u8> {
    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    text.truncate(end);
    text
}
