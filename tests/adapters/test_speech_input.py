"""Sound of every shape becomes what recognisers hear."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.speech_input import RATE_HZ, SpeechInput
from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Audio, Blob, Payload, Text

pytest.importorskip("soxr")


def tone(rate_hz: int, channels: int = 1, fmt: str = "s16", seconds: float = 1.0) -> Audio:
    """Return 440 Hz at half the full level."""
    samples = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate_hz * seconds)) / rate_hz)
    samples = np.repeat(samples[:, None], channels, axis=1).reshape(-1)
    raw = (samples * 32767).astype("<i2") if fmt == "s16" else samples.astype("<f4")
    return Audio(rate_hz, channels, "s16" if fmt == "s16" else "f32", Blob(raw.tobytes()))


def pieces(audio: Audio, num: int) -> list[Audio]:
    frame = audio.channels * (2 if audio.format == "s16" else 4)
    size = audio.num_frames // num * frame
    view = audio.data.view
    return [
        Audio(audio.rate_hz, audio.channels, audio.format, Blob(view[i : i + size])) for i in range(0, len(view), size)
    ]


def heard(*payloads: Payload) -> np.ndarray:
    speech = SpeechInput()
    return np.concatenate([*(speech.feed(payload) for payload in payloads), speech.end()])


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050, 24_000, 44_100, 48_000])
@pytest.mark.parametrize(("channels", "fmt"), [(1, "s16"), (2, "f32")])
def test_tone_is_the_same_from_every_shape(rate_hz: int, channels: int, fmt: str) -> None:
    found = heard(*pieces(tone(rate_hz, channels, fmt), 7))

    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE_HZ) / RATE_HZ)
    assert abs(len(found) - RATE_HZ) <= 1
    # The ends apart, where a filter has nothing on one side.
    assert np.abs(found[1000:15_000] - expected[1000:15_000]).max() < 0.002


def test_cuts_are_not_heard() -> None:
    sound = tone(44_100)

    assert np.array_equal(heard(sound), heard(*pieces(sound, 30)))


@pytest.mark.parametrize(
    ("payloads", "message"),
    [
        ([Text("hi")], r"audio: text came \(allowed: audio\)"),
        ([Audio(1, 1, "s16", Blob(bytes(4)))], r"a rate of 1 Hz came \(allowed: 4000 to 768000\)"),
        ([Audio(16_000, 1, "f32", Blob(np.array([np.nan], "<f4").tobytes()))], "samples came that are no numbers"),
        ([tone(16_000), tone(24_000)], "1 channels at 24000 Hz as s16 came after 1 at 16000 Hz as s16"),
        ([tone(16_000), tone(16_000, 2)], "2 channels at 16000 Hz as s16 came after 1"),
    ],
)
def test_what_can_not_be_heard_is_refused(payloads: list[Payload], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        heard(*payloads)
