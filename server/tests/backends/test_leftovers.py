"""What a crash may leave at any line of a start is found, counted as a leak, and removed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import msgspec
import pytest

from opendsec.api.errors import DiskFull, Unavailable
from opendsec.api.models import ImageConfig, Limits
from opendsec_server import leaks, tools
from opendsec_server.backends.container import backend as module
from opendsec_server.backends.container.backend import ContainerBackend
from opendsec_server.core.spec import SandboxSpec
from opendsec_server.images.layermounts import ErofsLayerMounts
from opendsec_server.platform.config import Config, ScratchConfig
from opendsec_server.testing.rootfs import make_rootfs

pytestmark = pytest.mark.root
ID, DIGEST = "local-aaaaaaaaaaaa", "blake3:" + "a" * 64
SPEC = SandboxSpec(
    id=ID,
    backend="container",
    runtime="runc",
    layers=(DIGEST,),
    config=ImageConfig(),
    limits=Limits(),
    hostname=ID,
)


@pytest.fixture
def config(tmp_path):
    """A node of its own; its run folder is gone after the test."""
    run = Path(tempfile.mkdtemp(prefix="opendsec-", dir="/run"))
    base = Config(data_dir=str(tmp_path / "data"), run_dir=str(run), cgroup_parent=run.name)
    base.data.mkdir()
    yield msgspec.structs.replace(base, tools_dir=str(tools.locate(base)), scratch=ScratchConfig(size_bytes=2**30))
    shutil.rmtree(run)


@pytest.fixture(scope="module")
def image():
    """A tiny layer."""
    with tempfile.TemporaryDirectory() as folder:
        root = make_rootfs(Path(folder) / "root")
        made = Path(folder) / "layer.erofs"
        subprocess.run(["mkfs.erofs", "--quiet", made, root], check=True, capture_output=True)
        yield made


@pytest.fixture
async def backend(config, image):
    """An open backend; after the test nothing is left."""
    made = ContainerBackend(config, ErofsLayerMounts(config.data, lambda _digest: image))
    await made.open()
    yield made
    await made.remove(ID)
    await made.close()
    assert counted(config) == {}


def sleeper() -> subprocess.Popen[bytes]:
    """Return a process that sleeps."""
    return subprocess.Popen(["sleep", "1000"])


def open_files() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def counted(config: Config, *live: str, edge: bool = False) -> dict[str, list[str]]:
    return leaks.report(config, leaks.Owners(live=set(live), known=set(live), edge_answers=edge)).items


async def check_removed(backend: ContainerBackend, config: Config, *kinds: str) -> None:
    """What was left is in the inventory and in the count, and ``remove`` takes it."""
    assert await backend.inventory() == {ID}
    assert set(counted(config, edge=True)) == set(kinds)
    assert counted(config, ID, edge=True) == {}
    await backend.remove(ID)
    assert await backend.inventory() == set()
    assert counted(config, edge=True) == {}


async def test_a_socket_is_left(backend, config):
    """Killed right after the first step."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(config.run / "s" / ID))
    await check_removed(backend, config, "files")


async def test_a_subvolume_is_left(backend, config):
    """Killed before the runtime was called."""
    (backend._scratch.create(ID, 10) / "upper").mkdir()
    await check_removed(backend, config, "subvolumes")


async def test_the_runtimes_state_is_left(backend, config):
    """Killed together with the runtime."""
    (config.run / "runc" / ID).mkdir(parents=True)
    (config.run / "runc" / ID / "state.json").write_text("{}")
    await check_removed(backend, config, "files")


async def test_groups_are_left_in_some_hierarchies(backend, config):
    """The runtime was killed while it made them."""
    for name in ("pids", "freezer", "unified"):
        root = backend._cgroups.hierarchies.get(name)
        if root is not None:
            (root / config.cgroup / ID).mkdir(parents=True)
    await check_removed(backend, config, "cgroups")


async def test_a_process_is_left_that_nobody_knows(backend, config):
    """The pid file was not written: the process is found by its group."""
    child = sleeper()
    group = backend._cgroups.group(ID, "pids")
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text(str(child.pid))
    await check_removed(backend, config, "cgroups", "processes")
    assert child.wait() == -9


async def test_a_whole_sandbox_is_left(backend, config):
    """The journal was lost: everything of it is a leak, of every kind."""
    channel = await backend.start(SPEC)
    await channel.aclose()
    await check_removed(backend, config, "processes", "cgroups", "namespaces", "subvolumes", "files")


async def test_pid_1_is_found_without_its_file(backend, config):
    """A crash between the runtime's end and the edge's: the groups lead to it."""
    channel = await backend.start(SPEC)
    (backend._scratch.path(ID) / "pid").unlink()
    fresh = ContainerBackend(config, backend._layers)
    await fresh.open()
    assert not await fresh.alive(ID)
    await fresh.remove(ID)
    await channel.wait_closed()
    assert await fresh.inventory() == set()
    fresh._threads.shutdown()


async def test_another_process_with_the_old_number_is_let_be(backend, config):
    """After a restart of the edge a pid file may name a stranger."""
    child = sleeper()
    (backend._scratch.create(ID, None) / "pid").write_text(str(child.pid))
    assert not await backend.alive(ID)
    await backend.remove(ID)
    assert child.poll() is None
    child.kill()
    child.wait()


async def test_shared_things_are_leaks_when_nobody_is_left(backend, config):
    """The scratch, its device, layers and the parent group belong to an edge or to live sandboxes."""
    channel = await backend.start(SPEC)
    assert counted(config, ID, edge=True) == {}
    assert set(counted(config)) >= {"mounts", "loop_devices", "cgroups"}
    await channel.aclose()


@pytest.mark.parametrize("step", ["_mount_root", "render", "start"])
async def test_a_start_that_breaks_at_any_step_leaves_nothing(backend, config, monkeypatch, step):
    """Whatever the kernel says, and the disk being full is named."""
    owner = {"_mount_root": backend, "render": backend._oci, "start": backend._runtime}[step]

    def fail(*_args: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, fail)
        with pytest.raises(DiskFull):
            await backend.start(SPEC)
    assert await backend.inventory() == set()
    assert counted(config, edge=True) == {}
    await (await backend.start(SPEC)).aclose()


async def test_a_chronus_that_does_not_answer_is_removed(backend, config, monkeypatch):
    """The create fails in time and for a passing reason."""

    async def silent(*_args: object, **_more: object) -> None:
        raise Unavailable("no hello")

    monkeypatch.setattr(module, "connect", silent)
    with pytest.raises(Unavailable):
        await backend.start(SPEC)
    assert await backend.inventory() == set()


async def test_descriptors_do_not_grow(backend):
    """A life gives back all it took."""
    await (await backend.start(SPEC)).aclose()
    await backend.remove(ID)
    before = open_files()
    for _ in range(5):
        await (await backend.start(SPEC)).aclose()
        await backend.remove(ID)
    assert open_files() <= before
