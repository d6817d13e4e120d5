"""How much one sandbox that floods its output disturbs another: ``yes`` in one, ``run_shell("true")`` in the other.

Last line: ``p99_ms`` and ``p50_ms`` of 200 or more calls spread over the flood, ``edge_growth_mib`` of the edge's
resident memory meanwhile, ``flood_mib_per_s`` that the edge took in, and ``floor_p99_ms``: the same without a flood.
"""

from __future__ import annotations

import asyncio
import time

import node
import psutil

from opendsec import Sandbox

CALLS = 200


async def calls(sandbox: Sandbox, until: float, pause: float) -> list[float]:
    """Return the duration of each call in milliseconds; goes on until the time, and for ``CALLS`` calls at least."""
    times: list[float] = []
    while time.perf_counter() < until or len(times) < CALLS:
        begin = time.perf_counter()
        result = await sandbox.run_shell("true")
        times.append((time.perf_counter() - begin) * 1e3)
        assert result.exit_code == 0, result
        await asyncio.sleep(pause)
    return times


async def main() -> None:
    """Run the benchmark."""
    seconds = 10.0 if node.options(__doc__).quick else 20.0
    with node.server() as local:
        edge = psutil.Process(local.program("edge"))
        async with (
            node.client_of(local) as client,
            await client.run_container(node.args()) as noisy,
            await client.run_container(node.args()) as quiet,
        ):
            floor = await calls(quiet, time.perf_counter(), seconds / CALLS / 2)
            before = edge.memory_info().rss
            flood = asyncio.create_task(noisy.run_shell("yes", timeout=seconds))
            ours = await calls(quiet, time.perf_counter() + seconds, seconds / CALLS / 2)
            result = await flood
            growth = edge.memory_info().rss - before
    node.print_result(
        {
            "p50_ms": node.quantile(ours, 0.50),
            "p99_ms": node.quantile(ours, 0.99),
            "floor_p99_ms": node.quantile(floor, 0.99),
            "edge_growth_mib": growth / 2**20,
            "flood_mib_per_s": result.stdout_total / 2**20 / seconds,
        }
    )


if __name__ == "__main__":
    asyncio.run(main())
