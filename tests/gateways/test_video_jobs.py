"""Whatever happens to a job, in whatever order: it is over once, and never goes back."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateways.videos import jobs
from gateways.videos.jobs import Job
from omni_bus.media.mp4 import Facts

FACTS = Facts(320, 240, 24.0, 96, has_sound=True)
ORDER = ("queued", "in_progress", "completed", "failed")


def new(**changes: Any) -> Job:
    job = Job(id="video_gen_1", model="m", prompt="a cat", seconds="4", size="", quality="default", created_at=100)
    return msgspec.structs.replace(job, **changes)


class Jobs(RuleBasedStateMachine):
    """Events in any order, also late and repeated ones."""

    @initialize(num_frames=st.none() | st.integers(1, 500))
    def begin(self, num_frames: int | None) -> None:
        self.job = self.before = new(num_frames=num_frames)
        self.now = 100.0
        self.end: Job | None = None

    def _is(self, job: Job) -> None:
        self.before, self.job = self.job, job
        self.now += 1
        if job.is_over and self.end is None:
            self.end = job

    @rule()
    def admit(self) -> None:
        self._is(jobs.admitted(self.job, self.now))

    @rule(num_steps=st.integers(0, 50), share=st.floats(0, 1), phase=st.sampled_from(jobs.PHASES))
    def report(self, num_steps: int, share: float, phase: str) -> None:
        step = int(num_steps * share)
        self._is(jobs.advanced(self.job, {"step": step, "num_steps": num_steps, "phase": phase}))

    @rule(num_frames=st.integers(0, 1000), is_told_steps=st.booleans())
    def decode(self, num_frames: int, is_told_steps: bool) -> None:  # noqa: FBT001
        self._is(jobs.decoded(self.job, num_frames, is_told_steps=is_told_steps))

    @precondition(lambda self: self.job.status != "queued")
    @rule()
    def complete(self) -> None:
        self._is(jobs.completed(self.job, FACTS, self.now, keep_s=60, stage_durations={"dit": 1.0}))

    @rule(code=st.sampled_from([400, 500, 503]))
    def fail(self, code: int) -> None:
        self._is(jobs.failed(self.job, code, "why", self.now))

    @rule()
    def lose(self) -> None:
        self._is(jobs.lost(self.job, self.now))

    @invariant()
    def never_goes_back(self) -> None:
        before, job = self.before, self.job
        assert ORDER.index(before.status) <= ORDER.index(job.status) or before.is_over
        assert before.progress <= job.progress
        assert (job.progress == 100) == (job.status == "completed")

    @invariant()
    def is_over_once(self) -> None:
        if self.end is not None:
            assert self.job == self.end

    @invariant()
    def says_what_clients_read(self) -> None:
        told = jobs.job_object(self.job)
        assert (told["error"] is not None) == (told["status"] == "failed")
        assert (told["file_name"] is not None) == (told["status"] == "completed")
        assert (told["completed_at"] is not None) == self.job.is_over
        assert msgspec.convert(msgspec.to_builtins(self.job), Job) == self.job  # as the disk has it


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize(
    "report",
    [
        None,
        {},
        {"step": 1, "num_steps": 2},
        {"step": 1, "num_steps": 2, "phase": "dream"},
        {"step": 3, "num_steps": 2, "phase": "denoise"},
        {"step": -1, "num_steps": 2, "phase": "denoise"},
        {"step": "1", "num_steps": 2, "phase": "denoise"},
    ],
)
def test_report_that_is_none_is_refused(report: Any) -> None:
    with pytest.raises(ValueError, match=r"progress: .*allowed"):
        jobs.advanced(new(status="in_progress"), report)


def test_progress_is_that_of_the_steps_and_then_of_the_frames() -> None:
    job, seen = jobs.admitted(new(num_frames=10), 101.0), []
    for step in range(1, 5):
        job = jobs.advanced(job, {"step": step, "num_steps": 4, "phase": "denoise"})
        seen.append(job.progress)
    for num_frames in (5, 10):
        job = jobs.decoded(job, num_frames, is_told_steps=True)
        seen.append(job.progress)
    assert seen == [21, 42, 64, 85, 92, 99]
    job = jobs.completed(job, FACTS, 104.5, keep_s=60, stage_durations={})
    assert (job.progress, job.inference_time_s, job.expires_at, job.num_frames) == (100, 3.5, 164, 96)
