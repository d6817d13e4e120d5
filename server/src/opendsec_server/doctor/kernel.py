"""What the kernel offers: version, cgroups, namespaces, filters, pressure, virtual machines."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
from pathlib import Path

from opendsec_server.doctor.finding import Finding, ProbeFailed, run
from opendsec_server.platform.config import Config

_LIBC = ctypes.CDLL(None, use_errno=True)
_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "cpu", "pids")
_LANDLOCK_CREATE_RULESET = 444
_KVM_GET_API_VERSION = 0xAE00
_KVM_CREATE_VM = 0xAE01
_FAN_CLASS_PRE_CONTENT = 0x08
_FAN_CLOEXEC = 0x01
_FAN_MARK_ADD = 0x01
_FAN_PRE_ACCESS = 0x0010_0000
_AT_FDCWD = -100


def probe(_config: Config) -> list[Finding]:
    """Look at the kernel."""
    return [
        _root(),
        _version(),
        _cgroups(),
        _user_namespaces(),
        _seccomp(),
        _landlock(),
        _pressure(),
        _pre_content(),
        _kvm(),
    ]


def _root() -> Finding:
    uid = os.geteuid()
    return Finding(
        name="root",
        state="ok" if uid == 0 else "missing",
        purpose="the edge mounts file systems and makes cgroups and namespaces",
        detail=f"effective user id {uid}",
        remedy="" if uid == 0 else "run as root",
        required=True,
    )


def _version() -> Finding:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    enough = numbers >= (6, 12)
    return Finding(
        name="kernel",
        state="ok" if enough else "missing",
        purpose="EROFS layers are mounted straight from their files",
        detail=f"Linux {release} on {platform.machine()}",
        remedy="" if enough else "Linux 6.12 or newer (bookworm-backports has one)",
        required=True,
    )


def cgroup_mode() -> str:
    """Return ``v2``, ``v1``, ``hybrid`` or ``none``."""
    unified = _CGROUPS / "cgroup.controllers"
    if unified.is_file():
        return "v2"
    v1 = all((_CGROUPS / name).is_dir() for name in _CONTROLLERS)
    if (_CGROUPS / "unified/cgroup.controllers").is_file():
        return "hybrid" if v1 else "none"
    return "v1" if v1 else "none"


def _try_cgroups(mode: str) -> None:
    """Make and remove a group in every hierarchy that limits need.

    Raises:
        ProbeFailed: controllers are missing.
        OSError: no group can be made.
    """
    if mode == "none":
        raise ProbeFailed("no memory, cpu and pids controllers are mounted")
    if mode == "v2":
        lacking = set(_CONTROLLERS) - set((_CGROUPS / "cgroup.controllers").read_text().split())
        if lacking:
            raise ProbeFailed(f"controllers {', '.join(sorted(lacking))} are not available")
    for root in [_CGROUPS] if mode == "v2" else [_CGROUPS / name for name in _CONTROLLERS]:
        child = root / f"opendsec-doctor-{os.getpid()}"
        child.mkdir()
        child.rmdir()


def _cgroups() -> Finding:
    mode = cgroup_mode()
    purpose = "limits of memory, cpu and processes"
    try:
        _try_cgroups(mode)
    except (OSError, ProbeFailed) as error:
        return Finding(
            name="cgroups",
            state="missing",
            purpose=purpose,
            detail=str(error),
            remedy="mount the cgroup file systems writable (in a container: run it privileged)",
            required=True,
        )
    return Finding(name="cgroups", state="ok", purpose=purpose, detail=f"mode {mode}", required=True)


def _user_namespaces() -> Finding:
    purpose = "root in a sandbox is nobody outside (not yet used)"
    try:
        run(["unshare", "--user", "--map-root-user", "true"])
    except ProbeFailed as error:
        return Finding(
            name="user-namespaces",
            state="missing",
            purpose=purpose,
            detail=str(error),
            remedy="sysctl user.max_user_namespaces; CONFIG_USER_NS",
        )
    return Finding(name="user-namespaces", state="ok", purpose=purpose)


def _seccomp() -> Finding:
    purpose = "system calls of sandboxes are filtered"
    try:
        actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()
    except OSError:
        actions = []
    ready = {"errno", "allow"} <= set(actions)
    return Finding(
        name="seccomp",
        state="ok" if ready else "missing",
        purpose=purpose,
        detail=" ".join(actions),
        remedy="" if ready else "a kernel with CONFIG_SECCOMP_FILTER",
        required=True,
    )


def _landlock() -> Finding:
    version = _LIBC.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    purpose = "second wall around files where AppArmor is absent (not yet used)"
    if version < 1:
        reason = os.strerror(ctypes.get_errno())
        return Finding(
            name="landlock", state="missing", purpose=purpose, detail=reason, remedy="boot with lsm=landlock"
        )
    return Finding(name="landlock", state="ok", purpose=purpose, detail=f"version {version} of its interface")


def _pressure() -> Finding:
    purpose = "admission refuses work while the node is under memory pressure"
    try:
        detail = Path("/proc/pressure/memory").read_text().splitlines()[0]
    except OSError as error:
        remedy = "boot with psi=1"
        return Finding(name="psi", state="degraded", purpose=purpose, detail=str(error.strerror), remedy=remedy)
    return Finding(name="psi", state="ok", purpose=purpose, detail=detail)


def _pre_content() -> Finding:
    purpose = "layers whose data is loaded on first read, without FUSE (not yet used)"
    fd = _LIBC.fanotify_init(_FAN_CLASS_PRE_CONTENT | _FAN_CLOEXEC, os.O_RDONLY)
    reason = os.strerror(ctypes.get_errno()) if fd < 0 else ""
    if fd >= 0:
        marked = _LIBC.fanotify_mark(fd, _FAN_MARK_ADD, ctypes.c_uint64(_FAN_PRE_ACCESS), _AT_FDCWD, b"/etc/passwd")
        reason = os.strerror(ctypes.get_errno()) if marked != 0 else ""
        os.close(fd)
    if reason:
        remedy = "Linux 6.14 or newer; older kernels will go through FUSE"
        return Finding(name="pre-content", state="missing", purpose=purpose, detail=reason, remedy=remedy)
    return Finding(name="pre-content", state="ok", purpose=purpose, detail="pre-content fanotify events can be had")


def _kvm() -> Finding:
    purpose = "virtual machine backends (not yet used)"
    try:
        fd = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        remedy = "a host with hardware virtualisation; emulation works without it"
        return Finding(name="kvm", state="missing", purpose=purpose, detail=str(error.strerror), remedy=remedy)
    try:
        version = fcntl.ioctl(fd, _KVM_GET_API_VERSION, 0)
        os.close(fcntl.ioctl(fd, _KVM_CREATE_VM, 0))
    except OSError as error:
        detail = f"opens, but makes no virtual machine: {error.strerror}"
        return Finding(name="kvm", state="missing", purpose=purpose, detail=detail, remedy="see the log of the host")
    finally:
        os.close(fd)
    return Finding(
        name="kvm",
        state="degraded",
        purpose=purpose,
        detail=f"opens (API {version}) and makes a virtual machine; not trusted: no guest was started; not needed yet",
    )
