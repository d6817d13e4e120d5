"""Trees as tar: packing a local folder, and unpacking what a sandbox sent, which may be hostile.

``pack`` makes a tar piece by piece from a folder. ``Unpacker`` is fed a tar piece by piece and writes below one folder;
it is safe against names and links that leave the folder, links planted for later members to follow, devices, header
bombs and more bytes than allowed: every directory on the way is opened relative to the one before without following
links, and every file is created new. Both are synchronous; callers run them in worker threads.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from collections.abc import Generator, Iterator
from pathlib import Path

from opendsec.api.errors import InvalidArgument, OutcomeUnknown, OutputLimit, PolicyDenied

_BLOCK = 512
_READ = 256 * 1024
#: Longest header extension (long name, pax records), in bytes.
_MAX_EXTENSION = 1024 * 1024
_MAX_MEMBERS = 5_000_000
_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY | os.O_CLOEXEC


# -- packing -------------------------------------------------------------------------------------------------------


def pack(root: Path, *, complete: bool = False) -> Iterator[bytes]:
    """Yield a tar of what is below ``root`` (the top has the name ``.``), in pieces of about 256 KiB.

    Args:
        root: a directory.
        complete: as an image needs it: also owners, devices, fifos and extended attributes. Else owners are left out
            and special files are passed over.
    """
    seen: dict[tuple[int, int], str] = {}
    buffer = bytearray()
    for path, name, info in _walk(root):
        member = _member(path, name, info, seen, complete=complete)
        if member is None:
            continue
        buffer += member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if member.isreg() and member.size:
            with Path(path).open("rb", buffering=0) as file:
                left = member.size
                while left:
                    # A file that shrank meanwhile is filled up with zeros, one that grew is cut: the tar stays right.
                    piece = file.read(min(_READ, left)) or bytes(min(_READ, left))
                    left -= len(piece)
                    buffer += piece
                    if len(buffer) >= _READ:
                        yield bytes(buffer)
                        buffer.clear()
            buffer += bytes(-member.size % _BLOCK)
        if len(buffer) >= _READ:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer) + bytes(2 * _BLOCK)


def _walk(root: Path) -> Iterator[tuple[str, str, os.stat_result]]:
    top = os.fspath(root)
    info = root.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise InvalidArgument(f"{top} is not a directory")
    yield top, ".", info
    stack = [(top, ".")]
    while stack:
        folder, prefix = stack.pop()
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            with contextlib.suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                name = f"{prefix}/{entry.name}"
                yield entry.path, name, info
                if stat.S_ISDIR(info.st_mode):
                    stack.append((entry.path, name))


def _member(
    path: str, name: str, info: os.stat_result, seen: dict[tuple[int, int], str], *, complete: bool
) -> tarfile.TarInfo | None:
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(info.st_mode)
    member.mtime = int(info.st_mtime)
    if complete:
        member.uid, member.gid = info.st_uid, info.st_gid
        member.pax_headers = _xattrs(path)
    if stat.S_ISREG(info.st_mode):
        first = seen.setdefault((info.st_dev, info.st_ino), name) if info.st_nlink > 1 else name
        if first != name:
            member.type, member.linkname = tarfile.LNKTYPE, first
        else:
            member.size = info.st_size
    elif stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, str(Path(path).readlink())
    elif complete and stat.S_ISFIFO(info.st_mode):
        member.type = tarfile.FIFOTYPE
    elif complete and (stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode)):
        member.type = tarfile.CHRTYPE if stat.S_ISCHR(info.st_mode) else tarfile.BLKTYPE
        member.devmajor, member.devminor = os.major(info.st_rdev), os.minor(info.st_rdev)
    else:
        return None
    return member


def _xattrs(path: str) -> dict[str, str]:
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listxattr(path, follow_symlinks=False):
            value = os.getxattr(path, name, follow_symlinks=False)
            found[f"SCHILY.xattr.{name}"] = value.decode("utf-8", "surrogateescape")
    return found


# -- unpacking -----------------------------------------------------------------------------------------------------


class _Header:
    """One member."""

    __slots__ = ("kind", "link", "mode", "mtime", "name", "size")

    def __init__(self, block: bytes) -> None:
        if sum(block[:148]) + sum(block[156:]) + 8 * 0x20 != _number(block[148:156]):
            raise InvalidArgument("the archive is damaged: a header has a wrong checksum")
        self.name = _text(block[:100])
        self.mode = _number(block[100:108])
        self.size = _number(block[124:136])
        self.mtime = float(_number(block[136:148]))
        self.kind = block[156:157]
        self.link = _text(block[157:257])
        if block[257:263] == b"ustar\0" and block[345] != 0:
            self.name = _text(block[345:500]) + b"/" + self.name


class Unpacker:
    """Writes a tar below ``target``, an existing directory.

    Args:
        target: where to.
        skip_unsafe: pass over members that would leave the target or are devices (see ``skipped``); else refuse.
        limit_bytes: most bytes of all files together.

    Attributes:
        files: members written.
        bytes: bytes of all files written.
        skipped: names of members passed over.
    """

    def __init__(self, target: Path, *, skip_unsafe: bool, limit_bytes: int) -> None:
        self.files = 0
        self.bytes = 0
        self.skipped: list[str] = []
        self._skip = skip_unsafe
        self._limit = limit_bytes
        self._root = os.open(target, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
        self._data = bytearray()
        self._done = False
        #: Directories' modes and times are set at the end, when nothing is written into them any more.
        self._directories: dict[bytes, tuple[int, float]] = {}
        self._members = 0
        self._run = self._members_from()
        next(self._run)

    def feed(self, data: bytes) -> None:
        """Take the next piece.

        Raises:
            PolicyDenied: a member would leave the target.
            OutputLimit: more bytes than allowed.
            InvalidArgument: this is no tar.
        """
        if self._done:
            return
        self._data += data
        try:
            self._run.send(None)
        except StopIteration:
            self._done = True

    def finish(self) -> None:
        """Set what belongs last.

        Raises:
            OutcomeUnknown: the tar ended early.
        """
        try:
            if not self._done:
                raise OutcomeUnknown("the archive ended early")
            for name in sorted(self._directories, reverse=True):
                mode, mtime = self._directories[name]
                self._finish_directory(name, mode, mtime)
        finally:
            self.close()

    def close(self) -> None:
        """Release the target; what was written stays."""
        self._run.close()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    # -- reading ---------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> Generator[None, None, bytes]:
        while len(self._data) < count:
            yield
        piece = bytes(self._data[:count])
        del self._data[:count]
        return piece

    def _members_from(self) -> Generator[None, None, None]:
        yield
        long_name: bytes | None = None
        long_link: bytes | None = None
        pax: dict[bytes, bytes] = {}
        while True:
            block = yield from self._take(_BLOCK)
            if not block.strip(b"\0"):
                return
            header = _Header(block)
            if header.kind in (b"L", b"K", b"x", b"g"):
                if header.size > _MAX_EXTENSION:
                    raise OutputLimit("a header of the archive is too long")
                extension = (yield from self._take(header.size + -header.size % _BLOCK))[: header.size]
                if header.kind == b"L":
                    long_name = extension.rstrip(b"\0")
                elif header.kind == b"K":
                    long_link = extension.rstrip(b"\0")
                elif header.kind == b"x":
                    pax = _pax(extension)
                continue
            header.name = pax.get(b"path", long_name if long_name is not None else header.name)
            header.link = pax.get(b"linkpath", long_link if long_link is not None else header.link)
            with contextlib.suppress(ValueError):
                header.size = int(pax.get(b"size", header.size))
                header.mtime = float(pax.get(b"mtime", header.mtime))
            if any(key.startswith(b"GNU.sparse") for key in pax):
                header.kind = b"S"
            long_name, long_link, pax = None, None, {}
            self._members += 1
            if self._members > _MAX_MEMBERS:
                raise OutputLimit(f"the archive has more than {_MAX_MEMBERS} members")
            yield from self._member(header)

    def _member(self, header: _Header) -> Generator[None, None, None]:
        holds_data = header.kind not in (b"1", b"2", b"3", b"4", b"5", b"6")
        size = header.size if holds_data else 0
        if size < 0:
            raise InvalidArgument("the archive is damaged: a member has a negative size")
        file = -1
        parts: list[bytes] = []
        try:
            parts = _parts(header.name)
            file = self._create(header, parts)
        except _Unsafe as error:
            shown = os.fsdecode(header.name[:200])
            if not self._skip:
                raise PolicyDenied(f"refused to unpack {shown!r}: {error}", member=shown) from error
            self.skipped.append(shown)
        try:
            left = size
            while left:
                if not self._data:
                    yield
                piece = bytes(self._data[:left])
                del self._data[: len(piece)]
                left -= len(piece)
                if file >= 0:
                    self.bytes += len(piece)
                    if self.bytes > self._limit:
                        raise OutputLimit(f"the archive holds more than {self._limit} bytes")
                    _write_all(file, piece)
            if file >= 0:
                os.fchmod(file, header.mode & 0o777)
                os.utime(file, (header.mtime, header.mtime))
        finally:
            if file >= 0:
                os.close(file)
        yield from self._take(-size % _BLOCK)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _create(self, header: _Header, parts: list[bytes]) -> int:
        """Create a member; return the open file if its data follows, else -1."""
        kind = header.kind
        if kind == b"5":
            with self._opened(parts):
                pass
            self._directories[b"/".join(parts)] = (header.mode & 0o777, header.mtime)
            return -1
        if not parts:
            raise _Unsafe("it has no name")
        if kind not in (b"0", b"\0", b"7", b"1", b"2"):
            raise _Unsafe("it is a device, a fifo or of an unknown kind")
        if kind == b"2":
            _check_link(parts, header.link)
        self.files += 1
        with self._opened(parts[:-1]) as folder:
            self._clear(folder, parts[-1])
            if kind == b"2":
                os.symlink(header.link, parts[-1], dir_fd=folder)
                return -1
            if kind == b"1":
                self._hard_link(header.link, folder, parts[-1])
                return -1
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(parts[-1], flags, 0o600, dir_fd=folder)

    def _hard_link(self, link: bytes, folder: int, name: bytes) -> None:
        source = _parts(link)
        if not source:
            raise _Unsafe("it links to nothing")
        with self._opened(source[:-1], create=False) as where:
            try:
                info = os.stat(source[-1], dir_fd=where, follow_symlinks=False)
                if not stat.S_ISREG(info.st_mode):
                    raise _Unsafe("it is a hard link to what is no file")
                os.link(source[-1], name, src_dir_fd=where, dst_dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError as error:
                raise _Unsafe("it is a hard link to what is not there") from error

    @contextlib.contextmanager
    def _opened(self, parts: list[bytes], *, create: bool = True) -> Iterator[int]:
        """Open a directory below the target, making those on the way; links are never followed."""
        current = os.dup(self._root)
        try:
            for part in parts:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=current)
                try:
                    below = os.open(part, _DIRECTORY, dir_fd=current)
                except (NotADirectoryError, OSError) as error:
                    raise _Unsafe("a link or a file stands where a directory should be") from error
                os.close(current)
                current = below
            yield current
        finally:
            os.close(current)

    @staticmethod
    def _clear(folder: int, name: bytes) -> None:
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError) as error:
            raise _Unsafe("a directory stands in its place") from error

    def _finish_directory(self, name: bytes, mode: int, mtime: float) -> None:
        with contextlib.suppress(_Unsafe, OSError), self._opened(_parts(name), create=False) as folder:
            os.fchmod(folder, mode | 0o700)
            os.utime(folder, (mtime, mtime))


class _Unsafe(Exception):
    """A member must not be unpacked."""


def _parts(name: bytes) -> list[bytes]:
    if name.startswith(b"/") or b"\0" in name:
        raise _Unsafe("its name is absolute")
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise _Unsafe("its name leaves the target")
    if any(len(part) > 255 for part in parts) or len(parts) > 1000:
        raise _Unsafe("its name is too long")
    return parts


def _check_link(parts: list[bytes], link: bytes) -> None:
    if not link or link.startswith(b"/") or b"\0" in link:
        raise _Unsafe("it is a link out of the target")
    depth = len(parts) - 1
    for part in link.split(b"/"):
        if part == b"..":
            depth -= 1
            if depth < 0:
                raise _Unsafe("it is a link out of the target")
        elif part not in (b"", b"."):
            depth += 1


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes) -> int:
    if field[0] & 0x80:
        value = int.from_bytes(field[1:], "big")
        return value if field[0] == 0x80 else value - (1 << (8 * len(field) - 8))
    text = field.strip(b" \0")
    try:
        return int(text, 8) if text else 0
    except ValueError as error:
        raise InvalidArgument("the archive is damaged: a header has a malformed number") from error


def _pax(data: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    while data.strip(b"\0"):
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not len(length) + 2 < int(length) <= len(data):
            raise InvalidArgument("the archive is damaged: malformed pax records")
        record, data = data[len(length) + 1 : int(length) - 1], data[int(length) :]
        key, _, value = record.partition(b"=")
        found[key] = value
    return found


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
