"""Samples that come out are those that went in; what is damaged, wrong or beyond a limit is refused by name.

Here the decoders run in this process, on good files and on ones that are refused before they see them; damaged ones
meet them in `tests/runtime/test_media_pool.py`.
"""

from __future__ import annotations

import io
import struct
import sys
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from samples import (
    FPS,
    HEIGHT,
    NUM_FRAMES,
    RATE_HZ,
    SECONDS,
    WIDTH,
    grey_of,
    images,
    png,
    slope,
    sound,
    sounds,
    tone,
    video,
    videos,
    with_orientation,
)

from omni_bus.errors import BadInput, MediaTooLarge
from omni_bus.media.decode import AudioRequest, ImageRequest, VideoRequest, decode
from omni_bus.wire.payloads import Audio, Blob, Image, Video, check

IMAGE = ImageRequest("image", max_pixels=1_000_000)
AUDIO = AudioRequest("audio", max_seconds=60, max_bytes=50_000_000)
VIDEO = VideoRequest("video", max_seconds=60, max_pixels=1_000_000, max_decoded_frames=1000, max_bytes=50_000_000)


def run(data: bytes, request: Any, **changes: Any) -> tuple[Any, np.ndarray]:
    """Return the payload and its samples, after the payload's own check."""
    out = io.BytesIO()
    header = decode(io.BytesIO(data), msgspec.structs.replace(request, **changes), out)
    payload = msgspec.structs.replace(header, data=Blob(out.getvalue()))
    check(payload)
    match payload:
        case Image(height=height, width=width, channels=channels):
            return payload, np.frombuffer(out.getvalue(), np.uint8).reshape(height, width, channels)
        case Audio(channels=channels, format=fmt):
            samples = np.frombuffer(out.getvalue(), "<i2" if fmt == "s16" else "<f4")
            return payload, samples.reshape(-1, channels)
        case Video(num_frames=num_frames, height=height, width=width):
            return payload, np.frombuffer(out.getvalue(), np.uint8).reshape(num_frames, height, width, 3)
        case _:
            raise AssertionError(payload)


# --- pictures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["png", "png-16", "webp-lossless", "bmp"])
def test_lossless_picture_is_the_same(name: str) -> None:
    _, pixels = run(images()[name], IMAGE)

    assert np.abs(pixels.astype(int) - slope()).max() <= 1


@pytest.mark.parametrize(("name", "error"), [("jpeg", 12), ("jpeg-420", 40), ("webp", 40), ("gif", 60)])
def test_lossy_picture_is_nearly_the_same(name: str, error: int) -> None:
    _, pixels = run(images()[name], IMAGE)

    assert pixels.shape == (HEIGHT, WIDTH, 3)
    assert np.abs(pixels.astype(int) - slope()).max() <= error


@pytest.mark.parametrize("name", images())
@pytest.mark.parametrize("channels", [0, 1, 3, 4])
def test_channels_are_those_asked_for(name: str, channels: int) -> None:
    image, _ = run(images()[name], IMAGE, channels=channels)

    assert image.channels == (channels or (4 if "rgba" in name else 3))


def test_transparent_parts_are_seen_on_white() -> None:
    _, pixels = run(images()["png-rgba"], IMAGE)

    assert np.abs(pixels.astype(int) - (slope() * (128 / 255) + 127)).max() <= 1


def test_transparency_is_kept_where_it_is_wanted() -> None:
    _, pixels = run(images()["webp-rgba"], IMAGE, channels=4)

    assert (pixels[..., 3] == 128).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_picture_is_turned_as_its_camera_was(orientation: int) -> None:
    """Exif 2.3: where row 0 and column 0 of the stored picture are seen."""
    pixels = slope()
    shown = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: pixels.transpose(1, 0, 2)[:, ::-1],
        7: pixels.transpose(1, 0, 2)[::-1, ::-1],
        8: pixels.transpose(1, 0, 2)[::-1],
    }[orientation]
    _, found = run(with_orientation(images()["jpeg"], orientation), IMAGE)

    assert found.shape == shown.shape
    assert np.abs(found.astype(int) - shown).max() <= 12


def test_first_picture_of_an_animation_is_taken() -> None:
    _, pixels = run(images()["gif-animated"], IMAGE)

    assert pixels.mean() == pytest.approx(grey_of(0), abs=4)


@pytest.mark.parametrize(
    "data",
    [
        png(30_000, 30_000, num_rows=10),
        png(1001, 1000, num_rows=10),
        images()["jpeg"].replace(struct.pack(">HH", HEIGHT, WIDTH), struct.pack(">HH", 65_000, 65_000)),
        images()["gif"][:6] + struct.pack("<HH", 65_535, 65_535) + images()["gif"][10:],
        images()["bmp"][:18] + struct.pack("<ii", 100_000, 100_000) + images()["bmp"][26:],
    ],
    ids=["png", "png by a row", "jpeg", "gif", "bmp"],
)
def test_pixels_are_refused_by_the_header(data: bytes) -> None:
    with pytest.raises(MediaTooLarge, match=r"image: \d+ × \d+ pixels came \(allowed: 1000000 in all\)"):
        run(data, IMAGE)


@pytest.mark.parametrize("name", [name for name in images() if name != "gif-animated"])
@pytest.mark.parametrize("share", [0.03, 0.5, 0.9])
def test_half_a_picture_is_none(name: str, share: float) -> None:
    with pytest.raises(BadInput, match=r"^image: (the file is damaged|a file of an unknown kind)"):
        run(images()[name][: int(len(images()[name]) * share)], IMAGE)


@pytest.mark.parametrize("request_", [IMAGE, AUDIO, VIDEO])
@pytest.mark.parametrize("data", [b"", b"x", b"hello world, this is text", bytes(1000), b"#EXTM3U\n/etc/passwd\n"])
def test_what_is_no_media_is_refused_with_what_is_allowed(request_: Any, data: bytes) -> None:
    with pytest.raises(BadInput, match=r"^(image|audio|video): .* came \(allowed: (png, jpeg|wav, mp3)") as caught:
        run(data, request_)
    assert caught.value.field == request_.field


def test_each_kind_is_taken_for_what_it_is() -> None:
    with pytest.raises(BadInput, match=r"image: a wav file came \(allowed: png, jpeg, webp, gif, bmp\)"):
        run(sounds()["wav"], IMAGE)
    with pytest.raises(BadInput, match=r"audio: a png file came \(allowed: wav, mp3"):
        run(images()["png"], AUDIO)
    with pytest.raises(BadInput, match=r"video: a wav file without video came"):
        run(sounds()["wav"], VIDEO)
    with pytest.raises(BadInput, match=r"audio: a mp4 file without audio came"):
        run(videos()["mp4-h264"], AUDIO)


# --- sound ----------------------------------------------------------------------------------------------------


def strongest_hz(samples: np.ndarray, rate_hz: int) -> float:
    return float(np.abs(np.fft.rfft(samples * np.hanning(len(samples)))).argmax() * rate_hz / len(samples))


@pytest.mark.parametrize("name", ["wav", "wav-24", "flac", "aiff"])
def test_lossless_sound_is_the_same(name: str) -> None:
    audio, samples = run(sounds()[name], AUDIO)

    assert (audio.rate_hz, audio.channels, audio.format) == (RATE_HZ, 1, "s16")
    assert np.abs(samples[:, 0].astype(int) - tone()).max() <= 1


@pytest.mark.parametrize("name", sounds())
def test_sound_of_every_kind_has_its_length_and_pitch(name: str) -> None:
    audio, samples = run(sounds()[name], AUDIO, format="f32")

    assert len(samples) / audio.rate_hz == pytest.approx(SECONDS, abs=0.07)
    assert strongest_hz(samples[:, 0], audio.rate_hz) == pytest.approx(440, abs=3)
    level = 12000 / 32768 / (2**0.5 if audio.channels == 2 else 1)  # its encoder got it from one channel
    assert np.abs(samples).max() == pytest.approx(level, rel=0.1)


@pytest.mark.parametrize("rate_hz", [8000, 16000, 48000])
@pytest.mark.parametrize("name", ["wav-stereo", "mp3", "ogg-opus"])
def test_sound_is_resampled_and_mixed_down(name: str, rate_hz: int) -> None:
    audio, samples = run(sounds()[name], AUDIO, rate_hz=rate_hz, channels=1)

    assert (audio.rate_hz, audio.channels) == (rate_hz, 1)
    assert len(samples) == pytest.approx(rate_hz * SECONDS, abs=rate_hz * 0.02)
    assert strongest_hz(samples[:, 0], rate_hz) == pytest.approx(440, abs=3)


def test_stereo_stays_apart() -> None:
    audio, samples = run(sounds()["wav-stereo"], AUDIO)

    assert audio.channels == 2
    assert samples.shape == (RATE_HZ, 2)


def test_title_in_another_encoding_is_no_damage() -> None:
    data = sound("wav", "pcm_s16le")
    title = b"LIST" + struct.pack("<I", 16) + b"INFOINAM" + struct.pack("<I", 4) + b"\xfc\xe9\xff\0"
    tagged = data + title
    _, samples = run(tagged[:4] + struct.pack("<I", len(tagged) - 8) + tagged[8:], AUDIO)

    assert len(samples) == RATE_HZ


def test_sound_of_a_video_is_found() -> None:
    audio, samples = run(videos()["mp4-h264-sound"], AUDIO)

    assert len(samples) / audio.rate_hz == pytest.approx(NUM_FRAMES / FPS, abs=0.1)


@pytest.mark.parametrize("name", ["wav", "mp3", "flac", "ogg-opus", "m4a", "webm-opus"])
def test_seconds_are_refused_by_the_header_or_while_they_come(name: str) -> None:
    with pytest.raises(MediaTooLarge, match=r"audio: (more than )?\d\.?\d* s came \(allowed: at most 0\.5 s\)"):
        run(sounds()[name], AUDIO, max_seconds=0.5)


def test_header_that_understates_its_seconds_is_not_believed() -> None:
    data = bytearray(sound("aiff", "pcm_s16be", seconds=2))
    at = data.index(b"COMM")
    data[at + 10 : at + 14] = struct.pack(">I", 10)  # frames
    with pytest.raises(MediaTooLarge, match="more than 1 s came"):
        run(bytes(data), AUDIO, max_seconds=1)


def test_samples_are_refused_by_their_bytes() -> None:
    with pytest.raises(MediaTooLarge, match=r"more than 1000 bytes of samples came \(allowed: 1000\)"):
        run(sounds()["flac"], AUDIO, max_bytes=1000)


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFFFFF])
def test_sound_that_was_written_as_a_stream_is_whole(size: int) -> None:
    """Its writer did not know the length yet."""
    data = bytearray(sounds()["wav"])
    data[4:8] = struct.pack("<I", size)
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", size or 0xFFFFFFFF)
    _, samples = run(bytes(data), AUDIO)

    assert len(samples) == RATE_HZ


@pytest.mark.parametrize("name", [name for name in sounds() if name != "ogg-opus"])
@pytest.mark.parametrize("share", [0.02, 0.4])
def test_half_a_sound_is_refused(name: str, share: float) -> None:
    """Ogg that ends with a whole page can't be told from a shorter one."""
    data = sounds()[name]
    with pytest.raises(BadInput, match=r"^audio: (the file is damaged|a file of an unknown kind|coded as)"):
        run(data[: int(len(data) * share)], AUDIO)


# --- video ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", videos())
def test_every_frame_comes_out_in_order(name: str) -> None:
    payload, frames = run(videos()[name], VIDEO)

    assert (payload.num_frames, payload.width, payload.height) == (NUM_FRAMES, 64, 48)
    assert (payload.time_base_num, payload.time_base_den) == (1, FPS)
    assert np.abs(frames.mean((1, 2, 3)) - [grey_of(i) for i in range(NUM_FRAMES)]).max() <= 4


@pytest.mark.parametrize(("fps", "indices"), [(2, range(0, 30, 5)), (1, range(0, 30, 10)), (5, range(0, 30, 2))])
@pytest.mark.parametrize("name", ["mp4-h264", "webm-vp9"])
def test_fewer_frames_a_second_are_those_shown_at_their_time(name: str, fps: float, indices: range) -> None:
    payload, frames = run(videos()[name], VIDEO, fps=fps)

    assert payload.num_frames == len(indices)
    assert payload.time_base_num / payload.time_base_den == 1 / fps
    assert np.abs(frames.mean((1, 2, 3)) - [grey_of(i) for i in indices]).max() <= 4


def test_more_frames_a_second_repeat_them() -> None:
    payload, frames = run(videos()["mkv-ffv1"], VIDEO, fps=20)

    assert payload.num_frames == 2 * NUM_FRAMES
    assert (frames[::2] == frames[1::2]).all()


@pytest.mark.parametrize("max_frames", [1, 4, 8, 100])
def test_frames_are_spread_over_the_whole_file(max_frames: int) -> None:
    payload, frames = run(videos()["mp4-h264"], VIDEO, max_frames=max_frames)

    expected = [grey_of(i * NUM_FRAMES // max_frames) for i in range(max_frames)] if max_frames < 30 else None
    assert payload.num_frames == min(max_frames, NUM_FRAMES)
    if expected:
        assert np.abs(frames.mean((1, 2, 3)) - expected).max() <= 8


def test_large_frames_are_scaled_down() -> None:
    payload, frames = run(videos()["mp4-h264"], VIDEO, max_frame_pixels=1000)

    assert payload.width * payload.height <= 1000
    assert payload.width / payload.height == pytest.approx(64 / 48, rel=0.1)
    assert np.abs(frames[:, 0, 0].mean(1) - [grey_of(i) for i in range(NUM_FRAMES)]).max() <= 4


def test_video_is_turned_as_its_camera_was() -> None:
    """The matrix of a phone that was held upright (ISO/IEC 14496-12, tkhd)."""
    data = bytearray(video("mp4", "libx264", num_frames=3))
    at = data.index(b"tkhd") + 4 + 40
    upright = (0, 1 << 16, 0, -1 << 16, 0, 0, 48 << 16, 0, 1 << 30)
    assert struct.unpack_from(">9i", data, at) == (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    data[at : at + 36] = struct.pack(">9i", *upright)
    payload, _ = run(bytes(data), VIDEO)

    assert (payload.width, payload.height) == (48, 64)


def test_turned_frames_are_turned_the_right_way() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as opened:
        stream: Any = opened.add_stream("libx264", rate=1, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv444p"
        opened.mux(stream.encode(av.VideoFrame.from_ndarray(slope(), format="rgb24")))
        opened.mux(stream.encode(None))
    data = bytearray(file.getvalue())
    at = data.index(b"tkhd") + 4 + 40
    data[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, HEIGHT << 16, 0, 1 << 30)
    _, frames = run(bytes(data), VIDEO)

    # (x, y) goes to (HEIGHT - y, x): a quarter to the right, as Exif's 6.
    assert np.abs(frames[0].astype(int) - slope().transpose(1, 0, 2)[:, ::-1]).max() <= 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_pixels": 3000}, r"64 × 48 pixels came \(allowed: 3000 in all\)"),
        ({"max_seconds": 2}, r"3\.0 s came \(allowed: at most 2 s\)"),
        ({"max_decoded_frames": 29}, r"more than 29 frames came \(allowed: at most 29\)"),
        ({"max_bytes": 64 * 48 * 3 * 29}, r"more than 267264 bytes of frames came"),
    ],
)
@pytest.mark.parametrize("name", ["mp4-h264", "webm-vp9", "avi-mpeg4"])
def test_video_beyond_a_limit_is_refused(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MediaTooLarge, match=words):
        run(videos()[name], VIDEO, **changes)


@pytest.mark.parametrize("name", videos())
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_half_a_video_is_refused(name: str, share: float) -> None:
    data = videos()[name]
    with pytest.raises(
        BadInput, match=r"^video: (the file is damaged|a file of an unknown kind|video coded|a \w+ file w)"
    ):
        run(data[: int(len(data) * share)], VIDEO)


def test_other_codecs_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"video coded as huffyuv came \(allowed: av1"):
        run(video("avi", "huffyuv", "yuv422p"), VIDEO)
