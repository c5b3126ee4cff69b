#!/usr/bin/env python3
"""Live sessions on synthetic engines: what a session adds to a turn, and how evenly sound comes with many of them.

- A turn of text through a session, the same through the gateway's WebSocket and our client, and the same request to
  the session's chat pipeline: the time until the first word.
- Many sessions at once, some silent and some that speak and are answered in real time: how late each piece of sound
  comes, against the first and its place in the answer; and the time between the user's word and the last sound sent
  when the user interrupts.

Run: ``python scripts/bench_sessions.py [--quick] [--idle N] [--talking N] [--turns N]``
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import uvloop

import measured
from omni_bus.client import Item, connect_realtime
from omni_bus.client.realtime_events import ResponseDone, SessionUpdated
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.codec import payload_of, server_event
from omni_bus.core.session.items import InputText, Message
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from omni_bus.client import BusClient, Realtime, Request

    Numbers: TypeAlias = dict[str, list[float]]

CONFIG = Path(__file__).parents[1] / "configs" / "synthetic_sessions.toml"
LEAD_MS = 400.0
FRAME_MS = 20
LOUD, QUIET = b"\0\x20" * 24 * FRAME_MS, b"\0\0" * 24 * FRAME_MS
NO_VAD = {"output_modalities": ["text"], "audio": {"input": {"turn_detection": None}}}


class Session:
    """One client's session."""

    def __init__(self, request: Request) -> None:
        self.request = request

    @classmethod
    async def open(cls, client: BusClient, name: str, session: dict[str, Any]) -> Session:
        """Open a session."""
        found = cls(await client.submit("sessions", ["events"], session=name))
        await found.say(asked.SessionOpen(session_id=name, session=session))
        await found.until(said.SessionCreated)
        return found

    async def say(self, event: asked.AnyClientEvent) -> None:
        """Say something."""
        await self.request.send("events", payload_of(event))

    async def hear(self) -> Any:
        """Return the next event."""
        item = await anext(self.request)
        assert isinstance(item, Item)
        return server_event(item.payload)

    async def until(self, kind: Any) -> Any:
        """Return the next event of a kind."""
        while not isinstance(event := await self.hear(), kind):
            assert not isinstance(event, said.ErrorEvent), event
        return event

    async def close(self) -> None:
        """End it."""
        await self.say(asked.SessionClose())
        async for _ in self.request:
            pass


async def first_word_of_session(session: Session) -> float:
    """Return the seconds from the wish for an answer to its first word."""
    await session.say(asked.ItemCreate(item=Message(role="user", content=(InputText("hi"),))))
    begun = time.perf_counter()
    await session.say(asked.ResponseCreate())
    await session.until(said.TextDelta)
    seconds = time.perf_counter() - begun
    await session.until(said.ResponseDone)
    return seconds


async def first_word_of_socket(live: Realtime) -> float:
    """Return the seconds from the wish for an answer to its first word, over a WebSocket."""
    await live.write("hi")
    begun = time.perf_counter()
    await live.respond()
    await live.until(said.TextDelta)
    seconds = time.perf_counter() - begun
    await live.until(ResponseDone)
    return seconds


async def first_word_of_pipeline(client: BusClient) -> float:
    """Return the seconds from the request to the first word."""
    begun = time.perf_counter()
    request = await client.submit("voice", ["text"])
    await request.send("messages", Json({"messages": [{"role": "user", "content": "hi"}]}))
    request.finish("messages")
    async with request:
        await anext(request)
        seconds = time.perf_counter() - begun
        async for _ in request:
            pass
    return seconds


async def measure_turns(client: BusClient, url: str, num_turns: int) -> Numbers:
    """Take turns, so that all meet the same machine."""
    session = await Session.open(client, "turns", NO_VAD)
    found: Numbers = {"WebSocket": [], "session": [], "pipeline": []}
    async with connect_realtime(url, session=NO_VAD) as live:
        await live.until(SessionUpdated)
        for _ in range(num_turns):
            found["WebSocket"].append(await first_word_of_socket(live))
            found["session"].append(await first_word_of_session(session))
            found["pipeline"].append(await first_word_of_pipeline(client))
    await session.close()
    return found


async def speak(session: Session, parts: list[tuple[bytes, int]]) -> float:
    """Speak in real time; return when the first sound of the last part went out."""
    begun = asyncio.get_running_loop().time()
    num_frames, last = 0, 0.0
    for pattern, length_ms in parts:
        last = time.perf_counter()
        for _ in range(length_ms // FRAME_MS):
            await session.say(asked.AudioAppend(audio=pattern))
            num_frames += 1
            await asyncio.sleep(max(0.0, begun + num_frames * FRAME_MS / 1000 - asyncio.get_running_loop().time()))
    return last


async def talk(session: Session, seconds: float, late_ms: list[float], interrupted_ms: list[float]) -> None:
    """Ask, listen to the answer for a while, interrupt; note how late each piece came."""
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        speaking = asyncio.create_task(speak(session, [(LOUD, 400), (QUIET, 1200)]))
        first = await session.until(said.AudioDelta)
        begun = time.perf_counter() - first.start_ms / 1000
        heard_until = time.perf_counter() + 1.5
        while time.perf_counter() < heard_until:
            event = await session.hear()
            if isinstance(event, said.AudioDelta) and event.start_ms > 2 * LEAD_MS:  # the lead is there by then
                late_ms.append((time.perf_counter() - begun) * 1000 - (event.start_ms - LEAD_MS))
        await speaking
        interrupting = asyncio.create_task(speak(session, [(LOUD, 300)]))
        started = time.perf_counter()
        last_sound = started
        while not isinstance(event := await session.hear(), said.ResponseDone):
            if isinstance(event, said.AudioDelta):
                last_sound = time.perf_counter()
        interrupted_ms.append((last_sound - started) * 1000)
        await interrupting
        await speak(session, [(QUIET, 700)])
        await session.say(asked.InputCancel())
        await session.until(said.InputCleared)


async def measure_many(client: BusClient, num_idle: int, num_talking: int, seconds: float) -> Numbers:
    """Run them side by side."""
    idle = [await Session.open(client, f"idle{i}", NO_VAD) for i in range(num_idle)]
    talking = [await Session.open(client, f"talking{i}", {}) for i in range(num_talking)]
    found: Numbers = {"late_ms": [], "interrupted_ms": []}

    async def begin(index: int, session: Session) -> None:
        await asyncio.sleep(index / num_talking)  # people don't begin at once
        await talk(session, seconds, found["late_ms"], found["interrupted_ms"])

    await asyncio.gather(*(begin(i, session) for i, session in enumerate(talking)))
    for session in idle + talking:
        await session.close()
    return found


def toml() -> str:
    """Return the shipped configuration, with answers of half a minute and a short lead."""
    text = CONFIG.read_text().replace("tokens = 32", "tokens = 64").replace("step_time_s = 0.005", "")
    text = text.replace("samples_per_character = 480", "pace = 4.0\nsamples_per_character = 480")
    return text.replace('chat = "voice"', f'chat = "voice"\noutput_lead_ms = {LEAD_MS}').replace(
        "port = 8000", "port = 0"
    )


async def measure(deployment: measured.Deployment, args: argparse.Namespace) -> tuple[Numbers, Numbers]:
    """Measure turns, then many sessions at once."""
    async with await deployment.client() as client:
        turns = await measure_turns(client, deployment.ready["gateways"]["openai"], args.turns)
        return turns, await measure_many(client, args.idle, args.talking, args.seconds)


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--idle", type=int, default=100, help="silent sessions (default 100)")
    options.add_argument("--talking", type=int, default=20, help="sessions that speak (default 20)")
    options.add_argument("--seconds", type=float, default=20.0, help="how long they do (default 20)")
    options.add_argument("--turns", type=int, default=200, help="turns of text (default 200)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="a few of each")
    args = options.parse_args()
    if args.quick:
        args.idle, args.talking, args.seconds, args.turns = 3, 2, 1.0, 5
    measured.header()
    with measured.Deployment(toml()) as deployment:
        turns, many = uvloop.run(measure(deployment, args))
    q = measured.quantile
    rows: dict[str, list[float | str]] = {
        f"first word, {name}": [1000 * q(values, 0.5), 1000 * q(values, 0.99)] for name, values in turns.items()
    }
    rows["a piece of sound is late by"] = [q(many["late_ms"], 0.5), q(many["late_ms"], 0.99)]
    rows["speech begins until the last sound"] = [q(many["interrupted_ms"], 0.5), q(many["interrupted_ms"], 0.99)]
    measured.table(f"milliseconds; {args.idle} idle and {args.talking} talking", ("p50", "p99"), rows)
    added_ms = 1000 * (q(turns["session"], 0.5) - q(turns["pipeline"], 0.5))
    num_gaps = sum(late_ms > LEAD_MS for late_ms in many["late_ms"])
    print(f"\nadded by the session to the first word: {added_ms:.2f} ms (aim: < 3)")
    print(f"late by, p99: {q(many['late_ms'], 0.99):.1f} ms (aim: < 40)")
    print(f"pieces that came when they should have been heard: {num_gaps} of {len(many['late_ms'])} (aim: none)")
    print("\nratios")
    measured.ratio("first word, WebSocket / session", q(turns["WebSocket"], 0.5) / q(turns["session"], 0.5))
    measured.ratio("first word, session / pipeline", q(turns["session"], 0.5) / q(turns["pipeline"], 0.5))
    measured.write_json(args.json, {"turns": turns, **many})


if __name__ == "__main__":
    main()
