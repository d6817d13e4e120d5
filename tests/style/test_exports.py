"""The public door of the SDK is complete and the only one."""

from __future__ import annotations

import importlib
import inspect

import pytest

import opendsec

DOORS = ("opendsec", "opendsec.sync", "opendsec.testing")


@pytest.mark.parametrize("door", DOORS)
def test_all_is_sorted_and_names_what_is_there(door: str) -> None:
    """Every name in ``__all__`` exists, once, in order."""
    module = importlib.import_module(door)
    exported = list(module.__all__)
    assert exported == sorted(set(exported))
    assert [name for name in exported if not hasattr(module, name)] == []


def test_every_public_name_of_the_package_is_exported() -> None:
    """Whatever is imported into the package without an underscore is promised."""
    public = {
        name
        for name, value in vars(opendsec).items()
        if not name.startswith("_") and not inspect.ismodule(value) and getattr(value, "__module__", "") != "typing"
    }
    assert public - {"import_module", "TYPE_CHECKING"} <= set(opendsec.__all__)


def test_everything_exported_is_documented() -> None:
    """Classes and functions say what they are for."""
    bare = [
        name
        for name in opendsec.__all__
        if (inspect.isclass(value := getattr(opendsec, name)) or inspect.isfunction(value)) and not value.__doc__
    ]
    assert bare == []
