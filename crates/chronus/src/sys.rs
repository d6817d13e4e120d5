//! System calls as safe functions. All `unsafe` of the event loop is here.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use libc::{c_int, c_long, c_void};

/// Process id.
pub type Pid = libc::pid_t;

/// Turn a system call's return value into a result.
pub fn check(value: c_long) -> io::Result<c_long> {
    if value < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(value)
    }
}

fn check_int(value: c_int) -> io::Result<c_int> {
    check(c_long::from(value)).map(|v| v as c_int)
}

fn own(fd: c_int) -> io::Result<OwnedFd> {
    let fd = check_int(fd)?;
    // SAFETY: the kernel has just returned this descriptor and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Take ownership of an inherited descriptor.
pub fn adopt(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl on any number is harmless.
    check_int(unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    own(fd)
}

/// Monotonic time in nanoseconds.
pub fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Make a pipe (read end, write end), close-on-exec.
pub fn pipe(flags: c_int) -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: `fds` has room for two descriptors.
    check_int(unsafe { libc::pipe2(fds.as_mut_ptr(), flags | libc::O_CLOEXEC) })?;
    Ok((own(fds[0])?, own(fds[1])?))
}

/// Switch a descriptor to non-blocking.
pub fn set_nonblocking(fd: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: the descriptor is open.
    check_int(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) })?;
    Ok(())
}

/// Read into `buf`.
pub fn read(fd: &impl AsRawFd, buf: &mut [u8]) -> io::Result<usize> {
    // SAFETY: `buf` is valid for writing its length.
    let n = unsafe { libc::read(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len()) };
    check(n as c_long).map(|n| n as usize)
}

/// Write from `buf`.
pub fn write(fd: &impl AsRawFd, buf: &[u8]) -> io::Result<usize> {
    // SAFETY: `buf` is valid for reading its length.
    let n = unsafe { libc::write(fd.as_raw_fd(), buf.as_ptr().cast(), buf.len()) };
    check(n as c_long).map(|n| n as usize)
}

/// Bytes that wait in a pipe.
pub fn bytes_waiting(fd: &impl AsRawFd) -> u64 {
    let mut count: c_int = 0;
    // SAFETY: FIONREAD writes one int.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD as _, &mut count) };
    if result < 0 {
        0
    } else {
        count as u64
    }
}

/// Accept a connection, non-blocking and close-on-exec.
pub fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: no address is asked for.
    own(unsafe {
        libc::accept4(
            listener.as_raw_fd(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
        )
    })
}

/// Process and user id of the peer of a Unix socket, as seen from here.
pub fn peer(socket: &OwnedFd) -> io::Result<(Pid, u32)> {
    let mut cred = libc::ucred {
        pid: -1,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len = std::mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` and `len` are valid and match each other.
    check_int(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &mut len,
        )
    })?;
    Ok((cred.pid, cred.uid))
}

/// Events of one epoll instance.
pub struct Poll {
    fd: OwnedFd,
}

/// One event: token and flags.
pub type Event = libc::epoll_event;

impl Poll {
    /// Make an instance.
    pub fn new() -> io::Result<Poll> {
        // SAFETY: takes no pointers.
        let fd = own(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        Ok(Poll { fd })
    }

    fn control(&self, op: c_int, fd: RawFd, events: c_int, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: events as u32,
            u64: token,
        };
        // SAFETY: `event` is valid.
        check_int(unsafe { libc::epoll_ctl(self.fd.as_raw_fd(), op, fd, &mut event) })?;
        Ok(())
    }

    /// Watch a descriptor.
    pub fn add(&self, fd: &impl AsRawFd, events: c_int, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd.as_raw_fd(), events, token)
    }

    /// Change what a descriptor is watched for.
    pub fn modify(&self, fd: &impl AsRawFd, events: c_int, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd.as_raw_fd(), events, token)
    }

    /// Watch a descriptor no more.
    pub fn remove(&self, fd: &impl AsRawFd) {
        let _ = self.control(libc::EPOLL_CTL_DEL, fd.as_raw_fd(), 0, 0);
    }

    /// Wait for events; `timeout_ms` of -1 waits for ever. An interruption counts as no events.
    pub fn wait<'a>(&self, events: &'a mut [Event], timeout_ms: c_int) -> &'a [Event] {
        // SAFETY: `events` is valid for writing its length.
        let n = unsafe {
            libc::epoll_wait(
                self.fd.as_raw_fd(),
                events.as_mut_ptr(),
                events.len() as c_int,
                timeout_ms,
            )
        };
        &events[..n.max(0) as usize]
    }
}

/// Block all signals and return a descriptor that reports SIGCHLD.
pub fn child_signals() -> io::Result<OwnedFd> {
    // SAFETY: a zeroed sigset_t is valid and is then filled by the calls.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    let mut child = all;
    // SAFETY: the sets are valid; the mask of this only thread is replaced.
    unsafe {
        libc::sigfillset(&mut all);
        check_int(libc::sigprocmask(libc::SIG_SETMASK, &all, std::ptr::null_mut()))?;
        libc::sigemptyset(&mut child);
        libc::sigaddset(&mut child, libc::SIGCHLD);
        own(libc::signalfd(-1, &child, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))
    }
}

/// In a child: default action for SIGPIPE (all others are at their default) and an empty mask.
pub fn reset_signals() {
    // SAFETY: a zeroed set is empty after sigemptyset; no handler is installed.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
    }
}

/// Fork without libc's handlers: this process has one thread, so the child may run any code.
pub fn fork() -> io::Result<Pid> {
    // SAFETY: plain fork semantics; there are no other threads whose locks could be held.
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD as c_long, 0, 0, 0, 0) };
    check(pid).map(|pid| pid as Pid)
}

/// End this process at once.
pub fn exit(code: c_int) -> ! {
    // SAFETY: does not return.
    unsafe { libc::_exit(code) }
}

/// A child that has ended.
pub struct Reaped {
    /// Its process id.
    pub pid: Pid,
    /// Its exit code if it exited.
    pub code: Option<c_int>,
    /// The signal that ended it, or 0.
    pub signal: c_int,
    /// User and system time in microseconds.
    pub cpu_us: u64,
    /// Largest resident set in bytes.
    pub peak_bytes: u64,
}

/// Reap one child that has ended.
pub fn reap() -> Option<Reaped> {
    let mut status: c_int = 0;
    // SAFETY: a zeroed rusage is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are valid.
    let pid = unsafe { libc::wait4(-1, &mut status, libc::WNOHANG, &mut usage) };
    if pid <= 0 {
        return None;
    }
    let micros = |t: libc::timeval| t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64;
    let exited = libc::WIFEXITED(status);
    Some(Reaped {
        pid,
        code: exited.then(|| libc::WEXITSTATUS(status)),
        signal: if exited { 0 } else { libc::WTERMSIG(status) },
        cpu_us: micros(usage.ru_utime) + micros(usage.ru_stime),
        peak_bytes: usage.ru_maxrss as u64 * 1024,
    })
}

/// Send a signal.
pub fn kill(pid: Pid, signal: c_int) -> io::Result<()> {
    // SAFETY: takes no pointers.
    check_int(unsafe { libc::kill(pid, signal) })?;
    Ok(())
}

/// Session of a process.
pub fn session_of(pid: Pid) -> Option<Pid> {
    // SAFETY: takes no pointers.
    let sid = unsafe { libc::getsid(pid) };
    (sid > 0).then_some(sid)
}

/// Effective user id of this process.
pub fn euid() -> u32 {
    // SAFETY: cannot fail.
    unsafe { libc::geteuid() }
}

/// Become the leader of a new session.
pub fn new_session() {
    // SAFETY: takes no pointers.
    unsafe { libc::setsid() };
}

/// Let `target` be a copy of `fd`; `cloexec` closes it on exec.
pub fn dup_to(fd: RawFd, target: RawFd, cloexec: bool) -> io::Result<()> {
    if fd == target {
        let flags = if cloexec { libc::FD_CLOEXEC } else { 0 };
        // SAFETY: the descriptor is open.
        return check_int(unsafe { libc::fcntl(fd, libc::F_SETFD, flags) }).map(|_| ());
    }
    let flags = if cloexec { libc::O_CLOEXEC } else { 0 };
    // SAFETY: takes no pointers.
    check_int(unsafe { libc::dup3(fd, target, flags) }).map(|_| ())
}

/// Close all descriptors from `first` on.
pub fn close_from(first: u32) {
    // SAFETY: only used in children, whose owners of these descriptors are never dropped.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
    if done != 0 {
        for fd in first..4096 {
            // SAFETY: as above.
            unsafe { libc::close(fd as c_int) };
        }
    }
}

/// Set groups, group and user of this process (all three ids of each).
pub fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    // SAFETY: `groups` is valid for its length.
    unsafe {
        check_int(libc::setgroups(groups.len(), groups.as_ptr()))?;
        check_int(libc::setresgid(gid, gid, gid))?;
        check_int(libc::setresuid(uid, uid, uid))?;
    }
    Ok(())
}

/// Number of supplementary groups of this process.
pub fn group_count() -> usize {
    // SAFETY: a size of 0 writes nothing.
    unsafe { libc::getgroups(0, std::ptr::null_mut()) }.max(0) as usize
}

/// Run `f` with the file system ids of another user: enough to look at its processes.
pub fn with_fs_ids<T>(uid: u32, gid: u32, f: impl FnOnce() -> T) -> T {
    // SAFETY: take no pointers; the ids are restored below.
    let old = unsafe { (libc::setfsgid(gid), libc::setfsuid(uid)) };
    let result = f();
    // SAFETY: as above.
    unsafe {
        libc::setfsuid(old.1 as u32);
        libc::setfsgid(old.0 as u32);
    }
    result
}

/// Change the working directory.
pub fn chdir(path: &CStr) -> io::Result<()> {
    // SAFETY: `path` ends with NUL.
    check_int(unsafe { libc::chdir(path.as_ptr()) }).map(|_| ())
}

/// Set a limit of this process.
pub fn set_rlimit(resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: soft,
        rlim_max: hard,
    };
    // SAFETY: `limit` is valid.
    check_int(unsafe { libc::setrlimit(resource as _, &limit) }).map(|_| ())
}

/// Raise the soft limit of open files to the hard one.
pub fn raise_files_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is valid.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// Replace this process; returns only the error. Both arrays end with a null pointer.
pub fn exec(path: &CStr, argv: &[*const libc::c_char], env: &[*const libc::c_char]) -> io::Error {
    debug_assert!(argv.last().is_some_and(|p| p.is_null()));
    debug_assert!(env.last().is_some_and(|p| p.is_null()));
    // SAFETY: `path` ends with NUL and both arrays hold pointers to such strings and end with null.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Call prctl with integers.
pub fn prctl(option: c_int, arg: u64, arg2: u64) -> io::Result<()> {
    // SAFETY: only options without pointers are used.
    check_int(unsafe { libc::prctl(option, arg, arg2, 0, 0) }).map(|_| ())
}

/// Set the file mode mask.
pub fn umask(mask: u32) {
    // SAFETY: cannot fail.
    unsafe { libc::umask(mask) };
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: c_int,
}

const CAP_VERSION_3: u32 = 0x2008_0522;

fn cap_call(number: c_long, data: &mut [CapData; 2]) -> io::Result<()> {
    let mut header = CapHeader {
        version: CAP_VERSION_3,
        pid: 0,
    };
    // SAFETY: version 3 reads or writes one header and two data structures.
    check(unsafe { libc::syscall(number, (&raw mut header).cast::<c_void>(), data.as_mut_ptr()) })?;
    Ok(())
}

/// Change the capability sets of this process: keep only `mask`, or with `None` only empty the inheritable set.
pub fn limit_caps(mask: Option<u64>) -> io::Result<()> {
    let mut data = [CapData::default(); 2];
    cap_call(libc::SYS_capget, &mut data)?;
    for (half, shift) in data.iter_mut().zip([0, 32]) {
        half.inheritable = 0;
        if let Some(mask) = mask {
            half.permitted &= (mask >> shift) as u32;
            half.effective &= (mask >> shift) as u32;
        }
    }
    cap_call(libc::SYS_capset, &mut data)
}

/// Random bytes.
pub fn random(buf: &mut [u8]) {
    // SAFETY: `buf` is valid for writing its length.
    unsafe { libc::getrandom(buf.as_mut_ptr().cast(), buf.len(), 0) };
}

/// Open relative to a directory descriptor.
pub fn open_at(dir: RawFd, path: &CStr, flags: c_int, mode: u32) -> io::Result<OwnedFd> {
    // SAFETY: `path` ends with NUL.
    own(unsafe { libc::openat(dir, path.as_ptr(), flags | libc::O_CLOEXEC, mode) })
}

/// An entry of a directory.
pub struct DirEntry {
    /// Name without path.
    pub name: std::ffi::CString,
}

/// Read all names of an open directory, except `.` and `..`, in the kernel's order; `each` may stop it by an error.
pub fn read_dir<E: From<io::Error>>(
    dir: &impl AsRawFd,
    mut each: impl FnMut(DirEntry) -> Result<(), E>,
) -> Result<(), E> {
    const NAME: usize = 19;
    let mut buf = vec![0u8; 16 * 1024];
    loop {
        // SAFETY: `buf` is valid for writing its length.
        let n = unsafe { libc::syscall(libc::SYS_getdents64, dir.as_raw_fd(), buf.as_mut_ptr(), buf.len()) };
        let n = check(n)? as usize;
        if n == 0 {
            return Ok(());
        }
        let mut records = &buf[..n];
        while records.len() > NAME {
            let len = usize::from(u16::from_ne_bytes([records[16], records[17]]));
            if len <= NAME || len > records.len() {
                break;
            }
            if let Ok(name) = CStr::from_bytes_until_nul(&records[NAME..len]) {
                if name != c"." && name != c".." {
                    each(DirEntry { name: name.to_owned() })?;
                }
            }
            records = &records[len..];
        }
    }
}

/// Owner of an open file: user and group.
pub fn owner(fd: &impl AsRawFd) -> Option<(u32, u32)> {
    // SAFETY: a zeroed stat is valid, and fstat fills it.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::fstat(fd.as_raw_fd(), &mut stat) == 0).then_some((stat.st_uid, stat.st_gid))
    }
}

/// Size of an open file if it is a regular one.
pub fn regular_size(fd: &impl AsRawFd) -> Option<u64> {
    // SAFETY: a zeroed stat is valid, and fstat fills it.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let found = libc::fstat(fd.as_raw_fd(), &mut stat) == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFREG;
        found.then_some(stat.st_size as u64)
    }
}
