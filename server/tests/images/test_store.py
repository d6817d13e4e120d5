"""The contract of image stores, held by the real one and its in-memory twin; then what only the real one has."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress

import pytest

from opendsec.api.errors import Conflict, ImageUnavailable, InvalidArgument
from opendsec.api.models import ImageConfig
from opendsec_server.images.composition import DEFAULT_BASE_CONFIG
from opendsec_server.images.store import LocalImageStore
from opendsec_server.testing.images import FakeImageStore
from opendsec_server.testing.tars import chunks, import_bytes, make_tar, member, quiet

ABSENT = "blake3:" + "0" * 64


@pytest.fixture(params=["fake", "real"])
def images(request):
    """Both kinds of store."""
    return FakeImageStore() if request.param == "fake" else request.getfixturevalue("store")


def tar(text: str = "x") -> bytes:
    return make_tar((member("file"), text.encode()))


def unused(digest: str) -> bool:
    return False


async def test_an_import_is_found_by_tag_and_by_digest(images):
    """name, name:tag, name@digest and digest alone."""
    made = await import_bytes(images, tar(), "team/image")
    assert made.reference == "team/image:latest"
    assert made.layer.size > 0
    for reference in ("team/image", "team/image:latest", f"team/image@{made.layer.digest}", made.layer.digest):
        assert images.resolve(reference).layer == made.layer
    assert images.layer_path(made.layer.digest).name == "layer.erofs"


async def test_the_kind_and_config_are_kept(images):
    """A base without config gets the default; other kinds an empty one."""
    config = ImageConfig(env={"A": "1"}, user="u", workdir="/w")
    assert (await import_bytes(images, tar(), "a")).layer.config == DEFAULT_BASE_CONFIG
    assert (await import_bytes(images, tar(), "b", kind="toolkit")).layer.config == ImageConfig()
    made = await import_bytes(images, tar(), "c", kind="workspace", config=config)
    assert (made.layer.kind, made.layer.config) == ("workspace", config)


async def test_equal_input_gives_an_equal_digest(images):
    """And kind and config are part of it."""
    first = await import_bytes(images, tar(), "a")
    again = await import_bytes(images, tar(), "b")
    assert first.layer == again.layer
    others = {
        (await import_bytes(images, tar("y"), "c")).layer.digest,
        (await import_bytes(images, tar(), "d", kind="toolkit")).layer.digest,
        (await import_bytes(images, tar(), "e", config=ImageConfig(user="u"))).layer.digest,
    }
    assert len(others | {first.layer.digest}) == 4


@pytest.mark.parametrize(
    ("reference", "kind", "config"),
    [
        ("Bad Name", "base", None),
        ("name@" + ABSENT, "base", None),
        ("name", "snapshot", None),
        ("name", "nonsense", None),
        ("name", "base", ImageConfig(env={"A=B": "c"})),
        ("name", "base", ImageConfig(workdir="relative")),
        ("name", "base", ImageConfig(user="a/b")),
    ],
)
async def test_malformed_imports_are_refused(images, reference, kind, config):
    """Nothing is tagged then."""
    with pytest.raises(InvalidArgument):
        await import_bytes(images, tar(), reference, kind=kind, config=config)
    assert images.list() == []


async def test_an_empty_tar_is_refused(images):
    """No bytes, no image."""
    with pytest.raises(InvalidArgument, match="empty"):
        await import_bytes(images, b"")


@pytest.mark.parametrize("reference", ["none", "none:1", "none@" + ABSENT, ABSENT])
def test_what_is_not_there_is_unavailable(images, reference):
    """For every call that looks something up."""
    for call in (images.resolve, lambda r: images.tag(r, "t"), lambda r: images.remove(r, in_use=unused)):
        with pytest.raises(ImageUnavailable):
            call(reference)
    with pytest.raises(ImageUnavailable):
        images.layer_path(ABSENT)


@pytest.mark.parametrize("reference", ["", "../etc", "a b", "a:b:c", "a@sha256:00", "A", "x" * 600])
def test_malformed_references_are_refused(images, reference):
    """They never become file names."""
    with pytest.raises(InvalidArgument):
        images.resolve(reference)


async def test_tags_move_and_are_listed_sorted(images):
    """Tag makes and moves."""
    one = (await import_bytes(images, tar("1"), "b:1")).layer
    two = (await import_bytes(images, tar("2"), "a/x:2")).layer
    assert images.tag("b:1", "c").reference == "c:latest"
    images.tag(two.digest, "b:1")
    assert [(image.reference, image.layer.digest) for image in images.list()] == [
        ("a/x:2", two.digest),
        ("b:1", two.digest),
        ("c:latest", one.digest),
    ]
    with pytest.raises(InvalidArgument):
        images.tag("c", "d@" + one.digest)


async def test_the_layer_goes_with_its_last_tag(images):
    """Not before."""
    made = await import_bytes(images, tar(), "a")
    images.tag("a", "b")
    images.remove("a", in_use=lambda digest: True)  # another tag keeps the layer
    assert images.resolve("b").layer == made.layer
    with pytest.raises(Conflict, match="b:latest"):
        images.remove(made.layer.digest, in_use=unused)
    images.remove("b", in_use=unused)
    with pytest.raises(ImageUnavailable):
        images.resolve(made.layer.digest)


async def test_a_layer_in_use_stays_with_its_tag(images):
    """Conflict, and nothing has changed."""
    made = await import_bytes(images, tar(), "a")
    with pytest.raises(Conflict, match="in use"):
        images.remove("a", in_use=lambda digest: digest == made.layer.digest)
    assert images.resolve("a").layer == made.layer


async def test_compose_resolves_and_merges(images):
    """The rules themselves are tested in test_composition."""
    await import_bytes(images, tar(), "b")
    await import_bytes(images, tar(), "w", kind="workspace", config=ImageConfig(workdir="/w"))
    await import_bytes(images, tar(), "t", kind="toolkit", config=ImageConfig(env={"PATH": "/t"}))
    made = images.compose("b", "w", ["t"])
    assert len(made.layers) == 3
    assert made.config.workdir == "/w"
    assert made.config.env["PATH"].startswith("/t:")
    with pytest.raises(InvalidArgument, match="t:latest is a toolkit"):
        images.compose("t", None, [])
    with pytest.raises(ImageUnavailable, match="none"):
        images.compose("b", None, ["none"])


async def test_progress_ends_at_one(images):
    """The last report is the end."""
    seen = []
    await images.import_tar(
        "a", chunks(tar()), kind="base", config=None, report=lambda message, done: seen.append((message, done))
    )
    assert seen[-1][1] == 1.0
    assert all(message for message, _ in seen)


# -- only the real store ------------------------------------------------------------------------------------------


async def test_another_process_sees_changes_at_once(store, tmp_path):
    """A second store over the same folder: tags and removals are never cached away."""
    other = LocalImageStore(tmp_path / "data")
    one = (await import_bytes(store, tar("1"), "a")).layer
    assert other.resolve("a").layer == one
    two = (await import_bytes(store, tar("2"), "a")).layer
    assert other.resolve("a").layer == two
    store.remove("a", in_use=unused)
    for reference in ("a", two.digest):
        with pytest.raises(ImageUnavailable):
            other.resolve(reference)
    assert other.resolve(one.digest).layer == one
    other.close()


async def test_an_unknown_format_is_refused_with_the_reason(store, tmp_path):
    """A layer and a tag of a newer version."""
    made = await import_bytes(store, tar(), "a")
    folder = store.layer_path(made.layer.digest).parent
    raw = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({"format": 7, "surprise": raw}))
    with pytest.raises(ImageUnavailable, match="format 7"):
        store.resolve("a")
    assert store.list() == []
    (tmp_path / "data/images/tags/n:1").write_text("2 something else\n")
    with pytest.raises(ImageUnavailable, match="format '2'"):
        store.resolve("n:1")


@pytest.mark.parametrize("damage", ["manifest", "config", "short", "no image"])
async def test_a_damaged_layer_is_unavailable_and_an_import_repairs_it(store, damage):
    """It is told apart from a missing one, and the same import makes it whole."""
    made = await import_bytes(store, tar(), "a")
    path = store.layer_path(made.layer.digest)
    manifest = path.parent / "manifest.json"
    if damage == "manifest":
        manifest.write_text("{")
    elif damage == "config":
        manifest.write_text(manifest.read_text().replace('"root"', '"evil"'))
    elif damage == "short":
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.truncate(100)
        manifest.touch()
    else:
        path.unlink()
        manifest.touch()
    with pytest.raises(ImageUnavailable):
        store.resolve("a")
    again = await import_bytes(store, tar(), "a")
    assert again.layer.digest == made.layer.digest
    assert path.stat().st_size == made.layer.size


async def test_a_broken_tag_can_be_removed(store, tmp_path):
    """Its layer is gone; rm still works."""
    (tmp_path / "data/images/tags/a:latest").write_text(f"1 {ABSENT}\n")
    with pytest.raises(ImageUnavailable):
        store.resolve("a")
    store.remove("a", in_use=unused)
    assert not (tmp_path / "data/images/tags/a:latest").exists()


async def test_open_sweeps_what_a_crash_left_and_spares_what_is_being_made(store, tmp_path):
    """A stage whose lock is free belongs to a dead process."""
    dead = tmp_path / "data/images/tmp/dead"
    (dead / "root" / "deep").mkdir(parents=True)
    live = store._folder.open_stage()
    other = LocalImageStore(tmp_path / "data")
    other.open()
    assert not dead.exists()
    assert live.path.exists()
    live.close()
    other.close()


async def test_the_folder_is_closed_to_others(store, tmp_path):
    """Layers hold set-user-id programs."""
    assert (tmp_path / "data/images").stat().st_mode & 0o777 == 0o700


async def test_concurrent_imports_and_removals_leave_no_broken_tag(store, tmp_path):
    """Two stores, same content: whatever the order, each tag resolves or is gone."""
    other = LocalImageStore(tmp_path / "data")
    await import_bytes(store, tar(), "seed")
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            with suppress(ImageUnavailable, Conflict):
                other.remove("a", in_use=unused)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(8):
            await import_bytes(store, tar("z"), "a")
    finally:
        stop.set()
        thread.join()
    for image in store.list():
        assert store.layer_path(image.layer.digest).exists()
    assert {image.reference for image in store.list()} >= {"seed:latest"}
    other.close()


async def test_compose_is_fast(store):
    """Resolve is on the path of every create (50 us aimed at; the bound leaves room for a busy machine)."""
    await import_bytes(store, tar(), "b")
    await import_bytes(store, tar(), "w", kind="workspace")
    best = min(_timed(lambda: store.compose("b", "w", [])) for _ in range(300))
    assert best < 0.0005


def _timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


async def test_import_folder_takes_a_folder(store, tmp_path):
    """Nothing else."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("x")
    made = await store.import_folder("a", root, kind="base", config=None, report=quiet)
    assert made.layer.size > 0
    for bad in (tmp_path / "none", root / "file", tmp_path):
        with pytest.raises(InvalidArgument, match="cannot import"):
            await store.import_folder("b", bad, kind="base", config=None, report=quiet)
