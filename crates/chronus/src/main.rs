//! Process 1 of every sandbox: starts commands, reaps, serves files, speaks the chronus protocol.
//!
//! One thread, one poll loop, no waiting anywhere else; what may take long runs in a forked helper.
//! `chronus [--tools DIR] [--child-caps HEX] [--filter] [--allow-any-peer]`, with a listening Unix socket as descriptor 3
//! and, with `--filter`, a compiled system call filter as descriptor 4.

mod config;
mod conn;
mod exec;
mod files;
mod filter;
mod ops;
mod server;
mod signals;
mod spawn;
mod sys;
mod tree;
mod user;

use std::os::fd::AsRawFd;
use std::process::ExitCode;

use config::Config;

const LISTENER: i32 = 3;

struct Arguments {
    tools: String,
    any_peer: bool,
    child_caps: Option<u64>,
    filter: bool,
}

fn arguments() -> Result<Arguments, String> {
    let mut parsed = Arguments {
        tools: "/.opendsec".into(),
        any_peer: false,
        child_caps: None,
        filter: false,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--allow-any-peer" => parsed.any_peer = true,
            "--filter" => parsed.filter = true,
            "--tools" => parsed.tools = args.next().ok_or("--tools needs a directory")?,
            "--child-caps" => {
                let text = args.next().ok_or("--child-caps needs a mask")?;
                let digits = text.trim_start_matches("0x");
                let mask = u64::from_str_radix(digits, 16).map_err(|_| "--child-caps needs a hexadecimal mask")?;
                parsed.child_caps = Some(mask);
            }
            "--version" => {
                println!("chronus {}", env!("CARGO_PKG_VERSION"));
                std::process::exit(0);
            }
            other => return Err(format!("unknown argument {other:?}")),
        }
    }
    Ok(parsed)
}

/// Take the socket, give up what is not needed, and find what must be found before any workload runs.
fn prepare(arguments: Arguments) -> Result<server::Server, String> {
    let fail = |what: &'static str| move |error: std::io::Error| format!("{what}: {error}");
    let listener = sys::adopt(LISTENER).map_err(fail("descriptor 3 is no socket"))?;
    sys::set_nonblocking(&listener).map_err(fail("descriptor 3"))?;
    let null = match sys::open_at(libc::AT_FDCWD, c"/dev/null", libc::O_RDONLY | libc::O_NONBLOCK, 0) {
        Ok(fd) => fd,
        // A pipe without writer is as empty.
        Err(_) => sys::pipe(0).map_err(fail("pipe"))?.0,
    };
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    let proc = sys::open_at(libc::AT_FDCWD, c"/proc", flags, 0).ok().filter(|proc| {
        // An empty directory is no process file system.
        sys::open_at(proc.as_raw_fd(), c"self/stat", libc::O_RDONLY, 0).is_ok()
    });
    let spare_from_oom = std::process::id() == 1;
    let _ = sys::prctl(libc::PR_SET_DUMPABLE, 0, 0);
    let _ = sys::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0);
    signals::default_signals();
    sys::umask(0o022);
    let _ = sys::chdir(c"/");
    if let Some(mask) = arguments.child_caps {
        // The bounding set limits what exec can give; what this process holds stays its own.
        for cap in 0..64 {
            if mask & (1 << cap) == 0 && sys::prctl(libc::PR_CAPBSET_READ, cap, 0).is_ok() {
                let _ = sys::prctl(libc::PR_CAPBSET_DROP, cap, 0);
            }
        }
        let _ = sys::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as u64, 0);
        sys::limit_caps(None).map_err(fail("capabilities"))?;
    }
    if arguments.filter {
        filter::load().map_err(fail("the system call filter"))?;
    }
    let mut random = [0; 8];
    sys::random(&mut random);
    let config = Config {
        tools: arguments.tools,
        any_peer: arguments.any_peer,
        child_caps: arguments.child_caps,
        null,
        proc,
        spare_from_oom,
        groups: sys::group_count(),
        boot_id: random.iter().map(|byte| format!("{byte:02x}")).collect(),
    };
    server::Server::new(config, listener).map_err(fail("poll"))
}

fn main() -> ExitCode {
    match arguments().and_then(prepare) {
        Ok(mut server) => server.run(),
        Err(message) => {
            eprintln!("chronus: {message}");
            ExitCode::FAILURE
        }
    }
}
