"""Unpack a hostile tar below a folder, as root, so that nothing outside is touched and attributes are kept.

* Absolute names are made relative; ``..`` is refused, and so is a member whose parent passes a symbolic link that
  leads out of the root (absolute targets count from the root, as they will inside a sandbox).
* A later member replaces an earlier one of the same name, and never writes through it.
* Kept: modes with set-user-id bits, numeric owners, times to the nanosecond, hard links, symbolic links, devices,
  fifos, sparse files, and the extended attributes of ``KEPT_XATTRS``.

The folder must be reachable by root alone and nothing else may change it meanwhile: then a parent that was found to
be a real directory stays one, and path strings are safe.
"""

# Names are bytes here, which pathlib cannot hold.
# ruff: noqa: PTH101, PTH102, PTH108, PTH115, PTH123, PTH211

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, cast

from opendsec.api.errors import DiskFull, Internal, InvalidArgument
from opendsec_server.images.streams import ForwardReader, PulledStream
from opendsec_server.storage.local import disk_full_mapped, remove_tree

#: Prefixes of the extended attributes that are kept; the others are the host's business (labels, overlay redirects).
KEPT_XATTRS = ("user.", "security.capability", "system.posix_acl_", "trusted.overlay.opaque")
#: Most bytes of one member's headers (names, attributes, sparse maps).
MAX_HEADER_BYTES = 4 * 1024 * 1024
#: Most bytes of a member's name, so that host paths stay below PATH_MAX.
MAX_NAME_BYTES = 3500
#: Most bytes of holes in all sparse files together: building the image reads them.
MAX_HOLE_BYTES = 4 * 1024**3
_XATTR = "SCHILY.xattr."
_LINKS_FOLLOWED = 40
_COPY = 1024 * 1024
#: Free space is looked at whenever this much was written.
_SPACE_STEP = 16 * 1024 * 1024


class Unpacker:
    """Unpacks one tar; blocking, for a worker thread.

    Args:
        stream: the tar, maybe compressed.
        root: an empty folder.
        reserve_bytes: stop with ``DiskFull`` when less than this is left on the disk.
        report: called with a sentence now and then (in this thread).
    """

    def __init__(
        self, stream: PulledStream, root: str | os.PathLike[str], *, reserve_bytes: int, report: Callable[[str], None]
    ) -> None:
        self._stream = stream
        self._root = os.fsencode(root)
        self._reserve = reserve_bytes
        self._report = report
        self._count = 0
        self._written = self._next_look = 0
        self._holes = 0
        self._left_out = 0
        #: Named parent -> real path below the root, for parents that were checked.
        self._real: dict[bytes, bytes] = {b"": b""}
        #: Times of directories, set last as their content changes them.
        self._times: dict[bytes, int] = {b"": 0}

    def run(self) -> None:
        """Unpack all of it.

        Raises:
            InvalidArgument: the tar is damaged, cut off or unsafe; the message names the member.
            DiskFull: the disk is full.
            Aborted: the import was given up.
        """
        reader = ForwardReader(self._stream)
        os.chmod(self._root, 0o755)  # noqa: S103 - the root of an image; its parent is closed
        member_type = type("Member", (_Member,), {"ended": False})
        reader.budget = MAX_HEADER_BYTES
        with _damage_mapped(self._stream):
            archive = tarfile.TarFile(
                fileobj=reader,  # type: ignore[arg-type]
                tarinfo=member_type,
                encoding="utf-8",
                errors="surrogateescape",
            )
        while True:
            self._stream.check()
            reader.budget = MAX_HEADER_BYTES
            with _damage_mapped(self._stream):
                member = archive.next()
            reader.budget = None
            if member is None:
                break
            archive.members = []  # type: ignore[attr-defined]
            self._extract(archive, member)
            self._count += 1
            if self._count % 2000 == 0:
                self._report(f"unpacked {self._count} files, {self._written >> 20} MiB")
        if not member_type.ended:  # type: ignore[attr-defined]
            raise InvalidArgument("the tar is damaged or cut off: its end mark is missing")
        reader.drain()
        for path, when in sorted(self._times.items(), reverse=True):
            os.utime(self._at(path), ns=(when, when), follow_symlinks=False)
        left_out = f", left out {self._left_out} extended attributes" if self._left_out else ""
        self._report(f"unpacked {self._count} files, {self._written >> 20} MiB{left_out}")

    def _at(self, path: bytes) -> bytes:
        return self._root + b"/" + path if path else self._root

    def _extract(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        shown = member.name[:200].encode(errors="backslashreplace").decode()
        if member.type == b"V":  # GNU volume label
            return
        try:
            with disk_full_mapped("the image store"):
                self._place(archive, member)
        except InvalidArgument as error:
            raise InvalidArgument(f"tar member {shown!r}: {error.message}", member=shown) from error
        except tarfile.TarError as error:
            raise InvalidArgument(f"tar member {shown!r} is damaged or cut off: {error}", member=shown) from error
        except (OSError, OverflowError, ValueError) as error:
            if self._stream.failure is not None:
                raise
            if isinstance(error, OSError) and error.errno == errno.EIO:
                raise Internal(f"tar member {shown!r} could not be written: {error}") from error
            raise InvalidArgument(f"tar member {shown!r} cannot be unpacked: {error}", member=shown) from error

    def _place(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = _clean(member.name)
        parent, _, last = name.rpartition(b"/")
        path = self._parent(parent) + last if name else b""
        if not name and not member.isdir():
            raise InvalidArgument("only a directory can be the root")
        target = self._at(path)
        if member.isdir():
            self._make_directory(path)
        elif member.islnk():
            self._link(member, path)
            return
        elif member.issym():
            self._clear(path)
            os.symlink(member.linkname.encode("utf-8", "surrogateescape"), target)
        elif member.ischr() or member.isblk():
            self._clear(path)
            kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK
            os.mknod(target, kind | 0o600, os.makedev(member.devmajor, member.devminor))
        elif member.isfifo():
            self._clear(path)
            os.mkfifo(target, 0o600)
        elif member.isreg():
            self._clear(path)
            self._write(archive, member, target)
        else:
            raise InvalidArgument(f"members of type {member.type!r} are unknown")
        self._attributes(member, path)

    def _parent(self, named: bytes) -> bytes:
        """Return the real directory of a member's parent with a slash at its end, made where it is missing."""
        real = self._real.get(named)
        if real is None:
            real = self._resolve(named)
            self._real[named] = real
        return real + b"/" if real else b""

    def _resolve(self, named: bytes) -> bytes:
        todo = [part for part in reversed(named.split(b"/")) if part]
        done: list[bytes] = []
        links = 0
        while todo:
            part = todo.pop()
            if part == b"..":
                if not done:
                    raise InvalidArgument("its path passes a symbolic link that leads out of the root")
                done.pop()
                continue
            path = b"/".join([*done, part])
            try:
                mode = os.lstat(self._at(path)).st_mode
            except FileNotFoundError:
                self._new_directory(path)
                mode = stat.S_IFDIR
            if stat.S_ISLNK(mode):
                links += 1
                if links > _LINKS_FOLLOWED:
                    raise InvalidArgument("its path passes too many symbolic links")
                link = os.readlink(self._at(path))
                if link.startswith(b"/"):
                    done = []
                todo += [piece for piece in reversed(link.split(b"/")) if piece not in {b"", b"."}]
            elif stat.S_ISDIR(mode):
                done.append(part)
            else:
                raise InvalidArgument("its parent is no directory")
        return b"/".join(done)

    def _new_directory(self, path: bytes) -> None:
        os.mkdir(self._at(path), 0o755)
        self._times.setdefault(path, 0)

    def _make_directory(self, path: bytes) -> None:
        try:
            mode = os.lstat(self._at(path)).st_mode
        except FileNotFoundError:
            self._new_directory(path)
            return
        if not stat.S_ISDIR(mode):
            self._clear(path)
            self._new_directory(path)

    def _clear(self, path: bytes) -> None:
        """Remove what an earlier member put there."""
        target = self._at(path)
        try:
            mode = os.lstat(target).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            remove_tree(Path(os.fsdecode(target)))
            inside = path + b"/"
            self._times = {p: t for p, t in self._times.items() if p != path and not p.startswith(inside)}
        else:
            os.unlink(target)
        if stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
            self._real = {b"": b""}

    def _link(self, member: tarfile.TarInfo, path: bytes) -> None:
        parent, _, last = _clean(member.linkname).rpartition(b"/")
        source = self._at(self._parent(parent) + last)
        if not last or not os.path.lexists(source) or stat.S_ISDIR(os.lstat(source).st_mode):
            raise InvalidArgument("it is a hard link to something that is not in the tar before it, or a directory")
        target = self._at(path)
        if os.path.lexists(target) and os.path.samestat(os.lstat(source), os.lstat(target)):
            return
        self._clear(path)
        os.link(source, target, follow_symlinks=False)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, target: bytes) -> None:
        content = archive.extractfile(member)
        sparse = cast("Any", member.sparse)  # typeshed has it wrong: a list of pairs
        segments: list[tuple[int, int]] = sparse if sparse is not None else [(0, member.size)]
        if content is None or any(offset < 0 or size < 0 or offset + size > member.size for offset, size in segments):
            raise InvalidArgument("its sparse map makes no sense")
        self._holes += member.size - sum(size for _, size in segments)
        if not 0 <= self._holes <= MAX_HOLE_BYTES:
            raise InvalidArgument(f"sparse files have more than {MAX_HOLE_BYTES >> 30} GiB of holes")
        with open(target, "xb", buffering=0) as file:
            for offset, size in segments:
                content.seek(offset)
                file.seek(offset)
                left = size
                while left:
                    self._stream.check()
                    data = content.read(min(_COPY, left))
                    if not data:
                        raise InvalidArgument("the tar is cut off")
                    self._space(len(data))
                    view = memoryview(data)
                    while view:
                        view = view[file.write(view) :]
                    left -= len(data)
            if sparse is not None:
                file.truncate(member.size)

    def _space(self, count: int) -> None:
        if self._written >= self._next_look:
            self._next_look = self._written + _SPACE_STEP
            free = os.statvfs(self._root)
            if free.f_bavail * free.f_frsize < self._reserve:
                raise DiskFull(f"less than {self._reserve >> 20} MiB are left on the disk of the image store")
        self._written += count

    def _attributes(self, member: tarfile.TarInfo, path: bytes) -> None:
        target = self._at(path)
        for number in (member.uid, member.gid):
            if not 0 <= number < 2**32 - 1:
                raise InvalidArgument(f"owner {number} is out of range")
        # In this order: chown clears set-user-id bits and capabilities.
        os.chown(target, member.uid, member.gid, follow_symlinks=False)
        if not member.issym():
            os.chmod(target, member.mode & 0o7777)
        for key, value in member.pax_headers.items():
            if key.startswith(_XATTR):
                self._xattr(target, key[len(_XATTR) :], value.encode("utf-8", "surrogateescape"))
        when = _mtime(member)
        if member.isdir():
            self._times[path] = when
        else:
            os.utime(target, ns=(when, when), follow_symlinks=False)

    def _xattr(self, target: bytes, name: str, value: bytes) -> None:
        if not name.startswith(KEPT_XATTRS):
            self._left_out += 1
            return
        try:
            os.setxattr(target, name.encode("utf-8", "surrogateescape"), value, follow_symlinks=False)
        except OSError as error:
            # ENOSPC means here: larger than the file system can attach to one file.
            raise InvalidArgument(f"extended attribute {name[:100]!r} cannot be kept: {error.strerror}") from error


class _Member(tarfile.TarInfo):
    """Remembers whether the archive's end mark was seen, which ``tarfile`` does not tell."""

    ended = False

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError:
            cls.ended = len(buf) == tarfile.BLOCKSIZE and not any(buf)
            raise


def _clean(name: str) -> bytes:
    raw = name.encode("utf-8", "surrogateescape")
    if b"\0" in raw or len(raw) > MAX_NAME_BYTES:
        raise InvalidArgument(f"its name holds a zero byte or is longer than {MAX_NAME_BYTES} bytes")
    parts = [part for part in raw.split(b"/") if part not in {b"", b"."}]
    if b".." in parts:
        raise InvalidArgument("'..' in its name leads out of the root")
    return b"/".join(parts)


def _mtime(member: tarfile.TarInfo) -> int:
    """Return nanoseconds, exact where pax has a fraction (``member.mtime`` is a float then)."""
    try:
        exact = Decimal(member.pax_headers["mtime"]) if "mtime" in member.pax_headers else Decimal(member.mtime)
        return int(exact * 1_000_000_000)
    except (InvalidOperation, ValueError, OverflowError) as error:
        raise InvalidArgument("its time makes no sense") from error


class _damage_mapped:  # noqa: N801 - used as a context manager
    """Turn whatever ``tarfile`` raises for bad headers into ``InvalidArgument``; errors of the source pass."""

    def __init__(self, stream: PulledStream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        damage = (tarfile.TarError, ValueError, LookupError, ArithmeticError, EOFError)
        if isinstance(error, damage) and not isinstance(error, InvalidArgument) and self._stream.failure is None:
            raise InvalidArgument(f"the tar is damaged: {error}") from error
