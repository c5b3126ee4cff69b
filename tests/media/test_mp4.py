"""Videos are what their frames were: whole files with the head first, and fragments that play when they come."""

from __future__ import annotations

import io
import os
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter

from omni_bus.media import h264, mp4, yuv
from omni_bus.media.h264 import Settings
from omni_bus.media.mp4 import Facts, Fragment, Mp4File, Mp4Fragments, boxes
from omni_bus.media.video_pool import frame_slices
from omni_bus.wire.payloads import Audio, Blob, Video

SETTINGS = Settings(encoder="libx264", quality=12)


@pytest.fixture
def converter():
    found = yuv.Converter()
    yield found
    found.close()


def scene(num_frames: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """A bright bar that moves over two smooth shades."""
    rows, columns = np.mgrid[0:height, 0:width]
    frames = np.empty((num_frames, height, width, 3), np.uint8)
    frames[..., 0] = 60 + 100 * columns // width
    frames[..., 1] = 40 + 120 * rows // height
    frames[..., 2] = 90
    for index, frame in enumerate(frames):
        frame[:, 2 * index : 2 * index + 8] = (230, 220, 40)
    return frames


def payloads(frames: np.ndarray[Any, Any], step: int = 5, num: int = 1, den: int = 24) -> list[Video]:
    _, height, width, _ = frames.shape
    return [
        Video(at, len(part), height, width, num, den, Blob(part.tobytes()))
        for at in range(0, len(frames), step)
        for part in [frames[at : at + step]]
    ]


def whole(converter: yuv.Converter, pieces: list[Video | Audio], **more: Any) -> tuple[Facts, bytes]:
    fd = os.memfd_create("video")
    try:
        file = Mp4File(fd, converter, SETTINGS, **more)
        for piece in pieces:
            file.feed_blocking(piece)
        facts = file.finish_blocking()
        return facts, os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


def fragments_of(converter: yuv.Converter, pieces: list[Video]) -> list[Fragment]:
    maker = Mp4Fragments(converter)
    return [fragment for piece in pieces for fragment in maker.feed_blocking(piece)] + list(maker.finish_blocking())


def decoded(data: bytes) -> list[Any]:
    with av.open(io.BytesIO(data), "r") as container:
        return list(container.decode(video=0))


def error_of(frames: list[Any], pictures: np.ndarray[Any, Any]) -> float:
    """The mean difference of a channel's value, in its 256 steps."""
    _, height, width, _ = pictures.shape
    seen = np.stack([frame.to_ndarray(format="rgb24")[:height, :width] for frame in frames])
    return float(np.abs(seen.astype(int) - pictures).mean())


@pytest.mark.parametrize(("height", "width"), [(64, 96), (65, 96), (64, 97), (67, 99)])
def test_file_shows_its_frames(converter, height: int, width: int) -> None:
    pictures = scene(13, height, width)
    facts, data = whole(converter, [*payloads(pictures)])

    assert facts == Facts(width, height, 24.0, 13, has_sound=False)
    frames = decoded(data)
    assert [frame.pts * frame.time_base for frame in frames] == [Fraction(i, 24) for i in range(13)]
    assert (frames[0].width, frames[0].height) == (width + width % 2, height + height % 2)
    assert error_of(frames, pictures) < 6  # what half the colour samples and the encoder take
    assert (frames[0].colorspace, frames[0].color_range) == (Colorspace.ITU709, ColorRange.MPEG)


def test_head_comes_before_the_media(converter) -> None:
    _, data = whole(converter, [*payloads(scene(5, 64, 64))])

    kinds = [kind for kind, _, _ in boxes(data)]
    assert kinds.index(b"moov") < kinds.index(b"mdat")


@pytest.mark.parametrize("rate", [Fraction(24000, 1001), Fraction(1), Fraction(25, 2), Fraction(120)])
def test_rate_need_not_be_whole(converter, rate: Fraction) -> None:
    pieces = payloads(scene(6, 64, 64), num=rate.denominator, den=rate.numerator)
    _, data = whole(converter, [*pieces])

    assert [frame.pts * frame.time_base for frame in decoded(data)] == [i / rate for i in range(6)]


@pytest.mark.parametrize(("rate_hz", "channels", "fmt"), [(24000, 1, "s16"), (44100, 2, "f32"), (22050, 6, "s16")])
def test_sound_is_in_the_file_wherever_it_came(converter, rate_hz: int, channels: int, fmt: Any) -> None:
    frames = payloads(scene(24, 64, 64))
    tone = np.sin(2 * np.pi * 440 * np.arange(rate_hz) / rate_hz)[:, None] * np.ones(channels)
    data = (tone * 16000).astype("<i2") if fmt == "s16" else (tone / 2).astype("<f4")
    sound = Audio(rate_hz, channels, fmt, Blob(data.tobytes()))
    for pieces in ([*frames, sound], [sound, *frames], [frames[0], sound, *frames[1:]]):
        facts, file = whole(converter, pieces, expects_sound=True)
        assert facts.has_sound
        with av.open(io.BytesIO(file), "r") as container:
            heard = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
            stream = container.streams.audio[0]
            assert stream.codec_context.name == "aac"
            assert len(heard) / stream.codec_context.sample_rate == pytest.approx(1.0, abs=0.1)
            loudest = np.argmax(np.abs(np.fft.rfft(heard))) * stream.codec_context.sample_rate / len(heard)
            assert loudest == pytest.approx(440, abs=3)
        assert len(decoded(file)) == 24


def test_file_without_the_sound_that_was_expected_is_silent(converter) -> None:
    facts, data = whole(converter, [*payloads(scene(5, 64, 64))], expects_sound=True)

    assert not facts.has_sound
    assert len(decoded(data)) == 5


def test_every_fragment_plays_when_it_comes(converter) -> None:
    pictures = scene(23, 66, 98)
    maker = Mp4Fragments(converter)
    stream = b""
    num_frames = 0
    for index, piece in enumerate(payloads(pictures)):
        made = list(maker.feed_blocking(piece))
        assert sum(fragment.num_frames for fragment in made) == piece.num_frames, "nothing is held back"
        for fragment in made:
            kinds = [kind for kind, _, _ in boxes(fragment.data)]
            assert kinds == ([b"ftyp", b"moov"] if index == 0 else []) + [b"moof", b"mdat"]
            stream += fragment.data
        num_frames += piece.num_frames
        frames = decoded(stream)
        assert [frame.pts * frame.time_base for frame in frames] == [Fraction(i, 24) for i in range(num_frames)]
    assert list(maker.finish_blocking()) == []
    assert error_of(decoded(stream), pictures) < 8


def test_fragments_of_large_payloads_stay_small(converter, monkeypatch) -> None:
    monkeypatch.setattr(mp4, "MAX_FRAGMENT_BYTES", 4000)
    noise = np.random.default_rng(1).integers(0, 256, (12, 64, 64, 3), dtype=np.uint8)
    made = fragments_of(converter, payloads(noise, step=12))

    assert len(made) > 2
    assert sum(fragment.num_frames for fragment in made) == 12
    assert all(len(fragment.data) < 4000 + 1500 or fragment.num_frames == 1 for fragment in made)
    assert len(decoded(b"".join(fragment.data for fragment in made))) == 12


def test_fragments_do_not_depend_on_how_frames_came(converter) -> None:
    pictures = scene(12, 64, 64)
    as_one = decoded(b"".join(f.data for f in fragments_of(converter, payloads(pictures, step=12))))
    for step in (1, 5):
        singly = decoded(b"".join(f.data for f in fragments_of(converter, payloads(pictures, step=step))))
        for a, b in zip(as_one, singly, strict=True):
            assert np.array_equal(a.to_ndarray(), b.to_ndarray())


def test_what_does_not_follow_is_refused(converter) -> None:
    first, second, third = payloads(scene(9, 64, 64), step=3)
    other = payloads(scene(6, 64, 66), step=3)[1]
    slower = payloads(scene(6, 64, 64), step=3, den=12)[1]
    for wrong in (third, first, other, slower):
        maker = Mp4Fragments(converter)
        list(maker.feed_blocking(first))
        with pytest.raises(ValueError, match="came"):
            list(maker.feed_blocking(wrong))
        assert len(list(maker.feed_blocking(second))) == 1, "what was refused left no trace"


def test_video_without_frames_is_none(converter) -> None:
    with pytest.raises(ValueError, match="no frame"):
        whole(converter, [Video(0, 0, 64, 64, 1, 24, Blob(b""))])


def test_conversion_gives_the_same_bytes_as_one_after_another(converter) -> None:
    """Byte for byte what swscale gives one frame at a time, whatever the threads do."""
    pictures = scene(40, 128, 96)
    plain = VideoReformatter()
    (video,) = payloads(pictures, step=40)
    for index, frame in enumerate(converter.frames_blocking(video)):
        expected = plain.reformat(
            av.VideoFrame.from_ndarray(pictures[index], format="rgb24"),
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
        )
        assert frame.pts == index
        assert np.array_equal(frame.to_ndarray(), expected.to_ndarray())


def test_conversions_under_way_are_bounded(converter, monkeypatch) -> None:
    begun: list[int] = []
    convert = yuv.convert_blocking

    def counted(picture: Any, pts: int, reformatter: Any) -> Any:
        begun.append(pts)
        return convert(picture, pts, reformatter)

    monkeypatch.setattr(yuv, "convert_blocking", counted)
    (video,) = payloads(scene(40, 32, 32), step=40)
    for index, _ in enumerate(converter.frames_blocking(video)):
        assert len(begun) <= index + 1 + yuv.IN_FLIGHT * yuv.NUM_THREADS


def test_slices_view_the_same_memory() -> None:
    (video,) = payloads(scene(10, 32, 32), step=10)
    pieces = list(frame_slices(video, max_pixels=3 * 32 * 32))

    assert [(piece.first_frame, piece.num_frames) for piece in pieces] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert b"".join(piece.data.view for piece in pieces) == video.data.view
    assert all(piece.data.view.obj is video.data.view.obj for piece in pieces)


def test_first_encoder_that_works_is_taken(monkeypatch) -> None:
    for hardware, expected in ((("h264_none", "mpeg4", "h264_nvenc"), "mpeg4"), (("h264_none",), "libx264")):
        monkeypatch.setattr(h264, "HARDWARE", hardware)
        h264._first_working.cache_clear()
        assert h264.encoder_name(Settings()) == expected
    h264._first_working.cache_clear()
    assert h264.encoder_name(Settings(encoder="h264_qsv")) == "h264_qsv"
