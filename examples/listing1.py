"""The one published listing of DSec (paper, listing 1), with only the import changed.

Network rules say ``False``: nothing may be reached yet. The image:
``opendsec image import python:3.11 --debian bookworm --packages python3``.
"""

from __future__ import annotations

import asyncio

from opendsec import DSecClient, DSecContainerRunArgs


async def main() -> None:
    """Create a sandbox, run one command in it, stop it."""
    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(
        container_image="python:3.11",
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,
        network_rules={"npm": False, "pypi": False},
        init_user="root",
    )
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    print(result.stdout, end="")
    await sandbox.stop()
    await client.close()


asyncio.run(main())
