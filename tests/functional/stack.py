"""The driver of functional tests: a real server of its own, a tiny image, clients."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from opendsec import DSecClient
from opendsec_server.testing.local import LocalServer
from opendsec_server.testing.rootfs import make_rootfs


class Stack(LocalServer):
    """``opendsec serve`` with the image ``test/busybox:latest``.

    Args:
        data_dir: as in ``LocalServer``.
        settings: as in ``LocalServer``.
    """

    image = "test/busybox:latest"

    def __init__(self, data_dir: Path | None = None, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(data_dir, {"OPENDSEC_EDGE__MAX_MEMORY_PRESSURE_PERCENT": "100", **(settings or {})})

    def client(self, **options: float) -> DSecClient:
        """Return a client of this server, not yet open."""
        return DSecClient(self.url, self.api_key, **options)

    def import_image(self) -> None:
        """Import the image; in a thread of its own, so that a fixture may call it whatever loop runs."""

        async def work() -> None:
            with tempfile.TemporaryDirectory() as folder:
                root = await asyncio.to_thread(make_rootfs, Path(folder) / "rootfs")
                async with self.client() as client:
                    await client.images.import_folder(root, self.image)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, work()).result()
