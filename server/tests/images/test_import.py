"""Imports into the real store, seen through a real mount; what is left when they fail, are cancelled or killed."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from opendsec.api.errors import DiskFull, InvalidArgument, UnsupportedCapability
from opendsec_server.images import steps
from opendsec_server.images.erofs import elf_machine, inspect_tree
from opendsec_server.images.store import LocalImageStore
from opendsec_server.linux import mounts
from opendsec_server.linux.mounts import MountFlag
from opendsec_server.testing.tars import chunks, import_bytes, make_tar, member, mounted_layer, mounts_below, quiet

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def elf(machine: int, bits: int = 2, order: int = 1) -> bytes:
    return b"\x7fELF" + bytes([bits, order]) + b"\0" * 12 + machine.to_bytes(2, "little") + b"\0" * 60


async def test_a_round_trip_through_a_mounted_layer_keeps_attributes(store, tmp_path):
    """From tar to EROFS and back."""
    made = await import_bytes(
        store,
        gzip.compress(
            make_tar(
                member(".", tarfile.DIRTYPE, mode=0o751, mtime=1_000_000_000),
                (member("suid", mode=0o4755, uid=70_000, gid=70_001, pax_headers={"mtime": "1234.5"}), b"data"),
                member("hard", tarfile.LNKTYPE, linkname="suid"),
                member("sym", tarfile.SYMTYPE, linkname="/not/there", mtime=77),
                member("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
                member("pipe", tarfile.FIFOTYPE),
                (member("x", pax_headers={"SCHILY.xattr.user.a": "b"}), b""),
                (member("\udcff\n"), b"odd"),
            )
        ),
    )
    with mounted_layer(store.layer_path(made.layer.digest), tmp_path / "mnt") as root:
        info = (root / "suid").stat()
        assert (info.st_mode & 0o7777, info.st_uid, info.st_gid, info.st_nlink) == (0o4755, 70_000, 70_001, 2)
        assert info.st_mtime_ns == 1_234_500_000_000
        assert (root.stat().st_mode & 0o7777, root.stat().st_mtime) == (0o751, 1_000_000_000)
        assert ((root / "sym").readlink(), (root / "sym").lstat().st_mtime) == (Path("/not/there"), 77)
        assert (root / "null").lstat().st_rdev == os.makedev(1, 3)
        assert (root / "pipe").is_fifo()
        assert os.getxattr(root / "x", "user.a") == b"b"
        assert (root / os.fsdecode(b"\xff\n")).read_bytes() == b"odd"


async def test_the_digest_depends_on_content_alone(tmp_path):
    """Another store, another time, another order of directory entries, a folder instead of a tar."""
    digests = set()
    names = [f"f{number}" for number in range(50)]
    for number in range(2):
        other = LocalImageStore(tmp_path / f"store{number}", min_free_bytes=0)
        order = names[:: -1 if number else 1]
        data = make_tar(member("./", tarfile.DIRTYPE, mtime=9), *[(member(name, mtime=5), b"x") for name in order])
        digests.add((await import_bytes(other, data)).layer.digest)
        root = tmp_path / f"root{number}"
        root.mkdir()
        for name in order:
            (root / name).write_text("x")
            os.utime(root / name, (5, 5))
        os.utime(root, (9, 9))
        made = await other.import_folder("folder", root, kind="base", config=None, report=quiet)
        digests.add(made.layer.digest)
        other.close()
    assert len(digests) == 1


@pytest.mark.slow
async def test_sparse_files_take_little_room(store, tmp_path):
    """Large holes make the image chunked."""
    root = tmp_path / "root"
    root.mkdir()
    with (root / "disk").open("wb") as file:
        file.truncate(80 * 1024 * 1024)
        file.seek(40 * 1024 * 1024)
        file.write(b"middle")
    made = await store.import_folder("a", root, kind="toolkit", config=None, report=quiet)
    assert made.layer.size < 1_000_000
    with mounted_layer(store.layer_path(made.layer.digest), tmp_path / "mnt") as seen:
        assert (seen / "disk").read_bytes() == (root / "disk").read_bytes()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"bin/a": elf(62)}, "x86_64"),
        ({"bin/a": elf(183), "bin/b": elf(183), "lib/c.so": elf(62)}, "aarch64"),
        ({"bin/a": elf(3, 1)}, "i686"),
        ({"bin/script": b"#!/bin/sh\n" + b"x" * 100}, None),
        ({"bin/odd": elf(9999)}, None),
        ({"readme": b"x"}, None),
    ],
)
async def test_the_architecture_is_told_by_the_binaries(store, files, expected):
    """The most frequent one; none for scripts and data."""
    made = await import_bytes(
        store, make_tar(*[(member(name, mode=0o755), data) for name, data in files.items()]), kind="toolkit"
    )
    assert made.layer.architecture == expected


def test_our_own_interpreter_is_known():
    """A real ELF file."""
    assert elf_machine(Path(sys.executable).resolve()) == os.uname().machine


@pytest.mark.slow
def test_very_deep_trees_are_walked_without_recursion(tmp_path):
    """Depth is the input's choice."""
    path = tmp_path
    for _ in range(1100):
        path /= "d"
        path.mkdir()
    try:
        assert inspect_tree(tmp_path).architecture is None
    finally:
        # pytest's own removal recurses.
        subprocess.run(["rm", "-rf", "--", tmp_path / "d"], check=True)


async def test_a_folder_with_mounts_below_it_is_refused(store, tmp_path):
    """A live root would bring the host's /proc along."""
    inner = tmp_path / "root" / "proc"
    inner.mkdir(parents=True)
    mounts.mount("tmpfs", inner, "tmpfs")
    try:
        with pytest.raises(InvalidArgument, match="mounted below"):
            await store.import_folder("a", inner.parent, kind="base", config=None, report=quiet)
    finally:
        mounts.umount(inner)


@pytest.fixture
def small_disk(tmp_path):
    """A data folder on a file system of 8 MiB."""
    target = tmp_path / "small"
    target.mkdir()
    mounts.mount("tmpfs", target, "tmpfs", MountFlag.NONE, "size=8m")
    yield target
    mounts.umount(target, lazy=True)


@pytest.mark.parametrize("size", [5, 20])
async def test_a_full_disk_is_disk_full_and_leaves_nothing(small_disk, size):
    """Whether it fills while unpacking or while the image is built."""
    store = LocalImageStore(small_disk, min_free_bytes=0)
    data = make_tar(*[(member(f"f{number}"), os.urandom(1 << 20)) for number in range(size)])
    with pytest.raises(DiskFull):
        await import_bytes(store, data)
    assert store.list() == []
    assert store.layers() == []
    assert list((small_disk / "images/tmp").iterdir()) == []
    await import_bytes(store, make_tar((member("f"), b"x")))
    store.close()


@pytest.mark.parametrize("where", ["waiting", "sending"])
async def test_cancelling_an_import_removes_what_it_began(store, tmp_path, where):
    """While the sender is silent, and while data flows."""
    began = asyncio.Event()

    async def source():
        yield make_tar((member("f"), b"x" * 100_000))[:50_000]
        began.set()
        if where == "waiting":
            await asyncio.Event().wait()
        while True:
            yield b"x" * 512
            await asyncio.sleep(0)

    task = asyncio.create_task(store.import_tar("a", source(), kind="base", config=None, report=quiet))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list((tmp_path / "data/images/tmp").iterdir()) == []
    assert store.list() == []


async def test_an_error_of_the_sender_is_the_error_of_the_import(store, tmp_path):
    """And nothing is left."""

    async def source():
        yield make_tar((member("f"), b"x" * 100_000))[:50_000]
        raise ConnectionResetError("client gone")

    with pytest.raises(ConnectionResetError, match="client gone"):
        await store.import_tar("a", source(), kind="base", config=None, report=quiet)
    assert list((tmp_path / "data/images/tmp").iterdir()) == []


async def test_many_imports_at_once(store):
    """More than there are worker threads, all waiting for their senders in turn."""
    gate = asyncio.Event()

    async def source(number):
        data = make_tar((member("f"), b"%d" % number))
        yield data[:600]
        await gate.wait()
        yield data[600:]

    tasks = [
        asyncio.create_task(store.import_tar(f"i:{n}", source(n), kind="base", config=None, report=quiet))
        for n in range(12)
    ]
    await asyncio.sleep(0)
    gate.set()
    made = await asyncio.gather(*tasks)
    assert len({image.layer.digest for image in made}) == 12
    assert len(store.list()) == 12


@pytest.mark.slow
async def test_the_event_loop_stays_free_during_an_import(store):
    """Other tasks run on between the steps."""
    data = make_tar(*[(member(f"f{number}"), b"x" * 1000) for number in range(2000)])
    beats = 0

    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.002)
            beats += 1

    heart = asyncio.create_task(beat())
    await store.import_tar("a", chunks(data, len(data)), kind="base", config=None, report=quiet)
    heart.cancel()
    assert beats > 20


IMPORTER = """
import asyncio, sys
from pathlib import Path
from opendsec_server.images.store import LocalImageStore
from opendsec_server.testing.tars import make_tar, member, quiet
async def source():
    yield make_tar((member("f"), b"x" * 100_000))[:50_000]
    print("began", flush=True)
    await asyncio.Event().wait()
store = LocalImageStore(Path(sys.argv[1]), min_free_bytes=0)
asyncio.run(store.import_tar("a", source(), kind="base", config=None, report=quiet))
"""


@pytest.mark.slow
async def test_a_killed_import_is_swept_by_the_next_start(tmp_path):
    """SIGKILL in the middle: the stage is there, invisible, and goes with the next open."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", IMPORTER, str(tmp_path / "data"), stdout=asyncio.subprocess.PIPE
    )
    assert await process.stdout.readline() == b"began\n"
    store = LocalImageStore(tmp_path / "data")
    store.open()
    stages = list((tmp_path / "data/images/tmp").iterdir())
    assert len(stages) == 1  # alive, so it is spared
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert store.list() == []
    store.open()
    assert list((tmp_path / "data/images/tmp").iterdir()) == []
    store.close()


async def test_a_missing_tool_is_named_with_its_package(store, monkeypatch):
    """So that the operator knows what to install."""
    monkeypatch.setattr(steps.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedCapability, match="erofs-utils"):
        await import_bytes(store, make_tar((member("f"), b"x")))


# -- steps --------------------------------------------------------------------------------------------------------


async def test_a_failed_step_carries_its_last_lines():
    """Status and log."""
    with pytest.raises(steps.StepFailed) as caught:
        await steps.run_step("try", ["sh", "-c", "echo one; echo two >&2; exit 3"], env={"PATH": PATH})
    assert (caught.value.status, caught.value.log) == (3, ["one", "two"])


async def test_endless_lines_and_odd_bytes_do_not_hurt():
    """The log stays bounded, carriage returns end lines too."""
    seen: list[str] = []
    script = "head -c 3000000 /dev/zero | tr '\\0' x; printf 'a\\rb\\n\\377\\n'"
    await steps.run_step("try", ["sh", "-c", script], env={"PATH": PATH}, on_line=seen.append)
    assert seen[-2:] == ["b", "�"]
    assert max(len(line) for line in seen) <= steps.LOG_LINE_LENGTH


@pytest.mark.parametrize("isolated", [False, True])
async def test_cancelling_a_step_kills_its_whole_tree(isolated, tmp_path):
    """Grandchildren too; isolated ones even if they left the session. Its mounts are gone with it."""
    setsid = "setsid " if isolated else ""
    mark = tmp_path / "mnt"
    mark.mkdir()
    mount = f"mount -t tmpfs none {mark};" if isolated else ""
    script = f"{mount} {setsid}sh -c 'echo started; exec sleep 1000' & wait"
    started = asyncio.Event()
    task = asyncio.create_task(
        steps.run_step(
            "try", ["sh", "-c", script], env={"PATH": PATH}, on_line=lambda line: started.set(), isolated=isolated
        )
    )
    await started.wait()
    children = _descendants(os.getpid())
    assert any(b"sleep" in command for command in children.values())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for pid in children:
        await _gone(pid)
    assert mounts_below(tmp_path) == []


def _descendants(root: int) -> dict[int, bytes]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: dict[int, bytes] = {}
    todo = [root]
    while todo:
        parent = todo.pop()
        for pid, above in parents.items():
            if above == parent:
                todo.append(pid)
                try:
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
    return found


async def _gone(pid: int) -> None:
    """Wait until a process has ended; the pidfd tells."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), 10)
    finally:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
