"""Long sound in chunks that a recogniser with a window of 30 seconds reads, cut where nobody speaks.

With a plan (segments of speech, as `silero-vad` finds them) neighbours are put together as long as they fit, and what
lies between chunks is not read at all. Without one, or where a segment is longer than a window, the cut is at the
quietest place of the window's last third.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from adapters.speech_input import RATE_HZ, speech_of
from omni_bus.errors import BadInput, InputTooLarge
from omni_bus.wire.payloads import Json, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from typing import Any

    from adapters.speech_input import Samples
    from omni_bus.engine import Inputs
    from omni_bus.wire.payloads import Payload

WINDOW_S = 30
"""What Whisper looks at (arXiv 2212.04356, 2.2)."""

_WINDOW = WINDOW_S * RATE_HZ
_EARLIEST_CUT = 20 * RATE_HZ
_FRAME = RATE_HZ // 50
_QUIET_FRAMES = 10
"""A cut is in the middle of the quietest fifth of a second."""

MAX_HELD_S = 1800
"""Sound that may wait for the plan to say whether somebody speaks in it: 115 MB."""


class Chunk(msgspec.Struct, frozen=True):
    """A stretch of at most `WINDOW_S` seconds: float32, mono, at 16 kHz."""

    start: int
    """Index of its first sample in the whole sound."""
    samples: Samples

    @property
    def start_s(self) -> float:
        """When it begins."""
        return self.start / RATE_HZ

    @property
    def end_s(self) -> float:
        """When it ends."""
        return (self.start + len(self.samples)) / RATE_HZ


class Chunker:
    """Sound and segments in, chunks out; pure.

    Args:
        has_plan: whether segments will come.
    """

    def __init__(self, *, has_plan: bool) -> None:
        self._has_plan = has_plan
        self._pieces: list[Samples] = []
        self._begin = 0
        self._end = 0
        self._planned: deque[tuple[int, int]] = deque()
        self._plan_end = 0
        self._is_heard = False
        self._is_planned = not has_plan

    @property
    def num_samples(self) -> int:
        """What was heard so far."""
        return self._end

    def hear(self, samples: Samples) -> None:
        """Take sound.

        Raises:
            InputTooLarge: more than `MAX_HELD_S` waits for the plan.
        """
        if len(samples):
            self._pieces.append(samples)
            self._end += len(samples)
        if self._end - self._begin > MAX_HELD_S * RATE_HZ:
            message = f"audio: {MAX_HELD_S} s without speech came (allowed: less)"
            raise InputTooLarge(message, field="audio")

    def end_sound(self) -> None:
        """No more sound comes."""
        self._is_heard = True

    def plan(self, start_s: float, end_s: float) -> None:
        """Take a segment of speech; they come in order.

        Raises:
            BadInput: it begins before the one before has ended, or ends before it begins.
        """
        start, end = round(start_s * RATE_HZ), round(end_s * RATE_HZ)
        if not self._plan_end <= start <= end:
            message = f"segments: {start_s:g} to {end_s:g} s came after {self._plan_end / RATE_HZ:g} s"
            raise BadInput(f"{message} (allowed: later ones, in order)", field="segments")
        self._plan_end = end
        if start < end:
            self._planned.append((start, end))

    def end_plan(self) -> None:
        """No more segments come."""
        self._is_planned = True

    def take(self) -> Chunk | None:
        """Return the next chunk that is certain; None if more must come first, or nothing more will."""
        return self._take_planned() if self._has_plan else self._take_next()

    def _take_next(self) -> Chunk | None:
        held = self._end - self._begin
        if held > _WINDOW:
            return self._cut(self._begin, self._begin + self._quietest(self._begin))
        if self._is_heard and held:
            return self._cut(self._begin, self._end)
        return None

    def _take_planned(self) -> Chunk | None:
        while self._planned:
            start, end = self._planned[0]
            if self._is_heard and start >= self._end:
                self._planned.popleft()  # of sound that is not there: rounding at the end
                continue
            if end - start > _WINDOW:
                return self._take_part(start, end)
            num, end, is_certain = self._fitting(start)
            if not is_certain or (end > self._end and not self._is_heard):
                return None
            for _ in range(num):
                self._planned.popleft()
            return self._cut(start, min(end, self._end))
        if self._is_planned:
            self._drop(self._end)
        return None

    def _fitting(self, start: int) -> tuple[int, int, bool]:
        """Return how many segments fit into a window, where the last of them ends, and whether no other could."""
        end = start
        for num, (_, next_end) in enumerate(self._planned):
            if next_end - start > _WINDOW:
                return num, end, True
            end = next_end
        return len(self._planned), end, self._is_planned

    def _take_part(self, start: int, end: int) -> Chunk | None:
        """Return the first part of a segment that is longer than a window."""
        if self._end < start + _WINDOW:
            if not self._is_heard:
                return None
            self._planned.popleft()
            return self._cut(start, self._end)
        cut = start + self._quietest(start)
        self._planned[0] = (cut, end)
        return self._cut(start, cut)

    def _quietest(self, start: int) -> int:
        """Return how far after `start` to cut."""
        import numpy as np

        samples = self._held(start + _EARLIEST_CUT, start + _WINDOW)
        frames = samples[: len(samples) // _FRAME * _FRAME].reshape(-1, _FRAME)
        energy = np.convolve((frames * frames).sum(axis=1), np.ones(_QUIET_FRAMES), "valid")
        return _EARLIEST_CUT + (int(energy.argmin()) + _QUIET_FRAMES // 2) * _FRAME

    def _cut(self, start: int, end: int) -> Chunk:
        chunk = Chunk(start, self._held(start, end).copy())
        self._drop(end)
        return chunk

    def _held(self, start: int, end: int) -> Samples:
        import numpy as np

        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        return self._pieces[0][start - self._begin : end - self._begin]

    def _drop(self, before: int) -> None:
        if self._pieces:
            self._pieces = [self._held(before, self._end)]
        self._begin = before


class _Segment(msgspec.Struct, frozen=True):
    start: float
    end: float


def read_segment(payload: Payload) -> tuple[float, float]:
    """Return when a segment of the plan begins and ends, in seconds.

    Raises:
        BadInput: it is something else.
    """
    if isinstance(payload, Json):
        try:
            segment = msgspec.convert(payload.value, _Segment)
        except msgspec.ValidationError:
            segment = _Segment(math.nan, math.nan)
        if 0 <= segment.start <= segment.end < math.inf:
            return segment.start, segment.end
    message = f"segments: another {kind_of(payload)} came (allowed: an object with start and end, in seconds)"
    raise BadInput(message, field="segments")


async def chunks_of(inputs: Inputs, *, has_plan: bool) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of a request's ports ``audio`` and, with a plan, ``segments``.

    Both are read while no chunk is certain, whichever has something: whoever sends the same sound here and to the stage
    that makes the plan is never held up by one of the two waiting for the other.

    Raises:
        BadInput: another payload, or a plan out of order.
    """
    chunker = Chunker(has_plan=has_plan)
    if not has_plan:
        async with aclosing(speech_of(inputs)) as speech:
            async for samples in speech:
                chunker.hear(samples)
                while (chunk := chunker.take()) is not None:
                    yield chunk
        chunker.end_sound()
        while (chunk := chunker.take()) is not None:
            yield chunk
        return
    async with aclosing(_both(speech_of(inputs), inputs.port("segments"))) as arrivals:
        async for port, value in arrivals:
            match port, value:
                case "audio", None:
                    chunker.end_sound()
                case "audio", samples:
                    chunker.hear(samples)
                case _, None:
                    chunker.end_plan()
                case _, payload:
                    chunker.plan(*read_segment(payload))
            while (chunk := chunker.take()) is not None:
                yield chunk


async def _both(audio: AsyncIterator[Any], segments: AsyncIterator[Any]) -> AsyncGenerator[tuple[str, Any], None]:
    """Yield what comes from either; None at the end of each."""
    sources = {"audio": audio, "segments": segments}
    waiting = {asyncio.ensure_future(anext(source, None)): port for port, source in sources.items()}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: waiting[task]):
                port = waiting.pop(task)
                value = task.result()
                yield port, value
                if value is not None:
                    waiting[asyncio.ensure_future(anext(sources[port], None))] = port
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
