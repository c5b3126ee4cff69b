"""What Schemathesis does to each request before it is sent."""

from __future__ import annotations

from typing import Any

import schemathesis

MAX_TOKENS = 100
"""A synthetic stage writes as many words as it is told to: two thousand million are not malformed, but take long."""

_LENGTHS = ("max_tokens", "max_completion_tokens", "min_tokens")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Ask for short answers."""
    if not isinstance(body, dict):
        return body
    return body | {
        name: MAX_TOKENS for name in _LENGTHS if type(body.get(name)) is int and MAX_TOKENS < body[name] < 2**31
    }
