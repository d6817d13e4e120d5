"""What the demo prints: a table of rewards, the node's use, what was left."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rollout import Outcome

from opendsec import Node

MIB = 1024 * 1024


def rewards(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print one row a rollout."""
    table = Table("#", "change", "tests", "reward", "create s", "tests s", "cpu s", "peak MiB", title="rewards")
    for number, outcome in enumerate(outcomes, 1):
        title = outcome.mutation.title
        table.add_row(
            str(number),
            title if len(title) <= 56 else title[:55] + "…",
            outcome.verdict,
            f"{outcome.reward:.3f}",
            f"{outcome.create_seconds:.2f}",
            f"{outcome.tests_seconds:.2f}",
            f"{outcome.cpu_seconds:.2f}",
            f"{outcome.peak_bytes / MIB:.0f}",
        )
    console.print(table)


def summary(console: Console, outcomes: Sequence[Outcome], seconds: float, concurrency: int) -> None:
    """Print the figures of all rollouts together."""
    creates = sorted(outcome.create_seconds for outcome in outcomes)
    given = [outcome.reward for outcome in outcomes]
    console.print(
        f"{len(outcomes)} rewards in {seconds:.1f} s, {concurrency} rollouts at a time; "
        f"mean reward {statistics.fmean(given):.3f}, {sum(reward == 1 for reward in given)} perfect; "
        f"create p50 {creates[len(creates) // 2] * 1000:.0f} ms; "
        f"CPU time of the tests {sum(outcome.cpu_seconds for outcome in outcomes):.1f} s"
    )


def node_use(console: Console, before: Node, busiest: Node, after: Node) -> None:
    """Print what the node had in use before, at its busiest, and after."""
    table = Table("node " + after.id, "before", "busiest", "after", title="use of the node")
    nodes = (before, busiest, after)
    table.add_row("sandboxes", *(str(node.sandboxes) for node in nodes))
    used = [(node.memory_total_bytes - node.memory_available_bytes) / MIB for node in nodes]
    table.add_row("memory in use, MiB", *(f"{value:.0f}" for value in used))
    table.add_row("disk free, GiB", *(f"{node.disk_free_bytes / MIB / 1024:.1f}" for node in nodes))
    for kind in ("cpu", "memory", "io"):
        table.add_row(f"{kind} pressure, %", *(f"{node.pressure.get(kind, 0.0):.1f}" for node in nodes))
    console.print(table)


def left_over(console: Console, leaks: Mapping[str, Sequence[str]]) -> None:
    """Print what was left on the host."""
    if not leaks:
        console.print("left on this host: nothing (no process, mount, cgroup, namespace, loop device, subvolume, file)")
    for kind, items in leaks.items():
        console.print(f"[red]left on this host: {kind}: {', '.join(items)}[/red]")
