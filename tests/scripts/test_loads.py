"""Soak, kill_run, hang_run, storm and fuzz run, and their judges tell right from wrong. Times are nothing to assert."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from adapters.synthetic_marks import ramp, text_piece
from loads import chats, deployment, soak
from loads.chats import Chat
from loads.deployment import Watched
from loads.kills import Kill, Run, Verdict
from loads.soak import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


# --- the scripts ----------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("script", "arguments", "wanted"),
    [
        (
            "kill_run",
            ["--seconds", "6", "--streams", "8", "--limit", "60"],
            "after the last kill: 8 of 8 streams right",
        ),
        (
            "storm",
            ["--clients", "60", "--slots", "10", "--spread", "3", "--margin", "60"],
            "60 clients left within 3 s",
        ),
        ("soak", ["--minutes", "0.1", "--cycle", "2", "--workers", "4", "--max-growth", "10000"], "held at rest"),
        ("fuzz", ["--count", "1000"], "malformed inputs"),
        ("hang_run", ["gateway.openai.0"], "request at 0.0 s: after"),
    ],
)
def test_script_runs_and_breaks_no_promise(script: str, arguments: list[str], wanted: str, tmp_path: Path) -> None:
    out = [] if script in ("storm", "hang_run") else ["--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, f"scripts/{script}", *arguments, *out],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert wanted in done.stdout
    assert "promises broken: 0" in done.stdout
    if script == "kill_run":
        kinds = {json.loads(line)["kind"] for line in (tmp_path / "kill_run.jsonl").read_text().splitlines()}
        assert kinds == {"kill", "request"}


# --- their judges ---------------------------------------------------------------------------------------------


def judged(text: str, sound: bytes) -> Chat:
    chat = Chat(marker="m", num_tokens=3)
    chats._judge(chat, text, sound)
    return chat


TEXT = "".join(text_piece("m", number) for number in range(3))
SOUND = bytes(ramp(0, len(TEXT) * chats.SAMPLES_PER_CHARACTER))


def test_whole_answer_is_right() -> None:
    assert judged(TEXT, SOUND).outcome == "right"


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        (TEXT[:-4], SOUND),
        (TEXT.replace("m:1", "m:2"), SOUND),
        (TEXT.replace("m:", "n:"), SOUND),
        (TEXT + " m:3", SOUND),
        ("what?", SOUND),
        (TEXT, SOUND[2:]),
        (TEXT, SOUND[:-2]),
        (TEXT, SOUND[:10] + SOUND[12:] + b"\0\0"),
        (TEXT, SOUND + b"\0"),
    ],
)
def test_lost_changed_or_strange_parts_are_wrong(text: str, sound: bytes) -> None:
    assert judged(text, sound).outcome == "wrong"


def test_only_the_agreed_shape_is_an_error_with_a_name() -> None:
    good = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}

    assert chats.read_error(json.dumps(good).encode()) == good["error"]
    for body in (b"", b"500 Internal Server Error", b"[]", b'{"error": "no"}', b'{"error": {"message": "no"}}'):
        assert chats.read_error(body) is None


class Unbroken:
    """What `Verdict` reads of a deployment that left nothing."""

    left: tuple[str, ...] = ()
    exit_code = 0
    num_tracebacks = 0


def verdict_of(kills: list[Kill], *requests: Chat, after: list[Chat] | None = None) -> Verdict:
    args = argparse.Namespace(seed=0, streams=1)
    run = Run(Unbroken(), args)  # type: ignore[arg-type]
    run.kills, run.chats = kills, list(requests)
    return Verdict(run, after or [])


def request(outcome: Any, **fields: Any) -> Chat:
    times: dict[str, Any] = {"begun_at": 10.0, "head_at": 11.0, "last_at": 12.0, "ended_at": 12.0}
    return Chat(marker="m", num_tokens=1, outcome=outcome, **(times | fields))


def test_named_ends_keep_the_promise() -> None:
    requests = [request("right"), request("failed", name="ServiceUnavailableError"), request("refused")]

    assert verdict_of([], *requests).broken == []


@pytest.mark.parametrize(
    "broken",
    [
        request(None),
        request("wrong"),
        request("unnamed"),
        request("right", max_silence_s=5.1),
        request("cut"),
    ],
    ids=["no end", "wrong", "unnamed", "late", "cut for no reason"],
)
def test_other_ends_break_it(broken: Chat) -> None:
    assert len(verdict_of([], broken).broken) == 1


def test_request_that_is_not_right_when_all_is_over_breaks_it() -> None:
    assert len(verdict_of([], after=[request("failed"), request("right")]).broken) == 1


def test_killed_gateway_explains_a_broken_connection() -> None:
    assert verdict_of([Kill("gateway.openai.1", 7, 11.5)], request("cut")).broken == []
    assert len(verdict_of([Kill("llm.0", 7, 11.5)], request("cut")).broken) == 1
    assert len(verdict_of([Kill("gateway.openai.1", 7, 2.0)], request("cut")).broken) == 1


def test_answer_may_begin_late_only_after_a_coordinators_death() -> None:
    late = request("right", head_at=16.0, last_at=17.0, ended_at=17.0)
    never = request("refused", head_at=None, last_at=16.0, ended_at=16.0)

    for chat in (late, never):
        assert len(verdict_of([], chat).broken) == 1
        assert len(verdict_of([Kill("llm.0", 7, 13.0)], chat).broken) == 1
        assert verdict_of([Kill("coordinator", 7, 13.0)], chat).broken == []
        assert len(verdict_of([Kill("coordinator", 7, 10.5)], chat).broken) == 1


def samples(mib: list[float], fds: list[int]) -> Iterator[Sample]:
    for number, (size, count) in enumerate(zip(mib, fds, strict=True)):
        yield Sample(60.0 * number, "llm.0", size, 0.0, count, 3, 0)


def test_steady_process_passes_the_soak() -> None:
    mib = [10.0, 30.0, 40.0, 41.0, 40.5, 41.0, 40.8, 41.1, 40.9]

    assert soak.judge(list(samples(mib, [5, 20, 30, 31, 30, 29, 31, 30, 30])), 1.0) == []


def test_growth_after_the_warm_up_fails_it() -> None:
    growing = list(samples([float(40 + 2 * i) for i in range(9)], [30] * 9))
    leaking = list(samples([40.0] * 9, [30, 30, 30, 30, 31, 32, 33, 34, 35]))

    assert soak.judge(growing, 1.0) == ["llm.0: memory grows by 2.00 MiB a minute (allowed: 1)"]
    assert soak.judge(leaking, 1.0) == ["llm.0: num_fds grew from at most 32 to at least 33"]


def test_what_a_process_holds_is_seen() -> None:
    size = 8 << 20
    before = deployment.holdings(os.getpid())
    fd = os.memfd_create("omni-bus")
    os.truncate(fd, size)
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own, mmap.mmap(fd, size) as shared:
        own.write(b"x" * size)
        shared.write(b"x" * size)
        after = deployment.holdings(os.getpid())
    os.close(fd)

    assert after.num_fds > before.num_fds
    assert after.num_segments == before.num_segments + 1
    assert after.own_bytes > before.own_bytes + size // 2
    assert after.shared_bytes > before.shared_bytes + size // 2


def test_everything_that_is_left_of_a_deployment_is_listed() -> None:
    watched = Watched("", on_event=None)
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env={**os.environ, deployment.RUN_FOLDER: str(watched._folder)},
    )
    try:
        (watched.run_folder).mkdir(parents=True)
        (watched.run_folder / "llm.0-12345.sock").touch()
        watched.pids["llm.0"] = 54321
        while not deployment.processes_with(f"{deployment.RUN_FOLDER}={watched._folder}\0".encode()):
            time.sleep(0)  # its environment is there once it was executed

        left = watched._leftovers()

        assert watched.stale_files() == ["llm.0-12345.sock"]
        assert f"process {sleeper.pid}" in left[0]
        assert "file omni-bus/bench/llm.0-12345.sock" in left
    finally:
        sleeper.communicate()
        watched._remove()
