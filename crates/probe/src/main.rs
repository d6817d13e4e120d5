//! Static test program: runs inside sandboxes, needs nothing of the image, and says what it finds on stdout.
//!
//! `probe caps | fds | ids | signals | env | dumpable | try SYSCALL… | ioctl PATH NUMBER… | seize PID | eat MIB | spin MS
//! | output BYTES | forks N | hold MS`

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| args.get(at).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    match args.first().map(String::as_str) {
        Some("caps") => status_lines(&[
            "CapInh",
            "CapPrm",
            "CapEff",
            "CapBnd",
            "CapAmb",
            "NoNewPrivs",
            "Seccomp",
        ]),
        Some("signals") => status_lines(&["SigBlk", "SigIgn", "SigCgt"]),
        Some("ids") => status_lines(&["Uid", "Gid", "Groups", "Pid", "PPid"]),
        Some("fds") => open_descriptors(),
        Some("env") => std::env::vars_os().for_each(|(key, value)| println!("{key:?}={value:?}")),
        Some("dumpable") => println!("{}", dumpable()),
        Some("try") => args[1..].iter().for_each(|name| try_syscall(name)),
        Some("ioctl") => args[2..].iter().for_each(|number| try_ioctl(&args[1], number)),
        Some("seize") => println!("seize {}", seize(number(1))),
        Some("eat") => eat(number(1)),
        Some("spin") => spin(number(1)),
        Some("output") => output(number(1)),
        Some("forks") => println!("{}", forks(number(1))),
        Some("hold") => std::thread::sleep(Duration::from_millis(number(1))),
        _ => {
            eprintln!("probe: unknown question");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

fn status_lines(keys: &[&str]) {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    for line in text.lines() {
        if keys.iter().any(|key| line.starts_with(&format!("{key}:"))) {
            println!("{line}");
        }
    }
}

/// One line for each descriptor that is open, without opening any.
fn open_descriptors() {
    for fd in 0..4096 {
        // SAFETY: asking for the flags of any number is harmless.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0 {
            println!("{fd}");
        }
    }
}

fn dumpable() -> i32 {
    // SAFETY: takes no pointers.
    unsafe { libc::prctl(libc::PR_GET_DUMPABLE) }
}

/// Make a system call with harmless arguments and tell its error number.
fn try_syscall(name: &str) {
    let number = match name {
        "bpf" => libc::SYS_bpf,
        "keyctl" => libc::SYS_keyctl,
        "userfaultfd" => libc::SYS_userfaultfd,
        "perf_event_open" => libc::SYS_perf_event_open,
        "mount" => libc::SYS_mount,
        "fsopen" => libc::SYS_fsopen,
        "open_tree" => libc::SYS_open_tree,
        "kexec_load" => libc::SYS_kexec_load,
        "io_uring_setup" => libc::SYS_io_uring_setup,
        "init_module" => libc::SYS_init_module,
        "ptrace" => libc::SYS_ptrace,
        "unshare" => libc::SYS_unshare,
        "setns" => libc::SYS_setns,
        "openat2" => libc::SYS_openat2,
        "clone3" => libc::SYS_clone3,
        _ => {
            println!("{name} unknown");
            return;
        }
    };
    // SAFETY: all pointers are null or the descriptors invalid, so that no call can do anything.
    let result = unsafe { libc::syscall(number, -1, 0, 0, 0, 0) };
    println!("{name} {}", error_number(result));
}

fn error_number(result: i64) -> i32 {
    if result < 0 {
        std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
    } else {
        0
    }
}

/// Ask a file for an ioctl by its hexadecimal number, without an argument, and tell the error number.
fn try_ioctl(path: &str, number: &str) {
    let Ok(file) = std::fs::File::open(path) else {
        println!("{number} unopened");
        return;
    };
    let request = u64::from_str_radix(number.trim_start_matches("0x"), 16).unwrap_or(0);
    // SAFETY: the null argument makes every request fail that would read or write memory.
    let result = unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&file), request as _, 0) };
    println!("{number} {}", error_number(i64::from(result)));
}

/// Begin to trace a process and tell the error number.
fn seize(pid: u64) -> i32 {
    // SAFETY: PTRACE_SEIZE takes no pointers.
    error_number(unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid as libc::pid_t, 0, 0) })
}

/// Touch memory, then wait to be killed.
fn eat(mib: u64) {
    let mut all = Vec::new();
    for _ in 0..mib {
        all.push(vec![1u8; 1 << 20]);
    }
    println!("{}", all.len());
}

fn spin(ms: u64) {
    let end = Instant::now() + Duration::from_millis(ms);
    while Instant::now() < end {}
}

fn output(mut bytes: u64) {
    let block = [b'x'; 65536];
    let mut out = std::io::stdout().lock();
    while bytes > 0 {
        let step = bytes.min(block.len() as u64);
        if out.write_all(&block[..step as usize]).is_err() {
            return;
        }
        bytes -= step;
    }
    let _ = out.flush();
}

/// Fork sleeping children and tell how many could be made; they end with this process' session.
fn forks(count: u64) -> u64 {
    for made in 0..count {
        // SAFETY: the child only sleeps and ends.
        unsafe {
            match libc::fork() {
                -1 => return made,
                0 => {
                    libc::sleep(1000);
                    libc::_exit(0);
                }
                _ => {}
            }
        }
    }
    count
}
