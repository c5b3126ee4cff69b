"""What ``omni-bus bench serve`` refuses before it sends anything; runs are in tests/bench and tests/processes."""

from __future__ import annotations

import pytest

from omni_bus.cli import main

SPEECH = ("--backend", "openai-audio-speech")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--base-url", "localhost:8000"], "--base-url localhost:8000 came (allowed: http:// or https://"),
        (["--base-url", "http://"], "--base-url http:// came (allowed: http:// or https://"),
        (["--num-prompts", "0"], "--num-prompts 0 came (allowed: an integer from 1 to "),
        (["--num-prompts", "many"], "--num-prompts many came (allowed: an integer from 1 to "),
        (["--request-rate", "0"], "--request-rate 0 came (allowed: a number above 0, or inf)"),
        (["--request-rate=-2"], "--request-rate -2 came (allowed: a number above 0, or inf)"),
        (["--request-rate", "nan"], "--request-rate nan came (allowed: a number above 0, or inf)"),
        (["--burstiness", "0"], "--burstiness 0 came (allowed: a number above 0, or inf)"),
        (["--max-concurrency", "0"], "--max-concurrency 0 came (allowed: an integer from 1 to "),
        (["--num-warmups=-1"], "--num-warmups -1 came (allowed: an integer from 0 to "),
        (["--seed", "x"], "--seed x came (allowed: an integer from 0 to "),
        (["--mode", "load-test"], "unknown value of --mode: 'load-test'"),
        (
            ["--backend", "grpc"],
            "unknown value of --backend: 'grpc' (known: openai, openai-audio, openai-audio-speech, openai-chat)",
        ),
        (["--endpoint", "v1"], "--endpoint v1 came (allowed: a path, as /v1/chat/completions)"),
        (["--dataset-name", "hf"], "unknown value of --dataset-name: 'hf' (known: custom, custom_audio, random, sent"),
        (["--dataset-name", "custom"], "--dataset-name custom needs a file (allowed: --dataset-path FILE)"),
        (["--dataset-path", "a"], "--dataset-path a came for random (allowed: --dataset-name custom, custom_audio or"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere"], "--dataset-path /nowhere: No such file"),
        ([*SPEECH, "--dataset-path", "a"], "--dataset-path a came for sentences (allowed: --dataset-name custom, "),
        (
            [*SPEECH, "--dataset-name", "custom_audio"],
            "custom_audio came for openai-audio-speech (allowed: with --back",
        ),
        ([*SPEECH, "--sentences-per-prompt", "0"], "--sentences-per-prompt 0 came (allowed: an integer from 1 to "),
        ([*SPEECH, "--wer", "0"], "--wer 0 came (allowed: an integer from 1 to 10000)"),
        ([*SPEECH, "--wer", "--wer-base-url", "x"], "--wer-base-url x came (allowed: http:// or https:// with a host"),
        ([*SPEECH, "--wer-model", "m"], "--wer-model came (allowed: with --wer and --backend openai-audio-speech)"),
        (["--wer"], "--wer came with --backend openai-chat (allowed: openai-audio-speech, openai-audio)"),
        (["--input-len", "0"], "--input-len 0 came (allowed: an integer from 1 to 1000000)"),
        (["--random-output-len", "0"], "--output-len 0 came (allowed: an integer from 1 to "),
        (["--random-range-ratio", "1"], "--random-range-ratio 1 came (allowed: from 0 to below 1)"),
        (["--modalities", "text,video"], "unknown value of --modalities: 'video' (known: audio, text)"),
        (["--temperature=-1"], "--temperature -1 came (allowed: a number, at least 0)"),
        (["--top-p", "2"], "--top-p 2 came (allowed: a number above 0 and at most 1)"),
        (["--extra-body", "[]"], "--extra-body []: Expected `object`, got `array` (allowed: a JSON object"),
        (["--slow-reader-rate", "inf"], "--slow-reader-rate inf came (allowed: a number above 0)"),
        (["--slow-readers", "0"], "--slow-readers 0 came (allowed: an integer from 1 to 10000)"),
        (["--goodput", "ttft:500", "tpot"], "--goodput tpot came (allowed: KEY:VALUE; keys ttft, tpot, e2el"),
        (["--percentile-metrics", "ttft,x"], "unknown value of --percentile-metrics: 'x' (known: audio_duration"),
        (["--percentile-metrics", ""], "--percentile-metrics is empty (allowed: one or more of ttft"),
        (["--metric-percentiles", "50,101"], "--metric-percentiles 101 came (allowed: numbers from 0 to 100"),
        (["--header", "secret"], "--header: a word without '='"),
        (["--metadata", "=x"], "--metadata: a word without '='"),
        (["--server-pid", "x"], "--server-pid x came (allowed: an integer from 1 to "),
        (["--request-timeout", "0"], "--request-timeout 0 came (allowed: a number above 0)"),
        (["--plot", "a.gif"], "--plot a.gif came (allowed: a file in .png, .svg, .pdf)"),
        (["--save-result", "--result-dir", "/nowhere"], "there is no directory '/nowhere'"),
    ],
)
def test_bad_option_is_named_with_what_is_allowed(capsys, arguments: list[str], words: str) -> None:
    assert main(["bench", "serve", *arguments]) == 1

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("omni-bus bench: ")
    assert words in said.err
    assert "secret" not in said.err


def test_server_that_is_not_there_is_told(capsys, unused_tcp_port: int) -> None:
    assert main(["bench", "serve", "--base-url", f"http://127.0.0.1:{unused_tcp_port}"]) == 1

    assert f"--base-url http://127.0.0.1:{unused_tcp_port}: can't connect" in capsys.readouterr().err


def test_bench_alone_says_what_there_is(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["bench"])

    assert "WHAT" in capsys.readouterr().err
