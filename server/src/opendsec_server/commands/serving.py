"""``opendsec serve``, ``edge`` and ``apiserver``: start the programs of a node."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from opendsec.api.errors import InvalidArgument, PlatformError, Unavailable
from opendsec_server.platform.config import Config, load
from opendsec_server.supervisor import Ready, environment, ready_line, serve

ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file (else OPENDSEC_CONFIG).")]
DataOption = Annotated[Path | None, typer.Option("--data-dir", help="Persistent state.")]
RunOption = Annotated[Path | None, typer.Option("--run-dir", help="Sockets and runtime state.")]
ListenOption = Annotated[
    list[str] | None, typer.Option("--listen", help="Further address host:port beside the Unix socket; repeatable.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of the server to the command line."""
    app.command("serve")(serve_command)
    app.command("edge")(edge_command)
    app.command("apiserver")(apiserver_command)
    if importlib.util.find_spec("opendsec_server.doctor") is not None:
        doctor = importlib.import_module("opendsec_server.doctor")
        if hasattr(doctor, "register"):
            doctor.register(app)


def serve_command(
    config: ConfigOption = None,
    data_dir: DataOption = None,
    run_dir: RunOption = None,
    listen: ListenOption = None,
    *,
    background: Annotated[
        bool, typer.Option("--background/--foreground", help="Return once it is ready; log to <data-dir>/serve.log.")
    ] = False,
    ready_fd: Annotated[
        int | None, typer.Option("--ready-fd", help="Write one JSON line to this descriptor once ready.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say that it is ready as JSON.")] = False,
) -> None:
    """Run one edge and one apiserver on this machine."""
    try:
        settings = settings_of(config, data_dir, run_dir, listen)
        if background:
            _serve_in_background(settings, config, as_json=as_json)
        else:
            _serve_here(settings, config, ready_fd, as_json=as_json)
    except PlatformError as error:
        _fail(error)


def edge_command(config: ConfigOption = None, data_dir: DataOption = None, run_dir: RunOption = None) -> None:
    """Run one edge: the agent of this node."""
    _become("opendsec_server.edge.main", config, data_dir, run_dir, None)


def apiserver_command(
    config: ConfigOption = None, data_dir: DataOption = None, run_dir: RunOption = None, listen: ListenOption = None
) -> None:
    """Run one apiserver: the front door."""
    _become("opendsec_server.apiserver.main", config, data_dir, run_dir, listen)


def settings_of(config: Path | None, data_dir: Path | None, run_dir: Path | None, listen: list[str] | None) -> Config:
    """Return the configuration with the options of the command line on top.

    Raises:
        InvalidArgument: the configuration or an address is malformed.
    """
    settings = load(config)
    if data_dir is not None:
        settings = msgspec.structs.replace(settings, data_dir=str(data_dir.absolute()))
    if run_dir is not None:
        settings = msgspec.structs.replace(settings, run_dir=str(run_dir.absolute()))
    if listen:
        for address in listen:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise InvalidArgument(f"{address!r} is not an address: use host:port")
        addresses = (*settings.api_addresses, *listen)
        apiserver = msgspec.structs.replace(settings.apiserver, listen=addresses)
        settings = msgspec.structs.replace(settings, apiserver=apiserver)
    return settings


def _say_ready(ready: Ready, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(ready)))
        return
    typer.echo(f"ready on {', '.join(ready.addresses)}")
    typer.echo(f"key    {ready.key_file}")


def _serve_here(settings: Config, config: Path | None, ready_fd: int | None, *, as_json: bool) -> None:
    def announce(ready: Ready) -> None:
        _say_ready(ready, as_json=as_json)
        sys.stdout.flush()
        if ready_fd is not None:
            os.write(ready_fd, ready_line(ready).encode())
            os.close(ready_fd)

    asyncio.run(serve(settings, config_file=config, announce=announce))


def _serve_in_background(settings: Config, config: Path | None, *, as_json: bool) -> None:
    """Fork a supervisor of its own session and wait until it is ready or has failed."""
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = settings.data / "serve.log"
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        _detach(log)
        status = 1
        try:
            _serve_here(settings, config, writer, as_json=True)
            status = 0
        except PlatformError as error:
            sys.stderr.write(f"opendsec: {error.message}\n")
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        line = pipe.readline()
    if not line:
        tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise Unavailable(f"opendsec serve did not start: {tail[0]} (all of it: {log})")
    _say_ready(msgspec.json.decode(line, type=Ready), as_json=as_json)


def _detach(log: Path) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)


def _become(
    module: str, config: Path | None, data_dir: Path | None, run_dir: Path | None, listen: list[str] | None
) -> NoReturn:
    try:
        settings = settings_of(config, data_dir, run_dir, listen)
    except PlatformError as error:
        _fail(error)
    os.execve(sys.executable, [sys.executable, "-m", module], environment(settings, config, os.environ))


def _fail(error: PlatformError) -> NoReturn:
    typer.echo(f"opendsec: {error.message}", err=True)
    raise typer.Exit(1)
