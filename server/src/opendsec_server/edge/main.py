"""``python -m opendsec_server.edge.main``: reads the configuration, builds the parts, serves until stopped.

``--openapi`` prints the API's document instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import gc
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog
import uvloop

from opendsec.api.errors import Conflict, PlatformError
from opendsec.api.models import TERMINAL
from opendsec_server.backends.container.backend import ContainerBackend
from opendsec_server.edge.app import EdgeApp, build_litestar
from opendsec_server.edge.journal import Journal
from opendsec_server.edge.service import EdgeService
from opendsec_server.images.interface import LayerMounts
from opendsec_server.images.layermounts import ErofsLayerMounts
from opendsec_server.images.store import LocalImageStore
from opendsec_server.platform import logging
from opendsec_server.platform.config import Config, load
from opendsec_server.platform.serving import open_server

#: How long requests under way may take to end after SIGTERM, in seconds.
DRAIN_SECONDS = 2.0
#: Tries, 50 ms apart, to take the lock of the data folder.
LOCK_TRIES = 60
#: Layers that nobody has used for this long are unmounted, in seconds.
IDLE_LAYER_SECONDS = 60.0
_log = structlog.get_logger(__name__)


def document() -> bytes:
    """Return the OpenAPI document as it is checked in."""
    schema = build_litestar(None).openapi_schema.to_schema()
    return msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=2) + b"\n"


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT; sandboxes run on.

    Raises:
        PlatformError: the node cannot be made ready, or another edge serves here.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    for folder in (config.data, config.run):
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    allow_many_files()
    # Held until this process ends: two edges on one data folder would clear each other's sandboxes away.
    lock = await lock_node(config.data / "edge.lock")
    images = LocalImageStore(config.data)
    layers = ErofsLayerMounts(config.data, images.layer_path)
    images.mounts = layers
    await asyncio.to_thread(images.open)
    journal = Journal(config.data / "journal.db")
    owners: dict[str, Sequence[str]] = {
        row.record.id: row.spec.layers for row in journal.rows() if row.spec and row.record.state not in TERMINAL
    }
    await asyncio.to_thread(layers.reconcile, owners)
    service = EdgeService(config, journal, ContainerBackend(config, layers), images)
    await service.open()
    tidying = asyncio.create_task(tidy(layers))
    # What was made until now stays: the collector need not look at it again.
    gc.freeze()
    # Full collections look at everything of every sandbox; the young ones find nearly all there is.
    gc.set_threshold(10_000, 20, 50)
    app = EdgeApp(service, build_litestar(service))  # type: ignore[arg-type]
    try:
        async with open_server(app, [config.edge_address]):
            _log.info("edge_ready", node=config.edge.node, address=config.edge_address)
            await stop.wait()
            await app.drain(DRAIN_SECONDS)
    finally:
        tidying.cancel()
        await service.close()
        os.close(lock)


async def tidy(layers: LayerMounts) -> None:
    """Unmount layers that nobody has used for a while, until cancelled."""
    while True:
        await asyncio.sleep(IDLE_LAYER_SECONDS)
        await asyncio.to_thread(layers.unmount_idle, IDLE_LAYER_SECONDS)


async def lock_node(path: Path) -> int:
    """Take the lock of a data folder and return its descriptor.

    Raises:
        Conflict: another edge has it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A killed edge may have a child between fork and exec that has the lock for another moment.
            await asyncio.sleep(0.05)
        else:
            return fd
    os.close(fd)
    raise Conflict(f"another edge uses the data folder {path.parent}")


def allow_many_files() -> None:
    """Raise the limit of open files: each sandbox takes a few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    """Start the program."""
    parser = argparse.ArgumentParser(prog="opendsec-edge", description="The node agent of OpenDSec.")
    parser.add_argument("--config", type=Path, help="TOML file (else OPENDSEC_CONFIG)")
    parser.add_argument("--openapi", action="store_true", help="print the API's OpenAPI document")
    arguments = parser.parse_args()
    if arguments.openapi:
        sys.stdout.buffer.write(document())
        return
    try:
        config = load(arguments.config)
        logging.configure(config.log_level, "edge")
        uvloop.run(run(config))
    except PlatformError as error:
        sys.stderr.write(f"opendsec-edge: {error.message}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
