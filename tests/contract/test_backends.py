"""The backend contract, case by case: on runc with each scratch, and on the in-memory twin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
from tests.contract.harness import ContainerHarness, FakeHarness, Layers

from opendsec.api.errors import UnsupportedCapability
from opendsec.api.models import Limits
from opendsec_server.testing.backend_contract import CASES, run, shell


@pytest.fixture(scope="module")
def layers() -> Iterator[Layers]:
    """Make the images once."""
    made = Layers()
    yield made
    made.remove()


@pytest.fixture
async def container(layers: Layers) -> AsyncIterator[ContainerHarness]:
    """Open the container backend; at the end nothing may be left."""
    harness = ContainerHarness(layers)
    await harness.open()
    yield harness
    await harness.close()


@pytest.mark.root
@pytest.mark.parametrize("name", CASES)
async def test_container(name: str, container: ContainerHarness) -> None:
    """Every case, with real processes."""
    await CASES[name].run(container)


@pytest.mark.parametrize("name", [case.name for case in CASES.values() if not case.walls])
async def test_in_memory(name: str) -> None:
    """Every case that means something in memory."""
    await CASES[name].run(FakeHarness())


@pytest.mark.root
async def test_the_filter_is_there_whoever_loads_it(container: ContainerHarness) -> None:
    """Chronus loads it; the runtime does where privileges may grow, as chronus may not then."""
    for free in (False, True):
        spec = msgspec.structs.replace(container.spec(), allow_new_privileges=free)
        channel = await container.backend.start(spec)
        lines = (await shell(channel, "grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status")).stdout.split()
        assert lines == ["NoNewPrivs:", "0" if free else "1", "Seccomp:", "2"]
        result = await run(channel, "/bin/probe", "try", "bpf", "keyctl", "unshare", "clone3")
        assert result.stdout == "bpf 1\nkeyctl 1\nunshare 1\nclone3 38\n"


@pytest.mark.root
async def test_a_plain_folder_does_all_but_disk_limits(layers: Layers) -> None:
    """A limit that cannot be enforced makes the create fail; without one it works and is removed."""
    harness = ContainerHarness(layers, kind="folder")
    await harness.open()
    try:
        assert not harness.backend.capabilities().disk_limits
        with pytest.raises(UnsupportedCapability):
            await harness.backend.start(harness.spec(limits=Limits(disk_mb=10)))
        spec = harness.spec()
        channel = await harness.backend.start(spec)
        # Deeper than Python's own rmtree can go.
        deep = "mkdir -p /$(printf 'd/%.0s' $(seq 1100))"
        assert (await shell(channel, deep)).code == 0
        await harness.backend.remove(spec.id)
        assert await harness.backend.inventory() == set()
    finally:
        await harness.close()
