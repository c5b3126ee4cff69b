"""Rate, tempo, peaks and fades: right for the whole, and the same whatever pieces the sound comes in."""

from __future__ import annotations

import math

import numpy as np
import pytest

from omni_bus.errors import BadInput
from omni_bus.media.sound import (
    FADE_S,
    Fader,
    Limiter,
    Resampler,
    Shaper,
    Tempo,
    floats_of,
    join,
    s16_of,
    slices,
)
from omni_bus.wire.payloads import Audio, Blob

RATE_HZ = 24_000


def wave(num_frames: int, *, hz: float = 440, rate_hz: int = RATE_HZ, channels: int = 1, peak: float = 0.5):
    """A tone with a little noise, float32, (frames, channels)."""
    dice = np.random.default_rng(num_frames)
    tone = np.sin(2 * np.pi * hz * np.arange(num_frames) / rate_hz)[:, None] * np.ones((1, channels))
    return (peak * tone + dice.normal(0, 0.01, (num_frames, channels))).astype(np.float32)


def f32(samples, rate_hz: int = RATE_HZ) -> Audio:
    return Audio(rate_hz, samples.shape[1], "f32", Blob(samples.astype("<f4").tobytes()))


def s16(samples, rate_hz: int = RATE_HZ) -> Audio:
    return Audio(rate_hz, samples.shape[1], "s16", Blob(s16_of(samples)))


def fed(stage: Resampler | Tempo | Limiter | Fader, samples, sizes: tuple[int, ...]):
    """Return what a filter makes of samples in pieces of these sizes, one after the other and round again."""
    made, start, turn = [], 0, 0
    while start < len(samples):
        made.append(stage.feed(samples[start : start + sizes[turn % len(sizes)]]))
        start += sizes[turn % len(sizes)]
        turn += 1
    return np.concatenate([*made, stage.finish()])


def pitch(samples, rate_hz: int) -> float:
    """Return the strongest frequency, in Hz."""
    power = np.abs(np.fft.rfft(samples[:, 0] * np.hanning(len(samples))))
    return float(np.argmax(power) * rate_hz / len(samples))


ODD = (7, 1001, 313, 1, 4800)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("out_hz", [8_000, 16_000, 44_100, 48_000, 192_000, 23_999])
def test_resampled_sound_is_as_long_and_sounds_the_same_in_any_pieces(out_hz: int, channels: int) -> None:
    samples = wave(30_001, channels=channels)

    whole = fed(Resampler(RATE_HZ, out_hz, channels), samples, (30_001,))

    assert whole.shape == (round(30_001 * out_hz / RATE_HZ), channels)
    assert np.array_equal(whole, fed(Resampler(RATE_HZ, out_hz, channels), samples, ODD))
    assert pitch(whole, out_hz) == pytest.approx(440, abs=2)
    assert np.abs(whole).max() == pytest.approx(0.53, abs=0.03)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("speed", [0.25, 0.5, 0.9, 1.3, 2.0, 3.7, 4.0])
def test_tempo_changes_the_length_and_not_the_pitch_in_any_pieces(speed: float, channels: int) -> None:
    samples = wave(30_001, channels=channels)

    whole = fed(Tempo(speed, RATE_HZ, channels), samples, (30_001,))

    assert whole.shape == (math.floor(30_001 / speed + 0.5), channels)
    assert np.array_equal(whole, fed(Tempo(speed, RATE_HZ, channels), samples, ODD))
    assert pitch(whole, RATE_HZ) == pytest.approx(440, abs=6)


@pytest.mark.parametrize("speed", [0.25, 0.7, 1.5, 4.0])
def test_tempo_keeps_the_end_of_the_sound(speed: float) -> None:
    """A beep at the very end, which a filter that is merely flushed would lose the last of."""
    samples = np.concatenate([np.zeros((24_000, 1), np.float32), wave(2_400)])

    made = fed(Tempo(speed, RATE_HZ, 1), samples, (6_000,))

    end = made[round(25_200 / speed) : -round(400 / speed)]  # the beep's second half
    assert np.sqrt(np.mean(end**2)) > 0.2


@pytest.mark.parametrize("stage", [lambda: Resampler(8000, 48000, 1), lambda: Tempo(0.5, 8000, 1)])
@pytest.mark.parametrize("num_frames", [0, 1, 2, 100])
def test_the_shortest_sounds_keep_their_length(stage, num_frames: int) -> None:
    filtered = stage()
    wanted = num_frames * (6 if isinstance(filtered, Resampler) else 2)

    assert fed(filtered, wave(num_frames, rate_hz=8000), (1,)).shape == (wanted, 1)


def test_limiter_leaves_sound_within_full_scale_untouched() -> None:
    samples = wave(20_000, peak=0.9)

    assert np.array_equal(fed(Limiter(RATE_HZ, 1), samples, ODD), samples)


def test_limiter_never_clips_and_changes_the_gain_gently() -> None:
    samples = wave(24_000, channels=2, peak=0.5)
    samples[12_000:12_100] *= 6  # a burst to three times full scale
    samples[5_000, 0] = -40.0  # and a spike in one channel

    made = fed(Limiter(RATE_HZ, 2), samples, (24_000,))

    assert made.shape == samples.shape
    assert np.abs(made).max() <= 1.0
    gain = made[:, 0] / samples[:, 0]
    assert np.allclose(gain, made[:, 1] / samples[:, 1], rtol=1e-4)  # the channels keep their balance
    assert np.abs(np.diff(gain)).max() < 0.01
    assert np.array_equal(made[15_000:], samples[15_000:])
    assert np.array_equal(made, fed(Limiter(RATE_HZ, 2), samples, ODD))


def test_filtered_sound_at_full_scale_does_not_wrap_or_clip() -> None:
    """A square wave swings beyond full scale once it is resampled."""
    square = np.where(np.arange(24_000) // 30 % 2, 32767, -32768).astype("<i2")
    shaper = Shaper(audio := Audio(RATE_HZ, 1, "s16", Blob(square.tobytes())), rate_hz=44_100)

    made = np.frombuffer(shaper.feed(audio) + shaper.finish(), "<i2").astype(int)

    assert len(made) == 44_100
    assert np.sum(np.abs(made) >= 32767) < 200  # tops that are cut off would be thousands
    assert np.abs(np.diff(made)).max() < 60_000


def test_untouched_sound_passes_bit_by_bit() -> None:
    audio = s16(wave(1000, channels=2))
    shaper = Shaper(audio, rate_hz=RATE_HZ)

    assert shaper.feed(audio) + shaper.finish() == bytes(audio.data.view)


def test_s16_to_floats_and_back_loses_nothing() -> None:
    every = np.arange(-32768, 32768).astype("<i2").tobytes()

    assert s16_of(floats_of(Audio(RATE_HZ, 1, "s16", Blob(every)))) == every


def test_sound_that_changes_within_a_stream_is_refused() -> None:
    shaper = Shaper(s16(wave(100)), rate_hz=8000)

    with pytest.raises(ValueError, match="24000 Hz, 1 channels, s16 to 16000 Hz"):
        shaper.feed(s16(wave(100), 16_000))


def test_speed_of_nine_channels_is_refused() -> None:
    with pytest.raises(BadInput, match="9 channels") as caught:
        Tempo(2.0, RATE_HZ, 9)
    assert caught.value.field == "speed"


@pytest.mark.parametrize("kind", [s16, f32])
def test_slices_join_to_the_whole(kind) -> None:
    audio = kind(wave(1000, channels=2))

    pieces = list(slices(audio, 300))

    assert [piece.num_frames for piece in pieces] == [300, 300, 300, 100]
    assert bytes(join(pieces).data.view) == bytes(audio.data.view)
    assert list(slices(audio, 1000)) == [audio]


@pytest.mark.parametrize("channels", [1, 2])
def test_cut_sound_begins_and_ends_in_silence_and_keeps_its_middle(channels: int) -> None:
    samples = np.full((2400, channels), 0.5, np.float32)
    edge = round(FADE_S * RATE_HZ)

    made = fed(Fader(RATE_HZ, channels), samples, ODD)

    assert np.array_equal(made, fed(Fader(RATE_HZ, channels), samples, (2400,)))
    assert np.array_equal(made[edge:-edge], samples[edge:-edge])
    assert np.array_equal(made[[0, -1]], np.zeros((2, channels)))
    assert np.all(np.diff(made[:edge, 0]) > 0)
    assert np.array_equal(made[:edge], made[: -edge - 1 : -1])


@pytest.mark.parametrize("num_frames", [0, 1, 2, 119, 121])
def test_the_shortest_cut_sounds_keep_their_length(num_frames: int) -> None:
    made = fed(Fader(RATE_HZ, 1), np.full((num_frames, 1), 0.5, np.float32), (1,))

    assert made.shape == (num_frames, 1)
    assert not made[:1].any()
    assert not made[-1:].any()


def test_only_cut_sound_is_faded() -> None:
    audio = s16(wave(1000))
    cut, whole = (Shaper(audio, rate_hz=RATE_HZ, is_cut=is_cut) for is_cut in (True, False))

    faded = cut.feed(audio) + cut.finish()

    assert whole.feed(audio) + whole.finish() == bytes(audio.data.view)
    assert (faded[:2], faded[-2:]) == (bytes(2), bytes(2))
    assert faded[240:-240] == bytes(audio.data.view)[240:-240]
