"""Model calls of several requests as one: which arguments have a row for each sample, and which must be the same.

A model that has no row here is called for each request by itself.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """How the calls of one model class are joined. Arguments that are named nowhere must be equal."""

    rows: tuple[str, ...]
    """Tensors whose first axis is the samples, or maps of such. The first one says how many there are."""
    times: tuple[str, ...] = ("timestep",)
    """A number for each sample; pipelines give one for all of a call, too."""
    lists: tuple[str, ...] = ()
    """Lists with an item for each sample."""
    sized: tuple[str, ...] = ()
    """Of the lists, those whose items must have one shape: the model could pad them, and all would cost the most."""
    masks: tuple[tuple[str, str], ...] = ()
    """Sequences (samples, length, width) that are padded to one length, and the mask (samples, length) that says so."""


_FLUX = Join(rows=("hidden_states", "encoder_hidden_states", "pooled_projections"), times=("timestep", "guidance"))
_TEXT_MASK = (("encoder_hidden_states", "encoder_hidden_states_mask"),)

JOINS: dict[str, Join] = {
    "AuraFlowTransformer2DModel": Join(rows=("hidden_states", "encoder_hidden_states")),
    "ChromaTransformer2DModel": Join(rows=("hidden_states", "encoder_hidden_states", "attention_mask")),
    "CogVideoXTransformer3DModel": Join(rows=("hidden_states", "encoder_hidden_states"), times=("timestep", "ofs")),
    "FluxTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX,
    "HunyuanVideoTransformer3DModel": Join(
        rows=("hidden_states", "encoder_hidden_states", "encoder_attention_mask", "pooled_projections"),
        times=("timestep", "guidance"),
    ),
    "LTXVideoTransformer3DModel": Join(
        rows=("hidden_states", "encoder_hidden_states", "encoder_attention_mask", "video_coords")
    ),
    "Lumina2Transformer2DModel": Join(rows=("hidden_states", "encoder_hidden_states", "encoder_attention_mask")),
    "MochiTransformer3DModel": Join(rows=("hidden_states", "encoder_hidden_states", "encoder_attention_mask")),
    "PixArtTransformer2DModel": Join(
        rows=("hidden_states", "encoder_hidden_states", "encoder_attention_mask", "added_cond_kwargs")
    ),
    "PRXTransformer2DModel": Join(rows=("hidden_states", "encoder_hidden_states", "attention_mask")),
    "QwenImageTransformer2DModel": Join(
        rows=("hidden_states",), times=("timestep", "guidance"), lists=("img_shapes",), masks=_TEXT_MASK
    ),
    "SanaTransformer2DModel": Join(
        rows=("hidden_states", "encoder_hidden_states", "encoder_attention_mask"), times=("timestep", "guidance")
    ),
    "SD3Transformer2DModel": Join(rows=("hidden_states", "encoder_hidden_states", "pooled_projections")),
    "StableAudioDiTModel": Join(rows=("hidden_states", "encoder_hidden_states", "global_hidden_states")),
    "UNet2DConditionModel": Join(
        rows=("sample", "encoder_hidden_states", "timestep_cond", "added_cond_kwargs"), times=("timestep",)
    ),
    "WanTransformer3DModel": Join(rows=("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image")),
    "ZImageTransformer2DModel": Join(rows=(), times=("t",), lists=("x", "cap_feats"), sized=("x",)),
}
"""By the name of the model's class in diffusers."""


class Fingerprints:
    """Says whether values are equal by something that can be hashed; a tensor is read from its device once."""

    def __init__(self) -> None:
        self._of_tensors: dict[int, tuple[Any, int, Hashable]] = {}

    def of(self, value: Any) -> Hashable:
        """Return the same for equal tensors, numbers, texts, lists and maps of them; others equal only themselves."""
        import torch

        if value is None or isinstance(value, (str, int, float, bool)):
            return value
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, Mapping):
            return tuple((key, self.of(item)) for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(self.of(item) for item in value)
        return ("object", id(value))

    def _of_tensor(self, tensor: torch.Tensor) -> Hashable:
        import torch

        known = self._of_tensors.get(id(tensor))
        if known is not None and known[1] == tensor._version:  # noqa: SLF001 (torch has no other name for it)
            return known[2]
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        found = (tuple(tensor.shape), str(tensor.dtype), hashlib.sha256(raw).digest())
        # The tensor is held, so that its address is not another's.
        self._of_tensors[id(tensor)] = (tensor, tensor._version, found)  # noqa: SLF001
        return found


class History(msgspec.Struct, frozen=True):
    """A pipeline's ``cache_context``: what a step cache goes by, under a name of the request's own."""

    name: str
    arguments: dict[str, Any]


class ModelCall:
    """One call of a model by a pipeline, and its place in a joint one."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], history: History | None) -> None:
        """Take a call.

        Args:
            model: the one that all requests share.
            args: its arguments.
            kwargs: its named arguments.
            history: where a step cache keeps what it knows of this call's predecessors; None without such a cache.
        """
        self.model = model
        self.args = args
        self.kwargs = kwargs
        self._history = history
        self.result: Any = None
        self.error: Exception | None = None
        self._join = JOINS.get(type(model).__name__) if history is None else None
        self._named: dict[str, Any] = {}
        if self._join is not None:
            self._named = dict(inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments)
            self._named.pop("self")

    def key(self, fingerprints: Fingerprints) -> Hashable | None:
        """Return what must be equal for two calls to be joined; None if this one can't be joined to any."""
        join = self._join
        if join is None:
            return None
        num_samples = self.num_samples
        found: list[Hashable] = [id(self.model)]
        padded = dict(join.masks)
        for name, value in self._named.items():
            if name in padded:
                found.append((name, value.dtype, value.shape[2:]))
            elif name in join.rows:
                found.append((name, _row_shape(value, num_samples)))
            elif name in join.lists:
                found.append((name, _list_shapes(value) if name in join.sized else None))
            elif name in join.times:
                found.append((name, _time_shape(value, num_samples)))
            elif name not in padded.values():
                found.append((name, fingerprints.of(value)))
        return tuple(found)

    @property
    def num_samples(self) -> int:
        """Samples in this call: twice the pictures where guidance is computed along with them."""
        assert self._join is not None
        if self._join.rows:
            return len(self._named[self._join.rows[0]])
        return len(self._named[self._join.lists[0]])

    def run(self) -> None:
        """Call the model for this one alone, with exactly what the pipeline gave."""
        history = self._history
        try:
            context = nullcontext() if history is None else self.model.cache_context(history.name, **history.arguments)
            with context:
                self.result = self.model(*self.args, **self.kwargs)
        except Exception as error:  # noqa: BLE001 (it is raised in the pipeline that called)
            self.error = error

    @staticmethod
    def run_together(calls: Sequence[ModelCall]) -> None:
        """Call the model once for calls of one key."""
        if len(calls) == 1:
            calls[0].run()
            return
        try:
            whole = calls[0].model(**_joined(calls))
            parts = _split(whole, [call.num_samples for call in calls])
        except Exception as error:  # noqa: BLE001 (see below)
            # Together they may be too large for the memory, or one of them wrong: each finds out for itself.
            del error
            for call in calls:
                call.run()
            return
        for call, part in zip(calls, parts, strict=True):
            call.result = part

    def arguments(self) -> dict[str, Any]:
        """Return the call's arguments by their names."""
        return self._named


def _row_shape(value: Any, num_samples: int) -> Hashable:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return tuple((key, _row_shape(item, num_samples)) for key, item in value.items())
    # One row for several samples is broadcast by the model, and would not be in a larger call.
    return (value.dtype, tuple(value.shape[1:]), len(value) == num_samples)


def _list_shapes(values: Sequence[Any]) -> Hashable:
    return tuple(dict.fromkeys((value.dtype, value.shape) for value in values))


def _time_shape(value: Any, num_samples: int) -> Hashable:
    """Return what more than one number for each sample needs; LTX and Wan may have one for each token."""
    numel = getattr(value, "numel", lambda: 1)()
    return None if value is None else (*value.shape[1:],) if numel not in {1, num_samples} else ()


def _joined(calls: Sequence[ModelCall]) -> dict[str, Any]:
    join = JOINS[type(calls[0].model).__name__]
    named = [call.arguments() for call in calls]
    found: dict[str, Any] = {}
    for name, value in named[0].items():
        if name in join.rows:
            found[name] = _stacked([of[name] for of in named], [call.num_samples for call in calls])
        elif name in join.times:
            found[name] = _times([of[name] for of in named], [call.num_samples for call in calls])
        elif name in join.lists:
            found[name] = [item for of in named for item in of[name]]
        else:
            found[name] = value
    for text, mask in join.masks:
        found[text], found[mask] = _padded([of[text] for of in named], [of.get(mask) for of in named])
    return found


def _stacked(values: list[Any], nums: list[int]) -> Any:
    import torch

    if values[0] is None:
        return None
    if isinstance(values[0], Mapping):
        return {key: _stacked([value[key] for value in values], nums) for key in values[0]}
    rows = [
        value if len(value) == num else value.expand(num, *value.shape[1:])
        for value, num in zip(values, nums, strict=True)
    ]
    return torch.cat(rows)


def _times(values: list[Any], nums: list[int]) -> Any:
    import torch

    if values[0] is None:
        return None
    rows: list[torch.Tensor] = []
    for value, num in zip(values, nums, strict=True):
        time = torch.as_tensor(value)
        rows.append(time.reshape(1).expand(num) if time.numel() == 1 else time)
    return torch.cat([row.to(rows[0].device) for row in rows])


def _padded(texts: list[Any], masks: list[Any]) -> tuple[Any, Any]:
    import torch
    from torch.nn.functional import pad

    longest = max(text.shape[1] for text in texts)
    if all(mask is None and text.shape[1] == longest for text, mask in zip(texts, masks, strict=True)):
        return torch.cat(texts), None
    whole = [
        torch.ones(text.shape[:2], dtype=torch.bool, device=text.device) if mask is None else mask.bool()
        for text, mask in zip(texts, masks, strict=True)
    ]
    return (
        torch.cat([pad(text, (0, 0, 0, longest - text.shape[1])) for text in texts]),
        torch.cat([pad(mask, (0, longest - mask.shape[1])) for mask in whole]),
    )


def _split(whole: Any, nums: list[int]) -> list[Any]:
    """Return each call's part of what a model returned: a tensor, a list, or tuples and records of them."""
    import torch

    if whole is None:
        return [None] * len(nums)
    if isinstance(whole, torch.Tensor):
        return list(whole.split(nums))
    if isinstance(whole, list):
        ends = [sum(nums[: index + 1]) for index in range(len(nums))]
        return [whole[end - num : end] for end, num in zip(ends, nums, strict=True)]
    if isinstance(whole, Mapping):  # diffusers' outputs are maps, and are built from their fields
        fields = {key: _split(value, nums) for key, value in whole.items()}
        return [type(whole)(**{key: parts[index] for key, parts in fields.items()}) for index in range(len(nums))]
    fields_of = [_split(value, nums) for value in whole]
    return [type(whole)(parts[index] for parts in fields_of) for index in range(len(nums))]
