"""Entry point of the ``opendsec`` command; kept apart so that a missing extra gives a sentence, not a traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code (see ``docs/reference/cli.md``)."""
    try:
        from opendsec.cli._app import run  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"typer", "rich", "click"}:
            raise
        print("opendsec: the command line needs its extra: pip install 'opendsec[cli]'", file=sys.stderr)
        sys.exit(1)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
