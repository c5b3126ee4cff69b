"""``/v1/files``: uploads that stay, each visible to the caller that sent it and to nobody else.

Names and types that callers give are told back to them and used for nothing else.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from gateways import openai_answers as answers
from gateways.download import send_file
from gateways.forms import FRAMING_BYTES, FormOptions, read_form
from gateways.http import KEY_NAME, json_response
from gateways.openapi import Answer, Operation, Schema
from gateways.problems import Problem, to_problem
from gateways.sweeping import Sweeper
from omni_bus.errors import BadInput, OmniBusError
from omni_bus.media.store import Entry, Quota, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

KIND = "file"

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")

BATCH_LIFE_S = 30 * 24 * 3600
"""OpenAI's: files for batches go by themselves, others stay."""

MIN_LIFE_S, MAX_LIFE_S = 3600, 30 * 24 * 3600
MAX_LISTED = 10_000

_Bytes = Annotated[int, msgspec.Meta(ge=1)]


_JSON = "application/json"
_BYTES: Schema = {"contentMediaType": "application/octet-stream"}

_FORM: Schema = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "minLength": 1, **_BYTES},
        "purpose": {"enum": list(PURPOSES)},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_LIFE_S, "maximum": MAX_LIFE_S},
    },
    "required": ["file", "purpose"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
    "additionalProperties": False,
}

_QUERIES: dict[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "description": "files on a page"},
    "order": {"enum": ["asc", "desc"], "description": "by time of creation"},
    "purpose": {"enum": list(PURPOSES), "description": "only files of this purpose"},
    "after": {"type": "string", "description": "the last file of the page before"},
}

_PATH = "/v1/files/{file_id}"
_ID = {"file_id": "as given by the upload"}

OPERATIONS = (
    Operation(
        method="post",
        path="/v1/files",
        name="create_file",
        summary="Upload a file; the form's parts may come in any order",
        body=_FORM,
        body_type="multipart/form-data",
        answers={200: Answer(description="the file is kept", content={_JSON: answers.File})},
        errors=(415, 507),
    ),
    Operation(
        method="get",
        path="/v1/files",
        name="list_files",
        summary="The caller's files, page by page",
        queries=_QUERIES,
        answers={200: Answer(description="a page", content={_JSON: answers.FileList})},
    ),
    Operation(
        method="get",
        path=_PATH,
        name="retrieve_file",
        summary="What is known of a file",
        parameters=_ID,
        answers={200: Answer(description="the file", content={_JSON: answers.File})},
        errors=(404,),
    ),
    Operation(
        method="delete",
        path=_PATH,
        name="delete_file",
        summary="Delete a file",
        parameters=_ID,
        answers={200: Answer(description="it is gone", content={_JSON: answers.FileDeleted})},
        errors=(404,),
    ),
    Operation(
        method="get",
        path=f"{_PATH}/content",
        name="retrieve_file_content",
        summary="A file's bytes, all or a range",
        parameters=_ID,
        headers={"Range": {"type": "string", "description": "one range of bytes"}},
        answers={
            200: Answer(description="all", content={"application/octet-stream": _BYTES}),
            206: Answer(description="the range", content={"application/octet-stream": _BYTES}),
        },
        errors=(404, 416),
    ),
)
"""What the routes are, for ``/openapi.json``."""


class FilesOptions(FormOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a ``[gateways.NAME]`` table of a gateway that keeps files."""

    files_dir: str = ""
    """Folder of uploaded files, private to the user; by default one of this gateway in the XDG state directory."""

    max_file_bytes: _Bytes = 512 * 1024 * 1024
    """A larger file is refused with 413 as soon as that is known."""

    max_caller_bytes: _Bytes = 10 * 1024**3
    """Bytes of files that one caller (API key) may keep."""

    max_caller_files: _Bytes = 1000
    """Files that one caller may keep."""

    max_files_bytes: _Bytes = 50 * 1024**3
    """Bytes of files that all callers together may keep."""

    min_free_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1024**3
    """So much of the disk stays free; an upload that would take of it is refused with 507."""


def check_folder(path: str) -> str:
    """Return why a folder that was configured can't be used, or nothing."""
    folder = Path(path).expanduser().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"files_dir: {folder} is not a folder"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"files_dir: {folder} can't be written to"


class FilesRoutes:
    """The routes' handlers and their store.

    Args:
        options: limits, and where files are kept.
        state_dir: the gateway's own folder for what outlives it.
    """

    def __init__(self, options: FilesOptions, state_dir: str) -> None:
        self._options = options
        self.store = Store(
            Path(options.files_dir).expanduser() if options.files_dir else Path(state_dir) / "files",
            Quota(
                max_owner_bytes=options.max_caller_bytes,
                max_owner_files=options.max_caller_files,
                max_total_bytes=options.max_files_bytes,
                min_free_bytes=options.min_free_bytes,
            ),
        )
        self._sweeper = Sweeper(self.store)

    @property
    def max_body_bytes(self) -> int:
        """Limit of an upload's body."""
        return self._options.max_file_bytes + FRAMING_BYTES

    async def lifetime(self, app: web.Application) -> AsyncIterator[None]:
        """Sweep as long as the application runs, then close the store (for ``app.cleanup_ctx``)."""
        async with self._sweeper:
            yield
        self.store.close()

    # --- handlers ---------------------------------------------------------------------------------------------

    async def create(self, request: web.Request) -> web.Response:
        """``POST /v1/files``: a form with the file and its purpose, in any order."""
        try:
            entry = await self._receive(request)
        except OmniBusError as error:
            problem = to_problem(error)
            problem.must_close = request.can_read_body
            raise problem from error
        if entry.expires_at is not None:
            self._sweeper.has_expiring.set()
        return json_response(file_object(entry))

    async def _receive(self, request: web.Request) -> Entry:
        fields: dict[str, Any] = {}
        async with contextlib.AsyncExitStack() as stack:
            upload, filename = None, ""
            async for part in read_form(request, self._options, max_bytes=self.max_body_bytes):
                if part.name in fields or (part.name == "file" and upload is not None):
                    raise BadInput(f"{part.name}: it came twice (allowed: once)", field=part.name)
                if part.name != "file":
                    fields[part.name] = _field(part.name, await part.text())
                    continue
                if part.filename is None:
                    raise BadInput("file: a text came (allowed: a file with its name)", field="file")
                filename = part.filename
                begun = await self.store.begin(KIND, request[KEY_NAME], max_bytes=self._options.max_file_bytes)
                upload = await stack.enter_async_context(begun)
                async for piece in part.pieces():
                    await upload.write(piece)
            if upload is None:
                raise BadInput("file: missing (allowed: a file with its name)", field="file")
            if "purpose" not in fields:
                raise BadInput(f"purpose: missing (allowed: {', '.join(PURPOSES)})", field="purpose")
            metadata = {"filename": filename, "purpose": fields["purpose"]}
            return await upload.commit(metadata, expires_at=_expires_at(fields, time.time()))

    async def list(self, request: web.Request) -> web.Response:
        """``GET /v1/files``, page by page."""
        query = request.query
        limit = _limit(query.get("limit", str(MAX_LISTED)))
        order, purpose, after = query.get("order", "desc"), query.get("purpose"), query.get("after")
        if order not in ("asc", "desc"):
            raise BadInput(f"order: {order[:40]!r} came (allowed: asc, desc)", field="order")
        if purpose is not None and purpose not in PURPOSES:
            raise _bad_purpose(purpose)
        entries = await self.store.entries(KIND, request[KEY_NAME])
        if order == "desc":
            entries.reverse()
        if after:
            places = [i for i, entry in enumerate(entries) if entry.id == after]
            if not places:
                raise BadInput(f"after: no such file: {after[:80]!r}", field="after")
            entries = entries[places[0] + 1 :]
        if purpose is not None:
            entries = [entry for entry in entries if entry.metadata["purpose"] == purpose]
        page = [file_object(entry) for entry in entries[:limit]]
        return json_response(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(entries) > limit,
            }
        )

    async def retrieve(self, request: web.Request) -> web.Response:
        """``GET /v1/files/ID``."""
        return json_response(file_object(await self._find(request)))

    async def content(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/files/ID/content``."""
        entry = await self._find(request)
        filename, limit_s = entry.metadata["filename"], self._options.write_timeout_s
        return await send_file(request, self.store, entry, filename=filename, write_timeout_s=limit_s)

    async def delete(self, request: web.Request) -> web.Response:
        """``DELETE /v1/files/ID``."""
        file_id = request.match_info["file_id"]
        if not await self.store.delete(file_id, KIND, request[KEY_NAME]):
            raise _missing(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def _find(self, request: web.Request) -> Entry:
        file_id = request.match_info["file_id"]
        entry = await self.entry(file_id, request[KEY_NAME])
        if entry is None:
            raise _missing(file_id)
        return entry

    async def entry(self, file_id: str, caller: str) -> Entry | None:
        """Return a file that a caller has uploaded, for other routes; None if there is none."""
        return await self.store.get(file_id, KIND, caller)


def file_object(entry: Entry) -> dict[str, Any]:
    """Return a file as OpenAI's clients know it."""
    return {
        "id": entry.id,
        "object": "file",
        "bytes": entry.num_bytes,
        "created_at": entry.created_at,
        "expires_at": int(entry.expires_at) if entry.expires_at is not None else None,
        "filename": entry.metadata["filename"],
        "purpose": entry.metadata["purpose"],
        "status": "processed",
        "status_details": None,
    }


def _missing(file_id: str) -> Problem:
    """Said alike of ids that never were, of those that are gone, and of another caller's."""
    return Problem(404, f"no such file: {file_id[:80]!r}", param="file_id")


def _bad_purpose(purpose: str) -> BadInput:
    return BadInput(f"purpose: {purpose[:40]!r} came (allowed: {', '.join(PURPOSES)})", field="purpose")


def _field(name: str, text: str) -> Any:
    match name:
        case "purpose":
            if text not in PURPOSES:
                raise _bad_purpose(text)
            return text
        case "expires_after[anchor]":
            if text != "created_at":
                raise BadInput(f"{name}: {text[:40]!r} came (allowed: created_at)", field=name)
            return text
        case "expires_after[seconds]":
            allowed = f"an integer from {MIN_LIFE_S} to {MAX_LIFE_S}"
            return _integer(name, text, MIN_LIFE_S, MAX_LIFE_S, allowed)
        case _:
            known = "file, purpose, expires_after[anchor], expires_after[seconds]"
            raise BadInput(f"{name[:80]}: unknown field (allowed: {known})", field=name[:80])


def _integer(name: str, text: str, least: int, most: int, allowed: str) -> int:
    value = int(text) if text.isascii() and text.isdecimal() and len(text) <= 12 else -1
    if not least <= value <= most:
        raise BadInput(f"{name}: {text[:40]!r} came (allowed: {allowed})", field=name)
    return value


def _limit(text: str) -> int:
    return _integer("limit", text, 1, MAX_LISTED, f"an integer from 1 to {MAX_LISTED}")


def _expires_at(fields: dict[str, Any], now: float) -> float | None:
    anchor, seconds = "expires_after[anchor]", "expires_after[seconds]"
    if (anchor in fields) != (seconds in fields):
        missing = seconds if anchor in fields else anchor
        raise BadInput(f"{missing}: missing (allowed: both of expires_after, or none)", field=missing)
    if seconds in fields:
        return int(now) + fields[seconds]
    return int(now) + BATCH_LIFE_S if fields["purpose"] == "batch" else None
