"""A running command: follow its output, feed its input, signal it, find it again by its id."""

from __future__ import annotations

import asyncio

from opendsec import DSecClient, DSecContainerRunArgs

COUNTER = 'trap "echo interrupted; exit 3" INT; while read -r word; do echo "got $word" >&2; sleep 0.1 & wait; done'


async def main() -> None:
    """Talk to a shell loop."""
    async with DSecClient() as client:
        args = DSecContainerRunArgs(container_image="python:3.11", memory_limit_mb=256)
        async with await client.run_container(args) as sandbox:
            process = await sandbox.start(COUNTER, stdin=True, timeout=30)
            await process.write_stdin("one\ntwo\n")
            async for event in process:
                print(event.stream, event.text, end="")
                if "two" in event.text:
                    break

            # Another client, or this one after a restart, goes on from where it was.
            again = sandbox.attach(process.id, offsets=process.offsets)
            await again.signal("INT")
            async for event in again:
                print(event.stream, event.text, end="")
            result = await again.wait(timeout=10)
            print(f"exit code {result.exit_code} after {result.duration:.2f} s")


asyncio.run(main())
