"""Eight requests through the batched transformers engine, against transformers' own `generate` one after the other.

Same weights, prompts, threads and greedy answers, which are compared. Prints tokens per second and the ratio, which
is that of CPU time, so that other processes on the machine count less.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters import smollm2
from adapters.transformers_text import TransformersText
from omni_bus.testing import StepDriver, make_engine
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from collections.abc import Callable

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Tell me a story about a dragon.",
    "Write a long poem about the sea, with many words in it. " * 6,
    "Count from one to thirty.",
    "List ten animals and what each of them eats.",
    "Who are you, and what do you like about your work? " * 3,
    "Explain how a bicycle works.",
    "Why is the sky blue?",
)


def generate_each(model: Any, tokenizer: Any, num_tokens: int) -> list[str]:
    """Return the greedy answers of `generate`, one prompt at a time."""
    answers: list[str] = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens)[0]
        answers.append(tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def run_engine(engine: TransformersText, num_tokens: int, num_together: int) -> list[str]:
    """Return the engine's greedy answers, `num_together` requests at a time."""
    driver = StepDriver(engine)
    params = {"temperature": 0.0, "max_tokens": num_tokens, "min_tokens": num_tokens}
    answers: list[str] = []
    for begin in range(0, len(QUESTIONS), num_together):
        for question in QUESTIONS[begin : begin + num_together]:
            driver.add({"prompt": [Json({"messages": [{"role": "user", "content": question}]})]}, params)
        answers.extend(result.text for result in driver.run())
    return answers


def measure(what: str, num_tokens: int, work: Callable[[], list[str]]) -> tuple[list[str], float]:
    """Return the answers and tokens per second of one run."""
    start, cpu_start = time.perf_counter(), time.process_time()
    answers = work()
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    total = num_tokens * len(QUESTIONS)
    print(f"{what:34} {total / wall_s:6.1f} tokens/s  {total / cpu_s:6.1f} tokens per second of CPU time")
    return answers, total / cpu_s


def main() -> None:
    """Run the three and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache-dir", default=str(Path(tempfile.gettempdir()) / "omni-bus-bench"))
    arguments = parser.parse_args()
    engine = make_engine(TransformersText, num_threads=arguments.threads, cache_dir=arguments.cache_dir)

    import transformers

    folder = smollm2.folder_for(arguments.cache_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    n = arguments.tokens
    expected, base = measure("transformers generate, one by one", n, lambda: generate_each(model, tokenizer, n))
    alone, one = measure("engine, one by one", n, lambda: run_engine(engine, n, 1))
    together, eight = measure("engine, eight together", n, lambda: run_engine(engine, n, 8))
    print(f"ratio to generate: {one / base:.2f} one by one, {eight / base:.2f} eight together")
    print(f"same text: {alone == expected} one by one, {together == expected} eight together")


if __name__ == "__main__":
    main()
