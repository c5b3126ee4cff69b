from __future__ import annotations

import sys
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # type: ignore[import-not-found] (put on the path above)

from adapters.moshi_model import MAX_TOP_K
from adapters.moshi_prompt import PAUSE
from adapters.recorded import Recorded
from adapters.transformers_moshi import MoshiOptions, MoshiParams, TransformersMoshi
from omni_bus.engine import EngineRequest, Finished, Output, Starved
from omni_bus.errors import BadInput, ConfigError, OmniBusError, Overloaded, StartFailed
from omni_bus.testing import StepDriver, make_engine
from omni_bus.wire.payloads import Audio, Blob, Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

FRAME = 1920
RATE_HZ = 24_000
GREEDY: dict[str, Any] = {"text_temperature": 0.0, "audio_temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.moshi(tmp_path_factory.mktemp("moshi"))


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[TransformersMoshi]:
    """Steps as fast as sound comes."""
    engine = make_engine(TransformersMoshi, {"model": folder, "frame_period_s": 0, "max_num_seqs": 3})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of them: four frames each, and a bit."""
    found = tmp_path_factory.mktemp("voices")
    for seed, name in enumerate(("ana", "NATF2")):
        with wave.open(str(found / f"{name}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE_HZ)
            samples = np.random.default_rng(seed).standard_normal(FRAME * 4 + 100) * 8000
            file.writeframes(samples.astype("<i2").tobytes())
    return found


@pytest.fixture(scope="module")
def persona(tmp_path_factory: pytest.TempPathFactory, voices: Path) -> Iterator[TransformersMoshi]:
    """Looks back far enough for instructions."""
    folder = tiny.moshi(tmp_path_factory.mktemp("far"), sliding_window=120)
    engine = make_engine(
        TransformersMoshi, {"model": folder, "frame_period_s": 0, "max_num_seqs": 3, "voices": str(voices)}
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def live(folder: str) -> Iterator[TransformersMoshi]:
    """Steps at its period, whatever has come."""
    engine = make_engine(TransformersMoshi, {"model": folder, "max_num_seqs": 2, "max_waiting_s": 0.4})
    yield engine
    engine.close()


def noise(num_frames: int, seed: int = 0) -> npt.NDArray[np.float32]:
    loudness = np.linspace(0.05, 0.8, num_frames * FRAME)
    return (np.random.default_rng(seed).standard_normal(num_frames * FRAME) * loudness).astype(np.float32)


def audio(samples: npt.NDArray[np.float32]) -> Audio:
    return Audio(RATE_HZ, 1, "f32", Blob(samples.tobytes()))


def pieces(samples: npt.NDArray[np.float32], size: int) -> list[Audio]:
    return [audio(samples[i : i + size]) for i in range(0, len(samples), size)]


def whole(folder: str, sound: npt.NDArray[np.float32]) -> tuple[str, npt.NDArray[np.float32]]:
    """Return what transformers' own `generate` says, greedily, while it hears all of `sound`.

    It takes a prompt and hears silence after it: the user's codes are put where it keeps those of the silence.
    """
    model: Any = transformers.MoshiForConditionalGeneration.from_pretrained(folder)
    with torch.no_grad():
        heard = model.audio_encoder.encode(torch.from_numpy(sound)[None, None], num_quantizers=4)[0]
    num_frames = heard.shape[2]
    build, calls = model.build_delay_pattern_mask, []

    def build_with_user(input_ids: Any, **arguments: Any) -> Any:
        ids, mask = build(input_ids, **arguments)
        if not calls:  # the user's stream comes first, the model's own second
            mask[:, 0, 1 : num_frames + 1] = heard[:, 0]
            mask[:, 1:, 2 : num_frames + 2] = heard[:, 1:]
        calls.append(arguments)
        return ids, mask

    model.build_delay_pattern_mask = build_with_user
    output = model.generate(max_new_tokens=num_frames + 2, do_sample=False, depth_decoder_do_sample=False)
    assert len(calls) == 2
    tokens = output.sequences[0, 1 : num_frames + 2].tolist()
    text = transformers.AutoTokenizer.from_pretrained(folder).decode(tokens, skip_special_tokens=True)
    return text, output.audio_sequences[0, 0, : num_frames * FRAME].clamp(-1, 1).numpy()


@pytest.mark.parametrize("size", [FRAME * 40, 700])
@pytest.mark.filterwarnings("ignore:Passing `generation_config`")
def test_frames_are_those_of_the_whole_model(folder: str, engine: TransformersMoshi, size: int) -> None:
    """Over three times as far as the tiny model looks back; sound within 1e-5 of full scale."""
    sound = noise(40)
    text, expected = whole(folder, sound)
    driver = StepDriver(engine)

    [said] = driver.run(driver.add({"audio": pieces(sound, size)}, GREEDY))

    assert len(set(text)) > 5
    assert np.abs(expected).max() > 0.1
    assert said.text == text
    heard = np.frombuffer(said.pcm, "<f4")
    assert heard.shape == expected.shape
    np.testing.assert_allclose(heard, expected, atol=1e-5)
    assert said.finish is not None
    assert said.finish.detail["frames"] == 40


def test_what_is_said_depends_on_what_is_heard_before_it_and_on_nothing_after(engine: TransformersMoshi) -> None:
    first = noise(12)
    other = np.concatenate([first[: 6 * FRAME], noise(6, seed=2)])
    driver = StepDriver(engine)

    left, right = driver.run(*(driver.add({"audio": [audio(sound)]}, GREEDY) for sound in (first, other)))

    assert left.pcm[: 6 * FRAME * 4] == right.pcm[: 6 * FRAME * 4]
    assert left.pcm != right.pcm


def test_seed_gives_same_answer_alone_and_among_sessions_that_come_and_go(engine: TransformersMoshi) -> None:
    params = {"seed": 7}
    sound = noise(10)
    driver = StepDriver(engine)
    [alone] = driver.run(driver.add({"audio": [audio(sound)]}, params))
    [unlike] = driver.run(driver.add({"audio": [audio(sound)]}, {"seed": 8}))

    before = driver.add({"audio": [audio(noise(3, seed=5))]}, {"seed": 1})
    driver.step()
    one = driver.add({"audio": [audio(sound)]}, params)
    driver.step()
    gone = driver.add({"audio": [audio(noise(9, seed=6))]}, {"seed": 2})
    driver.step()
    driver.abort(gone)
    after = driver.add({"audio": [audio(noise(9, seed=7))]}, {"seed": 3})
    driver.run(before, one, after)

    assert driver.results[one].outputs == alone.outputs
    assert unlike.outputs != alone.outputs


def test_sound_of_another_rate_is_as_long(engine: TransformersMoshi) -> None:
    samples = (np.random.default_rng(3).standard_normal(2 * 48_000) * 8000).astype("<i2")
    driver = StepDriver(engine)

    [said] = driver.run(driver.add({"audio": [Audio(48_000, 2, "s16", Blob(samples.tobytes()))]}, {"seed": 1}))

    assert len(said.pcm) == 4 * FRAME * 13  # a second, and its last half frame filled up


def test_without_a_period_a_step_waits_for_a_frame(engine: TransformersMoshi) -> None:
    driver = StepDriver(engine)
    session = driver.add({"audio": [audio(noise(1)[:-1])]}, is_complete=False)

    assert driver.step() == [Starved(session)]
    driver.feed(session, "audio", [audio(noise(1)[:1])])
    assert len(driver.step()) >= 1
    assert len(driver.results[session].port("audio")) == 1
    driver.abort(session)


def test_late_sound_is_silence_meanwhile(live: TransformersMoshi, engine: TransformersMoshi) -> None:
    """Two frames before anything came, then one whose end is late: it is heard whole, a frame later."""
    sound = noise(2)
    driver = StepDriver(live)
    session = driver.add({}, {"seed": 4})
    driver.step()
    driver.step()
    driver.feed(session, "audio", [audio(sound[:1000])])
    driver.step()
    driver.feed(session, "audio", [audio(sound[1000:])], is_last=True)
    [late] = driver.run(session)
    exact = StepDriver(engine)
    silence = np.zeros(3 * FRAME, np.float32)
    [expected] = exact.run(exact.add({"audio": [audio(np.concatenate([silence, sound]))]}, {"seed": 4}))

    assert late.outputs == expected.outputs
    assert late.finish is not None
    assert late.finish.detail == {"frames": 5, "late_frames": 3, "dropped_s": 0.0}


def test_oldest_sound_is_dropped_beyond_what_may_wait(live: TransformersMoshi, engine: TransformersMoshi) -> None:
    sound = noise(9)
    driver = StepDriver(live)
    session = driver.add({}, {"seed": 4})
    for piece in pieces(sound, FRAME):
        driver.feed(session, "audio", [piece])
    driver.feed(session, "audio", [], is_last=True)
    [late] = driver.run(session)
    exact = StepDriver(engine)
    [expected] = exact.run(exact.add({"audio": [audio(sound[4 * FRAME :])]}, {"seed": 4}))

    assert late.outputs == expected.outputs
    assert late.finish is not None
    assert late.finish.detail["dropped_s"] == pytest.approx(4 * 0.08)


def test_more_sessions_than_rows_are_refused_until_one_is_gone(live: TransformersMoshi) -> None:
    driver = StepDriver(live)
    first, _ = driver.add({}), driver.add({})

    with pytest.raises(Overloaded, match="2 sessions"):
        driver.add({})
    driver.abort(first)
    third = driver.add({})
    driver.step(third)

    assert driver.results[third].port("audio")
    for session in driver.live:
        driver.abort(session)


def test_abort_ends_a_session_at_once(live: TransformersMoshi) -> None:
    kept, dropped = (EngineRequest(name, MoshiParams(), frozenset({"audio"})) for name in ("kept", "dropped"))
    live.add(kept, {})
    live.add(dropped, {})
    live.abort("dropped")

    assert [event.request for event in live.step(["kept", "dropped"]) if isinstance(event, Output | Finished)] == [
        "kept"
    ]
    live.abort("kept")


PRIMED = {"instructions": "You are Ana.", "voice": "ana"}


def test_prompt_is_read_as_the_whole_model_reads_it(persona: TransformersMoshi) -> None:
    """The state after it, against one forward of transformers over all positions of the three streams."""
    driver = StepDriver(persona)
    session = driver.add({}, PRIMED | GREEDY, is_complete=False)
    frames = persona._prompts.of(**PRIMED)
    assert frames is not None
    tone = persona._prompts.tone
    while persona._sessions[session].prompt is not None:
        driver.step()
    row, model = persona._sessions[session].row, persona._model
    num, last = len(frames.text), int(model.config.audio_vocab_size)

    assert frames.text.tolist()[:10] == [PAUSE] * 10  # four frames of the voice, six of silence
    assert num == 10 + len("<system> You are Ana. <system>") + 6
    said, heard = (torch.full((num + 1, 4), last) for _ in range(2))
    for stream, codes in ((said, frames.said), (heard, tone.expand(num, -1))):
        stream[1:, 0], stream[2:, 1:] = codes[:, 0], codes[:-1, 1:]
    text = torch.cat([torch.tensor([model.config.vocab_size]), frames.text])
    with torch.no_grad():
        codes = torch.cat([said, heard], dim=1)
        embedded = sum(embed(codes[:, k]) for k, embed in enumerate(model.embed_tokens))
        embedded = embedded + model.decoder.model.embed_tokens(text)
        hidden = model.decoder.model(inputs_embeds=embedded[None]).last_hidden_state[0, -1]
    np.testing.assert_allclose(persona._moshi._hidden[row].numpy(), hidden.numpy(), atol=1e-5)
    driver.abort(session)


def test_prompt_decides_what_is_said_and_nobody_else_hears_it(persona: TransformersMoshi) -> None:
    """The same prompt gives the same answer, alone or beside others, primed while they talk; another does not."""
    sound, driver = noise(10), StepDriver(persona)
    prompts = ({}, PRIMED, {"voice": "ana"}, {"voice": "NATF2"}, {"instructions": "You are Bo."})
    alone = [driver.run(driver.add({"audio": [audio(sound)]}, {"seed": 7, **prompt}))[0] for prompt in prompts]

    talking = driver.add({"audio": [audio(sound)]}, {"seed": 7})
    driver.step()
    together = [driver.add({"audio": [audio(sound)]}, {"seed": 7, **prompt}) for prompt in (PRIMED, prompts[4])]
    driver.run(talking, *together)

    assert len({result.pcm for result in alone}) == len(prompts)
    assert all(len(result.pcm) == 10 * FRAME * 4 for result in alone)
    assert driver.results[talking].outputs == alone[0].outputs
    assert [driver.results[id_].outputs for id_ in together] == [alone[1].outputs, alone[4].outputs]
    assert [driver.results[id_].port("audio")[0].num_frames for id_ in (talking, *together)] == [FRAME, 0, 0]


def test_live_session_hears_from_the_end_of_its_prompt_on(voices: Path, tmp_path: Path) -> None:
    """What came before, it would hear late for ever."""
    options = {"model": tiny.moshi(tmp_path, sliding_window=120), "max_num_seqs": 1, "voices": str(voices)}
    engine, sound = make_engine(TransformersMoshi, options), noise(6)
    driver = StepDriver(engine)
    session = driver.add({"audio": [audio(noise(2, seed=9))]}, {"seed": 7, "voice": "ana"}, is_complete=False)
    while not driver.results[session].port("audio"):
        driver.step()
    driver.feed(session, "audio", [audio(sound)], is_last=True)
    [said] = driver.run(session)

    exact = make_engine(TransformersMoshi, options | {"frame_period_s": 0})
    driver = StepDriver(exact)
    [expected] = driver.run(driver.add({"audio": [audio(sound)]}, {"seed": 7, "voice": "ana"}))
    assert said.outputs == expected.outputs
    engine.close()
    exact.close()


def test_bad_voices_are_named_at_the_start(voices: Path, folder: str, tmp_path: Path) -> None:
    options = {"model": folder, "max_num_seqs": 1}
    with pytest.raises(StartFailed, match=r"NATF2.wav' has 0.32 s of sound \(allowed: 0.08 to 0.24 s\)"):
        make_engine(TransformersMoshi, options | {"voices": str(voices)})
    with pytest.raises(ConfigError, match=r"voices: '.*' is no folder with WAV files"):
        make_engine(TransformersMoshi, options | {"voices": str(tmp_path)})
    (tmp_path / "x.wav").write_bytes(b"no sound")
    with pytest.raises(StartFailed, match=r"voices: '.*x.wav' can't be read"):
        make_engine(TransformersMoshi, options | {"voices": str(tmp_path)})
    assert TransformersMoshi.voices(msgspec.convert(options | {"voices": str(voices)}, MoshiOptions)) == (
        "NATF2",
        "ana",
    )


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"voice": "NATF3"}, r"unknown voice 'NATF3'.*NATF2, ana"),
        ({"voice": "../ana"}, r"unknown voice '\.\./ana'"),
        ({"instructions": "x" * 60}, r"instructions: with the voice they take 84 frames \(allowed: 60"),
    ],
)
def test_prompt_that_can_not_be_is_refused_and_takes_no_row(
    persona: TransformersMoshi, params: dict[str, Any], said: str
) -> None:
    driver = StepDriver(persona)
    for _ in range(4):
        with pytest.raises(OmniBusError, match=said):
            driver.add({"audio": [audio(noise(1))]}, params)


class Tape(TorchDispatchMode):
    """Keeps which operations a call does on which tensors, and does them again on the same ones, as a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.names.add(str(func).split(".")[1])
        given = {place_of(tensor) for tensor in tensors((args, kwargs))}
        if func._schema.is_mutable or any(place_of(tensor) not in given for tensor in tensors(output)):  # no mere view
            self._calls.append((func, args, kwargs, tensors(output)))
        return output

    def replay(self) -> None:
        """Write what the call wrote, where it wrote it; Python has no say in it any more."""
        for func, args, kwargs, held in self._calls:
            for old, new in zip(held, tensors(func(*args, **kwargs)), strict=True):
                old.copy_(new)


def tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Taped(Recorded):
    """Replays on a CPU what a GPU would."""

    def record(self, *inputs: torch.Tensor) -> None:
        self._inputs = tuple(value.clone() for value in inputs)
        with Tape() as tape:
            self._outputs = self._function(*self._inputs)
        self._graph = tape  # type: ignore[assignment] (it can `replay`)


def test_replayed_steps_say_what_steps_say(persona: TransformersMoshi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that come and go, sampled, with a prompt and without."""
    for module in ("moshi_model", "transformers_moshi"):
        monkeypatch.setattr(f"adapters.{module}.Recorded", Taped)
    options = {name: getattr(persona.options, name) for name in ("model", "max_num_seqs", "voices")}
    taped = make_engine(TransformersMoshi, options | {"frame_period_s": 0})
    said: list[list[Any]] = []
    for engine in (persona, taped):
        driver = StepDriver(engine)
        first = driver.add({"audio": [audio(noise(12))]}, {"seed": 1})
        driver.step()
        gone = driver.add({"audio": [audio(noise(9, seed=6))]}, {"seed": 2})
        driver.step()
        driver.abort(gone)
        primed = driver.add({"audio": [audio(noise(9, seed=7))]}, {"seed": 3, **PRIMED})
        driver.run(first, primed)
        said.append([driver.results[id_].outputs for id_ in (first, primed)])
    taped.close()

    assert said[0] == said[1]
    assert len(said[0][0]) >= 12


def test_step_waits_for_no_device_and_keeps_its_state_in_place(engine: TransformersMoshi) -> None:
    """Else a GPU could not replay it: no number is read back, none is brought from the host."""
    moshi, rows = engine._moshi, engine.max_num_seqs
    held = [*engine._mimi._up._states.values(), moshi._hidden, moshi._logits, moshi._text, moshi._codes, moshi._late]
    sound, active = torch.zeros(rows, 1, FRAME), torch.ones(rows, dtype=torch.bool)
    with torch.inference_mode(), Tape() as tape:
        noise_of_all = moshi.silent_noise()
        engine._advances(sound, active, noise_of_all)
        moshi._reads(moshi._text, moshi._codes[:, :1], moshi._codes, active)
        moshi._speaks(active, noise_of_all)

    waiting = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "lift_fresh", "unique", "item"}
    assert tape.names >= {"scaled_dot_product_attention", "index_put_"}
    assert not tape.names & waiting
    now = [*engine._mimi._up._states.values(), moshi._hidden, moshi._logits, moshi._text, moshi._codes, moshi._late]
    assert [id(tensor) for tensor in now] == [id(tensor) for tensor in held]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"text_temperature": 2.1}, "text_temperature"),
        ({"audio_temperature": -0.1}, "audio_temperature"),
        ({"text_topk": 0}, "text_topk"),
        ({"audio_topk": MAX_TOP_K + 1}, "audio_topk"),
        ({"seed": -1}, "seed"),
        ({"instructions": "x" * 10_001}, "instructions"),
    ],
)
def test_bad_parameter_is_named(engine: TransformersMoshi, params: dict[str, Any], field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        StepDriver(engine).add({}, params)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (Text("hello"), "audio: text came"),
        (Audio(1000, 1, "f32", Blob(bytes(400))), "audio: a rate of 1000 Hz came"),
        (audio(np.full(10, np.nan, np.float32)), "no numbers"),
    ],
)
def test_bad_sound_ends_its_session_only(engine: TransformersMoshi, payload: Any, said: str) -> None:
    driver = StepDriver(engine)
    good, bad = driver.add({"audio": [audio(noise(2))]}), driver.add({"audio": [payload]})

    driver.run(good)

    assert driver.results[good].is_finished
    error = driver.results[bad].error
    assert isinstance(error, BadInput)
    assert said in error.message


def test_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"it is of type 'csm' \(allowed: moshi\)"):
        make_engine(TransformersMoshi, {"model": tiny.csm(tmp_path)})
    with pytest.raises(ConfigError, match=r"model:.*has no config\.json"):
        make_engine(TransformersMoshi, {"model": "/nowhere"})
