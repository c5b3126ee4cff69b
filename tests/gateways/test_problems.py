"""Errors as clients see them."""

from __future__ import annotations

import json

import pytest

from gateways.problems import MAX_MESSAGE_CHARACTERS, Problem, scrub, to_problem
from omni_bus import errors


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.BadInput("x", field="f"), 400, "BadRequestError"),
        (errors.UnknownName("x", field="f"), 400, "BadRequestError"),
        (errors.InputTooLarge("prompt too long", field="prompt"), 400, "BadRequestError"),
        (errors.MediaTooLarge("too many pixels", field="image_url"), 413, "RequestTooLargeError"),
        (errors.Unreachable("no answer", field="image_url"), 422, "UnprocessableEntityError"),
        (errors.StorageQuotaExceeded("delete some", field="file"), 400, "BadRequestError"),
        (errors.StorageFull("disk"), 507, "InsufficientStorageError"),
        (Problem(415, "text/plain"), 415, "UnsupportedMediaTypeError"),
        (Problem(416, "bytes=9-"), 416, "RangeNotSatisfiableError"),
        (Problem(400, "\udcff came", param="\udcff"), 400, "BadRequestError"),
        (errors.Overloaded("full", retry_after_s=2.1), 503, "ServiceUnavailableError"),
        (errors.QuotaExceeded("too much", retry_after_s=0.2), 429, "RateLimitError"),
        (errors.Unavailable("no replica", stage="llm"), 503, "ServiceUnavailableError"),
        (errors.DeadlineExceeded("late"), 504, "GatewayTimeoutError"),
        (errors.StageFailed("broke", stage="llm"), 500, "InternalServerError"),
        (errors.StageLost("gone", stage="llm", is_retry_safe=True), 503, "ServiceUnavailableError"),
        (errors.RequestCancelled("stopping"), 503, "ServiceUnavailableError"),
        (errors.BadFrame("bytes"), 500, "InternalServerError"),
        (ValueError("/etc/secret"), 500, "InternalServerError"),
        (Problem(413, "large"), 413, "RequestTooLargeError"),
    ],
)
def test_error_has_status_and_type(error: Exception, status: int, kind: str) -> None:
    response = to_problem(error).response()
    document = json.loads(response.body)  # type: ignore[arg-type]

    assert response.status == status
    assert response.content_type == "application/json"
    assert document["error"]["code"] == status
    assert document["error"]["type"] == kind
    assert set(document["error"]) >= {"message", "type", "param", "code"}


def test_field_becomes_param() -> None:
    assert to_problem(errors.BadInput("x", field="temperature")).param == "temperature"
    assert to_problem(errors.BadInput("x")).param is None


def test_refusal_says_when_to_come_back() -> None:
    assert to_problem(errors.Overloaded("full", retry_after_s=2.1)).headers == {"Retry-After": "3"}
    assert to_problem(errors.Unavailable("no")).headers == {"Retry-After": "1"}
    assert to_problem(errors.QuotaExceeded("slower", retry_after_s=17.2)).headers == {"Retry-After": "18"}


@pytest.mark.parametrize("is_safe", [True, False])
def test_loss_says_whether_a_retry_is_safe(is_safe) -> None:
    problem = to_problem(errors.StageLost("gone", stage="llm", is_retry_safe=is_safe))

    assert problem.document["error"]["retry_safe"] is is_safe
    assert problem.document["error"]["stage"] == "llm"
    assert problem.headers["x-should-retry"] == str(is_safe).lower()


def test_unforeseen_error_tells_nothing_of_its_cause() -> None:
    assert "secret" not in to_problem(ValueError("/etc/secret")).message


def test_paths_addresses_and_tracebacks_are_scrubbed() -> None:
    message = (
        "stage failed: can't open /home/me/models/x.gguf at 0x7f3a00112233\n"
        'Traceback (most recent call last):\n  File "/srv/app.py", line 3, in load\nOSError: disk'
    )

    assert scrub(message) == "stage failed: can't open <path> at <address>\nOSError: disk"
    assert scrub("1/2 and text/event-stream and 3.5/4") == "1/2 and text/event-stream and 3.5/4"
    assert len(scrub("x" * 10_000)) == MAX_MESSAGE_CHARACTERS + 1
