"""``opendsec doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from opendsec.api.errors import PlatformError
from opendsec.api.models import LeakReport
from opendsec_server import leaks
from opendsec_server.doctor.examination import Examination, examine
from opendsec_server.platform.config import Config, load

_MARKS = {"ok": "ok      ", "degraded": "degraded", "missing": "missing "}


def register(app: typer.Typer) -> None:
    """Add ``doctor`` to the command line."""
    app.command("doctor")(doctor_command)


def doctor_command(
    config: Annotated[Path | None, typer.Option("--config", help="TOML file (else OPENDSEC_CONFIG).")] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Persistent state.")] = None,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Sockets and runtime state.")] = None,
    *,
    leaks_only: Annotated[bool, typer.Option("--leaks", help="Count everything of ours that has no owner.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this host can do, what is missing and how to get it.

    Ends with 0 if the default setup can run (with --leaks: if nothing is left), else with 1.
    """
    try:
        settings = load(config)
    except PlatformError as error:
        typer.echo(f"opendsec: {error.message}", err=True)
        raise typer.Exit(2) from error
    if data_dir is not None:
        settings = msgspec.structs.replace(settings, data_dir=str(data_dir.absolute()))
    if run_dir is not None:
        settings = msgspec.structs.replace(settings, run_dir=str(run_dir.absolute()))
    well = _leaks(settings, as_json=as_json) if leaks_only else _host(settings, as_json=as_json)
    if not well:
        raise typer.Exit(1)


def _host(config: Config, *, as_json: bool) -> bool:
    result = examine(config)
    typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode() if as_json else text_of(result))
    return result.ready


def text_of(result: Examination) -> str:
    """Return an examination for people."""
    lines = []
    for finding in result.findings:
        lines.append(f"{_MARKS[finding.state]}  {finding.name}: {finding.purpose}")
        lines.extend(f"            {text}" for text in (finding.detail,) if text)
        lines.extend(f"            get it: {text}" for text in (finding.remedy,) if text)
    blocking = [finding.name for finding in result.findings if finding.blocks]
    lines.append(
        "the default setup can run here"
        if result.ready
        else f"the default setup cannot run here: {', '.join(blocking)} missing"
    )
    return "\n".join(lines)


def _leaks(config: Config, *, as_json: bool) -> bool:
    report = leaks.report(config)
    counts = leak_counts(report)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode({**counts, "items": report.items})).decode())
    else:
        for kind, count in counts.items():
            typer.echo(f"{kind:14} {count}")
            for item in report.items.get(kind, []):
                typer.echo(f"  {item}")
    return not any(counts.values())


def leak_counts(report: LeakReport) -> dict[str, int]:
    """Return the count of every kind, zero included."""
    return {name: getattr(report, name) for name in LeakReport.__struct_fields__ if name != "items"}
