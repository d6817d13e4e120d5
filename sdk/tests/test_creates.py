"""Creates: exactly one sandbox each, and none left behind."""

from __future__ import annotations

import asyncio

import pytest

from opendsec import (
    BatchFailed,
    CapacityUnavailable,
    DSecContainerRunArgs,
    DSecFnCallArgs,
    DSecFullVMRunArgs,
    DSecMicroVMRunArgs,
    ImageUnavailable,
    InvalidArgument,
    NotFound,
    UnsupportedCapability,
    WaitTimeout,
)


async def test_arguments_reach_the_sandbox(client):
    """The paper's arguments are what the sandbox reports."""
    args = DSecContainerRunArgs(
        container_image="python:3.11",
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,
        network_rules={"npm": False},
        init_user="root",
        labels={"a": "b"},
        job="j1",
    )
    sandbox = await client.run_container(args, timeout=120)
    info = await sandbox.refresh()
    assert (info.limits.memory_mb, info.limits.cpu_cores, info.ttl_running_stop) == (4096, 4, 300)
    assert (info.labels, info.job, info.state) == ({"a": "b"}, "j1", "running")


async def test_refusals_are_typed(client, args):
    """Each refusal has its class, at once."""
    with pytest.raises(ImageUnavailable):
        await client.run_container(DSecContainerRunArgs(container_image="none:such"))
    with pytest.raises(UnsupportedCapability):
        await client.run_container(
            DSecContainerRunArgs(container_image="debian:bookworm", network_rules={"pypi": True})
        )
    with pytest.raises(UnsupportedCapability):
        await client.run_microvm(DSecMicroVMRunArgs(container_image="debian:bookworm"))
    with pytest.raises(UnsupportedCapability):
        await client.run_fullvm(DSecFullVMRunArgs(container_image="debian:bookworm"))
    with pytest.raises(UnsupportedCapability):
        await client.fncall(DSecFnCallArgs(container_image="debian:bookworm"))
    with pytest.raises(TypeError):
        await client.run_container({"container_image": "debian:bookworm"})
    with pytest.raises(InvalidArgument):
        await client.run_container(DSecContainerRunArgs(container_image="debian:bookworm", memory_limit_mb=1))


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_lost_create_is_repeated_with_its_request_id(server, client, args, when):
    """One call makes one sandbox, whatever is lost on the way."""
    server.break_connection("POST", "^/v1/sandboxes$", when=when, times=2)
    sandbox = await client.run_container(args)
    assert [box.info.id for box in server.live()] == [sandbox.id]


async def test_a_full_platform_is_waited_for(server, client, args):
    """A create waits for room as long as it may, then says why."""
    server.capacity = 1
    first = await client.run_container(args)
    waiting = asyncio.create_task(client.run_container(args))
    while server.seen["POST /v1/sandboxes"] < 3:
        await asyncio.sleep(0.001)
    await first.stop()
    await waiting
    with pytest.raises(CapacityUnavailable):
        await client.run_container(args, timeout=0.05)


async def test_cancelling_a_create_stops_the_sandbox(server, client, args):
    """What a cancelled create made is found by its request id and stopped."""
    hold = server.hold("POST", "^/v1/sandboxes$")
    task = asyncio.create_task(client.run_container(args))
    await hold.reached.wait()
    assert len(server.live()) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.live() == []


async def test_a_create_that_takes_too_long_is_stopped(server, client, args):
    """The timeout is the caller's: the error is a TimeoutError, and nothing is left."""
    server.hold("POST", "^/v1/sandboxes$")
    with pytest.raises(WaitTimeout) as caught:
        await client.run_container(args, timeout=0.1)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.is_infra
    assert server.live() == []


async def test_a_create_that_appears_late_is_stopped(server, client, args):
    """The search for what a cancelled create made goes on for a while."""
    from opendsec._creates import _abandon

    await _abandon(client._core, "late")
    await client.run_container(DSecContainerRunArgs(container_image="debian:bookworm", request_id="late"))
    await client.close()
    assert server.live() == []


async def test_cancelling_leaves_a_sandbox_with_a_request_id_of_ones_own(server, client):
    """It may have been there before: only its lease ends it, if nobody claims it."""
    args = DSecContainerRunArgs(container_image="debian:bookworm", request_id="mine")
    hold = server.hold("POST", "^/v1/sandboxes$")
    task = asyncio.create_task(client.run_container(args))
    await hold.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.close()
    assert len(server.reap_unclaimed()) == 1


async def test_the_same_request_id_gives_the_same_sandbox(client):
    """Creates are idempotent."""
    args = DSecContainerRunArgs(container_image="debian:bookworm", request_id="once")
    first, second = await client.run_container(args), await client.run_container(args)
    assert first.id == second.id
    assert [found.id for found in await client.list(request_id="once")] == [first.id]


async def test_leases_are_claimed_in_one_request(server, client, args):
    """What the process knows of is claimed in the background, many at once."""
    made = await asyncio.gather(*(client.run_container(args) for _ in range(20)))
    assert {server.sandboxes[one.id].lease_seconds for one in made} == {60.0}
    await client.close()
    assert server.reap_unclaimed() == []
    assert server.seen["POST /v1/sandboxes/claim"] == 1


async def test_a_failed_claim_is_repeated(server, client, args):
    """A claim that meets a broken connection is sent again."""
    server.break_connection("POST", "/claim$", when="before", times=2)
    await client.run_container(args)
    while not server.seen["POST /v1/sandboxes/claim"]:
        await asyncio.sleep(0.01)
    await client.close()
    assert server.reap_unclaimed() == []


async def test_without_a_claim_the_lease_ends_a_sandbox(server, args):
    """A client that is killed leaves nothing: its sandboxes were never claimed."""
    client = server.client()
    await client.open()
    sandbox = await client.run_container(args)
    client._core._claimer.cancel()  # as SIGKILL would
    await client._transport.aclose()
    assert server.reap_unclaimed() == [sandbox.id]


async def test_run_many_gives_all_sandboxes(server, client, args):
    """One batch, an iterator over what it made, all of it claimed."""
    made = [sandbox async for sandbox in client.run_many(args, 50)]
    assert len({sandbox.id for sandbox in made}) == len(server.live()) == 50
    assert server.seen["POST /v1/sandboxes"] == 1
    await client.close()
    assert server.reap_unclaimed() == []


async def test_run_many_with_concurrency_creates_one_by_one(server, client, args):
    """With a bound of its own the client sends single creates."""
    made = [sandbox async for sandbox in client.run_many(args, 10, concurrency=3)]
    assert len(made) == 10
    assert server.seen["POST /v1/sandboxes"] == 10


async def test_a_broken_batch_goes_on(server, client, args):
    """The batch is asked for again; nothing is made or handed out twice."""
    server.break_connection("POST", "^/v1/sandboxes$", when="cut", times=2)
    made = [sandbox async for sandbox in client.run_many(args, 21)]
    assert len({sandbox.id for sandbox in made}) == len(made) == len(server.live()) == 21


async def test_run_many_waits_for_room(server, client, args):
    """Items that found no room are created when there is."""
    server.capacity = 5
    made = []
    async for sandbox in client.run_many(args, 20):
        made.append(sandbox)
        await sandbox.stop()
    assert len(made) == 20


async def test_run_many_tells_failures_at_the_end(server, client, args):
    """All that could be made is handed out first; the error has the rest and what was made."""
    server.capacity = 3
    made = []
    with pytest.raises(BatchFailed) as caught:  # noqa: PT012
        async for sandbox in client.run_many(args, 5, timeout=0.2):
            made.append(sandbox)  # noqa: PERF401 - the point is what is there when it raises
    assert caught.value.sandboxes == made
    assert len(made) == 3
    assert {type(error) for error in caught.value.errors.values()} == {CapacityUnavailable}
    assert caught.value.is_infra


async def test_run_many_is_refused_as_a_whole(client):
    """A batch that cannot succeed for any item fails with the reason of each."""
    with pytest.raises(BatchFailed) as caught:
        async for _ in client.run_many(DSecContainerRunArgs(container_image="none:such"), 2):
            pass
    assert {type(error) for error in caught.value.errors.values()} == {ImageUnavailable}
    with pytest.raises(InvalidArgument):
        async for _ in client.run_many(DSecContainerRunArgs(container_image="none:such"), 0):
            pass


async def test_leaving_run_many_early_stops_the_rest(server, client, args):
    """What was made but not handed out does not stay."""
    kept = []
    sandboxes = client.run_many(args, 30)
    async for sandbox in sandboxes:
        kept.append(sandbox.id)
        if len(kept) == 2:
            break
    await sandboxes.aclose()
    await client.close()
    server.reap_unclaimed()
    assert [box.info.id for box in server.live()] == kept


async def test_stop_is_idempotent_and_gives_the_record(sandbox, client):
    """Stopping twice does no harm; the record tells why it ended."""
    assert (await sandbox.stop()).cause == "deleted"
    assert (await sandbox.stop()).state == "stopped"
    assert sandbox.is_terminal


async def test_stopping_what_is_forgotten_does_no_harm(server, sandbox):
    """After the retention time nothing is known of it; it is gone all the same."""
    server.sandboxes.clear()
    await sandbox.stop()
    with pytest.raises(NotFound):
        await sandbox.refresh()


async def test_a_block_ends_its_sandbox(server, client, args):
    """Also when the block fails or is cancelled."""
    with pytest.raises(ValueError, match="mine"):
        async with await client.run_container(args):
            raise ValueError("mine")
    assert server.live() == []


async def test_find_by_label_job_state_and_id(server, client):
    """Another process finds what this one made."""
    args = DSecContainerRunArgs(container_image="debian:bookworm", labels={"k": "a=b&c"}, job="j")
    made = await client.run_container(args)
    await client.run_container(DSecContainerRunArgs(container_image="debian:bookworm", labels={"k": "x"}))
    async with server.client() as other:
        assert [one.id for one in await other.list(labels={"k": "a=b&c"}, job="j", states=["running"])] == [made.id]
        assert (await other.get(made.id)).info.labels == {"k": "a=b&c"}
        assert await other.stop_job("j") == 1
        assert [one.id for one in await other.list(states=["stopped", "failed"])] == [made.id]
        with pytest.raises(NotFound):
            await other.get("fake-aaaaaaaaaaaa")


async def test_calls_of_later_issues_are_refused_with_a_type(sandbox):
    """Nothing pretends to work."""
    for call in (sandbox.pause, sandbox.resume, sandbox.fork, lambda: sandbox.pack_diff("a:b")):
        with pytest.raises(UnsupportedCapability):
            await call()
    with pytest.raises(UnsupportedCapability):
        await sandbox.set_network_rules({"pypi": True})
    await sandbox.set_network_rules({"npm": False})


async def test_metrics(sandbox):
    """Resource use comes as a record."""
    assert (await sandbox.metrics()).pids == 1
