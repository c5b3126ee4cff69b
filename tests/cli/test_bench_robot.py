"""What ``omni-bus bench robot`` takes, and what it refuses."""

from __future__ import annotations

import argparse
import math

import pytest

from omni_bus.bench.robots import RobotPlan
from omni_bus.cli import bench_robot
from omni_bus.errors import BadInput


def plan(*arguments: str) -> RobotPlan:
    parser = argparse.ArgumentParser()
    bench_robot.add_arguments(parser)
    return bench_robot.plan_of(parser.parse_args(arguments))


def test_options_become_a_plan() -> None:
    found = plan(
        *("--robots", "3", "--hz", "20", "--seconds", "2.5", "--image", "a/b=4x6", "--image", "c=1x2"),
        *("--state", "s=7", "--prompt", "go", "--api-key", "k", "--deadline-ms", "30"),
    )

    assert found == RobotPlan(
        num_robots=3,
        hz=20.0,
        seconds=2.5,
        images={"a/b": (4, 6), "c": (1, 2)},
        states={"s": 7},
        prompt="go",
        deadline_s=0.03,
        headers={"Authorization": "Api-Key k"},
    )
    assert plan("--hz", "10").allowed_s == 0.1
    assert plan("--hz", "inf").allowed_s == math.inf


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--robots", "0"), "--robots 0 came"),
        (("--hz", "-1"), "--hz -1 came"),
        (("--image", "a"), "--image: 'a' came .allowed: KEY=VALUE"),
        (("--image", "a=4"), "--image: '4' came .allowed: HEIGHTxWIDTH"),
        (("--image", "a=4xb"), "--image b came"),
        (("--state", "s=0"), "--state 0 came"),
        (("--deadline-ms", "x"), "--deadline-ms x came"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_option(arguments: tuple[str, ...], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        plan(*arguments)
