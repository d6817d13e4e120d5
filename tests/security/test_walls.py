"""What root in a sandbox can see and do: each wall of the default setup, tried from inside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.functional.stack import Stack

from opendsec import DSecClient, DSecContainerRunArgs, Sandbox

pytestmark = [pytest.mark.root, pytest.mark.slow]

#: Capabilities by bit that no sandbox may have, beyond Docker's defaults and minus four of those.
FORBIDDEN = {
    "NET_ADMIN": 12,
    "NET_RAW": 13,
    "SYS_MODULE": 16,
    "SYS_RAWIO": 17,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYS_BOOT": 22,
    "SYS_TIME": 25,
    "MKNOD": 27,
    "AUDIT_WRITE": 29,
    "SETFCAP": 31,
    "BPF": 39,
}


async def status(sandbox: Sandbox) -> dict[str, str]:
    """Return ``/proc/self/status`` of a command."""
    text = (await sandbox.run_shell("cat /proc/self/status")).stdout
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


async def test_no_socket_and_no_key_is_inside(sandbox: Sandbox, stack: Stack) -> None:
    """The API, the edge and chronus cannot be reached by a path, and no secret lies around."""
    found = await sandbox.run_shell("find / -xdev -type s; find /.opendsec /run /tmp /var -type s; env; ls /proc/1/fd")
    assert "sock" not in found.stdout
    assert stack.api_key not in found.stdout
    assert str(stack.run_dir) not in (await sandbox.run_shell("cat /proc/self/mountinfo /proc/mounts")).stdout


async def test_pid_1_cannot_be_read_or_traced(sandbox: Sandbox) -> None:
    """Chronus is undumpable, so even root has no access to its memory, environment and descriptors."""
    for name in ("mem", "environ", "maps", "fd/3", "root/etc/passwd"):
        result = await sandbox.run_shell(f"head -c 1 /proc/1/{name}")
        assert result.exit_code != 0, f"/proc/1/{name}: {result}"


async def test_capabilities_are_no_wider_than_allowed(sandbox: Sandbox) -> None:
    """Neither effective nor obtainable through a set-user-id program."""
    fields = await status(sandbox)
    for kind in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"):
        mask = int(fields[kind], 16)
        assert [name for name, bit in FORBIDDEN.items() if mask >> bit & 1] == [], kind


async def test_privileges_cannot_grow_unless_asked_for(client: DSecClient, stack: Stack, sandbox: Sandbox) -> None:
    """``no_new_privs`` is on by default and off when the request says so."""
    assert (await status(sandbox))["NoNewPrivs"] == "1"
    args = DSecContainerRunArgs(container_image=stack.image, allow_new_privileges=True)
    async with await client.run_container(args) as free:
        assert (await status(free))["NoNewPrivs"] == "0"


async def test_system_calls_are_filtered(sandbox: Sandbox) -> None:
    """A filter is on, and mounting and new namespaces are refused to root."""
    assert (await status(sandbox))["Seccomp"] == "2"
    for command in (
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /.opendsec",
        "umount /proc",
        "unshare -U true",
        "unshare -m true",
        "mknod /tmp/disk b 254 0",
        "chroot / mount -t proc none /proc",
        "hostname changed",
    ):
        result = await sandbox.run_shell(f"mkdir -p /mnt; {command}")
        assert result.exit_code != 0, command


async def test_kernel_interfaces_are_masked_or_read_only(sandbox: Sandbox) -> None:
    """Nothing of the host's kernel can be read out or set."""
    for path in ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug"):
        assert (await sandbox.run_shell(f"head -c 16 {path}")).stdout_bytes == b"", path
    for path in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/sys/kernel/uevent_helper",
    ):
        result = await sandbox.run_shell(f"echo 0 > {path}")
        assert result.exit_code != 0, path
    assert (await sandbox.run_shell("ls /sys/firmware")).stdout == ""


async def test_limits_cannot_be_raised_from_inside(client: DSecClient, stack: Stack) -> None:
    """The cgroup file systems are absent or read-only."""
    args = DSecContainerRunArgs(container_image=stack.image, memory_limit_mb=64, pids_limit=32)
    async with await client.run_container(args) as sandbox:
        names = "-name memory.max -o -name memory.limit_in_bytes -o -name pids.max -o -name cpu.max"
        script = f"for f in $(find / \\( {names} \\) 2>/dev/null); do echo 99999999 > $f && echo raised $f; done"
        result = await sandbox.run_shell(script)
        assert "raised" not in result.stdout


async def test_the_platforms_own_programs_cannot_be_changed(sandbox: Sandbox) -> None:
    """Chronus and the shells lie on a read-only mount."""
    for command in ("echo x > /.opendsec/sh", "rm -f /.opendsec/bash", "mv /.opendsec /gone", "touch /.opendsec/new"):
        assert (await sandbox.run_shell(command)).exit_code != 0, command
    assert (await sandbox.run_shell("echo fine")).stdout == "fine\n"


async def test_sandboxes_do_not_see_each_other_or_the_host(client: DSecClient, stack: Stack, sandbox: Sandbox) -> None:
    """Processes, names, memory segments and files are one's own."""
    other = await client.run_container(DSecContainerRunArgs(container_image=stack.image))
    await other.run_shell("echo secret > /tmp/secret; sleep 555 &")
    seen = await sandbox.run_shell("ps; ls /tmp; hostname")
    assert "555" not in seen.stdout
    assert "secret" not in seen.stdout
    count = len(re.findall(r"^\s*\d+ ", (await sandbox.run_shell("ps")).stdout, re.MULTILINE))
    assert count <= 4, "more processes than one's own are visible"
    assert Path("/etc/hostname").read_text().strip() not in seen.stdout


async def test_what_a_command_prints_cannot_steer_the_platform(sandbox: Sandbox) -> None:
    """Frames of the chronus protocol, terminal codes and lines of JSON are output like any other."""
    raw = b"\x00\x00\x00\x05\x01\x00\x00\x00\x01" * 100 + b'{"exit_code":0}\n\x1b[2J\xff' + bytes(range(256))
    result = await sandbox.exec(["/bin/sh", "-c", "cat; exit 33"], stdin=raw)
    assert result.exit_code == 33
    assert result.stdout_bytes == raw


async def test_a_command_cannot_reach_descriptors_of_pid_1(sandbox: Sandbox) -> None:
    """A command starts with its three streams and nothing else."""
    result = await sandbox.exec(["/bin/ls", "/proc/self/fd"])
    assert result.stdout.split() == ["0", "1", "2", "3"]  # 3 is ls reading the directory
