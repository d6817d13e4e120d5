"""HTTP to the platform: typed errors, repeats where they are safe, no total time limit on streams.

Small exchanges take the fast lane (``_lane``) unless there is TLS; all else goes through one session of the HTTP
library.
Every failure of either is mapped here and nowhere else:

* no connection could be made: ``Unavailable`` (nothing happened),
* it broke, or no byte came for the idle time, after the request was sent: ``OutcomeUnknown``,
* an answer with an error body: the class of its code,
* an answer without one (some proxy in between): by status, ``OutcomeUnknown`` for 5xx.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache

import aiohttp
import msgspec
from yarl import URL

from opendsec._endpoint import Endpoint
from opendsec._lane import Broken, ConnectFailed, Lane, Silent
from opendsec._retry import backoff, may_repeat
from opendsec._version import __version__
from opendsec.api.errors import (
    ErrorBody,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    PlatformError,
    Unauthenticated,
    Unavailable,
    WaitTimeout,
    from_body,
)

#: Seconds without a byte after which an answer that should come at once is given up.
IDLE_SECONDS = 30.0
#: Seconds without a byte after which a stream of a running command is attached anew.
STREAM_IDLE_SECONDS = 120.0
#: Longest wait asked of the server in one request, in seconds.
WAIT_CHUNK = 60.0
_CONNECT_SECONDS = 10.0
_MAX_LINE_BYTES = 64 * 1024 * 1024
_UPLOAD_CHUNK = 256 * 1024

Body = bytes | AsyncIterator[bytes] | None

_errors = msgspec.json.Decoder(ErrorBody)


class Silence(OutcomeUnknown):
    """No byte came for the idle time of a stream; it is attached anew."""


def error_of(status: int, body: bytes) -> PlatformError:
    """Return the error that an answer stands for."""
    try:
        decoded = _errors.decode(body)
    except msgspec.MsgspecError:
        text = f"the server answered {status} without a reason"
        by_status = {400: InvalidArgument, 401: Unauthenticated, 403: PermissionDenied, 404: NotFound}
        if status in by_status:
            return by_status[status](text)
        return OutcomeUnknown(text, status=status) if status >= 500 else InvalidArgument(text)
    error = from_body(decoded)
    if type(error).retryable and not decoded.retryable:
        # The server knows better than the class: something may have happened.
        error = OutcomeUnknown(decoded.message, **{**decoded.detail, "code": decoded.code})
    return error


@lru_cache(maxsize=64)
def _timeout(idle: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=idle)


class Stream:
    """The body of an answer as it comes."""

    __slots__ = ("_response", "_where")

    def __init__(self, response: aiohttp.ClientResponse, where: str) -> None:
        self._response = response
        self._where = where

    @property
    def length(self) -> int | None:
        """Bytes announced, if they were."""
        return self._response.content_length

    async def chunks(self) -> AsyncIterator[bytes]:
        """Iterate over pieces of the body.

        Raises:
            OutcomeUnknown: it broke before its end.
        """
        content = self._response.content
        while True:
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise _mapped(error, self._where) from error
            if not chunk:
                return
            yield chunk

    async def lines(self) -> AsyncIterator[bytes]:
        """Iterate over lines without their ends; a piece after the last line end is no line."""
        rest = b""
        async for chunk in self.chunks():
            if b"\n" not in chunk:
                rest += chunk
                if len(rest) > _MAX_LINE_BYTES:
                    raise OutcomeUnknown(f"the server sent a line of more than {_MAX_LINE_BYTES} bytes")
                continue
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                if line:
                    yield line
        if rest:
            yield rest


def _mapped(error: BaseException, where: str) -> PlatformError:
    if isinstance(error, PlatformError):
        return error
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, ConnectFailed)):
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or "no answer"
        return Unavailable(f"no server answers at {where}: {reason.lower()}", address=where)
    if isinstance(error, (aiohttp.SocketTimeoutError, Silent)):
        return Silence(f"no byte came from {where} for long", address=where)
    if isinstance(error, aiohttp.InvalidURL):
        return InvalidArgument(f"{where} is not a usable address")
    return OutcomeUnknown(f"the connection to {where} broke: {str(error) or type(error).__name__}", address=where)


class Transport:
    """Sends requests.

    Args:
        endpoint: where to.
        retry_seconds: how long a request is repeated if no deadline is given.
    """

    def __init__(self, endpoint: Endpoint, *, retry_seconds: float) -> None:
        self.endpoint = endpoint
        self.retry_seconds = retry_seconds
        self._session: aiohttp.ClientSession | None = None
        self._lane: Lane | None = None
        self._headers: dict[str, str] = {}

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._session is not None

    async def open(self) -> None:
        """Get ready; connects nowhere yet."""
        headers = {"User-Agent": f"opendsec-python/{__version__}"}
        key = self.endpoint.api_key()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._headers = {**headers, "Content-Type": "application/json"}
        connector: aiohttp.BaseConnector
        if self.endpoint.socket is not None:
            connector = aiohttp.UnixConnector(path=self.endpoint.socket, limit=0, keepalive_timeout=25)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=25)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            auto_decompress=False,
            read_bufsize=256 * 1024,
        )
        # The library would repeat any PUT and DELETE; an append, say, must not be. Repeats are decided here.
        self._session._retry_connection = False
        base = URL(self.endpoint.base)
        if base.scheme == "http" and base.path in ("", "/"):
            lines = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
            self._lane = Lane(self.endpoint.socket, base.host or "localhost", base.port or 80, lines)

    async def aclose(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()
        if session is not None:
            await session.close()

    # -- small exchanges -------------------------------------------------------------------------------------------

    async def send(self, method: str, target: str, body: bytes = b"", *, idle: float = IDLE_SECONDS) -> bytes:
        """Send one request once and return the body of the answer.

        Args:
            method: HTTP method.
            target: path and query, already encoded.
            body: JSON, or bytes.
            idle: seconds without a byte after which it is given up.

        Raises:
            PlatformError: see the module.
        """
        lane = self._lane
        if lane is not None:
            try:
                status, answer = await lane.exchange(method, target, body, idle)
            except (ConnectFailed, Broken) as error:
                raise _mapped(error, self.endpoint.shown) from error
            if status >= 300:
                raise error_of(status, answer)
            return answer
        session = self._session
        if session is None:
            raise RuntimeError("the client is not open: use `async with DSecClient()` or call open()")
        try:
            async with session.request(
                method,
                self._url(target),
                data=body,
                headers=self._headers,
                timeout=_timeout(idle),
                allow_redirects=False,
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _mapped(error, self.endpoint.shown) from error
        if response.status >= 300:
            raise error_of(response.status, answer)
        return answer

    async def call(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        idempotent: bool = True,
        deadline: float | None = None,
        idle: float = IDLE_SECONDS,
    ) -> bytes:
        """Send a request, repeat it where that is safe, and return the body of the answer.

        Args:
            method: HTTP method.
            target: path and query, already encoded.
            body: JSON, or bytes.
            idempotent: doing it twice is the same as once.
            deadline: end of repeating, on the clock of the event loop; default ``retry_seconds`` after the first
                failure.
            idle: seconds without a byte after which an attempt is given up.

        Raises:
            PlatformError: the last failure.
            WaitTimeout: the deadline passed while an attempt was under way.
        """
        if deadline is None:
            try:
                return await self.send(method, target, body, idle=idle)
            except PlatformError as error:
                if not may_repeat(error, idempotent=idempotent):
                    raise
                failure = error
            deadline = asyncio.get_running_loop().time() + self.retry_seconds
            attempt = 1
            await self._pause(attempt, failure, deadline)
        else:
            attempt = 0
        while True:
            attempt += 1
            try:
                async with asyncio.timeout_at(deadline):
                    return await self.send(method, target, body, idle=idle)
            except TimeoutError as error:
                if isinstance(error, PlatformError):
                    raise
                raise WaitTimeout(f"{self.endpoint.shown} did not answer in time") from error
            except PlatformError as error:
                if not may_repeat(error, idempotent=idempotent):
                    raise
                await self._pause(attempt, error, deadline)

    def _url(self, target: str) -> URL:
        return URL(self.endpoint.base + target, encoded=True)

    async def _pause(self, attempt: int, error: PlatformError, deadline: float) -> None:
        delay = backoff(attempt, error, random.random())  # noqa: S311 - spreads clients, guards nothing
        if asyncio.get_running_loop().time() + delay >= deadline:
            raise error
        await asyncio.sleep(delay)

    async def pause_within(self, attempt: int, error: PlatformError, deadline: float) -> None:
        """Wait before another attempt; raise ``error`` if the deadline leaves no time for it."""
        await self._pause(attempt, error, deadline)

    async def upload(self, method: str, target: str, pieces: AsyncIterator[bytes], *, idle: float) -> bytes:
        """Send a body in pieces, once, and return the body of the answer.

        Raises:
            PlatformError: see the module; nothing is repeated.
            Exception: whatever ``pieces`` raises.
        """
        lane = self._lane
        if lane is None:
            async with self.stream(method, target, pieces, idle=idle) as stream:
                return b"".join([chunk async for chunk in stream.chunks()])
        try:
            status, answer = await lane.upload(method, target, _cut(pieces), idle)
        except (ConnectFailed, Broken) as error:
            raise _mapped(error, self.endpoint.shown) from error
        if status >= 300:
            raise error_of(status, answer)
        return answer

    # -- streams ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def stream(
        self, method: str, target: str, body: Body = None, *, idle: float = STREAM_IDLE_SECONDS
    ) -> AsyncIterator[Stream]:
        """Send a request once; the answer is read as it comes. Leaving early closes the connection.

        Raises:
            PlatformError: see the module; nothing is repeated.
        """
        session = self._session
        if session is None:
            raise RuntimeError("the client is not open: use `async with DSecClient()` or call open()")
        headers = self._headers
        if not isinstance(body, bytes):
            headers = {**headers, "Content-Type": "application/octet-stream"}
        where = self.endpoint.shown
        failure: PlatformError | None = None
        response: aiohttp.ClientResponse | None = None
        source = _Source(body) if body is not None and not isinstance(body, bytes) else None
        try:
            response = await session.request(
                method,
                self._url(target),
                data=source.chunks() if source is not None else body,
                headers=headers,
                timeout=_timeout(idle),
                allow_redirects=False,
            )
            if response.status >= 300:
                failure = error_of(response.status, await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if source is not None and source.error is not None:
                raise source.error from error
            failure = _mapped(error, where)
            failure.__cause__ = error
        if failure is not None:
            if response is not None:
                response.release()
            raise failure
        assert response is not None  # noqa: S101 - for the type checker
        try:
            yield Stream(response, where)
        finally:
            response.release()


class _Source:
    """Feeds a body and keeps the error of whoever makes it, which the HTTP library would hide."""

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self.error: BaseException | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for piece in _cut(self._body):
                yield piece
        except Exception as error:
            self.error = error
            raise


async def _cut(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Cut large pieces, so that one does not fill the memory of everything on the way."""
    async for chunk in body:
        for start in range(0, len(chunk), _UPLOAD_CHUNK):
            yield chunk[start : start + _UPLOAD_CHUNK]
