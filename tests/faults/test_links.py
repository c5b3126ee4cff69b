"""Faults on each link of a pipeline of two stages: every request ends, nothing stays taken, the next one is right.

A link is one direction between two actors. Right is checked word by word and sample by sample. A request that lost what
nobody can notice (its last credit, say) ends by its time limit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from actors.testing import Running, running
from adapters.synthetic_marks import TextMark, read_ramp, read_text
from omni_bus.bus.faulty import Fault, Faults, Shares
from omni_bus.client import End, Item
from omni_bus.errors import OmniBusError
from omni_bus.wire.payloads import Audio, Json, Text

if TYPE_CHECKING:
    from omni_bus.client import BusClient

NUM_TOKENS = 8
SAMPLES_PER_CHARACTER = 24
NUM_REQUESTS = 20
TIMEOUT_S = 1.0
"""Where something is lost."""

LOSES_NOTHING = {Fault.DELAY, Fault.DUPLICATE, Fault.HOLD}
TOML = f"""
[stages.llm]
adapter = "synthetic-text"
tokens = {NUM_TOKENS}
step_time_s = 0.002
max_num_seqs = 8
max_resident = 8

[stages.voice]
adapter = "synthetic-speech"
samples_per_character = {SAMPLES_PER_CHARACTER}
chunk_bytes = 256
max_num_seqs = 8

[pipelines.voice]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio"]
window_chunks = 3

[gateways.openai]
port = 0
"""

GATEWAY = "gateway.openai.0"
LINKS = [
    (source, target)
    for source in ("coordinator", "llm.0", "voice.0", GATEWAY)
    for target in ("coordinator", "llm.0", "voice.0", GATEWAY)
    if source != target
]
SHARES = {
    Fault.DROP: Shares(drop=0.2),
    Fault.DUPLICATE: Shares(duplicate=0.3),
    Fault.CORRUPT: Shares(corrupt=0.2),
    Fault.ALTER: Shares(alter=0.3),
    Fault.DELAY: Shares(delay=0.7),
}


async def ask(client: BusClient, marker: str, timeout_s: float | None, *, leaves_after: int | None = None) -> str:
    """Run one request.

    Returns:
        ``right``, ``wrong`` if it ended well, but not with its own words and all samples of them, ``left`` if it was
        given up, or the code of the error that it ended with.
    """
    texts: list[str] = []
    sound = bytearray()
    ended: set[str] = set()
    num_events = 0
    try:
        async with await client.submit("voice", timeout_s=timeout_s) as call:
            await call.send("messages", Json({"marker": marker}))
            call.finish("messages")
            async for event in call:
                match event:
                    case Item(payload=Text(text=text)):
                        texts.append(text)
                    case Item(payload=Audio(data=data)):
                        sound += data.view
                    case End(port=port):
                        ended.add(port)
                    case _:
                        return "wrong"
                num_events += 1
                if num_events == leaves_after:
                    return "left"
    except OmniBusError as error:
        return error.code
    return "right" if ended == {"text", "audio"} and is_right(marker, "".join(texts), bytes(sound)) else "wrong"


def is_right(marker: str, text: str, sound: bytes) -> bool:
    """Whether an answer is the request's own, whole and unchanged."""
    try:
        words, ramp = read_text(text), read_ramp(sound)
    except ValueError:
        return False
    is_whole = ramp.is_unbroken and ramp.first == 0 and ramp.num_samples == SAMPLES_PER_CHARACTER * len(text)
    return words == [TextMark(marker, number) for number in range(NUM_TOKENS)] and is_whole


async def until_free(deployment: Running) -> None:
    """Ask every actor, round trip by round trip, until none holds anything of a request."""
    client = deployment.gateway.client
    while True:
        status = await client.admin("status")
        rows = await client.admin("health")
        stats = [row["stats"] for row in rows if row["role"] == "stage" and row["is_live"]]
        held = [stat["active"] + stat["waiting"] + stat["suspended"] + stat["buffered_bytes"] for stat in stats]
        in_flight = sum(counts["in_flight"] + counts["queued"] for counts in status["pipelines"].values())
        if len(stats) == len(deployment.stages) and not any((*held, in_flight, status["requests"]["live"])):
            return


async def suffer(link: tuple[str, str], fault: Fault, seed: int = 0) -> Counter[str]:
    """Load a deployment while one of its links fails; return how the requests ended."""
    faults = Faults(seed)
    timeout_s = None if fault in LOSES_NOTHING else TIMEOUT_S
    ends: Counter[str] = Counter()
    async with running(TOML, faults=faults) as deployment:
        client = deployment.gateway.client
        if fault in SHARES:
            faults.set(*link, SHARES[fault])
        else:
            faults.partition(*link, holds=fault is Fault.HOLD)
        while not faults.counts[fault]:  # some links carry only a few frames of a request, if any
            requests = [
                asyncio.create_task(ask(client, f"m{i}", timeout_s, leaves_after=i % 7 + 1 if i % 4 == 0 else None))
                for i in range(NUM_REQUESTS)
            ]
            if fault is Fault.HOLD:
                await faults.until_struck(5)
                faults.heal()
            ends.update(await asyncio.gather(*requests))
        faults.heal()
        await until_free(deployment)
        assert await ask(client, "next", None) == "right"
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("fault", Fault)
async def test_every_request_ends_whatever_a_link_does(fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(suffer(link, fault)) for link in LINKS]

    ends = set().union(*[run.result() for run in runs])
    if fault in {Fault.DELAY, Fault.HOLD}:
        assert ends == {"right", "left"}
    elif fault is Fault.DUPLICATE:
        assert ends == {"right", "left", "bad_frame"}
    elif fault is not Fault.ALTER:  # no protocol can tell a changed word from a right one
        assert ends <= {"right", "left", "bad_frame", "link_broken", "deadline_exceeded"}
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
