from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.bench import events
from omni_bus.bench.events import EventParser
from omni_bus.errors import BadInput

data = st.binary(min_size=1, max_size=30).filter(lambda text: not {10, 13} & set(text) and not text.startswith(b" "))


@given(st.lists(data, max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.randoms())
def test_events_do_not_depend_on_how_bytes_arrive(wanted: list[bytes], end: bytes, dice) -> None:
    stream = b"".join(b"data: " + event + end + end for event in wanted)
    cuts = sorted(dice.choices(range(len(stream) + 1), k=5))
    pieces = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    parser = EventParser()

    found = [event for piece in pieces for event in parser.feed(piece)]
    if end == b"\r":
        found += parser.feed(b"\n")  # a CR at the end waits for what may be its LF

    assert found == wanted


def test_comments_and_other_fields_say_nothing() -> None:
    assert EventParser().feed(b": ping\n\nevent: x\nid: 1\ndata: a\n\nretry: 3\n\n") == [b"a"]


def test_lines_of_one_event_are_joined() -> None:
    assert EventParser().feed(b"data: a\ndata:b\ndata:\n\n") == [b"a\nb\n"]


def test_stream_without_an_end_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 100)

    with pytest.raises(BadInput, match="more than 100 bytes"):
        EventParser().feed(b"x" * 101)
