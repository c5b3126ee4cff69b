"""Each observation of a session is answered by one action array that names it."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from adapters.synthetic_actions import SyntheticActions
from adapters.synthetic_marks import marker_crc, read_actions
from omni_bus.engine import Starved
from omni_bus.errors import BadInput
from omni_bus.testing import StepDriver, make_engine
from omni_bus.wire.payloads import Blob, Json, Payload, Tensor


@pytest.fixture
def driver() -> StepDriver:
    return StepDriver(make_engine(SyntheticActions, {"horizon": 2, "dof": 6}))


def see(*markers: str) -> list[Payload]:
    return [Json({"marker": marker, "state": [0.0]}) for marker in markers]


def state(*values: float) -> Tensor:
    return Tensor("float32", (len(values),), Blob(struct.pack(f"<{len(values)}f", *values)))


def names(driver: StepDriver, session: str) -> list[tuple[int, int]]:
    """Return (chunk, CRC) of each action array of a session."""
    chunks = driver.results[session].port("actions")
    return [(marks[0].chunk, marks[0].crc) for marks in map(read_actions, chunks)]


def test_each_observation_gets_one_array(driver: StepDriver) -> None:
    session = driver.add({"observation": see("a", "b", "c")})
    driver.run(session)

    assert names(driver, session) == [(0, marker_crc("a")), (1, marker_crc("b")), (2, marker_crc("c"))]
    assert driver.results[session].port("actions")[0].shape == (2, 6)
    assert driver.results[session].finish.detail == {"chunks": 3}


def test_state_comes_back_with_the_next_observation(driver: StepDriver) -> None:
    session = driver.add({}, is_complete=False)
    driver.feed(session, "state", [state(0.5, 1.5, 2.5)])
    driver.feed(session, "observation", see("a"))
    driver.feed(session, "state", [state(9.0)])
    driver.step(session)

    [chunk] = driver.results[session].port("actions")
    assert {mark.echo for mark in read_actions(chunk)} == {(0.5, 1.5)}


def test_session_without_observation_starves(driver: StepDriver) -> None:
    session = driver.add({}, is_complete=False)

    assert driver.step(session) == [Starved(session)]
    assert driver.engine.max_resident == 32
    driver.feed(session, "observation", see("a"))
    driver.step(session)
    assert names(driver, session) == [(0, marker_crc("a"))]


def test_starved_step_is_not_counted_as_work(driver: StepDriver) -> None:
    engine: Any = driver.engine
    session = driver.add({}, is_complete=False)
    driver.step(session)
    driver.step(session)

    assert (engine.statistics().steps, engine.statistics().num_active) == (0, 1)


def test_end_of_input_ends_an_idle_session(driver: StepDriver) -> None:
    session = driver.add({"observation": see("a")}, is_complete=False)
    driver.step(session)
    driver.feed(session, "observation", [], is_last=True)
    driver.step(session)

    assert driver.results[session].is_finished


def test_truncate_gives_numbers_again(driver: StepDriver) -> None:
    engine: Any = driver.engine
    session = driver.add({"observation": see("a", "b", "c")}, is_complete=False)
    for _ in range(3):
        driver.step(session)
    engine.truncate(session, "actions", 1)
    driver.feed(session, "observation", see("d"), is_last=True)
    driver.run(session)

    assert [chunk for chunk, _ in names(driver, session)] == [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("port", "position", "field"), [("actions", 1, "position"), ("actions", -1, "position"), ("x", 0, "port")]
)
def test_truncate_refuses_what_was_not_reached(driver: StepDriver, port: str, position: int, field: str) -> None:
    engine: Any = driver.engine
    session = driver.add({}, is_complete=False)

    with pytest.raises(BadInput) as refused:
        engine.truncate(session, port, position)
    assert refused.value.field == field
    engine.truncate("unknown", port, position)


@pytest.mark.parametrize(
    ("port", "payload", "field"),
    [
        ("observation", Json({}), "observation"),
        ("observation", Json({"marker": 1}), "observation"),
        ("observation", state(1.0), "observation"),
        ("state", Json([1.0]), "state"),
        ("state", Tensor("int32", (1,), Blob(bytes(4))), "state"),
        ("state", Tensor("float32", (1, 1), Blob(bytes(4))), "state"),
        ("elsewhere", Json({}), "port"),
    ],
)
def test_input_that_cannot_be_read_fails_its_session(
    driver: StepDriver, port: str, payload: Payload, field: str
) -> None:
    good, bad = driver.add({"observation": see("a")}), driver.add({}, is_complete=False)
    driver.feed(bad, port, [payload])
    driver.feed(bad, "observation", see("later"), is_last=True)
    driver.run()

    error = driver.results[bad].error
    assert isinstance(error, BadInput)
    assert error.field == field
    assert driver.results[bad].outputs == []
    assert names(driver, good) == [(0, marker_crc("a"))]


def test_too_many_waiting_observations_fail_the_session() -> None:
    driver = StepDriver(make_engine(SyntheticActions, {"max_observations": 3}))
    session = driver.add({"observation": see("a", "b", "c", "d")})
    driver.run()

    assert isinstance(driver.results[session].error, BadInput)


def test_feed_of_unknown_session_is_ignored(driver: StepDriver) -> None:
    driver.engine.feed("unknown", "observation", see("a"), is_last=True)

    assert driver.engine.step(["unknown"]) == []


def test_session_is_not_safe_to_repeat() -> None:
    assert not SyntheticActions.is_idempotent


def test_frame_period_is_settable() -> None:
    assert make_engine(SyntheticActions, {"frame_period_s": 0.02}).frame_period_s == 0.02
