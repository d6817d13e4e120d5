"""What the package shows to its users."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import opendsec
from opendsec.api import errors, models


def test_all_is_sorted_and_complete():
    """Every public name of the package is in ``__all__``, in order, and there is nothing else in it."""
    modules = {name for _, name, _ in pkgutil.iter_modules(opendsec.__path__)}
    own = {"Any", "TYPE_CHECKING", "import_module"}
    public = {name for name in vars(opendsec) if not name.startswith("_")} - modules - own
    public |= set(opendsec._LAZY)
    assert opendsec.__all__ == sorted(opendsec.__all__)
    assert set(opendsec.__all__) - {"__version__"} == public


def test_every_error_class_is_exported():
    """Whoever imports from ``opendsec`` can catch any error of the platform."""
    tree = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert tree <= set(opendsec.__all__)


def test_modules_beside_the_public_ones_are_private():
    """Only ``api``, ``cli``, ``sync`` and ``testing`` may be imported by name."""
    names = {name for _, name, _ in pkgutil.iter_modules(opendsec.__path__) if not name.startswith("_")}
    assert names == {"api", "cli", "sync", "testing"}


def test_types_are_published():
    """``py.typed`` tells type checkers to read the annotations."""
    assert (Path(opendsec.__path__[0]) / "py.typed").exists()


def test_every_code_has_its_leaf_class():
    """The table of codes and the classes agree."""
    for code, cls in errors.BY_CODE.items():
        assert cls.code == code
        assert type(errors.from_body(cls("x").body())) is cls


@pytest.mark.parametrize("name", ["ExecRequest", "CreateSandbox"])
def test_wire_inputs_refuse_unknown_fields(name):
    """A misspelt field is an error, not silence."""
    assert getattr(models, name).__struct_config__.forbid_unknown_fields


def test_sdk_needs_no_cli_packages():
    """The trainer's import does not pull in typer or rich."""
    for name in ("_client", "sync", "testing"):
        source = inspect.getsource(importlib.import_module(f"opendsec.{name}"))
        assert "typer" not in source
        assert "rich" not in source
