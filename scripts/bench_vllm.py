#!/usr/bin/env python3
"""The same model on the same vLLM: behind our gateway, and behind vLLM's own server, taking turns.

Both run at once, with the same engine arguments and (without ``--plain``) threads, and only one of them is asked at a
time: `omni-bus bench serve` (a process of its own) puts the same load on one, then on the other, round after round.
Figures are medians over the rounds. At the end ``vllm.LLM`` does the same work offline.

"Outside the engine" is what the processors did for a request besides its engine: for us the gateway, the coordinator
and the stage's event loop (the engine has a thread of its own there); for vLLM its API server (the engine is a
process). That leaves two things out, one of either: vLLM's engine process has threads that take requests in and send
tokens out, as our stage has ZeroMQ's; and our engine's thread turns tokens into text, as vLLM's API server does. So
"all that serves" counts both for both: the I/O threads as they were, and the text by what it costs ``vllm.LLM``.

Run: ``python scripts/bench_vllm.py [--quick] [--plain] [--rounds N] [--model FOLDER] [--concurrency N …]
[--engine NAME=JSON …]``
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import measured
from omni_bus.runtime.cores import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START_S = 600.0
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_num_batched_tokens": 256}
"""Engine arguments of both, on a CPU."""

TOML = """
start_timeout_s = {start_s}
[stages.llm]
adapter = "vllm"
model = {model}
max_num_seqs = {max_num_seqs}
context_length = {context_length}
kv_cache_gib = {kv_cache_gib}
threads = {threads}
engine = {{ {engine}, disable_log_stats = true }}

[pipelines.chat]
max_in_flight = 1024
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]

[gateways.openai]
port = 0
"""


class Server:
    """One of the two: where it listens, and what its processes have used."""

    def __init__(self, name: str, url: str, pids: dict[str, int]) -> None:
        self.name = name
        self.url = url
        self.pids = pids

    def parts(self) -> dict[str, float]:
        """Return processor seconds outside the engine so far, by part."""
        if self.name == "vllm serve":
            children = psutil.Process(self.pids["api"]).children(recursive=True)
            [engine] = [child.pid for child in children if "EngineCore" in " ".join([child.name(), *child.cmdline()])]
            busy = _threads_s(engine, lambda thread, _: thread == engine)
            return {"API server": measured.cpu_s(self.pids["api"]), IO: measured.cpu_s(engine) - busy}
        stage = self.pids["llm.0"]
        return {
            "gateway": measured.cpu_s(self.pids["gateway.openai.0"]),
            "coordinator": measured.cpu_s(self.pids["coordinator"]),
            "stage's loop": _threads_s(stage, lambda thread, _: thread == stage),
            IO: _threads_s(stage, lambda _, name: name.startswith("ZMQ")),
        }


IO = "engine's I/O"


def _threads_s(pid: int, is_counted: Callable[[int, str], bool]) -> float:
    """Return the processor seconds of those threads of a process whose id and name count (proc(5))."""
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread ended
            if is_counted(int(path.name), (path / "comm").read_text().strip()):
                total_ns += int((path / "schedstat").read_text().split()[0])
    return total_ns / 1e9


@contextlib.contextmanager
def our_server(args: argparse.Namespace, engine: dict[str, Any]) -> Iterator[Server]:
    """Run a deployment with the adapter ``vllm``."""
    toml = TOML.format(
        start_s=START_S,
        model=json.dumps(args.model),
        max_num_seqs=args.max_num_seqs,
        context_length=args.context_length,
        kv_cache_gib=args.kv_cache_gib,
        threads=args.threads,
        engine=", ".join(f"{name} = {json.dumps(value)}" for name, value in engine.items()),
    )
    with measured.Deployment(toml, start_s=START_S) as deployment:
        yield Server("omni-bus", deployment.ready["gateways"]["openai"], deployment.pids)


@contextlib.contextmanager
def vllm_server(args: argparse.Namespace, engine: dict[str, Any]) -> Iterator[Server]:
    """Run vLLM's own server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [
        *("--model", args.model, "--served-model-name", "chat", "--host", "127.0.0.1", "--port", str(port)),
        *("--max-num-seqs", str(args.max_num_seqs), "--max-model-len", str(args.context_length)),
        *("--kv-cache-memory-bytes", str(int(args.kv_cache_gib * 2**30)), "--disable-log-stats"),
    ]
    for name, value in engine.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [] if value is False else [flag, str(value)]
    command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", *flags]
    cores = "as vLLM chooses them" if args.plain else "as of the stage"
    print(f"vllm serve: {' '.join(flags)} (threads and cores {cores})", flush=True)
    environ = dict(os.environ) if args.plain else threads_of_a_stage(args)
    with tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False) as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
    try:
        _wait_until_healthy(process, f"http://127.0.0.1:{port}", Path(log.name))
        yield Server("vllm serve", f"http://127.0.0.1:{port}", {"api": process.pid})
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(measured.STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        Path(log.name).unlink()


def threads_of_a_stage(args: argparse.Namespace) -> dict[str, str]:
    """Return an environment in which vLLM's threads are what they are in a stage."""
    return environment(os.environ, args.threads) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Ask until it answers; the server has no other sign.

    Raises:
        SystemExit: it ended, or the time is over.
    """
    ends_at = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < ends_at:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310 (ours)
            return
        time.sleep(1)
    raise SystemExit(f"vllm serve did not start:\n{log.read_text()[-3000:]}")


def load(server: Server, args: argparse.Namespace, concurrency: int, seed: int) -> dict[str, Any]:
    """Put one load on a server and return what `bench serve` says of it, and the processor seconds."""
    num_prompts = max(args.min_prompts, 2 * concurrency)
    command = [
        *(sys.executable, "-m", "omni_bus", "bench", "serve", "--json", "--base-url", server.url, "--model", "chat"),
        *("--max-concurrency", str(concurrency), "--num-prompts", str(num_prompts), "--num-warmups", "1"),
        *("--input-len", str(args.input_len), "--output-len", str(args.output_len), "--ignore-eos"),
        *("--temperature", "0", "--seed", str(seed), "--metric-percentiles", "50,99"),
    ]
    before = server.parts()
    done = subprocess.run(command, cwd=measured.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    found = json.loads(done.stdout)
    if found["completed"] != num_prompts:
        raise SystemExit(f"{server.name}: {found['completed']} of {num_prompts} requests ended well: {done.stdout}")
    # The warm-up and the first request are in the processor seconds, so their tokens count as well.
    num_tokens = found["total_output_tokens"] + 2 * args.output_len
    parts = {part: (seconds - before[part]) / num_tokens * 1000 for part, seconds in server.parts().items()}
    found["outside_parts"] = parts
    found["outside_s_per_1000"] = sum(parts.values()) - parts[IO]
    found["outside_io_s_per_1000"] = parts[IO]
    return found


FIGURES = {
    "tokens/s": "output_throughput",
    "TTFT p50 ms": "p50_ttft_ms",
    "TTFT p99 ms": "p99_ttft_ms",
    "ITL p50 ms": "p50_itl_ms",
    "TPOT p50 ms": "p50_tpot_ms",
    "CPU s outside / 1,000": "outside_s_per_1000",
    "CPU s of its I/O / 1,000": "outside_io_s_per_1000",
}


def compare(args: argparse.Namespace, servers: list[Server]) -> dict[str, Any]:
    """Let the servers take turns and print what each did."""
    results: dict[str, Any] = {}
    for concurrency in args.concurrency:
        rounds: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
        for number in range(args.rounds):
            for server in servers if number % 2 == 0 else reversed(servers):
                rounds[server.name].append(load(server, args, concurrency, 100 * concurrency + number))
        medians = {
            name: {figure: measured.median(found[key] for found in list_) for figure, key in FIGURES.items()}
            for name, list_ in rounds.items()
        }
        measured.table(
            f"{concurrency} at once, {args.rounds} rounds of {max(args.min_prompts, 2 * concurrency)} requests",
            list(FIGURES),
            {name: list(found.values()) for name, found in medians.items()},
        )
        for server in servers:
            parts = [found["outside_parts"] for found in rounds[server.name]]
            said = (f"{part} {1000 * measured.median(found[part] for found in parts):.1f}" for part in parts[0])
            print(f"  {server.name}, us a token: {', '.join(said)}")
        ours, theirs = medians["omni-bus"], medians["vllm serve"]
        aims = dict.fromkeys(list(FIGURES)[:-1], "at most 1.0") | {
            "tokens/s": "at least 1.0",
            "TTFT p99 ms": "at most 1.05",
            "CPU s outside / 1,000": "at most 0.5",
        }
        for figure in aims:
            measured.ratio(
                f"{figure} at {concurrency}: omni-bus / vllm serve", ours[figure] / theirs[figure], aims[figure]
            )
        results[str(concurrency)] = {"medians": medians, "rounds": rounds}
    return results


def compare_all(results: dict[str, Any], offline: dict[str, dict[str, float]]) -> None:
    """Print the processor time of all that serves, the engine's I/O and the making of text included on both sides."""
    print(
        "\nAll that serves: outside the engine, the engine's I/O, and for ours the text that its engine's thread makes"
    )
    for concurrency, found in results.items():
        ours, theirs = (
            medians["CPU s outside / 1,000"] + medians["CPU s of its I/O / 1,000"]
            for medians in (found["medians"]["omni-bus"], found["medians"]["vllm serve"])
        )
        text = offline[concurrency]["text_s_per_1000"]
        said = f"omni-bus {1000 * (ours + text):.1f} ({1000 * text:.1f} of it text), vllm serve {1000 * theirs:.1f}"
        print(f"  {concurrency} at once, us a token: {said}")
        measured.ratio(
            f"all that serves at {concurrency}: omni-bus / vllm serve", (ours + text) / theirs, "at most 0.5"
        )


OFFLINE = """
import json, sys, time
from vllm import LLM, SamplingParams
arguments, concurrencies, prompt_len, output_len = json.loads(sys.argv[1])
llm = LLM(**arguments)
params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
found, text_s = {}, 0.0
make = llm.llm_engine.output_processor.process_outputs
def timed(*args, **kwargs):
    global text_s
    begun = time.thread_time()
    made = make(*args, **kwargs)
    text_s += time.thread_time() - begun
    return made
llm.llm_engine.output_processor.process_outputs = timed
for concurrency in (1, *concurrencies):
    text_s = 0.0
    prompts = [{"prompt_token_ids": [100 + i + j for j in range(prompt_len)]} for i in range(concurrency)]
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    num_tokens = concurrency * output_len
    found[concurrency] = {
        "tokens_per_s": num_tokens / (time.perf_counter() - begun), "text_s_per_1000": text_s / num_tokens * 1000
    }
with open(sys.argv[2], "w") as out:  # vLLM writes to its standard output itself
    json.dump(found, out)
"""


def offline(args: argparse.Namespace, engine: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return what ``vllm.LLM`` does with so many prompts at once, which nobody serves or streams."""
    arguments = engine | {
        "model": args.model,
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": args.context_length,
        "kv_cache_memory_bytes": int(args.kv_cache_gib * 2**30),
        "enable_prefix_caching": False,
    }
    told = json.dumps([arguments, args.concurrency, args.input_len, args.output_len])
    with tempfile.NamedTemporaryFile("r") as out:
        command = [args.vllm_python, "-c", OFFLINE, told, out.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=threads_of_a_stage(args))
        if done.returncode:
            raise SystemExit(f"vllm.LLM failed: {done.stderr[-3000:]}")
        return json.load(out)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--model", required=True, help="folder of the model, the same for both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--min-prompts", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--kv-cache-gib", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--engine", nargs="*", default=[], help="engine arguments, as in dtype='\"bfloat16\"'")
    parser.add_argument("--vllm-python", default=sys.executable, help="whose vLLM serves; a full installation")
    parser.add_argument(
        "--plain", action="store_true", help="leave vLLM's own choice of cores to its server instead of the stage's"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.min_prompts, args.output_len, args.concurrency = 1, 2, 8, [1, 4]
    engine = dict(ENGINE)
    for text in args.engine:
        name, _, value = text.partition("=")
        engine[name] = json.loads(value)
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    measured.header()
    with our_server(args, engine) as ours, vllm_server(args, engine) as theirs:
        results = compare(args, [ours, theirs])
    alone = offline(args, engine)
    measured.table(
        "vllm.LLM, all prompts at once, neither served nor streamed",
        ["tokens/s"],
        {f"{concurrency} at once": [alone[str(concurrency)]["tokens_per_s"]] for concurrency in args.concurrency},
    )
    compare_all(results, alone)
    results["offline"] = alone
    measured.write_json(args.json, results)


if __name__ == "__main__":
    main()
