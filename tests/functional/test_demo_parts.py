"""The parts of the demo that need no sandbox: mutations and grading."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from opendsec import ExecResult

DEMO = Path(__file__).parents[2] / "examples/demo"
SOURCE = """
def first(items, n):
    if n == 0 or items is None:
        return []
    return items[0 : n + 1]
"""
REPORT = b'<testsuites><testsuite tests="10" failures="2" errors="1"/></testsuites>'
GOOD = b'<testsuites><testsuite tests="10" failures="0" errors="0"/></testsuites>'


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module("mutations")


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module("rollout")


def test_mutations_are_the_same_every_time_and_change_one_expression(mutations: ModuleType, tmp_path: Path) -> None:
    """Each is valid Python and differs in exactly one line; those without a change are the original."""
    (tmp_path / "m.py").write_text(SOURCE)
    chosen = mutations.choose(tmp_path, ["m.py"], 6, unchanged=2, seed=3)
    assert chosen == mutations.choose(tmp_path, ["m.py"], 6, unchanged=2, seed=3)
    for mutation in chosen:
        ast.parse(mutation.source)
        differing = [a for a, b in zip(SOURCE.splitlines(), mutation.source.splitlines(), strict=True) if a != b]
        assert len(differing) == (1 if mutation.line else 0)
    assert sum(mutation.source == SOURCE for mutation in chosen) == 2


@pytest.mark.parametrize(
    ("result", "report", "reward"),
    [
        (ExecResult(id="a", exit_code=0), GOOD, 1.0),
        (ExecResult(id="a", exit_code=1), REPORT, 0.7),
        (ExecResult(id="a", exit_code=1), GOOD, 0.0),
        (ExecResult(id="a", exit_code=0), REPORT, 0.0),
        (ExecResult(id="a", exit_code=2), None, 0.0),
        (ExecResult(id="a", exit_code=152, signal="SIGXCPU"), GOOD, 0.0),
        (ExecResult(id="a", exit_code=0, timed_out=True), GOOD, 0.0),
    ],
)
def test_exit_code_and_report_must_agree_for_a_reward(
    rollout: ModuleType, result: ExecResult, report: bytes | None, reward: float
) -> None:
    """A report that an agent forged does not help if the exit code says otherwise, and the reverse."""
    assert rollout.grade(result, report)[0] == reward
