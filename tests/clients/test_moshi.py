"""A tiny Moshi of the true classes behind its gateway, as Moshi's clients use it; and the stock client where it is.

`scripts/nightly_clients` installs that one (it asks for an older torch, and runs with ours).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from websockets.asyncio.client import connect

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

import tiny  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running
from adapters.transformers_moshi import TransformersMoshi
from omni_bus.testing import StepDriver, make_engine
from omni_bus.wire.payloads import Audio, Blob

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.testing import Running

sphn = pytest.importorskip("sphn")
pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

FRAME = 1920
TOML = """
[stages.moshi]
adapter = "transformers-moshi"
model = "FOLDER"
max_num_seqs = 2
STAGE
[pipelines.moshi]
max_in_flight = 2
max_queued = 0
edges = ["in.audio -> moshi.audio", "moshi.audio -> out.audio", "moshi.text -> out.text"]
[gateways.moshi]
protocol = "moshi"
max_lead_s = LEAD
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.moshi(tmp_path_factory.mktemp("moshi"))


@pytest.fixture
async def live(folder: str) -> AsyncIterator[Running]:
    """At the pace of speech, as it is served."""
    async with running(TOML.replace("FOLDER", folder).replace("STAGE", "").replace("LEAD", "1.0")) as deployment:
        yield deployment


@pytest.fixture
async def fast(folder: str) -> AsyncIterator[Running]:
    """As fast as sound comes."""
    toml = TOML.replace("FOLDER", folder).replace("STAGE", "frame_period_s = 0").replace("LEAD", "0.0")
    async with running(toml) as deployment:
        yield deployment


def speech(num_frames: int, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).standard_normal(num_frames * FRAME) * 0.3).clip(-1, 1).astype("<f4")


@pytest.fixture(scope="module")
def persona(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a stage whose model looks back far enough for instructions, with a voice."""
    folder = tmp_path_factory.mktemp("voices")
    with wave.open(str(folder / "NATF2.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24_000)
        file.writeframes((speech(4, seed=5) * 32767).astype("<i2").tobytes())
    model = tiny.moshi(tmp_path_factory.mktemp("far"), sliding_window=120)
    return {"model": model, "voices": str(folder), "max_num_seqs": 2, "frame_period_s": 0}


async def duplex(deployment: Running, sound: Any, seed: int, **opening: str) -> tuple[bytes, str]:
    """Return what is said to a sound, of `/v1/audio/duplex`."""
    said, text = b"", ""
    async with connect(f"ws://127.0.0.1:{deployment.port}/v1/audio/duplex", compression=None) as socket:
        await socket.send(json.dumps({"type": "open", "seed": seed, **opening}))

        async def speak() -> None:
            for start in range(0, len(sound), 3000):
                await socket.send(sound[start : start + 3000].tobytes())
            await socket.send('{"type": "close"}')

        speaking = asyncio.create_task(speak())
        async for data in socket:
            if isinstance(data, bytes):
                said += data
            elif (event := json.loads(data))["type"] == "text":
                text += event["text"]
            else:
                assert event["type"] in ("ready", "done")
        await speaking
    return said, text


async def test_duplex_says_what_the_engine_says_alone(folder: str, fast: Running) -> None:
    """Two conversations at once, each to the last sample as an engine of its own would have it."""
    sounds = [speech(20), speech(13, seed=1)]
    answers = await asyncio.gather(*(duplex(fast, sound, seed) for seed, sound in enumerate(sounds)))

    engine = make_engine(TransformersMoshi, {"model": folder, "frame_period_s": 0, "max_num_seqs": 2})
    driver = StepDriver(engine)
    for seed, (sound, (said, text)) in enumerate(zip(sounds, answers, strict=True)):
        payload = Audio(24_000, 1, "f32", Blob(sound.tobytes()))
        [alone] = driver.run(driver.add({"audio": [payload]}, {"seed": seed}))
        assert said == alone.pcm
        assert text == alone.text
        assert text
    engine.close()


async def test_persona_and_voice_are_primed_or_refused_by_name(persona: dict[str, Any]) -> None:
    """By a file's name, as PersonaPlex's clients name voices; others are told what there is, and get no handshake."""
    stage = "\n".join(f'{key} = "{value}"' for key, value in persona.items() if isinstance(value, str))
    toml = TOML.replace('model = "FOLDER"', stage).replace("STAGE", "frame_period_s = 0").replace("LEAD", "0.0")
    sound, who = speech(8), {"persona": "You are Ana", "voice": "NATF2.pt"}
    async with running(toml) as deployment:
        plain, primed = await asyncio.gather(duplex(deployment, sound, 1), duplex(deployment, sound, 1, **who))
        address = f"ws://127.0.0.1:{deployment.port}/api/chat"
        async with connect(f"{address}?voice_prompt=NATF2.pt&text_prompt=You+are+Ana", compression=None) as socket:
            assert await socket.recv() == b"\x00"
        async with connect(f"{address}?voice_prompt=NATF3.pt", compression=None) as socket:
            refused = await socket.recv()

    driver = StepDriver(make_engine(TransformersMoshi, persona))
    params = {"seed": 1, "instructions": "You are Ana", "voice": "NATF2"}
    [alone] = driver.run(driver.add({"audio": [Audio(24_000, 1, "f32", Blob(sound.tobytes()))]}, params))
    assert primed == (alone.pcm, alone.text)
    assert len(plain[0]) == len(primed[0])
    assert plain != primed
    assert refused == b"\x05voice_prompt: 'NATF3.pt' came (allowed with 'moshi': NATF2)"


async def test_chat_speaks_while_the_client_speaks_and_while_it_is_silent(live: Running) -> None:
    """As Moshi's client sends it: a frame every 80 ms for a while, then nothing; sound comes back all the time."""
    writer, reader = sphn.OpusStreamWriter(24_000), sphn.OpusStreamReader(24_000)
    sound = speech(8)
    async with connect(f"ws://127.0.0.1:{live.port}/api/chat?seed=3", compression=None) as socket:
        assert await socket.recv() == b"\x00"
        num_samples, words, loudest = 0, "", 0.0
        while num_samples < 20 * FRAME:
            data = await socket.recv()
            assert isinstance(data, bytes)
            if data[0] == 1:
                if len(sound):
                    await socket.send(b"\x01" + writer.append_pcm(np.ascontiguousarray(sound[:FRAME])))
                    sound = sound[FRAME:]
                pcm = reader.append_bytes(data[1:])
                num_samples += len(pcm)
                loudest = max(loudest, float(np.abs(pcm).max(initial=0.0)))
            elif data[0] == 2:
                words += data[1:].decode()
    assert words
    assert loudest > 0.1


SOUND_CARD = """
import runpy, sys, threading, types
import numpy as np
heard = open(sys.argv.pop(1), "wb", buffering=0)

class Stream:
    def __init__(self, samplerate, channels, blocksize, callback):
        self.shape, self.period, self.callback = (blocksize, channels), blocksize / samplerate, callback
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
    def __enter__(self):
        self.thread.start()
    def __exit__(self, *exception):
        self.over.set()
        self.thread.join()
    def run(self):
        while not self.over.wait(self.period):
            self.block()

class InputStream(Stream):
    noise = np.random.default_rng(0)
    def block(self):
        self.callback(self.noise.uniform(-.5, .5, self.shape).astype(np.float32), self.shape[0], None, None)

class OutputStream(Stream):
    def block(self):
        block = np.zeros(self.shape, np.float32)
        self.callback(block, self.shape[0], None, None)
        heard.write(block.tobytes())

sys.modules["sounddevice"] = types.SimpleNamespace(InputStream=InputStream, OutputStream=OutputStream)
runpy.run_module("moshi.client", run_name="__main__")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("moshi") is None, reason="moshi's client is not here: scripts/nightly_clients"
)
async def test_stock_client_holds_a_conversation(live: Running, tmp_path: Path) -> None:
    """`python -m moshi.client`, unmodified, but that its sound card is a clock: noise in, a file out."""
    heard = tmp_path / "heard.f32"
    heard.touch()
    arguments = ["-c", SOUND_CARD, str(heard), "--host", "127.0.0.1", "--port", str(live.port)]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    client = await asyncio.create_subprocess_exec(sys.executable, "-u", *arguments, **pipes)  # type: ignore[arg-type]
    assert client.stdout is not None
    printed = b""
    try:
        while heard.stat().st_size < 4 * 24_000 * 6:
            printed += await asyncio.wait_for(client.stdout.read(4096), 60)
        assert client.returncode is None, printed
    finally:
        if client.returncode is None:
            client.terminate()
        await client.wait()

    sound = np.fromfile(heard, np.float32)
    text = printed.decode(errors="replace")
    assert "connected!" in text
    assert "Lost connection" not in text
    assert "Error" not in text
    assert np.abs(sound).max() > 0.1
    assert (np.abs(sound) > 0.001).sum() > 24_000  # for a second at least, in all
