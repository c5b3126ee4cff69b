"""``omni-bus bench serve`` as a person runs it, against a deployment of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


def test_bench_measures_a_deployment_and_its_processes(up, omni_bus, tmp_path) -> None:
    toml = (ROOT / "configs" / "synthetic_text.toml").read_text(encoding="utf-8").replace("port = 8000", "port = 0")
    deployment = up(toml)
    url = deployment.wait_for("ready")["gateways"]["openai"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one", "output_tokens": 4}\n{"prompt": "two words", "output_tokens": 4}\n')
    bench = ("bench", "serve", "--base-url", url)
    custom = ("--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", "10")

    shown = omni_bus(*bench, *custom, "--request-rate", "200", "--goodput", "e2el:60000")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "synthetic-text at http" in shown.stdout
    assert "10 completed, 0 failed" in shown.stdout
    assert "(10 of 10 kept the limits)" in shown.stdout
    assert "intended_ttft (ms)" in shown.stdout

    pid = str(deployment.process.pid)
    saved = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--metadata", "run=7")
    told = omni_bus(*bench, *custom, "--json", "--max-concurrency", "2", "--server-pid", pid, *saved)
    document = json.loads(told.stdout)
    assert (told.returncode, told.stderr) == (0, f"wrote {tmp_path}/r.json\n")
    assert json.loads((tmp_path / "r.json").read_text()) == document
    assert (document["completed"], document["total_output_tokens"], document["total_input_tokens"]) == (10, 40, 15)
    assert (document["model_id"], document["run"], document["max_concurrent_requests"]) == ("synthetic-text", "7", 2)
    processes = document["server"]["processes"]
    assert {"omni_bus up", "actors.coordinator", "actors.stage llm 0", "actors.gateway openai 0"} == processes.keys()

    refusals = {
        ("--model", "synthetic-tex"): "--model: 'synthetic-tex'; did you mean 'synthetic-text'?",
        ("--extra-body", '{"temperature": 9}'): "400 BadRequestError: temperature: 9 came (allowed: a number from 0",
        ("--backend", "openai", "--endpoint", "/v1/nothing"): "404 NotFoundError: POST /v1/nothing: no such route",
    }
    for arguments, message in refusals.items():
        refused = omni_bus(*bench, *arguments)
        assert (refused.returncode, "Traceback" in refused.stderr) == (1, False), arguments
        assert message in refused.stderr
    assert deployment.stop() == 0
