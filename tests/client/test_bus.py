"""The bus as a program uses it, against a coordinator and stages on the same loop."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from actors.coordinator import CoordinatorActor
from actors.stage import StageActor
from adapters import ADAPTERS
from omni_bus.client import BusClient, End, Item
from omni_bus.config.graph import WINDOWS
from omni_bus.config.load import load
from omni_bus.errors import (
    BadFrame,
    BadInput,
    DeadlineExceeded,
    InputTooLarge,
    OmniBusError,
    Overloaded,
    RequestCancelled,
    StageFailed,
    StageLost,
    Unavailable,
    UnknownName,
)
from omni_bus.registry import ADAPTER_GROUP, load_class
from omni_bus.runtime.deployment import Deployment
from omni_bus.wire.payloads import MAX_IN_HEADER_BYTES, Json, Text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from omni_bus.client import RequestEvent

TOML = """
name = "test"
heartbeat_s = 0.2

[stages.llm]
adapter = "synthetic-text"
tokens = 4
max_num_seqs = 64
max_resident = 128
step_timeout_s = 3

[pipelines.text]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
max_in_flight = 64
max_queued = 200

[pipelines.narrow]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
max_in_flight = 1
max_queued = 1
window_chunks = 2
"""


class Bus:
    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.coordinator = CoordinatorActor(deployment)
        self.stage = StageActor(deployment, "llm", 0)
        self.clients: list[BusClient] = []

    async def client(self, name: str) -> BusClient:
        endpoint = self.deployment.coordinator_endpoint
        client = await BusClient.connect(name, self.deployment.listen(name), endpoint, timeout_s=20)
        self.clients.append(client)
        return client

    async def stage_is_ready(self, client: BusClient) -> None:
        """Ask until the coordinator has heard it; each answer takes a round trip."""
        while not any(actor["is_ready"] for actor in await client.admin("health")):
            pass

    async def restart_coordinator(self) -> None:
        await self.coordinator.close()
        self.coordinator = CoordinatorActor(self.deployment)

    async def is_at_rest(self) -> None:
        """Wait until the stage holds nothing: the client's own frames go the same way as what they cause."""
        while self.stage.stats.active or self.stage.stats.waiting:
            await self.clients[0].admin("health")

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.stage.close()
        await self.coordinator.close()


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    directory = Path(tempfile.mkdtemp(prefix="ob", dir="/tmp"))
    (directory / "test.toml").write_text(TOML)
    loaded = load(
        directory / "test.toml",
        [],
        environ={},
        platform="cpu",
        adapter_class=lambda name: load_class("adapter", name, ADAPTERS, ADAPTER_GROUP),
        gateway_class=lambda name: object,
    )
    bus = Bus(
        Deployment(
            config=loaded.config,
            pipelines=loaded.pipelines,
            run_dir=str(directory),
            cache_dir=str(directory),
            threads={"llm": 1},
            served={},
            coordinator_endpoint=f"ipc://{directory}/coordinator.sock",
        )
    )
    await bus.stage.load()
    yield bus
    await bus.close()
    left = os.listdir(directory)
    shutil.rmtree(directory)
    assert left == ["test.toml"], "sockets are left"


@pytest.fixture
async def client(bus: Bus) -> BusClient:
    client = await bus.client("client")
    await bus.stage_is_ready(client)
    return client


PROMPT = Json({"messages": [{"role": "user", "content": "hi"}]})


async def ask(client: BusClient, pipeline: str = "text", timeout_s: float | None = None, **params):
    request = await client.submit(pipeline, (), {"llm": params}, timeout_s=timeout_s)
    await request.send("messages", PROMPT)
    request.finish("messages")
    return request


async def words_of(request) -> list[str]:
    text = ""
    async for event in request:
        if isinstance(event, Item):
            assert isinstance(event.payload, Text)
            text += event.payload.text
    return text.split()


async def test_request_gives_items_and_an_end(client: BusClient) -> None:
    async with await ask(client) as request:
        events = [event async for event in request]

    assert [type(event) for event in events] == [Item, Item, Item, Item, End]
    assert isinstance(events[-1], End)
    assert events[-1].finish.usage.completion_tokens == 4
    assert request.is_over
    assert client.requests == {}


async def test_hundreds_of_requests_at_once_all_end_right(client: BusClient) -> None:
    async def one(i: int) -> list[str]:
        return await words_of(await ask(client, tokens=1 + i % 7))

    answers = await asyncio.gather(*[one(i) for i in range(200)])

    assert answers == [[f"hi:{k}" for k in range(1 + i % 7)] for i in range(200)]
    assert client.requests == {}


async def test_slow_reader_holds_a_window_and_slows_nobody(bus: Bus, client: BusClient) -> None:
    slow = await ask(client, tokens=100_000, chunk_bytes=1000)
    assert isinstance(await anext(slow), Item)

    # While it is not read, others come and go until the stage has suspended it.
    while not bus.stage.stats.suspended:
        assert len(await words_of(await ask(client, tokens=5))) == 5
    assert len(slow._events) <= WINDOWS["text"]
    assert bus.stage.stats.buffered_bytes < 10_000

    slow.cancel()
    await bus.is_at_rest()


async def test_each_takes_every_event_in_order_whether_or_not_it_waits(client: BusClient) -> None:
    taken: list[RequestEvent] = []
    declined: list[RequestEvent] = []
    waiting: list[RequestEvent] = []

    def take_now(event: RequestEvent) -> bool:
        assert not waiting, "an event came while another was taken"
        if len(taken) % 3 == 1 and (not declined or declined[-1] is not taken[-1]):
            return False
        taken.append(event)
        return True

    async def take(event: RequestEvent) -> None:
        waiting.append(event)
        await client.admin("health")  # others come meanwhile, as far as the window of two goes
        taken.append(waiting.pop())
        declined.append(event)

    async with await ask(client, "narrow", tokens=100) as request:
        await request.each(take_now, take)

    texts = [event.payload.text for event in taken if isinstance(event, Item) and isinstance(event.payload, Text)]
    assert "".join(texts).split() == [f"hi:{i}" for i in range(100)]
    assert isinstance(taken[-1], End)
    assert len(taken) == 101
    assert len(declined) > 20


async def test_each_gives_no_credit_for_what_is_not_taken(bus: Bus, client: BusClient) -> None:
    may_go_on = asyncio.Event()
    num_taken = 0

    async def take(event: RequestEvent) -> None:
        nonlocal num_taken
        num_taken += 1
        await may_go_on.wait()

    async with await ask(client, "narrow", tokens=50) as request:
        reading = asyncio.create_task(request.each(lambda _: False, take))
        while not bus.stage.stats.suspended:
            await client.admin("health")
        assert num_taken == 1
        assert len(request._events) <= 2

        may_go_on.set()
        await reading
    assert num_taken == 51


async def test_what_is_raised_where_an_event_is_taken_comes_out_of_each(bus: Bus, client: BusClient) -> None:
    def take_now(event: RequestEvent) -> bool:
        if isinstance(event, Item) and "hi:3" in getattr(event.payload, "text", ""):
            raise ConnectionResetError("the reader is gone")
        return True

    async def take(event: RequestEvent) -> None:
        raise AssertionError(f"{event} needed no waiting")

    with pytest.raises(ConnectionResetError, match="the reader is gone"):
        async with await ask(client, tokens=100_000) as request:
            await request.each(take_now, take)
    await bus.is_at_rest()
    assert client.requests == {}


async def test_each_ends_with_the_error_of_its_request(client: BusClient) -> None:
    async def take(event: RequestEvent) -> None:
        raise AssertionError(f"{event} needed no waiting")

    request = await ask(client, tokens=100, fail_at_step=20)
    with pytest.raises(StageFailed):
        await request.each(lambda _: True, take)


async def test_cancel_ends_reading_at_once(bus: Bus, client: BusClient) -> None:
    request = await ask(client, tokens=100_000)
    await anext(request)

    request.cancel("enough")

    with pytest.raises(RequestCancelled, match="enough"):
        await words_of(request)
    await bus.is_at_rest()
    assert len(await words_of(await ask(client))) == 4


async def test_leaving_the_block_cancels(bus: Bus, client: BusClient) -> None:
    async with await ask(client, tokens=100_000) as request:
        await anext(request)

    await bus.is_at_rest()
    assert bus.stage.stats.cancelled == 1


async def test_giving_up_the_queue_frees_the_place(bus: Bus, client: BusClient) -> None:
    running = await ask(client, "narrow", tokens=100_000)
    waiting = asyncio.create_task(ask(client, "narrow"))
    while (await client.admin("status"))["pipelines"]["narrow"]["queued"] == 0:
        pass
    with pytest.raises(Overloaded):
        await ask(client, "narrow")

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    next_one = asyncio.create_task(ask(client, "narrow"))
    while (await client.admin("status"))["pipelines"]["narrow"]["queued"] == 0:
        pass
    running.cancel()
    assert len(await words_of(await next_one)) == 4
    await bus.is_at_rest()


async def test_cancel_by_somebody_else_is_no_cancellation_of_the_waiter(client: BusClient) -> None:
    """A task that waits for admission and was not cancelled itself gets an error, not `CancelledError`."""
    running = await ask(client, "narrow", tokens=100_000)
    waiting = asyncio.create_task(ask(client, "narrow"))
    while (await client.admin("status"))["pipelines"]["narrow"]["queued"] == 0:
        pass
    (queued,) = [request for request in client.requests.values() if request is not running]

    queued.cancel("the server is stopping")

    with pytest.raises(RequestCancelled, match="the server is stopping"):
        await waiting
    running.cancel()


async def test_closing_ends_what_waits(bus: Bus, client: BusClient) -> None:
    other = await bus.client("other")
    running = await ask(other, tokens=100_000)
    await anext(running)
    reading = asyncio.create_task(words_of(running))
    asking = asyncio.create_task(other.admin("nothing answers this after the close"))
    await asyncio.sleep(0)

    await other.close()

    with pytest.raises(RequestCancelled):
        await reading
    with pytest.raises((Unavailable, UnknownName)):
        await asking
    await bus.is_at_rest()


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"fail_at_step": 2}, StageFailed),
        ({"tokens": 0}, BadInput),
        ({"no_such": 1}, BadInput),
    ],
)
async def test_errors_come_back_typed(client: BusClient, params: dict, error: type[OmniBusError]) -> None:
    with pytest.raises(error):
        await words_of(await ask(client, **params))


async def test_deadline_ends_a_request(bus: Bus, client: BusClient) -> None:
    with pytest.raises(DeadlineExceeded):
        await words_of(await ask(client, timeout_s=0.05, tokens=100_000))
    await bus.is_at_rest()


@pytest.mark.parametrize("is_admitted", [False, True])
async def test_deadline_ends_a_request_without_a_coordinator(
    bus: Bus, client: BusClient, monkeypatch: pytest.MonkeyPatch, *, is_admitted: bool
) -> None:
    monkeypatch.setattr("omni_bus.client.bus.OVERDUE_S", 0.0)
    request = await ask(client, timeout_s=0.05, tokens=100_000) if is_admitted else None
    await bus.coordinator.close()

    with pytest.raises(DeadlineExceeded):
        await (words_of(request) if request is not None else client.submit("text", timeout_s=0.05))

    assert client.requests == {}


async def test_unknown_names_are_refused(client: BusClient) -> None:
    with pytest.raises(UnknownName, match="unknown pipeline 'txt'"):
        await client.submit("txt")
    with pytest.raises(UnknownName, match="unknown output 'audio'"):
        await client.submit("text", ["audio"])
    with pytest.raises(UnknownName, match="unknown operation"):
        await client.admin("explode")
    request = await client.submit("text")
    with pytest.raises(UnknownName, match="unknown input 'prompt'"):
        await request.send("prompt", PROMPT)
    request.cancel()


async def test_input_without_a_form_on_the_wire_is_refused(client: BusClient) -> None:
    """By the name of its port, before anything of it is sent: the request goes on without it."""
    request = await client.submit("text")

    with pytest.raises(BadInput, match="messages: the json can't be encoded"):
        await request.send("messages", Json({"messages": "\ud800"}))
    with pytest.raises(InputTooLarge, match="messages: json of 15728") as caught:
        await request.send("messages", Json({"messages": "x" * MAX_IN_HEADER_BYTES}))

    assert caught.value.field == "messages"
    await request.send("messages", PROMPT)
    request.finish("messages")
    assert len(await words_of(request)) == 4


async def test_parameters_without_a_form_on_the_wire_end_their_request(client: BusClient) -> None:
    with pytest.raises(BadFrame, match="Open can't be encoded"):
        await words_of(await ask(client, seed=10**30))
    assert len(await words_of(await ask(client))) == 4


async def test_unknown_parameter_is_refused_by_name(client: BusClient) -> None:
    with pytest.raises(UnknownName, match="unknown parameter 'tokns'; did you mean 'tokens'") as caught:
        await words_of(await ask(client, tokns=4))
    assert caught.value.field == "tokns"


async def test_lost_coordinator_leaves_streams_alone(bus: Bus, client: BusClient) -> None:
    running = await ask(client, tokens=100_000)
    await anext(running)
    await bus.coordinator.close()
    lost = asyncio.create_task(client.submit("text"))
    await asyncio.sleep(0)

    bus.coordinator = CoordinatorActor(bus.deployment, ["llm.0"])

    async with await lost as late:  # which nobody had heard of
        assert late.route.stages.keys() == {"llm"}
    for _ in range(100):
        assert isinstance(await anext(running), Item)
    running.cancel()
    await bus.stage_is_ready(client)
    await bus.is_at_rest()
    assert len(await words_of(await ask(client))) == 4


async def test_silent_coordinator_is_not_waited_for(bus: Bus, client: BusClient) -> None:
    running = await ask(client, tokens=100_000)
    await anext(running)
    await bus.coordinator.close()

    with pytest.raises(Unavailable, match="the coordinator does not answer"):
        await client.submit("text")
    with pytest.raises(Unavailable, match="the coordinator does not answer"):
        await client.admin("status")

    assert isinstance(await anext(running), Item)
    running.cancel()
    bus.coordinator = CoordinatorActor(bus.deployment)
    await bus.stage_is_ready(await bus.client("another"))
    await bus.is_at_rest()


async def test_replica_that_is_lost_before_any_output_is_replaced_unnoticed(bus: Bus, client: BusClient) -> None:
    begun = await ask(client, tokens=100_000)
    await anext(begun)
    quiet = await client.submit("text")
    first = quiet.route
    await quiet.send("messages", PROMPT)

    await bus.stage.close()
    with pytest.raises(StageLost) as lost:
        await words_of(begun)
    assert (lost.value.stage, lost.value.is_retry_safe) == ("llm", True)
    bus.stage = StageActor(bus.deployment, "llm", 0)
    await bus.stage.load()
    quiet.finish("messages")

    assert await words_of(quiet) == ["hi:0", "hi:1", "hi:2", "hi:3"]
    assert quiet.route.stages["llm"].incarnation != first.stages["llm"].incarnation
    assert (quiet.route.is_retry, first.is_retry) == (True, False)


async def test_cancel_ends_what_waits_for_a_replica(bus: Bus, client: BusClient) -> None:
    quiet = await client.submit("text")
    await bus.stage.close()
    while (await client.admin("status"))["requests"]["rerouted"] == 0:
        pass

    quiet.cancel()

    while (await client.admin("status"))["requests"]["live"]:
        pass
    bus.stage = StageActor(bus.deployment, "llm", 0)
    await bus.stage.load()
    assert bus.stage.stats.waiting == 0


async def test_stuck_engine_gives_its_replica_up(bus: Bus, client: BusClient) -> None:
    """Nobody restarts it here; its loop still answers, but is not believed."""
    stuck = await ask(client, tokens=9, hang_at_step=3)

    with pytest.raises(StageLost) as lost:
        await words_of(stuck)

    assert lost.value.stage == "llm"
    (row,) = [row for row in await client.admin("health") if row["role"] == "stage"]
    assert (row["is_live"], row["is_ready"], row["phase"]) == (False, False, "lost")
    assert row["reason"].startswith("its engine has made no progress for ")
    with pytest.raises(Unavailable, match=r"llm\.0: lost, its engine has made no progress"):
        await client.submit("text")


async def test_no_coordinator_is_told_in_time(bus: Bus) -> None:
    nowhere = f"ipc://{bus.deployment.run_dir}/nobody.sock"

    with pytest.raises(Unavailable, match="no coordinator answers"):
        await BusClient.connect("lonely", bus.deployment.listen("lonely"), nowhere, timeout_s=0.05)


async def test_stage_output_without_a_form_on_the_wire_fails_its_request(bus: Bus, client: BusClient) -> None:
    """And only that: the stage steps on."""
    engine: Any = bus.stage.engine
    original = engine.step
    spoilt: set[str] = set()

    def step(requests):
        return [
            type(event)(event.request, event.port, Text("\ud800"))
            if getattr(event, "port", None) and event.request in spoilt
            else event
            for event in original(requests)
        ]

    engine.step = step
    good = await ask(client, tokens=50)
    bad = await client.submit("text")
    spoilt.add(bad.id)
    await bad.send("messages", PROMPT)
    bad.finish("messages")

    with pytest.raises(StageFailed, match="stage 'llm' failed: UnicodeEncodeError"):
        await words_of(bad)
    assert len(await words_of(good)) == 50
    await bus.is_at_rest()


async def test_what_only_a_client_can_tell_is_told_again_after_its_connection_broke(bus: Bus) -> None:
    """Another coordinator may be at the other end, and its welcome does not ask for anything."""
    told: list[int] = []
    endpoint = bus.deployment.coordinator_endpoint
    client = await BusClient.connect(
        "teller", bus.deployment.listen("teller"), endpoint, timeout_s=20, on_introduce=lambda: told.append(1)
    )
    bus.clients.append(client)
    assert told == []

    client._on_broken(client._member.coordinator)
    assert told == [1]
    client._on_broken(bus.stage._driver.me)
    assert told == [1]
