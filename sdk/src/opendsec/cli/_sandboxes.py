"""``run exec ls logs inspect stop``."""

from __future__ import annotations

import sys
from typing import Annotated, cast, get_args

import typer

from opendsec import DSecClient, DSecContainerRunArgs, NotFound, PlatformError, Sandbox
from opendsec.api.models import TERMINAL, State
from opendsec.cli._drive import drive, stdin_is_given
from opendsec.cli._errors import PLATFORM, describe, exit_code
from opendsec.cli._output import age, plain, print_fields, print_json, print_table, size
from opendsec.cli._session import Json, key_values, run_client

_Id = Annotated[str, typer.Argument(metavar="ID", help="Id of a sandbox.")]
_Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="Environment; repeatable.")]
_User = Annotated[str | None, typer.Option("--user", "-u", help="User, by name or id.")]
_Workdir = Annotated[str | None, typer.Option("--workdir", "-w", help="Directory of the command.")]
_Timeout = Annotated[float | None, typer.Option("--timeout", min=0.001, help="End the command after these seconds.")]
_Shell = Annotated[bool, typer.Option("--shell", help="The command is a shell line, for the platform's own sh.")]
_Stdin = Annotated[
    bool | None,
    typer.Option("--stdin/--no-stdin", "-i/-n", help="Pass standard input on. Default: if it is a pipe or a file."),
]
_Label = Annotated[list[str] | None, typer.Option("--label", "-l", metavar="KEY=VALUE", help="Label; repeatable.")]
_Job = Annotated[str | None, typer.Option("--job", help="Name of a job.")]


def run(
    *,
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="Base image, such as debian:bookworm.")],
    command: Annotated[list[str] | None, typer.Argument(metavar="[--] CMD...", help="Program and arguments.")] = None,
    memory: Annotated[int | None, typer.Option(metavar="MIB", help="Memory limit in MiB.")] = None,
    cpus: Annotated[float | None, typer.Option(help="CPU limit in cores.")] = None,
    disk: Annotated[int | None, typer.Option(metavar="MIB", help="Limit of what it may write, in MiB.")] = None,
    pids: Annotated[int | None, typer.Option(help="Limit of processes and threads.")] = None,
    ttl: Annotated[float | None, typer.Option(metavar="S", help="Stop it after these idle seconds.")] = None,
    ttl_hard: Annotated[float | None, typer.Option(metavar="S", help="Stop it after these seconds.")] = None,
    workspace: Annotated[str | None, typer.Option(help="Workspace layer.")] = None,
    toolkit: Annotated[list[str] | None, typer.Option(help="Toolkit layer; repeatable.")] = None,
    runtime: Annotated[str | None, typer.Option(help="OCI runtime: runc, crun or runsc.")] = None,
    env: _Env = None,
    user: _User = None,
    workdir: _Workdir = None,
    label: _Label = None,
    job: _Job = None,
    timeout: _Timeout = None,
    create_timeout: Annotated[float, typer.Option(help="Seconds to wait for the sandbox.")] = 120.0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the sandbox running; its id goes to stderr.")] = False,
    shell: _Shell = False,
    stdin: _Stdin = None,
    json: Json = False,
) -> None:
    """Create a sandbox, run a command in it, print its output, and stop the sandbox.

    The exit code is the command's; 124 if it was ended at its timeout, 125 if the platform failed. With --keep and
    without a command only the sandbox is made and its id is printed.
    """
    command = _after_dashes(command or [])
    if not command and not keep:
        raise typer.BadParameter("a command is needed (or --keep)", param_hint="CMD")
    if runtime not in (None, "runc", "crun", "runsc"):
        raise typer.BadParameter(f"{runtime!r} is none of runc, crun, runsc", param_hint="--runtime")
    args = DSecContainerRunArgs(
        container_image=image,
        memory_limit_mb=memory,
        cpu_cores_limit=cpus,
        disk_limit_mb=disk,
        pids_limit=pids,
        ttl_running_stop=ttl,
        ttl_hard=ttl_hard,
        workspace=workspace,
        toolkits=toolkit or [],
        runtime=runtime,  # type: ignore[arg-type]
        env=key_values(env or [], "--env"),
        init_user=user,
        workdir=workdir,
        labels=key_values(label or [], "--label"),
        job=job,
    )

    async def work(client: DSecClient) -> int:
        sandbox = await client.run_container(args, timeout=create_timeout)
        try:
            if not command:
                print_json(sandbox.info) if json else print(sandbox.id)
                return 0
            if keep:
                print(sandbox.id, file=sys.stderr)
            return await drive(
                sandbox,
                command,
                shell=shell,
                stdin=stdin_is_given() if stdin is None else stdin,
                timeout=timeout,
                cwd=None,
                env={},
                user=None,
                as_json=json,
            )
        finally:
            if not keep:
                await sandbox.__aexit__(None, None, None)

    run_client(work, as_json=json, platform_code=PLATFORM)


def exec_(
    *,
    sandbox_id: _Id,
    command: Annotated[list[str], typer.Argument(metavar="[--] CMD...", help="Program and arguments.")],
    env: _Env = None,
    user: _User = None,
    workdir: _Workdir = None,
    timeout: _Timeout = None,
    shell: _Shell = False,
    stdin: _Stdin = None,
    json: Json = False,
) -> None:
    """Run a command in a sandbox.

    The exit code is the command's; 124 if it was ended at its timeout, 125 if the platform failed.
    """
    environment = key_values(env or [], "--env")
    command = _after_dashes(command)
    if not command:
        raise typer.BadParameter("a command is needed", param_hint="CMD")

    async def work(client: DSecClient) -> int:
        sandbox = await client.get(sandbox_id)
        return await drive(
            sandbox,
            command,
            shell=shell,
            stdin=stdin_is_given() if stdin is None else stdin,
            timeout=timeout,
            cwd=workdir,
            env=environment,
            user=user,
            as_json=json,
        )

    run_client(work, as_json=json, platform_code=PLATFORM)


def ls(
    *,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also those that have ended.")] = False,
    label: _Label = None,
    job: _Job = None,
    state: Annotated[list[str] | None, typer.Option(help="Only in this state; repeatable.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only ids.")] = False,
    json: Json = False,
) -> None:
    """List sandboxes."""
    labels = key_values(label or [], "--label")
    wanted = [name for name in get_args(State) if all_ or name not in TERMINAL]
    for name in state or []:
        if name not in get_args(State):
            raise typer.BadParameter(f"{name!r} is none of {', '.join(get_args(State))}", param_hint="--state")
    states = cast("list[State]", state or wanted)

    async def work(client: DSecClient) -> None:
        found = [one.info for one in await client.list(labels=labels, job=job, states=states)]
        found.sort(key=lambda info: info.created_at)
        if json:
            print_json(found)
        elif quiet:
            print("".join(f"{info.id}\n" for info in found), end="")
        else:
            rows = [
                [info.id, info.state, info.container_image, info.job or "-", age(info.created_at), info.cause or ""]
                for info in found
            ]
            print_table(["ID", "STATE", "IMAGE", "JOB", "AGE", "CAUSE"], rows)

    run_client(work, as_json=json)


def logs(
    sandbox_id: _Id,
    exec_id: Annotated[str | None, typer.Argument(metavar="[EXEC]", help="Id of an exec; default the newest.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the command has ended.")] = False,
    json: Json = False,
) -> None:
    """Print the output of a command; stdout to stdout, stderr to stderr. JSON: one object a line."""

    async def work(client: DSecClient) -> None:
        sandbox = await client.get(sandbox_id)
        name = exec_id
        if name is None:
            execs = await sandbox.execs()
            if not execs:
                raise NotFound(f"sandbox {sandbox_id} has run no command")
            name = max(execs, key=lambda one: one.started_at).id
        async for event in sandbox.attach(name).output(follow=follow):
            if json:
                print_json({**plain(event), "text": event.text})
            else:
                out = sys.stdout.buffer if event.stream == "stdout" else sys.stderr.buffer
                out.write(event.data)
                out.flush()

    run_client(work, as_json=json)


def inspect(sandbox_id: _Id, json: Json = False) -> None:
    """Show all that is known of a sandbox, live or ended: limits, use, cause, commands."""

    async def work(client: DSecClient) -> None:
        sandbox = await client.get(sandbox_id)
        metrics = None if sandbox.is_terminal else await sandbox.metrics()
        try:
            execs = await sandbox.execs()
        except PlatformError:
            if not sandbox.is_terminal:
                raise
            execs = []
        if json:
            print_json({"sandbox": sandbox.info, "metrics": metrics, "execs": execs})
            return
        fields = plain(sandbox.info)
        fields["limits"] = {name: value for name, value in fields["limits"].items() if value is not None}
        fields["layers"] = " ".join(fields["layers"])
        fields.update(created_at=f"{age(sandbox.info.created_at)} ago", running_at=None, last_used_at=None)
        fields["ended_at"] = f"{age(sandbox.info.ended_at)} ago" if sandbox.info.ended_at else None
        if metrics is not None:
            fields["memory"] = f"{size(metrics.memory_bytes)} (peak {size(metrics.memory_peak_bytes)})"
            fields["cpu_seconds"], fields["pids"] = f"{metrics.cpu_seconds:.2f}", metrics.pids
            fields["disk"] = None if metrics.disk_bytes is None else size(metrics.disk_bytes)
        print_fields(fields)
        if execs:
            print()
            rows = [
                [one.id, one.state, "-" if one.exit_code is None else str(one.exit_code), " ".join(one.argv)[:80]]
                for one in execs
            ]
            print_table(["EXEC", "STATE", "EXIT", "COMMAND"], rows)

    run_client(work, as_json=json)


def stop(
    sandbox_ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Ids of sandboxes.")] = None,
    job: _Job = None,
    all_: Annotated[bool, typer.Option("--all", help="All live sandboxes.")] = False,
    json: Json = False,
) -> None:
    """Stop sandboxes and return when nothing of them is left."""
    if sum((bool(sandbox_ids), job is not None, all_)) != 1:
        raise typer.BadParameter("give ids, or --job, or --all", param_hint="ID...")
    live = cast("list[State]", [name for name in get_args(State) if name not in TERMINAL])

    async def work(client: DSecClient) -> int:
        code = 0
        stopped = []
        if job is not None:
            found = await client.list(job=job, states=live)
            await client.stop_job(job)
            stopped = [one.id for one in found]
        else:
            names = sandbox_ids or [one.id for one in await client.list(states=live)]
            for name in names:
                try:
                    await _stop(await client.get(name))
                    stopped.append(name)
                except PlatformError as error:
                    if all_ and isinstance(error, NotFound):
                        continue
                    told = describe(error, as_json=True) if json else f"opendsec: {name}: {error.message}"
                    print(told, file=sys.stderr)
                    code = code or exit_code(error)
        if json:
            print_json({"stopped": stopped})
        else:
            print("".join(f"{name}\n" for name in stopped), end="")
        return code

    run_client(work, as_json=json)


def _after_dashes(command: list[str]) -> list[str]:
    return command[1:] if command[:1] == ["--"] else command


async def _stop(sandbox: Sandbox) -> None:
    await sandbox.stop()
