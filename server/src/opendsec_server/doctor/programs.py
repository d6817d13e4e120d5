"""Our own programs that go into every sandbox."""

from __future__ import annotations

from opendsec.api.errors import PlatformError
from opendsec_server import tools
from opendsec_server.doctor.finding import Finding, ProbeFailed, State, run
from opendsec_server.platform.config import Config

_PURPOSE = "chronus and the static shells, mounted into every sandbox"


def probe(config: Config) -> list[Finding]:
    """Find chronus and the shells and start the shells."""
    try:
        folder = tools.locate(config)
        answers = [run([str(folder / name), "-c", "echo $((6 * 7))"]) for name in ("sh", "bash")]
    except (PlatformError, ProbeFailed) as error:
        detail = error.message if isinstance(error, PlatformError) else str(error)
        return [_tools("missing", detail, "make build/tools/chronus build/tools/sh build/tools/bash")]
    if answers != ["42\n", "42\n"]:
        return [_tools("missing", f"a program in {folder} is no shell", "remove build/tools, then make")]
    if b"BusyBox" in (folder / "sh").read_bytes():
        detail = f"{folder}; sh is busybox, which starts 0.5 ms slower than dash"
        return [
            _tools("degraded", detail, "make the source package of dash reachable, remove build/tools/sh, then make")
        ]
    return [_tools("ok", str(folder), "")]


def _tools(state: State, detail: str, remedy: str) -> Finding:
    return Finding(name="tools", state=state, purpose=_PURPOSE, detail=detail, remedy=remedy, required=True)
