"""How long a sandbox takes from create to its first answered command, against bare ``runc run`` of the same rootfs.

Rounds of the floor and of ours alternate, so that noise of the machine meets both. Last line:
``first_command_p50_ms``, ``floor_p50_ms`` and their ratio; ``creates_per_s`` and ``floor_creates_per_s`` of 8 loops at
once (create, first command, stop against run, exit, delete) and their ratio. The floor has the same walls as ours,
the system call filter included; ``floor_unfiltered_p50_ms`` is runc without that filter.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import node
from floor import Floor
from floor_spec import layer_file, oci_spec

from opendsec import DSecClient

CONCURRENCY = 8


async def first_commands(client: DSecClient, count: int) -> list[float]:
    """Return seconds from create to the first answered command, one sandbox after the other."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        sandbox = await client.run_container(node.args())
        result = await sandbox.run_shell("true")
        times.append(time.perf_counter() - begin)
        assert result.exit_code == 0, result
        await sandbox.stop()
    return times


async def loop(client: DSecClient, seconds: float) -> float:
    """Create, run and stop in several loops at once; return how many lives ended each second."""
    begin = time.perf_counter()
    count = 0

    async def one() -> None:
        nonlocal count
        while time.perf_counter() - begin < seconds:
            sandbox = await client.run_container(node.args())
            assert (await sandbox.run_shell("true")).exit_code == 0
            await sandbox.stop()
            count += 1

    await asyncio.gather(*(one() for _ in range(CONCURRENCY)))
    return count / (time.perf_counter() - begin)


async def main() -> None:
    """Run the benchmark."""
    quick = node.options(__doc__).quick
    rounds, creates, seconds = (4, 15, 3.0) if quick else (10, 20, 5.0)
    with node.server() as local:
        async with node.client_of(local) as client:
            digest = (await client.images.resolve(node.IMAGE)).layer.digest
            spec = oci_spec(local)
            plain = {**spec, "linux": {key: value for key, value in spec["linux"].items() if key != "seccomp"}}
            image = layer_file(local, digest)
            with Floor(image, spec, CONCURRENCY) as floor, Floor(image, plain, 1) as unfiltered:
                await first_commands(client, 5)
                floor.run()
                unfiltered.run()
                ours: list[float] = []
                bare: list[float] = []
                open_: list[float] = []
                for _ in range(rounds):
                    bare += [floor.run() for _ in range(creates)]
                    open_ += [unfiltered.run() for _ in range(creates)]
                    ours += await first_commands(client, creates)
                print(f"{len(ours)} creates one by one")
                rates, floors = [], []
                for _ in range(rounds):
                    floors.append(floor.loop(seconds))
                    rates.append(await loop(client, seconds))
                print(f"{CONCURRENCY} loops, {rounds} rounds of {seconds:g} s")
    first, floor_first = node.quantile(ours, 0.5) * 1e3, node.quantile(bare, 0.5) * 1e3
    rate, floor_rate = statistics.median(rates), statistics.median(floors)
    node.print_result(
        {
            "first_command_p50_ms": first,
            "floor_p50_ms": floor_first,
            "first_command_ratio": first / floor_first,
            "creates_per_s": rate,
            "floor_creates_per_s": floor_rate,
            "creates_ratio": rate / floor_rate,
            "floor_unfiltered_p50_ms": node.quantile(open_, 0.5) * 1e3,
        }
    )


if __name__ == "__main__":
    asyncio.run(main())
