"""Write ``crates/chronus-proto/vectors/vectors.json``; run by hand after a change of the protocol."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from opendsec_server.channel import codec
from opendsec_server.channel.interface import ExecSpec

PATH = Path(__file__).resolve().parents[3] / "crates/chronus-proto/vectors/vectors.json"


def vectors() -> dict[str, dict[str, str]]:
    """All vectors: frames as the host makes them, and payloads of chronus."""
    spec = ExecSpec(
        id="ex-1",
        argv=[b"@sh", b"-c", b"echo \xff"],
        env={"PATH": "/bin", "LANG": "ü"},
        cwd="/work",
        user="1000:100",
        stdin=True,
        timeout_ms=60_000,
        grace_ms=500,
        rlimits={"nofile": (1024, -1)},
    )
    host = {
        "hello": codec.hello(),
        "exec_start": codec.exec_start(7, spec),
        "exec_start_minimal": codec.exec_start(8, ExecSpec(id="a", argv=[b"x"], env={}, cwd="/", user="0")),
        "exec_attach": codec.request(9, codec.OP_EXEC_ATTACH, "ex-1", 4096, 1 << 40),
        "exec_signal": codec.request(10, codec.OP_EXEC_SIGNAL, "ex-1", 15, True),
        "exec_stop": codec.request(11, codec.OP_EXEC_STOP, "ex-1", 2000),
        "exec_forget": codec.request(0, codec.OP_EXEC_FORGET, "ex-1"),
        "exec_list": codec.request(12, codec.OP_EXEC_LIST),
        "ping": codec.request(13, codec.OP_PING),
        "read": codec.request(14, codec.OP_READ, b"/a\n\xff", "0", 5, None),
        "write": codec.request(15, codec.OP_WRITE, b"/b", "bob", 0o4755, None, False, True),
        "move": codec.request(16, codec.OP_MOVE, b"/c", "0", b"/d"),
        "data": codec.frame(codec.DATA, 0xFFFF_FFFF, b"bytes"),
        "end": codec.frame(codec.END, 3),
        "ack": codec.ack(7, 2, 1 << 33),
        "credit": codec.credit(7, 65536),
    }
    encode = msgspec.msgpack.encode
    guest = {
        "hello": encode(("chronus", 1, "0.1.0", "0011223344556677")),
        "exit": encode((137, 9, True, None, 2_000_000, 1500, 1 << 20, 70_000, 3)),
        "exit_not_started": encode((127, 0, False, "no such file", 10, 20, 30, 0, 40)),
        "error": encode((2, "no such command")),
    }
    return {
        "host_frames": {name: data.hex() for name, data in host.items()},
        "guest_payloads": {name: data.hex() for name, data in guest.items()},
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1) + "\n")
