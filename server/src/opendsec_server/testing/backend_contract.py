"""What every backend must do: cases that are bound to a backend by a ``Harness`` and run one by one.

``CASES`` holds them by name. Those marked ``walls`` look at real processes from inside and mean nothing in memory.
Commands keep to what a shell and the in-memory twin (``guest``) both understand.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from opendsec.api.errors import ImageUnavailable, SandboxGone, Unavailable, UnsupportedCapability
from opendsec.api.models import Limits
from opendsec_server.backends.protocol import Backend
from opendsec_server.channel.interface import Channel, ExecExit, ExecSpec
from opendsec_server.core.spec import SandboxSpec
from opendsec_server.testing.channel import RecordingSink


class Harness(Protocol):
    """A backend that is open, and what its cases need beside it."""

    backend: Backend
    #: A command that needs far more than 64 MiB of memory.
    memory_bomb: str

    def spec(self, *, layers: tuple[str, ...] = ("base",), limits: Limits | None = None) -> SandboxSpec:
        """Return a new sandbox's spec.

        Layers by name: ``base`` has a shell and the probe at ``/bin/probe``, ``upper`` replaces ``/etc/motd`` of it,
        ``bare`` is nothing but ``/probe``, ``unknown`` is in no store.
        """

    def kill(self, sandbox_id: str) -> None:
        """Kill pid 1 of a sandbox from outside."""

    async def restart(self) -> None:
        """Replace ``backend`` by a new one over the same node, as after a crash of the edge."""

    def leaks(self, live: set[str]) -> dict[str, list[str]]:
        """Return what has no owner if these sandboxes live."""


class Case(msgspec.Struct, kw_only=True, frozen=True):
    """One behaviour."""

    name: str
    run: Callable[[Harness], Awaitable[None]]
    #: Needs real processes.
    walls: bool


CASES: dict[str, Case] = {}
_Function = Callable[[Harness], Awaitable[None]]


def _case(*, walls: bool = False) -> Callable[[_Function], _Function]:
    def add(function: _Function) -> _Function:
        name = function.__name__
        CASES[name] = Case(name=name, run=function, walls=walls)
        return function

    return add


class Result(msgspec.Struct, frozen=True):
    """A command that has ended."""

    exit: ExecExit
    stdout: str
    stderr: str

    @property
    def code(self) -> int:
        """Its exit code."""
        return self.exit.exit_code


def exec_spec(*argv: str, stdin: bool = False) -> ExecSpec:
    """Return a command of root with an id of its own."""
    _count[0] += 1
    return ExecSpec(
        id=f"exec{_count[0]}",
        argv=[word.encode() for word in argv],
        env={"PATH": "/bin"},
        cwd="/",
        user="0",
        stdin=stdin,
    )


_count = [0]


async def run(channel: Channel, *argv: str) -> Result:
    """Run a command to its end and to the end of its streams."""
    sink = RecordingSink()
    await channel.exec_start(exec_spec(*argv), sink)
    exit_ = await sink.result()
    await sink.wait_for("closed")
    return Result(exit_, sink.stdout.decode(), sink.stderr.decode())


async def shell(channel: Channel, line: str) -> Result:
    """Run a shell line with the platform's own shell."""
    return await run(channel, "@sh", "-c", line)


# -- life ------------------------------------------------------------------------------------------------------------


@_case()
async def a_started_sandbox_answers(h: Harness) -> None:
    """The channel is open, the sandbox is alive and listed."""
    spec = h.spec()
    channel = await h.backend.start(spec)
    assert channel.is_open
    await channel.ping()
    assert await h.backend.alive(spec.id)
    assert await h.backend.inventory() == {spec.id}
    assert h.leaks({spec.id}) == {}


@_case()
async def a_removed_sandbox_leaves_nothing(h: Harness) -> None:
    """Its commands end, its channel closes, nothing is left; repeating it and unknown ids are fine."""
    spec = h.spec()
    channel = await h.backend.start(spec)
    sink = RecordingSink()
    await channel.exec_start(exec_spec("@sh", "-c", "sleep 1000"), sink)
    await h.backend.remove(spec.id)
    await channel.wait_closed()
    assert not await h.backend.alive(spec.id)
    assert await h.backend.inventory() == set()
    await h.backend.remove(spec.id)
    await h.backend.remove("local-zzzzzzzzzzzz")
    assert h.leaks(set()) == {}


@_case()
async def sandboxes_do_not_depend_on_each_other(h: Harness) -> None:
    """Eight come up at once; when half of them go the others answer."""
    specs = [h.spec() for _ in range(8)]
    channels = await asyncio.gather(*(h.backend.start(spec) for spec in specs))
    await asyncio.gather(*(h.backend.remove(spec.id) for spec in specs[::2]))
    assert await h.backend.inventory() == {spec.id for spec in specs[1::2]}
    for channel in channels[1::2]:
        assert (await shell(channel, "echo here")).stdout == "here\n"
    await asyncio.gather(*(h.backend.remove(spec.id) for spec in specs))
    assert await h.backend.inventory() == set()


@_case()
async def a_cancelled_start_leaves_nothing(h: Harness) -> None:
    """Whenever it is cancelled."""
    for turns in (0, 1, 3, 10, 100):
        spec = h.spec()
        task = asyncio.create_task(h.backend.start(spec))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
            await h.backend.remove(spec.id)
        assert await h.backend.inventory() == set(), turns
    assert h.leaks(set()) == {}


@_case()
async def an_unknown_runtime_is_refused(h: Harness) -> None:
    """Nothing is begun."""
    spec = msgspec.structs.replace(h.spec(), runtime="nonesuch")
    try:
        await h.backend.start(spec)
    except UnsupportedCapability:
        pass
    else:
        raise AssertionError("it started")
    assert await h.backend.inventory() == set()


@_case(walls=True)
async def a_missing_layer_is_named_and_leaves_nothing(h: Harness) -> None:
    """Also when other layers were there."""
    try:
        await h.backend.start(h.spec(layers=("base", "unknown")))
    except ImageUnavailable:
        pass
    else:
        raise AssertionError("it started")
    assert await h.backend.inventory() == set()
    assert h.leaks(set()) == {}


@_case()
async def the_death_of_pid_1_is_seen(h: Harness) -> None:
    """Waiters return, the channel closes, a new one cannot be had; it is listed until it is removed."""
    spec = h.spec()
    channel = await h.backend.start(spec)
    waiters = [asyncio.create_task(h.backend.wait_dead(spec.id)) for _ in range(2)]
    await asyncio.sleep(0)
    h.kill(spec.id)
    await asyncio.gather(*waiters)
    await channel.wait_closed()
    assert not await h.backend.alive(spec.id)
    await _gone(h.backend.reconnect(spec.id))
    assert await h.backend.inventory() == {spec.id}
    await h.backend.remove(spec.id)
    assert await h.backend.inventory() == set()


@_case()
async def what_never_was_is_gone(h: Harness) -> None:
    """Questions about an unknown sandbox have an answer."""
    name = "local-zzzzzzzzzzzz"
    assert not await h.backend.alive(name)
    assert h.backend.oom_kills(name) == 0
    await h.backend.wait_dead(name)
    await _gone(h.backend.usage(name))
    await _gone(h.backend.reconnect(name))


async def _gone(work: Awaitable[object]) -> None:
    try:
        await work
    except SandboxGone:
        return
    raise AssertionError("no SandboxGone")


# -- commands --------------------------------------------------------------------------------------------------------


@_case()
async def streams_and_exit_code_are_told_apart(h: Harness) -> None:
    """As the command wrote them."""
    channel = await h.backend.start(h.spec())
    result = await shell(channel, "echo out; echo err >&2; exit 3")
    assert (result.code, result.stdout, result.stderr) == (3, "out\n", "err\n")


@_case()
async def a_program_that_is_not_there_cannot_be_started(h: Harness) -> None:
    """The exit code is a shell's."""
    channel = await h.backend.start(h.spec())
    sink = RecordingSink()
    await channel.exec_start(exec_spec("/no/such/program"), sink)
    exit_ = await sink.result()
    assert exit_.exit_code == 127
    assert exit_.start_error


@_case()
async def a_command_survives_its_connection(h: Harness) -> None:
    """On a new channel it goes on where the old one stopped."""
    spec = h.spec()
    first = await h.backend.start(spec)
    before, after = RecordingSink(), RecordingSink()
    command = exec_spec("cat", stdin=True)
    await first.exec_start(command, before)
    await first.exec_stdin(command.id, b"one")
    while before.stdout != b"one":
        await before.changed()
    await first.aclose()
    second = await h.backend.reconnect(spec.id)
    assert await second.exec_attach(command.id, (3, 0), after)
    await second.exec_stdin(command.id, b"two")
    await second.exec_stdin_close(command.id)
    assert (await after.result()).exit_code == 0
    await after.wait_for("closed")
    assert after.stdout == b"two"


@_case()
async def a_new_backend_takes_over_what_runs(h: Harness) -> None:
    """After a crash of the edge sandboxes are found, answer, are measured and can be removed."""
    spec = h.spec()
    first = await h.backend.start(spec)
    command, sink = exec_spec("cat", stdin=True), RecordingSink()
    await first.exec_start(command, RecordingSink())
    await h.restart()
    assert await h.backend.inventory() == {spec.id}
    assert await h.backend.alive(spec.id)
    second = await h.backend.reconnect(spec.id)
    assert await second.exec_attach(command.id, (0, 0), sink)
    await second.exec_stdin_close(command.id)
    assert (await sink.result()).exit_code == 0
    assert (await h.backend.usage(spec.id)).pids >= 1
    await h.backend.remove(spec.id)
    assert h.leaks(set()) == {}


# -- limits ----------------------------------------------------------------------------------------------------------


@_case()
async def a_kill_for_memory_is_counted(h: Harness) -> None:
    """The command dies, the count rises, the sandbox goes on."""
    spec = h.spec(limits=Limits(memory_mb=64))
    channel = await h.backend.start(spec)
    assert h.backend.oom_kills(spec.id) == 0
    result = await shell(channel, h.memory_bomb)
    assert result.code in {137, 9}, result
    assert h.backend.oom_kills(spec.id) >= 1
    assert (await shell(channel, "echo alive")).stdout == "alive\n"
    assert (await h.backend.usage(spec.id)).oom_kills >= 1


@_case()
async def use_is_measured(h: Harness) -> None:
    """A sandbox that runs uses something."""
    spec = h.spec()
    await h.backend.start(spec)
    use = await h.backend.usage(spec.id)
    assert use.memory_bytes > 0
    assert use.memory_peak_bytes > 0
    assert use.pids >= 1


@_case(walls=True)
async def the_limit_of_processes_holds_and_is_counted(h: Harness) -> None:
    """Forks beyond it are refused."""
    spec = h.spec(limits=Limits(pids=20))
    channel = await h.backend.start(spec)
    sink = RecordingSink()
    # The children keep the streams open: only the main process ends.
    await channel.exec_start(exec_spec("/bin/probe", "forks", "100"), sink)
    await sink.result()
    assert 10 <= int(sink.stdout) < 20
    assert (await h.backend.usage(spec.id)).pids_refused >= 1


@_case(walls=True)
async def the_disk_limit_holds(h: Harness) -> None:
    """Writing beyond it fails, what was written is counted, and a neighbour has room."""
    spec, other = h.spec(limits=Limits(disk_mb=20)), h.spec()
    channel = await h.backend.start(spec)
    neighbour = await h.backend.start(other)
    result = await shell(channel, "dd if=/dev/zero of=/file bs=1M count=30")
    assert result.code != 0
    used = (await h.backend.usage(spec.id)).disk_bytes
    assert used is not None
    assert 19 * 2**20 <= used <= 20 * 2**20
    assert (await shell(neighbour, "dd if=/dev/zero of=/file bs=1M count=30")).code == 0
    assert (await shell(channel, "rm /file && echo again > /file && cat /file")).stdout == "again\n"


@_case(walls=True)
async def the_limit_of_open_files_is_in_force(h: Harness) -> None:
    """Soft and hard."""
    channel = await h.backend.start(h.spec(limits=Limits(open_files=123)))
    assert (await shell(channel, "ulimit -Sn; ulimit -Hn")).stdout == "123\n123\n"


@_case(walls=True)
async def more_open_files_than_the_host_may_give_are_refused(h: Harness) -> None:
    """Instead of giving fewer."""
    spec = h.spec(limits=Limits(open_files=2**30))
    try:
        await h.backend.start(spec)
    except (UnsupportedCapability, Unavailable):
        pass
    else:
        raise AssertionError("it started")
    assert await h.backend.inventory() == set()


# -- the root file system --------------------------------------------------------------------------------------------


@_case(walls=True)
async def layers_lie_on_each_other_in_order(h: Harness) -> None:
    """A file of an upper layer hides the lower one; what a sandbox changes is its own."""
    first, second = h.spec(layers=("base", "upper")), h.spec(layers=("base",))
    one, two = await h.backend.start(first), await h.backend.start(second)
    assert (await shell(one, "cat /etc/motd; echo mine > /etc/motd")).stdout == "upper\n"
    assert (await shell(one, "cat /etc/motd")).stdout == "mine\n"
    assert (await shell(two, "cat /etc/motd")).stdout == "base\n"
    assert (await shell(await h.backend.start(h.spec(layers=("base", "upper"))), "cat /etc/motd")).stdout == "upper\n"


@_case(walls=True)
async def an_image_of_one_static_program_works(h: Harness) -> None:
    """No shell, no folders: the platform brings what it needs."""
    channel = await h.backend.start(h.spec(layers=("bare",)))
    assert "Uid:\t0" in (await run(channel, "/probe", "ids")).stdout
    assert (await shell(channel, "echo still")).stdout == "still\n"


@_case(walls=True)
async def a_sandbox_knows_its_own_name(h: Harness) -> None:
    """Host name and hosts file agree, and the files are its own to change."""
    spec = h.spec()
    channel = await h.backend.start(spec)
    result = await shell(channel, "hostname; cat /etc/hostname; grep -c $(hostname) /etc/hosts; rm /etc/hosts")
    assert (result.code, result.stdout) == (0, f"{spec.hostname}\n{spec.hostname}\n1\n")


# -- walls -----------------------------------------------------------------------------------------------------------


@_case(walls=True)
async def loopback_is_up_and_all_there_is(h: Harness) -> None:
    """A connection to oneself is refused, not unreachable; there is no other device and no route."""
    channel = await h.backend.start(h.spec())
    result = await shell(channel, "nc 127.0.0.1 9; ls /sys/class/net; wc -l < /proc/net/route")
    assert "refused" in result.stderr
    assert result.stdout == "lo\n1\n"


@_case(walls=True)
async def dangerous_system_calls_are_refused(h: Harness) -> None:
    """With EPERM; ``clone3`` with ENOSYS, so that the C library falls back."""
    channel = await h.backend.start(h.spec())
    names = ["bpf", "keyctl", "userfaultfd", "perf_event_open", "mount", "fsopen", "open_tree", "kexec_load"]
    names += ["io_uring_setup", "init_module", "unshare", "setns"]
    result = await run(channel, "/bin/probe", "try", *names, "clone3")
    found = dict(line.split() for line in result.stdout.splitlines())
    assert found.pop("clone3") == "38"
    assert found == dict.fromkeys(names, "1")


@_case(walls=True)
async def dangerous_ioctls_are_refused_whatever_the_file(h: Harness) -> None:
    """Exchange and share extents of files, push bytes into a terminal, change a file's flags, control a console."""
    channel = await h.backend.start(h.spec())
    numbers = {
        "XFS_IOC_SWAPEXT": "c0c0586d",
        "XFS_IOC_EXCHANGE_RANGE": "40285881",
        "FICLONE": "40049409",
        "FICLONERANGE": "4020940d",
        "FIDEDUPERANGE": "c0189436",
        "FS_IOC_SETFLAGS": "40086602",
        "FS_IOC_FSSETXATTR": "401c5820",
        "TIOCSTI": "5412",
        "TIOCLINUX": "541c",
        "BTRFS_IOC_SNAP_CREATE_V2": "50009417",
        "BTRFS_IOC_TREE_SEARCH": "d0009411",
        "LOOP_CTL_GET_FREE": "4c82",
    }
    for target in ("/tmp", "/dev/null"):  # noqa: S108 - inside
        result = await run(channel, "/bin/probe", "ioctl", target, *numbers.values())
        found = dict(line.split() for line in result.stdout.splitlines())
        assert {name: found.get(number) for name, number in numbers.items()} == dict.fromkeys(numbers, "1"), target
    high = await run(channel, "/bin/probe", "ioctl", "/dev/null", "100005412")
    assert high.stdout.split()[1] == "1", "the upper half of the number must not hide the lower"


@_case(walls=True)
async def pid_1_cannot_be_looked_into(h: Harness) -> None:
    """Neither traced nor read; a signal from inside does not end it."""
    channel = await h.backend.start(h.spec())
    assert (await run(channel, "/bin/probe", "seize", "1")).stdout == "seize 1\n"
    for name in ("environ", "mem", "maps", "fd/3", "root/bin/sh", "stack", "syscall"):
        assert (await shell(channel, f"head -c 1 /proc/1/{name}")).code != 0, name
    assert (await shell(channel, "kill -9 1; kill -11 1; echo alive")).stdout == "alive\n"


@_case(walls=True)
async def devices_and_mounts_cannot_be_made(h: Harness) -> None:
    """The walls bind root."""
    channel = await h.backend.start(h.spec())
    for line in (
        "mknod /tmp/disk b 254 0",
        "mknod /tmp/mem c 1 1",
        "mknod /tmp/whiteout c 0 0",
        "mount -t tmpfs none /tmp",
        "mount -o remount,rw /sys",
        "umount /proc/kcore",
        "umount -l /.opendsec",
        "touch /.opendsec/new",
        "echo x > /.opendsec/sh",
        "rm -rf /.opendsec",
        "echo 1 > /proc/sys/vm/drop_caches",
        "echo x > /sys/power/state",
        "hostname other",
    ):
        assert (await shell(channel, line)).code != 0, line
    assert (await shell(channel, "echo fine")).stdout == "fine\n"


@_case(walls=True)
async def nothing_of_the_host_shows(h: Harness) -> None:
    """No socket, no folder of the host, no other process, no memory of the kernel."""
    spec = h.spec()
    channel = await h.backend.start(spec)
    await h.backend.start(h.spec())
    assert (await shell(channel, "cat /proc/net/unix | wc -l")).stdout == "1\n"
    mounts = (await shell(channel, "grep ' / / ' /proc/self/mountinfo")).stdout
    assert "upperdir=upper," in mounts, "names of the host's folders"
    assert (await shell(channel, "ls -d /proc/[0-9]* | wc -l")).stdout.strip() in {"2", "3", "4"}
    for path in ("kcore", "kmsg", "keys", "kpageflags", "kpagecount", "timer_list", "kallsyms", "slabinfo"):
        assert (await shell(channel, f"head -c 1 /proc/{path} | wc -c")).stdout.strip() == "0", path
    assert (await shell(channel, "ls -A /sys/firmware /sys/fs/cgroup | grep -v :")).stdout.strip() == ""
