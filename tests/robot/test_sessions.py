"""Which session an observation belongs to, and whether it begins."""

from __future__ import annotations

from gateways.robot.sessions import DEFAULT, MAX_SEEN, Sessions, Turn


def names(sessions: Sessions, *given: str) -> list[tuple[str, bool]]:
    return [(turn.session, turn.is_first) for turn in map(sessions.infer, given)]


def test_every_change_begins_a_session_anew() -> None:
    assert names(Sessions(is_multi=False), "a", "a", "b", "a", "a") == [
        ("a", True), ("a", False), ("b", True), ("a", True), ("a", False),
    ]  # fmt: skip


def test_several_sessions_keep_their_states_where_that_is_set() -> None:
    assert names(Sessions(is_multi=True), "a", "b", "a", "b") == [
        ("a", True), ("b", True), ("a", False), ("b", False),
    ]  # fmt: skip


def test_who_names_none_goes_on_with_the_last_one() -> None:
    assert names(Sessions(is_multi=False), "", "", "a", "") == [
        (DEFAULT, True), (DEFAULT, False), ("a", True), ("a", False),
    ]  # fmt: skip


def test_reset_forgets_the_current_one_and_all_seen() -> None:
    sessions = Sessions(is_multi=True)
    names(sessions, "a", "b")

    sessions.reset()

    assert names(sessions, "b", "a") == [("b", True), ("a", True)]
    sessions.reset()
    assert sessions.infer().session == DEFAULT


def test_sessions_whose_states_are_gone_begin_anew_under_their_names() -> None:
    sessions = Sessions(is_multi=True)
    names(sessions, "a", "b")

    sessions.restart()

    assert names(sessions, "", "a", "b") == [("b", True), ("a", True), ("b", False)]


def test_what_is_over_is_named_once() -> None:
    sessions = Sessions(is_multi=False)

    assert sessions.infer("a") == Turn("a", True)
    assert sessions.infer("b") == Turn("b", True, ("a",))
    assert sessions.infer("b") == Turn("b", False)


def test_least_recently_used_session_is_forgotten_first() -> None:
    sessions = Sessions(is_multi=True)
    names(sessions, *(f"s{i}" for i in range(MAX_SEEN)))
    sessions.infer("s0")

    assert sessions.infer("new") == Turn("new", True, ("s1",))
    assert sessions.infer("s0") == Turn("s0", False)
    assert sessions.infer("s1") == Turn("s1", True, ("s2",))
