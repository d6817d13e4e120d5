"""Frames and messages of the chronus protocol; no I/O.

The twin of ``crates/chronus-proto``: both are held to the vectors in ``crates/chronus-proto/vectors``. What comes in
may be the work of a hostile guest: every size is bounded and every malformed byte raises ``ProtocolError``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from opendsec.api.errors import (
    Conflict,
    DiskFull,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    PlatformError,
    Unavailable,
)
from opendsec.api.models import FileInfo
from opendsec_server.channel.interface import ExecExit, ExecSpec

#: Version of the protocol.
PROTOCOL = 1
#: Most bytes of data in one frame.
MAX_DATA = 64 * 1024
#: Most payload bytes of a request or response.
MAX_CONTROL = 4 * 1024 * 1024
#: Bytes of a stream that may be under way before the receiver grants more.
STREAM_WINDOW = 256 * 1024
#: Bytes of standard input that may be under way before chronus grants more.
STDIN_WINDOW = 64 * 1024

HELLO = 1
REQUEST = 2
RESPONSE = 3
DATA = 4
END = 5
CREDIT = 6
CANCEL = 7
STARTED = 8
OUTPUT = 9
ACK = 10
EXIT = 11
CLOSED = 12

#: Largest payload by kind, for the kinds that chronus sends.
_MAX_FROM_GUEST = {
    HELLO: 4096,
    RESPONSE: MAX_CONTROL,
    DATA: MAX_DATA,
    CREDIT: 4,
    STARTED: 4,
    OUTPUT: MAX_DATA + 9,
    EXIT: 4096,
    CLOSED: 0,
}

OP_EXEC_START = 1
OP_EXEC_ATTACH = 2
OP_EXEC_SIGNAL = 3
OP_EXEC_STOP = 4
OP_EXEC_FORGET = 5
OP_EXEC_LIST = 6
OP_PING = 7
OP_SHUTDOWN = 8
OP_STAT = 20
OP_LIST = 21
OP_READ = 22
OP_WRITE = 23
OP_MKDIR = 24
OP_REMOVE = 25
OP_MOVE = 26
OP_TAR_OUT = 27
OP_TAR_IN = 28

_HEADER = struct.Struct("<IBI")
_OUTPUT = struct.Struct("<BQ")
_ACK_FRAME = struct.Struct("<IBIBQ")
_CREDIT_FRAME = struct.Struct("<IBII")
HEADER_SIZE = _HEADER.size

_ERRORS: dict[int, type[PlatformError]] = {
    1: InvalidArgument,
    2: NotFound,
    3: PermissionDenied,
    4: Conflict,
    5: DiskFull,
    6: Unavailable,
    7: Internal,
}
_KINDS = ("file", "directory", "symlink", "fifo", "socket", "char", "block")


class ProtocolError(Exception):
    """The peer sent what the protocol does not allow; its connection must be closed."""


class _Exit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    code: int
    signal: int
    timed_out: bool
    start_error: str | None
    duration_us: int
    cpu_us: int
    peak_bytes: int
    stdout_bytes: int
    stderr_bytes: int


class _Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    path: bytes
    kind: int
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: bytes | None


class Hello(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """First frame of chronus."""

    magic: str
    protocol: int
    version: str
    boot_id: str


_encode = msgspec.msgpack.Encoder().encode
_decode_any = msgspec.msgpack.Decoder().decode
_decode_exit = msgspec.msgpack.Decoder(_Exit).decode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_entry = msgspec.msgpack.Decoder(_Entry).decode
_decode_entries = msgspec.msgpack.Decoder(list[_Entry]).decode


def frame(kind: int, channel: int, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    return _HEADER.pack(len(payload), kind, channel) + payload


def request(channel: int, *fields: Any) -> bytes:
    """Return a request: its number, then its fields.

    Raises:
        InvalidArgument: it is too large, or holds text that is no Unicode.
    """
    try:
        payload = _encode(fields)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise InvalidArgument(f"the request cannot be encoded: {error}") from error
    if len(payload) > MAX_CONTROL:
        raise InvalidArgument(f"the request is larger than {MAX_CONTROL} bytes")
    return _HEADER.pack(len(payload), REQUEST, channel) + payload


def exec_start(channel: int, spec: ExecSpec) -> bytes:
    """Return the request that starts a command."""
    return request(
        channel,
        OP_EXEC_START,
        spec.id,
        spec.argv,
        spec.env,
        spec.cwd,
        spec.user,
        spec.stdin,
        spec.timeout_ms,
        spec.grace_ms,
        spec.rlimits,
    )


def ack(channel: int, stream: int, offset: int) -> bytes:
    """Return the frame that acknowledges output up to ``offset``."""
    return _ACK_FRAME.pack(9, ACK, channel, stream, offset)


def credit(channel: int, count: int) -> bytes:
    """Return the frame that allows ``count`` more bytes."""
    return _CREDIT_FRAME.pack(4, CREDIT, channel, count)


def hello() -> bytes:
    """Return the first frame of the host."""
    return frame(HELLO, 0, _encode(("opendsec", PROTOCOL)))


def decode_hello(payload: bytes) -> Hello:
    """Decode the first frame of chronus."""
    try:
        found = _decode_hello(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError("malformed hello") from error
    if found.magic != "chronus":
        raise ProtocolError("the peer is not chronus")
    return found


def decode_number(payload: bytes) -> int:
    """Decode the payload of ``STARTED`` or ``CREDIT``."""
    if len(payload) != 4:
        raise ProtocolError("malformed number")
    return int.from_bytes(payload, "little")


def decode_output(payload: bytes) -> tuple[int, int, bytes]:
    """Decode ``OUTPUT``: stream, offset, data."""
    if len(payload) < 9:
        raise ProtocolError("malformed output")
    stream, offset = _OUTPUT.unpack_from(payload)
    if stream not in {1, 2}:
        raise ProtocolError(f"there is no output stream {stream}")
    return stream, offset, payload[9:]


def decode_exit(payload: bytes) -> ExecExit:
    """Decode ``EXIT``."""
    try:
        found = _decode_exit(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError("malformed exit") from error
    return ExecExit(
        exit_code=found.code,
        signal=found.signal,
        timed_out=found.timed_out,
        start_error=found.start_error,
        duration_ms=found.duration_us / 1000,
        cpu_ms=found.cpu_us / 1000,
        peak_memory_bytes=found.peak_bytes,
        stdout_bytes=found.stdout_bytes,
        stderr_bytes=found.stderr_bytes,
    )


def decode_response(payload: bytes) -> Any:
    """Decode ``RESPONSE``: its result, or the error it carries as an instance."""
    try:
        found = _decode_any(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed response") from error
    if not isinstance(found, list) or len(found) != 2 or type(found[0]) is not int:
        raise ProtocolError("malformed response")
    code, value = found
    if code == 0:
        return value
    if not isinstance(value, str):
        raise ProtocolError("malformed error")
    return _ERRORS.get(code, Internal)(value[:4096])


def _file_info(entry: _Entry) -> FileInfo:
    if not 0 <= entry.kind < len(_KINDS):
        raise ProtocolError("malformed file kind")
    text = entry.path.decode("utf-8", "replace")
    return FileInfo(
        path=text,
        kind=_KINDS[entry.kind],  # type: ignore[arg-type]
        size=entry.size,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime=entry.mtime,
        target=None if entry.target is None else entry.target.decode("utf-8", "replace"),
        path_raw=None if text.encode("utf-8", "replace") == entry.path else entry.path,
    )


def decode_stat(payload: bytes) -> FileInfo:
    """Decode the result of a ``stat``."""
    try:
        return _file_info(_decode_entry(payload))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError("malformed entry") from error


def decode_entries(payload: bytes) -> list[FileInfo]:
    """Decode one ``DATA`` frame of a listing."""
    try:
        return [_file_info(entry) for entry in _decode_entries(payload)]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError("malformed entries") from error


class Splitter:
    """Cuts a byte stream into frames; keeps only what is incomplete."""

    __slots__ = ("_need", "_rest")

    def __init__(self) -> None:
        self._rest: bytearray | None = None
        self._need = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield kind, channel and payload of each frame that is now complete.

        Raises:
            ProtocolError: a frame is of a kind that chronus does not send, or too large.
        """
        rest = self._rest
        if rest is not None:
            rest += data
            if len(rest) < self._need:
                return
            data = bytes(rest)
            self._rest = None
        position, end = 0, len(data)
        while end - position >= HEADER_SIZE:
            length, kind, channel = _HEADER.unpack_from(data, position)
            limit = _MAX_FROM_GUEST.get(kind)
            if limit is None or length > limit:
                raise ProtocolError(f"frame of kind {kind} with {length} bytes")
            start = position + HEADER_SIZE
            if end - start < length:
                self._keep(data, position, HEADER_SIZE + length)
                return
            position = start + length
            yield kind, channel, data[start:position]
        if position < end:
            self._keep(data, position, HEADER_SIZE)

    def _keep(self, data: bytes, position: int, need: int) -> None:
        self._rest = bytearray(memoryview(data)[position:])
        self._need = need
