# ruff: noqa: TID253 (it needs torch anyway)
"""Frames of Moshi at its true size, for 1, 4 and 8 sessions: replayed as a CUDA graph, against launched one by one.

The weights are random, of the shapes of Kyutai's 7 B model in bfloat16, and made on the device: nothing is downloaded.
All sessions advance in lock-step, each step a frame of 80 ms: hear (Mimi), read and speak (Moshi), say (Mimi). Prints
how long a frame takes, beside the 80 ms that it lasts, and the ratio; and where two runs from the same seeds first
differ: graph and kernel by kernel, and, as the measure of that, kernel by kernel twice. Needs the extra "transformers"
and, for times that say anything, a GPU with 60 GB of memory; ``--tiny`` tries the script on a CPU.

    PYTHONPATH=. python scripts/bench_moshi.py [--frames 100] [--sessions 1 4 8] [--dtype float32]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models

from adapters.transformers_moshi import TransformersMoshi
from omni_bus.errors import StartFailed
from omni_bus.testing import StepDriver, make_engine
from omni_bus.wire.payloads import Audio, Blob

if TYPE_CHECKING:
    from omni_bus.engine import Report

RATE_HZ, FRAME = 24_000, 1920
PERIOD_MS = 80.0
NUM_WARM_UPS = 10
"""Frames that are not timed."""

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "sliding_window": 32,
    "ffn_dim": 128,
    "depth_decoder_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 64},
}
"""The main model's sizes for a trial; Mimi stays as it is."""


def config_of(*, is_tiny: bool) -> transformers.MoshiConfig:
    """Return the sizes: transformers' defaults, which are those of ``kmhf/hf-moshika``, or small ones."""
    sizes = TINY if is_tiny else {"depth_decoder_config": {}}
    return transformers.MoshiConfig(audio_encoder_config=transformers.MimiConfig().to_dict(), **sizes)


def random_model(config: transformers.MoshiConfig, device: str, dtype: torch.dtype) -> Any:
    """Return a model with random weights and codes, made where it computes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            config._attn_implementation = "sdpa"  # noqa: SLF001 (as from_pretrained sets it)
            model: Any = transformers.MoshiForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    for name, buffer in model.named_buffers():
        if name.endswith("embed_sum"):  # zero until a codec is trained
            buffer.normal_()
    return model.eval()


class RandomMoshi(TransformersMoshi):
    """The adapter, with a model that is here already."""

    model: Any
    tokenizer: Any

    def _parts(self, report: Report) -> tuple[Any, Any]:
        report("loading weights", 1.0)
        return self.tokenizer, self.model

    def computed(self) -> Computed:
        """Return what the last step left."""
        moshi = self._moshi
        heard, logits, text, codes = moshi._late, moshi._logits, moshi._text, moshi._codes  # noqa: SLF001 (no API)
        return Computed(*(tensor.to("cpu", copy=True) for tensor in (heard, logits.float(), text[:, None], codes)))


class Computed(NamedTuple):
    """Of one frame, in the order in which a step computes it; a row for each session."""

    heard: torch.Tensor
    """Codes of the user but the first, (rows, codebooks - 1)."""
    logits: torch.Tensor
    """Of the text, (rows, tokens)."""
    text: torch.Tensor
    """Tokens chosen by them, (rows, 1)."""
    codes: torch.Tensor
    """That are said, (rows, codebooks)."""


def folder_with(config: transformers.MoshiConfig, folder: Path) -> str:
    """Save what the options are checked by."""
    (folder / "config.json").write_text(json.dumps({"model_type": config.model_type}))
    return str(folder)


def tokenizer_of(num_tokens: int) -> Any:
    """Return a tokenizer with so many words."""
    words = Tokenizer(models.WordLevel({f"w{i} ": i for i in range(num_tokens)}))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words)


class Times(msgspec.Struct):
    """Of one run, in milliseconds."""

    p50: float
    p99: float
    load_s: float
    pcm: list[bytes]
    computed: list[Computed]
    """Of each frame."""


def measure(folder: str, num_sessions: int, num_frames: int, *, is_eager: bool) -> Times:
    """Return how long each frame of all sessions together took."""
    begun_at = time.perf_counter()
    options = {"model": folder, "max_num_seqs": num_sessions, "enforce_eager": is_eager}
    engine = make_engine(RandomMoshi, options)
    load_s = time.perf_counter() - begun_at
    driver = StepDriver(engine)
    rng = np.random.default_rng(0)
    ids = [driver.add({}, {"seed": i}, is_complete=False) for i in range(num_sessions)]
    times: list[float] = []
    computed: list[Computed] = []
    for _ in range(NUM_WARM_UPS + num_frames):
        for id_ in ids:
            samples = (rng.standard_normal(FRAME) * 0.2).astype("<f4")
            driver.feed(id_, "audio", [Audio(RATE_HZ, 1, "f32", Blob(samples.tobytes()))])
        start = time.perf_counter()
        driver.step()
        times.append(1000 * (time.perf_counter() - start))  # the sound is on the host: the device is done
        computed.append(engine.computed())
    pcm = [driver.results[id_].pcm for id_ in ids]
    for id_ in ids:
        driver.abort(id_)
    engine.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    cuts = statistics.quantiles(times[NUM_WARM_UPS:], n=100, method="inclusive")
    return Times(cuts[49], cuts[98], load_s, pcm, computed)


def show(what: str, num_sessions: int, times: Times) -> None:
    """Print a line."""
    frames_s, speed = num_sessions * 1000 / times.p50, PERIOD_MS / times.p99
    print(
        f"{what:16} {num_sessions:2} sessions  {times.p50:7.2f} ms p50  {times.p99:7.2f} ms p99 ({speed:.2f} times as "
        f"fast as speech)  {frames_s:6.1f} frames/s  load {times.load_s:.1f} s",
        flush=True,
    )


def compare(what: str, left: Times, right: Times) -> None:
    """Print how far two runs are the same and where they part: up to there their steps had the same to read."""
    first, num_same, largest, difference = f"{len(left.computed)} frames alike", 0, 0.0, 0.0
    for one, other in zip(left.computed, right.computed, strict=True):
        if torch.equal(one.heard, other.heard):
            largest = max(largest, float(one.logits.abs().max()))
            difference = max(difference, float((one.logits - other.logits).abs().max()))
        if found := parting(one, other):
            first = f"{num_same} frames alike, then {found}"
            break
        num_same += 1
    end = num_same * FRAME * 4
    sounds = zip(left.pcm, right.pcm, strict=True)
    pairs = [(np.frombuffer(one[:end], "<f4"), np.frombuffer(other[:end], "<f4")) for one, other in sounds]
    sound = max(float(np.abs(one - other).max(initial=0.0)) for one, other in pairs)
    print(
        f"{what}: {first}; logits differ by at most {difference:.2g} (the largest is {largest:.3g}), sound of frames "
        f"alike by {sound:.2g}",
        flush=True,
    )


def parting(one: Computed, other: Computed) -> str | None:
    """Return the first choice of a frame that differs."""
    for name in ("heard", "text", "codes"):
        values, others = getattr(one, name), getattr(other, name)
        columns = (values != others).any(dim=0).nonzero()
        if len(columns):
            k = int(columns[0])
            rows = (values != others)[:, k].nonzero()[:, 0].tolist()
            return f"{name}[{k}] of sessions {rows}: {values[rows, k].tolist()} and {others[rows, k].tolist()}"
    return None


def main() -> None:
    """Run all and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="by default bfloat16 on a GPU, else float32")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    arguments = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device, usual = ("cuda", "bfloat16") if is_cuda else ("cpu", "float32")
    dtype = getattr(torch, arguments.dtype or usual)
    where = torch.cuda.get_device_name() if is_cuda else platform.processor() or "CPU"
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}")
    begun_at = time.perf_counter()
    config = config_of(is_tiny=arguments.tiny)
    RandomMoshi.model = random_model(config, device, dtype)
    RandomMoshi.tokenizer = tokenizer_of(int(config.vocab_size))
    size = sum(weight.numel() for weight in RandomMoshi.model.parameters())
    print(f"{size / 1e9:.2f} B parameters, {dtype}, made in {time.perf_counter() - begun_at:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = folder_with(config, Path(folder))
        for num_sessions in arguments.sessions:
            eager = measure(model, num_sessions, arguments.frames, is_eager=True)
            show("kernel by kernel", num_sessions, eager)
            try:
                graph = measure(model, num_sessions, arguments.frames, is_eager=False)
            except StartFailed as error:
                print(f"no graph: {error}", flush=True)
                continue
            show("as a graph", num_sessions, graph)
            print(f"ratio of p50 {eager.p50 / graph.p50:.2f}", flush=True)
            again = measure(model, num_sessions, arguments.frames, is_eager=True)
            compare("graph and kernel by kernel", eager, graph)
            compare("kernel by kernel twice", eager, again)


if __name__ == "__main__":
    main()
