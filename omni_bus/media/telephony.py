"""Sound as live clients send and hear it, piece by piece: PCM of any rate, floats and G.711, to and from mono s16.

G.711 is ITU-T Recommendation G.711 (11/88): eight bits a sample, 13 (A-law) or 14 (mu-law) of them before.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from omni_bus.media.sound import LAYOUTS, check_same

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from omni_bus.wire.payloads import Audio

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
        self._rest = b""
        self._converter = _Converter(in_hz, out_hz, 1, "flt" if encoding == "audio/pcm_f32le" else "s16")

    def feed(self, data: bytes) -> bytes:
        """Return the samples that are ready: all but those of the last millisecond or two."""
        data = self._rest + data
        whole = len(data) - len(data) % SAMPLE_BYTES[self._encoding]
        data, self._rest = data[:whole], data[whole:]
        if self._encoding == "audio/pcmu":
            data = s16_of_mu_law(data)
        elif self._encoding == "audio/pcma":
            data = s16_of_a_law(data)
        return self._converter.feed(data)

    def finish(self) -> bytes:
        """Return the rest."""
        return self._converter.finish()


class Mouth:
    """From sound as a stage makes it to a client's form, one channel.

    Args:
        audio: the first piece, for its form; all others have the same.
        encoding: what is wanted.
        rate_hz: its rate.
    """

    def __init__(self, audio: Audio, encoding: Encoding, rate_hz: int) -> None:
        self._first = audio
        self._encoding: Encoding = encoding
        self._converter = _Converter(audio.rate_hz, rate_hz, audio.channels, "flt" if audio.format == "f32" else "s16")

    def feed(self, audio: Audio) -> bytes:
        """Return what is ready.

        Raises:
            ValueError: the sound changed its rate, channels or sample format.
        """
        check_same(self._first, audio)
        return self._encoded(self._converter.feed(bytes(audio.data.view)))

    def finish(self) -> bytes:
        """Return the rest."""
        return self._encoded(self._converter.finish())

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


class _Converter:
    """To s16 of one channel at another rate, by FFmpeg's resampler; sound that is so already passes through.

    It holds 1 or 2 ms back, measured. soxr, whose filter is finer, holds back 37 ms (24 to 16 kHz) to 115 ms (8 to 16),
    which a live client would wait for at each turn.
    """

    def __init__(self, in_hz: int, out_hz: int, channels: int, sample_format: Literal["s16", "flt"]) -> None:
        self._in_hz = in_hz
        self._layout = LAYOUTS.get(channels, f"{channels}c")
        self._format = sample_format
        self._frame_bytes = channels * (2 if sample_format == "s16" else 4)
        self._resampler: Any = None
        if (in_hz, channels, sample_format) != (out_hz, 1, "s16"):
            from av import AudioResampler

            self._resampler = AudioResampler(format="s16", layout="mono", rate=out_hz)

    def feed(self, data: bytes) -> bytes:
        """Return what is ready."""
        if self._resampler is None:
            return data
        if not data:
            return b""
        from av import AudioFrame

        frame: Any = AudioFrame(self._format, self._layout, len(data) // self._frame_bytes)
        frame.sample_rate = self._in_hz
        plane = frame.planes[0]
        memoryview(plane).cast("B")[: len(data)] = data  # its memory is aligned, and may be longer
        return self._made(frame)

    def finish(self) -> bytes:
        """Return the rest."""
        return b"" if self._resampler is None else self._made(None)

    def _made(self, frame: Any) -> bytes:
        made = self._resampler.resample(frame)
        return b"".join(bytes(piece.planes[0])[: 2 * piece.samples] for piece in made)


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
