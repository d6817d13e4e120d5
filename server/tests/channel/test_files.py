"""Files of the sandbox: content, trees, odd names, tricks."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, DiskFull, InvalidArgument, NotFound, PermissionDenied
from opendsec_server.testing.channel import run, shell, spec


def names(path: Path) -> list[str]:
    """Names in a folder."""
    return sorted(entry.name for entry in path.iterdir())


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    """A stream of the given parts."""
    for part in parts:
        yield part


async def content(stream: AsyncIterator[bytes]) -> bytes:
    """All of a stream."""
    return b"".join([part async for part in stream])


async def test_content_round_trip_with_ranges(channel, folder):
    """Megabytes arrive as sent; ranges are exact, beyond the end is empty."""
    data = os.urandom(2_500_000)
    path = folder + b"/data"
    step = 77_777
    sent = await channel.write_file(path, pieces(*(data[i : i + step] for i in range(0, len(data), step))))
    assert sent == len(data)
    assert await content(channel.read_file(path)) == data
    assert await content(channel.read_file(path, offset=1_000_000, length=300_000)) == data[1_000_000:1_300_000]
    assert await content(channel.read_file(path, offset=2_499_999)) == data[-1:]
    assert await content(channel.read_file(path, offset=9_000_000)) == b""
    assert await content(channel.read_file(path, length=0)) == b""


async def test_reader_that_stops_early_frees_the_helper(channel, folder):
    """An abandoned read is cancelled; later ones work."""
    path = folder + b"/data"
    await channel.write_file(path, pieces(*[bytes(100_000)] * 50))
    for _ in range(100):
        stream = channel.read_file(path)
        async for _part in stream:
            break
        await stream.aclose()
    assert len(await content(channel.read_file(path))) == 5_000_000


async def test_slow_reader_blocks_nobody(channel, folder):
    """A read that is not consumed leaves commands and other reads alone."""
    path = folder + b"/data"
    await channel.write_file(path, pieces(*[bytes(100_000)] * 50))
    slow = channel.read_file(path)
    first = await anext(slow)
    assert (await run(channel, shell("echo fine"))).stdout == b"fine\n"
    assert len(await content(channel.read_file(path))) == 5_000_000
    assert len(first) + len(await content(slow)) == 5_000_000


async def test_replace_is_atomic_and_keeps_mode_and_owner(channel, folder, tmp_path):
    """The old file stays until the new one is whole; its mode and owner stay."""
    target = tmp_path / "file"
    target.write_bytes(b"old")
    target.chmod(0o640)
    os.chown(target, 4242, 4243)
    going_on = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"new "
        assert target.read_bytes() == b"old"
        going_on.set()
        yield b"content"

    await channel.write_file(folder + b"/file", slowly())
    assert going_on.is_set()
    found = target.stat()
    assert target.read_bytes() == b"new content"
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, 4242, 4243)
    await channel.write_file(folder + b"/file", pieces(b"x"), mode=0o755)
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    await channel.write_file(folder + b"/fresh", pieces(b"x"))
    assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == 0o644


async def test_broken_upload_changes_nothing(channel, folder, tmp_path):
    """If the source fails, the old file stays and no temporary one is left."""
    target = tmp_path / "file"
    target.write_bytes(b"old")

    async def broken() -> AsyncIterator[bytes]:
        yield bytes(300_000)
        raise RuntimeError("source")

    with pytest.raises(RuntimeError, match="source"):
        await channel.write_file(folder + b"/file", broken())
    for _ in range(1000):
        if names(tmp_path) == ["file"]:
            break
        await asyncio.sleep(0.005)
    assert names(tmp_path) == ["file"]
    assert target.read_bytes() == b"old"


async def test_offset_and_append_write_in_place(channel, folder, tmp_path):
    """A part can be written; both at once make no sense."""
    path = folder + b"/file"
    await channel.write_file(path, pieces(b"0123456789"))
    await channel.write_file(path, pieces(b"ab"), offset=3)
    await channel.write_file(path, pieces(b"end"), append=True)
    assert (tmp_path / "file").read_bytes() == b"012ab56789end"
    with pytest.raises(InvalidArgument):
        await channel.write_file(path, pieces(b""), append=True, offset=0)


async def test_symbolic_link_stays_and_its_target_is_replaced(channel, folder, tmp_path):
    """Writing to a link writes to what it names; a loop is refused."""
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "loop").symlink_to("loop")
    await channel.write_file(folder + b"/link", pieces(b"new"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    with pytest.raises(InvalidArgument):
        await channel.write_file(folder + b"/loop", pieces(b"new"))


async def test_special_files_never_block(channel, folder, tmp_path):
    """FIFOs, devices and directories are refused at once."""
    os.mkfifo(tmp_path / "fifo")
    for path in (folder + b"/fifo", b"/dev/zero", b"/dev/tty"):
        with pytest.raises(InvalidArgument):
            await content(channel.read_file(path))
        with pytest.raises(InvalidArgument):
            await channel.write_file(path, pieces(b"x"), append=True)
        with pytest.raises(InvalidArgument):
            await channel.write_file(path, pieces(b"x"))
    with pytest.raises(Conflict):
        await content(channel.read_file(folder))
    with pytest.raises(Conflict):
        await channel.write_file(folder, pieces(b"x"))


async def test_names_may_hold_any_byte(channel, folder):
    """Newlines, quotes and bytes that are no UTF-8 survive every call."""
    name = b"a\nb\xff\xfe'\"\\ \x01"
    path = folder + b"/" + name
    await channel.write_file(path, pieces(b"x"))
    found = [entry async for entry in channel.list_dir(folder)]
    assert [entry.path_raw for entry in found] == [path]
    assert (await channel.stat(path)).path_raw == path
    await channel.move(path, path + b"2")
    await channel.remove(path + b"2")
    assert [entry async for entry in channel.list_dir(folder)] == []


async def test_stat_tells_kinds_and_does_not_follow(channel, folder, tmp_path):
    """Each kind of file is named; a link shows its target."""
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "file").write_bytes(b"12345")
    link = await channel.stat(folder + b"/link")
    assert (link.kind, link.target) == ("symlink", "/etc/passwd")
    assert (await channel.stat(folder + b"/fifo")).kind == "fifo"
    found = await channel.stat(folder + b"/file")
    assert (found.kind, found.size, found.mode, found.path_raw) == ("file", 5, 0o644, None)
    assert (await channel.stat(b"/")).kind == "directory"
    assert (await channel.stat(b"/dev/null")).kind == "char"


async def test_list_is_sorted_and_stays_inside(channel, folder, tmp_path):
    """A recursive listing names each entry once, in order, and enters no link."""
    for name in ("b", "a", "c/x", "c/d/y"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "up").symlink_to("/etc")
    base = str(tmp_path)
    flat = [entry.path async for entry in channel.list_dir(folder)]
    assert flat == [f"{base}/{name}" for name in ("a", "b", "c", "up")]
    deep = [entry.path async for entry in channel.list_dir(folder, recursive=True)]
    assert deep == [f"{base}/{name}" for name in ("a", "b", "c", "c/d", "c/d/y", "c/x", "up")]


async def test_large_directories_stream(channel, folder, tmp_path):
    """Thousands of entries come in several frames."""
    for number in range(5000):
        (tmp_path / f"{number:04}-{'n' * 100}").touch()
    listed = [entry.path async for entry in channel.list_dir(folder)]
    assert len(listed) == 5000
    assert listed == sorted(listed)


async def test_mkdir_modes_and_parents(channel, folder, tmp_path):
    """Modes are exact, parents are made, existing ones are fine only with parents."""
    await channel.mkdir(folder + b"/a", mode=0o1777)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o1777
    await channel.mkdir(folder + b"/b/c//d/", mode=0o700, parents=True)
    assert stat.S_IMODE((tmp_path / "b/c/d").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "b/c").stat().st_mode) == 0o755
    await channel.mkdir(folder + b"/b/c/d", parents=True)
    with pytest.raises(Conflict):
        await channel.mkdir(folder + b"/a")
    (tmp_path / "file").touch()
    with pytest.raises(Conflict):
        await channel.mkdir(folder + b"/file/x", parents=True)


async def test_remove_never_follows_links(channel, folder, tmp_path):
    """A tree goes, what its links name stays; a full directory needs recursive."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").touch()
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "link").symlink_to(outside)
    with pytest.raises(Conflict):
        await channel.remove(folder + b"/tree")
    await channel.remove(folder + b"/tree", recursive=True)
    assert not tree.exists()
    (tmp_path / "link").symlink_to(outside)
    await channel.remove(folder + b"/link", recursive=True)
    assert (outside / "keep").exists()
    with pytest.raises(NotFound):
        await channel.remove(folder + b"/link")
    with pytest.raises(InvalidArgument):
        await channel.remove(b"/", recursive=True)


async def test_remove_of_a_tree_deeper_than_any_path(channel, folder, tmp_path):
    """Two thousand levels are no obstacle; to list them is refused."""
    script = (
        "import os, sys; os.chdir(sys.argv[1])\n"
        "for _ in range(2000):\n os.mkdir('d' * 30); os.chdir('d' * 30)\n open('f', 'w')"
    )
    made = await run(channel, spec("python3", "-c", script, folder))
    assert made.exit.exit_code == 0, made.stderr
    with pytest.raises(InvalidArgument):
        _ = [entry async for entry in channel.list_dir(folder, recursive=True)]
    await channel.remove(folder, recursive=True)
    assert not tmp_path.exists()
    tmp_path.mkdir()


async def test_move_across_file_systems(channel, folder, tmp_path):
    """What cannot be renamed is copied with modes, times and links, then removed."""
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "file").write_bytes(b"x" * 300_000)
    (tree / "sub" / "file").chmod(0o4711)
    os.utime(tree / "sub" / "file", ns=(1, 1_234_567_890_123_456_789))
    (tree / "link").symlink_to("nowhere")
    other = Path(f"/dev/shm/{tmp_path.name}-{os.getpid()}")
    try:
        await channel.move(folder + b"/tree", os.fsencode(other))
        assert not tree.exists()
        found = (other / "sub" / "file").stat()
        assert (found.st_size, stat.S_IMODE(found.st_mode)) == (300_000, 0o4711)
        assert found.st_mtime_ns == 1_234_567_890_123_456_789
        assert str((other / "link").readlink()) == "nowhere"
    finally:
        await channel.remove(os.fsencode(other), recursive=True)
    with pytest.raises(NotFound):
        await channel.move(folder + b"/tree", folder + b"/other")


async def test_calls_act_as_the_user(channel, folder, tmp_path):
    """Permissions are those of the user named; files belong to it; an impossible user is refused."""
    tmp_path.chmod(0o700)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    with pytest.raises(PermissionDenied):
        await channel.write_file(folder + b"/file", pieces(b"x"), user="4242")
    tmp_path.chmod(0o777)
    await channel.write_file(folder + b"/file", pieces(b"x"), user="4242:4243")
    found = (tmp_path / "file").stat()
    assert (found.st_uid, found.st_gid) == (4242, 4243)
    (tmp_path / "file").chmod(0o600)
    with pytest.raises(PermissionDenied):
        await content(channel.read_file(folder + b"/file", user="nobody"))
    with pytest.raises(InvalidArgument):
        await channel.stat(folder, user="no-such-user")


async def test_full_disk_is_told(channel, folder, tmp_path):
    """No space left is its own error, and nothing stays behind."""
    await run(channel, shell(f"mount -t tmpfs -o size=1m none {tmp_path}"))
    try:
        with pytest.raises(DiskFull):
            await channel.write_file(folder + b"/file", pieces(*[bytes(100_000)] * 30))
        assert names(tmp_path) == []
    finally:
        await run(channel, shell(f"umount {tmp_path}"))


@pytest.mark.parametrize("path", [b"", b"a\0b", b"x" * 5000, b"/" + b"y" * 300])
async def test_impossible_paths_are_refused(channel, path):
    """Empty paths, NUL bytes and over-long names are the caller's mistake."""
    with pytest.raises(InvalidArgument):
        await channel.stat(path)
    with pytest.raises(InvalidArgument):
        await channel.mkdir(path, parents=True)


async def test_many_at_once(channel, folder):
    """Hundreds of calls at a time queue up, none is refused."""

    async def one(number: int) -> None:
        path = folder + b"/%d" % number
        await channel.write_file(path, pieces(b"%d" % number))
        assert await content(channel.read_file(path)) == b"%d" % number

    await asyncio.gather(*(one(number) for number in range(150)))
