"""Live clients' sound: G.711 as FFmpeg has it, and nothing lost or delayed where rates differ."""

from __future__ import annotations

import math

import av
import numpy as np
import pytest

from omni_bus.media.telephony import Ear, Mouth, a_law_of, mu_law_of, s16_of_a_law, s16_of_mu_law
from omni_bus.wire.payloads import Audio, Blob

EVERY_CODE = bytes(range(256))
EVERY_SAMPLE = np.arange(-32768, 32768).astype("<i2").tobytes()


def tone(rate_hz: int, seconds: float = 0.5, hz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * math.pi * hz * np.arange(round(rate_hz * seconds)) / rate_hz)


def s16(samples: np.ndarray) -> bytes:
    return np.rint(samples * 32767).astype("<i2").tobytes()


def floats(pcm: bytes) -> np.ndarray:
    return np.frombuffer(pcm, "<i2") / 32767


@pytest.mark.parametrize(("name", "decode"), [("pcm_mulaw", s16_of_mu_law), ("pcm_alaw", s16_of_a_law)])
def test_codes_stand_for_what_they_stand_for_in_ffmpeg(name, decode):
    codec = av.CodecContext.create(name, "r")
    codec.sample_rate, codec.layout = 8000, "mono"
    (frame,) = codec.decode(av.Packet(EVERY_CODE))

    assert decode(EVERY_CODE) == frame.to_ndarray().astype("<i2").tobytes()


@pytest.mark.parametrize(("encode", "decode"), [(mu_law_of, s16_of_mu_law), (a_law_of, s16_of_a_law)])
def test_samples_become_the_nearest_code(encode, decode):
    values = np.frombuffer(decode(EVERY_CODE), "<i2").astype(int)
    nearest = np.array([np.abs(values - sample).min() for sample in range(-32768, 32768)])

    coded = np.frombuffer(decode(encode(EVERY_SAMPLE)), "<i2").astype(int)

    assert (np.abs(coded - np.arange(-32768, 32768)) == nearest).all()


def test_silence_is_what_telephones_send():
    assert mu_law_of(b"\0\0") == b"\xff"
    assert a_law_of(b"\0\0") == b"\xd5"


@pytest.mark.parametrize("rate_hz", [8000, 16_000, 22_050, 24_000, 48_000])
@pytest.mark.parametrize("step", [1, 999, 100_000])
def test_an_ear_hears_all_whatever_the_rate_and_the_cuts(rate_hz, step):
    ear = Ear("audio/pcm", rate_hz, 16_000)
    sound = s16(tone(rate_hz))[: 2 * rate_hz // 20] if step == 1 else s16(tone(rate_hz))

    heard = b"".join(ear.feed(sound[i : i + step]) for i in range(0, len(sound), step))
    whole = heard + ear.finish()

    seconds = len(sound) / 2 / rate_hz
    assert len(heard) / 32_000 == pytest.approx(seconds, abs=0.0025)
    assert len(whole) / 32_000 == pytest.approx(seconds, abs=0.0005)
    expected = tone(16_000)[: len(whole) // 2]
    assert np.abs(floats(whole)[100:-100] - expected[100 : len(whole) // 2 - 100]).max() < 0.02


def test_an_ear_reads_floats_and_telephones():
    samples = tone(8000)
    forms = {
        "audio/pcm_f32le": samples.astype("<f4").tobytes(),
        "audio/pcmu": mu_law_of(s16(samples)),
        "audio/pcma": a_law_of(s16(samples)),
    }
    for encoding, data in forms.items():
        heard = Ear(encoding, 8000, 8000).feed(data)  # pyright: ignore[reportArgumentType]
        assert np.abs(floats(heard) - samples[: len(heard) // 2]).max() < 0.02, encoding


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("sample_format", ["s16", "f32"])
def test_a_mouth_speaks_the_clients_form(channels, sample_format):
    samples = np.repeat(tone(24_000)[:, None], channels, axis=1)
    data = s16(samples) if sample_format == "s16" else samples.astype("<f4").tobytes()
    sound = Audio(24_000, channels, sample_format, Blob(data))
    mouth = Mouth(sound, "audio/pcmu", 8000)

    spoken = mouth.feed(sound) + mouth.finish()

    assert len(spoken) == pytest.approx(4000, abs=4)
    assert np.abs(floats(s16_of_mu_law(spoken))[100:3900] - tone(8000)[100:3900]).max() < 0.05


def test_a_mouth_refuses_sound_that_changes():
    first = Audio(24_000, 1, "s16", Blob(b"\0\0"))
    mouth = Mouth(first, "audio/pcm", 24_000)

    assert mouth.feed(first) == b"\0\0"
    with pytest.raises(ValueError, match="changed from 24000 Hz"):
        mouth.feed(Audio(16_000, 1, "s16", Blob(b"\0\0")))
