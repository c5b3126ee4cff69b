#!/usr/bin/env python3
"""An omni model in stages against its own `generate`: time to the first sound, and eight requests at once.

Both sides run here, in one process, on the same random weights: the stages by turns, as processes would at best on one
core. Greedy text and seeded codes of fixed lengths, so that both do the same work. Printed are ratios, and what share
of the stages' time each of them took. ``--size large`` (1.5 billion weights in bfloat16; the default where there is a
GPU) has about the published 3B model's talker and vocoder and a shallower thinker.

With ``--eager`` a GPU replays no CUDA graphs.

Run: ``python scripts/bench_omni.py [--size tiny|medium|large] [--tokens N] [--codes N] [--rounds N] [--eager]``
Needs torch and transformers; nothing of a deployment.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "adapters"))

import numpy as np
import tiny_omni  # type: ignore[import-not-found] (put on the path above)
from staged import Staged  # type: ignore[import-not-found] (put on the path above)

from adapters.omni.code2wav import OmniCode2Wav
from adapters.omni.talker import OmniTalker
from adapters.omni.thinker import OmniThinker
from adapters.omni.vocoder import NewCodes
from omni_bus.testing import make_engine

if TYPE_CHECKING:
    from collections.abc import Callable

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

QUESTION = "Tell me a story about a dragon."

ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
WIDTH = 1536
LARGE: dict[str, dict[str, Any]] = {
    "text": {
        "hidden_size": WIDTH,
        "intermediate_size": 8960,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "rope_parameters": ROPE,
    },
    "audio": {"output_dim": WIDTH},
    "vision": {"out_hidden_size": WIDTH},
    "talker": {
        "embedding_size": WIDTH,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_parameters": ROPE,
    },
    "flow": {
        "hidden_size": 1024,
        "num_hidden_layers": 22,
        "num_attention_heads": 16,
        "head_dim": 64,
        "emb_dim": 512,
        "look_ahead_layers": [10],
        "look_backward_layers": [0, 20],
    },
    "vocoder": {"upsample_initial_channel": 1536},
}
SMALL_ROPE = {**ROPE, "mrope_section": [8, 12, 12]}
MEDIUM: dict[str, dict[str, Any]] = {
    "text": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "rope_parameters": SMALL_ROPE,
    },
    "audio": {"output_dim": 512},
    "vision": {"out_hidden_size": 512},
    "talker": {
        "embedding_size": 512,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": SMALL_ROPE,
    },
    "flow": {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "head_dim": 64,
        "emb_dim": 128,
        "look_ahead_layers": [4],
        "look_backward_layers": [0, 7],
    },
}
SIZES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "tiny": (64, {}),
    "medium": (512, MEDIUM),
    "large": (WIDTH, LARGE),
}
"""Width of the thinker, and what differs from the tests' model."""


class Monolith:
    """transformers' own `generate`."""

    def __init__(self, folder: str, num_tokens: int, num_codes: int) -> None:
        device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
        self._model: Any = transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self._model = self._model.to(device).eval()
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        messages = [{"role": "user", "content": QUESTION}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        self._inputs = tokenizer(text, return_tensors="pt").to(device)
        self._lengths = {
            "thinker_min_new_tokens": num_tokens,
            "thinker_max_new_tokens": num_tokens,
            "talker_min_new_tokens": num_codes,
            "talker_max_new_tokens": num_codes,
            "talker_eos_token_id": [tiny_omni.PAD, tiny_omni.END],
        }

    def run(self) -> float:
        """Return the seconds that one request takes; its first sound comes with its last."""
        begin = time.perf_counter()
        ids, _ = self._model.generate(
            **self._inputs, speaker="Ethan", thinker_do_sample=False, talker_do_sample=False, **self._lengths
        )
        taken_s = time.perf_counter() - begin
        self.token_ids = ids[0, self._inputs["input_ids"].shape[1] :].tolist()
        return taken_s


class Stages(Staged):
    """The three engines, by turns."""

    def __init__(self, folder: str, num_tokens: int, num_codes: int, *, is_eager: bool) -> None:
        options = {"model": folder, "enforce_eager": is_eager}
        thinker = make_engine(OmniThinker, {**options, "context_length": 512})
        talker = make_engine(OmniTalker, {**options, "context_length": 512})
        super().__init__(
            thinker, talker, voice="Ethan", num_tokens=num_tokens, min_codes=num_codes, num_codes=num_codes
        )
        self._thinker_params |= {"min_tokens": num_tokens}
        self._vocoder = make_engine(OmniCode2Wav, options)._vocoder  # noqa: SLF001 (without a thread)
        self._device = self._vocoder.model.device
        self.seconds: dict[str, float] = {}
        """By stage, since the last `run` began."""
        for name, engine in (("thinker", thinker), ("talker", talker)):
            setattr(engine, "step", self._timed(name, engine.step))  # noqa: B010 (an instance's own)
            setattr(engine, "add", self._timed(name, engine.add))  # noqa: B010

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

        return timed

    def run(self, num_requests: int) -> tuple[float, float]:
        """Return the seconds to the first sound of all, and to the last."""
        self._begin = time.perf_counter()
        self._first = 0.0
        self.seconds = {}
        self._streams = [self._vocoder.begin("Ethan", i) for i in range(num_requests)]
        self._taken = [0] * num_requests
        self.answers = self.ask(*[(QUESTION,)] * num_requests)
        return self._first, time.perf_counter() - self._begin

    def _step(self, pairs: list[tuple[str, str]], answers: list[Any]) -> None:
        super()._step(pairs, answers)
        news: list[NewCodes] = []
        for index, answer in enumerate(answers):
            pieces = answer.talker.port("codes")[self._taken[index] :]
            if pieces:
                self._taken[index] += len(pieces)
                codes = np.concatenate([np.frombuffer(piece.data.view, "<i4") for piece in pieces])
                frames = torch.tensor(codes, dtype=torch.long, device=self._device)[:, None]
                news.append(NewCodes(self._streams[index], frames, is_last=answer.talker.is_over))
        sounds = self._timed("vocoder", self._decode)(news)
        if any(len(sound) for sound in sounds) and not self._first:
            self._first = time.perf_counter() - self._begin

    def _decode(self, news: list[NewCodes]) -> list[Any]:
        with torch.inference_mode():
            return [sound.cpu() for sound in self._vocoder.decode(news)]


def shares(seconds: dict[str, float], total_s: float) -> str:
    """Return what part of the time each stage took; the rest is the benchmark's own."""
    return ", ".join(f"{name} {part / total_s:.0%}" for name, part in seconds.items())


def main() -> None:
    """Measure both sides by turns and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--size", choices=list(SIZES), default="large" if has_gpu else "tiny")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--codes", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    where = torch.cuda.get_device_name() if has_gpu else "CPU, 1 thread"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    width, larger = SIZES[arguments.size]
    with tempfile.TemporaryDirectory() as folder:
        tiny_omni.qwen2_5(Path(folder), embedding_size=width, larger=larger)
        print(
            f"{where}, torch {torch.__version__}, transformers {transformers.__version__}; {arguments.size}", flush=True
        )
        monolith = Monolith(folder, arguments.tokens, arguments.codes)
        stages = Stages(folder, arguments.tokens, arguments.codes, is_eager=arguments.eager)
        monolith.run()
        stages.run(1)
        stages.run(8)
        said: Any = None
        first, total, together = [], [], []
        for _ in range(arguments.rounds):
            alone = monolith.run()
            first_s, total_s = stages.run(1)
            [said] = stages.answers
            print(f"one: {shares(stages.seconds, total_s)}")
            _, eight_s = stages.run(8)
            print(f"eight: {shares(stages.seconds, eight_s)}", flush=True)
            first.append(first_s / alone)
            total.append(total_s / alone)
            together.append(8 * alone / eight_s)
    same_tokens = sum(ours == theirs for ours, theirs in zip(said.token_ids, monolith.token_ids, strict=True))
    same_codes = sum(answer.codes == said.codes for answer in stages.answers)
    print(f"tokens of the text equal to generate's: {same_tokens} of {len(said.token_ids)}")
    print(f"requests among eight that said the codes of one alone: {same_codes} of 8")
    print(f"first sound, stages / generate: {statistics.median(first):.3f} ({min(first):.3f} to {max(first):.3f})")
    print(f"whole request, stages / generate: {statistics.median(total):.2f} ({min(total):.2f} to {max(total):.2f})")
    print(
        "eight requests, generate one after another / stages at once: "
        f"{statistics.median(together):.2f} ({min(together):.2f} to {max(together):.2f})"
    )


if __name__ == "__main__":
    main()
