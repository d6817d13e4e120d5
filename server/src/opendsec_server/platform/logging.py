"""Structured logs: one JSON object a line on standard error."""

from __future__ import annotations

import logging
import sys

import msgspec
import structlog


def configure(level: str, program: str) -> None:
    """Set up logging for a program; call once, from its ``main``."""
    number = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(
                serializer=lambda event, **_: msgspec.json.encode({"program": program, **event}, enc_hook=repr).decode()
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
