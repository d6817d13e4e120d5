"""The command tree. Commands of the server come from the entry-point group ``opendsec.commands``."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

import typer

from opendsec import __version__
from opendsec.cli import _sandboxes
from opendsec.cli._errors import FAILED, INTERRUPTED
from opendsec.cli._images import image_app, node_app
from opendsec.cli._output import print_json
from opendsec.cli._session import Json

GROUP = "opendsec.commands"
_NEEDS_SERVER = ("serve", "doctor")
#: What follows the image or the id belongs to the command, options and all.
_PASS_ON = {"allow_interspersed_args": False}


def version(json: Json = False) -> None:
    """Print the version."""
    if json:
        print_json({"opendsec": __version__, "python": platform.python_version()})
    else:
        print(f"opendsec {__version__}")


_COMMANDS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "run": (_sandboxes.run, _PASS_ON),
    "exec": (_sandboxes.exec_, _PASS_ON),
    "ls": (_sandboxes.ls, {}),
    "logs": (_sandboxes.logs, {}),
    "inspect": (_sandboxes.inspect, {}),
    "stop": (_sandboxes.stop, {}),
    "version": (version, {}),
}
_GROUPS = {"image": image_app, "node": node_app}


def build(arguments: Sequence[str]) -> typer.Typer:
    """Return the command tree, or only the branch that the arguments name: building all of it takes its time."""
    app = typer.Typer(
        name="opendsec",
        help="Sandboxes for agent training and evaluation.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_nothing)
    first = next(iter(arguments), "")
    own = first in _COMMANDS or first in _GROUPS
    for name, (command, settings) in _COMMANDS.items():
        if not own or name == first:
            app.command(name, context_settings=settings)(command)
    for name, group in _GROUPS.items():
        if not own or name == first:
            app.add_typer(group, name=name)
    if not own:
        _load(app)
    return app


def _nothing() -> None:
    """Sandboxes for agent training and evaluation."""


def _load(app: typer.Typer) -> None:
    for entry in entry_points(group=GROUP):
        register: Callable[[typer.Typer], Any] = entry.load()
        register(app)
    known = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    for name in _NEEDS_SERVER:
        if name not in known:
            app.command(name, context_settings={"ignore_unknown_options": True})(_absent(name))


def _absent(name: str) -> Callable[..., None]:
    def absent(arguments: list[str] = typer.Argument(None, hidden=True)) -> None:  # noqa: ARG001
        print(f"opendsec: `{name}` needs the server: pip install opendsec-server", file=sys.stderr)
        raise typer.Exit(FAILED)

    absent.__doc__ = "Needs the server: pip install opendsec-server"
    return absent


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        result = build(arguments)(args=list(arguments), prog_name="opendsec", standalone_mode=True)
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else FAILED if leave.code else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    return result if isinstance(result, int) else 0
