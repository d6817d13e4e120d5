"""One connection to one chronus, as an ``asyncio`` protocol without stream objects.

Every channel of the connection has a handler (``handlers``); frames are handed out as they are cut from what the
socket brought, and what the handlers answer at once (acknowledgements, credit) goes out in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from opendsec.api.errors import NotFound, Unavailable
from opendsec.api.models import FileInfo
from opendsec_server.channel import codec
from opendsec_server.channel.handlers import Call, ExecHandler, Handler, Inbound, Outbound
from opendsec_server.channel.interface import Channel, ExecSink, ExecSpec, GuestInfo

#: File operations under way on one connection; further ones wait. chronus takes twice as many.
_MAX_FILE_OPERATIONS = 32
#: Longest time a note that needs no answer waits for other traffic, in seconds.
_NOTE_DELAY = 0.02

_T = TypeVar("_T")


class ChannelClient(asyncio.Protocol):
    """Implements ``Channel``; made by ``connect``."""

    __slots__ = (
        "_execs",
        "_file_slots",
        "_greeting",
        "_handlers",
        "_last_channel",
        "_loop",
        "_lost",
        "_notes",
        "_notes_timer",
        "_replies",
        "_splitter",
        "_transport",
        "_waiters",
        "info",
    )

    info: GuestInfo

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._splitter = codec.Splitter()
        self._handlers: dict[int, Handler] = {}
        self._execs: dict[str, ExecHandler] = {}
        self._last_channel = 0
        self._greeting: asyncio.Future[None] | None = self._loop.create_future()
        self._lost: Unavailable | None = None
        self._waiters: list[asyncio.Future[None]] = []
        #: Frames that answer what is being read; one write each time.
        self._replies: list[bytes] = []
        #: Frames that may wait for other traffic.
        self._notes: list[bytes] = []
        self._notes_timer: asyncio.TimerHandle | None = None
        self._file_slots: asyncio.Semaphore | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the hello without waiting for the guest's."""
        # What create_unix_connection makes; uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(codec.hello())

    def data_received(self, data: bytes) -> None:
        """Hand out frames."""
        try:
            for kind, channel, payload in self._splitter.feed(data):
                if self._greeting is not None:
                    self._greet(kind, payload)
                    continue
                handler = self._handlers.get(channel)
                # What was under way when a channel ended is harmless.
                if handler is not None:
                    handler.on_frame(kind, payload)
        except codec.ProtocolError as error:
            self._fail(Unavailable(f"chronus broke the protocol: {error}"))
            return
        if self._replies:
            replies, self._replies = self._replies, []
            if self._lost is None:
                self.send(replies[0] if len(replies) == 1 else b"".join(replies))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all who wait."""
        reason = f": {exc}" if exc else ""
        self._fail(Unavailable(f"the connection to the sandbox was lost{reason}"))

    # Used by handlers

    def send(self, data: bytes) -> None:
        """Write frames, together with notes that wait.

        Raises:
            Unavailable: the connection is lost.
        """
        if self._lost is not None or self._transport is None:
            raise self._error()
        if self._notes:
            self._notes.append(data)
            data = b"".join(self._notes)
            self._notes.clear()
        self._transport.write(data)

    def reply(self, data: bytes) -> None:
        """Send a frame when all that has just been read is handled."""
        self._replies.append(data)

    def release(self, channel: int) -> None:
        """Forget the handler of a channel."""
        self._handlers.pop(channel, None)

    def release_exec(self, handler: ExecHandler) -> None:
        """Forget an exec's handler, unless a newer one has taken its place."""
        self.release(handler.channel)
        if self._execs.get(handler.exec_id) is handler:
            del self._execs[handler.exec_id]

    def _error(self) -> Unavailable:
        text = self._lost.message if self._lost is not None else "the connection to the sandbox is not open"
        return Unavailable(text)

    def _greet(self, kind: int, payload: bytes) -> None:
        if kind != codec.HELLO:
            raise codec.ProtocolError("no hello")
        found = codec.decode_hello(payload)
        if found.protocol != codec.PROTOCOL:
            raise codec.ProtocolError(f"chronus speaks version {found.protocol}, this program {codec.PROTOCOL}")
        self.info = GuestInfo(version=found.version, protocol=found.protocol, boot_id=found.boot_id)
        greeting, self._greeting = self._greeting, None
        if greeting is not None and not greeting.done():
            greeting.set_result(None)

    def _fail(self, error: Unavailable) -> None:
        if self._lost is not None:
            return
        self._lost = error
        if self._notes_timer is not None:
            self._notes_timer.cancel()
            self._notes_timer = None
        self._notes.clear()
        self._replies.clear()
        if self._transport is not None:
            self._transport.abort()
        handlers = list(self._handlers.values())
        self._handlers.clear()
        self._execs.clear()
        for handler in handlers:
            handler.on_lost(self._error())
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_exception(self._error())
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _new_channel(self) -> int:
        if self._lost is not None:
            raise self._error()
        channel = self._last_channel
        while True:
            channel = (channel + 1) & 0xFFFF_FFFF
            if channel and channel not in self._handlers:
                self._last_channel = channel
                return channel

    async def _call(self, *fields: Any) -> Any:
        channel = self._new_channel()
        data = codec.request(channel, *fields)
        call = Call(self, channel)
        self._handlers[channel] = call
        self.send(data)
        return await call.result

    # Channel

    @property
    def is_open(self) -> bool:
        """Whether the connection stands."""
        return self._lost is None and self._greeting is None

    async def wait_closed(self) -> None:
        """Return when the connection is lost or closed."""
        if self._lost is None:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    async def aclose(self) -> None:
        """Close the connection; the sandbox and its execs go on."""
        if self._lost is None:
            self._flush_notes()
            if self._transport is not None:
                self._transport.close()
            await self.wait_closed()

    async def ping(self) -> None:
        """Return when chronus has answered."""
        await self._call(codec.OP_PING)

    async def shutdown(self) -> None:
        """Ask chronus to end, and with it the sandbox."""
        await self._call(codec.OP_SHUTDOWN)

    def _register(self, channel: int, exec_id: str, sink: ExecSink) -> ExecHandler:
        old = self._execs.get(exec_id)
        if old is not None:
            old.replaced()
        handler = ExecHandler(self, channel, exec_id, sink)
        self._handlers[channel] = handler
        self._execs[exec_id] = handler
        return handler

    async def exec_start(self, spec: ExecSpec, sink: ExecSink) -> None:
        """Start a command, or attach from offset 0 if chronus already knows the id."""
        channel = self._new_channel()
        data = codec.exec_start(channel, spec)
        handler = self._register(channel, spec.id, sink)
        self.send(data)
        await handler.ready

    async def exec_attach(self, exec_id: str, offsets: tuple[int, int], sink: ExecSink) -> bool:
        """Continue receiving a known exec; ``False`` if chronus never heard of it."""
        channel = self._new_channel()
        data = codec.request(channel, codec.OP_EXEC_ATTACH, exec_id, *offsets)
        handler = self._register(channel, exec_id, sink)
        handler.attaching = True
        self.send(data)
        return bool(await handler.ready)

    def _exec(self, exec_id: str) -> ExecHandler:
        handler = self._execs.get(exec_id)
        if handler is None:
            if self._lost is not None:
                raise self._error()
            raise NotFound("the command has ended")
        return handler

    async def exec_stdin(self, exec_id: str, data: bytes) -> None:
        """Write standard input; waits while the command does not read."""
        await self._exec(exec_id).write_stdin(data)

    async def exec_stdin_close(self, exec_id: str) -> None:
        """End standard input."""
        await self._exec(exec_id).close_stdin()

    async def exec_signal(self, exec_id: str, signal: int, *, tree: bool = False) -> None:
        """Send a signal to the main process or the whole tree."""
        await self._call(codec.OP_EXEC_SIGNAL, exec_id, signal, tree)

    async def exec_stop(self, exec_id: str, grace_ms: int) -> None:
        """TERM to the tree, KILL after the grace; returns at once."""
        await self._call(codec.OP_EXEC_STOP, exec_id, grace_ms)

    def exec_forget(self, exec_id: str) -> None:
        """Let chronus drop the record of an exec; goes out with other traffic or soon."""
        if self._lost is not None:
            return
        self._notes.append(codec.request(0, codec.OP_EXEC_FORGET, exec_id))
        if len(self._notes) >= 64:
            self._flush_notes()
        elif self._notes_timer is None:
            self._notes_timer = self._loop.call_later(_NOTE_DELAY, self._flush_notes)

    def _flush_notes(self) -> None:
        if self._notes_timer is not None:
            self._notes_timer.cancel()
            self._notes_timer = None
        if self._notes and self._lost is None:
            self.send(b"")

    async def exec_list(self) -> list[str]:
        """Return the ids of all execs that chronus holds."""
        found = await self._call(codec.OP_EXEC_LIST)
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            self._fail(Unavailable("chronus broke the protocol: malformed list of execs"))
            raise self._error()
        return found

    # Files

    def _slots(self) -> asyncio.Semaphore:
        if self._file_slots is None:
            self._file_slots = asyncio.Semaphore(_MAX_FILE_OPERATIONS)
        return self._file_slots

    async def _file_call(self, *fields: Any) -> Any:
        async with self._slots():
            return await self._call(*fields)

    async def _inbound(self, *fields: Any) -> AsyncIterator[bytes]:
        async with self._slots():
            channel = self._new_channel()
            data = codec.request(channel, *fields)
            stream = Inbound(self, channel)
            self._handlers[channel] = stream
            try:
                self.send(data)
                while (chunk := await stream.next_chunk()) is not None:
                    yield chunk
            finally:
                stream.give_up()

    async def _outbound(self, data: AsyncIterator[bytes], *fields: Any) -> Any:
        async with self._slots():
            channel = self._new_channel()
            request = codec.request(channel, *fields)
            stream = Outbound(self, channel)
            self._handlers[channel] = stream
            try:
                self.send(request)
                async for chunk in data:
                    if not await stream.write(chunk):
                        break
                return await stream.finish()
            finally:
                stream.give_up()

    def read_file(
        self, path: bytes, *, offset: int = 0, length: int | None = None, user: str = "0"
    ) -> AsyncIterator[bytes]:
        """Stream a regular file (a range of it)."""
        return self._inbound(codec.OP_READ, path, user, offset, length)

    async def write_file(
        self,
        path: bytes,
        data: AsyncIterator[bytes],
        *,
        mode: int | None = None,
        offset: int | None = None,
        append: bool = False,
        parents: bool = False,
        user: str = "0",
    ) -> int:
        """Write a regular file and return the bytes written."""
        return int(await self._outbound(data, codec.OP_WRITE, path, user, mode, offset, append, parents))

    async def stat(self, path: bytes, *, user: str = "0") -> FileInfo:
        """Describe a path; a symbolic link is not followed."""
        found = await self._file_call(codec.OP_STAT, path, user)
        return self._checked(codec.decode_stat, found)

    def _checked(self, decode: Callable[[bytes], _T], payload: Any) -> _T:
        try:
            if not isinstance(payload, bytes):
                raise codec.ProtocolError("bytes expected")  # noqa: TRY301
            return decode(payload)
        except codec.ProtocolError as error:
            self._fail(Unavailable(f"chronus broke the protocol: {error}"))
            raise self._error() from error

    async def list_dir(self, path: bytes, *, recursive: bool = False, user: str = "0") -> AsyncIterator[FileInfo]:
        """List a directory, sorted by name; does not cross symbolic links."""
        async for chunk in self._inbound(codec.OP_LIST, path, user, recursive):
            for entry in self._checked(codec.decode_entries, chunk):
                yield entry

    async def mkdir(self, path: bytes, *, mode: int = 0o755, parents: bool = False, user: str = "0") -> None:
        """Make a directory; with ``parents`` also those above, and an existing one is fine."""
        await self._file_call(codec.OP_MKDIR, path, user, mode, parents)

    async def remove(self, path: bytes, *, recursive: bool = False, user: str = "0") -> None:
        """Remove a file or an empty directory, or a tree; never follows symbolic links."""
        await self._file_call(codec.OP_REMOVE, path, user, recursive)

    async def move(self, source: bytes, target: bytes, *, user: str = "0") -> None:
        """Rename; falls back to copy and remove across file systems."""
        await self._file_call(codec.OP_MOVE, source, user, target)

    def tar_out(self, path: bytes, *, user: str = "0") -> AsyncIterator[bytes]:
        """Stream a tree as tar, names relative to ``path``."""
        return self._inbound(codec.OP_TAR_OUT, path, user)

    async def tar_in(self, path: bytes, data: AsyncIterator[bytes], *, user: str = "0") -> None:
        """Unpack a tar below ``path``."""
        await self._outbound(data, codec.OP_TAR_IN, path, user)


async def connect(path: str | Path, *, timeout: float = 5.0) -> Channel:
    """Connect to the socket of a chronus; ``timeout`` is in seconds.

    Raises:
        Unavailable: nobody listens, or no valid hello came in time.
    """
    loop = asyncio.get_running_loop()
    protocol: ChannelClient | None = None
    try:
        async with asyncio.timeout(timeout):
            _, protocol = await loop.create_unix_connection(ChannelClient, str(path))
            greeting = protocol._greeting
            if greeting is not None:
                await greeting
    except BaseException as error:
        if protocol is not None:
            protocol._fail(Unavailable("the connection was given up"))
        if isinstance(error, TimeoutError):
            raise Unavailable(f"chronus did not answer within {timeout} s") from error
        if isinstance(error, OSError):
            raise Unavailable(f"cannot connect to chronus: {error}") from error
        raise
    return protocol
