"""File calls against a hostile file system: everything is resolved inside the sandbox, never on the host."""

from __future__ import annotations

import contextlib
import io
import tarfile
from pathlib import Path

import pytest
from tests.functional.stack import Stack

from opendsec import (
    Conflict,
    DiskFull,
    DSecClient,
    DSecContainerRunArgs,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    PolicyDenied,
    Sandbox,
)

pytestmark = [pytest.mark.root, pytest.mark.slow]

ODD_NAMES = [b"new\nline", b"\xff\xfe not utf-8", b"-rf *", b"quote'\"$(reboot)", b"tab\t", "snö ☃".encode()]


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_any_bytes_may_be_in_a_name(sandbox: Sandbox, name: bytes) -> None:
    """Written, listed, described, read, moved and removed under exactly these bytes."""
    path = b"/tmp/odd/" + name
    await sandbox.files.mkdir("/tmp/odd")
    await sandbox.files.write(path, name)
    (entry,) = await sandbox.files.list("/tmp/odd")
    assert (entry.path_raw or entry.path.encode()).endswith(name)
    assert (await sandbox.files.stat(path)).size == len(name)
    assert await sandbox.files.read(path) == name
    await sandbox.files.move(path, path + b".moved")
    await sandbox.files.remove(path + b".moved")
    assert await sandbox.files.list("/tmp/odd") == []


@pytest.mark.parametrize("target", ["/etc/hostname", "../../../../../../etc/hostname", "/proc/1/root/etc/hostname"])
async def test_a_link_leads_to_the_sandboxs_own_files(sandbox: Sandbox, tmp_path: Path, target: str) -> None:
    """The host's file of the same name is never read or written."""
    before = Path("/etc/hostname").read_bytes()
    await sandbox.run_shell(f"echo inside > /etc/hostname; ln -s {target} /tmp/link")
    if not target.startswith("/proc"):
        assert await sandbox.files.read("/tmp/link") == b"inside\n"
    with contextlib.suppress(PermissionDenied):  # what leads through pid 1 is closed
        await sandbox.files.write("/tmp/link", b"changed\n")
    assert Path("/etc/hostname").read_bytes() == before


async def test_climbing_ends_at_the_root_of_the_sandbox(sandbox: Sandbox, tmp_path: Path) -> None:
    """A path with many ``..`` names a file of the sandbox."""
    secret = tmp_path / "secret"
    secret.write_text("host")
    with pytest.raises(NotFound):
        await sandbox.files.read("/../../../../../.." + str(secret))


async def test_a_directory_that_becomes_a_link_does_not_redirect_a_removal(sandbox: Sandbox) -> None:
    """Removing a tree removes a link in it, not what the link leads to."""
    await sandbox.run_shell("mkdir -p /tmp/keep /tmp/tree/sub; echo x > /tmp/keep/file; ln -s /tmp/keep /tmp/tree/link")
    await sandbox.files.remove("/tmp/tree", recursive=True)
    assert await sandbox.files.read("/tmp/keep/file") == b"x\n"
    assert not await sandbox.files.exists("/tmp/tree")


async def test_devices_and_pipes_do_not_hang_a_read(sandbox: Sandbox) -> None:
    """Only regular files are read."""
    await sandbox.run_shell("mkfifo /tmp/pipe")
    with pytest.raises((InvalidArgument, Conflict, PermissionDenied)):
        await sandbox.files.read("/tmp/pipe")
    with pytest.raises((InvalidArgument, Conflict, PermissionDenied)):
        await sandbox.files.read("/dev/zero")


async def test_the_rights_of_the_named_user_hold(sandbox: Sandbox) -> None:
    """A file call on behalf of a user can do what that user can do."""
    await sandbox.files.write("/root/private", b"x", mode=0o600)
    with pytest.raises(PermissionDenied):
        await sandbox.files.write("/etc/passwd", b"", user="agent")
    with pytest.raises(PermissionDenied):
        await sandbox.files.read("/root/private", user="agent")
    await sandbox.files.write("/home/agent/mine", b"y", user="agent")
    info = await sandbox.files.stat("/home/agent/mine")
    assert (info.uid, info.gid) == (1000, 1000)


async def test_ranges_modes_and_missing_directories(sandbox: Sandbox) -> None:
    """A range of a file is read and written; parents are made only when asked for."""
    with pytest.raises(NotFound):
        await sandbox.files.write("/tmp/a/b/c", b"0123456789")
    await sandbox.files.write("/tmp/a/b/c", b"0123456789", parents=True, mode=0o751)
    await sandbox.files.write("/tmp/a/b/c", b"XY", offset=4)
    await sandbox.files.write("/tmp/a/b/c", b"!", append=True)
    assert await sandbox.files.read("/tmp/a/b/c", offset=3, length=4) == b"3XY6"
    assert await sandbox.files.read("/tmp/a/b/c") == b"0123XY6789!"
    assert (await sandbox.files.stat("/tmp/a/b/c")).mode == 0o751


async def test_an_archive_cannot_leave_the_directory_it_is_unpacked_to(sandbox: Sandbox) -> None:
    """Members with ``..`` or behind a link are refused."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        member = tarfile.TarInfo("../escaped")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"evil"))
    await sandbox.files.mkdir("/tmp/box")
    from opendsec._files import put_stream

    async def body():
        yield raw.getvalue()

    with pytest.raises((InvalidArgument, PolicyDenied)):
        await put_stream(sandbox._core, f"/v1/sandboxes/{sandbox.id}/archive?path=/tmp/box", body())
    assert not await sandbox.files.exists("/tmp/escaped")


async def test_a_hostile_tree_does_not_escape_on_download(sandbox: Sandbox, tmp_path: Path) -> None:
    """A link that leads out of the target is refused, or named when asked to skip; set-id bits are dropped."""
    await sandbox.run_shell(
        "mkdir /tmp/t; ln -s /etc/passwd /tmp/t/link; echo ok > /tmp/t/file; chmod 4755 /tmp/t/file"
    )
    with pytest.raises(PolicyDenied):
        await sandbox.download("/tmp/t", tmp_path / "strict")
    assert not (tmp_path / "strict").exists()
    done = await sandbox.download("/tmp/t", tmp_path / "loose", skip_unsafe=True)
    assert [Path(name).name for name in done.skipped] == ["link"]
    assert (tmp_path / "loose/file").stat().st_mode & 0o7777 == 0o755


async def test_a_tree_comes_back_as_it_went(sandbox: Sandbox, tmp_path: Path) -> None:
    """Names, contents, modes and relative links survive the way in and out."""
    source = tmp_path / "in"
    (source / "deep/er").mkdir(parents=True)
    (source / "deep/er/data").write_bytes(bytes(range(256)) * 5000)
    (source / "deep/run").write_text("#!/bin/sh\n")
    (source / "deep/run").chmod(0o755)
    (source / "link").symlink_to("deep/run")
    await sandbox.upload(source, "/tmp/tree")
    await sandbox.download("/tmp/tree", tmp_path / "out")
    out = tmp_path / "out"
    assert (out / "deep/er/data").read_bytes() == (source / "deep/er/data").read_bytes()
    assert (out / "deep/run").stat().st_mode & 0o777 == 0o755
    assert (out / "link").readlink() == Path("deep/run")


async def test_a_full_scratch_is_said_by_file_calls_and_commands(client: DSecClient, stack: Stack) -> None:
    """The file call raises ``DiskFull``; the command sees the kernel's error; the sandbox goes on; the host is fine."""
    args = DSecContainerRunArgs(container_image=stack.image, disk_limit_mb=16)
    async with await client.run_container(args) as sandbox:
        result = await sandbox.run_shell("dd if=/dev/zero of=/tmp/big bs=1M count=64")
        assert result.exit_code != 0
        assert "quota" in result.stderr.lower() or "space" in result.stderr.lower()
        with pytest.raises(DiskFull):
            await sandbox.files.write("/tmp/more", b"x" * 8 * 1024 * 1024)
        await sandbox.run_shell("rm -f /tmp/big; sync")
        await sandbox.files.write("/tmp/small", b"fits")
        assert (await sandbox.run_shell("cat /tmp/small")).stdout == "fits"
        assert (await sandbox.metrics()).disk_bytes is not None
