"""Make the EROFS image of a root folder: the same files, owners and times give the same bytes.

Uncompressed, by measurement (docs/reference/images.md): half the time to a cold first read, no CPU on the page-fault
path; the object store may compress blobs on their way.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from opendsec.api.errors import Internal
from opendsec_server.images.steps import StepFailed, require_tool, run_step

#: The fixed identity of every image; its content has a digest for that.
_UUID = "00000000-0000-0000-0000-000000000000"
#: mkfs.erofs writes this as build time and clamps later file times to it: far in the future, so that none is changed.
_EPOCH = "253402300799"
#: Holes above this make the image chunked: holes and repeated chunks take no space then, but building is slower.
_HOLES_WORTH_CHUNKS = 64 * 1024 * 1024
_CHUNK_SIZE = 65536
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Enough ELF files to know the architecture of a tree.
_ELF_SAMPLES = 256
#: ELF machine, class (1: 32 bit, 2: 64 bit) and byte order (1: little) -> ``uname -m``.
_MACHINES = {
    (62, 2, 1): "x86_64",
    (3, 1, 1): "i686",
    (183, 2, 1): "aarch64",
    (40, 1, 1): "armv7l",
    (243, 2, 1): "riscv64",
    (22, 2, 2): "s390x",
    (21, 2, 1): "ppc64le",
    (258, 2, 1): "loongarch64",
}


class TreeFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What a walk over a root folder tells."""

    #: Most frequent architecture of its executables and libraries as ``uname -m`` has it; None: there are none.
    architecture: str | None
    #: Bytes that sparse files claim but do not take.
    holes: int


def inspect_tree(root: Path, check: Callable[[], None] = lambda: None) -> TreeFacts:
    """Walk a root folder. Blocking.

    Args:
        root: the folder; symbolic links are not followed.
        check: called for each directory; may raise to stop.

    Raises:
        OSError: something cannot be read.
    """
    machines: Counter[str] = Counter()
    holes = 0
    todo = [os.fsencode(root)]
    while todo:  # no recursion: depth is the input's choice
        check()
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    todo.append(entry.path)
                elif stat.S_ISREG(info.st_mode):
                    holes += max(0, info.st_size - info.st_blocks * 512)
                    binary = info.st_mode & 0o111 or b".so" in entry.name
                    if binary and info.st_size > 64 and machines.total() < _ELF_SAMPLES:
                        machine = elf_machine(entry.path)
                        if machine is not None:
                            machines[machine] += 1
    architecture = machines.most_common(1)[0][0] if machines else None
    return TreeFacts(architecture=architecture, holes=holes)


def elf_machine(path: str | bytes | os.PathLike[str]) -> str | None:
    """Return the architecture of an ELF file, None for any other file. Blocking."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a bytes path
        head = file.read(20)
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return None
    machine = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    return _MACHINES.get((machine, head[4], head[5]))


async def build_erofs(root: Path, image: Path, *, holes: int = 0) -> None:
    """Make an EROFS image of a folder.

    Args:
        root: absolute path of the folder.
        image: absolute path of the file to make.
        holes: what ``inspect_tree`` found.

    Raises:
        UnsupportedCapability: mkfs.erofs is not installed.
        DiskFull: the disk is full.
        Internal: mkfs.erofs failed; ``detail`` has its last lines.
    """
    require_tool("mkfs.erofs", "erofs-utils")
    chunks = [f"--chunksize={_CHUNK_SIZE}"] if holes > _HOLES_WORTH_CHUNKS else []
    command = ["mkfs.erofs", "--quiet", "-U", _UUID, *chunks, "--", str(image), str(root)]
    try:
        await run_step("build the layer image", command, env={"PATH": _PATH, "SOURCE_DATE_EPOCH": _EPOCH})
    except StepFailed as error:
        raise error.as_error(Internal, error.log[-1] if error.log else "mkfs.erofs failed") from error
