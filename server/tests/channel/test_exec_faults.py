"""Commands that misbehave: timeouts, trees, floods, crowds."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from opendsec_server.channel.client import connect
from opendsec_server.testing.channel import RecordingSink, run, shell, spec


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def gone(pids: list[int]) -> None:
    """Return when none of the processes runs any more."""
    for _ in range(2000):
        if not any(map(alive, pids)):
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"still alive: {[pid for pid in pids if alive(pid)]}")


async def test_timeout_ends_the_tree_and_keeps_partial_output(channel):
    """TERM at the timeout; what was written before comes with the result."""
    command = shell("echo partial; sleep 1000 & echo $!; sleep 1000", timeout_ms=200)
    sink = await run(channel, command)
    assert sink.exit.timed_out
    assert sink.exit.signal == 15
    assert 150 <= sink.exit.duration_ms < 2000
    word, pid = sink.stdout.split()
    assert word == b"partial"
    await gone([int(pid)])


async def test_a_command_that_ignores_term_is_killed_after_the_grace(channel):
    """KILL follows the grace, for children as well."""
    command = shell(
        "trap '' TERM; sh -c 'trap \"\" TERM; while :; do sleep 0.05; done' & echo $!; wait",
        timeout_ms=100,
        grace_ms=200,
    )
    sink = await run(channel, command)
    assert sink.exit.timed_out
    assert sink.exit.signal == 9
    assert sink.exit.duration_ms >= 250
    await gone([int(sink.stdout)])


async def test_stop_finds_daemons_that_left_session_and_parent(channel):
    """A double fork with setsid belongs to the tree, and so does one with a cleaned environment in the session."""
    line = "(setsid sleep 1000 & echo $!) ; (env -i /bin/sleep 1000 & echo $!); exec sleep 1000"
    command = shell(line)
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    while sink.stdout.count(b"\n") < 2:
        await sink.changed()
    pids = [int(word) for word in sink.stdout.split()]
    await channel.exec_stop(command.id, 50)
    await sink.wait_for("closed")
    await gone(pids)


async def test_daemon_of_another_user_is_found_by_its_mark(channel):
    """The mark in the environment is readable for every user's processes."""
    command = shell("setsid setsid sh -c 'echo $$; exec sleep 1000' & wait; exit 0", user="4242")
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    await sink.wait_for("output")
    pid = int(sink.stdout)
    await channel.exec_stop(command.id, 0)
    await gone([pid])


async def test_tree_signal_reaches_children(channel):
    """A signal for the tree reaches a child in the background."""
    command = shell(
        "sh -c 'trap \"echo child; exit\" USR1; echo r; while :; do sleep 0.02; done' & trap : USR1; wait; wait"
    )
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    await sink.wait_for("output")
    await channel.exec_signal(command.id, 10, tree=True)
    await sink.wait_for("closed")
    assert b"child\n" in sink.stdout


async def test_stop_after_the_end_kills_what_is_left(channel):
    """A background child of an ended command is ended by a stop."""
    command = shell("sleep 1000 & echo $!")
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    await sink.result()
    pid = int(sink.stdout)
    assert alive(pid)
    await channel.exec_stop(command.id, 0)
    await sink.wait_for("closed")
    await gone([pid])


async def test_fork_bomb_is_killed(pid1):
    """A tree that forks all the time is frozen and killed."""
    bomb = "f() { f & f & sleep 0.01; }; f & exec sleep 1000"
    command = shell(bomb, rlimits={"nproc": (300, 300)}, user="54321", timeout_ms=300, grace_ms=0)
    sink = RecordingSink()
    await pid1.exec_start(command, sink)
    await asyncio.wait_for(sink.wait_for("closed"), 60)
    left = await run(pid1, shell("ps -eo user:20= | grep -c 54321"))
    assert left.stdout.strip() == b"0"


async def test_timeout_holds_while_nobody_is_connected(socket_path):
    """Chronus itself watches the time."""
    channel = await connect(socket_path)
    command = shell("exec sleep 1000", timeout_ms=300)
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    await channel.aclose()
    await gone([sink.pid])
    again = await connect(socket_path)
    second = RecordingSink()
    assert await again.exec_attach(command.id, (0, 0), second)
    assert (await second.result()).timed_out
    await again.aclose()


async def test_flood_does_not_starve_another_command(channel):
    """While one command writes without end, short ones answer; all bytes arrive in order."""
    flood = shell("exec yes", timeout_ms=60_000)
    sink = RecordingSink()
    await channel.exec_start(flood, sink)
    worst = 0.0
    for _ in range(30):
        begin = time.perf_counter()
        assert (await run(channel, shell("echo hi"))).stdout == b"hi\n"
        worst = max(worst, time.perf_counter() - begin)
    await channel.exec_stop(flood.id, 0)
    await sink.wait_for("closed")
    assert sink.stdout == b"y\n" * (len(sink.stdout) // 2) or sink.stdout[:-1] == b"y\n" * (len(sink.stdout) // 2)
    assert worst < 1.0


async def test_unread_output_holds_the_workload_not_the_memory(socket_path):
    """With no host connected a flood stops at the window; later every byte is there."""
    channel = await connect(socket_path)
    command = shell(
        "i=0; while [ $i -lt 20000 ]; do echo 0123456789012345678901234567890123456789-$i; i=$((i+1)); done"
    )
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    await channel.aclose()
    before = len(sink.stdout)
    again = await connect(socket_path)
    second = RecordingSink()
    assert await again.exec_attach(command.id, (before, 0), second)
    await second.wait_for("closed")
    lines = (sink.stdout + second.stdout).splitlines()
    assert len(lines) == 20_000
    assert lines[-1].endswith(b"-19999")
    await again.aclose()


async def test_a_stolen_pipe_does_not_hide_the_end(channel):
    """A child that reads the command's own output pipe cannot keep the result from coming."""
    command = shell("(cat <&3 >/dev/null) 3</proc/self/fd/1 & sleep 0.05; echo lost; exit 4")
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    exit_ = await asyncio.wait_for(sink.result(), 10)
    assert exit_.exit_code == 4
    await channel.exec_stop(command.id, 0)
    await sink.wait_for("closed")


async def test_orphans_are_reaped(pid1):
    """Processes whose parents ended do not stay as zombies."""
    await run(pid1, shell("for i in 1 2 3 4 5; do (sleep 0.01 &) ; done; sleep 0.1"))
    sink = await run(pid1, shell("ps -eo stat= | grep -c Z"))
    assert sink.stdout.strip() == b"0"


async def test_process_1_survives_signals_from_inside(pid1):
    """No signal of root in the sandbox ends or stops process 1."""
    await run(pid1, shell("for s in 1 2 3 6 9 11 13 14 15 18 19 20; do kill -$s 1; done; kill -9 -1"))
    assert (await run(pid1, shell("echo alive"))).stdout == b"alive\n"


async def test_process_1_cannot_be_looked_into(pid1):
    """Its memory and descriptors are closed to other users, and its socket has no name."""
    sink = await run(pid1, shell("cat /proc/1/environ; ls -l /proc/1/fd/; cat /proc/1/maps", user="1000"))
    assert sink.stdout == b"" or b"socket" not in sink.stdout
    assert sink.exit.exit_code != 0
    names = await run(pid1, shell("env; ls / /.opendsec"))
    assert b".sock" not in names.stdout


async def test_a_peer_inside_the_namespace_is_refused():
    """Only a peer outside the sandbox may speak, even if the socket can be reached."""
    from opendsec_server.testing.channel import running_chronus

    with running_chronus(pid_namespace=True) as path:
        channel = await connect(path)
        code = (
            "import socket; s=socket.socket(socket.AF_UNIX); s.settimeout(10); "
            f"s.connect({str(path)!r}); print(len(s.recv(100)))"
        )
        sink = await run(channel, spec("python3", "-c", code))
        assert sink.stdout == b"0\n", sink.stderr
        await channel.aclose()


async def test_works_without_proc_and_tmp(pid1):
    """An empty /tmp and a hidden /proc change nothing for commands."""
    await run(pid1, shell("umount -l /proc"))
    command = shell("sleep 1000 & exec sleep 1000", timeout_ms=100, grace_ms=0)
    sink = await run(pid1, command)
    assert sink.exit.timed_out
