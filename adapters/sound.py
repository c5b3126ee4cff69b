"""Sound between payloads and the arrays that models take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.wire.payloads import Audio, Blob

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Waveform = npt.NDArray[np.float32]


def mono(sound: Audio) -> Waveform:
    """Return the mean of a sound's channels: (samples,), float32 in [-1, 1]."""
    import numpy as np

    if sound.format == "s16":
        samples = np.frombuffer(sound.data.view, "<i2").astype(np.float32) / 32768.0
    else:
        samples = np.frombuffer(sound.data.view, "<f4").astype(np.float32)
    return samples.reshape(-1, sound.channels).mean(axis=1, dtype=np.float32)


def resampled(samples: Waveform, from_hz: int, to_hz: int) -> Waveform:
    """Return a whole sound at another rate."""
    import soxr

    return samples if from_hz == to_hz else soxr.resample(samples, from_hz, to_hz)


def pcm16(samples: Waveform, rate_hz: int) -> Audio:
    """Return samples, clipped to [-1, 1], as s16; (samples,) or (samples, channels)."""
    import numpy as np

    channels = 1 if samples.ndim == 1 else samples.shape[1]
    pcm = (np.clip(samples, -1.0, 1.0) * 32767.0).round().astype("<i2")
    return Audio(rate_hz, channels, "s16", Blob(pcm.tobytes()))
