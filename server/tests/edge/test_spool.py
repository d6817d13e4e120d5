"""Spools: bounded files that lose no byte and invent none."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendsec_server.edge import spool as spool_module
from opendsec_server.edge.spool import Spool

LIMIT, HEAD, SLACK = 64, 16, 32


@pytest.fixture(autouse=True)
def small_slack(monkeypatch):
    """Rings of a few bytes wrap within a test."""
    monkeypatch.setattr(spool_module, "SLACK", SLACK)


def content(total: int) -> bytes:
    """Bytes that tell their own offset."""
    return bytes(index % 251 for index in range(total))


def read_all(spool: Spool) -> tuple[bytes, int]:
    """Everything that is kept, and how many bytes were cut."""
    found, cut, offset = b"", 0, 0
    while offset < spool.total:
        start, data = spool.read(offset, 7)
        assert data
        cut += start - offset
        found += data
        offset = start + len(data)
    return found, cut


def expected(total: int) -> bytes:
    """Head and newest rest of the first ``total`` bytes."""
    data = content(total)
    return data if total <= LIMIT else data[:HEAD] + data[total - (LIMIT - HEAD) :]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, SLACK), max_size=20))
def test_head_and_newest_rest_are_kept(tmp_path_factory, sizes):
    """However output comes in pieces, the head and the newest rest can be read, and the cut is counted."""
    spool = Spool(tmp_path_factory.mktemp("spool") / "s", limit=LIMIT, head=HEAD)
    total = sum(sizes)
    data, at = content(total), 0
    for size in sizes:
        spool.write(at, data[at : at + size])
        at += size
    assert read_all(spool) == (expected(total), max(0, total - LIMIT))
    assert spool.path.stat().st_size <= 16 + LIMIT + SLACK
    spool.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, SLACK), min_size=1, max_size=20), st.data())
def test_a_crash_between_data_and_header_loses_and_doubles_nothing(tmp_path_factory, sizes, data):
    """Killed after the data and before the header, the spool is written again from its old total, and is right."""
    path = tmp_path_factory.mktemp("spool") / "s"
    total = sum(sizes)
    text = content(total)
    victim = data.draw(st.integers(0, len(sizes) - 1))
    spool, at = Spool(path, limit=LIMIT, head=HEAD), 0
    for index, size in enumerate(sizes):
        piece = text[at : at + size]
        if index == victim:
            header = path.read_bytes()[:16].ljust(16, b"\0")
            spool.write(at, piece)
            spool.close()
            with path.open("r+b") as file:
                file.write(header)
            spool = Spool(path, limit=LIMIT, head=HEAD)
            assert spool.total == at
            assert read_all(spool)[0] == expected(at)
        spool.write(at, piece)
        at += size
    assert read_all(spool)[0] == expected(total)
    spool.close()


def test_known_bytes_are_passed_over(tmp_path):
    """What chronus sends again after a reconnect is not doubled."""
    spool = Spool(tmp_path / "s", limit=LIMIT, head=HEAD)
    spool.write(0, b"abcdef")
    spool.write(2, b"cdefgh")
    assert spool.read(0, 100) == (0, b"abcdefgh")
    spool.write(0, b"abc")
    assert spool.total == 8
    spool.close()


def test_a_gap_is_refused(tmp_path):
    """Output that does not follow what is known would be invented."""
    spool = Spool(tmp_path / "s", limit=LIMIT, head=HEAD)
    with pytest.raises(ValueError, match="gap"):
        spool.write(1, b"x")
    spool.close()


def test_a_spool_opens_again_where_it_was(tmp_path):
    """A later process reads on and writes on."""
    text = content(200)
    for start, end in itertools.pairwise((0, 30, 90, 200)):
        spool = Spool(tmp_path / "s", limit=LIMIT, head=HEAD)
        assert spool.total == start
        for at in range(start, end, 10):
            spool.write(at, text[at : at + 10])
        spool.close()
    spool = Spool(tmp_path / "s", limit=LIMIT, head=HEAD)
    assert read_all(spool) == (expected(200), 200 - LIMIT)
    spool.close()
