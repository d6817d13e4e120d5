"""Byte streams of an import: pulled from the event loop by a worker thread, decompressed by their first bytes."""

from __future__ import annotations

import asyncio
import bz2
import concurrent.futures
import gzip
import io
import lzma
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, cast

import zstandard

from opendsec.api.errors import InvalidArgument

#: Most memory a decompressor may take for its window; ``zstd --long=27`` and ``xz -9`` fit.
MAX_WINDOW = 128 * 1024 * 1024
_PIECE = 256 * 1024
#: What the decompressors raise for bad data.
_DAMAGE = (zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError, gzip.BadGzipFile, ValueError, OSError)


class Aborted(Exception):
    """The import was given up; the thread that reads ends with this."""


class PulledStream(io.RawIOBase):
    """An asynchronous source, read by a worker thread: each read asks the loop for the next piece (backpressure).

    Attributes:
        pulled: bytes taken from the source so far.
        failure: what the source raised, if it did; the read raised it too.
    """

    def __init__(self, source: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.pulled = 0
        self.failure: BaseException | None = None
        self._source = source
        self._loop = loop
        self._buffer = b""
        self._ended = False
        self._aborted = False
        #: The pull under way; touched in the loop's thread only, so that ``abort`` cannot miss it.
        self._task: asyncio.Task[object] | None = None

    def abort(self) -> None:
        """Let the reader fail soon; called in the loop's thread."""
        self._aborted = True
        if self._task is not None:
            self._task.cancel()

    def check(self) -> None:
        """Raise ``Aborted`` if the import was given up."""
        if self._aborted:
            raise Aborted

    def readable(self) -> bool:
        """Return True."""
        return True

    def peek(self, size: int) -> bytes:
        """Return the next ``size`` bytes, fewer only at the end, without consuming them."""
        while len(self._buffer) < size and (piece := self._pull()):
            self._buffer += piece
        return self._buffer[:size]

    def readinto(self, target: object) -> int:
        """Fill what is at hand; 0 is the end of the stream."""
        view = memoryview(cast("bytearray", target)).cast("B")
        if not self._buffer:
            self._buffer = self._pull()
        count = min(len(view), len(self._buffer))
        view[:count] = self._buffer[:count]
        self._buffer = self._buffer[count:]
        return count

    def _pull(self) -> bytes:
        while not self._ended:
            self.check()
            pending = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
            try:
                piece = pending.result()
            except concurrent.futures.CancelledError:
                self.check()
                self.failure = ConnectionAbortedError("the source of the tar was cancelled")
                raise self.failure from None
            except BaseException as error:
                self.failure = error
                raise
            if piece is None:
                self._ended = True
            elif piece:
                self.pulled += len(piece)
                return piece
        return b""

    async def _next(self) -> bytes | None:
        self.check()
        self._task = asyncio.current_task()
        try:
            return bytes(await anext(self._source))
        except StopAsyncIteration:
            return None
        finally:
            self._task = None


class Readable(Protocol):
    """What can be read from."""

    def read(self, size: int = -1, /) -> bytes:
        """Return at most ``size`` bytes, ``b""`` at the end."""


class _Decompressor(Protocol):
    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Decompressed(io.RawIOBase):
    """xz or bzip2, any number of streams one after the other, with bounded memory."""

    def __init__(self, raw: Readable, make: Callable[[], _Decompressor]) -> None:
        super().__init__()
        self._raw = raw
        self._make = make
        self._decompressor = make()

    def readable(self) -> bool:
        return True

    def readinto(self, target: object) -> int:
        view = memoryview(cast("bytearray", target)).cast("B")
        while True:
            data = b""
            if self._decompressor.eof:
                # Zero bytes between and after streams are padding.
                data = self._decompressor.unused_data.lstrip(b"\0")
                while not data:
                    piece = self._raw.read(_PIECE)
                    if not piece:
                        return 0
                    data = piece.lstrip(b"\0")
                self._decompressor = self._make()
            elif self._decompressor.needs_input:
                data = self._raw.read(_PIECE)
                if not data:
                    raise EOFError("the compressed data is cut off")
            piece = self._decompressor.decompress(data, len(view))
            if piece:
                view[: len(piece)] = piece
                return len(piece)


def _zstd(raw: io.BufferedReader) -> Readable:
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(raw, read_across_frames=True)
    return cast("Readable", io.BufferedReader(cast("io.RawIOBase", reader), _PIECE))


def _xz(raw: io.BufferedReader) -> Readable:
    make = cast("Callable[[], _Decompressor]", lambda: lzma.LZMADecompressor(memlimit=MAX_WINDOW))
    return io.BufferedReader(_Decompressed(raw, make), _PIECE)


def _bzip2(raw: io.BufferedReader) -> Readable:
    return io.BufferedReader(_Decompressed(raw, cast("Callable[[], _Decompressor]", bz2.BZ2Decompressor)), _PIECE)


def _gzip(raw: io.BufferedReader) -> Readable:
    return cast("Readable", io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=raw)), _PIECE))


_BY_MAGIC: tuple[tuple[bytes, Callable[[io.BufferedReader], Readable]], ...] = (
    (b"\x1f\x8b", _gzip),
    (b"\x28\xb5\x2f\xfd", _zstd),
    (b"\xfd7zXZ\0", _xz),
    (b"BZh", _bzip2),
)


class ForwardReader:
    """The decompressed stream as ``tarfile`` wants it: read, tell, and seeks that only go forward.

    Attributes:
        budget: bytes that may still be read; bounds what a header may make us keep in memory. None: any.
    """

    def __init__(self, raw: PulledStream) -> None:
        self.budget: int | None = None
        self._raw = raw
        self._position = 0
        buffered = io.BufferedReader(cast("Any", raw), _PIECE)
        magic = raw.peek(6)
        if not magic:
            raise InvalidArgument("the tar is empty")
        self._stream: Readable = next(
            (make(buffered) for start, make in _BY_MAGIC if magic.startswith(start)), buffered
        )

    def read(self, size: int = -1) -> bytes:
        """Read exactly ``size`` bytes, fewer only at the end.

        Raises:
            InvalidArgument: the compressed data is damaged, or the budget is used up.
        """
        if self.budget is not None:
            self.budget -= size
            if size < 0 or self.budget < 0:
                raise InvalidArgument("the tar is damaged: a header is larger than allowed")
        try:
            data = self._stream.read(size)
        except _DAMAGE as error:
            if self._raw.failure is not None:
                raise
            raise InvalidArgument(f"the tar is damaged: {error}") from error
        self._position += len(data)
        return data

    def seekable(self) -> bool:
        """Return True: forward seeks are enough for ``tarfile``."""
        return True

    def tell(self) -> int:
        """Return how far we are."""
        return self._position

    def seek(self, position: int) -> None:
        """Skip to a position ahead."""
        if position < self._position:
            raise InvalidArgument("the tar is damaged: a size is negative")
        budget, self.budget = self.budget, None
        while self._position < position:
            self._raw.check()
            if not self.read(min(_PIECE, position - self._position)):
                break
        self.budget = budget

    def drain(self) -> None:
        """Read to the end, so that the sender can finish."""
        self.budget = None
        while self.read(_PIECE):
            self._raw.check()
