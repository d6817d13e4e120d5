"""Trees up and down. A hostile sandbox sends the tar, so nothing in it is believed."""

from __future__ import annotations

import io
import os
import tarfile

import pytest

from opendsec import InvalidArgument, NotFound, OutcomeUnknown, OutputLimit, PolicyDenied
from opendsec._tar import Unpacker, pack
from opendsec.testing._state import Node


def make_tar(*members, fmt=tarfile.GNU_FORMAT):
    """Return a tar of ``(name, kind, content or link)``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=fmt, errors="surrogateescape") as tar:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.mode = 0o6755
            member.type = kind
            if kind in (tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE):
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            else:
                member.linkname = content
                tar.addfile(member)
    return buffer.getvalue()


def unpack(target, data, *, skip=False, limit=2**30, step=100):
    """Unpack in small pieces."""
    unpacker = Unpacker(target, skip_unsafe=skip, limit_bytes=limit)
    try:
        for start in range(0, len(data), step):
            unpacker.feed(data[start : start + step])
        unpacker.finish()
    finally:
        unpacker.close()
    return unpacker


FILE, DIR, SYM, LNK = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("../evil", FILE, b"x")],
        [("a/../../evil", FILE, b"x")],
        [("/tmp/evil", FILE, b"x")],
        [("link", SYM, "/etc"), ("link/evil", FILE, b"x")],
        [("link", SYM, "../..")],
        [("d/link", SYM, "../../outside")],
        [("d", DIR, ""), ("link", SYM, "d"), ("link/evil", FILE, b"x")],
        [("hard", LNK, "../outside")],
        [("hard", LNK, "/etc/passwd")],
        [("link", SYM, "x"), ("hard", LNK, "link")],
        [("hard", LNK, "not-there")],
        [("dev", tarfile.CHRTYPE, "")],
        [("fifo", tarfile.FIFOTYPE, "")],
        [("sparse", tarfile.GNUTYPE_SPARSE, b"x")],
        [("a" * 300, FILE, b"x")],
        [("d", DIR, ""), ("d/f", FILE, b"x"), ("d", FILE, b"x")],
        [("f", FILE, b"x"), ("f/g", FILE, b"x")],
    ],
)
@pytest.mark.parametrize("skip", [False, True])
def test_members_that_are_not_safe_are_refused_or_passed_over(tmp_path, members, skip):
    """Nothing is written outside the target, nothing follows a link, and no device is made."""
    (tmp_path / "outside").write_text("untouched")
    target = tmp_path / "target"
    target.mkdir()
    data = make_tar(*members)
    if skip:
        assert unpack(target, data, skip=True).skipped
    else:
        with pytest.raises(PolicyDenied):
            unpack(target, data)
    assert (tmp_path / "outside").read_text() == "untouched"
    assert {entry.name for entry in tmp_path.iterdir()} == {"outside", "target"}
    for path in target.rglob("*"):
        assert path.is_symlink() or path.is_file() or path.is_dir()
        assert not path.is_symlink() or target in path.resolve().parents


def test_links_planted_in_the_target_are_not_followed(tmp_path):
    """A link that was there before is replaced as a file and refused as a directory."""
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "outside").write_text("untouched")
    (target / "f").symlink_to(tmp_path / "outside")
    (target / "d").symlink_to(tmp_path)
    unpack(target, make_tar(("f", FILE, b"new")))
    assert (target / "f").read_bytes() == b"new"
    with pytest.raises(PolicyDenied):
        unpack(target, make_tar(("d/outside", FILE, b"x")))
    assert (tmp_path / "outside").read_text() == "untouched"


def test_set_id_bits_never_arrive(tmp_path):
    """Permission bits only."""
    unpack(tmp_path, make_tar(("f", FILE, b"x"), ("d", DIR, "")))
    assert (tmp_path / "f").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "d").stat().st_mode & 0o7777 == 0o755


def test_bombs_are_cut(tmp_path):
    """Bytes and headers have limits."""
    with pytest.raises(OutputLimit):
        unpack(tmp_path, make_tar(("f", FILE, bytes(5000))), limit=4096)
    bomb = tarfile.TarInfo("x")
    bomb.type, bomb.size = tarfile.XHDTYPE, 2**40
    with pytest.raises(OutputLimit):
        unpack(tmp_path, bomb.tobuf(tarfile.GNU_FORMAT))


def test_damage_is_noticed(tmp_path):
    """A wrong checksum, malformed records, or an early end."""
    data = bytearray(make_tar(("f", FILE, b"x" * 600)))
    with pytest.raises(OutcomeUnknown):
        unpack(tmp_path, bytes(data[:1000]))
    data[0] ^= 1
    with pytest.raises(InvalidArgument):
        unpack(tmp_path, bytes(data))


@pytest.mark.parametrize("fmt", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_and_links_of_every_format(tmp_path, fmt):
    """GNU, pax and ustar write long names in their own ways."""
    name = "/".join(["d" * 40] * 3 + ["f"])
    unpack(tmp_path, make_tar((name, FILE, b"content"), ("l", SYM, "d" * 40), fmt=fmt), step=7)
    assert (tmp_path / name).read_bytes() == b"content"
    assert (tmp_path / "l").readlink().name == "d" * 40


def test_packing_and_unpacking_keeps_a_tree(tmp_path):
    """Content, modes, links, hard links, empty directories, and names that are no UTF-8."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub" / "empty").mkdir(parents=True)
    target.mkdir()
    (source / "sub" / "f").write_bytes(os.urandom(700_001))
    (source / "sub" / "f").chmod(0o640)
    (source / "sub" / ("n" * 200)).write_text("long name")
    (source / "link").symlink_to("sub/f")
    (source / "hard").hardlink_to(source / "sub" / "f")
    odd = os.fsdecode(b"odd\xff\n")
    (source / odd).write_text("odd")
    os.mkfifo(source / "fifo")
    unpack(target, b"".join(pack(source)), step=10_000)
    assert (target / "sub" / "f").read_bytes() == (source / "sub" / "f").read_bytes()
    assert (target / "sub" / "f").stat().st_mode & 0o777 == 0o640
    assert (target / "hard").stat().st_ino == (target / "sub" / "f").stat().st_ino
    assert str((target / "link").readlink()) == "sub/f"
    assert (target / "sub" / "empty").is_dir()
    assert (target / odd).read_text() == "odd"
    assert not (target / "fifo").exists()


def test_a_complete_pack_has_owners_and_special_files(tmp_path):
    """What an image needs survives."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "f").write_text("x")
    os.setxattr(tmp_path / "f", "user.note", b"\xff\0")
    os.chown(tmp_path / "f", 12, 34)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pack(tmp_path, complete=True))), errors="surrogateescape") as tar:
        members = {member.name: member for member in tar}
    assert members["./fifo"].isfifo()
    assert (members["./f"].uid, members["./f"].gid) == (12, 34)
    assert members["./f"].pax_headers["SCHILY.xattr.user.note"].encode("utf-8", "surrogateescape") == b"\xff\0"


async def test_a_tree_goes_up_and_comes_down(sandbox, tmp_path):
    """Upload and download are each other's inverse."""
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "f").write_bytes(b"x" * 300_000)
    (source / "run.sh").write_text("echo")
    (source / "run.sh").chmod(0o755)
    await sandbox.upload(source, "/work")
    assert await sandbox.files.read("/work/sub/f") == b"x" * 300_000
    done = await sandbox.download("/work", tmp_path / "back" / "here")
    assert (done.files, done.bytes, done.skipped) == (2, 300_004, [])
    assert (tmp_path / "back" / "here" / "run.sh").stat().st_mode & 0o777 == 0o755


async def test_single_files(sandbox, tmp_path):
    """A file goes to a path, and comes into a directory under its own name."""
    (tmp_path / "f").write_text("hi")
    await sandbox.upload(tmp_path / "f", "/work/deep/f")
    await sandbox.download("/work/deep/f", tmp_path / "g")
    (tmp_path / "dir").mkdir()
    await sandbox.download("/work/deep/f", tmp_path / "dir")
    assert (tmp_path / "g").read_text() == (tmp_path / "dir" / "f").read_text() == "hi"


async def test_nothing_to_upload(sandbox, tmp_path):
    """What is not there, or no file, is named."""
    with pytest.raises(NotFound):
        await sandbox.upload(tmp_path / "none", "/work")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidArgument):
        await sandbox.upload(tmp_path / "fifo", "/work")


async def test_an_unsafe_download_leaves_nothing(server, sandbox, tmp_path):
    """A fresh target is complete or not there; passing over is possible and told."""
    files = server.sandboxes[sandbox.id].files
    files[b"/w"] = Node(kind="directory")
    files[b"/w/a"] = Node(kind="file", data=b"fine")
    files[b"/w/b"] = Node(kind="symlink", target="/etc/passwd")
    with pytest.raises(PolicyDenied):
        await sandbox.download("/w", tmp_path / "t")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutputLimit):
        await sandbox.download("/w", tmp_path / "t", limit_bytes=3)
    assert list(tmp_path.iterdir()) == []
    done = await sandbox.download("/w", tmp_path / "t", skip_unsafe=True)
    assert done.skipped == ["b"]
    assert (tmp_path / "t" / "a").read_bytes() == b"fine"
    with pytest.raises(NotFound):
        await sandbox.download("/none", tmp_path / "u")


async def test_images(client, tmp_path):
    """Imported from a folder, a tar and a suite, listed, tagged and removed; progress is told."""
    messages = []
    (tmp_path / "f").write_text("x")
    await client.images.import_folder(
        tmp_path, "mine:1", on_progress=lambda progress: messages.append(progress.message)
    )
    (tmp_path / "t.tar").write_bytes(make_tar(("f", FILE, b"x")))
    image = await client.images.import_tar(tmp_path / "t.tar", "mine:2", kind="workspace")
    assert image.reference == "mine:2"
    assert messages == ["packing", ""]
    await client.images.import_debian("deb:1", packages=["git"])
    with pytest.raises(InvalidArgument, match="no-such-package"):
        await client.images.import_debian("deb:2", packages=["no-such-package"])
    await client.images.tag("mine:1", "mine:latest")
    await client.images.remove("mine:1")
    names = [image.reference for image in await client.images.list()]
    assert names == ["deb:1", "debian:bookworm", "mine:2", "mine:latest", "python:3.11"]
    assert (await client.images.resolve("mine:latest")).layer.kind == "base"
    with pytest.raises(NotFound):
        await client.images.import_folder(tmp_path / "none", "x:1")


async def test_nodes(client):
    """Listed, drained and taken back."""
    assert [node.state for node in await client.nodes.list()] == ["ready"]
    assert (await client.nodes.drain("fake")).state == "draining"
    assert (await client.nodes.undrain("fake")).state == "ready"
    with pytest.raises(NotFound):
        await client.nodes.drain("other")
