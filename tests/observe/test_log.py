from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from omni_bus.observe.log import JsonFormatter


def line_of(message: str, *, fields: dict | None = None, error: BaseException | None = None) -> dict:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.INFO, __file__, 1, message, (), info)
    if fields is not None:
        record.fields = fields
    return json.loads(JsonFormatter("llm.0").format(record))


def test_line_has_its_own_fields_and_the_events() -> None:
    line = line_of("hello", fields={"request": "r-1", "after_s": 0.5})

    assert line.pop("time") > 0
    assert line == {"level": "INFO", "actor": "llm.0", "event": "hello", "request": "r-1", "after_s": 0.5}


def test_fields_of_an_event_replace_none_of_the_lines() -> None:
    line = line_of("hello", fields={"actor": "x", "event": "y", "level": "z", "time": 0})

    assert (line["actor"], line["event"], line["level"]) == ("llm.0", "hello", "INFO")
    assert line["time"] > 0


def test_what_json_has_no_form_for_is_shown() -> None:
    assert line_of("hello", fields={"what": object})["what"] == "<class 'object'>"


@pytest.fixture
def root_level():
    before = logging.getLogger().level
    yield logging.getLogger().setLevel
    logging.getLogger().setLevel(before)


def failed(prompt: str) -> Exception:
    try:
        try:
            raise KeyError(prompt)
        except KeyError as cause:
            raise ValueError(f"can't take: {prompt}") from cause
    except ValueError as error:
        return error


def test_messages_of_exceptions_are_for_debugging_only(root_level) -> None:
    """An engine may quote a prompt in what it raises."""
    root_level(logging.INFO)
    said = line_of("the engine raised", error=failed("a secret prompt"))
    root_level(logging.DEBUG)
    debugged = line_of("the engine raised", error=failed("a secret prompt"))

    assert "secret" not in json.dumps(said)
    assert "ValueError" in said["traceback"]
    assert "KeyError" in said["traceback"]
    assert "in failed" in said["traceback"]
    assert "can't take: a secret prompt" in debugged["traceback"]


@pytest.mark.parametrize(
    ("level", "expected"),
    [("DEBUG", ["phase", "d", "i", "e"]), ("INFO", ["phase", "i", "e"]), ("ERROR", ["phase", "e"])],
)
def test_supervisors_lines_pass_at_any_level(level: str, expected: list[str]) -> None:
    code = (
        "import logging; from omni_bus.observe.log import log_to_stderr; "
        f"log_to_stderr('a', '{level}'); log = logging.getLogger('x'); "
        "log.info('phase'); log.debug('d'); log.info('i'); log.error('e')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == expected
