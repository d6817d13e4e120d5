"""Output of one stream of one exec, kept in a file of bounded size and addressed by byte offset.

Layout: 16 bytes of header (magic, total bytes ever written), ``head`` bytes that are kept for good, then a ring for
the newest rest. The header is written after the data: after a crash the total is at most behind, chronus sends
again from there, and the same bytes land in the same places. The ring is larger than what is ever read from it by
``SLACK`` (more than chronus may have in flight), so that data of which the header does not know yet never overwrote
data that may be read.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

_MAGIC = b"odsspool"
_HEADER = struct.Struct("<8sQ")
SLACK = 1024 * 1024


class Spool:
    """One stream's file. All calls are short writes and reads of the page cache."""

    __slots__ = ("_fd", "_head", "_limit", "_ring", "path", "total")

    def __init__(self, path: Path, *, limit: int, head: int) -> None:
        self.path = path
        self._limit = limit
        self._head = head
        self._ring = limit - head + SLACK
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        raw = os.pread(self._fd, _HEADER.size, 0)
        magic, total = _HEADER.unpack(raw) if len(raw) == _HEADER.size else (_MAGIC, 0)
        self.total: int = total if magic == _MAGIC else 0

    def close(self) -> None:
        """Close the file; it stays, and opens again when it is needed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        return self._fd

    def _place(self, offset: int) -> tuple[int, int]:
        """Return the file position of an offset and how many bytes fit there in one piece."""
        if offset < self._head:
            return _HEADER.size + offset, self._head - offset
        at = (offset - self._head) % self._ring
        return _HEADER.size + self._head + at, self._ring - at

    def write(self, offset: int, data: bytes) -> None:
        """Take output at its offset; what is known already is passed over.

        Raises:
            ValueError: there is a gap between what is known and ``offset``.
        """
        if offset > self.total:
            raise ValueError(f"output at {offset} follows a gap after {self.total}")
        view = memoryview(data)[self.total - offset :]
        at = self.total
        fd = self._open()
        while view:
            position, room = self._place(at)
            written = os.pwrite(fd, view[:room], position)
            at += written
            view = view[written:]
        if at != self.total:
            self.total = at
            os.pwrite(fd, _HEADER.pack(_MAGIC, at), 0)

    @property
    def tail_start(self) -> int:
        """First offset after the head that is still kept."""
        return max(self._head, self.total - (self._limit - self._head))

    def read(self, offset: int, length: int) -> tuple[int, bytes]:
        """Return the first offset at or after ``offset`` that is kept, and up to ``length`` bytes from there."""
        if offset >= self._head:
            offset = max(offset, self.tail_start)
        length = min(length, self.total - offset)
        if length <= 0:
            return offset, b""
        position, room = self._place(offset)
        idle = self._fd < 0
        try:
            return offset, os.pread(self._open(), min(length, room), position)
        finally:
            # A stream at its end holds no descriptor between reads: a sandbox keeps a thousand of them.
            if idle:
                self.close()
