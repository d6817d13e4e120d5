"""The contract of layer mounts, held by the real ones and their in-memory twin; then what only real mounts have."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from opendsec.api.errors import Conflict, ImageUnavailable, InvalidArgument
from opendsec_server.images.layermounts import ErofsLayerMounts
from opendsec_server.images.store import LocalImageStore
from opendsec_server.linux import mounts
from opendsec_server.testing.images import FakeImageStore, FakeLayerMounts
from opendsec_server.testing.tars import import_bytes, make_tar, member, mounts_below

ABSENT = "blake3:" + "0" * 64


async def fill(images) -> list[str]:
    return [
        (await import_bytes(images, make_tar((member("name"), name.encode())), name)).layer.digest for name in "abc"
    ]


@pytest.fixture(params=["fake", "real"])
async def world(request):
    """Mounts of either kind and three layers ``a``, ``b``, ``c``."""
    if request.param == "fake":
        images = FakeImageStore()
        layers = FakeLayerMounts(images.layer_path)
    else:
        images = request.getfixturevalue("store")
        layers = request.getfixturevalue("layer_mounts")
    return SimpleNamespace(mounts=layers, digests=await fill(images))


@pytest.fixture
async def real(store, layer_mounts, tmp_path):
    """Real mounts and three layers."""
    return SimpleNamespace(mounts=layer_mounts, digests=await fill(store), store=store, path=tmp_path)


def test_paths_come_in_the_order_asked_for(world):
    """One for each digest, the same for every owner."""
    a, b, c = world.digests
    paths = world.mounts.acquire("one", [c, a])
    assert len(set(paths)) == 2
    assert world.mounts.acquire("two", [a, b, c])[::2] == [paths[1], paths[0]]
    assert world.mounts.mounted() == sorted([a, b, c])


def test_layers_stay_warm_after_the_last_user_until_told(world):
    """unmount_idle spares what is in use."""
    a, b, _ = world.digests
    world.mounts.acquire("one", [a, b])
    world.mounts.acquire("two", [b])
    world.mounts.release("one")
    assert world.mounts.mounted() == sorted([a, b])
    assert world.mounts.unmount_idle() == [a]
    assert world.mounts.mounted() == [b]
    world.mounts.release("two")
    assert world.mounts.unmount_idle() == [b]
    assert world.mounts.mounted() == []


def test_acquire_and_release_may_be_repeated(world):
    """An owner counts once; an unknown one is fine."""
    a, *_ = world.digests
    world.mounts.acquire("one", [a])
    world.mounts.acquire("one", [a])
    world.mounts.release("one")
    world.mounts.release("one")
    world.mounts.release("never seen")
    assert world.mounts.users(a) == set()
    assert world.mounts.unmount_idle() == [a]


def test_a_missing_layer_is_unavailable_and_nothing_is_kept(world):
    """The owner holds none of the layers asked for with it."""
    a, *_ = world.digests
    with pytest.raises(ImageUnavailable):
        world.mounts.acquire("one", [a, ABSENT])
    assert world.mounts.users(a) == set()
    assert ABSENT not in world.mounts.mounted()


def test_a_layer_in_use_cannot_be_dropped(world):
    """Conflict; an idle or unknown one can."""
    a, *_ = world.digests
    world.mounts.acquire("one", [a])
    with pytest.raises(Conflict):
        world.mounts.drop(a)
    world.mounts.release("one")
    world.mounts.drop(a)
    world.mounts.drop(a)
    assert world.mounts.mounted() == []


def test_reconcile_keeps_what_has_owners(world):
    """And unmounts the rest."""
    a, b, c = world.digests
    world.mounts.acquire("one", [a, b])
    world.mounts.reconcile({"one": [a], "two": [c]})
    assert world.mounts.mounted() == [a]
    assert world.mounts.users(a) == {"one"}
    assert world.mounts.users(c) == {"two"}
    world.mounts.release("two")
    world.mounts.acquire("three", [b])
    assert world.mounts.mounted() == sorted([a, b])


# -- only real mounts ---------------------------------------------------------------------------------------------


def test_the_files_are_there_read_only_with_set_user_id_working(real):
    """Nodev but not nosuid; the way in is closed to others."""
    paths = real.mounts.acquire("one", real.digests)
    assert [(path / "name").read_text() for path in paths] == ["a", "b", "c"]
    (found,) = [mount for mount in mounts.mountinfo() if mount.target == str(paths[0])]
    assert found.read_only
    assert "nodev" in found.options
    assert "nosuid" not in found.options
    assert (paths[0].parent.parent.stat().st_mode & 0o777) == 0o700


def test_unmounting_leaves_neither_mounts_nor_folders(real):
    """The folder of mount points is empty again."""
    real.mounts.acquire("one", real.digests)
    real.mounts.release("one")
    real.mounts.unmount_idle()
    assert mounts_below(real.path) == []
    assert list(real.mounts.root.iterdir()) == []


def test_threads_racing_for_one_layer_mount_it_once(real):
    """However many come at once."""
    a, *_ = real.digests
    gate = threading.Barrier(8)
    errors = []

    def run(number):
        gate.wait()
        try:
            for turn in range(20):
                (path,) = real.mounts.acquire(f"{number}", [a])
                assert (path / "name").read_text() == "a"
                assert len(mounts_below(real.path)) == 1
                real.mounts.release(f"{number}")
                if turn % 5 == number:
                    real.mounts.unmount_idle()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_restart_takes_over_what_is_mounted(real):
    """A new instance adopts owned mounts and removes the others, doubled ones and strangers too."""
    a, b, c = real.digests
    paths = real.mounts.acquire("one", [a, b, c])
    mounts.mount_erofs(real.store.layer_path(c), paths[2])  # doubled, as after a lost race of two processes
    stranger = real.mounts.root / "stranger"
    stranger.mkdir()
    mounts.mount("tmpfs", stranger, "tmpfs")
    (real.mounts.root / "empty").mkdir()
    after = ErofsLayerMounts(real.path / "data", real.store.layer_path)
    after.reconcile({"one": [a, c]})
    assert after.mounted() == [a]
    assert mounts_below(real.path) == [str(paths[0])]
    assert [path.name for path in after.root.iterdir()] == [paths[0].name]
    assert after.acquire("one", [a, c]) == [paths[0], paths[2]]
    assert (paths[2] / "name").read_text() == "c"


def test_without_reconcile_a_mount_left_behind_is_used_or_replaced(real):
    """Acquire looks before it mounts."""
    a, b, _ = real.digests
    path_a, path_b = real.mounts.acquire("one", [a, b])
    mounts.umount(path_b)
    mounts.mount("tmpfs", path_b, "tmpfs")
    after = ErofsLayerMounts(real.path / "data", real.store.layer_path)
    assert after.acquire("two", [a, b]) == [path_a, path_b]
    assert (path_b / "name").read_text() == "b"
    assert sorted(mounts_below(real.path)) == sorted([str(path_a), str(path_b)])


def test_a_reader_inside_does_not_keep_a_layer_mounted(real):
    """The unmount is lazy; the reader keeps its files."""
    a, *_ = real.digests
    (path,) = real.mounts.acquire("one", [a])
    real.mounts.release("one")
    with (path / "name").open() as file:
        real.mounts.unmount_idle()
        assert mounts_below(real.path) == []
        assert file.read() == "a"


def test_idle_time_is_counted_from_the_last_release(real):
    """Only layers idle for long enough go."""
    now = [100.0]
    layers = ErofsLayerMounts(real.path / "data", real.store.layer_path, clock=lambda: now[0])
    a, b, _ = real.digests
    layers.acquire("one", [a])
    layers.acquire("two", [b])
    layers.release("one")
    now[0] += 50
    layers.release("two")
    now[0] += 20
    assert layers.unmount_idle(60) == [a]
    assert layers.mounted() == [b]


async def test_the_store_refuses_to_remove_a_layer_in_use(real):
    """Joined with the mounts, remove tells Conflict, or unmounts a warm layer first."""
    a, *_ = real.digests
    store = LocalImageStore(real.path / "data", mounts=real.mounts)
    (path,) = real.mounts.acquire("one", [a])
    with pytest.raises(Conflict):
        store.remove("a", in_use=lambda digest: False)
    real.mounts.release("one")
    store.remove("a", in_use=lambda digest: False)
    assert not list(real.mounts.root.glob(path.name))
    assert mounts_below(real.path) == []
    with pytest.raises(ImageUnavailable):
        real.mounts.acquire("two", [a])
    store.close()


@pytest.mark.parametrize("digest", ["blake3:../../etc", "sha256:00", "blake3:", ""])
def test_digests_never_become_other_paths(real, digest):
    """Refused before anything is touched."""
    with pytest.raises((InvalidArgument, ImageUnavailable)):
        real.mounts.acquire("one", [digest])
