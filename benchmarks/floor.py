"""The floor of a create: bare ``runc run`` on the same root file system, with walls of the same shape as ours.

Everything that is not runc is done beforehand and outside of the timing: the layer is mounted, and every slot has an
overlay and a bundle of its own that all its runs use again. Our sandboxes get a fresh overlay and a fresh subvolume
each, and chronus; that is what the ratio shows.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from opendsec_server.linux.mounts import mount, mount_erofs, umount


class Floor:
    """Bare runc, ready to run.

    Args:
        image: EROFS image of the layer.
        spec: the OCI configuration of a sandbox; root, command and cgroup are replaced.
        slots: how many may run at once.
    """

    def __init__(self, image: Path, spec: dict[str, Any], slots: int) -> None:
        self._image = image
        self._spec = spec
        self._slots = slots
        self._mounts: list[Path] = []
        self._folder = tempfile.TemporaryDirectory(prefix="opendsec-floor-", ignore_cleanup_errors=True)
        self._root = Path(self._folder.name)

    def __enter__(self) -> Self:
        try:
            layer = self._root / "layer"
            layer.mkdir()
            mount_erofs(self._image, layer)
            self._mounts.append(layer)
            for slot in range(self._slots):
                self._prepare(self._root / str(slot), layer)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmount and remove everything."""
        for place in reversed(self._mounts):
            umount(place, lazy=True)
        self._mounts.clear()
        self._folder.cleanup()

    def _prepare(self, bundle: Path, layer: Path) -> None:
        for name in ("rootfs", "upper", "work"):
            (bundle / name).mkdir(parents=True)
        options = f"lowerdir={layer},upperdir={bundle}/upper,workdir={bundle}/work"
        mount("overlay", bundle / "rootfs", "overlay", data=options)
        self._mounts.append(bundle / "rootfs")
        spec = json.loads(json.dumps(self._spec))
        spec["root"] = {"path": "rootfs"}
        spec["process"]["args"] = ["/.opendsec/sh", "-c", "true"]
        spec["linux"]["cgroupsPath"] = f"/{self._root.name}-{bundle.name}"
        (bundle / "config.json").write_text(json.dumps(spec))

    def run(self, slot: int = 0) -> float:
        """Run the first command of a container to its end and return the seconds that took, removal included."""
        name = f"{self._root.name}-{slot}"
        argv = ["runc", "--root", str(self._root / "state"), "run", "--bundle", str(self._root / str(slot)), name]
        begin = time.perf_counter()
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True)
        return time.perf_counter() - begin

    def loop(self, seconds: float) -> float:
        """Run containers from all slots at once and return how many ended each second."""
        begin = time.perf_counter()

        def one(slot: int) -> int:
            count = 0
            while time.perf_counter() - begin < seconds:
                self.run(slot)
                count += 1
            return count

        with ThreadPoolExecutor(self._slots) as pool:
            counts: Sequence[int] = list(pool.map(one, range(self._slots)))
        return sum(counts) / (time.perf_counter() - begin)
