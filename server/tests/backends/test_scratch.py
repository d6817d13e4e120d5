"""The writable side: subvolumes with limits on an image that is found again, or plain folders."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from opendsec.api.errors import UnsupportedCapability
from opendsec_server.backends.container.scratch import make_scratch
from opendsec_server.linux import btrfs, loop
from opendsec_server.linux.mounts import mountinfo, umount
from opendsec_server.platform.config import ScratchConfig

MIB = 2**20


@pytest.fixture
def image(tmp_path):
    """Where the image will be."""
    return tmp_path / "scratch.btrfs"


@pytest.fixture
def scratch(tmp_path, image):
    """An open scratch on a btrfs image; gone after the test, its device too."""
    made = make_scratch(tmp_path, ScratchConfig(size_bytes=1024 * MIB))
    made.open()
    yield made
    for name in made.names():
        made.remove(name)
    made.tear_down()
    assert loop.devices_of(image) == []
    assert not [mount for mount in mountinfo() if mount.target.startswith(str(tmp_path))]


def write(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for _ in range(size // 65536):
            file.write(b"x" * 65536)
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.root
def test_a_limit_holds_for_one_subvolume_only(scratch):
    """Writing beyond it fails; what is written is counted at once; the neighbour has room."""
    small, free = scratch.create("small", 10), scratch.create("free", None)
    with pytest.raises(OSError) as caught:
        write(small / "file", 20 * MIB)
    assert caught.value.errno == errno.EDQUOT
    assert 9 * MIB <= scratch.used_bytes("small") <= 10 * MIB
    write(free / "file", 20 * MIB)
    assert scratch.used_bytes("free") >= 20 * MIB


@pytest.mark.root
def test_what_is_not_on_the_disk_yet_counts(scratch):
    """A metric must not be as old as the last commit."""
    folder = scratch.create("box", None)
    with (folder / "file").open("wb") as file:
        file.write(b"x" * 5 * MIB)
        file.flush()
        assert scratch.used_bytes("box") >= 5 * MIB


@pytest.mark.root
def test_removing_takes_all_and_is_repeatable(scratch):
    """Files, folders and what an interrupted create left half made."""
    folder = scratch.create("box", 10)
    (folder / "deep/er").mkdir(parents=True)
    (folder / "deep/er/file").write_text("x")
    (scratch.path("half")).mkdir()
    assert scratch.names() == {"box", "half"}
    for _ in range(2):
        scratch.remove("box")
        scratch.remove("half")
    assert scratch.names() == set()


@pytest.mark.root
def test_a_name_is_taken_once(scratch):
    """Two sandboxes never share a folder."""
    scratch.create("box", None)
    with pytest.raises(FileExistsError):
        scratch.create("box", None)


@pytest.mark.root
def test_opening_again_takes_over(scratch, tmp_path, image):
    """With the mount still there, and when only the device is left."""
    scratch.create("box", None)
    again = make_scratch(tmp_path, ScratchConfig(size_bytes=1024 * MIB))
    again.open()
    assert again.names() == {"box"}
    assert len(loop.devices_of(image)) == 1
    held = os.open(scratch.path("box"), os.O_RDONLY)
    umount(tmp_path / "scratch", lazy=True)
    assert again.names() == set()
    again.open()
    assert again.names() == {"box"}
    assert len(loop.devices_of(image)) == 1
    os.close(held)


@pytest.mark.root
def test_a_half_made_image_is_made_anew(tmp_path, image):
    """A crash in the middle of mkfs leaves only a file that nobody trusts."""
    (tmp_path / "scratch.new").write_bytes(b"half")
    scratch = make_scratch(tmp_path, ScratchConfig(size_bytes=1024 * MIB))
    scratch.open()
    assert scratch.has_limits
    scratch.tear_down()
    assert loop.devices_of(image) == []


@pytest.mark.root
def test_devices_below_a_folder_are_found(scratch, tmp_path, image):
    """By the name of their file."""
    assert list(loop.attached_below(tmp_path).values()) == [image]
    assert loop.attached_below(tmp_path / "elsewhere") == {}


@pytest.mark.root
def test_subvolumes_are_told_from_folders(scratch):
    """By their inode number."""
    folder = scratch.create("box", None)
    (folder / "inner").mkdir()
    assert btrfs.is_subvolume(folder)
    assert not btrfs.is_subvolume(folder / "inner")


def test_a_plain_folder_refuses_limits(tmp_path):
    """Nothing degrades quietly."""
    scratch = make_scratch(tmp_path, ScratchConfig(kind="folder"))
    scratch.open()
    with pytest.raises(UnsupportedCapability):
        scratch.create("box", 10)
    assert scratch.names() == set()
    scratch.create("box", None)
    assert scratch.used_bytes("box") is None
    scratch.remove("box")
    scratch.remove("box")
    assert scratch.names() == set()
    scratch.tear_down()


def test_an_unknown_kind_is_refused(tmp_path):
    """With the kinds there are."""
    with pytest.raises(UnsupportedCapability, match="btrfs-image or folder"):
        make_scratch(tmp_path, ScratchConfig(kind="zfs"))
