"""What is heard, in order and with its gaps."""

from __future__ import annotations

from omni_bus.client.playback import PlaybackClock

RATE_HZ = 24_000


def test_sound_is_heard_in_order_with_silence_around_it() -> None:
    playback = PlaybackClock()
    assert playback.take(4) == bytes(4)

    playback.put("a", b"\x01\x02")
    playback.put("a", b"\x03\x04\x05\x06")
    playback.put("b", b"\x07\x08")

    assert playback.take(4) == b"\x01\x02\x03\x04"
    assert not playback.is_empty
    assert playback.take(6) == b"\x05\x06\x07\x08\x00\x00"
    assert playback.is_empty


def test_cut_tells_how_much_of_the_item_was_heard() -> None:
    playback = PlaybackClock()
    second = b"\x01\x01" * RATE_HZ
    playback.put("a", second)
    playback.put("b", second * 2)
    playback.take(len(second) * 3 // 2)

    assert playback.cut() == ("b", 500)

    playback.put("b", second)  # was under way
    assert playback.is_empty
    assert playback.take(2) == bytes(2)
    playback.put("c", second)
    assert playback.take(2) == b"\x01\x01"


def test_cut_before_the_first_sample_was_heard() -> None:
    playback = PlaybackClock()
    playback.put("a", b"\x01\x01")
    playback.take(2)
    playback.put("b", b"\x01\x01")

    assert playback.cut() == ("b", 0)


def test_nothing_is_cut_where_nothing_waits() -> None:
    playback = PlaybackClock()
    assert playback.cut() is None
    playback.put("a", b"\x01\x01")
    playback.take(2)
    assert playback.cut() is None


def test_heard_is_what_was_taken_of_the_current_answer() -> None:
    clock = PlaybackClock(16_000)
    clock.put("a", bytes(32_000))
    assert clock.heard is None
    clock.take(8_000)
    assert clock.heard == ("a", 250)
    clock.take(64_000)  # silence is not heard of it
    assert clock.heard == ("a", 1000)
