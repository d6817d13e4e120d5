"""The apiserver as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import aiohttp
import pytest

from opendsec_server.apiserver.document import document
from opendsec_server.apiserver.main import edges_of
from opendsec_server.platform.config import ApiserverConfig, Config
from opendsec_server.supervisor import wait_healthy
from opendsec_server.testing.edge import SimulatedEdge


@pytest.mark.slow
async def test_it_starts_serves_and_ends_politely(tmp_path):
    """First start makes the key; SIGTERM lets a request under way end; nothing stays but files."""
    environ = {**os.environ, "OPENDSEC_DATA_DIR": str(tmp_path / "data"), "OPENDSEC_RUN_DIR": str(tmp_path)}
    argv = [sys.executable, "-m", "opendsec_server.apiserver.main"]
    async with SimulatedEdge("local").open_server(tmp_path / "edge.sock") as edge:
        process = await asyncio.create_subprocess_exec(*argv, env=environ, stderr=subprocess.PIPE)
        try:
            async with asyncio.timeout(60):
                await wait_healthy(f"unix:{tmp_path}/api.sock")
            key = (tmp_path / "data" / "admin.key").read_text().strip()
            connector = aiohttp.UnixConnector(str(tmp_path / "api.sock"))
            headers = {"authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
                edge.gate.clear()
                create = asyncio.ensure_future(session.post("http://x/v1/sandboxes", json={"container_image": "a"}))
                async with asyncio.timeout(10):
                    while not edge.creating:
                        await asyncio.sleep(0.005)
                process.terminate()
                await asyncio.sleep(0)
                edge.gate.set()
                async with await create as response:
                    assert response.status == 201
            async with asyncio.timeout(10):
                _, log = await process.communicate()
            assert process.returncode == 0
            assert key not in log.decode()
            assert all(json.loads(line)["program"] == "apiserver" for line in log.splitlines())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def test_edges_may_be_named(tmp_path):
    """The edge of this machine is the default; others are addresses, with their node's name if known."""
    assert edges_of(Config(run_dir="/r")) == [("unix:/r/edge.sock", "local")]
    named = Config(apiserver=ApiserverConfig(edges=("n1=10.0.0.1:7000", "10.0.0.2:7000")))
    assert edges_of(named) == [("10.0.0.1:7000", "n1"), ("10.0.0.2:7000", None)]


def test_the_document_joins_both_parts():
    """What is forwarded is described as the edge describes it; what is served here as it is here."""
    edge = {
        "paths": {
            "/v1/sandboxes/{id}": {"get": {"summary": "from the edge"}},
            "/v1/images": {"get": {}},
            "/v1/nodes": {"get": {"summary": "from the edge"}},
            "/metrics": {"get": {}},
        },
        "components": {"schemas": {"OnlyEdge": {}}},
    }
    made = document(edge)
    assert made["paths"]["/v1/sandboxes/{id}"] == {"get": {"summary": "from the edge"}}
    assert made["paths"]["/v1/nodes"]["get"]["summary"] != "from the edge"
    assert {"/v1/images", "/v1/sandboxes", "/v1/jobs/{job}"} <= set(made["paths"])
    assert "/metrics" not in made["paths"]
    assert {"OnlyEdge", "Sandbox", "CreateSandbox"} <= set(made["components"]["schemas"])
