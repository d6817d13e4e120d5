"""The seccomp profile compiled once, for chronus to load.

An OCI runtime compiles the profile anew in every container, a sixth of what all of ``runc run`` costs. The same library
compiles it here, once; the program goes to chronus as a sealed file (descriptor 4), and chronus loads it before it does
anything else. ``docs/decisions/0005-filter-by-chronus.md`` has the figures.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import fcntl
import functools
import os
import platform
import struct
import tempfile
from typing import Any

import structlog

from opendsec_server.backends.container.seccomp import profile

_log = structlog.get_logger(__name__)
_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000
_MASKED_EQ = 7
_OPTIMIZE, _BINARY_TREE = 8, 2
_ENOSYS = 38
#: Classic BPF: load a word of the call's data, jump if greater, jump if equal, return.
_LOAD, _JUMP_GREATER, _JUMP_EQUAL, _RETURN = 0x20, 0x25, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
_AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_ADD_SEALS, _ALL_SEALS = 1033, 0xF


class _Argument(ctypes.Structure):
    """``struct scmp_arg_cmp``."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def filter_file() -> int | None:
    """Return a descriptor of the compiled profile in sealed memory; ``None`` if this host cannot compile it.

    Then the runtime has to. The caller closes the descriptor.
    """
    program = compiled(platform.machine())
    if program is None:
        return None
    fd = os.memfd_create("seccomp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, program)
    # Every sandbox's pid 1 gets this very file: none can change it for the next.
    fcntl.fcntl(fd, _ADD_SEALS, _ALL_SEALS)
    return fd


@functools.cache
def compiled(machine: str) -> bytes | None:
    """Return the profile as classic BPF, or ``None`` if there is no libseccomp or it does not know the profile."""
    try:
        library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
        return _newer_calls(machine, *_compile(library, machine))
    except (OSError, AttributeError, KeyError) as error:
        _log.warning("filter_not_compiled", error=str(error))
        return None


def _newer_calls(machine: str, program: bytes, newest: int) -> bytes:
    """Let calls that are newer than all we know fail with ENOSYS, so that libraries fall back to older ones."""
    head = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 0, 3, _AUDIT_ARCH[machine]),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_GREATER, 0, 1, newest),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in head) + program


def _compile(library: Any, machine: str) -> tuple[bytes, int]:
    """Return the program and the highest number of a call that it knows."""
    library.seccomp_init.restype = ctypes.c_void_p
    rules = profile(machine)
    context = library.seccomp_init(ctypes.c_uint32(_ERRNO | rules["defaultErrnoRet"]))
    if not context:
        raise OSError("libseccomp makes no filter")
    context = ctypes.c_void_p(context)
    try:
        _check(library.seccomp_attr_set(context, _OPTIMIZE, ctypes.c_uint32(_BINARY_TREE)))
        newest = 0
        for rule in rules["syscalls"]:
            action = _ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else _ERRNO | rule["errnoRet"]
            arguments = [
                _Argument(arg["index"], _MASKED_EQ, arg["value"], arg["valueTwo"]) for arg in rule.get("args", ())
            ]
            array = (_Argument * len(arguments))(*arguments)
            for name in rule["names"]:
                number = library.seccomp_syscall_resolve_name(name.encode())
                # Negative numbers stand for calls of other architectures.
                if number < 0:
                    continue
                newest = max(newest, number)
                _check(library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(arguments), array))
        with tempfile.TemporaryFile() as file:
            _check(library.seccomp_export_bpf(context, file.fileno()))
            file.seek(0)
            return file.read(), newest
    finally:
        library.seccomp_release(context)


def _check(result: int) -> None:
    if result < 0:
        raise OSError(-result, f"libseccomp: {os.strerror(-result)}")
