"""The log of a sandbox's commands: torn ends, rewriting, files that belong to nobody."""

from __future__ import annotations

import pytest

from opendsec_server.channel.interface import ExecExit, ExecSpec
from opendsec_server.edge import execlog
from opendsec_server.edge.execs import ExecTable


@pytest.fixture
def table(tmp_path):
    """Makes tables over one folder, as edges one after the other do."""

    def make(kept: int = 5) -> ExecTable:
        return ExecTable(
            "local-aaaaaaaaaaaa",
            tmp_path,
            limit=4096,
            head=1024,
            kept=kept,
            oom_kills=lambda _: 0,
            on_end=lambda _: None,
        )

    return make


def start(table, exec_id: str, **fields):
    """Note a command that runs."""
    return table.add(ExecSpec(id=exec_id, argv=[b"x"], env={"A": "b"}, cwd="/", user="0", **fields), feeds=False)


def end(exec_, code: int = 0) -> None:
    """Let a command end, and its streams too."""
    exec_.exited(ExecExit(exit_code=code))
    exec_.closed()


async def test_a_torn_record_is_cut_off(table, tmp_path):
    """Whatever was being written when the process died is as if it had not been begun."""
    first = table()
    exec_ = start(first, "e")
    exec_.output(1, 0, b"one")
    whole = (tmp_path / "execs.log").read_bytes()
    exec_.output(1, 3, b"two")
    end(exec_)
    full = (tmp_path / "execs.log").read_bytes()
    first.close()
    for size in range(len(whole), len(full) + 1):
        (tmp_path / "execs.log").write_bytes(full[:size])
        again = table()
        again.recover()
        found = again.get("e")
        kept = again.result(found).stdout
        assert kept == (b"one" if found.streams[0].total == 3 else b"onetwo")
        # What chronus sends again lands in its place.
        found.output(1, 0, b"onetwo")
        assert again.result(found).stdout == b"onetwo"
        again.close()


async def test_forgotten_commands_leave_the_log(table, tmp_path, monkeypatch):
    """The log is written anew once most of it is of nobody; what is kept reads as before, also later."""
    monkeypatch.setattr(execlog, "GARBAGE", 10_000)
    one = table(kept=3)
    keeper = start(one, "keeper")
    keeper.output(1, 0, b"kept")
    for number in range(300):
        exec_ = start(one, f"e{number}")
        exec_.output(1, 0, b"x" * 100)
        end(exec_)
    assert (tmp_path / "execs.log").stat().st_size < 30_000
    keeper.output(1, 4, b" on")
    end(keeper, 7)
    for current in (one, table(kept=3)):
        if current is not one:
            one.close()
            current.recover()
        assert list(current.execs) == ["keeper", "e298", "e299"]
        assert current.result(current.get("keeper")).stdout == b"kept on"
        assert current.describe(current.get("keeper")).exit_code == 7
        assert current.result(current.get("e299")).stdout == b"x" * 100


async def test_an_id_that_is_used_again_is_another_command(table, monkeypatch):
    """Nothing of the forgotten one shows through, before and after the log is written anew, and after a restart."""
    one = table()
    exec_ = start(one, "e")
    exec_.output(1, 0, b"old")
    end(exec_, 1)
    one.forget(exec_)
    exec_ = start(one, "e")
    exec_.output(1, 0, b"newer")
    end(exec_, 2)
    assert one.result(exec_).stdout == b"newer"
    one._rewrite()
    assert one.result(exec_).stdout == b"newer"
    one.close()
    two = table()
    two.recover()
    assert (two.result(two.get("e")).stdout, two.get("e").exit.exit_code) == (b"newer", 2)


async def test_streams_with_files_of_their_own_survive_rewriting_and_restarts(table, tmp_path):
    """Their bytes are in the file only, bounded by the limit."""
    one = table()
    exec_ = start(one, "e")
    data = bytes(index % 251 for index in range(200_000))
    for at in range(0, len(data), 50_000):
        exec_.output(2, at, data[at : at + 50_000])
    end(exec_)
    one._rewrite()
    assert (tmp_path / "execs.log").stat().st_size < 1000
    one.close()
    two = table()
    two.recover()
    kept, cut = two.log.kept(two.get("e").streams[1])
    mark = b"\n[\xe2\x80\xa6 %d bytes cut \xe2\x80\xa6]\n" % (len(data) - 4096)
    assert (kept, cut) == (data[:1024] + mark + data[-3072:], True)


async def test_files_of_nobody_are_removed(table, tmp_path):
    """A crash between two steps of forgetting leaves nothing for good."""
    one = table()
    end(start(one, "e"))
    one.close()
    for name in ("gone.1.spool", "execs.log.new"):
        (tmp_path / name).write_bytes(b"x")
    two = table()
    two.recover()
    assert [path.name for path in tmp_path.iterdir()] == ["execs.log"]
