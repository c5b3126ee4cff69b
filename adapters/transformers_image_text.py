"""Models of transformers that read pictures and write text (`AutoModelForImageTextToText`), each request on its own.

The model's own `generate` runs on a thread for each request, and chooses by `adapters.answer` instead of its own
settings, so that parameters mean the same as in the ``transformers`` stage. A cancel is seen before each token. Models
keep state of a request in their modules (Qwen2-VL its rotary offsets), so each thread has modules of its own; they
share the weights.
"""

from __future__ import annotations

import asyncio
import copy
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.handover import Handover, error_of, start_threads
from adapters.logprobs import logprobs_of, with_token_first
from adapters.model_memory import Files
from adapters.sampling import SamplingParams
from adapters.text_model import EMITS, TextModel, TextOptions, adds_special_tokens, vocabulary_of
from adapters.transformers_model import DEFAULT_CONTEXT_LENGTH, ModelLoader, check_model
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, OmniBusError, StageFailed, StartFailed
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Blob, Image, Payload, Video
from omni_bus.wire.prompt import MEDIA_PORTS, Message, Part, Prompt

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import torch

    from adapters.answer import Answer
    from omni_bus.engine import Context, Memory, Report

NAME = "transformers-image-text"


class ImageTextOptions(TextOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=64)] = 4
    """Requests that run at once, each on a thread."""
    context_length: Annotated[int, Meta(ge=8)] | None = None
    """Tokens of prompt, pictures and output together; by default the model's own, at most 2048."""
    max_video_frames: Annotated[int, Meta(ge=1, le=256)] = 8
    """Pictures that the model sees of a clip, evenly spread over it."""


class TransformersImageText(StreamingEngine):
    """A conversation with pictures in it, or clips as a few of their pictures: text out."""

    accepts: ClassVar[dict[str, str]] = {"prompt": "json", "images": "image", "video": "video"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"images", "video"})
    sleep_levels: ClassVar[frozenset[int]] = frozenset({2})
    emits: ClassVar[dict[str, str]] = EMITS
    Options = ImageTextOptions
    Params = SamplingParams

    _processor: Any
    _model: TextModel

    def __init__(self, options: ImageTextOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._threads = ThreadPoolExecutor(options.max_num_seqs, thread_name_prefix="image-text")
        self._modules: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls: set[asyncio.Future[Finish]] = set()

    @classmethod
    def check(cls, options: ImageTextOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        return check_model(NAME, options, ("torch", "transformers", "llguidance", "PIL"))

    @classmethod
    def memory(cls, options: ImageTextOptions, *, has_accelerator: bool) -> Memory | None:
        """Return what a replica takes."""
        files = Files(options, has_accelerator=has_accelerator)
        length = files.context_length(options.context_length, DEFAULT_CONTEXT_LENGTH)
        return files.memory(cache=files.cache(options.max_num_seqs * length))

    def load(self, report: Report) -> None:
        """Load, and answer a question about a grey picture.

        Raises:
            StartFailed: the model isn't there or can't be served as the options say.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        loader = ModelLoader(self.options, self.context, report)
        from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

        self._processor = loader.part("loading processor", AutoProcessor)
        tokenizer = getattr(self._processor, "tokenizer", None)
        if tokenizer is None or getattr(self._processor, "image_processor", None) is None:
            raise loader.refused("its processor reads no pictures and text")
        model = loader.weights(AutoModelForImageTextToText)
        self.context_length = loader.context_length(model, self.options.context_length)
        self._model = TextModel(
            NAME,
            self.options,
            vocabulary_of(loader, model, tokenizer),
            template_owner=self._processor,
            context_length=self.context_length,
            device=loader.device,
            media=("images", "video"),
        )
        # Its settings would be mixed into each request's own.
        model.generation_config = GenerationConfig()
        shared = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
        for _ in range(self.max_num_seqs):
            self._modules.put(copy.deepcopy(model, dict(shared)))
        start_threads(self._threads, self.max_num_seqs)
        self._warm_up(loader, report)

    def _warm_up(self, loader: ModelLoader, report: Report) -> None:
        report("warming up", 0.0)
        prompt = Prompt(messages=[Message(role="user", content=[Part(type="image"), Part(type="text", text="What?")])])
        picture = Image(32, 32, 3, self.context.allocate(32 * 32 * 3))
        picture.data.view[:] = b"\x80" * len(picture.data)
        request = EngineRequest("warm-up", SamplingParams(max_tokens=2), frozenset({"text"}))
        generation = _Generation(self._processor, self._model, None)
        try:
            generation.run_blocking(self._modules, request, prompt, [picture])
        except OmniBusError as error:
            raise loader.refused(f"it can't answer: {error.message}") from error
        report("warming up", 1.0)

    def unload(self) -> None:
        """Let go of the weights."""
        self._modules = queue.SimpleQueue()

    def close(self) -> None:
        """Let go of the weights and the threads."""
        self._threads.shutdown()
        self.unload()

    @property
    def num_active(self) -> int:
        """Requests that occupy a thread now."""
        return sum(not call.done() for call in self._calls)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Answer one conversation.

        The generator's end, however it comes, waits for the thread to let go of the request: at most one token.

        Raises:
            BadInput: what came can't be honoured.
            StageFailed: the model failed.
        """
        prompt = self._model.read([payload async for payload in inputs.port("prompt")])
        images = [payload async for payload in inputs.port("images")]
        clips = [payload async for payload in inputs.port("video")]
        prompt, pictures = _as_pictures(prompt, images, clips, self.options.max_video_frames)
        loop = asyncio.get_running_loop()
        handover = Handover(loop)
        generation = _Generation(self._processor, self._model, handover)

        def run_blocking() -> Finish:
            try:
                return generation.run_blocking(self._modules, request, prompt, pictures)
            finally:
                handover.end()

        call = loop.run_in_executor(self._threads, run_blocking)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            while (piece := await handover.take()) is not None:
                yield piece
        finally:
            handover.close()
            # Shielded: a second cancel must not make the slot look free while the thread still holds it.
            error = await asyncio.shield(error_of(call))
        if error is not None:
            raise error
        yield call.result()


class _Generation:
    """One call of a model's `generate`, on a thread."""

    def __init__(self, processor: Any, model: TextModel, handover: Handover | None) -> None:
        self._processor = processor
        self._model = model
        self._handover = handover
        self._finish: Finish | None = None
        self._error: OmniBusError | None = None

    @property
    def _is_over(self) -> bool:
        is_closed = self._handover is not None and self._handover.is_closed
        return is_closed or self._finish is not None or self._error is not None

    def run_blocking(
        self, modules: queue.SimpleQueue[Any], request: EngineRequest, prompt: Prompt, pictures: list[Any]
    ) -> Finish:
        """Answer, or stop at the first token after the handover was closed.

        Raises:
            BadInput: what came can't be honoured.
            StageFailed: the model failed.
        """
        if self._is_over:
            return Finish()
        modules_of_thread = modules.get()
        try:
            return self._run(modules_of_thread, request, prompt, pictures)
        except OmniBusError:
            raise
        except Exception as error:
            raise StageFailed(f"the model failed with {type(error).__name__}: {str(error)[:300]}") from error
        finally:
            modules.put(modules_of_thread)

    def _run(self, module: Any, request: EngineRequest, prompt: Prompt, pictures: list[Any]) -> Finish:
        text = self._model.text(prompt)
        arguments = self._arguments(prompt, text, pictures)
        ids: list[int] = arguments["input_ids"][0].tolist()
        self._model.check(request, prompt, len(ids))
        answer = self._model.answer(request, prompt, text, ids)
        arguments = {
            name: value.to(module.device, module.dtype if value.is_floating_point() else None)
            for name, value in arguments.items()
        }
        if "rendered" in request.outputs:
            num_candidates = request.params.prompt_logprobs
            candidates = None if num_candidates is None else _score(module, arguments, ids, num_candidates)
            self._put("rendered", self._model.rendered(ids, candidates))
            if request.outputs == {"rendered"}:
                return Finish("stop", Usage(prompt_tokens=len(ids)))
        self._generate(module, arguments, answer)
        if self._error is not None:
            raise self._error
        return self._finish or Finish()

    def _arguments(self, prompt: Prompt, text: str | None, pictures: list[Any]) -> dict[str, Any]:
        """Return what the model is called with.

        Raises:
            BadInput: the processor can't bring text and pictures together.
        """
        import torch

        if text is None:
            if pictures:
                raise BadInput("images: they came with token_ids (allowed: with messages or text)", field="images")
            ids = torch.tensor([self._model.token_ids(prompt, text)], dtype=torch.long)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        try:
            found = self._processor(
                text=[text],
                images=[_as_pil(picture) for picture in pictures] or None,
                return_tensors="pt",
                add_special_tokens=adds_special_tokens(prompt),
            )
        except (ValueError, IndexError, StopIteration, TypeError, RuntimeError) as error:
            raise BadInput(
                f"images: the model's processor can't place {len(pictures)} pictures in the prompt: {str(error)[:300]}",
                field="images",
            ) from error
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def _generate(self, module: Any, arguments: dict[str, Any], answer: Answer) -> None:
        import torch

        def choose(input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            """Leave only the token that the answer chose."""
            token_id = 0 if self._is_over else self._advance(answer, logits[0])
            only = torch.full_like(logits, float("-inf"))
            only[0, token_id] = 0
            return only

        def is_over(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), self._is_over, dtype=torch.bool, device=input_ids.device)

        with torch.inference_mode():
            module.generate(
                **arguments,
                do_sample=False,
                max_new_tokens=self._model.context_length,
                pad_token_id=0,
                logits_processor=[choose],
                stopping_criteria=[is_over],
            )

    def _advance(self, answer: Answer, logits: torch.Tensor) -> int:
        best, argmax = logits.max(dim=-1)
        try:
            outputs, self._finish = answer.advance(logits, float(best), int(argmax))
        except OmniBusError as error:
            self._error = error
            return 0
        for port, payload in outputs:
            self._put(port, payload)
        return answer.token_ids[-1]

    def _put(self, port: str, payload: Payload) -> None:
        if self._handover is not None:
            self._handover.put_blocking(port, payload)


def _score(
    module: Any, arguments: dict[str, Any], ids: Sequence[int], num_candidates: int
) -> list[list[tuple[int, float]] | None]:
    """Return for each token of the prompt what might have stood there; the first has none."""
    import torch

    with torch.inference_mode():
        logits = module(**arguments).logits[0, :-1]
    measured = logprobs_of(logits, ids[1:], num_candidates)
    scored = [with_token_first(id_, logprob, others) for id_, (logprob, others) in zip(ids[1:], measured, strict=True)]
    return [None, *scored]


def _as_pictures(
    prompt: Prompt, images: list[Payload], clips: list[Payload], max_frames: int
) -> tuple[Prompt, list[Payload]]:
    """Return the prompt with each clip's part replaced by pictures, and all pictures in reading order.

    Raises:
        BadInput: there are not as many payloads as parts.
    """
    if not prompt.messages:
        if clips:
            raise BadInput("video: clips came without messages (allowed: with messages)", field="video")
        return prompt, images
    for kind, payloads in (("image", images), ("video", clips)):
        parts = [part for message in prompt.messages for part in _parts(message) if part.type == kind]
        if len(parts) != len(payloads):
            port = MEDIA_PORTS[kind]
            raise BadInput(
                f"{port}: {len(payloads)} payloads came for {len(parts)} {kind} parts (allowed: one for each)",
                field=port,
            )
    next_image, next_clip = iter(images), iter(clips)
    pictures: list[Payload] = []
    messages: list[Message] = []
    for message in prompt.messages:
        parts: list[Part] = []
        for part in _parts(message):
            found = [part]
            if part.type == "image":
                pictures.append(next(next_image))
            elif part.type == "video":
                frames = _frames(next(next_clip), max_frames)
                pictures += frames
                found = [Part(type="image") for _ in frames]
            parts += found
        messages.append(msgspec.structs.replace(message, content=parts) if parts else message)
    return msgspec.structs.replace(prompt, messages=messages), pictures


def _parts(message: Message) -> list[Part]:
    return message.content if isinstance(message.content, list) else []


def _frames(clip: Payload, max_frames: int) -> list[Payload]:
    """Return at most so many of a clip's pictures, evenly spread, its first and last among them."""
    import numpy as np

    assert isinstance(clip, Video)
    if not clip.num_frames:
        raise BadInput("video: a clip without frames came (allowed: at least one frame)", field="video")
    size = clip.height * clip.width * 3
    chosen = np.linspace(0, clip.num_frames - 1, min(max_frames, clip.num_frames)).round().astype(int).tolist()
    return [
        Image(clip.height, clip.width, 3, Blob(clip.data.view[index * size : (index + 1) * size])) for index in chosen
    ]


def _as_pil(picture: Payload) -> Any:
    """Return a picture as processors read it: RGB, what is transparent on white."""
    import numpy as np
    from PIL import Image as Pil

    assert isinstance(picture, Image)
    pixels = np.frombuffer(picture.data.view, np.uint8).reshape(picture.height, picture.width, picture.channels)
    if picture.channels == 1:
        return Pil.fromarray(pixels[:, :, 0]).convert("RGB")
    if picture.channels == 3:
        return Pil.fromarray(pixels)
    layer = Pil.fromarray(pixels, "RGBA")
    return Pil.alpha_composite(Pil.new("RGBA", layer.size, "white"), layer).convert("RGB")
