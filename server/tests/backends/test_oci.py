"""The configuration that a runtime gets, and the filter that goes beside it."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import msgspec
import pytest

from opendsec.api.errors import UnsupportedCapability
from opendsec.api.models import ImageConfig, Limits
from opendsec_server.backends.container import filter as compiled_filter
from opendsec_server.backends.container.oci import OciConfig
from opendsec_server.backends.container.rootfs import copy_root_attributes, write_identity
from opendsec_server.backends.container.seccomp import profile
from opendsec_server.core.spec import SandboxSpec

SPEC = SandboxSpec(
    id="local-aaaaaaaaaaaa",
    backend="container",
    runtime="runc",
    layers=(),
    config=ImageConfig(),
    limits=Limits(),
    hostname="box",
)
PERMIT, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
#: Numbers of x86_64.
READ, IOCTL, MKNOD, CLONE, PTRACE, BPF, KEYCTL, SOCKET, CLONE3, UNSHARE = 0, 16, 133, 56, 101, 321, 250, 41, 435, 272


def render(*, limit_swap: bool = True, filtered: bool = False, **changes):
    config = OciConfig(root=Path("/r"), tools=Path("/t"), cgroup_parent="p", limit_swap=limit_swap)
    return json.loads(config.render(msgspec.structs.replace(SPEC, **changes), filtered=filtered))


def test_limits_become_resources():
    """Memory without swap, cpu as quota and weight, processes."""
    resources = render(limits=Limits(memory_mb=64, cpu_cores=1.5, pids=30))["linux"]["resources"]
    assert resources["memory"] == {"limit": 64 * 2**20, "swap": 64 * 2**20}
    assert resources["cpu"] == {"quota": 150_000, "period": 100_000, "shares": 1536}
    assert resources["pids"] == {"limit": 30}
    assert resources["devices"] == [{"allow": False, "access": "rwm"}]


def test_no_limits_are_no_limits():
    """Only devices are always bounded."""
    assert set(render()["linux"]["resources"]) == {"devices"}


def test_swap_is_not_named_where_the_kernel_does_not_count_it():
    """The runtime would fail to write it."""
    assert render(limit_swap=False, limits=Limits(memory_mb=64))["linux"]["resources"]["memory"] == {
        "limit": 64 * 2**20
    }


def test_open_files_are_given_or_refused():
    """Never quietly fewer."""
    limits = {limit["type"]: limit for limit in render(limits=Limits(open_files=100))["process"]["rlimits"]}
    assert (limits["RLIMIT_NOFILE"]["soft"], limits["RLIMIT_NOFILE"]["hard"]) == (100, 100)
    assert limits["RLIMIT_CORE"]["hard"] == 0
    with pytest.raises(UnsupportedCapability):
        render(limits=Limits(open_files=2**30))


def test_privileges_can_grow_only_on_request():
    """``no_new_privileges`` follows the spec; capabilities never exceed the list."""
    assert render()["process"]["noNewPrivileges"] is True
    assert render(allow_new_privileges=True)["process"]["noNewPrivileges"] is False
    sets = render()["process"]["capabilities"]
    assert set(sets) == {"bounding", "effective", "permitted"}
    for forbidden in ("NET_RAW", "MKNOD", "AUDIT_WRITE", "SETFCAP", "SYS_ADMIN", "SYS_PTRACE"):
        assert f"CAP_{forbidden}" not in sets["bounding"]


def test_one_of_chronus_and_runtime_loads_the_filter():
    """Never none of them."""
    with_chronus, with_runtime = render(filtered=True), render()
    assert "--filter" in with_chronus["process"]["args"]
    assert "seccomp" not in with_chronus["linux"]
    assert "--filter" not in with_runtime["process"]["args"]
    assert with_runtime["linux"]["seccomp"]["defaultAction"] == "SCMP_ACT_ERRNO"


def test_all_namespaces_are_new():
    """And none is joined."""
    kinds = render()["linux"]["namespaces"]
    assert {one["type"] for one in kinds} == {"pid", "network", "ipc", "uts", "mount", "cgroup"}
    assert not any("path" in one for one in kinds)


def interpret(program: bytes, number: int, *arguments: int, architecture: int = 0xC000003E) -> int:
    """Run a classic BPF program on a system call as the kernel would."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=iIQ6Q", number, architecture, 0, *padded)
    code = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        operation, true, false, k = code[at]
        at += 1
        match operation:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, k)
            case 0x54:
                value &= k
            case 0x05:
                at += k
            case 0x15:
                at += true if value == k else false
            case 0x25:
                at += true if value > k else false
            case 0x35:
                at += true if value >= k else false
            case 0x45:
                at += true if value & k else false
            case 0x06:
                return k
            case _:
                raise AssertionError(hex(operation))


@pytest.fixture(scope="module")
def program():
    made = compiled_filter.compiled("x86_64")
    assert made is not None
    return made


def test_the_compiled_filter_decides_as_the_profile_says(program):
    """Calls, their arguments, and what an argument's upper half must not hide."""
    sticky = 0x5412
    for call, wanted in {
        (READ,): PERMIT,
        (PTRACE,): PERMIT,
        (BPF,): EPERM,
        (KEYCTL,): EPERM,
        (UNSHARE, 0x10000000): EPERM,
        (CLONE3,): ENOSYS,
        (CLONE, 0x11): PERMIT,
        (CLONE, 0x20000011): EPERM,
        (IOCTL, 0, 0x5401): PERMIT,
        (IOCTL, 0, sticky): EPERM,
        (IOCTL, 0, 0x1_0000_0000 | sticky): EPERM,
        (IOCTL, 0, 0xC0C0586D): EPERM,
        (MKNOD, 0, 0o010644): PERMIT,
        (MKNOD, 0, 0o060644): EPERM,
        (MKNOD, 0, 0o020644): EPERM,
        (SOCKET, 1): PERMIT,
        (SOCKET, 38): EPERM,
    }.items():
        assert interpret(program, *call) == wanted, call


def test_calls_that_are_newer_than_the_list_do_not_exist(program):
    """So that a C library falls back; the other kind of numbers of this machine are not there either."""
    for number in (600, 0x40000000, 0x40000000 | READ):
        assert interpret(program, number) == ENOSYS
    assert interpret(program, READ, architecture=0x40000003) != PERMIT


def test_every_call_of_the_list_gets_through(program):
    """None is lost on the way to the compiled form."""
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", _header()))
    assert len(numbers) > 300
    names = profile("x86_64")["syscalls"][0]["names"]
    stopped = [name for name in names if name in numbers and interpret(program, int(numbers[name])) != PERMIT]
    known = [name for name in stopped if int(numbers[name]) < 449]
    assert known == []


def _header() -> str:
    for place in ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"):
        if Path(place).exists():
            return Path(place).read_text()
    return pytest.fail("no header with the numbers of system calls")


def test_the_filter_file_cannot_be_changed():
    """All sandboxes get the same one."""
    fd = compiled_filter.filter_file()
    assert fd is not None
    try:
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_a_host_without_the_library_lets_the_runtime_compile(monkeypatch):
    """It is slower, not weaker."""
    monkeypatch.setattr(compiled_filter, "compiled", lambda _machine: None)
    assert compiled_filter.filter_file() is None


def test_identity_is_written_where_there_is_a_folder_for_it(tmp_path):
    """An image's own files are replaced, a link among them too; nothing outside is touched."""
    etc, outside = tmp_path / "etc", tmp_path / "outside"
    etc.mkdir()
    outside.write_text("host")
    (etc / "resolv.conf").symlink_to(outside)
    (etc / "hosts").write_text("old")
    (etc / "hostname").mkdir()
    write_identity(tmp_path, "box")
    assert outside.read_text() == "host"
    assert (etc / "resolv.conf").read_text() == "# no network\n"
    assert "127.0.1.1\tbox\n" in (etc / "hosts").read_text()
    assert (etc / "hosts").stat().st_mode & 0o7777 == 0o644
    assert (etc / "hostname").is_dir()


def test_identity_follows_no_link_out_of_the_image(tmp_path):
    """An ``/etc`` that is a link, or a file, or absent, stays as it is."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    write_identity(root, "box")
    (root / "etc").symlink_to(outside)
    write_identity(root, "box")
    assert list(outside.iterdir()) == []
    (root / "etc").unlink()
    (root / "etc").write_text("x")
    write_identity(root, "box")


@pytest.mark.root
def test_the_root_looks_like_the_topmost_layers(tmp_path):
    """Mode and owner."""
    layer, upper = tmp_path / "layer", tmp_path / "upper"
    layer.mkdir()
    upper.mkdir()
    os.chown(layer, 7, 8)
    layer.chmod(0o1711)
    copy_root_attributes(layer, upper)
    seen = upper.stat()
    assert (seen.st_uid, seen.st_gid, seen.st_mode & 0o7777) == (7, 8, 0o1711)
