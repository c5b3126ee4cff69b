"""Sound of any rate, format and channels, piece by piece, to what models hear: mono, 16 kHz by default, float32."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from adapters.sound import mono
from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Audio, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import numpy as np
    import numpy.typing as npt

    from omni_bus.engine import Inputs
    from omni_bus.wire.payloads import Payload

    Samples = npt.NDArray[np.float32]

RATE_HZ = 16_000

MIN_RATE_HZ, MAX_RATE_HZ = 4_000, 768_000
"""Of what comes in. Of a rate of 1 Hz each sample would become 16,000."""

INSTALL_SOXR = "pip install 'soxr>=1.1'"

_LARGE_BYTES = 256 * 1024
"""A larger piece (1.4 s at 48 kHz, stereo) is converted on a thread."""


class SpeechInput:
    """One request's sound; the resampler's state is carried over from piece to piece, so that cuts are not heard."""

    def __init__(self, rate_hz: int = RATE_HZ) -> None:
        self._rate_hz = rate_hz
        self._shape: tuple[int, int, str] | None = None
        self._resampler: Any = None

    def feed(self, payload: Payload) -> Samples:
        """Return the samples that a piece completes, in [-1, 1].

        Raises:
            BadInput: no sound, another shape than the piece before, a rate that is not allowed, numbers that are none.
        """
        import numpy as np

        if not isinstance(payload, Audio):
            raise BadInput(f"audio: {kind_of(payload)} came (allowed: audio)", field="audio")
        self._begin(payload)
        samples = mono(payload)
        if not np.isfinite(samples).all():
            raise BadInput("audio: samples came that are no numbers (allowed: from -1 to 1)", field="audio")
        return samples if self._resampler is None else self._resampler.resample_chunk(samples)

    def end(self) -> Samples:
        """Return what the resampler still holds."""
        import numpy as np

        none = np.zeros(0, np.float32)
        return none if self._resampler is None else self._resampler.resample_chunk(none, last=True)

    def _begin(self, audio: Audio) -> None:
        shape = (audio.rate_hz, audio.channels, audio.format)
        if self._shape is None:
            if not MIN_RATE_HZ <= audio.rate_hz <= MAX_RATE_HZ:
                allowed = f"{MIN_RATE_HZ} to {MAX_RATE_HZ}"
                raise BadInput(f"audio: a rate of {audio.rate_hz} Hz came (allowed: {allowed})", field="audio")
            self._shape = shape
            if audio.rate_hz != self._rate_hz:
                import soxr

                self._resampler = soxr.ResampleStream(audio.rate_hz, self._rate_hz, 1, dtype="float32")
        elif shape != self._shape:
            raise BadInput(
                f"audio: {audio.channels} channels at {audio.rate_hz} Hz as {audio.format} came after {self._shape[1]} "
                f"at {self._shape[0]} Hz as {self._shape[2]} (allowed: one of them in a request)",
                field="audio",
            )


async def speech_of(inputs: Inputs) -> AsyncGenerator[Samples, None]:
    """Yield the samples of the port ``audio`` as they come; see `SpeechInput`."""
    speech = SpeechInput()
    async for payload in inputs.port("audio"):
        if isinstance(payload, Audio) and len(payload.data) > _LARGE_BYTES:
            yield await asyncio.to_thread(speech.feed, payload)
        else:
            yield speech.feed(payload)
    yield speech.end()
