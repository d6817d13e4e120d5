"""The codec, held to the vectors that the Rust side is held to, and to anything a hostile guest may send."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendsec.api.errors import InvalidArgument, NotFound
from opendsec_server.channel import codec
from opendsec_server.channel.interface import ExecSpec

_spec = importlib.util.spec_from_file_location("make_vectors", Path(__file__).with_name("make_vectors.py"))
make_vectors = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_vectors)
STORED = json.loads(make_vectors.PATH.read_text())


def test_vectors_are_what_the_codec_makes():
    """A change of the protocol shows as a change of the stored vectors."""
    assert make_vectors.vectors() == STORED


def test_guest_payloads_are_decoded():
    """Each payload of chronus means what the Rust side encoded."""
    payloads = {name: bytes.fromhex(text) for name, text in STORED["guest_payloads"].items()}
    assert codec.decode_hello(payloads["hello"]).boot_id == "0011223344556677"
    exit_ = codec.decode_exit(payloads["exit"])
    assert (exit_.exit_code, exit_.signal, exit_.timed_out, exit_.duration_ms) == (137, 9, True, 2000.0)
    assert (exit_.stdout_bytes, exit_.stderr_bytes, exit_.start_error) == (70_000, 3, None)
    assert codec.decode_exit(payloads["exit_not_started"]).start_error == "no such file"
    error = codec.decode_response(payloads["error"])
    assert isinstance(error, NotFound)
    assert error.message == "no such command"


frames = st.lists(
    st.tuples(
        st.sampled_from([codec.RESPONSE, codec.DATA, codec.OUTPUT]),
        st.integers(0, 2**32 - 1),
        st.binary(max_size=2000),
    ),
    max_size=20,
)


@given(frames, st.lists(st.integers(1, 500), min_size=1, max_size=20))
def test_splitter_cuts_frames_whatever_the_pieces(sent, steps):
    """Frames come out as they went in, however the stream is cut."""
    stream = b"".join(codec.frame(*one) for one in sent)
    splitter = codec.Splitter()
    found = []
    position = index = 0
    while position < len(stream):
        step = steps[index % len(steps)]
        found += list(splitter.feed(stream[position : position + step]))
        position += step
        index += 1
    assert found == sent


@given(st.lists(st.binary(max_size=300), max_size=10))
def test_splitter_survives_anything(parts):
    """Random bytes are frames or a protocol error; nothing is kept beyond what came."""
    splitter = codec.Splitter()
    total = 0
    try:
        for part in parts:
            total += len(part)
            for kind, _, payload in splitter.feed(part):
                assert kind in range(1, 13)
                assert len(payload) <= codec.MAX_CONTROL
    except codec.ProtocolError:
        return
    assert len(splitter._rest or b"") <= total


@given(st.binary(max_size=200))
def test_decoders_survive_anything(data):
    """Each decoder returns a value or raises ``ProtocolError``."""
    decoders = (
        codec.decode_hello,
        codec.decode_number,
        codec.decode_output,
        codec.decode_exit,
        codec.decode_response,
        codec.decode_stat,
        codec.decode_entries,
    )
    for decode in decoders:
        try:
            decode(data)
        except codec.ProtocolError:
            continue


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(json_like)
def test_decoders_survive_valid_msgpack_of_any_shape(value):
    """Well-formed values of the wrong shape raise ``ProtocolError``, nothing else."""
    data = msgspec.msgpack.encode(value)
    for decode in (
        codec.decode_exit,
        codec.decode_response,
        codec.decode_stat,
        codec.decode_entries,
        codec.decode_hello,
    ):
        try:
            decode(data)
        except codec.ProtocolError:
            continue


def test_deep_nesting_is_refused():
    """Nested arrays do not exhaust the stack."""
    with pytest.raises(codec.ProtocolError):
        codec.decode_response(b"\x91" * 100_000)


@pytest.mark.parametrize(
    "spec",
    [
        ExecSpec(id="a", argv=[b"x" * 5_000_000], env={}, cwd="/", user="0"),
        ExecSpec(id="a", argv=[b"x"], env={"A": "\ud800"}, cwd="/", user="0"),
        ExecSpec(id="a", argv=[b"x"], env={}, cwd="/", user="0", timeout_ms=2**70),
    ],
)
def test_requests_that_cannot_be_sent_are_refused(spec):
    """Too large, not Unicode, out of range: the caller's mistake, told before anything is sent."""
    with pytest.raises(InvalidArgument):
        codec.exec_start(1, spec)
