"""An apiserver over simulated edges, reached as a client reaches it: HTTP over a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from opendsec_server.apiserver.edge_client import EdgeClient
from opendsec_server.apiserver.iam import Iam
from opendsec_server.apiserver.main import build
from opendsec_server.apiserver.watcher import Watcher
from opendsec_server.placement import PlacementEngine, PlacementPolicy
from opendsec_server.platform.database import open_database, sqlite_url
from opendsec_server.platform.serving import open_server
from opendsec_server.testing.edge import SimulatedEdge

BASE = "http://api"


class Api:
    """A running apiserver with what tests look at."""

    base = BASE

    def __init__(self, session, watcher, engine, *, front, socket, key) -> None:
        self.session: aiohttp.ClientSession = session
        self.watcher: Watcher = watcher
        self.engine: PlacementEngine = engine
        self.front = front
        self.socket = socket
        self.key = key

    async def json(self, method: str, path: str, status: int = 200, **options):
        async with self.session.request(method, BASE + path, **options) as response:
            text = await response.text()
            assert response.status == status, f"{response.status}: {text}"
            return await response.json(content_type=None) if text else None

    async def create(self, status: int = 201, **fields):
        return await self.json("POST", "/v1/sandboxes", status, json={"container_image": "debian:12", **fields})


@contextlib.asynccontextmanager
async def open_api(
    tmp_path, nodes: list[str], *, deadline: float = 3.0, dead_after: float = 15.0
) -> AsyncIterator[Api]:
    """Serve an apiserver over the sockets ``<node>.sock``."""
    database = await open_database(sqlite_url(tmp_path / "iam.db"))
    iam = Iam(database, monotonic=time.monotonic, wall=time.time)
    key = await iam.create_key("admin")
    edges = [EdgeClient(f"unix:{tmp_path}/{node}.sock", node, connect_deadline_seconds=deadline) for node in nodes]
    engine = PlacementEngine(PlacementPolicy(), random.Random(1))
    watcher = Watcher(
        [(edge, edge.name) for edge in edges],
        engine,
        period_seconds=0.05,
        deadline_seconds=1.0,
        monotonic=time.monotonic,
        dead_after_seconds=dead_after,
    )
    front = build(iam, watcher, engine)
    watching = asyncio.create_task(watcher.run())
    socket = tmp_path / "api.sock"
    try:
        async with (
            open_server(front, (f"unix:{socket}",)),
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(socket), limit=0), headers={"authorization": f"Bearer {key}"}
            ) as session,
        ):
            yield Api(session, watcher, engine, front=front, socket=socket, key=key)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for edge in edges:
            await edge.close()
        await database.dispose()


@pytest.fixture
async def edge(tmp_path):
    """One simulated edge."""
    async with SimulatedEdge("local").open_server(tmp_path / "local.sock") as made:
        yield made


@pytest.fixture
def api_over(tmp_path):
    """Open an apiserver over the simulated edges of some names."""
    return functools.partial(open_api, tmp_path)


@pytest.fixture
async def two_edges(tmp_path):
    """An apiserver over two simulated edges."""
    one, two = SimulatedEdge("one"), SimulatedEdge("two")
    async with (
        one.open_server(tmp_path / "one.sock"),
        two.open_server(tmp_path / "two.sock"),
        open_api(tmp_path, ["one", "two"]) as made,
    ):
        yield made, one, two


@pytest.fixture
async def api(tmp_path, edge):
    """An apiserver over one edge."""
    async with open_api(tmp_path, ["local"]) as made:
        yield made
