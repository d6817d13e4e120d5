"""Results with much output, as JSON in pieces: no 16 MiB are built in memory, and the event loop is not held up."""

from __future__ import annotations

import binascii
from collections.abc import Iterator

import msgspec

from opendsec_server.edge.exec_sink import Exec
from opendsec_server.edge.execs import ExecTable

#: Results with more output than this are sent in pieces, in bytes.
LARGE_BYTES = 512 * 1024


def is_large(exec_: Exec) -> bool:
    """Tell whether a command's result is better sent in pieces."""
    return exec_.streams[0].total + exec_.streams[1].total > LARGE_BYTES


def result_pieces(table: ExecTable, exec_: Exec) -> Iterator[bytes]:
    """Yield the JSON of an ``ExecResult``; output that comes meanwhile is left out."""
    head = msgspec.json.encode(table.describe(exec_))
    yield head[:-1]
    ends = [stream.total for stream in exec_.streams]
    truncated = False
    for name, stream, end in zip((b"stdout", b"stderr"), exec_.streams, ends, strict=True):
        yield b',"' + name + b'":"'
        rest = b""
        for piece, is_mark in table.log.kept_pieces(stream, end):
            truncated = truncated or is_mark
            data = rest + piece if rest else piece
            whole = len(data) - len(data) % 3
            yield binascii.b2a_base64(data[:whole], newline=False)
            rest = data[whole:]
        yield binascii.b2a_base64(rest, newline=False) + b'"'
    yield b',"truncated":true}' if truncated else b"}"
