"""Each benchmark runs and says its ratios; what they come to is no business of a test."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ratios(output: str) -> dict[str, float]:
    """What stands under ``ratios``: a text, at least two blanks, a number."""
    found = {}
    for line in output.partition("\nratios\n")[2].splitlines():
        what, _, rest = line.strip().partition("  ")
        if rest.strip():
            found[what] = float(rest.split()[0])
    return found


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("pipeline", "coordinator frames per request of 1 chunk, in and out"),
        ("gateway", "gateway CPU per chunk, 10 clients / 1"),
        ("call", "call latency, pipe / ours"),
        ("curve", "round trip, with keys / without"),
        ("overload", "refusal p50, gateway / bus"),
        ("memory", "resident memory of all, after 200 requests / 20"),
        ("uploads", "p99 with 3 uploads of 2 MB / idle"),
        ("start", "start of coordinator / bare interpreter with its libraries"),
        pytest.param("routing", "hit rate, prefix / round_robin", marks=pytest.mark.model),
        pytest.param("round_trip", "sound that comes in / time to write it down", marks=pytest.mark.model),
        ("recovery", "stage killed until its request goes on / start of the stage"),
        ("sessions", "first word, session / pipeline"),
    ],
)
def test_quick_benchmark_prints_its_ratios(name: str, wanted: str) -> None:
    found = ratios(run(f"scripts/bench_{name}.py", "--quick"))

    assert found[wanted] > 0
    assert all(value > 0 for value in found.values())


def test_coordinator_frames_do_not_depend_on_the_chunks() -> None:
    """A count, so it may be asserted: the design promises at most six."""
    found = ratios(run("scripts/bench_pipeline.py", "--quick"))

    assert found["coordinator frames per request of 1 chunk, in and out"] <= 6
    assert found["coordinator frames per request of 20 chunks / of 1"] == 1


def test_page_of_all_benchmarks_has_their_ratios_and_a_machine(tmp_path: Path) -> None:
    said = run("scripts/bench_all", "--quick", "--only", "call", "start", "--out", str(tmp_path))

    page = (tmp_path / "bench_all.md").read_text()
    assert "| call latency, pipe / ours |" in page
    assert "| start of coordinator / bare interpreter with its libraries |" in page
    assert f"{os.cpu_count()} cores" in page
    assert platform.node() not in page
    assert "| coordinator frames per request | ≤ 6, independent of the number of chunks |  | not measured |" in page
    assert page.partition("| what | aim |")[2].partition("\n\n")[0] in said
    assert (tmp_path / "bench_call.txt").read_text().startswith("command: python scripts/bench_call.py --quick\n")


def test_picture_shows_every_load_that_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run("scripts/bench_all", "--quick", "--only", "gateway", "--out", str(tmp_path))

    assert (tmp_path / "bench_all.png").read_bytes().startswith(b"\x89PNG")
    assert "(bench_all.png)" in (tmp_path / "bench_all.md").read_text()


GOOD = """
import json, sys
print("ratios")
ratios = [{"what": "a / b", "value": 0.5, "aim": "", "key": "bus_rate"}]
json.dump({"ratios": ratios}, open(sys.argv[sys.argv.index("--json") + 1], "w"))
"""
HUNG = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({path!r}, "w").write(str(child.pid))
time.sleep(600)
"""


@pytest.fixture
def bench_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with a benchmark that ends, one that fails and one that hangs with a child of its own."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    loader = SourceFileLoader("bench_all", str(ROOT / "scripts" / "bench_all"))
    spec = spec_from_loader("bench_all", loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_all", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    (tmp_path / "bench_good.py").write_text(GOOD)
    (tmp_path / "bench_bad.py").write_text("raise SystemExit(7)")
    (tmp_path / "bench_hung.py").write_text(HUNG.format(path=str(tmp_path / "child")))
    monkeypatch.setattr(module, "SCRIPTS", tmp_path)
    benches = {"good": module.Bench((), 60), "bad": module.Bench((), 60), "hung": module.Bench((), 2)}
    monkeypatch.setattr(module, "BENCHES", benches)
    return module


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_benchmarks_that_fail_or_hang_are_told_and_the_others_go_on(
    bench_all: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_all", "--out", str(tmp_path / "out")])

    assert bench_all.main() == 1

    page = (tmp_path / "out" / "bench_all.md").read_text()
    assert "| small-frame one-way rate / blocking pyzmq with the same codec | ≥ 0.85 | 0.50 | **not met** |" in page
    assert "## bench_bad\n\nNot measured: ended with 7." in page
    assert "## bench_hung\n\nNot measured: not done after 2 s." in page
    assert "bench_hung: not done after 2 s" in capsys.readouterr().err
    assert not is_running(int((tmp_path / "child").read_text()))


def test_resumed_run_measures_what_is_missing(
    bench_all: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["bench_all", "--only", "good", "bad", "--out", out])
    bench_all.main()
    (tmp_path / "bench_good.py").write_text("raise SystemExit('measured twice')")
    (tmp_path / "bench_bad.py").write_text(GOOD.replace("bus_rate", "memory"))
    (tmp_path / "bench_hung.py").write_text(GOOD.replace("bus_rate", "frames"))
    monkeypatch.setattr(sys, "argv", ["bench_all", "--resume", "--out", out])

    assert bench_all.main() == 0

    assert "bench_good: measured already" in capsys.readouterr().out
    page = (tmp_path / "out" / "bench_all.md").read_text()
    assert [f"## bench_{name}" in page for name in ("good", "bad", "hung")] == [True] * 3
    assert "Not measured" not in page


def test_readme_keeps_all_but_its_table(bench_all: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_all, "ROOT", tmp_path)
    begin, end = bench_all.README_MARKS
    (tmp_path / "README.md").write_text(f"before\n{begin}old\n{end}after\n")

    bench_all.put_into_readme(["new", "table"])

    assert (tmp_path / "README.md").read_text() == f"before\n{begin}new\ntable\n{end}after\n"
    assert begin in (ROOT / "README.md").read_text()
    assert end in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("even", "flat_out", "expected"),
    [(1.1, 1.2, "met"), (1.1, 1.3, "**not met**"), (1.1, None, "not measured")],
)
def test_aim_is_met_when_all_its_numbers_keep_their_bound(
    bench_all: ModuleType, even: float, flat_out: float | None, expected: str
) -> None:
    values = {"cpu_even": even, "cpu_flat_out": flat_out}
    by_key = {key: {"what": "", "value": value} for key, value in values.items() if value is not None}
    aim = next(aim for aim in bench_all.AIMS if aim.what.startswith("CPU"))

    assert bench_all.verdict(aim, by_key) == expected
