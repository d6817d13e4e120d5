"""How long ``run_shell("true")`` takes through SDK, apiserver, edge and chronus, one by one and from 32 clients.

Last line: ``p50_ms`` and ``p99_ms`` of sequential calls, ``per_s`` with 32 clients at once, each with a sandbox of its
own, and ``floor_ms``: fork and exec of the same static shell from a process on this host, p50.
"""

from __future__ import annotations

import asyncio
import os
import time

import node

from opendsec import DSecClient, Sandbox
from opendsec_server import tools

CLIENTS = 32


async def sequential(sandbox: Sandbox, count: int) -> list[float]:
    """Return the duration of each call in milliseconds."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        result = await sandbox.run_shell("true")
        times.append((time.perf_counter() - begin) * 1e3)
        assert result.exit_code == 0, result
    return times


async def concurrent(client: DSecClient, seconds: float) -> float:
    """Return calls per second from all clients together."""
    sandboxes = [sandbox async for sandbox in client.run_many(node.args(), CLIENTS)]
    done = 0
    stop = time.perf_counter() + 1e9

    async def one(sandbox: Sandbox) -> None:
        nonlocal done
        while time.perf_counter() < stop:
            result = await sandbox.run_shell("true")
            assert result.exit_code == 0, result
            done += 1

    tasks = [asyncio.create_task(one(sandbox)) for sandbox in sandboxes]
    await asyncio.sleep(1.0)  # warm
    done, begin = 0, time.perf_counter()
    stop = begin + seconds
    await asyncio.gather(*tasks)
    rate = done / (time.perf_counter() - begin)
    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    return rate


def floor(shell: str, count: int) -> list[float]:
    """Return how long fork, exec and exit of the shell take, in milliseconds."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        pid = os.posix_spawn(shell, [shell, "-c", "true"], {})
        os.waitpid(pid, 0)
        times.append((time.perf_counter() - begin) * 1e3)
    return times


async def main() -> None:
    """Run the benchmark."""
    quick = node.options(__doc__).quick
    rounds, calls, seconds = (4, 250, 5.0) if quick else (10, 500, 15.0)
    with node.server() as local:
        shell = str(tools.locate(local.config) / "sh")
        async with node.client_of(local) as client, await client.run_container(node.args()) as sandbox:
            await sequential(sandbox, 50)
            ours: list[float] = []
            bare: list[float] = []
            for _ in range(rounds):
                bare += floor(shell, calls // 5)
                ours += await sequential(sandbox, calls)
            print(f"sequential: {len(ours)} calls")
            rate = await concurrent(client, seconds)
            print(f"{CLIENTS} clients for {seconds:g} s")
    node.print_result(
        {
            "p50_ms": node.quantile(ours, 0.50),
            "p99_ms": node.quantile(ours, 0.99),
            "per_s": rate,
            "floor_ms": node.quantile(bare, 0.50),
        }
    )


if __name__ == "__main__":
    asyncio.run(main())
