"""What an answer must be, and which tools it may call: checked before any engine sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateways.fields import names_of, read_fields, refusal, refuse_unknown
from gateways.json_schemas import check_schema
from gateways.openai_fields import Bool, Object
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from gateways.openai_fields import Shared

MAX_TOOLS = 128
"""OpenAI's limit."""

_Name = Annotated[
    str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$", description="1 to 64 letters, digits, underscores or hyphens")
]
_Text = Annotated[str, Meta(max_length=16_384, description="a string of at most 16384 characters")]
_Long = Annotated[str, Meta(min_length=1, max_length=65_536, description="a string of 1 to 65536 characters")]


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Of a ``response_format`` of type ``json_schema``."""

    name: _Name
    schema: Object | None = None
    description: _Text | None = None
    strict: Bool | None = None
    """The schema always holds, asked for or not."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Of the field of this name."""

    type: Annotated[Literal["text", "json_object", "json_schema"], Meta(description="text, json_object, json_schema")]
    json_schema: Object | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """Of the field of this name (vLLM's): one of them."""

    json: Annotated[dict[str, Any] | bool, Meta(description="a JSON Schema")] | None = None
    json_object: Annotated[Literal[True], Meta(description="true")] | None = None
    regex: _Long | None = None
    choice: (
        Annotated[
            list[Annotated[str, Meta(min_length=1)]],
            Meta(min_length=1, max_length=1024, description="a list of 1 to 1024 strings"),
        ]
        | None
    ) = None
    grammar: _Long | None = None


class ToolFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: _Name
    description: _Text | None = None
    parameters: Object | None = None
    strict: Bool | None = None


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a body about tools."""

    tools: (
        Annotated[list[Any], Meta(min_length=1, max_length=MAX_TOOLS, description=f"a list of 1 to {MAX_TOOLS} tools")]
        | None
    ) = None
    tool_choice: (
        Annotated[str | dict[str, Any], Meta(description="'none', 'auto', 'required' or a function of the tools")]
        | None
    ) = None
    parallel_tool_calls: Bool | None = None


_TOOL_KEYS = ("type", "function")


def read_structure(fields: Shared) -> dict[str, Any] | None:
    """Return what the answer must be, as `adapters.sampling.Structure` has it; None for any text.

    Raises:
        BadInput: a form that nobody knows, a schema that is none, or two of them.
    """
    found = _response_format(fields.response_format)
    if fields.structured_outputs is None:
        return found
    if found is not None:
        raise refusal("structured_outputs", fields.structured_outputs, "null, beside response_format")
    return _structured_outputs(fields.structured_outputs)


def _response_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    refuse_unknown(value, names_of(ResponseFormat), prefix="response_format.")
    kind = read_fields(ResponseFormat, value, prefix="response_format.")
    if kind.type != "json_schema":
        if kind.json_schema is not None:
            raise refusal("response_format.json_schema", kind.json_schema, f"null, as the type is {kind.type}")
        return {"json_object": True} if kind.type == "json_object" else None
    place = "response_format.json_schema"
    if kind.json_schema is None:
        raise refusal(place, None, "an object with 'name' and 'schema'")
    refuse_unknown(kind.json_schema, names_of(JsonSchemaFormat), prefix=f"{place}.")
    wanted = read_fields(JsonSchemaFormat, kind.json_schema, prefix=f"{place}.")
    if wanted.schema is None:
        return {"json_object": True}  # OpenAI: without a schema any object will do
    check_schema(f"{place}.schema", wanted.schema)
    return {"json": wanted.schema}


def _structured_outputs(value: dict[str, Any]) -> dict[str, Any]:
    refuse_unknown(value, names_of(StructuredOutputs), prefix="structured_outputs.")
    wanted = read_fields(StructuredOutputs, value, prefix="structured_outputs.")
    found = {name: given for name, given in msgspec.structs.asdict(wanted).items() if given is not None}
    if len(found) != 1:
        raise refusal("structured_outputs", value, f"one of {', '.join(StructuredOutputs.__struct_fields__)}")
    if wanted.json is not None:
        check_schema("structured_outputs.json", wanted.json)
    return found


def read_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Return what a `omni_bus.wire.prompt.Prompt` has of tools; nothing if the body has none.

    Raises:
        BadInput: a tool that is none, a schema that is none, a choice that can't be made.
    """
    fields = read_fields(Tools, body)
    if fields.tools is None:
        if fields.tool_choice not in (None, "none"):
            raise refusal("tool_choice", fields.tool_choice, "null or 'none', without tools")
        return {}
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools)]
    names = [tool["function"]["name"] for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise BadInput(f"tools[{i}].function.name: {name!r} came twice (allowed: once)", field=f"tools[{i}]")
    found = {"tools": tools, "tool_choice": _tool_choice(fields.tool_choice, names)}
    return found if fields.parallel_tool_calls is not False else found | {"parallel_tool_calls": False}


def _tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise refusal(place, tool, "an object with 'type' and 'function'")
    if tool.get("type", "function") != "function":
        raise refusal(f"{place}.type", tool["type"], "'function'")
    refuse_unknown(tool, _TOOL_KEYS, prefix=f"{place}.")
    function, inner = tool.get("function"), f"{place}.function"
    if not isinstance(function, dict):
        raise refusal(inner, function, "an object with 'name'")
    refuse_unknown(function, names_of(ToolFunction), prefix=f"{inner}.")
    read = read_fields(ToolFunction, function, prefix=f"{inner}.")
    if read.parameters is not None:
        check_schema(f"{inner}.parameters", read.parameters)
        if read.parameters.get("type", "object") != "object":
            raise refusal(f"{inner}.parameters.type", read.parameters["type"], "'object'")
    found = {name: value for name, value in msgspec.structs.asdict(read).items() if value is not None}
    return {"type": "function", "function": found}


def _tool_choice(choice: str | dict[str, Any] | None, names: list[str]) -> str:
    match choice:
        case None:
            return "auto"
        case "none" | "auto" | "required":
            return choice
        case {"type": "function", "function": {"name": str() as name}} if name in names:
            return f"function:{name}"
        case {"type": "function", "function": {"name": name}}:
            raise refusal("tool_choice.function.name", name, ", ".join(names))
        case _:
            allowed = "none, auto, required, or {'type': 'function', 'function': {'name': …}}"
            raise refusal("tool_choice", choice, allowed)
