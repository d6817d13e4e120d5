"""What the CLI prints: JSON for programs, tables for people, progress on stderr and only on a terminal."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from opendsec.api.models import Progress as Step


def plain(value: Any) -> Any:
    """Return a value as JSON has it, with every field of every record, also those at their defaults."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(item) for name, item in msgspec.structs.asdict(value).items()}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    sys.stdout.write(msgspec.json.encode(plain(value)).decode() + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; a pipe gets plain columns of full width."""
    if not sys.stdout.isatty():
        widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
        for row in [columns, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    Console().print(table)


def print_fields(fields: dict[str, Any]) -> None:
    """Print names and values, one a line; absent ones are left out."""
    shown = {name: value for name, value in fields.items() if value not in (None, [], {}, "")}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        print(f"{name.ljust(width)}  {value}")


def age(seconds_since_epoch: float | None) -> str:
    """Return how long ago something was, in one unit."""
    if not seconds_since_epoch:
        return "-"
    seconds = max(0.0, time.time() - seconds_since_epoch)
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds // 86_400)} d"


def size(count: int | None) -> str:
    """Return bytes in a readable unit."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Steps:
    """Shows steps of long work."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._task = None if bar is None else bar.add_task("starting", total=None)

    def __call__(self, step: Step) -> None:
        """Show a step."""
        if self._bar is None or self._task is None:
            return
        if step.message:
            self._bar.update(self._task, description=step.message[:60].replace("[", "\\["))
        if step.fraction is not None:
            self._bar.update(self._task, total=1.0, completed=step.fraction)


@contextmanager
def progress() -> Iterator[Steps]:
    """Show a progress bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield Steps(None)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Steps(bar)
