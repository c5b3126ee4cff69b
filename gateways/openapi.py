"""OpenAPI 3.1 documents, made of route descriptions and the Structs that requests and answers are.

A gateway lists its routes as `Operation` and serves `document`. JSON schemas come from msgspec, so a field that a
Struct gains is in the document; whoever adds a route without a description fails a test.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gateways.http import OPEN
from gateways.problems import TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VERSION = "3.1.0"

Schema = dict[str, Any]
"""A JSON Schema (2020-12)."""

Method = Literal["get", "head", "post", "put", "delete"]

_REF = "#/components/schemas/{name}"
_PATTERN = re.compile(r"\{(\w+)(?::[^}]*)?\}")
"""aiohttp's variables in paths, ``{name}`` or ``{name:REGEX}``."""

EVERYWHERE = (400, 403, 408, 417, 500, 503)
"""Errors that any route may answer with: a broken head, another's host, a head that comes too slowly, an expectation,
a stop."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong."""

    message: str
    """For a person: the field, the value, and what is allowed."""
    type: str
    """The status in words."""
    code: int
    """The status."""
    param: str | None = None
    """The field that is to blame."""
    stage: str | msgspec.UnsetType = msgspec.UNSET
    """The stage in which it went wrong."""
    retry_safe: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether the same request may be sent again without work being done twice that must not be."""


class Error(msgspec.Struct, frozen=True):
    """Every error of every route."""

    error: ErrorDetail


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a route answers with one status."""

    description: str
    content: dict[str, type | Schema] = {}
    """By media type: the Struct, or a schema."""
    events: type | None = None
    """What each server-sent event holds as JSON, where it may be answered in events."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one route."""

    method: Method
    path: str
    """As the router has it; variables' patterns are left out of the document."""
    name: str
    """Unique: the ``operationId``."""
    summary: str
    body: type | Schema | None = None
    body_type: str = "application/json"
    """The body's media type."""
    answers: dict[int, Answer]
    errors: tuple[int, ...] = ()
    """Statuses of errors besides those of all routes."""
    parameters: dict[str, str] = {}
    """What the path's variables are."""
    queries: dict[str, Schema] = {}
    """Parameters of the query, each with a description."""
    headers: dict[str, Schema] = {}
    """Those that mean something to the route alone, each with a description."""


def document(
    title: str,
    version: str,
    operations: Iterable[Operation],
    *,
    schemas: Mapping[str, Schema] | None = None,
    has_keys: bool = False,
) -> dict[str, Any]:
    """Return the document.

    Args:
        title: of the API.
        version: of the server.
        operations: all that is served.
        schemas: named schemas that operations refer to and that no Struct gives.
        has_keys: whether routes that are not `OPEN` want a key.
    """
    operations = list(operations)
    references, components = _components(operations)
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(plain_path(operation.path), {})[operation.method] = _operation(
            operation, references, has_keys=has_keys
        )
    security = {"key": {"type": "http", "scheme": "bearer", "description": "One of the gateway's API keys."}}
    return {
        "openapi": VERSION,
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": components | dict(schemas or {}),
            **({"securitySchemes": security} if has_keys else {}),
        },
    }


def plain_path(path: str) -> str:
    """Return a router's path without the patterns of its variables."""
    return _PATTERN.sub(r"{\1}", path)


def nullable(schema: Schema) -> Schema:
    """Return a schema that allows null as well."""
    return schema if {"type": "null"} in schema.get("anyOf", ()) else {"anyOf": [schema, {"type": "null"}]}


def _components(operations: list[Operation]) -> tuple[dict[type, Schema], dict[str, Schema]]:
    """Return a reference to each Struct, and the schemas of all."""
    found: list[Any] = [Error]
    for operation in operations:
        found.append(operation.body)
        for answer in operation.answers.values():
            found += [answer.events, *answer.content.values()]
    structs = list(dict.fromkeys(each for each in found if isinstance(each, type)))
    references, components = msgspec.json.schema_components(structs, ref_template=_REF)
    return dict(zip(structs, references, strict=True)), components


def _operation(operation: Operation, references: dict[type, Schema], *, has_keys: bool) -> dict[str, Any]:
    is_guarded = has_keys and operation.path not in OPEN
    statuses = {*EVERYWHERE, *operation.errors}
    if operation.body is not None:
        statuses.add(413)
    if is_guarded:
        statuses.add(401)
    error = {} if operation.method == "head" else {"content": _content({"application/json": Error}, references)}
    responses = {str(status): {"description": TYPES[status], **error} for status in sorted(statuses)}
    for status, answer in operation.answers.items():
        responses[str(status)] = _answer(answer, references)
    found: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary, "responses": responses}
    if is_guarded:
        found["security"] = [{"key": []}]
    variables = _PATTERN.findall(operation.path)
    parameters = [_parameter(name, operation.parameters[name]) for name in variables]
    for place, schemas in (("query", operation.queries), ("header", operation.headers)):
        parameters += [{"name": name, "in": place, "schema": schema} for name, schema in schemas.items()]
    if parameters:
        found["parameters"] = parameters
    if operation.body is not None:
        body = _content({operation.body_type: operation.body}, references)
        found["requestBody"] = {"required": True, "content": body}
    return found


def _answer(answer: Answer, references: dict[type, Schema]) -> dict[str, Any]:
    content = _content(answer.content, references)
    if answer.events is not None:
        # OpenAPI has no word for what is in an event before 3.2; readers disagree what a schema here is of.
        content["text/event-stream"] = {"x-event-schema": references[answer.events]}
    return {"description": answer.description, **({"content": content} if content else {})}


def _content(content: Mapping[str, Any], references: dict[type, Schema]) -> dict[str, Any]:
    return {
        media: {"schema": references[schema] if isinstance(schema, type) else schema}
        for media, schema in content.items()
    }


def _parameter(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}
