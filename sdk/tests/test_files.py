"""Files of a sandbox: any names, any content, constant memory."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from opendsec import Conflict, InvalidArgument, NotFound, OutcomeUnknown, OutputLimit, SandboxGone


async def test_write_and_read(sandbox):
    """Bytes and text come back as they went."""
    await sandbox.files.write("/tmp/a", b"\0\xff")
    await sandbox.files.write_text(PurePosixPath("/tmp/deep/er/b"), "héllo", parents=True, mode=0o600)
    assert await sandbox.files.read("/tmp/a") == b"\0\xff"
    assert await sandbox.files.read_text("/tmp/deep/er/b") == "héllo"
    assert (await sandbox.files.stat("/tmp/deep/er/b")).mode == 0o600


async def test_ranges_append_and_offset(sandbox):
    """Parts of files are read and written."""
    files = sandbox.files
    await files.write("/tmp/a", "0123456789")
    assert await files.read("/tmp/a", offset=2, length=3) == b"234"
    await files.write("/tmp/a", "!", append=True)
    await files.write("/tmp/a", "XY", offset=4)
    assert await files.read("/tmp/a") == b"0123XY6789!"


@pytest.mark.parametrize("name", [b"/tmp/a b", b"/tmp/\xff\xfe", b"/tmp/new\nline", b"/tmp/%2e%2e&x=1#?+", "/tmp/日本"])
async def test_any_name(sandbox, name):
    """A name is bytes: spaces, newlines, percent signs and what is no UTF-8 are nothing special."""
    await sandbox.files.write(name, b"x")
    assert await sandbox.files.read(name) == b"x"
    raw = name if isinstance(name, bytes) else name.encode()
    info = next(iter(await sandbox.files.list("/tmp")))
    assert (info.path_raw or info.path.encode()) == raw
    await sandbox.files.remove(name)
    assert not await sandbox.files.exists(name)


async def test_directories(sandbox):
    """Made, listed, moved and removed."""
    files = sandbox.files
    await files.mkdir("/tmp/d/e", parents=True)
    await files.mkdir("/tmp/d/e", parents=True)
    with pytest.raises(Conflict):
        await files.mkdir("/tmp/d")
    await files.write("/tmp/d/e/f", b"1")
    assert [info.path for info in await files.list("/tmp/d")] == ["/tmp/d/e"]
    assert [info.path for info in await files.list("/tmp/d", recursive=True)] == ["/tmp/d/e", "/tmp/d/e/f"]
    await files.move("/tmp/d", "/tmp/g")
    assert await files.exists("/tmp/g/e/f")
    with pytest.raises(Conflict):
        await files.remove("/tmp/g")
    await files.remove("/tmp/g", recursive=True)
    await files.remove("/tmp/g", missing_ok=True)
    with pytest.raises(NotFound):
        await files.remove("/tmp/g")


async def test_errors_are_typed(server, sandbox):
    """The file system's refusals have classes; an ended sandbox is not a missing file."""
    with pytest.raises(NotFound):
        await sandbox.files.read("/none")
    with pytest.raises(InvalidArgument):
        await sandbox.files.read("relative")
    server.end_sandbox(sandbox.id)
    with pytest.raises(SandboxGone):
        await sandbox.files.exists("/tmp")
    server.sandboxes.clear()
    with pytest.raises(NotFound):
        await sandbox.files.exists("/tmp")


async def test_streams_both_ways(server, sandbox):
    """Content passes in pieces; a reader's limit bounds memory."""

    async def pieces():
        for _ in range(10):
            yield b"x" * 100_000

    await sandbox.files.write("/tmp/big", pieces())
    size = 0
    async for piece in sandbox.files.stream("/tmp/big"):
        size += len(piece)
    assert size == 1_000_000
    with pytest.raises(OutputLimit):
        await sandbox.files.read("/tmp/big", limit=1000)


async def test_a_failing_source_leaves_the_old_file(sandbox):
    """The error of whoever makes the content comes through, and nothing was replaced."""
    await sandbox.files.write("/tmp/a", b"old")

    async def pieces():
        yield b"new"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await sandbox.files.write("/tmp/a", pieces())
    assert await sandbox.files.read("/tmp/a") == b"old"


async def test_what_can_be_repeated_is(server, sandbox):
    """Replacing a file twice is the same as once; appending is not."""
    server.break_connection("PUT", "/files$", when="after")
    await sandbox.files.write("/tmp/a", b"1")
    server.break_connection("PUT", "/files$", when="after")
    with pytest.raises(OutcomeUnknown):
        await sandbox.files.write("/tmp/a", b"2", append=True)
    assert await sandbox.files.read("/tmp/a") == b"12"
