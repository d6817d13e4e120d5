"""What this host can do, found out by doing it, and what of ours is left on it without an owner."""

from opendsec_server.doctor.command import register
from opendsec_server.doctor.examination import Examination, examine

__all__ = ["Examination", "examine", "register"]
