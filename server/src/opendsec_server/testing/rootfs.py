"""A tiny image for functional tests and benchmarks: static busybox, a few accounts, nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

BUSYBOX = Path("/bin/busybox")
ACCOUNTS = """root:x:0:0:root:/root:/bin/sh
agent:x:1000:1000:agent:/home/agent:/bin/sh
"""
GROUPS = """root:x:0:
agent:x:1000:
tools:x:2000:agent
"""


def make_rootfs(folder: Path) -> Path:
    """Fill ``folder`` with a root file system and return it."""
    for name in ("bin", "etc", "tmp", "root", "home/agent", "proc", "sys", "dev", "var", "usr"):
        (folder / name).mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    shutil.copy(BUSYBOX, folder / "bin/busybox")
    applets = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in applets:
        if applet != "busybox":
            (folder / "bin" / applet).symlink_to("busybox")
    (folder / "etc/passwd").write_text(ACCOUNTS)
    (folder / "etc/group").write_text(GROUPS)
    shutil.chown(folder / "home/agent", 1000, 1000)
    return folder
