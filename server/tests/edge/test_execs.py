"""Commands: started once, never lost, never invented."""

from __future__ import annotations

import asyncio
import errno

import pytest

from opendsec.api.errors import Conflict, InvalidArgument, NotFound, OutcomeUnknown, SandboxGone, Unavailable
from opendsec.api.models import ExecRequest
from opendsec_server.edge import execlog, execs, lifecycle

from .conftest import create, shell


async def output(life, exec_id, **options) -> dict[str, bytes]:
    """Follow the output of a command to its end."""
    exec_, found = life.execs.get(exec_id), {"stdout": b"", "stderr": b""}
    async for chunk in life.execs.follow(exec_, (0, 0), follow=True, **options):
        found[chunk.stream] += chunk.data
    return found


async def test_a_command_is_answered_with_its_outcome_and_output(edge):
    """A waited command brings exit code, both streams and its times."""
    box = await edge.create(create())
    result = await edge.run(box.id, shell("echo out; echo err >&2; exit 3"))
    assert (result.state, result.exit_code, result.stdout, result.stderr) == ("exited", 3, b"out\n", b"err\n")
    assert (result.stdout_bytes, result.stderr_bytes, result.truncated, result.is_infra) == (4, 4, False, False)
    assert result.started_at <= result.ended_at


async def test_a_command_that_does_not_exist_ends_with_127(edge):
    """A failed start is data, as in a shell."""
    box = await edge.create(create())
    result = await edge.run(box.id, ExecRequest(argv=["/no/such"], wait_seconds=5))
    assert (result.state, result.exit_code) == ("exited", 127)


async def test_a_wait_that_runs_out_says_running_and_the_command_goes_on(edge, host):
    """Waiting is not a time limit of the command."""
    box = await edge.create(create())
    result = await edge.run(box.id, shell("echo a; hold gate; echo b", wait_seconds=0.01, id="e1"))
    assert (result.state, result.exit_code) == ("running", None)
    host.backend.guests[box.id].release("gate")
    result = await edge.run(box.id, shell("echo a; hold gate; echo b", id="e1"))
    assert (result.exit_code, result.stdout) == (0, b"a\nb\n")
    assert host.backend.guests[box.id].starts == {"e1": 1}


async def test_the_same_id_attaches_and_never_runs_twice(edge, host):
    """Starting by a client's id is idempotent, however many ask at once."""
    box = await edge.create(create())
    results = await asyncio.gather(*(edge.run(box.id, shell("echo once", id="same")) for _ in range(5)))
    assert {result.stdout for result in results} == {b"once\n"}
    assert host.backend.guests[box.id].starts == {"same": 1}


async def test_the_same_id_runs_once_also_while_the_connection_is_made(edge, host):
    """Repeats that wait for a connection find the first one's command."""
    box = await edge.create(create())
    host.backend.break_channels(box.id)
    results = await asyncio.gather(*(edge.run(box.id, shell("echo once", id="same")) for _ in range(5)))
    assert {result.stdout for result in results} == {b"once\n"}
    assert host.backend.guests[box.id].starts == {"same": 1}


async def test_standard_input_arrives_whole(edge):
    """Bytes of the request reach the command, then end of file."""
    box = await edge.create(create())
    assert (await edge.run(box.id, shell("cat", stdin=b"in" * 1000))).stdout == b"in" * 1000
    assert (await edge.run(box.id, shell("cat"))).stdout == b""


@pytest.mark.parametrize(
    "request_",
    [
        ExecRequest(),
        ExecRequest(argv=["a"], shell="b"),
        ExecRequest(argv=[]),
        ExecRequest(argv=[""]),
        ExecRequest(argv=["a\0b"]),
        ExecRequest(shell="a\0b"),
        ExecRequest(argv=["@sh"]),
        ExecRequest(shell="x", shell_program="zsh"),
        ExecRequest(shell="x", cwd="relative"),
        ExecRequest(shell="x", env={"A=B": "c"}),
        ExecRequest(shell="x", env={"A": "\0"}),
        ExecRequest(argv=["x" * 200_000]),
        ExecRequest(shell="x", stdin=b"", stdin_open=True),
    ],
)
async def test_malformed_commands_are_refused(edge, request_):
    """What cannot be run as asked is refused before anything is noted."""
    box = await edge.create(create())
    with pytest.raises(InvalidArgument):
        await edge.run(box.id, request_)
    assert edge.life(box.id).execs.execs == {}


async def test_folder_user_and_environment_are_merged_in_order(edge, host):
    """The request wins over the create, the create over the image, the image over the defaults."""
    from opendsec.api.models import ImageConfig

    host.images.add("cfg:1", config=ImageConfig(env={"A": "image", "B": "image"}, user="iu", workdir="/img"))
    box = await edge.create(create(container_image="cfg:1", env={"B": "create", "C": "create"}))
    result = await edge.run(box.id, shell("env A; env B; env C; env D; pwd; whoami", env={"C": "exec", "D": "exec"}))
    assert result.stdout == b"image\ncreate\nexec\nexec\n/img\niu\n"
    result = await edge.run(box.id, shell("pwd; whoami; env PATH", cwd="/c", user="u"))
    assert result.stdout.startswith(b"/c\nu\n/")


async def test_an_oom_kill_is_told(edge, host):
    """A command that the kernel killed for the memory limit says so; another one killed does not."""
    box = await edge.create(create())
    result = await edge.run(box.id, shell("oom"))
    assert (result.oom_killed, result.exit_code, result.signal) == (True, 137, "SIGKILL")
    result = await edge.run(box.id, shell("kill 9"))
    assert (result.oom_killed, result.exit_code) == (False, 137)


async def test_output_streams_while_the_command_runs(edge, host):
    """A follower sees output as it comes and ends with the command."""
    box = await edge.create(create())
    await edge.run(box.id, shell("echo a; hold g; echo b", id="e", wait_seconds=0))
    following = asyncio.ensure_future(output(edge.life(box.id), "e"))
    await asyncio.sleep(0)
    host.backend.guests[box.id].release("g")
    assert (await following)["stdout"] == b"a\nb\n"


async def test_children_that_keep_the_pipes_do_not_hold_the_end_back(edge, host):
    """A command ends with its main process; what children write later is still kept."""
    box = await edge.create(create())
    result = await edge.run(box.id, shell("echo main; linger g late", id="e"))
    assert (result.state, result.stdout) == ("exited", b"main\n")
    host.backend.guests[box.id].release("g")
    while not edge.life(box.id).execs.get("e").at_end:
        await edge.life(box.id).execs.get("e").wait_change()
    assert (await output(edge.life(box.id), "e"))["stdout"] == b"main\nlate\n"


async def test_a_broken_connection_changes_nothing(edge, host):
    """Output goes on at the offsets that are kept; the command runs once."""
    box = await edge.create(create())
    await edge.run(box.id, shell("echo a; hold g; flood 300000", id="e", wait_seconds=0))
    for _ in range(3):
        host.backend.break_channels(box.id)
        await edge.life(box.id).wait_channel()
    host.backend.guests[box.id].release("g")
    result = await edge.run(box.id, shell("", id="e"))
    assert result.stdout == b"a\n" + b"x" * 300000
    assert host.backend.guests[box.id].starts == {"e": 1}


async def test_a_start_on_a_connection_that_breaks_runs_once(edge, host):
    """Whether the start arrived is decided by asking again, not guessed."""
    box = await edge.create(create())
    starting = asyncio.ensure_future(edge.run(box.id, shell("echo x", id="e")))
    await asyncio.sleep(0)
    host.backend.break_channels(box.id)
    assert (await starting).stdout == b"x\n"
    assert host.backend.guests[box.id].starts == {"e": 1}


async def test_a_connection_that_does_not_come_back_leaves_the_outcome_open(edge, host, monkeypatch):
    """A start whose answer is missing is no refusal: it may run, and is found once the connection is back."""
    monkeypatch.setattr(lifecycle, "RECONNECT_SECONDS", 0.01)
    box = await edge.create(create())
    host.backend.reconnect_errors = [Unavailable("no")] * 4
    channel = edge.life(box.id).channel

    async def start_and_break(spec, sink):
        channel.guest.start(spec, sink)
        host.backend.break_channels(box.id)
        raise Unavailable("broken")

    monkeypatch.setattr(channel, "exec_start", start_and_break)
    with pytest.raises(OutcomeUnknown):
        await edge.run(box.id, shell("echo x", id="e"))
    monkeypatch.setattr(lifecycle, "RECONNECT_SECONDS", 10.0)
    await edge.life(box.id).wait_channel()
    assert (await edge.run(box.id, shell("echo x", id="e"))).stdout == b"x\n"
    assert host.backend.guests[box.id].starts == {"e": 1}


@pytest.mark.parametrize("oom", [False, True])
async def test_the_end_of_pid_1_loses_what_ran(edge, host, oom):
    """Commands of a sandbox that ended have no invented exit code, and later calls say that it is gone."""
    box = await edge.create(create())
    await edge.run(box.id, shell("echo a; hold g", id="e", wait_seconds=0))
    waiting = asyncio.ensure_future(edge.run(box.id, shell("", id="e")))
    await asyncio.sleep(0)
    host.backend.kill(box.id, oom=oom)
    with pytest.raises(SandboxGone):
        await waiting
    await edge.life(box.id).wait_end()
    result = await edge.run(box.id, shell("", id="e"))
    assert (result.state, result.exit_code, result.is_infra, result.stdout) == ("lost", None, not oom, b"a\n")
    record = edge.get(box.id)
    assert (record.state, record.cause, record.is_infra) == ("failed", "oom" if oom else "chronus_lost", not oom)
    with pytest.raises(SandboxGone) as gone:
        await edge.run(box.id, shell("true"))
    assert gone.value.detail["cause"] == record.cause
    assert gone.value.is_infra is record.is_infra
    # Asking for what is known still works, also of a later edge.
    edge = await host.reboot()
    assert edge.life(box.id).execs.describe(edge.life(box.id).execs.get("e")).is_infra is not oom
    assert (await output(edge.life(box.id), "e"))["stdout"] == b"a\n"


async def test_only_so_many_ended_commands_are_kept(make_host):
    """The oldest ended ones are forgotten, those that run never."""
    host = make_host(execs_kept=3)
    edge = await host.boot()
    box = await edge.create(create())
    await edge.run(box.id, shell("hold g", id="runs", wait_seconds=0))
    for number in range(5):
        await edge.run(box.id, shell("true", id=f"e{number}"))
    assert list(edge.life(box.id).execs.execs) == ["runs", "e3", "e4"]
    for number in range(2):
        await edge.run(box.id, shell("hold g", id=f"r{number}", wait_seconds=0))
    with pytest.raises(Unavailable):
        await edge.run(box.id, shell("true"))
    await host.close()


async def test_deleting_a_command_kills_and_forgets_it(edge, host):
    """After a delete the id is unknown; a running command cannot be forgotten without being killed."""
    box = await edge.create(create())
    await edge.run(box.id, shell("hold g", id="e", wait_seconds=0))
    with pytest.raises(Conflict):
        edge.life(box.id).execs.forget(edge.life(box.id).execs.get("e"))
    await edge.kill_and_forget(box.id, "e")
    with pytest.raises(NotFound):
        edge.life(box.id).execs.get("e")


async def test_a_full_disk_loses_the_outcome_instead_of_inventing_it(edge, host, monkeypatch):
    """Output that cannot be kept ends the command as lost; it does not hang and does not look complete."""
    box = await edge.create(create())
    await edge.run(box.id, shell("echo a; hold g; echo b; hold h", id="e", wait_seconds=0))
    log = edge.life(box.id).execs.log
    while not edge.life(box.id).execs.get("e").streams[0].total:
        await edge.life(box.id).execs.get("e").wait_change()

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(log), "append_raw", full)
        host.backend.guests[box.id].release("g")
        result = await edge.run(box.id, shell("", id="e"))
        assert (result.state, result.is_infra, result.stdout) == ("lost", True, b"a\n")
        with pytest.raises(Unavailable):
            await edge.run(box.id, shell("true"))
    assert (await edge.run(box.id, shell("true"))).exit_code == 0


async def test_byte_by_byte_output_does_not_pile_up_in_memory(edge, host):
    """Many small pieces move to a file of their own, and no descriptor stays open for it."""
    box = await edge.create(create())
    line = ";".join(["echo x"] * (execlog.INLINE_PIECES * 3))
    result = await edge.run(box.id, shell(line, id="e"))
    assert result.stdout == b"x\n" * (execlog.INLINE_PIECES * 3)
    exec_ = edge.life(box.id).execs.get("e")
    while not exec_.at_end:
        await exec_.wait_change()
    stream = exec_.streams[0]
    assert stream.pieces == []
    assert stream.spool._fd == -1


async def test_big_output_is_cut_in_the_middle(make_host):
    """Head and newest rest are kept, the cut is marked in the result and told to followers."""
    host = make_host(spool_limit_bytes=200_000, spool_head_bytes=50_000)
    edge = await host.boot()
    box = await edge.create(create())
    result = await edge.run(box.id, shell("echo begin; flood 1000000; echo end", id="e"))
    assert result.truncated
    assert result.stdout_bytes == 6 + 1_000_000 + 4
    assert result.stdout.startswith(b"begin\nxxx")
    assert result.stdout.endswith(b"xxx\nend\n") or result.stdout.endswith(b"xxxend\n")
    assert f"[… {1_000_010 - 200_000} bytes cut …]".encode() in result.stdout
    table = edge.life(box.id).execs
    chunks = [chunk async for chunk in table.follow(table.get("e"), (0, 0), follow=False)]
    assert sum(chunk.lost for chunk in chunks) == 1_000_010 - 200_000
    assert sum(len(chunk.data) for chunk in chunks) == 200_000
    await host.close()


async def test_what_is_remembered_of_an_ended_command_is_small(edge):
    """Arguments and environment of ended commands do not pile up in memory."""
    box = await edge.create(create())
    await edge.run(box.id, ExecRequest(argv=["true", "y" * 100_000], env={"A": "z" * 1000}, id="e", wait_seconds=5))
    spec = edge.life(box.id).execs.get("e").start.spec
    assert sum(map(len, spec.argv)) <= execs.SHOWN_ARGUMENTS + 8
    assert spec.env == {}
