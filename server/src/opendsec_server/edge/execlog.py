"""What a sandbox's execs did, as an append-only file that survives SIGKILL at any line.

One file per sandbox, ``execs.log``: records of ``u32 length, msgpack``. A record that was cut off by a crash is the
last one and is dropped; what it would have said is asked from chronus again. Output of up to ``INLINE`` bytes a stream
lives in the log itself, more moves to a ``Spool`` file. Records:

* ``start``: intent, before chronus is told. If chronus never heard of it, it never happened and is forgotten.
* ``output``: bytes of a stream at an offset.
* ``exit``: how the main process ended (and what the edge adds: oom, lost). ``closed``: both streams are at their end.
* ``drop``: forgotten.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from opendsec_server.channel.interface import ExecExit, ExecSpec
from opendsec_server.edge.spool import Spool

#: Bytes of a stream that are kept in the log before it gets a file of its own.
INLINE = 64 * 1024
#: Pieces of a stream that are kept in the log; a command that writes byte by byte soon gets a file of its own.
INLINE_PIECES = 64
#: Most bytes of output that are read at once.
PIECE = 192 * 1024
#: A log is rewritten when this many bytes of it are of forgotten execs, and more than half.
GARBAGE = 4 * 1024 * 1024
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class Start(msgspec.Struct, tag="s", kw_only=True, omit_defaults=True):
    """Intent to run a command."""

    spec: ExecSpec
    at: float
    #: Bytes for standard input that the edge has to deliver.
    feeds: bool = False
    oom_kills: int = 0


class Output(msgspec.Struct, tag="o", array_like=True):
    """Bytes of stream 1 or 2 at an offset."""

    id: str
    stream: int
    offset: int
    data: bytes


class Exit(msgspec.Struct, tag="x", kw_only=True, omit_defaults=True):
    """The main process ended, or its outcome is lost."""

    id: str
    at: float
    exit: ExecExit | None = None
    oom: bool = False
    #: If the outcome is lost: whether the infrastructure is to blame.
    infra: bool = True


class Closed(msgspec.Struct, tag="c", array_like=True):
    """Both streams are at their end."""

    id: str


class Fed(msgspec.Struct, tag="f", array_like=True):
    """Standard input was delivered whole."""

    id: str


class Drop(msgspec.Struct, tag="d", array_like=True):
    """Forget an exec."""

    id: str


class _Maps:
    """Decoder of records: array-like and map-like structs cannot share one union, so the tag is looked at first."""

    _types: dict[str, Any] = {"s": Start, "o": Output, "x": Exit, "c": Closed, "f": Fed, "d": Drop}  # noqa: RUF012

    def __init__(self) -> None:
        self._decoders = {tag: msgspec.msgpack.Decoder(kind) for tag, kind in self._types.items()}

    def decode(self, raw: bytes) -> Any:
        """Return the record."""
        return self._decoders[chr(raw[0])].decode(raw[1:])


_decoder = _Maps()


def pack(record: Any) -> bytes:
    """Return a record as it stands in the file."""
    tag: str = record.__struct_config__.tag
    body = tag.encode() + _encode(record)
    return _LENGTH.pack(len(body)) + body


def _write_whole(fd: int, raw: bytes) -> None:
    if os.write(fd, raw) != len(raw):
        raise OSError(errno.ENOSPC, "no space left for the exec log")


#: Shared by all streams without pieces; never changed.
_NONE: list[tuple[int, int, int]] = []


class Stream:
    """What one stream produced: pieces in the log, or a spool file."""

    __slots__ = ("logged", "pieces", "spool", "total")

    def __init__(self) -> None:
        self.total = 0
        #: Bytes of its records in the log.
        self.logged = 0
        #: Offset, position in the log and length of each piece.
        self.pieces: list[tuple[int, int, int]] = _NONE
        self.spool: Spool | None = None


class ExecLog:
    """The log of one sandbox."""

    __slots__ = ("_fd", "_folder", "_garbage", "_head", "_limit", "_size")

    def __init__(self, folder: Path, *, limit: int, head: int) -> None:
        self._folder = folder
        self._limit = limit
        self._head = head
        self._fd = -1
        self._size = 0
        self._garbage = 0

    @property
    def _path(self) -> Path:
        return self._folder / "execs.log"

    def _open(self) -> int:
        if self._fd < 0:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._fd).st_size
        return self._fd

    def close(self) -> None:
        """Close the file; it stays and opens again when needed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Remove the log and all spools."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def append(self, *records: Any) -> int:
        """Write records and return the size of the last in the file.

        Raises:
            OSError: the disk is full.
        """
        if len(records) == 1:
            raw = pack(records[0])
            self.append_raw(raw)
            return len(raw)
        raws = [pack(record) for record in records]
        self.append_raw(b"".join(raws))
        self._garbage += sum(map(len, raws[:-1]))
        return len(raws[-1])

    def records(self) -> Iterator[tuple[int, int, Any]]:
        """Read all whole records with their positions and sizes; a torn last one is cut off."""
        if not self._path.exists():
            return
        fd = self._open()
        raw = os.pread(fd, self._size, 0)
        at = 0
        while at + 4 <= len(raw):
            (length,) = _LENGTH.unpack_from(raw, at)
            if at + 4 + length > len(raw) or length == 0:
                break
            yield at, 4 + length, _decoder.decode(raw[at + 4 : at + 4 + length])
            at += 4 + length
        if at < self._size:
            os.ftruncate(fd, at)
            self._size = at

    def spool_path(self, exec_id: str, stream: int) -> Path:
        """Return the name of a stream's own file."""
        return self._folder / f"{exec_id}.{stream}.spool"

    def open_spool(self, exec_id: str, stream: int) -> Spool:
        """Open or make a stream's own file."""
        return Spool(self.spool_path(exec_id, stream), limit=self._limit, head=self._head)

    def output(self, exec_id: str, number: int, stream: Stream, offset: int, data: bytes) -> None:
        """Keep output of a stream; bytes that are known already are passed over.

        Raises:
            ValueError: there is a gap before ``offset``.
            OSError: the disk is full.
        """
        if offset > stream.total:
            raise ValueError(f"output at {offset} follows a gap after {stream.total}")
        if offset < stream.total:
            data = data[stream.total - offset :]
            if not data:
                return
        if stream.spool is None and (stream.total + len(data) > INLINE or len(stream.pieces) >= INLINE_PIECES):
            spool = self.open_spool(exec_id, number)
            for start, position, length in stream.pieces:
                spool.write(start, self._read(position, length))
            stream.spool, stream.pieces = spool, _NONE
        if stream.spool is not None:
            stream.spool.write(stream.total, data)
        else:
            raw = pack(Output(exec_id, number, stream.total, data))
            at = self.append_raw(raw)
            stream.logged += len(raw)
            self._piece(stream, at + len(raw) - len(data), len(data))
            return
        stream.total += len(data)

    @staticmethod
    def _piece(stream: Stream, position: int, length: int) -> None:
        """Note that the next bytes of a stream stand at a position of the log."""
        if not stream.pieces:
            stream.pieces = []
        stream.pieces.append((stream.total, position, length))
        stream.total += length

    def append_raw(self, raw: bytes) -> int:
        """Write bytes that ``pack`` made and return their position."""
        fd = self._open()
        at = self._size
        try:
            _write_whole(fd, raw)
        except OSError:
            os.ftruncate(fd, at)
            raise
        self._size += len(raw)
        return at

    def _read(self, position: int, length: int) -> bytes:
        return os.pread(self._open(), length, position)

    def adopt_output(self, stream: Stream, at: int, size: int, record: Output) -> None:
        """Take a piece that was read back from the log."""
        stream.logged += size
        if stream.spool is None and record.offset == stream.total:
            self._piece(stream, at + size - len(record.data), len(record.data))

    def adopt_spools(self, exec_id: str, streams: tuple[Stream, Stream], names: set[str]) -> None:
        """Open the spool files that exist (``names`` of the folder); they know more than the log."""
        for number, stream in enumerate(streams, 1):
            if self.spool_path(exec_id, number).name in names:
                spool = self.open_spool(exec_id, number)
                if spool.total >= stream.total:
                    stream.spool, stream.pieces, stream.total = spool, _NONE, spool.total
                    spool.close()
                else:
                    # Killed while the pieces were being moved: the log still has all of them.
                    spool.close()
                    spool.path.unlink()

    def read(self, stream: Stream, offset: int, length: int) -> tuple[int, bytes]:
        """Return the first kept offset at or after ``offset``, and up to ``length`` bytes from there."""
        if stream.spool is not None:
            return stream.spool.read(offset, length)
        for start, position, size in stream.pieces:
            if start <= offset < start + size:
                skip = offset - start
                return offset, self._read(position + skip, min(size - skip, length))
        return offset, b""

    def kept_pieces(self, stream: Stream, end: int) -> Iterator[tuple[bytes, bool]]:
        """Yield what is kept of a stream before ``end`` in pieces, with a mark where it was cut.

        Each comes with whether it is such a mark. The stream may go on meanwhile.
        """
        offset = 0
        while offset < end:
            start, data = self.read(stream, offset, min(end - offset, PIECE))
            if start > offset:
                yield b"\n[\xe2\x80\xa6 %d bytes cut \xe2\x80\xa6]\n" % (start - offset), True
            if not data:
                return
            yield data, False
            offset = start + len(data)

    def kept(self, stream: Stream) -> tuple[bytes, bool]:
        """Return all that is kept of a stream with a mark where it was cut, and whether it was cut."""
        pieces = list(self.kept_pieces(stream, stream.total))
        return b"".join([data for data, _ in pieces]), any(mark for _, mark in pieces)

    def discard(self, streams: tuple[Stream, Stream], logged: int) -> None:
        """Remove the files of a forgotten exec; ``logged`` is the size of its records besides output."""
        self._garbage += logged
        for stream in streams:
            self._garbage += stream.logged
            if stream.spool is not None:
                stream.spool.close()
                stream.spool.path.unlink(missing_ok=True)
                stream.spool = None

    def waste(self, size: int) -> None:
        """Note that bytes of the log are of forgotten execs (found when it was read back)."""
        self._garbage += size

    def names(self) -> set[str]:
        """Return the names of the files in the folder."""
        try:
            return {path.name for path in self._folder.iterdir()}
        except FileNotFoundError:
            return set()

    def remove_file(self, name: str) -> None:
        """Remove a file of the folder that belongs to nothing."""
        (self._folder / name).unlink(missing_ok=True)

    @property
    def wants_rewrite(self) -> bool:
        """Whether forgotten execs fill most of the file."""
        return self._garbage > GARBAGE and self._garbage * 2 > self._size

    def rewrite(self, keep: set[str], spooled: set[tuple[str, int]]) -> list[tuple[int, int, Any]]:
        """Write the log anew with the records of ``keep`` only, and return them with new positions and sizes.

        Output of streams in ``spooled`` (exec id and number) is left out: their own files have it.

        Raises:
            OSError: the disk is full; the old log stays.
        """
        # Whether this succeeds or not: the next time is when as much garbage has come together again.
        self._garbage = 0
        old = list(self.records())
        # An id may have been forgotten and used again: only what follows its last start is of the one that is kept.
        begun = {record.spec.id: index for index, (_, _, record) in enumerate(old) if isinstance(record, Start)}
        records: list[tuple[int, int, Any]] = []
        temporary = self._folder / "execs.log.new"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = 0
        try:
            for index, (_, _, record) in enumerate(old):
                exec_id = record.spec.id if isinstance(record, Start) else record.id
                if exec_id not in keep or index < begun.get(exec_id, 0):
                    continue
                if isinstance(record, Output) and (exec_id, record.stream) in spooled:
                    continue
                raw = pack(record)
                _write_whole(fd, raw)
                records.append((size, len(raw), record))
                size += len(raw)
            temporary.rename(self._path)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        self.close()
        self._fd, self._size = fd, size
        return records
