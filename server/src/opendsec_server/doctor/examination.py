"""All probes, one after the other."""

from __future__ import annotations

import msgspec

from opendsec_server.doctor import filesystems, kernel, limits, programs, runtimes
from opendsec_server.doctor.finding import Finding, Probe
from opendsec_server.platform.config import Config

PROBES: tuple[Probe, ...] = (kernel.probe, runtimes.probe, filesystems.probe, programs.probe, limits.probe)


class Examination(msgspec.Struct, kw_only=True, frozen=True):
    """What ``doctor`` prints with ``--json``."""

    #: The default setup can run.
    ready: bool
    findings: list[Finding]


def examine(config: Config) -> Examination:
    """Probe the host; takes a few seconds and leaves nothing behind."""
    findings = [finding for probe in PROBES for finding in probe(config)]
    return Examination(ready=not any(finding.blocks for finding in findings), findings=findings)
