"""What an idle sandbox costs the host: ``--count`` of them live at once, then each answers a command.

Last line: ``count``, ``answered``, ``host_mib_each`` (what available memory of the host fell by, divided by the count),
``chronus_rss_mib`` (largest of all chronus processes).
"""

from __future__ import annotations

import asyncio
import os
import time

import node
import psutil

from opendsec import PlatformError, Sandbox

MIB = 1024 * 1024


def available() -> int:
    """Return the memory that programs can still get, in bytes."""
    return psutil.virtual_memory().available


async def settled(seconds: float = 20.0) -> int:
    """Return the available memory once it changes by less than a MiB in a second."""
    deadline = time.monotonic() + seconds
    last = available()
    while time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        now = available()
        if abs(now - last) < MIB:
            return now
        last = now
    return last


def chronus_rss(edge: int) -> list[int]:
    """Return the resident memory of every chronus on the host that is not older than the edge, in bytes."""
    born = psutil.Process(edge).create_time()
    sizes = []
    for process in psutil.process_iter(["name", "create_time", "memory_info"]):
        info = process.info
        if info["name"] == "chronus" and info["create_time"] >= born and info["memory_info"]:
            sizes.append(info["memory_info"].rss)
    return sizes


async def answers(sandbox: Sandbox) -> bool:
    """Tell whether a sandbox runs a command."""
    try:
        result = await sandbox.run_shell("echo here", timeout=60)
    except PlatformError as error:
        print(f"{sandbox.id}: {error}")
        return False
    return result.stdout == "here\n"


async def main() -> None:
    """Run the benchmark."""
    chosen = node.options(__doc__, count=500)
    count = chosen.count or (150 if chosen.quick else 500)
    with node.server(OPENDSEC_EDGE__MAX_SANDBOXES=str(count + 10)) as local:
        async with node.client_of(local) as client, await client.run_container(node.args()) as first:
            assert await answers(first)
            before = await settled()
            begin = time.perf_counter()
            sandboxes = [sandbox async for sandbox in client.run_many(node.args(), count)]
            print(f"{count} sandboxes in {time.perf_counter() - begin:.1f} s")
            after = await settled()
            rss = chronus_rss(local.program("edge"))
            print(f"{len(rss)} chronus processes, load {os.getloadavg()[0]:.1f}")
            gate = asyncio.Semaphore(32)

            async def ask(sandbox: Sandbox) -> bool:
                async with gate:
                    return await answers(sandbox)

            answered = sum(await asyncio.gather(*(ask(sandbox) for sandbox in sandboxes)))
            begin = time.perf_counter()

            async def end(sandbox: Sandbox) -> None:
                async with gate:
                    await sandbox.stop()

            await asyncio.gather(*(end(sandbox) for sandbox in sandboxes))
            print(f"stopped in {time.perf_counter() - begin:.1f} s")
    node.print_result(
        {
            "count": count,
            "answered": answered,
            "host_mib_each": (before - after) / count / MIB,
            "chronus_rss_mib": max(rss) / MIB,
        }
    )


if __name__ == "__main__":
    asyncio.run(main())
