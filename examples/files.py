"""Files: write, read, list, and whole trees up and down. This one uses the SDK without ``await``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from opendsec import DSecContainerRunArgs
from opendsec.sync import DSecClient


def main(local: Path) -> None:
    """Send a small project, run it, fetch what it made."""
    (local / "project" / "src").mkdir(parents=True)
    (local / "project" / "run.sh").write_text("mkdir -p out; wc -c src/* > out/sizes; cp -r src out/\n")
    (local / "project" / "src" / "hello.txt").write_text("hello\n")
    args = DSecContainerRunArgs(container_image="python:3.11", disk_limit_mb=64)
    with DSecClient() as client, client.run_container(args) as sandbox:
        sandbox.upload(local / "project", "/work")
        sandbox.run_shell("sh run.sh", cwd="/work", check=True)

        print(sandbox.files.read_text("/work/out/sizes"), end="")
        for info in sandbox.files.list("/work/out", recursive=True):
            print(f"{info.mode:04o} {info.size:6} {info.path}")

        sandbox.files.write(b"/work/any \xff name", b"bytes are fine, in names and content: \x00\xff")
        done = sandbox.download("/work", local / "back")
        print(f"{done.files} files, {done.bytes} bytes came back")


with tempfile.TemporaryDirectory() as folder:
    main(Path(folder))
