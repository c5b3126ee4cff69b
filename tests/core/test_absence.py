import pytest

from omni_bus.core.absence import MAX_ABSENCES, MAX_REASON_CHARACTERS, Absences
from omni_bus.core.admission import RETRY_AFTER_S
from omni_bus.core.membership import Membership
from omni_bus.ids import Peer
from omni_bus.wire.frames import Hello, Outlook


class Here:
    """A membership and what is known of those who are not in it."""

    def __init__(self) -> None:
        self.membership = Membership()
        self.absences = Absences(self.membership)

    def join(self, name: str, *, is_ready: bool = True):
        stage, _, replica = name.partition(".")
        actor = self.membership.join(Hello(1, Peer(name, 1, "e"), "stage", stage, int(replica), is_ready), 0.0)
        self.absences.join(actor)
        return actor

    def leave(self, name: str, reason: str, now: float) -> None:
        actor = self.membership.named(name)
        assert actor is not None
        self.membership.leave(actor)
        self.absences.leave(actor, reason, now)

    def outlook(self, name: str, phase: str, reason: str = "", retry_after_s: float = 0.0, now: float = 0.0) -> None:
        stage, _, replica = name.partition(".")
        self.absences.take(Outlook(name, stage, int(replica), phase, reason, retry_after_s), now)


@pytest.fixture
def here() -> Here:
    return Here()


def test_row_says_who_is_away_since_when_and_why(here):
    here.join("llm.1")
    here.leave("llm.1", "no heartbeat for 5 s", 10.0)

    assert here.absences.rows(12.5) == [
        {
            "actor": "llm.1",
            "role": "stage",
            "stage": "llm",
            "replica": 1,
            "phase": "lost",
            "fraction": 0.0,
            "is_ready": False,
            "elapsed_s": 2.5,
            "is_live": False,
            "reason": "no heartbeat for 5 s",
        }
    ]


def test_supervisors_word_replaces_what_was_known(here):
    here.join("llm.0")
    here.leave("llm.0", "its process ended", 10.0)
    here.outlook("llm.0", "backing off", "SIGKILL", 2.5, 10.1)

    (row,) = here.absences.rows(11.1)
    assert (row["phase"], row["reason"], row["elapsed_s"]) == ("backing off", "SIGKILL", 1.0)


def test_member_is_not_absent_whatever_was_said_late(here):
    here.outlook("llm.0", "starting")
    here.join("llm.0")
    assert here.absences.rows(0.0) == []

    here.outlook("llm.0", "starting")
    assert here.absences.rows(0.0) == []


def test_replica_that_is_not_wanted_any_more_is_forgotten(here):
    here.outlook("llm.0", "degraded")
    here.outlook("llm.0", "stopped")

    assert here.absences.rows(0.0) == []
    assert not here.absences.is_degraded("llm")


def test_clients_and_gateways_are_not_missed(here):
    gateway = here.membership.join(Hello(1, Peer("gateway.0", 1, "e"), "gateway"), 0.0)
    here.membership.leave(gateway)
    here.absences.leave(gateway, "goodbye", 0.0)

    assert here.absences.rows(0.0) == []


def test_stage_is_degraded_when_no_replica_is_here_or_comes(here):
    here.outlook("llm.0", "degraded")
    assert here.absences.is_degraded("llm")

    here.outlook("llm.1", "backing off")
    assert not here.absences.is_degraded("llm")
    here.outlook("llm.1", "degraded")
    assert here.absences.is_degraded("llm")

    here.join("llm.2", is_ready=False)
    assert not here.absences.is_degraded("llm")
    assert not here.absences.is_degraded("voice")


def test_refusal_names_each_replica_and_when_to_ask_again(here):
    here.outlook("llm.0", "backing off", "SIGKILL", 4.0, 10.0)
    here.outlook("llm.1", "degraded", "exit code 70", 60.0, 10.0)

    error = here.absences.unavailable("llm", 11.0)

    assert error.message == (
        "stage 'llm' has no replica that can serve (llm.0: backing off, SIGKILL; llm.1: degraded, exit code 70)"
    )
    assert (error.stage, error.is_retry_safe, error.retry_after_s) == ("llm", True, 3.0)


def test_degraded_stage_is_not_asked_again_soon_however_long_it_is_down(here):
    here.outlook("llm.0", "degraded", "exit code 70", 60.0, 10.0)

    assert here.absences.unavailable("llm", 1000.0).retry_after_s == 60.0


def test_replica_that_loads_may_serve_at_any_moment(here):
    here.outlook("llm.1", "degraded", "exit code 70", 60.0, 10.0)
    here.join("llm.0", is_ready=False)

    error = here.absences.unavailable("llm", 11.0)

    assert "llm.0: starting; llm.1: degraded" in error.message
    assert error.retry_after_s == RETRY_AFTER_S


def test_stage_of_which_nothing_is_known_is_refused_too(here):
    error = here.absences.unavailable("llm", 0.0)

    assert (error.message, error.retry_after_s) == ("stage 'llm' has no replica that can serve", RETRY_AFTER_S)


def test_what_is_remembered_is_bounded(here):
    for number in range(MAX_ABSENCES + 5):
        here.outlook(f"llm.{number}", "degraded", "x" * 10_000)

    rows = here.absences.rows(0.0)
    assert len(rows) == MAX_ABSENCES
    assert rows[0]["actor"] == "llm.5"
    assert len(rows[0]["reason"]) == MAX_REASON_CHARACTERS
