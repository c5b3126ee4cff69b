"""The thinker of an omni model: text, pictures, sound and clips in; text out, and what the talker follows it by.

It is the continuously batched text engine (`adapters.transformers_text`) on a decoder that is given embeddings: those
of a prompt's pictures and sound come from the model's encoders when the request is added. With each step the rows that
the talker needs go out on a port of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from adapters.lora import LoraSwitch
from adapters.omni.families import family_of
from adapters.omni.media import Media, MediaReader
from adapters.packages import missing
from adapters.packed_batch import KvPool, PackedForward, rows_of_pieces, with_filling
from adapters.packed_decoder import PackedDecoder
from adapters.recorded import recording
from adapters.slots import Slots
from adapters.tensors import as_hidden, as_tensor
from adapters.text_model import EMITS, TextModel, vocabulary_of
from adapters.transformers_model import INSTALL_ENGINE, ModelLoader
from adapters.transformers_text import (
    CPU_PREFILL_CHUNK,
    DEVICE_PREFILL_CHUNK,
    TransformersText,
    TransformersTextOptions,
)
from omni_bus.engine import Event, Finished, Output
from omni_bus.errors import OmniBusError, StageFailed, StartFailed

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

    from adapters.omni.family import Family
    from adapters.packed_batch import Piece
    from adapters.sampling import SamplingParams
    from adapters.slots import Taken
    from omni_bus.engine import EngineRequest, Report
    from omni_bus.ids import RequestId
    from omni_bus.wire.payloads import Payload
    from omni_bus.wire.prompt import Prompt

NAME = "omni-thinker"

COUNTED = {"audio": "audio_tokens", "images": "image_tokens", "video": "video_tokens"}
"""Input ports of media, and what their tokens are called in the account of a request."""


class ThinkerOptions(TransformersTextOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    model: str  # type: ignore[misc] (no default here)
    """The folder of a whole omni model, or a name on the model hub."""
    max_video_frames: Annotated[int, Meta(ge=2, le=256)] = 16
    """Pictures that the model sees of a clip, evenly spread over it."""
    enforce_eager: bool = False
    """On a GPU, launch each kernel by itself instead of replaying a CUDA graph; with LoRA this is always so."""


class EncodedPrompt(NamedTuple):
    """What the decoder is given of a prompt that isn't plain text."""

    embeddings: torch.Tensor
    """(n, width)."""
    positions: torch.Tensor
    """In time, height and width: (3, n), float32."""
    following: float
    """The position of the first token after it, in all three."""
    is_seen: torch.Tensor
    """Which tokens are pictures or clips: bool, (n,)."""
    counts: dict[str, int]
    """Tokens of media, by OpenAI's names."""
    deeper: Sequence[torch.Tensor]
    """Added to the states after the first layers, (tokens that are seen, width) each."""


class ThinkerForward(PackedForward):
    """Runs a thinker on batches, and keeps what the talker needs of the last one."""

    def __init__(self, family: Family, model: Any, pool: KvPool) -> None:
        self._family = family
        self._thinker = model
        self.decoder = PackedDecoder(model.model.language_model, pool)
        self._embed: Any = model.get_input_embeddings()
        self._prompts: dict[int, EncodedPrompt] = {}
        self._kept: torch.Tensor | None = None
        self.rows: dict[int, tuple[int, torch.Tensor]] = {}
        """By slot what the talker needs of the tokens of the last calls, and the first one's position."""
        if family.kept_layer is not None:
            model.model.language_model.layers[family.kept_layer].register_forward_hook(self._keep)

    def _keep(self, module: Any, inputs: Any, output: Any) -> None:
        self._kept = output[0] if output.ndim == 3 else output[0][0]

    def begin(self, slot: int, prompt: EncodedPrompt) -> None:
        """Say what the prompt of a slot is."""
        self._prompts[slot] = prompt

    def prompt(self, slot: int) -> EncodedPrompt | None:
        """Return the prompt of a slot, None where it was not encoded."""
        return self._prompts.get(slot)

    def end(self, slot: int) -> None:
        """Forget the prompt of a slot."""
        self._prompts.pop(slot, None)

    def __call__(self, pieces: Sequence[Piece], *, is_exact: bool = False) -> torch.Tensor:
        """Append the pieces to their slots; see `PackedForward`."""
        import torch

        device = self._embed.weight.device
        ids = torch.tensor([id_ for piece in pieces for id_ in piece.ids], device=device)
        embeddings = self._embed(ids)
        after = [self._after(piece) + i for piece in pieces for i in range(piece.first_position, end_of(piece))]
        positions = torch.tensor(after, dtype=torch.float32, device=device).repeat(3, 1)
        is_seen = torch.zeros(len(ids), dtype=torch.bool, device=device)
        deeper: list[Sequence[torch.Tensor]] = []
        at = 0
        for piece in pieces:
            part = slice(at, at := at + len(piece.ids))
            prompt = self._prompts.get(piece.slot)
            begin, end = piece.first_position, end_of(piece)
            if prompt is None or end > len(prompt.embeddings):
                continue
            embeddings[part] = prompt.embeddings[begin:end]
            positions[:, part] = prompt.positions[:, begin:end]
            first, last = int(prompt.is_seen[:begin].sum()), int(prompt.is_seen[:end].sum())
            if prompt.deeper and last > first:
                is_seen[part] = prompt.is_seen[begin:end]
                deeper.append([layer[first:last] for layer in prompt.deeper])
        arguments: dict[str, Any] = {}
        if deeper:
            arguments["visual_pos_masks"] = with_filling(is_seen, is_exact=is_exact)[None]
            arguments["deepstack_visual_embeds"] = [torch.cat(layers) for layers in zip(*deeper, strict=True)]
        states = self.decoder(pieces, embeddings, positions, is_exact=is_exact, **arguments)
        self._note(pieces, self._family.sent_rows(ids, embeddings, states, self._taken(len(ids))))
        wanted = rows_of_pieces(pieces)
        return self._thinker.lm_head(with_filling(states[wanted], is_exact=is_exact))[: len(wanted)]

    def _after(self, piece: Piece) -> float:
        """Return what is added to the places of tokens behind a prompt to get their positions."""
        prompt = self._prompts.get(piece.slot)
        return 0.0 if prompt is None else prompt.following - len(prompt.embeddings)

    def _taken(self, num_tokens: int) -> torch.Tensor | None:
        kept, self._kept = self._kept, None
        return None if kept is None else kept[:num_tokens]

    def _note(self, pieces: Sequence[Piece], rows: torch.Tensor) -> None:
        rows = rows.cpu()  # of all requests at once
        at = 0
        for piece in pieces:
            self.rows[piece.slot] = piece.first_position, rows[at : at + len(piece.ids)]
            at += len(piece.ids)


def end_of(piece: Piece) -> int:
    """Return how many tokens its slot holds after a piece."""
    return piece.first_position + len(piece.ids)


class OmniThinker(TransformersText):
    """A thinker.

    On ``hidden`` goes a row for each token of the prompt and of the reply, but for its last token, which it never
    reads itself; on ``prompt_tokens``, before the first row, the prompt: float32, (4, n), ids and positions in time,
    height and width. Clips can have positions between whole numbers; ids are exact up to 2 to the 24th.
    """

    accepts: ClassVar[dict[str, str]] = {"prompt": "json", "images": "image", "audio": "audio", "video": "video"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"images", "audio", "video"})
    emits: ClassVar[dict[str, str]] = EMITS | {"prompt_tokens": "tensor", "hidden": "hidden"}
    Options = ThinkerOptions
    part: ClassVar[str] = "thinker"

    _thinking: ThinkerForward
    _prompt_rows: dict[int, list[torch.Tensor]]
    """By slot the rows of its prompt, piece by piece: of prompts of text, which others may begin with."""
    _unsent: dict[RequestId, list[torch.Tensor]]
    """Of requests of which nothing was sent yet, rows that were computed for another."""
    _family: Family
    _media: MediaReader

    @classmethod
    def check(cls, options: TransformersTextOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        return [*super().check(options), *missing(NAME, {INSTALL_ENGINE: ("PIL", "soxr")})]

    def load(self, report: Report) -> None:
        """Load the thinker alone, and run a first batch.

        Raises:
            StartFailed: the model isn't there or can't be served as the options say.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        loader = ModelLoader(self.options, self.context, report)
        from transformers import AutoTokenizer

        self._device = loader.device
        self._prefill_chunk = self.options.prefill_chunk or (
            CPU_PREFILL_CHUNK if loader.on_cpu else DEVICE_PREFILL_CHUNK
        )
        self._family = family_of(loader)
        tokenizer = loader.part("loading tokenizer", AutoTokenizer)
        self._media = MediaReader(self._family, loader, tokenizer, self.options.max_video_frames)
        model = self._family.load_part(loader, "thinker")
        self._thinker = model
        self._lora = LoraSwitch(loader, model, self.options.lora)
        self.context_length = self._context_length = loader.context_length(model, self.options.context_length)
        self._model = TextModel(
            NAME,
            self.options,
            vocabulary_of(loader, model, tokenizer),
            template_owner=tokenizer,
            context_length=self._context_length,
            device=self._device,
            media=("images", "audio", "video"),
            lora=self.options.lora,
            shares_prefixes=True,
        )
        self._pool = KvPool(self.max_resident, self._context_length)
        self._slots = Slots(self.max_resident, self._prefill_chunk)
        self._prompt_rows: dict[int, list[torch.Tensor]] = {}
        self._unsent: dict[RequestId, list[torch.Tensor]] = {}
        self._forward = self._thinking = self._forward_on(model, self._pool)
        self._warm_up(model, report)
        if self._family.is_recordable and not (self.options.enforce_eager or loader.on_cpu or self.options.lora):
            with recording():
                self._thinking.decoder.record(self.max_num_seqs)
        self._thinking.rows.clear()

    def _forward_on(self, model: Any, pool: KvPool) -> ThinkerForward:
        return ThinkerForward(self._family, model, pool)

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request; its pictures and sound are encoded here.

        Raises:
            BadInput: its messages, media or parameters can't be honoured.
            Overloaded: all slots are taken.
            StageFailed: an encoder failed.
        """
        import torch

        super().add(request, inputs)
        running = self._running[request.id]
        if request.outputs == {"rendered"} and not running.is_scored:
            return
        self._lora.use(request.params.lora)  # which may adapt the encoders too
        try:
            with torch.inference_mode():
                prompt = self._encode(running.prompt, self._read)
                if not bool(prompt.embeddings.isfinite().all()):
                    raise StageFailed("the model's encoders computed numbers that aren't finite")
        except OmniBusError:
            self.abort(request.id)
            raise
        except Exception as error:
            self.abort(request.id)
            raise StageFailed(f"encoding failed with {type(error).__name__}: {str(error)[:300]}") from error
        self._thinking.begin(running.slot, prompt)
        self._unsent[running.id] = self._prompt_rows.get(running.slot, [])[:]

    def _prefix_key(self, params: SamplingParams) -> Hashable | None:
        # What a placeholder stands for isn't told by its token.
        return None if any(self._read.counts.values()) else super()._prefix_key(params)

    def _take_slot(self, ids: list[int], params: SamplingParams) -> Taken:
        taken = super()._take_slot(ids, params)
        known = self._prompt_rows.get(taken.source, [])
        self._prompt_rows[taken.slot] = known[: taken.num_shared // self._prefill_chunk]
        return taken

    def _token_ids(self, prompt: Prompt, text: str | None, inputs: dict[str, list[Payload]]) -> list[int]:
        text, self._read = self._media.read(prompt, text, inputs)
        return self._model.token_ids(prompt, text)

    def _encode(self, token_ids: list[int], media: Media) -> EncodedPrompt:
        """Return a prompt's embeddings and positions."""
        import torch

        device, dtype = self._device, self._thinker.dtype
        ids = torch.tensor(token_ids, dtype=torch.long, device=device)
        embeddings = self._thinker.get_input_embeddings()(ids)
        is_seen = torch.zeros_like(ids, dtype=torch.bool)
        deeper: list[torch.Tensor] = []
        for port, pixels, grids in (
            ("images", media.pixels, media.image_grids),
            ("video", media.clip_pixels, media.clip_grids),
        ):
            if pixels is None or grids is None:
                continue
            seen = self._family.see(self._thinker, pixels.to(device, dtype), grids.to(device), is_video=port == "video")
            mask = ids == self._family.placeholders[port]
            embeddings[mask] = seen.embeddings.to(embeddings.dtype)
            deeper = deeper or [embeddings.new_zeros(embeddings.shape) for _ in seen.deeper]
            for layer, more in zip(deeper, seen.deeper, strict=True):
                layer[mask] = more.to(embeddings.dtype)
            is_seen |= mask
        if media.features is not None and media.features_mask is not None:
            heard = self._thinker.model.get_audio_features(
                media.features.to(device, dtype),
                feature_attention_mask=media.features_mask.to(device),
                return_dict=True,
            ).last_hidden_state
            embeddings[ids == self._family.placeholders["audio"]] = heard.to(embeddings.dtype)
        positions = self._positions(ids, media)
        following = float(positions.max()) + 1
        counts = {name: media.counts.get(port, 0) for port, name in COUNTED.items()}
        return EncodedPrompt(embeddings, positions, following, is_seen, counts, [layer[is_seen] for layer in deeper])

    def _positions(self, ids: torch.Tensor, media: Media) -> torch.Tensor:
        import torch

        def moved(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values.to(ids.device)

        positions, _ = self._thinker.get_rope_index(
            ids[None],
            image_grid_thw=moved(media.image_grids),
            video_grid_thw=moved(media.clip_grids),
            attention_mask=torch.ones_like(ids[None]),
            use_audio_in_video=False,
            audio_seqlens=moved(media.num_frames),
            second_per_grids=torch.tensor(media.seconds_per_grid) if media.seconds_per_grid else None,
        )
        return positions[:, 0].float()

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """Compute one token for each request, as the text engine does, and send the talker what it needs of it."""
        import torch

        named = [self._running[id_] for id_ in requests]
        # A request may begin and end in this step, which forgets it.
        prompts = {running.id: self._thinking.prompt(running.slot) for running in named}
        unsent = {running.id: self._unsent.get(running.id) for running in named}
        events = [_counted(event, prompts.get(event.request)) for event in super().step(requests)]
        sent: list[Event] = []
        for running in named:
            first, rows = self._thinking.rows.pop(running.slot, (0, None))
            if rows is None:
                continue
            prompt, known = prompts[running.id], unsent[running.id]
            self._unsent.pop(running.id, None)
            if first < len(running.prompt):
                self._prompt_rows[running.slot].append(rows)
            if prompt is not None and known is not None and "prompt_tokens" in running.outputs:
                sent.append(Output(running.id, "prompt_tokens", self._prompt_tokens(running.prompt, prompt)))
            if "hidden" in running.outputs:
                rows, first = (torch.cat([*known, rows]), 0) if known else (rows, first)
                sent.append(Output(running.id, "hidden", as_hidden(rows, first, self.context.allocate)))
        return [*sent, *events]

    def _prompt_tokens(self, ids: list[int], prompt: EncodedPrompt) -> Payload:
        import torch

        known = torch.tensor([ids], dtype=torch.float32, device=prompt.positions.device)
        return as_tensor(torch.cat([known, prompt.positions]), self.context.allocate)

    def abort(self, request: RequestId) -> None:
        """Drop a request; its slot is free at once."""
        running = self._running.get(request)
        if running is not None:
            self._thinking.end(running.slot)
            self._unsent.pop(request, None)
        super().abort(request)

    def close(self) -> None:
        """Let go of the weights and the pool."""
        super().close()
        for name in ("_thinking", "_thinker", "_media", "_prompt_rows", "_unsent"):
            if hasattr(self, name):
                delattr(self, name)


def _counted(event: Event, prompt: EncodedPrompt | None) -> Event:
    """Return an event; an end says what of the prompt were media."""
    if not isinstance(event, Finished) or prompt is None:
        return event
    detail = event.finish.detail | {"prompt_tokens_details": prompt.counts}
    return Finished(event.request, msgspec.structs.replace(event.finish, detail=detail))
