"""One text that is spoken: from what the bus sends of it to bytes that clients know, as they come."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from gateways.fan_out import run_all
from gateways.openai_refusals import renamed
from gateways.openai_speech_body import calls
from gateways.problems import Problem
from omni_bus.client import End, Item
from omni_bus.errors import BadInput
from omni_bus.media.encoder import StreamEncoder
from omni_bus.media.sound import slices
from omni_bus.wire.frames import Usage
from omni_bus.wire.payloads import Audio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from gateways.http import Terms
    from gateways.openai_speech_body import Speech
    from omni_bus.client import BusClient
    from omni_bus.media.encode import EncodingPool


class Utterance:
    """One text that is spoken.

    Args:
        client: the bus.
        pool: threads for encoding.
        speech: what is to be said, and how.
        reference: the sound of the voice, where `speech` names one.
        max_bytes: limit of a file that is read when it is complete, and so has its sizes in its head; None for bytes
            that are read as they come.

    Raises:
        BadInput: the format needs what is not installed.
    """

    def __init__(
        self,
        client: BusClient,
        pool: EncodingPool,
        speech: Speech,
        reference: Audio | None = None,
        *,
        max_bytes: int | None = None,
    ) -> None:
        self._client = client
        self._pool = pool
        self._speech = speech
        self._reference = reference
        self._max_bytes = max_bytes
        self._usage = Usage()
        self._num_frames = 0
        self._encoder = StreamEncoder(
            speech.format,
            rate_hz=speech.sample_rate or 0,
            speed=speech.speed,
            is_whole=max_bytes is not None,
            field="response_format",
        )

    async def pieces(self, terms: Terms) -> AsyncGenerator[bytes, None]:
        """Yield the bytes as they are ready; to ask for more is what lets more be spoken.

        Close the generator (`contextlib.aclosing`): that cancels what still runs.

        Raises:
            BadInput: a field that the stage refuses, under the body's name for it; or a text in which nothing can be
                spoken.
            Problem: 400, the file is larger than `max_bytes`.
            OmniBusError: what the request on the bus ended with.
        """
        try:
            async with aclosing(run_all(self._client, calls(self._speech, self._reference), terms)) as events:
                async for _, event in events:
                    match event:
                        case Item(payload=Audio() as sound):
                            # In slices, as a slow speed and a high rate can make a hundred times as much of it.
                            for piece in slices(sound, sound.rate_hz) if sound.num_frames else ():
                                self._num_frames += piece.num_frames
                                data = await self._pool.feed(self._encoder, piece)
                                self._check_size()
                                if data:
                                    yield data
                        case End(finish=finish):
                            self._usage = finish.usage
                        case _:
                            pass
            if not self._num_frames:
                raise BadInput("input: there is nothing to speak in it (allowed: words or numbers)", field="input")
        except BadInput as error:
            raise renamed(error, self._speech.pipeline, self._speech.names) from error
        if data := await self._pool.finish(self._encoder):
            yield data

    async def collect(self, terms: Terms) -> bytes:
        """Return all of the bytes; see `pieces`."""
        async with aclosing(self.pieces(terms)) as pieces:
            return b"".join([data async for data in pieces])

    def _check_size(self) -> None:
        if self._max_bytes is not None and self._encoder.num_bytes > self._max_bytes:
            message = f"the answer is longer than {self._max_bytes} bytes (allowed then: stream_format = 'audio')"
            raise Problem(400, message, param="stream_format")

    @property
    def rate_hz(self) -> int:
        """Samples of each channel in a second; known with the first bytes."""
        return self._encoder.rate_hz

    @property
    def channels(self) -> int:
        """Channels; known with the first bytes."""
        return self._encoder.channels

    @property
    def usage(self) -> dict[str, Any]:
        """What it came to: tokens where the stage counts them; without, the characters of the text, and none made."""
        num_in = self._usage.prompt_tokens or self._speech.num_text_tokens
        num_out = self._usage.completion_tokens
        return {
            "input_tokens": num_in,
            "output_tokens": num_out,
            "total_tokens": num_in + num_out,
            "input_token_details": {"text_tokens": num_in, "audio_tokens": 0},
        }
