"""One request: a pipeline's call that waits at each of its model calls, and what it has put out meanwhile."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from adapters.diffusion import media
from adapters.diffusion.interposed import DENOISERS, Interposed, Prompts
from adapters.diffusion.joining import Fingerprints, ModelCall
from adapters.stepped_call import SteppedCall
from omni_bus.engine import Allocate, EngineRequest
from omni_bus.wire.payloads import Json, Payload


class Pause:
    """Where a call waits for its turn without asking for a model: before it decodes, or with something to send."""


PAUSE = Pause()


class Work:
    """What all requests of an engine share."""

    def __init__(
        self, pipeline: Any, takes: frozenset[str], prompts: Prompts, allocate: Allocate, rate_hz: int
    ) -> None:
        self.pipeline = pipeline
        self.takes = takes
        self.prompts = prompts
        self.allocate = allocate
        self.rate_hz = rate_hz
        self.denoisers = [part for name in DENOISERS if (part := getattr(pipeline, name, None)) is not None]
        self.publishes_frames = False
        """Whether video leaves group by group while it is decoded."""


class Plan(NamedTuple):
    """What a request comes to."""

    arguments: dict[str, Any]
    """Of the pipeline's call."""
    num_steps: int
    """Denoising steps; 0 where the pipeline decides."""
    time_base: tuple[int, int]
    """Seconds of a frame, as a fraction."""
    inputs: Mapping[str, Sequence[Payload]]


class Drawing:
    """A request that is under way."""

    def __init__(
        self,
        request: EngineRequest,
        work: Work,
        plan: Plan,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.request = request
        self.lora = getattr(request.params, "lora", None)
        self.num_passed_over = 0
        self.unit: ModelCall | Pause = PAUSE
        self.key: Hashable | None = None
        """By which its next unit may be joined with those of others; None runs alone."""
        self.num_steps_done = 0
        self._work = work
        self._plan = plan
        self._events: list[tuple[str, Payload]] = []
        self._fingerprints = Fingerprints()
        self._call: SteppedCall[ModelCall | Pause] = SteppedCall(pool, self._make)
        self._wait: Callable[[ModelCall | Pause], None] = _not_begun
        self._num_published = 0
        self._num_steps = plan.num_steps
        self._previews: list[int] | None = None
        self._num_looked = 0

    def advance(self) -> bool:
        """Go on to the next unit; False at the end.

        Raises:
            Exception: what the pipeline raised.
        """
        unit = self._call.advance()
        if unit is None:
            return False
        self.unit = unit
        self.key = None
        if isinstance(unit, ModelCall) and (key := unit.key(self._fingerprints)) is not None:
            self.key = (key, self.lora)
        return True

    def take_events(self) -> list[tuple[str, Payload]]:
        """Return what it has put out since it was asked last, for wanted ports."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End it where it waits."""
        self._call.close()

    # What follows runs on the call's own thread, in its turns.

    def _make(self, wait: Callable[[ModelCall | Pause], None]) -> None:
        self._wait = wait
        with Interposed(self._work.pipeline, self.request.id, wait) as own:
            self._draw(own)

    def _draw(self, own: Interposed) -> None:
        own.quantise()
        own.remember(self._work.prompts, self.lora)
        own.before_decode(self._before_decode)
        self._publish_frames(own)
        if self.request.params.num_previews and "preview" in self.request.outputs:
            own.after_scheduler_step(lambda end: self._preview(own, end))
        self._report("encode", 0)
        self._put_out(self._run(own))

    def _run(self, own: Interposed) -> Any:
        """Call the pipeline and return its output."""
        import torch

        seed = self.request.params.seed
        # On the CPU, so that a seed means the same wherever the model computes.
        generator = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
        return own.pipeline(**self._plan.arguments, generator=generator, **self._callbacks(own))

    def _publish_frames(self, own: Interposed) -> None:
        if self._work.publishes_frames and "video" in self.request.outputs and not own.pipeline.vae.use_tiling:
            own.publish_frames(self._publish)

    def _callbacks(self, own: Interposed) -> dict[str, Any]:
        takes = self._work.takes

        def done(num_steps: int) -> None:
            self.num_steps_done = num_steps
            self._report("denoise", num_steps, _num_steps_of(own.pipeline))
            if not own.denoisers:
                self._wait(PAUSE)

        def on_step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            done(int(step) + 1)
            return tensors

        def on_step(step: int, timestep: Any, latents: Any) -> None:
            done(int(step) + 1)

        if "callback_on_step_end" in takes:
            return {"callback_on_step_end": on_step_end}
        return {"callback": on_step} if "callback" in takes else {}

    def _report(self, phase: str, step: int, num_steps: int | None = None) -> None:
        self._num_steps = num_steps or max(step, self._num_steps)
        value = {"step": step, "num_steps": self._num_steps, "phase": phase}
        self._emit("progress", Json(value))

    def _emit(self, port: str, payload: Payload) -> None:
        if port in self.request.outputs:
            self._events.append((port, payload))

    def _before_decode(self) -> None:
        self._report("decode", self.num_steps_done)
        self._wait(PAUSE)

    def _publish(self, pixels: Any) -> None:
        self._emit("video", media.video_payload(pixels, self._num_published, self._plan.time_base, self._work.allocate))
        self._num_published += len(pixels)
        self._wait(PAUSE)

    def _preview(self, own: Interposed, latents: Any) -> None:
        """Decode what the sample would be at the end, by the pipeline's own way from latents to pixels."""
        num_steps = len(own.pipeline.scheduler.timesteps)
        if self._previews is None:
            wanted = self.request.params.num_previews
            self._previews = [round(k * num_steps / (wanted + 1)) for k in range(1, wanted + 1)]
        self._num_looked += 1
        if self._num_looked not in self._previews:
            return
        arguments = {name: value for name, value in self._plan.arguments.items() if name not in {"sigmas", "timesteps"}}
        with Interposed(self._work.pipeline, self.request.id, self._wait) as tail:
            tail.quantise()
            tail.remember(self._work.prompts, self.lora)
            tail.only_decode(own.last_result)
            output = tail.pipeline(**arguments | {"latents": latents, "num_inference_steps": 1})
        pixels = media.pixels_of(output.images if hasattr(output, "images") else output.frames[0])
        for picture in pixels[:1]:
            self._emit("preview", media.image_payload(picture, self._work.allocate))

    def _put_out(self, output: Any) -> None:
        work, outputs = self._work, self.request.outputs
        if "image" in outputs and hasattr(output, "images"):
            for picture in media.pixels_of(output.images):
                self._emit("image", media.image_payload(picture, work.allocate))
                self._wait(PAUSE)
        if "video" in outputs and hasattr(output, "frames") and not self._num_published:
            for piece in media.video_pieces(media.pixels_of(output.frames)[0], self._plan.time_base, work.allocate):
                self._emit("video", piece)
                self._wait(PAUSE)
        sound = getattr(output, "audios", getattr(output, "audio", None))
        if "audio" in outputs and sound is not None:
            for piece in media.audio_pieces(sound[0], work.rate_hz, work.allocate):
                self._emit("audio", piece)
                self._wait(PAUSE)


def _not_begun(unit: ModelCall | Pause) -> None:
    raise AssertionError("the call has not begun")


def _num_steps_of(pipeline: Any) -> int:
    found = getattr(pipeline, "_num_timesteps", None) or getattr(pipeline, "num_timesteps", None)
    return int(found) if found else len(pipeline.scheduler.timesteps)
