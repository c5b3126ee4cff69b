"""Sound as live clients send and hear it, piece by piece: PCM of any rate, floats and G.711, to and from mono s16.

G.711 is ITU-T Recommendation G.711 (11/88): eight bits a sample, 13 (A-law) or 14 (mu-law) of them before.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias

from omni_bus.media.sound import Resampler, Shaper, floats_of, s16_of
from omni_bus.wire.payloads import Audio, Blob

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Encoding: TypeAlias = Literal["audio/pcm", "audio/pcm_f32le", "audio/pcmu", "audio/pcma"]
"""Media types of raw sound: s16 and float32 little-endian, mu-law, A-law."""

SAMPLE_BYTES: dict[Encoding, int] = {"audio/pcm": 2, "audio/pcm_f32le": 4, "audio/pcmu": 1, "audio/pcma": 1}


class Ear:
    """From a client's sound to s16 of one channel at another rate; pieces need not end with a whole sample.

    Args:
        encoding: of what comes.
        in_hz: its rate.
        out_hz: the rate that is wanted.
    """

    def __init__(self, encoding: Encoding, in_hz: int, out_hz: int) -> None:
        self._encoding: Encoding = encoding
        self._in_hz = in_hz
        self._rest = b""
        self._resampler = Resampler(in_hz, out_hz, 1) if in_hz != out_hz else None

    def feed(self, data: bytes) -> bytes:
        """Return the samples that are ready."""
        data = self._rest + data
        whole = len(data) - len(data) % SAMPLE_BYTES[self._encoding]
        data, self._rest = data[:whole], data[whole:]
        if self._encoding == "audio/pcm" and self._resampler is None:
            return data
        audio = self._decoded(data)
        samples = floats_of(audio)
        return s16_of(samples if self._resampler is None else self._resampler.feed(samples))

    def finish(self) -> bytes:
        """Return the rest."""
        return b"" if self._resampler is None else s16_of(self._resampler.finish())

    def _decoded(self, data: bytes) -> Audio:
        match self._encoding:
            case "audio/pcm":
                return Audio(self._in_hz, 1, "s16", Blob(data))
            case "audio/pcm_f32le":
                return Audio(self._in_hz, 1, "f32", Blob(data))
            case "audio/pcmu":
                return Audio(self._in_hz, 1, "s16", Blob(s16_of_mu_law(data)))
            case "audio/pcma":
                return Audio(self._in_hz, 1, "s16", Blob(s16_of_a_law(data)))


class Mouth:
    """From sound as a stage makes it to a client's form, one channel.

    Args:
        audio: the first piece, for its form; all others have the same.
        encoding: what is wanted.
        rate_hz: its rate.
    """

    def __init__(self, audio: Audio, encoding: Encoding, rate_hz: int) -> None:
        self._shaper = Shaper(_mono(audio), rate_hz=rate_hz)
        self._encoding: Encoding = encoding

    def feed(self, audio: Audio) -> bytes:
        """Return what is ready.

        Raises:
            ValueError: the sound changed its rate, channels or sample format.
        """
        return self._encoded(self._shaper.feed(_mono(audio)))

    def finish(self) -> bytes:
        """Return the rest."""
        return self._encoded(self._shaper.finish())

    def _encoded(self, s16: bytes) -> bytes:
        match self._encoding:
            case "audio/pcm":
                return s16
            case "audio/pcm_f32le":
                import numpy as np

                return (np.frombuffer(s16, "<i2").astype("<f4") / np.float32(32768)).tobytes()
            case "audio/pcmu":
                return mu_law_of(s16)
            case "audio/pcma":
                return a_law_of(s16)


def _mono(audio: Audio) -> Audio:
    if audio.channels == 1:
        return audio
    import numpy as np

    mean = floats_of(audio).mean(axis=1, dtype=np.float32)
    return Audio(audio.rate_hz, 1, "f32", Blob(mean.astype("<f4").tobytes()))


# --- G.711 --------------------------------------------------------------------------------------------------


def s16_of_mu_law(data: bytes) -> bytes:
    """Decode mu-law."""
    return _decode(data, _mu_law_values())


def s16_of_a_law(data: bytes) -> bytes:
    """Decode A-law."""
    return _decode(data, _a_law_values())


def mu_law_of(s16: bytes) -> bytes:
    """Encode mu-law: the nearest value, the higher of two; silence is 0xFF."""
    return _encode(s16, _mu_law_codes())


def a_law_of(s16: bytes) -> bytes:
    """Encode A-law: the nearest value, the higher of two; silence is 0xD5."""
    return _encode(s16, _a_law_codes())


def _decode(data: bytes, values: npt.NDArray[np.int16]) -> bytes:
    import numpy as np

    return values[np.frombuffer(data, np.uint8)].astype("<i2").tobytes()


def _encode(s16: bytes, codes: npt.NDArray[np.uint8]) -> bytes:
    import numpy as np

    return codes[np.frombuffer(s16, "<i2").astype(np.int32) + 32768].tobytes()


@lru_cache(1)
def _mu_law_values() -> npt.NDArray[np.int16]:
    """Return what each code stands for: table 2a of G.711, scaled from 14 bits to 16."""
    import numpy as np

    code = ~np.arange(256, dtype=np.int32) & 0xFF
    magnitude = (((code & 0x0F) << 3) + 0x84 << ((code & 0x70) >> 4)) - 0x84
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.int16)


@lru_cache(1)
def _a_law_values() -> npt.NDArray[np.int16]:
    """Return what each code stands for: table 1a of G.711, scaled from 13 bits to 16."""
    import numpy as np

    code = np.arange(256, dtype=np.int32) ^ 0x55
    segment = (code & 0x70) >> 4
    step = ((code & 0x0F) << 4) + 8
    magnitude = np.where(segment == 0, step, (step + 0x100) << np.maximum(segment - 1, 0))
    return np.where(code & 0x80, magnitude, -magnitude).astype(np.int16)


@lru_cache(1)
def _mu_law_codes() -> npt.NDArray[np.uint8]:
    return _nearest(_mu_law_values())


@lru_cache(1)
def _a_law_codes() -> npt.NDArray[np.uint8]:
    return _nearest(_a_law_values())


def _nearest(values: npt.NDArray[np.int16]) -> npt.NDArray[np.uint8]:
    """Return the code of each of the 65,536 samples: the one whose value is nearest."""
    import numpy as np

    order = np.argsort(values, kind="stable")
    borders = (values[order][1:].astype(np.int32) + values[order][:-1]) / 2
    return order[np.searchsorted(borders, np.arange(-32768, 32768), side="right")].astype(np.uint8)
