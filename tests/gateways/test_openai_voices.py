"""/v1/audio/voices: uploads, who sees them, what is spoken with them, and what is left on the disk."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import connect

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "media"))

from parrot import Parrot  # type: ignore[import-not-found] (put on the path above)
from samples import sound, tone  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running

if TYPE_CHECKING:
    from actors.testing import Running

VOICES = "/v1/audio/voices"
TOML = """
[stages.parrot]
adapter = "parrot:Parrot"
[stages.ramp]
adapter = "synthetic-speech"
[pipelines.parrot]
edges = ["in.text -> parrot.text", "in.reference -> parrot.reference", "parrot.audio -> out.audio"]
[pipelines.ramp]
edges = ["in.text -> ramp.text", "ramp.audio -> out.audio"]
[gateways.openai]
api_keys = ["a", "b"]
FILES
"""
WAV = sound("wav", "pcm_s16le", rate_hz=16_000, seconds=1.5)


def toml(gateway: str = "") -> str:
    return TOML.replace("FILES", gateway)


def form(**fields: Any) -> aiohttp.FormData:
    found = aiohttp.FormData()
    given = {"name": "Alice", "consent": "c-17", "audio_sample": WAV} | fields
    for name, value in given.items():
        if isinstance(value, bytes):
            found.add_field(name, value, filename="alice.wav", content_type="audio/wav")
        elif isinstance(value, tuple):
            data, filename, content_type = value
            found.add_field(name, data, filename=filename, content_type=content_type)
        elif value is not None:
            found.add_field(name, value)
    # Else aiohttp would send a form without files in another way.
    found._is_multipart = True
    return found


def kept(folder: str | Path) -> list[str]:
    """Endings of what is left of voices."""
    return sorted(path.name.partition(".")[2] for path in Path(folder).rglob("voice-*"))


class Caller:
    """Somebody with a key."""

    def __init__(self, deployment: Running, key: str = "a") -> None:
        self._url = deployment.url
        self.headers = {"Authorization": f"Bearer {key}"}

    async def ask(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(self._url, headers=self.headers) as http,
            http.request(method, path, **more) as response,
        ):
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.read())

    async def upload(self, **fields: Any) -> dict[str, Any]:
        status, found = await self.ask("POST", VOICES, data=form(**fields))
        assert status == 200, found
        assert found["success"] is True
        return found["voice"]

    async def names(self) -> list[str]:
        _, found = await self.ask("GET", f"{VOICES}?names_only=true")
        assert found.keys() == {"voices"}
        return found["voices"]

    async def say(self, **fields: Any) -> tuple[int, Any]:
        return await self.ask("POST", "/v1/audio/speech", json={"input": "word", "response_format": "pcm", **fields})


async def test_uploaded_voice_is_listed_spoken_with_and_deleted() -> None:
    async with running(toml()) as deployment:
        caller = Caller(deployment)
        voice = await caller.upload(ref_text=" hi there ", speaker_description="")
        assert voice | {"created_at": 0} == {
            "name": "Alice",
            "consent": "c-17",
            "created_at": 0,
            "mime_type": "audio/wav",
            "file_size": len(WAV),
            "ref_text": "hi there",
        }
        status, found = await caller.ask("GET", VOICES)
        assert (status, found["voices"]) == (200, ["alice", "default"])
        assert found["uploaded_voices"] == [voice | {"embedding_source": "audio", "embedding_dim": None}]

        status, pcm = await caller.say(model="parrot", voice="ALICE")
        assert (status, pcm) == (200, tone(16_000, 1.5).tobytes())
        text, params, reference = Parrot.seen[-1]
        assert (text, params.voice, params.task_type, params.reference_text) == ("word", None, "Base", "hi there")
        assert reference is not None

        assert (await caller.ask("DELETE", f"{VOICES}/aLiCe"))[0] == 200
        assert await caller.names() == ["default"]
        assert (await caller.ask("DELETE", f"{VOICES}/alice"))[0] == 404
        assert kept(deployment.deployment.state_dir) == []
        assert await caller.say(model="parrot", voice="alice") == (200, b"\x10\x00\xf0\xff" * 800)


async def test_official_client_makes_uses_and_deletes_a_voice() -> None:
    async with (
        running(toml()) as deployment,
        AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="a", max_retries=0) as sdk,
    ):
        voice = await sdk.audio.voices.create(name="Bob", consent="cons_1", audio_sample=("bob.wav", WAV, "audio/wav"))
        assert (voice.id, voice.name, voice.object, voice.type) == ("bob", "Bob", "audio.voice", "audio_sample")
        speech = await sdk.audio.speech.create(
            model="parrot", voice={"id": voice.id}, input="word", response_format="pcm"
        )
        assert speech.content == tone(16_000, 1.5).tobytes()
        assert (await sdk.audio.voices.delete(voice.id)).deleted
        assert await Caller(deployment).names() == ["default"]


async def test_voice_of_another_key_is_not_there() -> None:
    async with running(toml()) as deployment:
        caller, other = Caller(deployment), Caller(deployment, "b")
        await caller.upload()

        assert await other.names() == ["default"]
        assert (await other.ask("DELETE", f"{VOICES}/alice"))[0] == 404
        await other.say(model="parrot", voice="alice")
        assert Parrot.seen[-1][2] is None
        await other.upload(consent="other's")
        _, found = await caller.ask("GET", VOICES)
        assert [voice["consent"] for voice in found["uploaded_voices"]] == ["c-17"]


async def test_pipeline_without_reference_refuses_it_by_name() -> None:
    async with running(toml()) as deployment:
        caller = Caller(deployment)
        await caller.upload()
        for field in ("voice", "speaker"):
            status, found = await caller.say(model="ramp", **{field: "Alice"})
            assert (status, found["error"]["param"]) == (400, field)
            assert "ramp takes no reference" in found["error"]["message"]
        status, found = await caller.say(model="parrot", voice="alice", ref_text="x")
        assert (status, found["error"]["param"]) == (400, "ref_text")


async def test_stream_and_batch_speak_with_it() -> None:
    async with running(toml()) as deployment:
        caller = Caller(deployment)
        await caller.upload()
        url = deployment.url.replace("http", "ws") + "/v1/audio/speech/stream"
        async with connect(url, additional_headers=caller.headers) as socket:
            for sent in (
                '{"type": "session.config", "model": "parrot", "voice": "alice", "response_format": "pcm"}',
                '{"type": "input.text", "text": "word"}',
                '{"type": "input.done"}',
            ):
                await socket.send(sent)
            heard = [await socket.recv() for _ in range(5)]
            assert heard[2] == tone(16_000, 1.5).tobytes()
        body = {"model": "parrot", "voice": "alice", "items": [{"input": "word"}]}
        status, found = await caller.ask("POST", "/v1/audio/speech/batch", json=body)
        assert (status, found["succeeded"]) == (200, 1)
        assert Parrot.seen[-1][2] is not None


async def test_voices_outlive_a_restart_and_replace_each_other(tmp_path: Path) -> None:
    files = f'files_dir = "{tmp_path}"'
    created: list[int] = []
    for _ in range(2):
        async with running(toml(files)) as deployment:
            caller = Caller(deployment)
            for _ in range(2):
                created.append((await caller.upload())["created_at"])
                assert await caller.names() == ["alice", "default"]
            await caller.ask("DELETE", f"{VOICES}/Alice")
            created.append((await caller.upload(consent="last"))["created_at"])
            assert kept(tmp_path) == ["blob", "json"]
    async with running(toml(files)) as deployment:
        _, found = await Caller(deployment).ask("GET", VOICES)
        assert [voice["consent"] for voice in found["uploaded_voices"]] == ["last"]
        assert (await Caller(deployment).say(model="parrot", voice="alice"))[1] == tone(16_000, 1.5).tobytes()
    assert created == sorted(set(created))


async def test_immutable_voices_and_their_limit() -> None:
    async with running(toml('voice_policy = "immutable"\nmax_caller_voices = 1')) as deployment:
        caller = Caller(deployment)
        await caller.upload()
        status, found = await caller.ask("POST", VOICES, data=form(name="ALICE"))
        assert status == 400
        assert "is there already" in found["error"]["message"]
        status, found = await caller.ask("POST", VOICES, data=form(name="bob"))
        assert "1 voices are kept for you (allowed: 1)" in found["error"]["message"]
        assert await caller.names() == ["alice", "default"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"name": None}, "name", "missing"),
        ({"name": "  "}, "name", "missing"),
        ({"name": "../../etc/passwd"}, "name", "without / and"),
        ({"name": "a\\b"}, "name", "without / and"),
        ({"name": ".."}, "name", "neither . nor .."),
        ({"name": "a\0b"}, "name", "printable"),
        ({"name": "x" * 257}, "name", "a string of 257 characters came (allowed: 1 to 256"),
        ({"name": "Default"}, "name", "'Default' is a built-in voice"),
        ({"consent": None}, "consent", "missing"),
        ({"audio_sample": None}, "audio_sample", "missing"),
        ({"audio_sample": "text"}, "audio_sample", "a text came"),
        ({"audio_sample": b"no sound"}, "audio_sample", "audio_sample"),
        ({"audio_sample": (WAV, "a.wav", "image/png")}, "audio_sample", "Content-Type image/png came"),
        ({"audio_sample": (WAV, "a.txt", "application/octet-stream")}, "audio_sample", "octet-stream came"),
        ({"audio_sample": sound("wav", "pcm_s16le", seconds=0.5)}, "audio_sample", "0.50 s of sound came"),
        ({"audio_sample": sound("flac", "flac", rate_hz=8000, seconds=31.0)}, "audio_sample", "31.00 s of sound"),
        ({"speaker_embedding": "[1.0]"}, "speaker_embedding", "allowed: audio_sample"),
        ({"type": "prompt"}, "type", "'prompt' came (allowed: audio_sample)"),
        ({"colour": "red"}, "colour", "unknown field"),
        ({"ref_text": "x" * 9000}, "ref_text", "more than 8192 bytes"),
    ],
)
async def test_bad_upload_names_its_field(fields: dict[str, Any], param: str, words: str) -> None:
    async with running(toml()) as deployment:
        caller = Caller(deployment)
        status, found = await caller.ask("POST", VOICES, data=form(**fields))

        assert status == 400
        assert found["error"]["param"] == param
        assert words in found["error"]["message"]
        assert await caller.names() == ["default"]
        assert kept(deployment.deployment.state_dir) == []


async def test_large_sample_is_refused_and_kinds_are_told_by_endings() -> None:
    async with running(toml("max_voice_bytes = 60000")) as deployment:
        caller = Caller(deployment)
        status, found = await caller.ask("POST", VOICES, data=form(audio_sample=bytes(70_000)))
        assert (status, found["error"]["param"]) == (413, "audio_sample")
        voice = await caller.upload(audio_sample=(WAV, "A.WAV", "application/octet-stream"))
        assert voice["mime_type"] == "audio/wav"


@pytest.mark.parametrize("name", ["..%2f..%2fetc%2fpasswd", "%00", "%ff", "voice-" + "0" * 32, "a" * 3000, "default"])
async def test_what_is_no_voice_is_not_deleted(name: str) -> None:
    from yarl import URL

    async with running(toml()) as deployment, aiohttp.ClientSession(headers=Caller(deployment).headers) as http:
        await Caller(deployment).upload()
        async with http.delete(URL(f"{deployment.url}{VOICES}/{name}", encoded=True)) as response:
            assert response.status == 404
        assert await Caller(deployment).names() == ["alice", "default"]


async def test_list_refuses_what_it_does_not_know() -> None:
    async with running(toml()) as deployment:
        caller = Caller(deployment)
        assert (await caller.ask("GET", f"{VOICES}?names_only=yes"))[1]["error"]["param"] == "names_only"
        assert (await caller.ask("GET", f"{VOICES}?model=nope"))[0] == 404
        await caller.upload()
        assert (await caller.ask("GET", f"{VOICES}?model=ramp"))[1] == {"voices": ["default"], "uploaded_voices": []}
        assert (await caller.ask("GET", f"{VOICES}?model=parrot"))[1]["voices"] == ["alice", "default"]


async def test_uploads_of_one_name_at_once_leave_one_voice() -> None:
    async with running(toml()) as deployment:
        caller = Caller(deployment)
        await asyncio.gather(*(caller.upload(consent=str(i)) for i in range(5)))
        _, found = await caller.ask("GET", VOICES)
        assert len(found["uploaded_voices"]) == 1
        await caller.ask("DELETE", f"{VOICES}/alice")
        assert await caller.names() == ["default"]
