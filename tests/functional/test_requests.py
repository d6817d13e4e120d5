"""Requests that cannot be met get the right typed error, and nothing is left of them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.functional.stack import Stack

from opendsec import (
    Conflict,
    DSecClient,
    DSecContainerRunArgs,
    ImageUnavailable,
    InvalidArgument,
    NotFound,
    PolicyDenied,
    Sandbox,
    SandboxGone,
    Unauthenticated,
    UnsupportedCapability,
)

pytestmark = [pytest.mark.root, pytest.mark.slow]


async def test_an_unknown_image_is_named_in_the_error(client: DSecClient) -> None:
    """The create fails at once and no sandbox is left."""
    with pytest.raises(ImageUnavailable, match="no-such-image"):
        await client.run_container(DSecContainerRunArgs(container_image="no-such-image:latest"))
    assert await client.list(states=["requested", "preparing", "running"]) == []


@pytest.mark.parametrize(
    "field",
    [
        {"memory_limit_mb": 1},
        {"memory_limit_mb": -5},
        {"cpu_cores_limit": 0},
        {"pids_limit": 1},
        {"disk_limit_mb": 0},
        {"open_files_limit": 1},
        {"ttl_hard": -1},
        {"env": {"A=B": "c"}},
        {"env": {"A": "nul\0"}},
        {"workdir": "relative"},
        {"labels": {"a=b": "c"}},
        {"container_image": "UPPER CASE"},
    ],
    ids=lambda field: next(iter(field)),
)
async def test_a_bad_limit_or_field_is_refused(client: DSecClient, stack: Stack, field: dict[str, Any]) -> None:
    """It is the caller's fault, and retrying does not help."""
    with pytest.raises(InvalidArgument) as caught:
        await client.run_container(DSecContainerRunArgs(**{"container_image": stack.image, **field}))
    assert not caught.value.retryable
    assert not caught.value.is_infra


@pytest.mark.parametrize("field", [{"network_rules": {"pypi": True}}, {"runtime": "runsc"}, {"runtime": "crun"}])
async def test_what_cannot_be_enforced_is_refused(client: DSecClient, stack: Stack, field: dict[str, Any]) -> None:
    """Nothing degrades quietly."""
    with pytest.raises(UnsupportedCapability):
        await client.run_container(DSecContainerRunArgs(container_image=stack.image, **field))


async def test_network_rules_that_open_nothing_are_honoured(client: DSecClient, stack: Stack) -> None:
    """A rule of ``False`` holds trivially: there is a loopback and nothing else."""
    args = DSecContainerRunArgs(container_image=stack.image, network_rules={"npm": False})
    async with await client.run_container(args) as sandbox:
        links = await sandbox.run_shell(
            "ls /sys/class/net; ping -c1 -W1 127.0.0.1 >/dev/null 2>&1; cat /proc/net/route"
        )
        assert links.stdout.split()[0] == "lo"
        assert len(links.stdout.splitlines()) == 2, links.stdout


@pytest.mark.parametrize("user", ["no-such-user", "root:no-such-group", "4294967295"])
async def test_an_impossible_user_is_refused_by_name(sandbox: Sandbox, user: str) -> None:
    """No command is started; the error names what does not exist."""
    with pytest.raises(InvalidArgument, match=user.rsplit(":", maxsplit=1)[-1]):
        await sandbox.run_shell("echo never", user=user)


async def test_users_get_their_own_groups(sandbox: Sandbox) -> None:
    """By name or id, from the image's own files."""
    assert (await sandbox.run_shell("id -u; id -G", user="agent")).stdout == "1000\n1000 2000\n"
    assert (await sandbox.run_shell("id -u; id -g", user="1234:55")).stdout == "1234\n55\n"


async def test_a_missing_program_or_directory_is_a_result(sandbox: Sandbox) -> None:
    """127 as a shell has it; a missing directory of the command is no platform failure either."""
    assert (await sandbox.exec(["/no/such/program"])).exit_code == 127
    assert (await sandbox.exec(["/etc/passwd"])).exit_code == 126
    result = await sandbox.run_shell("true", cwd="/no/such/dir")
    assert result.exit_code in {126, 127}
    assert "/no/such/dir" in result.stderr or "directory" in result.stderr


async def test_a_wrong_key_opens_nothing(stack: Stack) -> None:
    """Neither reading nor creating works."""
    async with DSecClient(stack.url, "ods_wrong") as stranger:
        with pytest.raises(Unauthenticated):
            await stranger.list()
        with pytest.raises(Unauthenticated):
            await stranger.run_container(DSecContainerRunArgs(container_image=stack.image))


async def test_unknown_and_ended_sandboxes_are_told_apart(client: DSecClient, sandbox: Sandbox) -> None:
    """An unknown id is not found; an ended sandbox says why it ended, and stopping it again is fine."""
    with pytest.raises(NotFound):
        await client.get("local-aaaaaaaaaaaa")
    await sandbox.stop()
    with pytest.raises(SandboxGone, match=r"stopped|ended|deleted"):
        await sandbox.run_shell("true")
    info = await sandbox.stop()
    assert (info.state, info.cause, info.is_infra) == ("stopped", "deleted", False)


async def test_the_same_request_id_gives_the_same_sandbox(client: DSecClient, stack: Stack) -> None:
    """Whoever does not know whether a create arrived may repeat it."""
    args = DSecContainerRunArgs(container_image=stack.image, request_id="once")
    first, second = await client.run_container(args), await client.run_container(args)
    assert first.id == second.id
    assert len(await client.list(request_id="once")) == 1


def evil_tar(path: Path, name: str, *, link: str | None = None) -> Path:
    """Write a tar with one member that tries to leave the place it is unpacked to."""
    with tarfile.open(path, "w") as archive:
        if link is not None:
            member = tarfile.TarInfo("way")
            member.type, member.linkname = tarfile.SYMTYPE, link
            archive.addfile(member)
        member = tarfile.TarInfo(name)
        member.size = 4
        archive.addfile(member, io.BytesIO(b"evil"))
    return path


@pytest.mark.parametrize("name", ["../../escaped", "a/../../escaped"])
async def test_a_tar_cannot_leave_the_layer_it_is_imported_into(client: DSecClient, tmp_path: Path, name: str) -> None:
    """Refused, and nothing is written outside."""
    with pytest.raises((InvalidArgument, PolicyDenied)):
        await client.images.import_tar(evil_tar(tmp_path / "evil.tar", name), "test/evil:latest")
    assert not Path("/tmp/escaped").exists()
    with pytest.raises(ImageUnavailable):
        await client.images.resolve("test/evil:latest")


@pytest.mark.parametrize("link", ["/tmp", "../../../../../../tmp"])
async def test_a_link_in_a_tar_leads_to_the_layers_own_files(client: DSecClient, tmp_path: Path, link: str) -> None:
    """A member behind an absolute link lands inside the layer, as in a chroot; one that climbs out is refused."""
    archive = evil_tar(tmp_path / "evil.tar", "way/escaped", link=link)
    try:
        await client.images.import_tar(archive, "test/link:latest")
    except InvalidArgument:
        assert ".." in link
    else:
        await client.images.remove("test/link:latest")
    assert not Path("/tmp/escaped").exists()


async def test_an_image_in_use_cannot_be_removed(client: DSecClient, sandbox: Sandbox, stack: Stack) -> None:
    """Its layer stays while a sandbox runs on it."""
    with pytest.raises(Conflict):
        await client.images.remove(stack.image)
    assert (await sandbox.run_shell("true")).ok
    assert (await client.images.resolve(stack.image)).reference == stack.image
