"""JSON Schemas that requests bring, of answers and of tools: checked here, so that no engine sees one that is none."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import msgspec

from gateways.fields import refusal
from omni_bus.errors import BadInput

MAX_SCHEMA_BYTES = 64 * 1024
"""Of one schema, packed; engines compile it into a grammar that is many times as large."""

MAX_SCHEMA_DEPTH = 32
"""Objects and lists within each other."""


def check_schema(name: str, schema: Any) -> None:
    """Check that a value is a JSON Schema that means something: by its meta-schema, patterns and references.

    Args:
        name: the field, for refusals.
        schema: an object or a boolean.

    Raises:
        BadInput: names the field and the place within it.
    """
    if not isinstance(schema, dict | bool):
        raise refusal(name, schema, "a JSON Schema: an object")
    if _is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise BadInput(f"{name}: it is nested too deeply (allowed: {MAX_SCHEMA_DEPTH} levels)", field=name)
    try:
        size = len(msgspec.msgpack.encode(schema))
    except OverflowError:
        raise refusal(name, schema, "a JSON Schema whose integers have 64 bits") from None
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
        raise refusal(name, schema, "a JSON Schema in Unicode") from None
    if size > MAX_SCHEMA_BYTES:
        raise BadInput(f"{name}: {size} bytes came (allowed: at most {MAX_SCHEMA_BYTES})", field=name)
    if isinstance(schema, bool):
        return
    try:
        # Offline: a reference must lead into the schema itself, nothing is fetched.
        jsonschema_rs.validator_for(schema, offline=True)
    except jsonschema_rs.ValidationError as error:
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
        place = f"{name}{place}"[:400]
        raise BadInput(f"{place}: {error.message[:200]} (allowed: what JSON Schema allows)", field=place) from None
    except (jsonschema_rs.ReferencingError, ValueError, OverflowError) as error:
        raise BadInput(f"{name}: {str(error)[:200]} (allowed: a JSON Schema)", field=name) from None


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether a value has more levels, found level by level instead of by recursion."""
    level = [value]
    for _ in range(depth):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return any(isinstance(each, dict | list) for each in level)
