"""Build a Debian root with mmdebstrap from the host's own package sources.

No mirror is known here: the entries of ``/etc/apt`` that offer the wanted suite are used, and if there are none, the
entries of the host's own release with the suite exchanged. The same packages give the same layer: what the build
itself writes gets the time of the newest packaged file, and logs, caches and host names are dropped.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from opendsec.api.errors import InvalidArgument, PlatformError, Unavailable, UnsupportedCapability
from opendsec.api.models import DebianSource
from opendsec_server.images.interface import ProgressReport
from opendsec_server.images.steps import StepFailed, require_tool, run_step
from opendsec_server.storage.local import disk_full_mapped, remove_tree

T = TypeVar("T")
_SUITE = re.compile(r"[a-z][a-z0-9.-]{0,62}[a-z0-9]")
#: Name, architecture, version or release; a last "-" would ask apt to remove the package.
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]{0,126}[a-z0-9+](:[a-z0-9-]{1,30})?(=[A-Za-z0-9.+~:-]{1,100})?")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: For programs that write dates into files: 2020-01-01.
_SOURCE_DATE_EPOCH = "1577836800"
#: How far the build is when mmdebstrap says so.
_MILESTONES = (
    ("running apt-get update", 0.02),
    ("downloading", 0.08),
    ("extracting", 0.2),
    ("installing essential", 0.25),
    ("installing remaining", 0.35),
    ("cleaning", 0.55),
)
#: Left out of every package; the rule stays in the image, so it holds for later installations too.
_EXCLUDED = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/groff/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
)
#: Removed after the build: logs, caches, backups, and the host's settings for the build.
_RESIDUE = (
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/group-",
    "etc/gshadow-",
    "etc/passwd-",
    "etc/shadow-",
    "etc/subgid-",
    "etc/subuid-",
    "var/cache/apt/*",
    "var/cache/debconf/*-old",
    "var/cache/ldconfig/aux-cache",
    "var/lib/apt/lists/*",
    "var/lib/dpkg/*-old",
    "var/lib/systemd/catalog/database",
    "var/log/*",
    "run/*",
    "tmp/*",
)
#: Files of the host that mmdebstrap copies, as they shall be instead.
_NEUTRAL = {
    "etc/hostname": "localhost\n",
    "etc/hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n",
    "etc/resolv.conf": "",
}
#: Settings of the host's apt that a build needs to reach the same mirrors.
_APT_OPTION = re.compile(
    r'(Acquire::(?:https?::(?:Proxy|CAInfo|Verify-\w+)(?:::[\w.-]+)?|Check-Valid-Until|Check-Date) "[^"]+");'
)


def check_source(source: DebianSource) -> None:
    """Check suite and package names.

    Raises:
        InvalidArgument: one cannot be a Debian name; the message has it.
    """
    if _SUITE.fullmatch(source.suite) is None:
        raise InvalidArgument(f"{source.suite[:80]!r} is not a Debian suite", field="debian.suite")
    for package in source.packages:
        if _PACKAGE.fullmatch(package) is None:
            raise InvalidArgument(f"{package[:80]!r} is not a Debian package", field="debian.packages")


async def build_debian(
    stage: Path,
    source: DebianSource,
    *,
    env: Mapping[str, str],
    report: ProgressReport,
    thread: Callable[[Callable[[], object]], Awaitable[object]],
) -> Path:
    """Build a root folder below ``stage`` and return it.

    Args:
        stage: an empty folder; its owner removes it, whatever happens.
        source: suite, packages and variant.
        env: further environment of the build (proxies).
        report: told each step.
        thread: runs blocking work.

    Raises:
        InvalidArgument: malformed names, or a suite or package that the mirrors do not have.
        UnsupportedCapability: mmdebstrap is missing, or the host has no Debian sources.
        Unavailable: the build failed for another reason; ``detail`` has the step and the last lines.
        DiskFull: the disk is full.
    """
    check_source(source)
    require_tool("mmdebstrap", "mmdebstrap")
    began = time.time_ns()
    sources = stage / "host.sources"  # the ending tells the format
    sources.write_text(apt_sources(source.suite))
    root = stage / "root"
    options = await _apt_options()
    command = [
        "mmdebstrap",
        "--mode=root",
        "--format=directory",
        f"--variant={source.variant}",
        *(f"--aptopt={option}" for option in options),
        *(f"--dpkgopt={rule}" for rule in _EXCLUDED),
    ]
    if source.packages:
        command.append(f"--include={','.join(sorted(set(source.packages)))}")
    command += ["--", source.suite, str(root), str(sources)]

    fraction = 0.0

    def tell(line: str) -> None:
        nonlocal fraction
        if line.startswith("I: "):
            fraction = next((done for start, done in _MILESTONES if line.startswith(start, 3)), fraction)
            report(line[3:], fraction)

    environment = {**env, "PATH": _PATH, "LC_ALL": "C.UTF-8", "SOURCE_DATE_EPOCH": _SOURCE_DATE_EPOCH}
    report(f"building Debian {source.suite} with mmdebstrap", 0.0)
    try:
        await run_step("mmdebstrap", command, env=environment, on_line=tell, isolated=True)
    except StepFailed as error:
        raise _build_error(error, source) from error
    report("removing logs and caches", 0.57)

    def clean() -> None:
        with disk_full_mapped(stage):
            _clean(root, began)

    await thread(clean)
    return root


async def _apt_options() -> list[str]:
    lines: list[str] = []
    try:
        await run_step(
            "read the host's apt settings", ["apt-config", "dump"], env={"PATH": _PATH}, on_line=lines.append
        )
    except StepFailed as error:
        raise error.as_error(Unavailable, "apt-config failed") from error
    return [match[1] for match in map(_APT_OPTION.fullmatch, lines) if match]


def _build_error(error: StepFailed, source: DebianSource) -> PlatformError:
    text = "\n".join(error.log)
    missing = re.search(r"Unable to locate package (\S+)|Package '?(\S+?)'? has no installation candidate", text)
    if missing:
        return error.as_error(InvalidArgument, f"suite {source.suite} has no package {missing[1] or missing[2]}")
    if "was not found" in text and "Version" in text:
        return error.as_error(InvalidArgument, "a package does not exist in the version asked for")
    if "does not have a Release file" in text:
        return error.as_error(InvalidArgument, f"the host's mirrors have no suite {source.suite}")
    generic = "mmdebstrap failed to run"
    causes = [line[3:] for line in error.log if line.startswith("E: ") and line[3:] != generic]
    cause = causes[0] if causes else f"it ended with status {error.status}"
    return error.as_error(Unavailable, cause)


# -- the host's package sources -----------------------------------------------------------------------------------


def apt_sources(suite: str, etc: Path = Path("/etc")) -> str:
    """Return apt source entries for a suite, in the deb822 format, from the host's own.

    Raises:
        UnsupportedCapability: the host has no entry for the suite, nor one for its own release.
    """
    stanzas = _stanzas(etc / "apt")
    release = re.search(r"^VERSION_CODENAME=\"?([a-z]+)", _read(etc / "os-release"), re.MULTILINE)
    for wanted in dict.fromkeys([suite, *([release[1]] if release else [])]):
        chosen = [entry for stanza in stanzas if (entry := _for_suite(stanza, wanted, suite)) is not None]
        if chosen:
            return "\n".join(chosen)
    raise UnsupportedCapability(f"the host's apt sources offer no suite {suite} and none to derive it from")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _stanzas(apt: Path) -> list[dict[str, str]]:
    """Read all enabled ``deb`` entries of the host, old one-line format and deb822 alike."""
    found: list[dict[str, str]] = []
    for path in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list"))]:
        for line in _read(path).splitlines():
            match = re.fullmatch(r"deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)((?:\s+[^#\s]\S*)*)\s*(?:#.*)?", line.strip())
            if match:
                stanza = {"uris": match[2], "suites": match[3], "components": match[4].strip()}
                for option in (match[1] or "").split():
                    name, _, value = option.partition("=")
                    stanza[name.lower()] = value.replace(",", " ")
                found.append(stanza)
    for path in sorted((apt / "sources.list.d").glob("*.sources")):
        for block in re.split(r"\n\s*\n", _read(path)):
            lines = [line for line in block.splitlines() if not line.startswith("#")]
            fields: dict[str, str] = {}
            name = ""
            for line in lines:
                if line[:1].isspace() and name:
                    fields[name] += "\n" + line
                elif ":" in line:
                    name, _, value = line.partition(":")
                    name = name.strip().lower()
                    fields[name] = value.strip()
            if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes") != "no":
                found.append(fields)
    return found


def _for_suite(stanza: Mapping[str, str], wanted: str, suite: str) -> str | None:
    """Return the entry reduced to ``wanted`` and its updates, renamed to ``suite``; None if it has neither."""
    offered = {wanted, f"{wanted}-updates", f"{wanted}-security", f"{wanted}/updates"}
    suites = [name for name in stanza.get("suites", "").split() if name in offered]
    components = stanza.get("components", "").split()
    if not suites or "main" not in components:
        return None
    fields = {
        "Types": "deb",
        "URIs": stanza["uris"],
        "Suites": " ".join(suite + name.removeprefix(wanted) for name in suites),
        "Components": " ".join(components),
    }
    for name in ("Signed-By", "Trusted"):
        if name.lower() in stanza:
            fields[name] = stanza[name.lower()]
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


# -- after the build ----------------------------------------------------------------------------------------------


def _clean(root: Path, began: int) -> None:
    for pattern in _RESIDUE:
        for path in root.glob(pattern):
            remove_tree(path)
    for name, content in _NEUTRAL.items():
        path = root / name
        if path.parent.is_dir() and not path.parent.is_symlink():
            path.unlink(missing_ok=True)
            path.write_text(content)
    _strip_passwords(root / "etc" / "apt")
    _settle_times(os.fsencode(root), began)


def _strip_passwords(apt: Path) -> None:
    """Remove user and password from the addresses of package sources; sandboxes may read them."""
    for path in [apt / "sources.list", *(apt / "sources.list.d").glob("*")]:
        if path.is_file() and not path.is_symlink():
            text = path.read_text()
            clean = re.sub(r"(\w+://)[^/\s@]*@", r"\1", text)
            if clean != text:
                path.write_text(clean)


def _settle_times(root: bytes, began: int) -> None:
    """Give what the build wrote (times after ``began``) the time of the newest file that came in a package."""
    written: list[bytes] = [root]
    newest = 0
    todo = [root]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    todo.append(entry.path)
                if info.st_mtime_ns >= began - 1_000_000_000:
                    written.append(entry.path)
                else:
                    newest = max(newest, info.st_mtime_ns)
    for path in written:
        os.utime(path, ns=(newest, newest), follow_symlinks=False)
