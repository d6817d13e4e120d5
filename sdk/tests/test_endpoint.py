"""Where the platform is, and how patient a client is."""

from __future__ import annotations

import pytest

from opendsec import CapacityUnavailable, Conflict, DSecClient, InvalidArgument, Unauthenticated, Unavailable
from opendsec._endpoint import find_endpoint
from opendsec._retry import backoff, may_repeat
from opendsec._transport import error_of
from opendsec.api.errors import ErrorBody, Internal, NotFound, OutcomeUnknown, PermissionDenied


def test_arguments_come_before_the_environment(tmp_path):
    """URL and key: argument, environment, this machine."""
    env = {"OPENDSEC_URL": "http://a:1/", "OPENDSEC_API_KEY": "k", "OPENDSEC_RUN_DIR": str(tmp_path)}
    assert find_endpoint(None, None, env).base == "http://a:1"
    assert find_endpoint("https://b/v1", "x", env).base == "https://b"
    assert find_endpoint("https://b", "x", env).api_key() == "x"
    del env["OPENDSEC_URL"]
    assert find_endpoint(None, None, env).socket == f"{tmp_path}/api.sock"
    assert find_endpoint(None, None, {}).shown == "unix:///run/opendsec/api.sock"


def test_the_key_file_of_this_machine(tmp_path, monkeypatch):
    """Read when it is needed; a file that may not be read is named."""
    env = {"OPENDSEC_DATA_DIR": str(tmp_path)}
    endpoint = find_endpoint(None, None, env)
    assert endpoint.api_key() is None
    (tmp_path / "admin.key").write_text("secret\n")
    assert endpoint.api_key() == "secret"
    assert "secret" not in repr(endpoint)
    (tmp_path / "admin.key").unlink()
    (tmp_path / "admin.key").mkdir()
    with pytest.raises(Unauthenticated, match=r"admin\.key"):
        endpoint.api_key()


@pytest.mark.parametrize("url", ["ftp://x", "unix:relative", "/run/x"])
def test_other_addresses_are_refused(url):
    """A typing error is found before a connection is tried."""
    with pytest.raises(InvalidArgument):
        DSecClient(url)
    with pytest.raises(InvalidArgument):
        DSecClient("http://x", "a\r\nb")


def test_delays_grow_and_honour_the_server():
    """Bounded, spread, and never shorter than asked for."""
    delays = [backoff(attempt, Unavailable("x"), 0.5) for attempt in range(1, 12)]
    assert delays == sorted(delays)
    assert delays[0] < 0.06
    assert max(delays) <= 5
    assert backoff(1, Unavailable("x"), 0.0) < backoff(1, Unavailable("x"), 0.9)
    assert backoff(1, CapacityUnavailable("x", retry_after=3), 0.0) >= 3
    assert backoff(1, CapacityUnavailable("x", retry_after=10_000), 0.9) < 60
    assert backoff(1, CapacityUnavailable("x", retry_after="odd"), 0.0) < 1


def test_what_may_be_repeated():
    """Certainly nothing happened, or twice is the same as once."""
    assert may_repeat(Unavailable("x"), idempotent=False)
    assert may_repeat(OutcomeUnknown("x"), idempotent=True)
    assert not may_repeat(OutcomeUnknown("x"), idempotent=False)
    assert not may_repeat(Conflict("x"), idempotent=True)
    assert not may_repeat(Internal("x"), idempotent=True)


def test_errors_from_the_wire():
    """A code gives its class; what the server says of repeating counts; proxies have no codes."""
    import msgspec

    def of(status, **fields):
        return error_of(status, msgspec.json.encode(ErrorBody(**{"retryable": False, "is_infra": True, **fields})))

    assert isinstance(of(404, code="not_found", message="x"), NotFound)
    assert isinstance(of(500, code="of a later version", message="x"), Internal)
    assert isinstance(of(503, code="unavailable", message="x", retryable=True), Unavailable)
    assert isinstance(of(503, code="unavailable", message="x", detail={"outcome": "unknown"}), OutcomeUnknown)
    assert isinstance(error_of(502, b"<html>"), OutcomeUnknown)
    assert isinstance(error_of(403, b""), PermissionDenied)
    assert isinstance(error_of(418, b"{}"), InvalidArgument)
