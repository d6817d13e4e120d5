"""Checks of a create that types cannot express."""

from __future__ import annotations

import pytest

from opendsec.api.errors import InvalidArgument, UnsupportedCapability
from opendsec.api.models import CreateSandbox
from opendsec_server.core.validate import check_create


def request(**fields) -> CreateSandbox:
    return CreateSandbox(**{"container_image": "debian:12", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"network_rules": {"npm": False}},
        {"labels": {"a": "b=c"}, "job": "j1", "workdir": "/srv", "init_user": "root:0", "env": {"A": ""}},
        {"workspace": "w:1", "toolkits": ["t:1", "t@blake3:" + "0" * 64]},
    ],
)
def test_good_requests_pass(fields):
    """What is allowed is not refused."""
    check_create(request(**fields))


def test_a_rule_that_opens_something_is_unsupported():
    """Nothing degrades quietly: without a gateway, nothing can be opened."""
    with pytest.raises(UnsupportedCapability):
        check_create(request(network_rules={"npm": False, "pypi": True}))


@pytest.mark.parametrize(
    "fields",
    [
        {"container_image": "../etc"},
        {"workspace": ""},
        {"toolkits": ["UPPER"]},
        {"toolkits": ["t:1"] * 33},
        {"labels": {"a=b": "c"}},
        {"labels": {"": "c"}},
        {"labels": {"a": "x" * 2000}},
        {"labels": {str(n): "" for n in range(65)}},
        {"env": {"A=B": ""}},
        {"env": {"A": "\0"}},
        {"env": {"A": "x" * 2**21}},
        {"job": "a/b"},
        {"workdir": "relative"},
        {"init_user": ""},
        {"init_user": "a\nb"},
        {"request_id": "a\nb"},
    ],
)
def test_malformed_fields_are_refused(fields):
    """Each malformed field is an invalid argument."""
    with pytest.raises(InvalidArgument):
        check_create(request(**fields))
