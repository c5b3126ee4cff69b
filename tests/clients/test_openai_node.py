"""The official client for Node.js, where scripts/test has installed it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gateways"))

from able import ABLE, WORDS  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running

SCRIPT = Path(__file__).with_name("openai_node.mjs")
FOLDER = Path(os.environ.get("OMNI_BUS_NODE", Path(sys.prefix) / "node"))
"""Where scripts/venv puts it."""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.skipif(not (FOLDER / "node_modules/openai").is_dir(), reason="scripts/venv found no npm")
async def test_client_for_node_understands_every_answer() -> None:
    async with running(ABLE) as deployment:
        ran = await asyncio.create_subprocess_exec(
            "node",
            str(SCRIPT),
            f"{deployment.url}/v1",
            str(FOLDER),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complained = await ran.communicate()
        assert ran.returncode == 0, complained.decode()
        while any(counts["in_flight"] for counts in (await status(deployment))["pipelines"].values()):
            pass  # the stream that it left is being cancelled; each round asks the coordinator

        assert deployment.stages["llm.0"].stats.cancelled == 1
    assert json.loads(said) == {
        "models": ["able", "plain", "vectors", "sound", "speaks"],
        "contents": [WORDS, WORDS],
        "tokens": ["hi:0", " hi:1", " hi:2", " hi:3"],
        "streamed": WORDS,
        "usage": {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5},
        "call": ["look", {"marker": "hi"}],
        "completion": "hi:0 hi:1",
        "widths": [8, 8],
        "refusal": ["BadRequestError", 400, "temperature"],
    }


async def status(deployment):
    return await deployment.gateway.client.admin("status")
