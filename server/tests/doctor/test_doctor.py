"""What this host can do, found out by doing it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from opendsec.api.models import LeakReport
from opendsec_server import tools
from opendsec_server.doctor import command, examination, examine, filesystems, kernel, limits, register, runtimes
from opendsec_server.doctor.finding import Finding, ProbeFailed, run
from opendsec_server.platform.config import Config


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)  # a single command would have no name
    return app


def host_state() -> tuple[int, list[str], list[str]]:
    """What a probe might leave: mounts, loop devices, cgroups and folders."""
    return (
        len(Path("/proc/self/mountinfo").read_text().splitlines()),
        sorted(str(path) for path in Path("/sys/block").glob("loop*/loop/backing_file")),
        sorted(str(path) for path in Path("/sys/fs/cgroup").glob("*/opendsec-doctor*")),
    )


@pytest.mark.root
@pytest.mark.slow
def test_probes_leave_nothing_behind() -> None:
    """Mounts, loop devices and cgroups are as before."""
    before = host_state()
    examine(Config())
    assert host_state() == before


@pytest.mark.root
@pytest.mark.slow
def test_this_kind_of_machine_can_run_the_default_setup() -> None:
    """Kernel, file systems and runc are all found; each finding that is not well says what to do."""
    findings = {f.name: f for probe in (kernel.probe, filesystems.probe, runtimes.probe) for f in probe(Config())}
    assert [f.name for f in findings.values() if f.required and f.state != "ok"] == []
    assert [f.name for f in findings.values() if f.state == "missing" and not f.remedy] == []
    assert "simple quotas" in findings["btrfs"].detail
    assert "started a container" in findings["runc"].detail


def test_limits_that_are_too_low_name_the_command_that_raises_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A degraded limit shows both figures and the sysctl."""
    monkeypatch.setattr(limits, "_SYSCTLS", (("kernel.pid_max", 2**40, "processes"),))
    finding = limits.probe(Config())[0]
    assert finding.state == "degraded"
    assert finding.remedy == f"sysctl -w kernel.pid_max={2**40}"


def test_a_runtime_that_starts_no_container_is_missing_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime such as crun on hybrid cgroups reports a version and then refuses to run."""
    fake = tmp_path / "crun"
    fake.write_text("#!/bin/sh\n[ $1 = --version ] && echo crun 1.8 && exit\necho cgroups in hybrid mode >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    finding = next(finding for finding in runtimes.probe(Config()) if finding.name == "crun")
    assert finding.state == "missing"
    assert finding.detail == "crun 1.8; starts no container: cgroups in hybrid mode"
    assert not finding.blocks


def test_the_required_runtime_is_the_configured_one() -> None:
    """A host without the default runtime cannot run the default setup."""
    config = Config(edge=Config().edge.__class__(default_runtime="runsc"))
    assert {finding.name for finding in runtimes.probe(config) if finding.required} == {"runsc"}


def test_a_program_that_hangs_is_given_up() -> None:
    """No probe takes longer than its bound."""
    with pytest.raises(ProbeFailed, match=r"did not end within 0\.1 s"):
        run(["sleep", "60"], seconds=0.1)


def test_busybox_as_shell_is_degraded_not_missing(tmp_path: Path) -> None:
    """It works, but every command starts later; that must be visible."""
    for name in tools.NAMES:
        path = tmp_path / name
        path.write_text("#!/bin/sh\n# BusyBox\necho 42\n")
        path.chmod(0o755)
    finding = examination.programs.probe(Config(tools_dir=str(tmp_path)))[0]
    assert finding.state == "degraded"
    assert "busybox" in finding.detail


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("degraded", 0), ("missing", 1)])
def test_the_exit_code_tells_whether_the_default_setup_can_run(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    """Only a missing thing that is required counts."""
    found = [
        Finding(name="needed", state=state, purpose="p", required=True),  # type: ignore[arg-type]
        Finding(name="optional", state="missing", purpose="p"),
    ]
    monkeypatch.setattr(examination, "PROBES", (lambda _config: found,))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout)["ready"] == (code == 0)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == code


@pytest.mark.parametrize("count", [0, 2])
def test_leaks_are_counted_by_kind_with_zeros(app: typer.Typer, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Scripts find every kind in the JSON, and the exit code tells whether anything is left."""
    report = LeakReport(mounts=count, items={"mounts": ["/x"] * count} if count else {})
    monkeypatch.setattr(command.leaks, "report", lambda _config: report)
    result = CliRunner().invoke(app, ["doctor", "--leaks", "--json"])
    assert result.exit_code == (1 if count else 0)
    answer = json.loads(result.stdout)
    assert answer["mounts"] == count
    assert set(command.leak_counts(LeakReport())) <= set(answer)


def test_a_broken_configuration_is_said_in_one_line(app: typer.Typer, tmp_path: Path) -> None:
    """No traceback; exit code 2."""
    broken = tmp_path / "c.toml"
    broken.write_text("nonsense = 1\n")
    result = CliRunner().invoke(app, ["doctor", "--config", str(broken)])
    assert result.exit_code == 2
