"""Observations and actions between a robot's form and a policy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from openpi_client import image_tools

from adapters.robot.options import RobotOptions
from adapters.robot.transforms import Transforms, resize_with_padding
from omni_bus.errors import BadInput, StartFailed

STATISTICS = {
    "norm_stats": {
        "state": {"mean": [1.0, 2.0], "std": [2.0, 4.0], "q01": [0.0, -1.0], "q99": [2.0, 1.0]},
        "actions": {"mean": [10.0], "std": [5.0], "q01": [0.0], "q99": [10.0]},
    }
}


def transforms(**options: Any) -> Transforms:
    return Transforms(msgspec.convert({"policy": {}} | options, RobotOptions))


@pytest.fixture
def statistics(tmp_path: Path) -> str:
    path = tmp_path / "norm_stats.json"
    path.write_bytes(msgspec.json.encode(STATISTICS))
    return str(path)


def picture(height: int, width: int) -> Any:
    return np.random.default_rng(7).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(("height", "width"), [(480, 640), (640, 480), (224, 224), (100, 37)])
def test_pictures_are_resized_as_robots_do_it_themselves(height: int, width: int) -> None:
    pixels = picture(height, width)

    found = resize_with_padding(pixels, 224, 224)

    assert np.array_equal(found, image_tools.resize_with_pad(pixels, 224, 224))


def test_thinnest_picture_keeps_a_row() -> None:
    assert resize_with_padding(picture(1, 900) | 1, 224, 224).any(axis=(1, 2)).sum() == 1


def test_picture_gets_the_policys_key_size_layout_and_type() -> None:
    wanted = {"cam/left": {"to": "image", "size": [8, 6], "layout": "chw", "dtype": "float32"}}

    found = transforms(images=wanted).observation({"cam/left": picture(16, 12), "rest": "kept"})

    assert found.keys() == {"image", "rest"}
    assert found["image"].shape == (3, 8, 6)
    assert found["image"].dtype == np.float32
    assert 0 <= found["image"].min() < found["image"].max() <= 1


def test_floats_in_zero_to_one_are_a_picture() -> None:
    pixels = picture(4, 4)

    found = transforms(images={"x": {}}).observation({"x": pixels.astype(np.float32) / 255})

    assert np.array_equal(found["x"], pixels)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.zeros((3, 4, 4), np.uint8), r"shape \(3, 4, 4\) came .allowed: a picture of shape .height, width, 3"),
        (np.zeros((4, 4), np.uint8), r"shape \(4, 4\)"),
        (np.zeros((0, 4, 3), np.uint8), r"shape \(0, 4, 3\)"),
        (np.zeros((4, 4, 3), np.int32), "type int32 came"),
        (np.full((4, 4, 3), 255.0), "floats out of range"),
        (np.full((4, 4, 3), np.nan), "floats out of range"),
        ("a.png", "a str came"),
        (b"\xff\xd8", "a bytes came"),
    ],
)
def test_what_is_no_picture_is_refused(value: Any, why: str) -> None:
    with pytest.raises(BadInput, match=f"cam: {why}"):
        transforms(images={"cam": {}}).observation({"cam": value})


def test_missing_camera_is_named_with_what_came() -> None:
    with pytest.raises(BadInput, match=r"cam: it is missing .came: camera, state"):
        transforms(images={"cam": {}}).observation({"camera": picture(2, 2), "state": [1.0]})
    assert transforms(images={"cam": {"is_required": False}}).observation({"x": 1}) == {"x": 1}


def test_states_are_normalised_padded_and_renamed(statistics: str) -> None:
    wanted = {"s": {"to": "state", "dim": 3, "pad_to": 5, "statistics": "state"}}

    found = transforms(states=wanted, statistics=statistics).observation({"s": [5.0, -2.0, 7.0]})

    assert np.allclose(found["state"], [2.0, -1.0, 7.0, 0.0, 0.0], atol=1e-5)
    assert found["state"].dtype == np.float32


def test_quantiles_go_from_minus_one_to_one(statistics: str) -> None:
    wanted = {"s": {"statistics": "state"}}
    options = {"states": wanted, "statistics": statistics, "normalisation": "quantiles"}

    found = transforms(**options).observation({"s": [2.0, -1.0]})

    assert np.allclose(found["s"], [1.0, -1.0], atol=1e-5)


@pytest.mark.parametrize("normalisation", ["mean_std", "quantiles"])
def test_actions_come_back_in_the_robots_units(statistics: str, normalisation: str) -> None:
    made = transforms(
        action_statistics="actions", statistics=statistics, normalisation=normalisation, action_dim=1, n_action_steps=2
    )

    found = made.actions({"actions": np.array([[0.0, 9.0], [1.0, 9.0], [2.0, 9.0]]), "more": np.arange(3)})

    expected = [10.0, 15.0] if normalisation == "mean_std" else [5.0, 10.0]
    assert np.allclose(found["actions"].ravel(), expected, atol=1e-4)
    assert found["actions"].dtype == np.float32
    assert found["more"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "value", [[1.0], np.zeros((1, 2)), "ab", [[1.0], [2.0, 3.0]], ["a", "b"], None, [True, False], {"x": 1}]
)
def test_what_is_no_vector_is_refused(value: Any) -> None:
    with pytest.raises(BadInput, match=r"s: .* .allowed: a vector of 2 numbers"):
        transforms(states={"s": {"dim": 2}}).observation({"s": value})


def test_numbers_beyond_float32_are_refused_and_never_infinite(statistics: str) -> None:
    for value in ([1e300, 0.0], [-(10**40), 0]):
        with pytest.raises(BadInput, match="s: "):
            transforms(states={"s": {}}).observation({"s": value})
    wanted = {"s": {"statistics": "tiny"}}
    with_tiny = STATISTICS["norm_stats"] | {"tiny": {"mean": [0.0], "std": [0.0]}}
    Path(statistics).write_bytes(msgspec.json.encode({"norm_stats": with_tiny}))
    with pytest.raises(BadInput, match="numbers beyond float32"):
        transforms(states=wanted, statistics=statistics).observation({"s": [3e38]})
    assert np.isinf(transforms().actions({"actions": np.full((1, 1), 1e300)})["actions"]).all()


def test_vector_longer_than_the_policys_is_refused() -> None:
    with pytest.raises(BadInput, match=r"3 numbers came .allowed: at most 2"):
        transforms(states={"s": {"pad_to": 2}}).observation({"s": [1, 2, 3]})


def test_instruction_is_taken_out_of_the_observation() -> None:
    values: dict[str, Any] = {"task": "pick", "x": 1}
    assert transforms(prompt_key="task").prompt(values) == "pick"
    assert values == {"x": 1}
    assert transforms(default_prompt="stay").prompt({}) == "stay"
    assert transforms().prompt({}) is None
    with pytest.raises(BadInput, match="prompt: nothing came"):
        transforms(is_prompt_required=True).prompt({})
    with pytest.raises(BadInput, match=r"prompt: a list came .allowed: text"):
        transforms().prompt({"prompt": ["pick"]})


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ("{", "state", "can't be read"),
        ('{"norm_stats": {}}', "state", "has no 'state'"),
        ('{"state": {"mean": [1]}}', "state", "no 'mean' and 'std' of one length"),
    ],
)
def test_statistics_that_are_none_stop_the_start(tmp_path: Path, text: str, name: str, why: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(StartFailed, match=why):
        transforms(states={"s": {"statistics": name}}, statistics=str(tmp_path / "s.json"))
    with pytest.raises(StartFailed, match="can't be read"):
        transforms(states={"s": {"statistics": name}}, statistics=str(tmp_path / "none.json"))
