"""vLLM-Omni's duplex client asks aloud twice, and its connection is cut in the second answer.

``python duplex_talk.py URL MODEL QUESTION.pcm``
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path

RATE_HZ = 24_000


def clients() -> types.ModuleType:
    """Return the module; its package wants a whole engine, of which the client needs nothing."""
    found = importlib.util.find_spec("vllm_omni")
    assert found is not None
    for name, folder in (("vllm_omni", ""), ("vllm_omni.clients", "clients")):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(place) / folder) for place in found.submodule_search_locations or ()]
        sys.modules[name] = package
    return importlib.import_module("vllm_omni.clients.duplex")


async def main(url: str, model: str, sound: bytes) -> None:
    """Ask twice and print both answers."""
    duplex = clients()
    answers = []
    config = duplex.SessionConfig(input_audio=duplex.AudioFormat("pcm16", RATE_HZ))
    async with duplex.DuplexClient(f"{url}/realtime", model=model, config=config) as client:
        events = duplex.EventCollector()
        listening = asyncio.create_task(events.consume(client))
        for is_cut in (False, True):
            await client.append_audio(sound)
            await client.commit()
            answer = await anext(client.responses())
            num_bytes = 0
            async for piece in answer.audio():
                if is_cut and not num_bytes:
                    client._ws.transport.abort()  # noqa: SLF001 (it resumes by itself)
                num_bytes += len(piece)
            await client.ack_playback(num_bytes / (2 * RATE_HZ) * 1000, response_id=answer.response_id)
            answers.append({"text": events.response_text(answer.response_id), "bytes": num_bytes})
        assert events.count("connection.resumed") == 1
        assert not events.errors()
        listening.cancel()
    print(json.dumps(answers))


asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_bytes()))
