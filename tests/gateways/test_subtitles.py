"""Subtitle files as players read them."""

from __future__ import annotations

import pytest

from gateways.subtitles import Cue, srt, vtt

CUES = [Cue(0.0, 1.5, "Hello."), Cue(61.0004, 3725.9996, " two\r\n\r\n lines ")]


def test_srt() -> None:
    assert srt(CUES) == ("1\n00:00:00,000 --> 00:00:01,500\nHello.\n\n2\n00:01:01,000 --> 01:02:06,000\ntwo\nlines\n\n")


def test_vtt() -> None:
    assert vtt(CUES) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello.\n\n00:01:01.000 --> 01:02:06.000\ntwo\nlines\n\n"
    )


@pytest.mark.parametrize("write", [srt, vtt])
def test_nothing_said_is_an_empty_file(write) -> None:
    assert write([]) in {"", "WEBVTT\n\n"}


def test_text_can_not_end_its_cue_or_be_a_tag() -> None:
    cue = Cue(0, 1, "a\n\n2\n00:00 --> 00:01\n<b>x</b> & y")

    assert vtt([cue]).count("-->") == srt([cue]).count("-->") == 1
    assert "\n\n2" not in srt([cue])
    assert "&lt;b&gt;x&lt;/b&gt; &amp; y" in vtt([cue])
