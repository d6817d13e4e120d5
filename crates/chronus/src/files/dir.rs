//! Directories by descriptor, so that nothing can be swapped for a symbolic link on the way.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use chronus_proto::msgpack;

use super::{At, Result};
use crate::sys::{self, check};

/// What is known of a file.
pub struct Stat(pub libc::stat);

impl Stat {
    /// Type bits.
    pub fn kind(&self) -> u32 {
        self.0.st_mode & libc::S_IFMT
    }

    /// Permission bits.
    pub fn mode(&self) -> u32 {
        self.0.st_mode & 0o7777
    }

    /// It is a directory.
    pub fn is_dir(&self) -> bool {
        self.kind() == libc::S_IFDIR
    }

    /// It is a regular file.
    pub fn is_file(&self) -> bool {
        self.kind() == libc::S_IFREG
    }

    /// It is a symbolic link.
    pub fn is_link(&self) -> bool {
        self.kind() == libc::S_IFLNK
    }

    /// Append it as an entry of the protocol.
    pub fn put(&self, out: &mut Vec<u8>, path: &[u8], target: Option<&[u8]>) {
        let number = match self.kind() {
            libc::S_IFDIR => 1,
            libc::S_IFLNK => 2,
            libc::S_IFIFO => 3,
            libc::S_IFSOCK => 4,
            libc::S_IFCHR => 5,
            libc::S_IFBLK => 6,
            _ => 0,
        };
        msgpack::put_array(out, 8);
        msgpack::put_bin(out, path);
        msgpack::put_uint(out, number);
        msgpack::put_uint(out, self.0.st_size as u64);
        msgpack::put_uint(out, u64::from(self.mode()));
        msgpack::put_uint(out, u64::from(self.0.st_uid));
        msgpack::put_uint(out, u64::from(self.0.st_gid));
        msgpack::put_f64(out, self.0.st_mtime as f64 + self.0.st_mtime_nsec as f64 / 1e9);
        match target {
            Some(target) => msgpack::put_bin(out, target),
            None => msgpack::put_nil(out),
        }
    }
}

/// Turn bytes into a C string; the caller has refused NUL bytes.
pub fn c(path: &[u8]) -> io::Result<CString> {
    CString::new(path).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// An open directory.
pub struct Dir(pub OwnedFd);

impl Dir {
    /// Open a directory by path, following symbolic links.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn open(path: &[u8]) -> io::Result<Dir> {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY;
        sys::open_at(libc::AT_FDCWD, &c(path)?, flags, 0).map(Dir)
    }

    /// Open the directory that holds the last part of `path`, and return it with that part.
    ///
    /// # Errors
    /// As the kernel has it, or `path` does not name an entry.
    pub fn parent_of(path: &[u8]) -> io::Result<(Dir, CString)> {
        let trimmed = match path.iter().rposition(|b| *b != b'/') {
            Some(last) => &path[..=last],
            None => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
        };
        let (parent, name) = match trimmed.iter().rposition(|b| *b == b'/') {
            Some(slash) => (&trimmed[..=slash], &trimmed[slash + 1..]),
            None => (&b"."[..], trimmed),
        };
        if name == b"." || name == b".." {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // Search permission is enough.
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        let parent = sys::open_at(libc::AT_FDCWD, &c(parent)?, flags, 0)?;
        Ok((Dir(parent), c(name)?))
    }

    /// Open a directory in this one, not through a symbolic link.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn child(&self, name: &CStr) -> io::Result<Dir> {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
        sys::open_at(self.0.as_raw_fd(), name, flags, 0).map(Dir)
    }

    /// Open a file in this directory, not through a symbolic link and without waiting.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn file(&self, name: &CStr, flags: i32, mode: u32) -> io::Result<File> {
        let flags = flags | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        sys::open_at(self.0.as_raw_fd(), name, flags, mode).map(File::from)
    }

    /// Names in it, sorted.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn names(&self) -> io::Result<Vec<CString>> {
        let mut names = Vec::new();
        // SAFETY: takes no pointers.
        check(unsafe { libc::lseek(self.0.as_raw_fd(), 0, libc::SEEK_SET) })?;
        sys::read_dir(&self.0, |entry| -> io::Result<()> {
            names.push(entry.name);
            Ok(())
        })?;
        names.sort_unstable();
        Ok(names)
    }

    /// Describe an entry, not following a symbolic link.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn stat(&self, name: &CStr) -> io::Result<Stat> {
        // SAFETY: a zeroed stat is valid, `name` ends with NUL.
        unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            let flags = libc::AT_SYMLINK_NOFOLLOW;
            check(libc::fstatat(self.0.as_raw_fd(), name.as_ptr(), &mut stat, flags).into())?;
            Ok(Stat(stat))
        }
    }

    /// Describe the directory itself.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn stat_self(&self) -> io::Result<Stat> {
        stat_fd(&self.0)
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn read_link(&self, name: &CStr) -> io::Result<Vec<u8>> {
        let mut buf = vec![0u8; 4096];
        // SAFETY: `buf` is valid for its length, `name` ends with NUL.
        let n = unsafe { libc::readlinkat(self.0.as_raw_fd(), name.as_ptr(), buf.as_mut_ptr().cast(), buf.len()) };
        buf.truncate(check(n as _)? as usize);
        Ok(buf)
    }

    /// Remove an entry; `dir` says what it is.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn unlink(&self, name: &CStr, dir: bool) -> io::Result<()> {
        let flags = if dir { libc::AT_REMOVEDIR } else { 0 };
        // SAFETY: `name` ends with NUL.
        check(unsafe { libc::unlinkat(self.0.as_raw_fd(), name.as_ptr(), flags) }.into()).map(|_| ())
    }

    /// Make a directory.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn mkdir(&self, name: &CStr, mode: u32) -> io::Result<()> {
        // SAFETY: `name` ends with NUL.
        check(unsafe { libc::mkdirat(self.0.as_raw_fd(), name.as_ptr(), mode) }.into()).map(|_| ())
    }

    /// Make a symbolic link.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn symlink(&self, target: &CStr, name: &CStr) -> io::Result<()> {
        // SAFETY: both end with NUL.
        check(unsafe { libc::symlinkat(target.as_ptr(), self.0.as_raw_fd(), name.as_ptr()) }.into()).map(|_| ())
    }

    /// Make a FIFO or a device node.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn mknod(&self, name: &CStr, mode: u32, device: u64) -> io::Result<()> {
        // SAFETY: `name` ends with NUL.
        check(unsafe { libc::mknodat(self.0.as_raw_fd(), name.as_ptr(), mode, device) }.into()).map(|_| ())
    }

    /// Make a hard link to an entry of another directory, not following a symbolic link.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn link(&self, name: &CStr, from: &Dir, source: &CStr) -> io::Result<()> {
        // SAFETY: both names end with NUL.
        check(
            unsafe {
                libc::linkat(
                    from.0.as_raw_fd(),
                    source.as_ptr(),
                    self.0.as_raw_fd(),
                    name.as_ptr(),
                    0,
                )
            }
            .into(),
        )
        .map(|_| ())
    }

    /// Move an entry to another directory.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn rename(&self, name: &CStr, to: &Dir, target: &CStr) -> io::Result<()> {
        // SAFETY: both names end with NUL.
        check(unsafe { libc::renameat(self.0.as_raw_fd(), name.as_ptr(), to.0.as_raw_fd(), target.as_ptr()) }.into())
            .map(|_| ())
    }

    /// Set permission bits of an entry that is no symbolic link.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn chmod(&self, name: &CStr, mode: u32) -> io::Result<()> {
        // SAFETY: `name` ends with NUL.
        check(unsafe { libc::fchmodat(self.0.as_raw_fd(), name.as_ptr(), mode, 0) }.into()).map(|_| ())
    }

    /// Set the owner of an entry, not following a symbolic link.
    ///
    /// # Errors
    /// As the kernel has it.
    pub fn chown(&self, name: &CStr, uid: u32, gid: u32) -> io::Result<()> {
        let flags = libc::AT_SYMLINK_NOFOLLOW;
        // SAFETY: `name` ends with NUL.
        check(unsafe { libc::fchownat(self.0.as_raw_fd(), name.as_ptr(), uid, gid, flags) }.into()).map(|_| ())
    }

    /// Set the modification time of an entry, not following a symbolic link.
    pub fn set_mtime(&self, name: &CStr, seconds: i64, nanos: i64) {
        let times = [
            libc::timespec {
                tv_sec: 0,
                tv_nsec: libc::UTIME_OMIT,
            },
            libc::timespec {
                tv_sec: seconds,
                tv_nsec: nanos,
            },
        ];
        let flags = libc::AT_SYMLINK_NOFOLLOW;
        // SAFETY: `times` has two elements, `name` ends with NUL. A time that cannot be set is no failure.
        unsafe { libc::utimensat(self.0.as_raw_fd(), name.as_ptr(), times.as_ptr(), flags) };
    }
}

/// Describe an open file.
///
/// # Errors
/// As the kernel has it.
pub fn stat_fd(fd: &impl AsRawFd) -> io::Result<Stat> {
    // SAFETY: a zeroed stat is valid.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        check(libc::fstat(fd.as_raw_fd(), &mut stat).into())?;
        Ok(Stat(stat))
    }
}

/// Open a regular file by path, following symbolic links; devices and FIFOs are never opened.
///
/// # Errors
/// As the kernel has it, or it is no regular file.
pub fn open_regular(path: &[u8], flags: i32, mode: u32) -> Result<File> {
    let text = c(path)?;
    // SAFETY: a zeroed stat is valid, `text` ends with NUL.
    let found = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        check(libc::stat(text.as_ptr(), &mut stat).into()).map(|_| Stat(stat))
    };
    match found {
        Ok(stat) => regular(&stat).at(path)?,
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) && flags & libc::O_CREAT != 0 => {}
        Err(e) => return Err(e).at(path),
    }
    let flags = flags | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = File::from(sys::open_at(libc::AT_FDCWD, &text, flags, mode).at(path)?);
    regular(&stat_fd(&file).at(path)?).at(path)?;
    Ok(file)
}

/// Refuse what is no regular file.
pub fn regular(stat: &Stat) -> Result<()> {
    if stat.is_file() {
        return Ok(());
    }
    if stat.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR).into());
    }
    Err(super::Error::invalid("not a regular file"))
}
