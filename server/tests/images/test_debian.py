"""Debian builds: names, the host's sources, errors, and one real build."""

from __future__ import annotations

import shutil

import pytest

from opendsec.api.errors import DiskFull, InvalidArgument, Unavailable, UnsupportedCapability
from opendsec.api.models import DebianSource
from opendsec_server.images.debian import _build_error, _strip_passwords, apt_sources, check_source
from opendsec_server.images.steps import StepFailed
from opendsec_server.testing.tars import mounted_layer, mounts_below, quiet


@pytest.mark.parametrize("suite", ["", "-rf", "Book worm", "a/b", "../x", "bookworm;id", "x" * 80, "bookworm\n", "-"])
def test_suites_that_cannot_be_are_refused(suite):
    """They never reach a command line."""
    with pytest.raises(InvalidArgument, match="not a Debian suite"):
        check_source(DebianSource(suite=suite))


@pytest.mark.parametrize(
    "package", ["", "--force", "git-", "a b", "a,b", "?essential", "~n.*", "./local.deb", "/etc/passwd", "$(id)", "A"]
)
def test_packages_that_cannot_be_are_refused(package):
    """Options, patterns, files, removals."""
    with pytest.raises(InvalidArgument, match="not a Debian package"):
        check_source(DebianSource(packages=["git", package]))


def test_ordinary_packages_pass():
    """Also with architecture and version."""
    check_source(DebianSource(packages=["g++", "libstdc++6", "python3.11", "git:amd64", "git=1:2.39.5-0+deb12u2"]))


def etc(tmp_path, **files):
    (tmp_path / "apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "os-release").write_text("ID=debian\nVERSION_CODENAME=bookworm\n")
    for name, text in files.items():
        path = "apt/sources.list" if name == "list" else f"apt/sources.list.d/{name.replace('_', '.')}"
        (tmp_path / path).write_text(text)
    return tmp_path


def test_only_the_entries_of_the_suite_are_taken(tmp_path):
    """Other vendors' sources stay out."""
    made = apt_sources(
        "bookworm",
        etc(
            tmp_path,
            debian_sources=(
                "# comment\nTypes: deb deb-src\nURIs: http://mirror.test/debian\nSuites: bookworm bookworm-updates "
                "bookworm-backports\nComponents: main contrib\nSigned-By:\n -----BEGIN\n .\n key\n\n"
                "Types: deb\nURIs: http://mirror.test/off\nSuites: bookworm\nComponents: main\nEnabled: no\n"
            ),
            other_sources="Types: deb\nURIs: http://vendor.test\nSuites: bookworm\nComponents: stable\n",
            more_list="deb http://vendor.test nodistro main\ndeb-src http://mirror.test/src bookworm main\n",
        ),
    )
    assert made == (
        "Types: deb\nURIs: http://mirror.test/debian\nSuites: bookworm bookworm-updates\n"
        "Components: main contrib\nSigned-By: \n -----BEGIN\n .\n key\n"
    )


def test_the_old_format_is_read_too(tmp_path):
    """With its options."""
    made = apt_sources(
        "bookworm",
        etc(tmp_path, list="# x\ndeb [arch=amd64 signed-by=/k.gpg] http://mirror.test/d bookworm main non-free # y\n"),
    )
    assert made == (
        "Types: deb\nURIs: http://mirror.test/d\nSuites: bookworm\nComponents: main non-free\nSigned-By: /k.gpg\n"
    )


def test_another_suite_comes_from_the_mirror_of_the_hosts_own(tmp_path):
    """The suite is exchanged, its updates with it."""
    made = apt_sources(
        "trixie", etc(tmp_path, list="deb http://m.test/d bookworm main\ndeb http://m.test/s bookworm-security main\n")
    )
    assert "Suites: trixie\n" in made
    assert "Suites: trixie-security\n" in made


def test_a_host_without_debian_sources_is_unsupported(tmp_path):
    """Said plainly."""
    with pytest.raises(UnsupportedCapability, match="no suite bookworm"):
        apt_sources("bookworm", etc(tmp_path))


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("E: Unable to locate package nonsense", InvalidArgument, "no package nonsense"),
        ("E: The repository 'x' does not have a Release file.", InvalidArgument, "no suite bookworm"),
        ("E: Version '9' for 'git' was not found", InvalidArgument, "version"),
        ("tar: write error: No space left on device", DiskFull, "disk is full"),
        ("E: Failed to fetch x", Unavailable, "Failed to fetch x"),
        ("something", Unavailable, "status 2"),
    ],
)
def test_failures_are_told_apart_and_carry_the_log(line, kind, words):
    """What the caller can mend is InvalidArgument."""
    error = _build_error(StepFailed("mmdebstrap", 2, [line, "E: mmdebstrap failed to run"]), DebianSource())
    assert type(error) is kind
    assert words in error.message
    assert error.detail["step"] == "mmdebstrap"
    assert line in error.detail["log"]


def test_passwords_of_mirrors_do_not_stay_in_the_image(tmp_path):
    """Sandboxes may read the sources."""
    root = etc(tmp_path, list="deb http://user:secret@mirror.test/d bookworm main\n")
    _strip_passwords(root / "apt")
    assert (root / "apt/sources.list").read_text() == "deb http://mirror.test/d bookworm main\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_package_that_does_not_exist_fails_early_and_leaves_nothing(store, tmp_path):
    """The error names it; no process, mount or file stays."""
    if shutil.which("mmdebstrap") is None:
        pytest.fail("mmdebstrap is not installed")
    source = DebianSource(packages=["no-such-package-anywhere"])
    with pytest.raises(InvalidArgument, match="no-such-package-anywhere") as caught:
        await store.import_debian("a", source, kind="base", config=None, report=quiet)
    assert caught.value.detail["log"]
    assert mounts_below(tmp_path) == []
    assert store.list() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_real_build(store, tmp_path):
    """The smallest Debian: it runs, and holds neither residue nor names of this host."""
    seen: list[tuple[str, float | None]] = []
    made = await store.import_debian(
        "debian:12", DebianSource(variant="minbase"), kind="base", config=None, report=lambda *step: seen.append(step)
    )
    assert made.layer.architecture is not None
    assert made.layer.config.user == "root"
    fractions = [done for _, done in seen if done is not None]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert mounts_below(tmp_path) == []
    with mounted_layer(store.layer_path(made.layer.digest), tmp_path / "mnt") as root:
        assert (root / "bin/sh").exists()
        assert (root / "etc/hostname").read_text() == "localhost\n"
        assert (root / "etc/resolv.conf").read_text() == ""
        for empty in ("var/lib/apt/lists", "var/log", "tmp", "run", "usr/share/man"):
            assert not (root / empty).exists() or list((root / empty).iterdir()) == []
        newest = max(path.lstat().st_mtime for path in (root / "etc").iterdir())
        assert newest < made.layer.created_at - 3600  # nothing has the time of the build
