"""What all benchmarks share: a server of their own with a tiny image, options, and the last line."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from opendsec import DSecClient, DSecContainerRunArgs
from opendsec_server.testing.local import LocalServer
from opendsec_server.testing.rootfs import make_rootfs

IMAGE = "bench/busybox:latest"


def options(description: str | None, *, count: int | None = None) -> argparse.Namespace:
    """Read the command line: ``--quick``, and ``--count`` where a benchmark has one."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="end within 60 s, with less certain figures")
    if count is not None:
        parser.add_argument("--count", type=int, default=None, help=f"how many sandboxes (default {count})")
    return parser.parse_args()


def server(**settings: str) -> LocalServer:
    """Return a server that is not started yet."""
    return LocalServer(settings={"OPENDSEC_LOG_LEVEL": "warning", **settings})


@contextlib.asynccontextmanager
async def client_of(node: LocalServer) -> AsyncIterator[DSecClient]:
    """Open a client and import the image."""
    async with DSecClient(node.url, node.api_key) as client:
        with tempfile.TemporaryDirectory() as folder:
            await client.images.import_folder(make_rootfs(Path(folder) / "rootfs"), IMAGE)
        yield client


def args(**more: object) -> DSecContainerRunArgs:
    """Return the arguments of a sandbox of the image."""
    return DSecContainerRunArgs(container_image=IMAGE, **more)  # type: ignore[arg-type]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def print_result(result: Mapping[str, float]) -> None:
    """Print the figures as the last line."""
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))
