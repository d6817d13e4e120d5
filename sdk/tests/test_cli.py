"""The command line, as scripts use it: in its own process, by exit code, stdout and stderr."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from opendsec.api.errors import BY_CODE, NodeLost
from opendsec.cli._app import build
from opendsec.cli._errors import exit_code
from opendsec.testing._state import Node

sys.path.insert(0, str(Path(__file__).parent))
from cli_zygote import Zygote


class Done(NamedTuple):
    """What came of a command line."""

    code: int
    out: bytes
    err: str


@pytest.fixture(scope="module")
def zygote():
    running = Zygote()
    yield running
    running.close()


@pytest.fixture
def environment(server):
    return {**os.environ, "OPENDSEC_URL": server.url, "OPENDSEC_API_KEY": server.api_key, "COLUMNS": "200"}


async def read_all(file):
    """Read a pipe to its end without holding up the loop."""

    def read():
        with open(file, "rb") as pipe:  # noqa: PTH123 - a descriptor
            return pipe.read()

    return await asyncio.to_thread(read)


@pytest.fixture
def cli(environment, zygote):
    async def call(*arguments, stdin=None, env=None):
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        source, source_end = (os.open(os.devnull, os.O_RDONLY), None) if stdin is None else os.pipe()
        answer = zygote.start(list(arguments), env or environment, [source, out_end, err_end])
        for file in (out_end, err_end, source):
            os.close(file)

        def feed():
            with contextlib.suppress(BrokenPipeError), open(source_end, "wb") as pipe:  # noqa: PTH123
                pipe.write(stdin)

        feeder = None if stdin is None else asyncio.create_task(asyncio.to_thread(feed))
        with answer:
            output, errors = await asyncio.gather(read_all(out), read_all(err))
            code = int(await asyncio.to_thread(answer.recv, 10))
        if feeder is not None:
            await feeder
        assert b"Traceback" not in errors, errors.decode()
        return Done(code, output, errors.decode("utf-8", "replace"))

    return call


async def test_run_prints_passes_the_code_on_and_leaves_nothing(cli, server):
    """The whole life of a sandbox in one command."""
    assert await cli("run", "debian:bookworm", "--", "echo", "--flag", "hi") == (0, b"--flag hi\n", "")
    assert (await cli("run", "debian:bookworm", "exit", "3")).code == 3
    assert server.live() == []


async def test_run_tells_a_failing_platform_from_a_failing_command(cli, server):
    """125 is the platform's; 2 is the caller's."""
    done = await cli("run", "none:such", "true")
    assert done.code == 125
    assert "none:such is not in the store" in done.err
    assert (await cli("run", "debian:bookworm")).code == 2
    assert (await cli("run", "--memory", "1", "debian:bookworm", "true")).code == 2
    assert (await cli("run", "--bogus", "debian:bookworm", "true")).code == 2
    done = await cli("exec", "fake-aaaaaaaaaaaa", "true")
    assert done.code == 125


async def test_run_as_json(cli):
    """One object with everything; also when the command was ended at its timeout."""
    done = await cli("run", "--json", "debian:bookworm", "--", "echo", "hi")
    report = json.loads(done.out)
    assert (report["exit_code"], report["stdout"], report["timed_out"]) == (0, "hi\n", False)
    done = await cli("run", "--json", "--timeout", "0.05", "debian:bookworm", "sleep", "9")
    assert (done.code, json.loads(done.out)["timed_out"]) == (124, True)
    done = await cli("run", "--json", "none:such", "true")
    assert (done.code, done.out, json.loads(done.err)["code"]) == (125, b"", "image_unavailable")


async def test_run_options_reach_the_sandbox(cli, server):
    """Limits, labels and environment are what the platform gets."""
    await cli(
        *("run", "--keep", "--memory", "64", "--cpus", "0.5", "--disk", "9", "--pids", "20", "--ttl", "7"),
        *("-l", "a=b", "--job", "j", "--toolkit", "t:1", "--workspace", "w:1", "debian:bookworm"),
    )
    info = server.live()[0].info
    assert (info.limits.memory_mb, info.limits.cpu_cores, info.limits.disk_mb, info.limits.pids) == (64, 0.5, 9, 20)
    assert (info.labels, info.job, info.toolkits, info.workspace) == ({"a": "b"}, "j", ["t:1"], "w:1")
    assert info.ttl_running_stop == 7
    assert server.live()[0].claimed


async def test_stdin_is_passed_if_given(cli, sandbox):
    """A pipe is passed on; ``-n`` keeps it."""
    big = b"\xff\0" * 200_000
    assert await cli("run", "debian:bookworm", "cat", stdin=big) == (0, big, "")
    assert (await cli("exec", sandbox.id, "--", "cat", stdin=b"x")).out == b"x"
    assert (await cli("exec", "-n", sandbox.id, "--", "cat", stdin=b"x")).out == b""
    assert (await cli("exec", sandbox.id, "--", "true", stdin=b"x" * 100_000)).code == 0


async def test_exec_streams_and_codes(cli, server, sandbox):
    """Stdout to stdout, stderr to stderr, the code passed on."""

    @server.on_command
    async def both(command):
        if command.line != "both":
            return None
        command.write("out")
        command.write(b"err\xff", stream="stderr")
        return 42

    done = await cli("exec", sandbox.id, "both")
    assert (done.code, done.out) == (42, b"out")
    assert done.err.startswith("err")
    assert (await cli("exec", "--shell", sandbox.id, "echo", "a", "b")).out == b"a b\n"
    assert (await cli("exec", "--timeout", "0.05", sandbox.id, "sleep", "9")).code == 124


async def test_a_lost_node_is_no_exit_code_of_the_command(cli, server, sandbox):
    """The platform's failures in the middle are 125, too."""
    server.fail("GET", "/output$", NodeLost("the node is gone"))
    assert (await cli("exec", sandbox.id, "echo", "x")).code == 125


async def test_an_interrupt_kills_the_command_and_stops_the_sandbox(server, environment):
    """Ctrl-C leaves nothing behind."""
    started = asyncio.Event()

    @server.on_command
    async def hang(command):
        started.set()
        await asyncio.Event().wait()

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "opendsec.cli.main", "run", "debian:bookworm", "hang", env=environment
    )
    await started.wait()
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130
    assert server.live() == []


async def test_ls(cli, client, args, sandbox):
    """Live ones by default; filters; ids only; JSON with every field."""
    ended = await client.run_container(args)
    await ended.stop()
    assert (await cli("ls", "-q")).out.decode().split() == [sandbox.id]
    assert set((await cli("ls", "-q", "--all")).out.decode().split()) == {sandbox.id, ended.id}
    assert (await cli("ls", "-q", "--state", "stopped")).out.decode().split() == [ended.id]
    found = json.loads((await cli("ls", "--json")).out)
    assert found[0]["id"] == sandbox.id
    assert found[0]["cause"] is None
    assert sandbox.id in (await cli("ls")).out.decode()
    assert json.loads((await cli("ls", "--json", "--job", "none")).out) == []
    assert (await cli("ls", "--state", "odd")).code == 2
    assert (await cli("ls", "--label", "odd")).code == 2


async def test_logs(cli, server, sandbox):
    """Output of the newest command, or of a named one; following waits for the end."""
    await sandbox.run_shell("echo old", exec_id="old")
    await sandbox.run_shell("echo new")
    assert (await cli("logs", sandbox.id)).out == b"new\n"
    assert (await cli("logs", sandbox.id, "old")).out == b"old\n"
    line = json.loads((await cli("logs", "--json", sandbox.id, "old")).out)
    assert (line["stream"], line["text"], line["data"]) == ("stdout", "old\n", "b2xkCg==")
    process = await sandbox.start("cat", stdin=True)
    following = asyncio.create_task(cli("logs", "-f", sandbox.id, process.id))
    await process.write_stdin("late")
    await process.close_stdin()
    assert (await following).out == b"late"
    assert (await cli("logs", sandbox.id, "unknown")).code == 3


async def test_inspect(cli, sandbox):
    """Live and ended."""
    await sandbox.run_shell("echo hi")
    report = json.loads((await cli("inspect", "--json", sandbox.id)).out)
    assert (report["sandbox"]["id"], report["metrics"]["pids"]) == (sandbox.id, 1)
    assert report["execs"][0]["exit_code"] == 0
    assert "debian:bookworm" in (await cli("inspect", sandbox.id)).out.decode()
    await sandbox.stop()
    assert "deleted" in (await cli("inspect", sandbox.id)).out.decode()
    assert (await cli("inspect", "fake-aaaaaaaaaaaa")).code == 3


async def test_stop(cli, client, args, server):
    """By id, by job, all; what is not there is said, the others are stopped."""
    first, second = await client.run_container(args), await client.run_container(args)
    done = await cli("stop", "fake-aaaaaaaaaaaa", first.id)
    assert (done.code, done.out.decode()) == (3, f"{first.id}\n")
    assert json.loads((await cli("stop", "--all", "--json")).out) == {"stopped": [second.id]}
    assert json.loads((await cli("stop", "--job", "none", "--json")).out) == {"stopped": []}
    assert (await cli("stop")).code == 2
    assert server.live() == []


async def test_images(cli, tmp_path):
    """Import from each source, list, tag, remove."""
    (tmp_path / "f").write_text("x")
    image = json.loads((await cli("image", "import", "--folder", str(tmp_path), "a:1", "--json")).out)
    assert image["reference"] == "a:1"
    assert (await cli("image", "import", "--debian", "bookworm", "--packages", "git,gcc", "a:2")).code == 0
    done = await cli("image", "import", "--debian", "bookworm", "--packages", "no-such-package", "a:3")
    assert (done.code, "unable to locate" in done.err) == (2, True)
    assert (await cli("image", "import", "--tar", str(tmp_path / "none"), "a:3")).code == 3
    assert (await cli("image", "import", "a:3")).code == 2
    assert (await cli("image", "import", "--folder", str(tmp_path), "--kind", "odd", "a:3")).code == 2
    assert (await cli("image", "tag", "a:1", "a:latest")).code == 0
    assert (await cli("image", "rm", "a:1")).code == 0
    assert (await cli("image", "rm", "a:1")).code == 3
    names = [image["reference"] for image in json.loads((await cli("image", "ls", "--json")).out)]
    assert "a:latest" in names
    assert "a:1" not in names
    assert b"a:latest" in (await cli("image", "ls")).out


async def test_nodes(cli):
    """List and drain."""
    assert json.loads((await cli("node", "ls", "--json")).out)[0]["id"] == "fake"
    assert json.loads((await cli("node", "drain", "fake", "--json")).out)["state"] == "draining"
    assert (await cli("node", "undrain", "fake")).code == 0
    assert (await cli("node", "drain", "other")).code == 3
    assert b"fake" in (await cli("node", "ls")).out


async def test_no_server_and_no_key(cli, environment, tmp_path):
    """The message says what to do."""
    gone = {**environment, "OPENDSEC_URL": f"unix://{tmp_path}/none.sock"}
    done = await cli("ls", env=gone)
    assert (done.code, "opendsec serve" in done.err) == (5, True)
    assert (await cli("run", "debian:bookworm", "true", env=gone)).code == 125
    done = await cli("ls", env={**environment, "OPENDSEC_API_KEY": "wrong"})
    assert (done.code, "OPENDSEC_API_KEY" in done.err) == (4, True)


async def test_version(cli):
    """Also for programs."""
    assert (await cli("version")).out.startswith(b"opendsec ")
    assert "python" in json.loads((await cli("version", "--json")).out)


def test_without_the_server_its_commands_say_what_to_install(monkeypatch, capsys):
    """``serve`` and ``doctor`` are known by name even where they are not installed."""
    monkeypatch.setattr("opendsec.cli._app.entry_points", lambda group: [])
    with pytest.raises(SystemExit) as caught:
        build(["serve"])(["serve", "--listen", "x"])
    assert caught.value.code == 1
    assert "opendsec-server" in capsys.readouterr().err


def test_every_code_has_an_exit_code():
    """No error of the platform but a defect ends with 1."""
    assert {code for code, cls in BY_CODE.items() if exit_code(cls("x")) == 1} == {"internal"}


async def test_text_from_a_sandbox_does_not_become_markup(cli, server, sandbox):
    """Names that look like markup are printed as they are."""
    server.sandboxes[sandbox.id].files[b"/x"] = Node(kind="file")
    server.sandboxes[sandbox.id].info.cause = "[red]x[/red]"
    assert "[red]x[/red]" in (await cli("ls")).out.decode()
