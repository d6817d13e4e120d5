"""``python -m opendsec_server.apiserver.main``: reads the configuration, builds the parts, serves until stopped.

``--openapi`` prints the API's document instead.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import signal
import sys
import time
from pathlib import Path

import structlog
import uvloop
from litestar import Litestar
from litestar.di import Provide

from opendsec.api.errors import PlatformError
from opendsec_server.apiserver.document import document, render, shipped
from opendsec_server.apiserver.edge_client import EdgeClient
from opendsec_server.apiserver.front import FrontDoor
from opendsec_server.apiserver.http import HANDLERS
from opendsec_server.apiserver.iam import Iam
from opendsec_server.apiserver.metrics import ApiMetrics
from opendsec_server.apiserver.service import ApiService
from opendsec_server.apiserver.watcher import Watcher
from opendsec_server.placement import PlacementEngine, PlacementPolicy
from opendsec_server.platform.config import Config, load
from opendsec_server.platform.database import open_database, sqlite_url
from opendsec_server.platform.http import EXCEPTION_HANDLERS
from opendsec_server.platform.logging import configure
from opendsec_server.platform.serving import open_server

#: How long requests under way may take to end after SIGTERM, in seconds.
DRAIN_SECONDS = 5.0
_log = structlog.get_logger(__name__)


def edges_of(config: Config) -> list[tuple[str, str | None]]:
    """Return address and, where known, name of each edge; an address may be written ``<node>=<address>``."""
    if not config.apiserver.edges:
        return [(config.edge_address, config.edge.node)]
    found: list[tuple[str, str | None]] = []
    for entry in config.apiserver.edges:
        name, mark, address = entry.partition("=")
        found.append((address, name) if mark else (entry, None))
    return found


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        Unavailable: the database, the key file or an address cannot be used.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    for folder in (config.data, config.run):
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    database = await open_database(config.apiserver.database_url or sqlite_url(config.data / "iam.db"))
    clients: list[EdgeClient] = []
    try:
        iam = Iam(database, monotonic=time.monotonic, wall=time.time)
        await iam.ensure_admin_key(config.data / "admin.key")
        edges = [(EdgeClient(address, name or address), name) for address, name in edges_of(config)]
        clients = [client for client, _ in edges]
        engine = PlacementEngine(PlacementPolicy(), random.Random())  # noqa: S311 - load balancing
        watcher = Watcher(
            edges,
            engine,
            period_seconds=config.apiserver.watch_period_seconds,
            deadline_seconds=config.apiserver.watch_deadline_seconds,
            monotonic=time.monotonic,
        )
        front = build(iam, watcher, engine)
        watching = asyncio.create_task(watcher.run())
        try:
            # What was made until now stays: the collector need not look at it again.
            gc.collect()
            gc.freeze()
            # Requests make little garbage in cycles: looking for it every 700 objects costs more than it finds.
            gc.set_threshold(10_000, 20, 50)
            async with open_server(front, config.api_addresses, unix_mode=0o666):
                _log.info("apiserver_ready", addresses=config.api_addresses, edges=[edge.address for edge in clients])
                await stop.wait()
                await front.drain(DRAIN_SECONDS)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    finally:
        for client in clients:
            await client.close()
        await database.dispose()


def build(iam: Iam, watcher: Watcher, engine: PlacementEngine) -> FrontDoor:
    """Put the application together."""
    metrics = ApiMetrics()
    service = ApiService(watcher, engine, time.monotonic)
    handlers = Litestar(
        route_handlers=list(HANDLERS),
        dependencies={
            "service": Provide(lambda: service, sync_to_thread=False),
            "registry": Provide(lambda: metrics, sync_to_thread=False),
        },
        exception_handlers=EXCEPTION_HANDLERS,
        openapi_config=None,
    )
    return FrontDoor(iam, watcher, handlers, metrics)  # type: ignore[arg-type]


def main() -> None:
    """Start the program."""
    parser = argparse.ArgumentParser(prog="opendsec-apiserver", description="The front door of OpenDSec.")
    parser.add_argument("--config", type=Path, help="TOML file (else OPENDSEC_CONFIG)")
    parser.add_argument("--openapi", action="store_true", help="print the API's OpenAPI document")
    arguments = parser.parse_args()
    if arguments.openapi:
        sys.stdout.buffer.write(render(document(shipped())))
        return
    try:
        config = load(arguments.config)
        configure(config.log_level, "apiserver")
        uvloop.run(run(config))
    except PlatformError as error:
        sys.stderr.write(f"opendsec-apiserver: {error.message}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
