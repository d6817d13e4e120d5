"""Mount calls, namespaces of threads, and the parser of mountinfo."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from pathlib import Path

import pytest

from opendsec.api.errors import ImageUnavailable
from opendsec_server.linux import mounts
from opendsec_server.linux.mounts import MountFlag


def in_thread(function):
    """Run in a fresh thread and return its result or raise its error."""
    box = {}

    def run():
        try:
            box["value"] = function()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in box:
        raise box["error"]
    return box["value"]


@pytest.fixture
def tmpfs(tmp_path):
    """A mounted tmpfs, gone after the test."""
    target = tmp_path / "tmpfs"
    target.mkdir()
    mounts.mount("tmpfs", target, "tmpfs", MountFlag.NODEV, "size=1m")
    yield target
    for mount in reversed(mounts.mountinfo()):
        if mount.target.startswith(str(tmp_path)):
            mounts.umount(os.fsencode(mount.target), lazy=True)


@pytest.fixture
def erofs(tmp_path):
    """An EROFS image with one file."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "hello").write_text("world")
    image = tmp_path / "layer.erofs"
    subprocess.run(["mkfs.erofs", "--quiet", image, root], check=True, capture_output=True)
    return image


def targets() -> set[str]:
    return {mount.target for mount in mounts.mountinfo()}


def test_a_mount_is_listed_with_its_options(tmpfs):
    """What was mounted is found in mountinfo."""
    (found,) = [mount for mount in mounts.mountinfo() if mount.target == str(tmpfs)]
    assert found.fstype == "tmpfs"
    assert "nodev" in found.options
    assert "size=1024k" in found.super_options
    assert not found.read_only


def test_errors_name_source_and_target(tmp_path):
    """A failed mount says which one."""
    with pytest.raises(OSError) as caught:
        mounts.mount("/nowhere", tmp_path, "ext4")
    assert (caught.value.filename, caught.value.filename2) == ("/nowhere", str(tmp_path))


def test_options_longer_than_a_page_are_refused_and_not_cut(tmp_path):
    """The kernel would silently cut them."""
    with pytest.raises(OSError) as caught:
        mounts.mount("overlay", tmp_path, "overlay", MountFlag.NONE, "lowerdir=" + "a" * 4096)
    assert caught.value.errno == errno.E2BIG


def test_a_read_only_bind_refuses_writes_while_the_source_takes_them(tmpfs, tmp_path):
    """Only the bind is read-only."""
    target = tmp_path / "bind"
    target.mkdir()
    mounts.bind(tmpfs, target, read_only=True)
    (tmpfs / "file").write_text("x")
    assert (target / "file").read_text() == "x"
    with pytest.raises(OSError) as caught:
        (target / "file").write_text("y")
    assert caught.value.errno == errno.EROFS


def test_a_mount_moves(tmpfs, tmp_path):
    """After a move it is at the new place only."""
    target = tmp_path / "moved"
    target.mkdir()
    mounts.make_private(tmpfs)

    def run():
        with mounts.private_mounts():
            mounts.move(tmpfs, target)
            return targets()

    seen = in_thread(run)
    assert str(target) in seen
    assert str(tmpfs) not in seen


def test_unmounting_what_is_busy_fails_unless_lazy(tmpfs):
    """EBUSY is told; lazy detaches."""
    with (tmpfs / "open").open("w"):
        with pytest.raises(OSError) as caught:
            mounts.umount(tmpfs)
        assert caught.value.errno == errno.EBUSY
        mounts.umount(tmpfs, lazy=True)
    assert str(tmpfs) not in targets()


def test_unmounting_nothing_is_einval(tmp_path):
    """Not a mount point."""
    with pytest.raises(OSError) as caught:
        mounts.umount(tmp_path)
    assert caught.value.errno == errno.EINVAL


def test_mounts_of_a_thread_of_its_own_stay_unseen_by_others(tmp_path):
    """private_mounts: neither other threads nor the thread itself afterwards see them."""

    def run():
        before = targets()
        with mounts.private_mounts():
            mounts.mount("tmpfs", tmp_path, "tmpfs")
            inside = targets()
        return before, inside, targets()

    before, inside, after = in_thread(run)
    assert str(tmp_path) in inside
    assert str(tmp_path) not in before | after | targets()
    assert before == after


def test_a_process_started_inside_keeps_the_namespace(tmp_path):
    """A child started in private_mounts sees the mount after its parent thread went home."""

    def run():
        with mounts.private_mounts():
            mounts.mount("tmpfs", tmp_path, "tmpfs")
            (tmp_path / "inside").write_text("x")
            return subprocess.Popen(["cat"], stdin=subprocess.PIPE)

    child = in_thread(run)
    try:
        assert str(tmp_path) in {mount.target for mount in mounts.mountinfo(child.pid)}
        assert not (tmp_path / "inside").exists()
    finally:
        child.communicate()


def test_the_thread_comes_home_after_an_error():
    """An exception in the body does not strand the thread."""

    def run():
        home = Path("/proc/thread-self/ns/mnt").readlink()
        with pytest.raises(ValueError, match="stop"), mounts.private_mounts():  # noqa: PT012
            assert Path("/proc/thread-self/ns/mnt").readlink() != home
            raise ValueError("stop")
        return home == Path("/proc/thread-self/ns/mnt").readlink()

    assert in_thread(run)


def test_an_erofs_file_mounts_without_a_loop_device(erofs, tmp_path):
    """The mount is read-only and its source is the file."""
    target = tmp_path / "mnt"
    target.mkdir()
    mounts.mount_erofs(erofs, target)
    try:
        assert (target / "hello").read_text() == "world"
        (found,) = [mount for mount in mounts.mountinfo() if mount.target == str(target)]
        assert (found.fstype, found.source, found.read_only) == ("erofs", str(erofs), True)
        assert "nosuid" not in found.options
    finally:
        mounts.umount(target)


@pytest.mark.parametrize("content", [b"", b"\0" * 8192, b"x" * 100])
def test_a_damaged_image_is_unavailable(content, tmp_path):
    """What is no EROFS image is told as such."""
    image = tmp_path / "image"
    image.write_bytes(content)
    with pytest.raises(ImageUnavailable, match="damaged"):
        mounts.mount_erofs(image, tmp_path)


def test_a_missing_image_is_unavailable(tmp_path):
    """No file, no layer."""
    with pytest.raises(ImageUnavailable, match="missing"):
        mounts.mount_erofs(tmp_path / "none", tmp_path)


def test_mountinfo_decodes_odd_names():
    """Spaces, newlines, backslashes, carriage returns and bytes that are no UTF-8 come back as they were."""
    line = (
        rb"36 35 98:0 /mnt1\040a /mnt2\012\134"
        b"\r\xff"
        rb" rw,noatime master:1 shared:2 - ext3 /dev/r\040t rw,errors=continue"
    )
    (mount,) = mounts.parse_mountinfo(line + b"\n")
    assert mount.root == "/mnt1 a"
    assert os.fsencode(mount.target) == b"/mnt2\n\\\r\xff"
    assert mount.source == "/dev/r t"
    assert mount.propagation == ("master:1", "shared:2")
    assert mount.super_options == ("rw", "errors=continue")


def test_odd_mount_points_work_with_the_real_kernel(tmpfs):
    """A mount at a name with blanks and non-UTF-8 bytes is listed under exactly that name."""
    name = os.fsencode(tmpfs) + b"/a b\n\xff"
    Path(os.fsdecode(name)).mkdir()
    mounts.mount("tmpfs", name, "tmpfs")
    assert os.fsdecode(name) in targets()
    mounts.umount(name)


def test_lines_that_make_no_sense_are_left_out():
    """A short or foreign line is no reason to fail."""
    assert mounts.parse_mountinfo(b"\nnonsense\n1 2 3 - a\n") == []


def test_there_is_a_mount_at_the_root():
    """The simplest fact of every namespace."""
    assert any(mount.target == "/" for mount in mounts.mountinfo())
    assert Path("/proc/self/mountinfo").exists()
