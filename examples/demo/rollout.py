"""One rollout: a sandbox of its own, a change of the source, the project's tests, a reward."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass

from mutations import Mutation
from project import HOME

from opendsec import DSecClient, DSecContainerRunArgs, ExecResult, NotFound

BASE, WORKSPACE = "demo/python:bookworm", "demo/toolz:1.0.0"
#: A change may loop for ever: the CPU limit ends it, however busy the machine is.
TESTS = "ulimit -t 4; exec python3 -m pytest -q -p no:cacheprovider --assert=plain --junitxml=/tmp/report.xml toolz"


@dataclass(frozen=True)
class Outcome:
    """What a rollout gave.

    Attributes:
        reward: share of the tests that passed; 0 if they could not be run to their end.
        verdict: the same in words.
        seconds: wall time of create, tests and all of it.
        cpu_seconds: CPU time of the tests.
        peak_bytes: most memory that the sandbox used.
    """

    mutation: Mutation
    reward: float
    verdict: str
    create_seconds: float
    tests_seconds: float
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def grade(result: ExecResult, report: bytes | None) -> tuple[float, str]:
    """Return reward and verdict from the exit code and pytest's report, which must agree.

    Args:
        result: of the test command.
        report: JUnit XML as downloaded from the sandbox, if there was one.
    """
    if result.signal or result.timed_out:
        return 0.0, f"stopped ({result.signal or 'timeout'})"
    if result.exit_code not in {0, 1} or report is None:
        return 0.0, f"tests did not run (exit {result.exit_code})"
    suite = ET.fromstring(report).find("testsuite")
    if suite is None:
        return 0.0, "no report"
    tests, bad = int(suite.attrib["tests"]), int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    if tests == 0 or (result.exit_code == 0) != (bad == 0):
        return 0.0, "report and exit code disagree"
    return (tests - bad) / tests, f"{tests - bad} of {tests} passed"


async def rollout(client: DSecClient, mutation: Mutation, job: str) -> Outcome:
    """Run one rollout and stop its sandbox.

    Raises:
        PlatformError: the platform failed; such a rollout has no reward.
    """
    begin = time.perf_counter()
    args = DSecContainerRunArgs(
        container_image=BASE,
        workspace=WORKSPACE,
        workdir=HOME,
        memory_limit_mb=512,
        cpu_cores_limit=1,
        pids_limit=64,
        disk_limit_mb=64,
        ttl_hard=300,
        env={"PYTHONDONTWRITEBYTECODE": "1"},
        labels={"change": mutation.file.replace("/", ".")},
        job=job,
    )
    async with await client.run_container(args, timeout=120) as sandbox:
        created = time.perf_counter()
        await sandbox.files.write(f"{HOME}/{mutation.file}", mutation.source.encode())
        result = await sandbox.run_shell(TESTS, timeout=120)
        tested = time.perf_counter()
        try:
            report = await sandbox.files.read("/tmp/report.xml", limit=4 * 1024 * 1024)
        except NotFound:
            report = None
        usage = await sandbox.metrics()
    reward, verdict = grade(result, report)
    return Outcome(
        mutation=mutation,
        reward=reward,
        verdict=verdict,
        create_seconds=created - begin,
        tests_seconds=tested - created,
        seconds=time.perf_counter() - begin,
        cpu_seconds=result.cpu_seconds or 0.0,
        peak_bytes=usage.memory_peak_bytes,
    )
