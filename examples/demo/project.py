"""The project that the agents work on: toolz, as its authors published it on PyPI, with its test suite."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

NAME, VERSION = "toolz", "1.0.0"
SHA256 = "2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02"
#: Files that mutations change.
SOURCES = ["toolz/dicttoolz.py", "toolz/functoolz.py", "toolz/itertoolz.py", "toolz/recipes.py"]
#: Where the project lies in a sandbox.
HOME = "/srv/toolz"


def fetch(cache: Path) -> Path:
    """Download the source distribution, check its hash, and return the unpacked project.

    Args:
        cache: folder that keeps both for the next time.
    """
    project = cache / f"{NAME}-{VERSION}"
    if project.is_dir():
        return project
    cache.mkdir(parents=True, exist_ok=True)
    pins = cache / "project.txt"
    pins.write_text(f"{NAME}=={VERSION} --hash=sha256:{SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--no-binary", ":all:", "--require-hashes", "--requirement", str(pins), "--dest", str(cache)]
    subprocess.run([*pip, *options], check=True)
    part = cache / "part"
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(cache / f"{NAME}-{VERSION}.tar.gz") as archive:
        archive.extractall(part)  # its hash is pinned; "filter" came with Python 3.11.4
    (part / f"{NAME}-{VERSION}").rename(project)
    return project


def layer_tree(project: Path, scratch: Path) -> Path:
    """Return a folder that holds the project where a sandbox shall see it."""
    root = scratch / "workspace"
    shutil.copytree(project, root / HOME.lstrip("/"))
    return root
