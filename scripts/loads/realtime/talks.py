"""Clients of other projects talk with the shipped voice chat, in writing and aloud, and say what they heard.

They come from PyPI and npm into a folder of their own, since they bring more than the tests need. Exits with 1 if one
of them did not hear both answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import openai

from actors.testing import running

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
CONFIG = Path(__file__).parents[3] / "configs" / "voice_chat.toml"
MODEL = "smollm2-live"
QUESTION = "What is the capital of France?"
SILENCE = bytes(2 * 24_000)
CLIENT_S = 120
NPM = ("@openai/agents-realtime@0.20.0", "zod@4")
PYPI = ("pipecat-ai[openai]==1.14.0", "pybase64>=1.4")
ALONE = "vllm-omni==0.30.0"
"""Without what it depends on: only its client is wanted."""


def install(folder: Path) -> dict[str, list[str]]:
    """Return the command of each client, its packages installed."""
    node, venv = folder / "node", folder / "venv"
    if not (node / "node_modules").is_dir():
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(node), *NPM], check=True)
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *PYPI], check=True)
        subprocess.run([*install, "--no-deps", ALONE], check=True)
    return {
        "@openai/agents-realtime": ["node", str(HERE / "agents.mjs"), str(node)],
        "pipecat": [str(python), str(HERE / "pipecat_talk.py")],
        "vllm-omni, cut and resumed": [str(python), str(HERE / "duplex_talk.py")],
    }


async def talk(command: Sequence[str], url: str, question: Path) -> list[dict[str, object]]:
    """Run a client; return its two answers, none if it failed."""
    ran = await asyncio.create_subprocess_exec(
        *command, url, MODEL, str(question), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(CLIENT_S):
            said, complained = await ran.communicate()
    except TimeoutError:
        ran.kill()
        said, complained = await ran.communicate()
    if ran.returncode != 0:
        print(complained.decode()[-2000:], file=sys.stderr)
        return []
    return json.loads(said.splitlines()[-1])


async def run(clients: dict[str, list[str]]) -> bool:
    """Let each of them talk; return whether all heard both answers."""
    toml = CONFIG.read_text(encoding="utf-8").replace("port = 8000", "port = 0")
    all_heard = True
    async with running(toml) as deployment:
        await deployment.until_ready()
        client = openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none")
        speech = await client.audio.speech.create(model="hibari", voice="heart", input=QUESTION, response_format="pcm")
        with tempfile.NamedTemporaryFile(suffix=".pcm") as file:
            file.write(SILENCE + speech.content + SILENCE)
            file.flush()
            for name, command in clients.items():
                answers = await talk(command, f"{deployment.url}/v1".replace("http", "ws"), Path(file.name))
                has_heard = len(answers) == 2 and all("Paris" in str(a["text"]) and a["bytes"] for a in answers)
                print(f"{name}: {'both answers heard' if has_heard else 'FAILED'}: {json.dumps(answers)}", flush=True)
                all_heard &= has_heard
    return all_heard


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="scripts/nightly_clients realtime", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/nightly_clients"), help="where the clients are put")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return 0 if asyncio.run(run(install(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
