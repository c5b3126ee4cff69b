"""A sound that is encoded piece by piece: playable from its first bytes, and the same samples as the file."""

from __future__ import annotations

import io
import itertools
import sys
import wave

import av
import numpy as np
import pytest

from omni_bus.errors import BadInput
from omni_bus.media.encoder import FORMATS, StreamEncoder, allowed_rates, wav_header
from omni_bus.wire.payloads import Audio, Blob

RATE_HZ = 24_000
NUM_FRAMES = 50_001

SHAPES = [
    {},
    {"rate_hz": 16_000},
    {"rate_hz": 48_000},
    {"speed": 1.5},
    {"speed": 0.4, "rate_hz": 8_000},
]
"""What is done to the sound on its way."""

FRAME = {"mp3": 1152, "opus": 960, "aac": 1024}
"""Samples of each channel in one frame, at most."""


def sound(kind: str = "s16", channels: int = 1) -> Audio:
    """A glide upwards; as floats it goes beyond full scale."""
    phase = 2 * np.pi * np.cumsum(np.linspace(100, 2000, NUM_FRAMES)) / RATE_HZ
    samples = np.sin(phase)[:, None] * np.array([0.5, 0.3][:channels])
    if kind == "f32":
        return Audio(RATE_HZ, channels, "f32", Blob((4 * samples).astype("<f4").tobytes()))
    return Audio(RATE_HZ, channels, "s16", Blob((samples * 32767).astype("<i2").tobytes()))


def encoded(audio: Audio, fmt, sizes: tuple[int, ...] = (NUM_FRAMES,), **options) -> list[bytes]:
    """Return what comes of each piece, and at the end."""
    encoder = StreamEncoder(fmt, **options)
    width = len(audio.data) // audio.num_frames
    made, start = [], 0
    for size in itertools.cycle(sizes):
        view = audio.data.view[start * width : (start + size) * width]
        if not view:
            return [*made, encoder.finish_blocking()]
        made.append(encoder.feed_blocking(Audio(audio.rate_hz, audio.channels, audio.format, Blob(view))))
        start += size
    raise AssertionError("a sound without an end")


def decoded(file: bytes):
    """Return the rate and the samples, (frames, channels), as players have them: without what heads say is no sound."""
    with av.open(io.BytesIO(file), "r") as container:
        stream = container.streams.audio[0]
        frames = [frame.to_ndarray() for frame in container.decode(stream)]
        planar = av.AudioFormat(stream.codec_context.format.name).is_planar
        channels = len(stream.layout.channels)
    joined = [frame.T if planar else frame.reshape(-1, channels) for frame in frames]
    return stream.rate, np.concatenate(joined)


ODD = (7, 1001, 313, 6000)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["s16", "f32"])
def test_pcm_and_wav_streams_are_the_file_sample_for_sample(shape: dict, kind: str) -> None:
    audio = sound(kind, channels=2)
    whole = b"".join(encoded(audio, "pcm", **shape))

    assert b"".join(encoded(audio, "pcm", ODD, **shape)) == whole
    stream = b"".join(encoded(audio, "wav", ODD, **shape))
    rate_hz = shape.get("rate_hz", RATE_HZ)
    assert stream == wav_header(rate_hz, 2, None) + whole
    file = b"".join(encoded(audio, "wav", is_whole=True, **shape))
    assert file == wav_header(rate_hz, 2, len(whole)) + whole
    # Each of the two filters rounds.
    assert len(whole) / 4 == pytest.approx(NUM_FRAMES * rate_hz / RATE_HZ / shape.get("speed", 1), abs=1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_whole", [False, True])
def test_flac_holds_what_pcm_holds(shape: dict, *, is_whole: bool) -> None:
    audio = sound(channels=2)
    samples = np.frombuffer(b"".join(encoded(audio, "pcm", **shape)), "<i2").reshape(-1, 2)

    rate_hz, found = decoded(b"".join(encoded(audio, "flac", ODD, is_whole=is_whole, **shape)))

    assert rate_hz == shape.get("rate_hz", RATE_HZ)
    assert np.array_equal(found, samples)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", FRAME)
def test_lossy_streams_are_the_file(fmt, shape: dict) -> None:
    """Sample for sample, but that an mp3 file's head says how much silence to leave out, as a stream's can't."""
    audio = sound()
    wanted = NUM_FRAMES / RATE_HZ / shape.get("speed", 1)

    rate_hz, streamed = decoded(b"".join(encoded(audio, fmt, ODD, **shape)))
    file_rate_hz, whole = decoded(b"".join(encoded(audio, fmt, is_whole=True, **shape)))

    assert rate_hz == file_rate_hz
    excess = (len(whole) / rate_hz - wanted) * shape.get("rate_hz", RATE_HZ)
    # ADTS can't say that its first frame is silence, nor that its last one is not full.
    assert -1 <= excess < (2 * FRAME["aac"] if fmt == "aac" else 2)
    if fmt == "mp3":
        start = 1105 if len(streamed) > len(whole) else 0
        streamed = streamed[start : start + len(whole)]
    assert streamed.shape == whole.shape
    assert np.allclose(streamed, whole, atol=1e-4)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_stream_can_be_played_while_it_comes(fmt) -> None:
    """Two thirds of the pieces are half of the sound at least, in every format, and can be decoded."""
    audio = sound()
    pieces = encoded(audio, fmt, (2400,))

    assert pieces[0]
    if fmt in ("pcm", "pcm16"):
        assert len(b"".join(pieces[:14])) == 2 * 14 * 2400
        return
    part = b"".join(pieces[:14])  # 1.4 s of 2.1 s
    rate_hz, samples = decoded(part)
    assert 1.0 < len(samples) / rate_hz <= 1.5


@pytest.mark.parametrize("fmt", FORMATS)
def test_nothing_fed_is_nothing_made(fmt) -> None:
    assert StreamEncoder(fmt).finish_blocking() == b""
    assert StreamEncoder(fmt, is_whole=True).finish_blocking() == b""


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("num_frames", [0, 1, 2])
def test_the_shortest_sounds_are_files(fmt, num_frames: int) -> None:
    audio = Audio(RATE_HZ, 1, "s16", Blob(bytes(2 * num_frames)))

    for is_whole in (False, True):
        encoder = StreamEncoder(fmt, is_whole=is_whole)
        file = encoder.feed_blocking(audio) + encoder.finish_blocking()
        if fmt == "wav" and is_whole:
            with wave.open(io.BytesIO(file)) as opened:
                assert opened.getnframes() == num_frames
        elif fmt not in ("pcm", "pcm16", "wav") and (num_frames or fmt != "aac"):
            assert file


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 44_100, 65_535, 65_536, 96_000, 191_999, 192_000])
def test_every_rate_that_is_allowed_can_be_made(fmt, rate_hz: int) -> None:
    if allowed_rates(fmt, rate_hz):
        return
    encoder = StreamEncoder(fmt, rate_hz=rate_hz)
    audio = sound()

    file = encoder.feed_blocking(audio) + encoder.finish_blocking()

    assert encoder.rate_hz == rate_hz
    if fmt in ("flac", "mp3", "aac"):
        assert decoded(file)[0] == rate_hz


def test_rates_that_no_file_of_the_format_has_are_told_in_words() -> None:
    assert allowed_rates("mp3", 96_000) == "8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000"
    assert allowed_rates("opus", 44_100) == "8000, 12000, 16000, 24000, 48000"
    assert "multiples of 10" in allowed_rates("flac", 191_999)
    assert allowed_rates("wav", 191_999) == allowed_rates("flac", 192_000) == allowed_rates("aac", 96_000) == ""


def test_a_stream_that_changes_is_refused() -> None:
    encoder = StreamEncoder("wav")
    encoder.feed_blocking(sound())
    with pytest.raises(ValueError, match="24000 Hz, 1 channels, s16 to 24000 Hz, 2 channels"):
        encoder.feed_blocking(sound(channels=2))


@pytest.mark.parametrize(
    ("module", "fmt", "options", "field"),
    [
        ("av", "mp3", {"field": "response_format"}, "response_format"),
        ("av", "wav", {"speed": 2.0}, "speed"),
        ("soxr", "wav", {"rate_hz": 8000}, "sample_rate"),
    ],
)
def test_what_is_not_installed_is_named(monkeypatch, module: str, fmt, options: dict, field: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(BadInput, match=r"which is not installed here \(allowed: ") as caught:
        StreamEncoder(fmt, **options)

    assert caught.value.field == field
    StreamEncoder("wav")


def test_refusals_name_the_callers_field() -> None:
    nine = Audio(RATE_HZ, 9, "s16", Blob(bytes(18)))
    with pytest.raises(BadInput, match="9 channels") as caught:
        StreamEncoder("flac", field="response_format").feed_blocking(nine)
    assert caught.value.field == "response_format"
