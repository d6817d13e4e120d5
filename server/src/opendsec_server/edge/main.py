"""``python -m opendsec_server.edge.main``: reads the configuration, builds the parts, serves until stopped.

``--openapi`` prints the API's document instead.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import sys
from pathlib import Path

import msgspec
import structlog
import uvloop

from opendsec.api.errors import PlatformError
from opendsec_server.backends.container.backend import ContainerBackend
from opendsec_server.edge.app import EdgeApp, build_litestar
from opendsec_server.edge.journal import Journal
from opendsec_server.edge.service import EdgeService
from opendsec_server.images.layermounts import ErofsLayerMounts
from opendsec_server.images.store import LocalImageStore
from opendsec_server.platform import logging
from opendsec_server.platform.config import Config, load
from opendsec_server.platform.serving import open_server

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
    images = LocalImageStore(config.data)
    layers = ErofsLayerMounts(config.data, images.layer_path)
    backend = ContainerBackend(config, layers)
    service = EdgeService(config, Journal(config.data / "journal.db"), backend, images)
    await service.open()
    # What was made until now stays: the collector need not look at it again.
    gc.freeze()
    try:
        async with open_server(EdgeApp(service, build_litestar(service)), [config.edge_address]):  # type: ignore[arg-type]
            _log.info("edge_ready", node=config.edge.node, address=config.edge_address)
            await stop.wait()
    finally:
        await service.close()


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
