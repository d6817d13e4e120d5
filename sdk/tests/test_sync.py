"""The blocking SDK: the same names, the same behaviour, and nothing hand-written to drift."""

from __future__ import annotations

import ast
import inspect
import os
import threading
from pathlib import Path

import pytest

import opendsec
import opendsec.sync
from opendsec import CommandFailed, DSecContainerRunArgs, NotFound
from opendsec.sync import DSecClient, _generate
from opendsec.sync._portal import portal
from opendsec.testing import FakeServer


@pytest.fixture
def server():
    running = FakeServer()
    portal.run(running.__aenter__())
    yield running
    portal.run(running.__aexit__(None, None, None))


@pytest.fixture
def client(server):
    with DSecClient(server.url, server.api_key) as opened:
        yield opened


def shape(source):
    """Return the classes of a module without what formatting may change."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in ast.walk(ast.Module(body=classes, type_ignores=[])):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body[0].value.value = " ".join(ast.get_docstring(node).split())
    return [ast.dump(node) for node in classes]


@pytest.mark.parametrize("output", ["_generated", "_generated_parts"])
def test_the_generated_modules_are_up_to_date(output):
    """Whoever changes the asynchronous SDK runs the generator."""
    checked_in = Path(_generate.__file__).with_name(f"{output}.py").read_text()
    assert shape(_generate.generate(output)) == shape(checked_in), "run sdk/src/opendsec/sync/_generate.py"


@pytest.mark.parametrize("name", opendsec.sync.__all__)
def test_nothing_public_is_missing(name):
    """Every public method of a class has its blocking twin."""
    wanted = {member for member in vars(getattr(opendsec, name)) if not member.startswith("_")}
    twin = getattr(opendsec.sync, name)
    assert wanted <= set(dir(twin))
    assert not [member for member in wanted if inspect.iscoroutinefunction(getattr(twin, member))]


def test_the_main_job(client, tmp_path):
    """Create, run, read and write files, stop, in blocks."""
    with client.run_container(DSecContainerRunArgs(container_image="debian:bookworm")) as sandbox:
        assert sandbox.run_shell("echo hi").stdout == "hi\n"
        with pytest.raises(CommandFailed):
            sandbox.exec(["false"], check=True)
        sandbox.files.write("/tmp/a", (piece for piece in (b"1", b"2")))
        assert sandbox.files.read("/tmp/a") == b"".join(sandbox.files.stream("/tmp/a")) == b"12"
        assert [info.path for info in sandbox.files.list("/tmp")] == ["/tmp/a"]
        sandbox.download("/tmp", tmp_path / "t")
        assert (tmp_path / "t" / "a").read_bytes() == b"12"
    assert client.get(sandbox.id).refresh().state == "stopped"
    assert [one.id for one in client.list()] == [sandbox.id]


def test_processes(client):
    """Output is iterated over, input written, the end awaited."""
    sandbox = client.run_container(DSecContainerRunArgs(container_image="debian:bookworm"))
    with sandbox.start("cat", stdin=True) as process:
        process.write_stdin("hi")
        process.close_stdin()
        assert "".join(event.text for event in process) == "hi"
        assert process.wait().exit_code == 0
    assert sandbox.attach(process.id).info().state == "exited"


def test_batches_and_leaving_early(server, client):
    """``run_many`` is an ordinary iterator; leaving it stops the rest."""
    args = DSecContainerRunArgs(container_image="debian:bookworm")
    assert len(list(client.run_many(args, 5))) == 5
    assert client.list()[0].stop().state == "stopped"
    sandboxes = client.run_many(args, 5)
    next(sandboxes)
    sandboxes.close()
    portal.run(client._inner._core.aclose())
    server.reap_unclaimed()
    assert len(server.live()) == 5


def test_images_and_nodes(client):
    """The other name spaces are there too."""
    assert client.images.tag("debian:bookworm", "a:b").reference == "a:b"
    assert [node.id for node in client.nodes.list()] == ["fake"]
    with pytest.raises(NotFound):
        client.nodes.drain("other")


def test_threads_share_a_client(client):
    """Objects may be used from any thread."""
    sandbox = client.run_container(DSecContainerRunArgs(container_image="debian:bookworm"))
    outputs = []

    def work(number):
        outputs.append(sandbox.run_shell(f"echo {number}").stdout)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outputs) == [f"{number}\n" for number in range(8)]


def test_an_interrupt_cancels_and_cleans_up(server, client):
    """Ctrl-C in a blocking call kills the command before it is raised."""
    sandbox = client.run_container(DSecContainerRunArgs(container_image="debian:bookworm"))

    @server.on_command
    async def interrupt(command):
        if command.line != "interrupt":
            return
        os.kill(os.getpid(), 2)
        await __import__("asyncio").Event().wait()

    with pytest.raises(KeyboardInterrupt):
        sandbox.run_shell("interrupt")
    assert not server.sandboxes[sandbox.id].execs


def test_a_callback_must_not_block(client, tmp_path):
    """A blocking call from the SDK's own thread would wait for itself, so it is refused."""
    with pytest.raises(RuntimeError, match="wait for itself"):
        client.images.import_folder(tmp_path, "x:1", on_progress=lambda _: client.list())
