"""The demo: sixty-four rollouts of a real project, each in its own sandbox, and nothing is left afterwards.

Ends with 0 only if every rollout got a reward and nothing is left on this host.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import report
from mutations import Mutation, choose
from project import SOURCES, fetch, layer_tree
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rollout import BASE, WORKSPACE, Outcome, rollout

from opendsec import DSecClient, ImageUnavailable, Node, PlatformError, Progress
from opendsec_server.testing.local import LocalServer

CACHE = Path(__file__).resolve().parents[2] / ".cache/demo"
PACKAGES = ["python3", "git", "python3-pytest"]
JOB = "demo"


async def prepare(client: DSecClient, project: Path, console: Console) -> None:
    """Make the two images if this is the first run."""

    def tell(progress: Progress) -> None:
        if progress.message:
            status.update(f"{what}: {progress.message}")

    with console.status("images") as status:
        try:
            await client.images.resolve(BASE)
        except ImageUnavailable:
            what = f"building {BASE} from Debian packages (once)"
            await client.images.import_debian(BASE, packages=PACKAGES, on_progress=tell)
        try:
            await client.images.resolve(WORKSPACE)
        except ImageUnavailable:
            what = f"making {WORKSPACE}"
            with tempfile.TemporaryDirectory() as scratch:
                tree = await asyncio.to_thread(layer_tree, project, Path(scratch))
                await client.images.import_folder(tree, WORKSPACE, kind="workspace", on_progress=tell)


async def run_all(
    client: DSecClient, mutations: Sequence[Mutation], concurrency: int, console: Console
) -> tuple[list[Outcome], list[str], Node]:
    """Run all rollouts; return outcomes, errors of the platform, and the node as it was busiest."""
    gate = asyncio.Semaphore(concurrency)
    outcomes: list[Outcome | None] = [None] * len(mutations)
    errors: list[str] = []
    busiest = (await client.nodes.list())[0]

    async def one(number: int) -> None:
        async with gate:
            try:
                outcomes[number] = await rollout(client, mutations[number], JOB)
            except PlatformError as error:
                errors.append(f"rollout {number + 1}: {error}")
            bar.advance(task)

    async def watch() -> None:
        nonlocal busiest
        while True:
            node = (await client.nodes.list())[0]
            if node.memory_available_bytes < busiest.memory_available_bytes:
                busiest = node
            await asyncio.sleep(0.5)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("rollouts", total=len(mutations))
        watcher = asyncio.create_task(watch())
        try:
            await asyncio.gather(*(one(number) for number in range(len(mutations))))
        finally:
            watcher.cancel()
    return [outcome for outcome in outcomes if outcome is not None], errors, busiest


async def idle_node(client: DSecClient, seconds: float = 5.0) -> Node:
    """Return the node once its newest view shows no sandbox (views are a second old at most)."""
    deadline = time.monotonic() + seconds
    while True:
        node = (await client.nodes.list())[0]
        if node.sandboxes == 0 or time.monotonic() > deadline:
            return node
        await asyncio.sleep(0.1)


async def demo(server: LocalServer, options: argparse.Namespace, console: Console) -> bool:
    """Run the demo on a server and tell whether every rollout got its reward."""
    project = await asyncio.to_thread(fetch, CACHE)
    async with DSecClient(server.url, server.api_key) as client:
        await prepare(client, project, console)
        mutations = choose(project, SOURCES, options.rollouts, unchanged=max(1, options.rollouts // 8), seed=1)
        before = (await client.nodes.list())[0]
        begin = time.perf_counter()
        outcomes, errors, busiest = await run_all(client, mutations, options.concurrency, console)
        seconds = time.perf_counter() - begin
        after = await idle_node(client)
    report.rewards(console, outcomes)
    report.node_use(console, before, busiest, after)
    for error in errors:
        console.print(f"[red]{error}[/red]")
    if outcomes:
        report.summary(console, outcomes, seconds, options.concurrency)
    return len(outcomes) == options.rollouts


def main() -> int:
    """Run the demo and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    begin = time.perf_counter()
    with LocalServer(CACHE / "data") as server:
        console.print(f"opendsec serve is ready on {server.url}")
        try:
            complete = asyncio.run(demo(server, options, console))
            server.stop()
            leaks = server.leaks()
        except BaseException:
            console.print(server.log_tail())
            raise
    report.left_over(console, leaks)
    console.print(f"all of it took {time.perf_counter() - begin:.1f} s")
    return 0 if complete and not leaks else 1


if __name__ == "__main__":
    sys.exit(main())
