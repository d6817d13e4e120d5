"""The public API as a type checker sees it; ``test_typing.py`` runs mypy (strict) on this file. Never executed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator
from pathlib import Path, PurePosixPath
from typing import assert_type

import opendsec.sync
from opendsec import (
    BatchFailed,
    CommandFailed,
    DSecClient,
    DSecContainerRunArgs,
    DSecFnCallArgs,
    DSecFullVMRunArgs,
    DSecMicroVMRunArgs,
    Exec,
    ExecResult,
    FileInfo,
    Image,
    ImageConfig,
    Metrics,
    Node,
    OutputEvent,
    PlatformError,
    Process,
    Progress,
    Sandbox,
    SandboxInfo,
    Transfer,
)
from opendsec.testing import FakeCommand, FakeServer, fake_client


async def creates() -> None:
    """Clients and sandboxes."""
    args = DSecContainerRunArgs(container_image="python:3.11", memory_limit_mb=4096, network_rules={"npm": False})
    async with DSecClient() as client, DSecClient("unix:///x", "key", retry_seconds=1.0) as other:
        assert_type(client, DSecClient)
        assert_type(await other.open(), DSecClient)
        assert_type(await client.run_container(args, timeout=120), Sandbox)
        assert_type(await client.run_microvm(DSecMicroVMRunArgs(container_image="x")), Sandbox)
        assert_type(await client.run_fullvm(DSecFullVMRunArgs(container_image="x")), Sandbox)
        assert_type(await client.fncall(DSecFnCallArgs(container_image="x")), Sandbox)
        assert_type(client.run_many(args, 3, concurrency=2), AsyncGenerator[Sandbox, None])
        assert_type(await client.get("x"), Sandbox)
        assert_type(await client.list(labels={"a": "b"}, job="j", states=["running"]), list[Sandbox])
        assert_type(await client.stop_job("j"), int)
        assert_type(await client.nodes.list(), list[Node])
        assert_type(await client.nodes.drain("n"), Node)
        assert_type(await client.images.list(), list[Image])
        await client.run_container(DSecMicroVMRunArgs(container_image="x"))  # type: ignore[arg-type]
        await client.list(states=["odd"])  # type: ignore[list-item]


async def images(client: DSecClient) -> None:
    """Imports and their progress."""

    def show(progress: Progress) -> None:
        assert_type(progress.fraction, float | None)

    config = ImageConfig(env={"A": "b"}, user="root", workdir="/")
    assert_type(await client.images.import_folder(Path("x"), "a:b", config=config, on_progress=show), Image)
    assert_type(await client.images.import_tar("x", "a:b", kind="toolkit"), Image)
    assert_type(await client.images.import_debian("a:b", suite="bookworm", packages=["git"]), Image)


async def drive(sandbox: Sandbox) -> None:
    """Commands, processes, files, trees."""
    result = await sandbox.run_shell("true", timeout=1, cwd=PurePosixPath("/"), env={"A": "b"}, stdin=b"", check=True)
    assert_type(result, ExecResult)
    assert_type(result.stdout, str)
    assert_type(result.stdout_bytes, bytes)
    assert_type(result.exit_code, int)
    assert_type(result.duration, float | None)
    assert_type(await sandbox.exec(["ls", PurePosixPath("/")]), ExecResult)
    async with await sandbox.start(["cat"], stdin=True) as process:
        assert_type(process, Process)
        async for event in process:
            assert_type(event, OutputEvent)
        await process.write_stdin("text")
        await process.signal(2, tree=True)
        assert_type(await process.wait(timeout=1), ExecResult)
        assert_type(await process.info(), Exec)
    assert_type(await sandbox.execs(), list[Exec])
    assert_type(await sandbox.files.read("/x"), bytes)
    assert_type(await sandbox.files.read_text(b"/x"), str)
    assert_type(sandbox.files.stream("/x"), AsyncIterator[bytes])
    assert_type(await sandbox.files.list("/x", recursive=True), list[FileInfo])
    assert_type(await sandbox.files.exists("/x"), bool)
    assert_type(await sandbox.download("/x", "here"), Transfer)
    assert_type(await sandbox.metrics(), Metrics)
    assert_type(await sandbox.stop(), SandboxInfo)
    assert_type(await sandbox.fork(), Sandbox)
    try:
        result.check()
    except CommandFailed as failed:
        assert_type(failed.result, ExecResult)
    except BatchFailed as failed:
        assert_type(failed.errors, dict[int, PlatformError])


def blocking() -> None:
    """The same without ``await``."""
    args = DSecContainerRunArgs(container_image="python:3.11")
    with opendsec.sync.DSecClient() as client, client.run_container(args) as sandbox:
        assert_type(sandbox, opendsec.sync.Sandbox)
        assert_type(sandbox.run_shell("true"), ExecResult)
        assert_type(client.run_many(args, 3), Generator[opendsec.sync.Sandbox, None, None])
        assert_type(client.list(), list[opendsec.sync.Sandbox])
        for event in sandbox.start("true"):
            assert_type(event, OutputEvent)
        sandbox.files.write("/x", (piece for piece in (b"1", b"2")))


async def testing() -> None:
    """The in-memory platform."""
    async with fake_client() as client, FakeServer() as server, server.client() as other:
        assert_type(client, DSecClient)
        assert_type(other, DSecClient)

        @server.on_command
        async def handler(command: FakeCommand) -> int | None:
            command.write("x")
            return 0
