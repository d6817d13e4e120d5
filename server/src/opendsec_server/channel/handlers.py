"""What the host does with the frames of one channel: a call, an exec, a stream in, a stream out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any, Protocol

from opendsec.api.errors import NotFound, PlatformError, Unavailable
from opendsec_server.channel import codec
from opendsec_server.channel.interface import ExecSink

_log = logging.getLogger(__name__)
#: Output is acknowledged in steps of this many bytes.
_ACK_STEP = 64 * 1024
#: Credit of a stream is granted in steps of this many bytes.
_CREDIT_STEP = 64 * 1024


class Connection(Protocol):
    """What a handler needs of its connection."""

    def send(self, data: bytes) -> None:
        """Write frames now."""

    def reply(self, data: bytes) -> None:
        """Write a frame when all that was read is handled."""

    def release(self, channel: int) -> None:
        """Forget the handler of a channel."""

    def release_exec(self, handler: ExecHandler) -> None:
        """Forget an exec's handler."""


class Handler(Protocol):
    """Receives the frames of one channel."""

    def on_frame(self, kind: int, payload: bytes) -> None:
        """Take one frame; ``ProtocolError`` closes the connection."""

    def on_lost(self, error: Unavailable) -> None:
        """The connection is lost."""


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if future.done():
        return
    if isinstance(value, Exception):
        future.set_exception(value)
        # Whoever gave up waiting does not want to hear of it.
        future.exception()
    else:
        future.set_result(value)


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


class Call:
    """A request with one answer."""

    __slots__ = ("_channel", "_connection", "result")

    def __init__(self, connection: Connection, channel: int) -> None:
        self._connection = connection
        self._channel = channel
        self.result = _future()

    def on_frame(self, kind: int, payload: bytes) -> None:
        """Take the answer."""
        if kind != codec.RESPONSE:
            raise codec.ProtocolError(f"frame of kind {kind} where an answer is due")
        self._connection.release(self._channel)
        _settle(self.result, codec.decode_response(payload))

    def on_lost(self, error: Unavailable) -> None:
        """Fail the call."""
        _settle(self.result, error)


class ExecHandler:
    """One exec: feeds its sink, acknowledges, and sends standard input as it is allowed."""

    __slots__ = (
        "_acked",
        "_connection",
        "_credit_waiter",
        "_expected",
        "_sink",
        "_stdin_lock",
        "_stdin_window",
        "attaching",
        "channel",
        "exec_id",
        "ready",
    )

    def __init__(self, connection: Connection, channel: int, exec_id: str, sink: ExecSink) -> None:
        self._connection = connection
        self._sink: ExecSink | None = sink
        self.channel = channel
        self.exec_id = exec_id
        #: Done when chronus has answered; for ``exec_attach`` its value tells whether the exec is known.
        self.ready = _future()
        self.attaching = False
        #: Next offset by stream, once the first output has told where it begins.
        self._expected: list[int | None] = [None, None, None]
        self._acked = [0, 0, 0]
        self._stdin_window = codec.STDIN_WINDOW
        self._credit_waiter: asyncio.Future[Any] | None = None
        self._stdin_lock: asyncio.Lock | None = None

    def on_frame(self, kind: int, payload: bytes) -> None:
        """Pass one frame on to the sink."""
        if kind == codec.OUTPUT:
            self._output(payload)
        elif kind == codec.STARTED:
            pid = codec.decode_number(payload)
            self._tell("started", pid)
            if not self.attaching:
                _settle(self.ready, None)
        elif kind == codec.EXIT:
            exit_ = codec.decode_exit(payload)
            self._tell("exited", exit_)
            if not self.attaching:
                _settle(self.ready, None)
        elif kind == codec.CLOSED:
            self._connection.release_exec(self)
            self._tell("closed")
            self._sink = None
            self._wake()
        elif kind == codec.CREDIT:
            self._stdin_window = min(self._stdin_window + codec.decode_number(payload), codec.STDIN_WINDOW)
            self._wake()
        elif kind == codec.RESPONSE:
            self._answer(codec.decode_response(payload))
        else:
            raise codec.ProtocolError(f"frame of kind {kind} for an exec")

    def _answer(self, value: Any) -> None:
        if isinstance(value, PlatformError):
            self._connection.release_exec(self)
            _settle(self.ready, value)
        elif self.attaching and value is None:
            self._connection.release_exec(self)
            _settle(self.ready, False)
        elif self.attaching and type(value) is int and 0 <= value <= codec.STDIN_WINDOW:
            self._stdin_window = value
            _settle(self.ready, True)
        else:
            raise codec.ProtocolError("malformed answer for an exec")

    def _output(self, payload: bytes) -> None:
        stream, offset, data = codec.decode_output(payload)
        expected = self._expected[stream]
        if expected is None:
            self._acked[stream] = offset
        elif offset != expected:
            raise codec.ProtocolError(f"output at {offset} where {expected} is due")
        end = offset + len(data)
        self._expected[stream] = end
        if not self._tell("output", stream, offset, data):
            return
        if end - self._acked[stream] >= _ACK_STEP:
            self._acked[stream] = end
            self._connection.reply(codec.ack(self.channel, stream, end))

    def _tell(self, what: str, *args: Any) -> bool:
        """Call the sink; one that fails gets nothing more, and nothing more is acknowledged for it."""
        sink = self._sink
        if sink is None:
            return False
        try:
            getattr(sink, what)(*args)
        except Exception:
            _log.exception("the sink of exec %s failed in %s", self.exec_id, what)
            self._sink = None
            with contextlib.suppress(Exception):
                sink.lost()
            return False
        return True

    def _wake(self) -> None:
        waiter, self._credit_waiter = self._credit_waiter, None
        if waiter is not None:
            _settle(waiter, None)

    def replaced(self) -> None:
        """Another handler takes over this exec."""
        self._connection.release_exec(self)
        self.on_lost(Unavailable("another reader has attached to the exec"))

    def on_lost(self, error: Unavailable) -> None:
        """Tell the sink and all who wait."""
        _settle(self.ready, error)
        waiter, self._credit_waiter = self._credit_waiter, None
        if waiter is not None:
            _settle(waiter, error)
        self._tell("lost")
        self._sink = None

    async def write_stdin(self, data: bytes) -> None:
        """Send standard input in order, as credit allows."""
        if self._stdin_lock is None:
            self._stdin_lock = asyncio.Lock()
        async with self._stdin_lock:
            position = 0
            while position < len(data):
                while self._stdin_window == 0:
                    if self._sink is None:
                        raise NotFound("the command has ended")
                    self._credit_waiter = _future()
                    await self._credit_waiter
                step = min(self._stdin_window, codec.MAX_DATA, len(data) - position)
                self._connection.send(codec.frame(codec.DATA, self.channel, data[position : position + step]))
                self._stdin_window -= step
                position += step

    async def close_stdin(self) -> None:
        """End standard input after all that was written before."""
        if self._stdin_lock is None:
            self._stdin_lock = asyncio.Lock()
        async with self._stdin_lock:
            self._connection.send(codec.frame(codec.END, self.channel))


class Inbound:
    """A stream from the sandbox, ended by an answer."""

    __slots__ = ("_allowed", "_channel", "_chunks", "_connection", "_end", "_owed", "_waiter")

    def __init__(self, connection: Connection, channel: int) -> None:
        self._connection = connection
        self._channel = channel
        self._chunks: deque[bytes] = deque()
        self._allowed = codec.STREAM_WINDOW
        self._owed = 0
        self._waiter: asyncio.Future[Any] | None = None
        #: Error or ``True`` once ended.
        self._end: Exception | bool = False

    def on_frame(self, kind: int, payload: bytes) -> None:
        """Take data or the end."""
        if kind == codec.DATA:
            self._allowed -= len(payload)
            if self._allowed < 0:
                raise codec.ProtocolError("more data than was allowed")
            self._chunks.append(payload)
        elif kind == codec.RESPONSE:
            self._connection.release(self._channel)
            value = codec.decode_response(payload)
            self._end = value if isinstance(value, PlatformError) else True
        else:
            raise codec.ProtocolError(f"frame of kind {kind} in a stream")
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            _settle(waiter, None)

    def on_lost(self, error: Unavailable) -> None:
        """Fail the reader; what it has not taken yet is dropped, as the rest will never come."""
        if self._end is False:
            self._end = error
        self._wake()

    async def next_chunk(self) -> bytes | None:
        """Return the next bytes, or ``None`` at the end."""
        while not self._chunks:
            if isinstance(self._end, Exception):
                raise self._end
            if self._end:
                return None
            self._waiter = _future()
            await self._waiter
        chunk = self._chunks.popleft()
        self._owed += len(chunk)
        if self._owed >= _CREDIT_STEP and self._end is False:
            self._allowed += self._owed
            self._connection.send(codec.credit(self._channel, self._owed))
            self._owed = 0
        return chunk

    def give_up(self) -> None:
        """End the stream from our side if it has not ended."""
        if self._end is False:
            self._end = True
            self._connection.release(self._channel)
            self._connection.send(codec.frame(codec.CANCEL, self._channel))


class Outbound:
    """A stream into the sandbox, ended by an answer."""

    __slots__ = ("_channel", "_connection", "_response", "_waiter", "_window")

    def __init__(self, connection: Connection, channel: int) -> None:
        self._connection = connection
        self._channel = channel
        self._window = codec.STREAM_WINDOW
        self._response = _future()
        self._waiter: asyncio.Future[Any] | None = None

    def on_frame(self, kind: int, payload: bytes) -> None:
        """Take credit or the answer."""
        if kind == codec.CREDIT:
            self._window = min(self._window + codec.decode_number(payload), codec.STREAM_WINDOW)
        elif kind == codec.RESPONSE:
            self._connection.release(self._channel)
            _settle(self._response, codec.decode_response(payload))
        else:
            raise codec.ProtocolError(f"frame of kind {kind} for an outgoing stream")
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            _settle(waiter, None)

    def on_lost(self, error: Unavailable) -> None:
        """Fail the writer."""
        _settle(self._response, error)
        self._wake()

    async def write(self, data: bytes) -> bool:
        """Send as credit allows; ``False`` if the answer has come already."""
        view = memoryview(data)
        while view:
            while self._window == 0 and not self._response.done():
                self._waiter = _future()
                await self._waiter
            if self._response.done():
                return False
            step = min(self._window, codec.MAX_DATA, len(view))
            self._connection.send(codec.frame(codec.DATA, self._channel, bytes(view[:step])))
            self._window -= step
            view = view[step:]
        return not self._response.done()

    async def finish(self) -> Any:
        """End the stream and return the answer."""
        if not self._response.done():
            self._connection.send(codec.frame(codec.END, self._channel))
        return await self._response

    def give_up(self) -> None:
        """Cancel if no answer has come."""
        if not self._response.done():
            self._response.cancel()
            self._connection.release(self._channel)
            self._connection.send(codec.frame(codec.CANCEL, self._channel))
