"""One event loop in a background thread, through which blocking calls reach the asynchronous SDK."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Generator, Iterable
from typing import Any, Generic, Self, TypeVar

from opendsec._trees import in_thread

T = TypeVar("T")
#: Seconds that an interrupted call may take for its clean-up.
_CLEANUP_SECONDS = 10.0


class Portal:
    """Runs coroutines for blocking callers.

    The thread starts with the first call and serves the whole process; after a fork the child gets its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._pid = 0

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._pid != os.getpid():
            self._lock = threading.Lock()
            self._loop = None
            self._pid = os.getpid()
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="opendsec-sync", daemon=True)
                thread.start()
                self._loop, self._thread = loop, thread.ident or 0
            return self._loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result.

        An interrupt (Ctrl-C) cancels it, waits for its clean-up and is raised.

        Raises:
            RuntimeError: called from a callback of the SDK itself.
        """
        loop = self._running()
        if threading.get_ident() == self._thread:
            work.close()
            raise RuntimeError("a blocking call from a callback of the SDK would wait for itself")
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(lambda ended: _hand_over(ended, done))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        loop.call_soon_threadsafe(begin)
        try:
            return done.result()
        except BaseException:
            if not done.done():
                loop.call_soon_threadsafe(cancel)
                concurrent.futures.wait([done], _CLEANUP_SECONDS)
            raise

    def iterate(self, source: AsyncIterator[T]) -> Generator[T, None, None]:
        """Iterate over an asynchronous iterator; leaving early closes it."""

        async def step() -> tuple[bool, T | None]:
            try:
                return True, await anext(source)
            except StopAsyncIteration:
                return False, None

        async def close() -> None:
            aclose = getattr(source, "aclose", None)
            if aclose is not None:
                await aclose()

        try:
            while True:
                more, value = self.run(step())
                if not more:
                    return
                yield value  # type: ignore[misc]
        finally:
            self.run(close())


def _hand_over(task: asyncio.Task[T], done: concurrent.futures.Future[T]) -> None:
    if task.cancelled():
        done.set_exception(concurrent.futures.CancelledError())
        return
    error = task.exception()
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())


def as_source(data: bytes | str | Iterable[bytes]) -> bytes | str | AsyncIterator[bytes]:
    """Return data as the asynchronous SDK takes it; an iterable is read in a worker thread."""
    return data if isinstance(data, (bytes, str)) else in_thread(iter(data))


Inner = TypeVar("Inner")
portal = Portal()


class Mirror(Generic[Inner]):
    """A blocking twin of an object of the asynchronous SDK."""

    def __init__(self, inner: Inner) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)


class MirrorBlock(Mirror[Inner]):
    """A twin that is also a ``with`` block."""

    def __enter__(self) -> Self:
        portal.run(self._inner.__aenter__())  # type: ignore[attr-defined]
        return self

    def __exit__(self, *error: object) -> None:
        portal.run(self._inner.__aexit__(*error))  # type: ignore[attr-defined]
