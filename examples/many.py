"""Many sandboxes at once: each gets its own task, is driven on its own, and tells what happened in it."""

from __future__ import annotations

import asyncio
import sys

from opendsec import BatchFailed, DSecClient, DSecContainerRunArgs, PlatformError, Sandbox


async def rollout(number: int, sandbox: Sandbox) -> str:
    """Drive one sandbox; a failed command is a score, a failed platform is none."""
    async with sandbox:
        try:
            await sandbox.files.write_text("/tmp/number", str(number))
            result = await sandbox.run_shell("test $(($(cat /tmp/number) % 3)) -ne 0", timeout=30)
        except PlatformError as error:
            return f"{number:3}  no score: {error} (infrastructure: {error.is_infra})"
        return f"{number:3}  reward {int(result.ok)}  {result.duration or 0:.4f} s  {sandbox.id}"


async def main(count: int) -> None:
    """Start ``count`` sandboxes and print one line for each."""
    args = DSecContainerRunArgs(container_image="python:3.11", memory_limit_mb=256, job="many", ttl_running_stop=60)
    tasks: list[asyncio.Task[str]] = []
    async with DSecClient() as client:
        try:
            async for sandbox in client.run_many(args, count):
                tasks.append(asyncio.create_task(rollout(len(tasks), sandbox)))
        except BatchFailed as failed:
            print(failed, file=sys.stderr)
        for line in await asyncio.gather(*tasks):
            print(line)
        await client.stop_job("many")


asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 16))
