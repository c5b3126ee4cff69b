#!/usr/bin/env python3
"""The same pictures by our step engine and by the pipeline called one after another, with requests that come at random.

A Z-Image with random weights (on a GPU 1.3 billion in its denoiser, 512×512) is made on the device. Both sides get the
same prompts, seeds, step counts (differing by request) and arrival times, a Poisson process that is faster than the
pipeline alone can serve; a request's latency counts from its arrival. The pictures are compared.

Run: ``python scripts/bench_diffusion.py [--size small|large] [--requests N] [--concurrency N] [--rounds N]``
Needs torch and diffusers; nothing of a deployment.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from adapters.diffusion.engine import Diffusers
from omni_bus.engine import EngineRequest, Failure, Finished, Output
from omni_bus.testing import make_engine
from omni_bus.wire.payloads import Image, Text

SMALL = {"dim": 256, "n_layers": 6, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "cap_feat_dim": 128}
LARGE = {"dim": 2304, "n_layers": 16, "n_refiner_layers": 2, "n_heads": 18, "n_kv_heads": 18, "cap_feat_dim": 1024}
AXES = {64: [16, 24, 24], 128: [32, 48, 48]}
SIDE = {"small": 128, "large": 512}
STEPS = {"small": (6, 10), "large": (16, 24)}
WORDS = ("a", "red", "blue", "old", "small", "cat", "house", "river", "under", "beside", "the", "moon", "boat", "lamp")


class Job(msgspec.Struct, frozen=True):
    """One request of the load."""

    arrives_at: float
    prompt: str
    seed: int
    num_steps: int


def make_model(size: str, folder: Path) -> None:
    """Save a pipeline with random weights, made on the device."""
    diffusers: Any = importlib.import_module("diffusers")
    import torch

    transformers: Any = importlib.import_module("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = LARGE if size == "large" else SMALL
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",  # noqa: S106 (a token of another kind)
        eos_token="</s>",  # noqa: S106
        padding_side="right",
        model_max_length=512,
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    torch.manual_seed(0)
    head = config["dim"] // config["n_heads"]
    with torch.device("cuda" if on_gpu else "cpu"):
        encoder = transformers.Qwen3Model(
            transformers.Qwen3Config(
                vocab_size=len(vocabulary), hidden_size=config["cap_feat_dim"], num_hidden_layers=4,
                intermediate_size=2 * config["cap_feat_dim"], num_attention_heads=8, num_key_value_heads=4,
                head_dim=config["cap_feat_dim"] // 8, max_position_embeddings=1024,
            )
        )  # fmt: skip
        denoiser = diffusers.ZImageTransformer2DModel(
            in_channels=16, axes_dims=AXES[head], axes_lens=[1024, 512, 512], **config
        )
        width = [128, 256, 512, 512] if size == "large" else [16, 16, 32, 32]
        vae = diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=width, layers_per_block=2, norm_num_groups=16, latent_channels=16,
            use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1159,
        )  # fmt: skip
    for part in (encoder, denoiser, vae):
        for weight in part.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.7 / weight[0].numel() ** 0.5)
    print(f"denoiser: {sum(weight.numel() for weight in denoiser.parameters()) / 1e9:.2f} billion weights, {dtype}")
    diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), vae=vae.to(dtype),
        text_encoder=encoder.to(dtype), tokenizer=tokenizer, transformer=denoiser.to(dtype),
    ).save_pretrained(folder)  # fmt: skip


def load_of(num: int, rate: float, steps: tuple[int, int], seed: int) -> list[Job]:
    """Return requests that arrive at a mean rate."""
    chance = random.Random(seed)
    now, jobs = 0.0, []
    for index in range(num):
        prompt = " ".join(chance.choices(WORDS, k=chance.randint(3, 9)))
        jobs.append(Job(now, f"{prompt} {seed}.{index}", 1000 * seed + index, chance.randint(*steps)))
        now += chance.expovariate(rate)
    return jobs


def one_after_another(pipeline: Any, jobs: list[Job], call: dict[str, Any]) -> tuple[list[float], float, list[Any]]:
    """Return latencies, seconds until all were done, and pictures."""
    import torch

    begun = time.perf_counter()
    latencies: list[float] = []
    pictures: list[Any] = []
    for job in jobs:
        time.sleep(max(0.0, begun + job.arrives_at - time.perf_counter()))
        generator = torch.Generator().manual_seed(job.seed)
        output = pipeline(job.prompt, generator=generator, **call | {"num_inference_steps": job.num_steps})
        pictures.append(np.asarray(output.images[0]))
        latencies.append(time.perf_counter() - begun - job.arrives_at)
    return latencies, time.perf_counter() - begun, pictures


def by_the_engine(engine: Diffusers, jobs: list[Job], concurrency: int) -> tuple[list[float], float, list[Any]]:
    """Return the same for the step engine, which has as many requests as have arrived, at most `concurrency`."""
    begun = time.perf_counter()
    latencies = [0.0] * len(jobs)
    pictures: list[Any] = [None] * len(jobs)
    live: dict[str, int] = {}
    num_added = 0
    while num_added < len(jobs) or live:
        now = time.perf_counter() - begun
        while num_added < len(jobs) and jobs[num_added].arrives_at <= now and len(live) < concurrency:
            job = jobs[num_added]
            params = engine.Params(seed=job.seed, num_inference_steps=job.num_steps)
            engine.add(EngineRequest(str(num_added), params, frozenset({"image"})), {"prompt": [Text(job.prompt)]})
            live[str(num_added)] = num_added
            num_added += 1
        if not live:
            time.sleep(max(0.0, begun + jobs[num_added].arrives_at - time.perf_counter()))
            continue
        for event in engine.step(list(live)):
            match event:
                case Output(payload=Image() as image):
                    pixels = np.frombuffer(image.data.view, np.uint8).reshape(image.height, image.width, 3)
                    pictures[live[event.request]] = pixels
                case Finished():
                    index = live.pop(event.request)
                    latencies[index] = time.perf_counter() - begun - jobs[index].arrives_at
                case Failure():
                    raise event.error
                case _:
                    pass
    return latencies, time.perf_counter() - begun, pictures


def main() -> None:
    diffusers: Any = importlib.import_module("diffusers")
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--size", choices=["small", "large"], default="large" if has_gpu else "small")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--guidance", type=float, default=0.0, help="above 1 a step computes two samples")
    parser.add_argument("--load", type=float, default=2.5, help="arrivals per picture that the pipeline alone makes")
    args = parser.parse_args()
    side = SIDE[args.size]
    call = {"width": side, "height": side, "guidance_scale": args.guidance}
    device = torch.cuda.get_device_name() if has_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device}; torch {torch.__version__}, diffusers {diffusers.__version__}; {side}×{side}")
    with tempfile.TemporaryDirectory() as folder:
        make_model(args.size, Path(folder))
        dtype = "bfloat16" if has_gpu else "float32"
        options = {"model": folder, "dtype": dtype, "call": call, "max_num_seqs": args.concurrency}
        engine = make_engine(Diffusers, options, num_threads=torch.get_num_threads())
    pipeline = engine._pipeline  # noqa: SLF001 (one copy of the weights serves both sides)
    pipeline.set_progress_bar_config(disable=True)
    # Each side once without being timed: the joint call for all sizes of a batch, too.
    warm = load_of(args.concurrency, 1e6, STEPS[args.size], seed=999)
    by_the_engine(engine, warm, args.concurrency)
    _, seconds, _ = one_after_another(pipeline, warm[:3], call)
    rate = args.load * 3 / seconds
    print(f"the pipeline alone: {3 / seconds:.2f} pictures a second; requests arrive at {rate:.2f} a second")
    throughputs, means = [], []
    for index in range(args.rounds):
        jobs = load_of(args.requests, rate, STEPS[args.size], seed=index)
        theirs = one_after_another(pipeline, jobs, call)
        ours = by_the_engine(engine, jobs, args.concurrency)
        off = [np.abs(a.astype(int) - b.astype(int)).mean() for a, b in zip(ours[2], theirs[2], strict=True)]
        throughputs.append(theirs[1] / ours[1])
        means.append(statistics.mean(ours[0]) / statistics.mean(theirs[0]))
        print(
            f"round {index}: one after another {theirs[1]:.2f} s, mean latency {statistics.mean(theirs[0]):.2f} s;"
            f" step engine {ours[1]:.2f} s, {statistics.mean(ours[0]):.2f} s; mean difference of pixels {max(off):.3f}"
        )
    engine.close()
    print(f"guidance {args.guidance:g}, at most {args.concurrency} at once, load {args.load:g}")
    print(f"throughput: {statistics.median(throughputs):.2f} times; mean latency: {statistics.median(means):.2f} of it")


if __name__ == "__main__":
    main()
