//! The system call filter, compiled on the host and handed over as a file: loading it here costs a hundredth of what an
//! OCI runtime spends on compiling it for every sandbox.

use std::io;
use std::os::fd::AsRawFd;

use crate::sys;

/// Descriptor of the compiled filter.
const FILTER: i32 = 4;
/// Most instructions the kernel takes.
const MAX_LEN: usize = 4096;
/// Bytes of an instruction.
const SIZE: usize = 8;

/// Put this process and all its children under the filter in descriptor 4, and close that.
///
/// # Errors
/// There is no filter, it is malformed, or the kernel refuses it: the sandbox must not start then.
pub fn load() -> io::Result<()> {
    let file = sys::adopt(FILTER)?;
    let mut bytes = vec![0u8; MAX_LEN * SIZE + 1];
    // All sandboxes share the file and so its position: read from the start, and whole.
    // SAFETY: `bytes` is valid for writing its length.
    let len = unsafe { libc::pread(file.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
    if len == 0 || len % SIZE != 0 || len > MAX_LEN * SIZE {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut program: Vec<libc::sock_filter> = bytes[..len]
        .chunks_exact(SIZE)
        .map(|b| libc::sock_filter {
            code: u16::from_ne_bytes([b[0], b[1]]),
            jt: b[2],
            jf: b[3],
            k: u32::from_ne_bytes([b[4], b[5], b[6], b[7]]),
        })
        .collect();
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: `filter` points to a program that outlives the call; the kernel checks it.
    let result = unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER as libc::c_ulong,
            &filter,
            0,
            0,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
