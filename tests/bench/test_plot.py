from __future__ import annotations

import sys
from pathlib import Path

import pytest

from omni_bus.bench import plot
from omni_bus.bench.record import Record
from omni_bus.errors import BadInput


def test_missing_matplotlib_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(BadInput, match=r"--plot needs the package matplotlib.*omni-bus\[bench\]"):
        plot.require()


def answers() -> list[Record]:
    return [
        Record(
            index=n, intended_at=0.0, ended_at=n + 1.0, texts=[(0.1 * n + 0.1, 1), (0.5 * n + 0.5, 1)], output_tokens=2
        )
        for n in range(4)
    ]


FAILED = [Record(index=0, intended_at=0.0, ended_at=0.5, failure="503 Busy")]
LEFT = [Record(index=0, intended_at=0.0, ended_at=0.5, has_left=True)]
SPOKEN = [Record(index=0, intended_at=0.0, ended_at=2.0, sounds=[(0.5, 1.0), (1.0, 1.0)], output_tokens=0)]


@pytest.mark.parametrize(
    ("compared", "over_time", "num_panels"),
    [
        ({"load": answers()}, {"load": answers()}, 4),
        ({"alone": answers(), "beside": answers() + FAILED}, {"alone": answers(), "beside": answers() + FAILED}, 4),
        ({"before": answers(), "after": answers()}, {"storm": LEFT}, 4),
        ({"load": FAILED}, {"load": FAILED}, 1),
        ({"load": SPOKEN}, {"load": SPOKEN}, 4),
    ],
)
def test_every_kind_of_run_can_be_drawn(tmp_path: Path, compared, over_time, num_panels: int) -> None:
    pytest.importorskip("matplotlib")
    plot.require()
    file = tmp_path / "a.svg"

    plot.draw(plot.Drawing(heading="m at http://x", compared=compared, over_time=over_time), str(file))

    text = file.read_text(encoding="utf-8")
    assert text.startswith("<?xml")
    assert text.count('<g id="axes_') >= num_panels
