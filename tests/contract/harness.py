"""Backends bound to the contract: the real one on a node of its own, and the in-memory twin."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import msgspec

from opendsec.api.errors import ImageUnavailable
from opendsec.api.models import ImageConfig, Limits
from opendsec_server import leaks, tools
from opendsec_server.backends.container.backend import ContainerBackend
from opendsec_server.core.spec import SandboxSpec
from opendsec_server.images.layermounts import ErofsLayerMounts
from opendsec_server.platform.config import Config
from opendsec_server.testing.backend import FakeBackend
from opendsec_server.testing.channel import probe_binary
from opendsec_server.testing.rootfs import make_rootfs

_numbers = itertools.count()


def new_spec(layers: tuple[str, ...], limits: Limits | None) -> SandboxSpec:
    """Return a spec with an id of its own."""
    number = next(_numbers)
    name = "local-" + "".join("abcdefghijklmnopqrstuvwxyz"[number // 26**place % 26] for place in range(12))
    return SandboxSpec(
        id=name,
        backend="container",
        runtime="runc",
        layers=layers,
        config=ImageConfig(),
        limits=limits or Limits(),
        hostname=name,
    )


def digest(name: str) -> str:
    """Return a digest that stands for a layer by name."""
    return "blake3:" + name.encode().hex().ljust(64, "0")


class Layers:
    """EROFS images by name in a temporary folder; made once, used by many tests."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="opendsec-contract-"))
        base = make_rootfs(self.folder / "base")
        shutil.copy(probe_binary(), base / "bin/probe")
        (base / "etc/motd").write_text("base\n")
        upper = self.folder / "upper"
        (upper / "etc").mkdir(parents=True)
        (upper / "etc/motd").write_text("upper\n")
        bare = self.folder / "bare"
        bare.mkdir()
        shutil.copy(probe_binary(), bare / "probe")
        for root in (base, upper, bare):
            image = self.folder / f"{root.name}.erofs"
            subprocess.run(["mkfs.erofs", "--quiet", image, root], check=True, capture_output=True)

    def path(self, wanted: str) -> Path:
        """Return the image of a digest."""
        for image in self.folder.glob("*.erofs"):
            if digest(image.stem) == wanted:
                return image
        raise ImageUnavailable(f"layer {wanted} is not here")

    def remove(self) -> None:
        """Remove the images."""
        shutil.rmtree(self.folder, ignore_errors=True)


class ContainerHarness:
    """The container backend on a node of its own; ``scratch`` is kept between tests, as making it takes time."""

    memory_bomb = "/bin/probe eat 1000"

    def __init__(self, layers: Layers, kind: str = "btrfs-image") -> None:
        self._layers = layers
        run = Path(tempfile.mkdtemp(prefix="opendsec-", dir="/run"))
        data = layers.folder / "data"
        data.mkdir(exist_ok=True)
        config = Config(data_dir=str(data), run_dir=str(run), cgroup_parent=run.name)
        scratch = msgspec.structs.replace(config.scratch, kind=kind)
        self.config = msgspec.structs.replace(config, scratch=scratch, tools_dir=str(tools.locate(config)))
        self._specs: dict[str, SandboxSpec] = {}
        self.backend = self._new()

    def _new(self) -> ContainerBackend:
        mounts = ErofsLayerMounts(self.config.data, self._layers.path)
        # An edge takes the owners from its journal.
        mounts.reconcile({name: spec.layers for name, spec in self._specs.items()})
        return ContainerBackend(self.config, mounts)

    def spec(self, *, layers: tuple[str, ...] = ("base",), limits: Limits | None = None) -> SandboxSpec:
        """Return a new sandbox's spec."""
        made = new_spec(tuple(map(digest, layers)), limits)
        self._specs[made.id] = made
        return made

    def kill(self, sandbox_id: str) -> None:
        """Kill pid 1."""
        pid = (self.config.data / "scratch" / sandbox_id / "pid").read_text()
        subprocess.run(["kill", f"-{signal.SIGKILL}", pid], check=True)

    async def open(self) -> None:
        """Open the backend."""
        await self.backend.open()

    async def restart(self) -> None:
        """Forget the backend as a crash would, and begin anew."""
        self.backend = self._new()
        await self.backend.open()

    async def close(self) -> None:
        """Remove everything and close."""
        for name in await self.backend.inventory():
            await self.backend.remove(name)
        await self.backend.close()
        left = self.leaks(set(), edge=False)
        assert left == {}, left
        shutil.rmtree(self.config.run)

    def leaks(self, live: set[str], *, edge: bool = True) -> dict[str, list[str]]:
        """Return what has no owner."""
        return leaks.report(self.config, leaks.Owners(live=live, known=live, edge_answers=edge)).items


class FakeHarness:
    """The in-memory twin."""

    memory_bomb = "oom"

    def __init__(self) -> None:
        self.backend = FakeBackend()

    def spec(self, *, layers: tuple[str, ...] = ("base",), limits: Limits | None = None) -> SandboxSpec:
        """Return a new sandbox's spec."""
        return new_spec(layers, limits)

    def kill(self, sandbox_id: str) -> None:
        """Kill pid 1."""
        self.backend.kill(sandbox_id)

    async def restart(self) -> None:
        """Cut what a dead edge held; the sandboxes live in the object."""
        await self.backend.close()
        await self.backend.open()

    def leaks(self, live: set[str]) -> dict[str, list[str]]:
        """Return sandboxes that nobody owns."""
        strays = sorted(self.backend.guests.keys() - live)
        return {"processes": strays} if strays else {}
