"""A conversation as its client follows it, and the script that is spoken into it: events and moments by hand."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from omni_bus.client.playback import PlaybackClock
from omni_bus.talk import plot
from omni_bus.talk.dialogue import PATIENCE_S, TRANSCRIPTION, Dialogue, Turn, rows_of
from omni_bus.talk.piece import PIECE_BYTES, PIECE_S, RATE_HZ, SILENCE
from omni_bus.talk.script import PAUSE_S, Line, Script

HEARD = "conversation.item.input_audio_transcription"
SAID = "response.output_audio_transcript"
TIMINGS = {"detected": 500.0, "generation": 700.0, "first_text": 1000.0, "first_audio": 1100.0, "done": 1200.0}
LOUD = b"\x01\x01" * (PIECE_BYTES // 2)


class Talk:
    """A dialogue, with what it showed."""

    def __init__(self) -> None:
        self.playback = PlaybackClock()
        self.shown: list[str] = []
        self.warned: list[str] = []
        self.dialogue = Dialogue(self.playback, self.shown.append, self.warned.append)
        self.say("session.updated")

    def say(self, kind: str, at: float = 0.0, **fields: Any) -> list[dict[str, Any]]:
        """Let the server say something."""
        return self.dialogue.on_event({"type": kind, **fields}, at)

    def turn(self, *, start: float, stopped: float) -> None:
        """Let the user be heard, and an answer begin."""
        self.say("input_audio_buffer.speech_started", start, item_id="u", audio_start_ms=int(start * 1000))
        self.say("input_audio_buffer.speech_stopped", stopped, item_id="u", audio_end_ms=0)
        self.say("response.created", stopped, response={"id": "r"})

    def sound(self, at: float, seconds: float, item: str = "a") -> None:
        """Let sound of the answer come."""
        delta = base64.b64encode(b"\x01\x01" * int(seconds * RATE_HZ)).decode()
        self.say("response.output_audio.delta", at, response_id="r", item_id=item, delta=delta)

    def done(self, status: str = "completed", **fields: Any) -> None:
        """Let the answer be over."""
        self.say("response.done", 0.0, response={"id": "r", "status": status, "timings": TIMINGS, **fields})


def test_words_are_shown_as_they_come_each_speaker_on_a_line() -> None:
    talk = Talk()
    talk.say(f"{HEARD}.delta", item_id="u", delta=" What ")
    talk.say(f"{HEARD}.delta", item_id="u", delta="now?")
    talk.say(f"{HEARD}.completed", item_id="u", transcript=" What now?")
    talk.say(f"{SAID}.delta", item_id="a", delta="Nothing")
    talk.say(f"{HEARD}.completed", item_id="v", transcript=" Really?")  # of a server that is late with it
    talk.say(f"{SAID}.delta", item_id="a", delta=" at all.")
    talk.say(f"{SAID}.done", item_id="a", transcript="Nothing at all.")

    assert "".join(talk.shown) == "heard: What now?\nsaid: Nothing\nheard: Really?\nsaid: at all.\n"


def test_latency_is_split_into_its_parts() -> None:
    talk = Talk()
    talk.turn(start=1.0, stopped=3.0)
    talk.sound(3.65, 0.1)
    talk.sound(3.9, 0.1)
    talk.done()

    assert rows_of(talk.dialogue.turns) == [["1", "500", "200", "300", "100", "1100", "1150"]]


def test_server_without_timings_leaves_dashes() -> None:
    talk = Talk()
    talk.turn(start=1.0, stopped=3.0)
    talk.sound(3.25, 0.1)
    talk.done(timings=None)
    talk.turn(start=5.0, stopped=6.0)  # and no answer

    assert rows_of(talk.dialogue.turns) == [["1", "–", "–", "–", "–", "–", "250"]]


def test_interruption_cuts_what_is_heard_and_tells_how_much_was() -> None:
    talk = Talk()
    talk.turn(start=1.0, stopped=3.0)
    talk.sound(3.5, 1.0)
    talk.playback.take(RATE_HZ)  # half a second

    told = talk.say("input_audio_buffer.speech_started", 4.0, item_id="v", audio_start_ms=3900)
    talk.sound(4.0, 1.0)

    assert told == [{"type": "conversation.item.truncate", "item_id": "a", "content_index": 0, "audio_end_ms": 500}]
    assert talk.playback.is_empty
    talk.done("cancelled")
    assert [bool(turn.timings) for turn in talk.dialogue.turns] == [True, False]
    assert "".join(talk.shown) == "(interrupted: 0.50 s of the answer were heard)\n"


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("error", {"error": {"message": "no such voice", "code": "x"}}, "no such voice"),
        (f"{HEARD}.failed", {"item_id": "u", "error": {"code": "lost"}}, "lost"),
        (
            "response.done",
            {"response": {"id": "r", "status": "failed", "status_details": {"error": {"message": "stage lost"}}}},
            "stage lost",
        ),
        ("response.done", {"response": {"id": "r", "status": "failed"}}, "the server gave no reason"),
    ],
)
def test_what_goes_wrong_is_told(kind: str, fields: dict[str, Any], words: str) -> None:
    talk = Talk()

    talk.say(kind, **fields)

    assert (talk.dialogue.problems, talk.warned) == ([words], [words])


def test_server_that_writes_nothing_down_talks_as_well() -> None:
    talk = Talk()

    talk.say("error", error={"message": "nothing here writes speech down", "event_id": TRANSCRIPTION["event_id"]})

    assert talk.dialogue.problems == []


def test_next_line_waits_until_the_answer_was_heard() -> None:
    talk = Talk()
    script = Script([Line("one.wav", LOUD + b"\x01\x01"), Line("two.wav", LOUD)], talk.dialogue)
    moments = (number * PIECE_S for number in range(10_000))

    def next_loud() -> float:
        return next(at for at in moments if script.piece(at) not in (SILENCE, None))

    assert next_loud() >= PAUSE_S
    last = script.piece(next(moments))
    assert last is not None
    assert last == b"\x01\x01" + bytes(PIECE_BYTES - 2)
    talk.turn(start=0.5, stopped=1.5)
    assert {script.piece(next(moments)) for _ in range(100)} == {SILENCE}
    talk.sound(0.0, 0.02)
    talk.done()
    assert script.piece(next(moments)) == SILENCE
    talk.playback.take(PIECE_BYTES)
    since = next(moments)
    assert script.piece(since) == SILENCE
    assert next_loud() == pytest.approx(since + PAUSE_S, abs=PIECE_S)


def test_line_that_nobody_answers_is_told_and_passed() -> None:
    talk = Talk()
    script = Script([Line("hum.wav", LOUD)], talk.dialogue)

    pieces = [script.piece(number * PIECE_S) for number in range(int((PAUSE_S + PATIENCE_S) / PIECE_S) + 3)]

    assert pieces.count(LOUD) == 1
    assert pieces.index(None) * PIECE_S == pytest.approx(PAUSE_S + PATIENCE_S, abs=PIECE_S)
    assert talk.warned == ["no answer came to hum.wav within 20 s"]


def test_picture_has_a_lane_for_each_part_that_is_known(tmp_path) -> None:
    turn = Turn(1.0, stopped_at=3.0, first_sound_at=3.7, played_at=3.72, played_until=5.0, timings=TIMINGS)
    turn.heard = "Is it $5 or $\\frac{6?"

    lanes = plot.lanes_of(turn)

    assert [(label, round(begin, 3), round(end, 3)) for label, _, begin, end in lanes] == [
        ("the user speaks", -1.5, 0.0),
        ("end of turn", 0.0, 0.5),
        ("transcription", 0.5, 0.7),
        ("first word", 0.7, 1.0),
        ("first sound", 1.0, 1.1),
        ("the answer is heard", 1.22, 2.5),
    ]
    assert [label for label, *_ in plot.lanes_of(Turn(1.0, stopped_at=2.0, played_at=2.1))] == [
        "the user speaks",
        "the answer is heard",
    ]
    assert plot.chosen([turn, Turn(9.0)]) is turn
    assert plot.chosen([]) is None
    plot.draw(turn, str(tmp_path / "turn.svg"))
    assert b"the answer is heard" in (tmp_path / "turn.svg").read_bytes()
