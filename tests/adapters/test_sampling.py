from __future__ import annotations

from typing import Any

import msgspec
import pytest

from adapters.sampling import SamplingParams, refuse_unhonoured
from omni_bus.errors import BadInput


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", -0.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("seed", -1),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-320),
        ("temperature", "warm"),
        ("max_tokens", True),
    ],
)
def test_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({field: value}, SamplingParams)


def test_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.convert({"temprature": 1}, SamplingParams)


def test_limits_themselves_are_allowed() -> None:
    params = msgspec.convert(
        {"temperature": 2, "top_p": 1, "top_k": -1, "min_p": 1, "max_tokens": 1, "stop": ["a", "b", "c", "d"]},
        SamplingParams,
    )

    assert (params.temperature, params.top_k, params.stop) == (2.0, -1, ("a", "b", "c", "d"))


def test_unhonoured_field_is_refused_only_when_set() -> None:
    refuse_unhonoured(SamplingParams(temperature=0.5), ("min_tokens", "stop_token_ids"), "llamacpp")

    with pytest.raises(BadInput, match=r"min_tokens: 3 .*llamacpp.*allowed: 0") as caught:
        refuse_unhonoured(SamplingParams(min_tokens=3), ("min_tokens",), "llamacpp")

    assert caught.value.field == "min_tokens"
