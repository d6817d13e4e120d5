"""Trees as tar, in both directions, with hostile archives."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opendsec.api.errors import InvalidArgument, NotFound, PermissionDenied, PlatformError
from opendsec_server.testing.channel import run, shell


def names(path: Path) -> list[str]:
    """Names in a folder."""
    return sorted(entry.name for entry in path.iterdir())


async def pieces(data: bytes, step: int = 60_000) -> AsyncIterator[bytes]:
    """Bytes in steps."""
    for begin in range(0, len(data), step):
        yield data[begin : begin + step]


async def pack(channel, path: bytes) -> bytes:
    """All of a tar."""
    return b"".join([part async for part in channel.tar_out(path)])


def archive(*members: tuple[str, bytes, dict[str, object]], format_: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar made by Python."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format_) as tar:
        for name, content, fields in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for key, value in fields.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def describe(base: Path) -> dict[str, tuple[object, ...]]:
    """What is below a folder: kind, mode, content or target, time."""
    found = {}
    # Not rglob: before Python 3.11.4 it fails at a link whose target is too long a name.
    for path in sorted(Path(top, name) for top, folders, files in os.walk(base) for name in (*folders, *files)):
        info = path.lstat()
        what: object = None
        if path.is_symlink():
            what = str(path.readlink())
        elif stat.S_ISREG(info.st_mode):
            what = path.read_bytes()
        found[str(path.relative_to(base))] = (
            stat.S_IFMT(info.st_mode),
            stat.S_IMODE(info.st_mode),
            what,
            info.st_mtime_ns,
            (info.st_uid, info.st_gid),
        )
    return found


def make_tree(base: Path) -> None:
    """A tree with everything that is hard."""
    (base / "dir" / "empty").mkdir(parents=True)
    (base / "dir" / "file").write_bytes(os.urandom(200_001))
    (base / "dir" / "file").chmod(0o6751)
    os.link(base / "dir" / "file", base / "dir" / "other-name")
    (base / ("long-" + "n" * 200)).write_bytes(b"long")
    (base / ("l" * 90) / ("m" * 90)).mkdir(parents=True)
    (base / ("l" * 90) / ("m" * 90) / "deep").write_bytes(b"deep")
    (base / "link").symlink_to("t" * 300)
    Path(os.fsdecode(os.fsencode(base) + b"/odd\xff\n=name")).write_bytes(b"odd")
    os.mkfifo(base / "fifo", 0o640)
    os.chown(base / "dir" / "file", 4242, 70_000)
    os.utime(base / "dir" / "file", ns=(5, 1_600_000_000_987_654_321))
    os.utime(base / "dir", ns=(5, 1_500_000_000_000_000_000))
    (base / "dir").chmod(0o555)


async def test_round_trip_keeps_everything(channel, folder, tmp_path):
    """Modes, times, owners, links, long and odd names survive out and in."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    make_tree(source)
    data = await pack(channel, folder + b"/source")
    await channel.tar_in(folder + b"/target", pieces(data))
    assert describe(target) == describe(source)
    assert (target / "dir" / "file").stat().st_ino == (target / "dir" / "other-name").stat().st_ino
    await channel.tar_in(folder + b"/target", pieces(data, 512))
    assert describe(target) == describe(source)


async def test_python_and_gnu_tar_read_what_is_packed(channel, folder, tmp_path):
    """The archive is ordinary to other programs."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    make_tree(source)
    data = await pack(channel, folder + b"/source")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = {os.fsencode(member.name) for member in tar.getmembers()}
    assert b"odd\xff\n=name" in names
    (tmp_path / "archive.tar").write_bytes(data)
    unpacked = await run(channel, shell(f"tar -xpf {tmp_path}/archive.tar -C {target}"))
    assert unpacked.exit.exit_code == 0, unpacked.stderr
    assert describe(target) == describe(source)


@pytest.mark.parametrize("format_", ["gnu", "posix", "ustar", "v7"])
async def test_archives_of_gnu_tar_are_unpacked(channel, folder, tmp_path, format_):
    """Each of its formats, with long names where the format has them."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "file").write_bytes(b"content")
    if format_ in {"gnu", "posix"}:
        (source / ("x" * 220)).write_bytes(b"long")
        (source / "link").symlink_to("y" * 220)
    (source / "a" / "hard").hardlink_to(source / "a" / "b" / "file")
    await run(channel, shell(f"tar -C {source} --format={format_} -cf {tmp_path}/t.tar ."))
    await channel.tar_in(folder + b"/target", pieces((tmp_path / "t.tar").read_bytes()))
    mine, theirs = describe(target), describe(source)
    assert {name: entry[:3] for name, entry in mine.items()} == {name: entry[:3] for name, entry in theirs.items()}


async def test_a_file_alone_is_one_member(channel, folder, tmp_path):
    """Packing a file gives its own name; a missing path is an error."""
    (tmp_path / "single").write_bytes(b"x")
    with tarfile.open(fileobj=io.BytesIO(await pack(channel, folder + b"/single"))) as tar:
        assert tar.getnames() == ["single"]
    with pytest.raises(NotFound):
        await pack(channel, folder + b"/nothing")


@pytest.mark.parametrize(
    "members",
    [
        [("../escape", b"x", {})],
        [("a/../../escape", b"x", {})],
        [("/tmp/opendsec-escape", b"x", {})],
        [("out", b"", {"type": tarfile.SYMTYPE, "linkname": "/tmp"}), ("out/opendsec-escape", b"x", {})],
        [("out", b"", {"type": tarfile.SYMTYPE, "linkname": ".."}), ("out/escape", b"x", {})],
        [("out", b"", {"type": tarfile.SYMTYPE, "linkname": "/tmp"}), ("out", b"", {"type": tarfile.DIRTYPE})],
        [("hard", b"", {"type": tarfile.LNKTYPE, "linkname": "../secret"})],
        [("hard", b"", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"})],
        [
            ("out", b"", {"type": tarfile.SYMTYPE, "linkname": ".."}),
            ("hard", b"", {"type": tarfile.LNKTYPE, "linkname": "out/secret"}),
        ],
    ],
)
async def test_members_that_lead_out_are_refused(channel, folder, tmp_path, members):
    """Nothing outside the target is written or linked."""
    (tmp_path / "secret").write_bytes(b"secret")
    before = set(names(Path("/tmp")))
    with pytest.raises(InvalidArgument):
        await channel.tar_in(folder + b"/target", pieces(archive(*members)))
    assert set(names(tmp_path)) == {"secret", "target"}
    assert not [name for name in set(names(Path("/tmp"))) - before if "escape" in name]
    assert (tmp_path / "secret").stat().st_nlink == 1


async def test_links_below_the_target_work(channel, folder, tmp_path):
    """A link to a folder of the archive may be written through; one that only points out may exist."""
    data = archive(
        ("lib", b"", {"type": tarfile.DIRTYPE, "mode": 0o755}),
        ("lib64", b"", {"type": tarfile.SYMTYPE, "linkname": "lib"}),
        ("lib64/file", b"x", {}),
        ("python", b"", {"type": tarfile.SYMTYPE, "linkname": "/usr/bin/python3"}),
    )
    await channel.tar_in(folder + b"/t", pieces(data))
    assert (tmp_path / "t/lib/file").read_bytes() == b"x"
    assert str((tmp_path / "t/python").readlink()) == "/usr/bin/python3"


async def test_existing_files_are_replaced_not_written_through(channel, folder, tmp_path):
    """A link in the place of a member is replaced, and so is a hard link's name."""
    (tmp_path / "victim").write_bytes(b"victim")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "file").symlink_to("../victim")
    (tmp_path / "t" / "second").hardlink_to(tmp_path / "victim")
    await channel.tar_in(folder + b"/t", pieces(archive(("file", b"new", {}), ("second", b"new", {}))))
    assert (tmp_path / "victim").read_bytes() == b"victim"
    assert (tmp_path / "t" / "file").read_bytes() == b"new"
    assert (tmp_path / "t" / "second").read_bytes() == b"new"


async def test_unpack_as_user(channel, folder, tmp_path):
    """Files belong to the user that unpacks, and its rights hold."""
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    with pytest.raises(PermissionDenied):
        await channel.tar_in(folder + b"/t", pieces(archive(("f", b"", {}))), user="4242")
    (tmp_path / "t").mkdir()
    os.chown(tmp_path / "t", 4242, 4242)
    await channel.tar_in(folder + b"/t", pieces(archive(("f", b"", {"uid": 0}))), user="4242:4242")
    assert (tmp_path / "t" / "f").stat().st_uid == 4242


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 512,
        b"x" * 100,
        archive(("file", b"content" * 1000, {}))[:1000],
        archive(("file", b"", {}))[:300],
        os.urandom(5000),
    ],
)
async def test_damaged_archives_are_refused(channel, folder, data):
    """What is no tar, or ends early, is the caller's mistake."""
    with pytest.raises(InvalidArgument):
        await channel.tar_in(folder + b"/t", pieces(data))
    await channel.tar_in(folder + b"/t", pieces(b""))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2047), st.integers(0, 255)), min_size=1, max_size=6))
async def test_mutated_archives_never_leave_the_target(channel, folder, tmp_path, changes):
    """Whatever is changed in an archive, it is unpacked or refused, and process 1 goes on."""
    data = bytearray(archive(("a", b"1", {}), ("d/b", b"2" * 600, {})))
    for position, value in changes:
        data[position] = value
    begin = 0
    while begin < 2048:
        block = data[begin : begin + 512]
        if any(block) and block[257:262] == b"ustar":
            total = sum(block[:148]) + 8 * 32 + sum(block[156:])
            data[begin + 148 : begin + 156] = b"%06o\0 " % total
        begin += 512
    try:
        await channel.tar_in(folder + b"/t", pieces(bytes(data)))
    except PlatformError as error:
        assert error.code in {"invalid_argument", "permission_denied", "conflict", "not_found"}  # noqa: PT017
    assert names(tmp_path) == ["t"]
    await channel.ping()
