from __future__ import annotations

from omni_bus.core.pipeline import Pipeline
from omni_bus.core.request import TRANSITIONS, Request, State
from omni_bus.errors import StageFailed
from omni_bus.ids import Peer
from omni_bus.wire.frames import RequestStats, Submit, Usage


def test_every_state_leads_to_the_end():
    assert set(TRANSITIONS) == set(State)
    for state in State:
        at, steps = state, 0
        while at is not None:
            at, steps = list(TRANSITIONS[at].values())[-1], steps + 1
            assert steps <= len(State)


def test_account_tells_the_end_and_nothing_of_the_contents() -> None:
    pipeline = Pipeline("chat", "chat", (), ())
    request = Request(Submit("r", "chat", ("text",)), Peer("g", 1, "g"), pipeline, (), received_at=10.0, deadline=None)
    request.stats["llm"] = RequestStats(0.25, 1.0, 1, 7, 70, Usage(3, 7))

    report = request.account("failed", StageFailed("'my prompt' is bad", stage="voice"), now=12.5)

    assert "my prompt" not in str(report)
    assert {key: report.fields[key] for key in ("request", "outcome", "code", "stage", "total_s")} == {
        "request": "r",
        "outcome": "failed",
        "code": "stage_failed",
        "stage": "voice",
        "total_s": 2.5,
    }
    assert (report.fields["stages"]["llm"]["chunks_out"], report.fields["stages"]["llm"]["completion_tokens"]) == (7, 7)
