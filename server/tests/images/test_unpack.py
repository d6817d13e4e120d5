"""Hostile and damaged tars, straight into the unpacker: nothing outside the root is ever touched."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import lzma
import os
import random
import stat
import tarfile
from contextlib import suppress

import pytest
import zstandard

from opendsec.api.errors import DiskFull, InvalidArgument
from opendsec_server.images.streams import PulledStream
from opendsec_server.images.unpack import Unpacker
from opendsec_server.testing.tars import chunks, make_tar, member

DIR, LINK, SYM = tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE


@pytest.fixture
def unpack(tmp_path):
    """Unpack bytes below ``tmp_path/in/root`` and return that folder."""
    root = tmp_path / "in" / "root"

    async def run(data: bytes, *, size: int = 1000, reserve: int = 0):
        root.mkdir(parents=True)
        stream = PulledStream(chunks(data, size), asyncio.get_running_loop())
        await asyncio.to_thread(Unpacker(stream, root, reserve_bytes=reserve, report=lambda message: None).run)
        return root

    return run


@pytest.mark.parametrize(
    ("members", "culprit"),
    [
        ([member("../evil")], "../evil"),
        ([member("a/../../evil")], "a/../../evil"),
        ([member("..")], ".."),
        ([member("out", SYM, linkname="../.."), member("out/evil")], "out/evil"),
        ([member("d", DIR), member("d/out", SYM, linkname="../../x"), member("d/out/evil")], "d/out/evil"),
        ([member("a", SYM, linkname="b"), member("b", SYM, linkname="../x"), member("a/evil")], "a/evil"),
        ([member("abs", SYM, linkname="/../etc"), member("abs/evil")], "abs/evil"),
        ([member("loop", SYM, linkname="loop"), member("loop/evil")], "loop/evil"),
        ([member("hard", LINK, linkname="/etc/passwd")], "hard"),
        ([member("hard", LINK, linkname="../../../etc/passwd")], "hard"),
        ([member("s", SYM, linkname="../../etc"), member("hard", LINK, linkname="s/passwd")], "hard"),
        ([member("hard", LINK, linkname="hard")], "hard"),
        ([member("d", DIR), member("hard", LINK, linkname="d")], "hard"),
        ([(member("f"), b"x"), member("f/below")], "f/below"),
        ([member("/", SYM, linkname="/etc")], "/"),
        ([member("x" * 300)], "xxx"),
        ([member("/".join(["d" * 200] * 30))], "ddd"),
        ([member("odd", b"Z")], "odd"),
        ([member("owner", uid=2**32)], "owner"),
        ([member("owner", gid=-2)], "owner"),
        ([member("time", pax_headers={"mtime": "nan"})], "time"),
        ([member("x", pax_headers={"SCHILY.xattr.user.a": "v" * 100_000})], "x"),
        ([member("s", SYM, linkname="")], "s"),
        ([member("dev", tarfile.CHRTYPE, devmajor=2**20, devminor=1)], "dev"),
    ],
)
async def test_unsafe_members_are_refused_by_name(unpack, tmp_path, members, culprit):
    """InvalidArgument names the member, and nothing appears outside the root."""
    fmt = tarfile.GNU_FORMAT if any(item.gid < 0 for item in members if not isinstance(item, tuple)) else None
    with pytest.raises(InvalidArgument) as caught:
        await unpack(make_tar(*members, fmt=fmt or tarfile.PAX_FORMAT))
    assert culprit in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["root"]


async def test_absolute_names_and_absolute_links_count_from_the_root(unpack):
    """As they will inside a sandbox, a merged /usr for one."""
    root = await unpack(
        make_tar(
            member("/lib", SYM, linkname="/usr/lib"),
            (member("/lib/one"), b"1"),
            (member("./usr/lib/../lib/two".replace("/../lib", "")), b"2"),
            member("deep", SYM, linkname="usr/./lib/../lib"),
            (member("deep/three"), b"3"),
        )
    )
    assert sorted(path.name for path in (root / "usr/lib").iterdir()) == ["one", "three", "two"]


async def test_later_members_replace_and_never_write_through(unpack, tmp_path):
    """Neither a symbolic nor a hard link of the same name is followed."""
    victim = tmp_path / "victim"
    victim.write_text("safe")
    root = await unpack(
        make_tar(
            member("s", SYM, linkname=str(victim)),
            (member("s"), b"new"),
            (member("f"), b"first"),
            member("h", LINK, linkname="f"),
            (member("h"), b"second"),
            member("d", SYM, linkname=str(tmp_path)),
            member("d", DIR),
            (member("d/inside"), b"x"),
            member("t", DIR),
            (member("t/gone"), b"x"),
            (member("t"), b"file now"),
            member("h2", LINK, linkname="f"),
            member("h2", LINK, linkname="f"),
        )
    )
    assert victim.read_text() == "safe"
    assert (root / "s").read_bytes() == b"new"
    assert (root / "f").read_bytes() == b"first"
    assert (root / "h").read_bytes() == b"second"
    assert (root / "d/inside").exists()
    assert (root / "t").read_bytes() == b"file now"
    assert (root / "h2").stat().st_nlink == 2


async def test_a_parent_that_was_a_directory_and_became_a_link_is_looked_at_again(unpack, tmp_path):
    """The memory of checked parents does not outlive a replacement."""
    with pytest.raises(InvalidArgument, match="d/evil"):
        await unpack(
            make_tar(
                member("d", DIR),
                (member("d/good"), b"x"),
                member("d", SYM, linkname="../.."),
                (member("d/evil"), b"x"),
            )
        )
    assert not (tmp_path / "evil").exists()


async def test_attributes_are_kept(unpack):
    """Modes, owners, times to the nanosecond, links, devices, fifos, extended attributes."""
    capability = b"\x01\x00\x00\x02\x00\x20\x00\x00" + b"\x00" * 12
    root = await unpack(
        make_tar(
            member("./", DIR, mode=0o751, uid=3, gid=4, mtime=1_500_000_000),
            member("d", DIR, mode=0o1777, mtime=1_400_000_000),
            (member("d/suid", mode=0o4755, uid=70_000, gid=5, pax_headers={"mtime": "1234567890.123456789"}), b"x"),
            (member("d/old", mtime=-5), b""),
            member("d/hard", LINK, linkname="d/suid"),
            member("d/sym", SYM, linkname="nowhere", uid=7, mtime=42),
            member("null", tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
            member("disk", tarfile.BLKTYPE, devmajor=7, devminor=300),
            member("pipe", tarfile.FIFOTYPE, mode=0o600),
            (
                member(
                    "x",
                    pax_headers={
                        "SCHILY.xattr.user.name": "välue",
                        "SCHILY.xattr.security.capability": capability.decode("utf-8", "surrogateescape"),
                        "SCHILY.xattr.security.selinux": "left_out",
                        "SCHILY.xattr.trusted.overlay.redirect": "/left/out",
                    },
                ),
                b"",
            ),
        )
    )
    info = (root / "d/suid").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_nlink) == (0o4755, 70_000, 5, 2)
    assert info.st_mtime_ns == 1_234_567_890_123_456_789
    assert (root / "d/old").stat().st_mtime_ns == -5 * 10**9
    assert ((root / "d").stat().st_mode & 0o7777, (root / "d").stat().st_mtime) == (0o1777, 1_400_000_000)
    assert (root.stat().st_mode & 0o7777, root.stat().st_uid, root.stat().st_mtime) == (0o751, 3, 1_500_000_000)
    assert ((root / "d/sym").lstat().st_uid, (root / "d/sym").lstat().st_mtime) == (7, 42)
    assert (root / "null").stat().st_rdev == os.makedev(1, 3)
    assert (root / "disk").stat().st_rdev == os.makedev(7, 300)
    assert stat.S_ISFIFO((root / "pipe").stat().st_mode)
    assert sorted(os.listxattr(root / "x")) == ["security.capability", "user.name"]
    assert os.getxattr(root / "x", "user.name") == "välue".encode()


@pytest.mark.parametrize("fmt", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
async def test_odd_names_survive(unpack, fmt):
    """Newlines, bytes that are no UTF-8, leading dashes, long names."""
    names = ["new\nline", "\udcff\udcfe", "-rf", "a" * 250, "/".join(["long" * 20] * 8), " ", "\x7f\x01", "ünï"]
    root = await unpack(make_tar(*[(member(name), name.encode("utf-8", "surrogateescape")) for name in names], fmt=fmt))
    for name in names:
        assert (root / name).read_bytes() == name.encode("utf-8", "surrogateescape")


async def test_sparse_files_keep_content_and_holes(unpack, tmp_path):
    """In every format GNU tar writes."""
    source = tmp_path / "in.sparse"
    with source.open("wb") as file:
        for offset in (0, 3_000_000, 9_000_000):
            file.seek(offset)
            file.write(b"data%d" % offset)
        file.truncate(20_000_000)
    for number, options in enumerate(
        (["--format=gnu"], ["--sparse-version=0.0"], ["--sparse-version=0.1"], ["--sparse-version=1.0"])
    ):
        target = tmp_path / f"out{number}"
        target.mkdir()
        base = ["--format=posix"] if number else []
        process = await asyncio.create_subprocess_exec(
            "tar", "-S", *base, *options, "-C", str(tmp_path), "-cf", "-", source.name, stdout=asyncio.subprocess.PIPE
        )
        data, _ = await process.communicate()
        assert len(data) < 1_000_000
        stream = PulledStream(chunks(data), asyncio.get_running_loop())
        await asyncio.to_thread(Unpacker(stream, target, reserve_bytes=0, report=lambda message: None).run)
        assert (target / source.name).read_bytes() == source.read_bytes()
        assert (target / source.name).stat().st_blocks * 512 < 1_000_000


@pytest.mark.parametrize(
    "compress",
    [
        bytes,
        gzip.compress,
        bz2.compress,
        lzma.compress,
        zstandard.ZstdCompressor().compress,
        lambda data: gzip.compress(data[:700]) + gzip.compress(data[700:]),
        lambda data: lzma.compress(data[:700]) + b"\0" * 8 + lzma.compress(data[700:]),
        lambda data: bz2.compress(data[:700]) + bz2.compress(data[700:]),
        lambda data: zstandard.compress(data[:700]) + zstandard.compress(data[700:]),
    ],
)
@pytest.mark.parametrize("size", [13, 4096])
async def test_compression_is_told_by_the_first_bytes(unpack, compress, size):
    """However the stream is cut into pieces, and with several compressed streams in a row."""
    root = await unpack(compress(make_tar((member("file"), b"content" * 500))), size=size)
    assert (root / "file").read_bytes() == b"content" * 500


@pytest.mark.parametrize(
    "data",
    [
        b"this is no tar at all" * 100,
        b"x",
        make_tar((member("f"), b"x" * 5000))[:3000],
        make_tar((member("f"), b"x" * 500))[:1024],
        make_tar(member("f"))[:700],
        gzip.compress(make_tar((member("f"), random.Random(1).randbytes(50_000))))[:20_000],
        lzma.compress(make_tar((member("f"), random.Random(1).randbytes(50_000))))[:20_000],
        bz2.compress(make_tar((member("f"), random.Random(1).randbytes(50_000))))[:20_000],
        zstandard.compress(make_tar((member("f"), random.Random(1).randbytes(50_000))))[:20_000],
        gzip.compress(b"no tar"),
        b"\x1f\x8b" + b"junk" * 100,
        b"BZh" + b"junk" * 100,
        b"\xfd7zXZ\0" + b"junk" * 100,
        b"\x28\xb5\x2f\xfd" + b"junk" * 100,
        make_tar((member("f"), b"x" * 1000))[:1536] + b"garbage header" * 80,
    ],
)
async def test_damaged_and_cut_off_tars_are_refused(unpack, data):
    """Also where the cut falls between two members: the end mark is missing then."""
    with pytest.raises(InvalidArgument, match=r"damaged|cut off|empty"):
        await unpack(data)


def _pax_header_of(size: int) -> bytes:
    info = member("./PaxHeaders/x", tarfile.XHDTYPE)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)


async def test_a_header_that_claims_gigabytes_takes_no_memory(unpack):
    """It is refused before it is read."""
    with pytest.raises(InvalidArgument, match="larger than allowed"):
        await unpack(_pax_header_of(8 * 1024**3 - 1) + b"\0" * 100_000)


async def test_sizes_that_are_negative_are_refused(unpack):
    """A pax size below zero must not send us backwards."""
    info = member("f", pax_headers={"size": "-5000"})
    with pytest.raises(InvalidArgument, match=r"damaged|sense"):
        await unpack(info.tobuf(tarfile.PAX_FORMAT) + b"\0" * 10_240)


async def test_a_huge_sparse_file_is_refused(unpack):
    """Terabytes of holes cost nothing to send, but building the image would read them."""
    info = member("f", pax_headers={"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,1",
                                    "GNU.sparse.size": str(2**40), "GNU.sparse.numblocks": "1"})  # fmt: skip
    info.size = 1
    data = info.tobuf(tarfile.PAX_FORMAT) + b"x" + b"\0" * (511 + 1024)
    with pytest.raises(InvalidArgument, match="holes"):
        await unpack(data)


async def test_a_full_disk_is_told_before_the_last_byte_is_taken(unpack):
    """The reserve of the disk is kept."""
    with pytest.raises(DiskFull):
        await unpack(make_tar((member("f"), b"x" * 100)), reserve=1 << 60)


async def test_an_error_of_the_source_comes_through(unpack, tmp_path):
    """A client that went away is not a damaged tar."""

    async def source():
        yield make_tar((member("f"), b"x" * 5000))[:3000]
        raise ConnectionResetError("client gone")

    root = tmp_path / "r"
    root.mkdir()
    stream = PulledStream(source(), asyncio.get_running_loop())
    with pytest.raises(ConnectionResetError):
        await asyncio.to_thread(Unpacker(stream, root, reserve_bytes=0, report=lambda message: None).run)


async def test_random_damage_never_escapes_or_crashes(tmp_path):
    """Flip bytes of a rich tar: either it unpacks or it is InvalidArgument."""
    rng = random.Random(7)
    data = make_tar(
        member("d", DIR),
        (member("d/f", pax_headers={"SCHILY.xattr.user.a": "b", "mtime": "1.5"}), b"x" * 600),
        member("d/l", SYM, linkname="f"),
        member("d/h", LINK, linkname="d/f"),
        (member("n" * 200), b"y"),
        fmt=tarfile.PAX_FORMAT,
    )
    for number in range(150):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            broken[rng.randrange(len(broken) - 2048)] = rng.randrange(256)
        root = tmp_path / "in" / str(number)
        root.mkdir(parents=True)
        stream = PulledStream(chunks(bytes(broken), 8192), asyncio.get_running_loop())
        with suppress(InvalidArgument):
            await asyncio.to_thread(Unpacker(stream, root, reserve_bytes=0, report=lambda message: None).run)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
