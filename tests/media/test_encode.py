"""Sound that comes out of a file must be the sound that went in."""

from __future__ import annotations

import base64
import io
import math
import struct
import sys
import threading
import wave
from array import array

import av
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.errors import BadInput
from omni_bus.media.encode import MAX_INLINE_BYTES, EncodingPool, base64_blocking, encode_blocking
from omni_bus.media.encoder import FORMATS, wav_header
from omni_bus.media.sound import floats_of, join, s16_of
from omni_bus.wire.payloads import Audio, Blob


def tone(hz: float, rate_hz: int, num_frames: int, channels: int = 1) -> Audio:
    """A sine; each further channel sounds an octave higher."""
    samples = [
        round(12000 * math.sin(2 * math.pi * hz * 2**channel * i / rate_hz))
        for i in range(num_frames)
        for channel in range(channels)
    ]
    return Audio(rate_hz, channels, "s16", Blob(struct.pack(f"<{len(samples)}h", *samples)))


def decode(file: bytes) -> tuple[int, list[array[int]]]:
    """Return the rate and the samples of each channel."""
    with av.open(io.BytesIO(file), "r") as container:
        stream = container.streams.audio[0]
        rate_hz = stream.rate
        to_planes = av.AudioResampler(format="s16p", layout=stream.layout, rate=rate_hz)
        channels: list[array[int]] = [array("h") for _ in stream.layout.channels]
        for frame in [*container.decode(stream), None]:
            for piece in to_planes.resample(frame):
                for samples, plane in zip(channels, piece.planes, strict=True):
                    samples.frombytes(bytes(plane)[: piece.samples * 2])
    return rate_hz, channels


def strength(samples: array[int], hz: float, rate_hz: int) -> float:
    """How much of the samples' power is at one frequency (a single bin of the Fourier transform), from 0 to 1."""
    angles = [2 * math.pi * hz * i / rate_hz for i in range(len(samples))]
    real = sum(sample * math.cos(angle) for sample, angle in zip(samples, angles, strict=True))
    imaginary = sum(sample * math.sin(angle) for sample, angle in zip(samples, angles, strict=True))
    power = sum(sample * sample for sample in samples)
    return 2 * (real**2 + imaginary**2) / (len(samples) * power) if power else 0.0


@pytest.mark.parametrize("channels", [1, 2])
def test_wav_holds_the_samples_unchanged(channels: int) -> None:
    sound = tone(440, 24000, 1000, channels)

    with wave.open(io.BytesIO(encode_blocking(sound, "wav"))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, channels, 2)
        assert file.readframes(2000) == bytes(sound.data.view)


@pytest.mark.parametrize("fmt", ["pcm", "pcm16"])
def test_pcm_pieces_concatenate(fmt) -> None:
    pieces = [tone(440, 24000, num_frames) for num_frames in (3, 100, 1)]

    assert b"".join(encode_blocking(piece, fmt) for piece in pieces) == encode_blocking(join(pieces), fmt)


@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("rate_hz", [11000, 24000, 96000])
def test_flac_loses_no_sample(channels: int, rate_hz: int) -> None:
    sound = tone(440, rate_hz, 12345, channels)
    expected = array("h", bytes(sound.data.view))

    found_rate_hz, found = decode(encode_blocking(sound, "flac"))

    assert found_rate_hz == rate_hz
    assert [list(samples) for samples in found] == [list(expected[channel::channels]) for channel in range(channels)]


@pytest.mark.parametrize("fmt", ["mp3", "opus"])
@pytest.mark.parametrize(("rate_hz", "channels"), [(24000, 1), (22050, 2), (11000, 1), (96000, 1)])
def test_lossy_file_sounds_the_same_for_as_long(fmt, rate_hz: int, channels: int) -> None:
    sound = tone(440, rate_hz, rate_hz, channels)

    found_rate_hz, found = decode(encode_blocking(sound, fmt))

    assert len(found) == channels
    for octave, samples in enumerate(found):
        assert len(samples) == pytest.approx(found_rate_hz, abs=found_rate_hz * 0.01)
        assert strength(samples, 440 * 2**octave, found_rate_hz) > 0.9
        assert strength(samples, 440 * 1.5, found_rate_hz) < 0.01


@pytest.mark.parametrize("fmt", ["mp3", "opus"])
def test_more_channels_than_the_codec_has_are_mixed_down(fmt) -> None:
    _, found = decode(encode_blocking(tone(440, 24000, 24000, 6), fmt))

    assert len(found) == 2


def test_floats_are_scaled_rounded_and_clipped() -> None:
    floats = [0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 1 / 65536, math.nan, math.inf]
    sound = Audio(24000, 1, "f32", Blob(struct.pack(f"<{len(floats)}f", *floats)))

    samples = struct.unpack(f"<{len(floats)}h", s16_of(floats_of(sound)))

    assert samples[:8] == (0, 16384, -16384, 32767, -32768, 32767, -32768, 0)
    assert samples[9] == 32767


@given(st.lists(st.floats(-1, 1, width=32), max_size=50))
def test_by_hand_and_by_av_make_the_same_of_floats(floats: list[float]) -> None:
    sound = Audio(24000, 1, "f32", Blob(struct.pack(f"<{len(floats)}f", *floats)))
    frame = av.AudioFrame(format="flt", layout="mono", samples=max(1, len(floats)))
    plane = frame.planes[0]
    plane.update(bytes(sound.data.view) + bytes(plane.buffer_size - len(sound.data)))
    frame.sample_rate = 24000
    (converted,) = av.AudioResampler(format="s16", layout="mono", rate=24000).resample(frame)

    assert s16_of(floats_of(sound)) == bytes(converted.planes[0])[: 2 * len(floats)]


def test_pieces_of_different_rates_do_not_join() -> None:
    with pytest.raises(ValueError, match="24000 Hz, 1 channels, s16 to 16000 Hz"):
        join([tone(440, 24000, 10), tone(440, 16000, 10)])
    with pytest.raises(ValueError, match="no audio"):
        join([])


def test_single_piece_joins_without_a_copy() -> None:
    piece = tone(440, 24000, 10)

    assert join([piece]) is piece


def test_wav_beyond_four_gigabytes_is_refused() -> None:
    wav_header(24000, 1, 2**32 - 37)
    with pytest.raises(BadInput, match="4 GiB"):
        wav_header(24000, 1, 2**32 - 36)


def test_missing_av_is_named_with_what_remains(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    sound = tone(440, 24000, 100)

    with pytest.raises(BadInput, match=r"'mp3' needs PyAV.*allowed: wav, pcm, pcm16") as caught:
        encode_blocking(sound, "mp3")
    assert caught.value.field == "audio.format"
    assert encode_blocking(sound, "wav").endswith(encode_blocking(sound, "pcm"))


def test_nine_channels_are_refused() -> None:
    with pytest.raises(BadInput, match="9 channels"):
        encode_blocking(tone(1, 24000, 10, 9), "flac")


@pytest.mark.parametrize("size", [0, 1, 2, 3, 3 * 64 * 1024 - 1, 3 * 64 * 1024, 3 * 64 * 1024 + 1, 500_000])
def test_base64_in_pieces_is_base64(size: int) -> None:
    data = bytes(i * 7 % 256 for i in range(size))

    assert base64_blocking(data) == base64.b64encode(data)


async def test_pool_makes_what_the_blocking_call_makes() -> None:
    pool = EncodingPool()
    try:
        for num_frames in (100, MAX_INLINE_BYTES):
            sound = tone(440, 24000, num_frames)
            for fmt in FORMATS:
                file = await pool.encode(sound, fmt)
                if fmt != "opus":  # whose container has a random serial number
                    assert file == encode_blocking(sound, fmt)
                assert await pool.base64(file) == base64.b64encode(file)
    finally:
        pool.close()


async def test_codecs_run_off_the_loop(monkeypatch) -> None:
    threads: list[str] = []
    real = encode_blocking

    def note(*args):
        threads.append(threading.current_thread().name)
        return real(*args)

    monkeypatch.setattr("omni_bus.media.encode.encode_blocking", note)
    pool = EncodingPool()
    try:
        await pool.encode(tone(440, 24000, 10), "flac")
        await pool.encode(tone(440, 24000, MAX_INLINE_BYTES), "wav")
    finally:
        pool.close()

    assert [name.rpartition("_")[0] for name in threads] == ["encode", "encode"]
