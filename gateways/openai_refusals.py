"""Refusals of stages, under the names that the client knows its fields by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateways.openai_models import MESSAGES
from omni_bus.core.pipeline import IN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.core.pipeline import Pipeline
    from omni_bus.errors import BadInput

PARAMS = {"token_ids": "return_token_ids"}
"""Parameters of engines that bodies call otherwise."""


def renamed(error: BadInput, pipeline: Pipeline, names: Mapping[str, str], prompt: str = MESSAGES) -> BadInput:
    """Return an adapter's refusal under the field that the client sent.

    Args:
        error: names a parameter of the adapter, a place in its prompt, or its input port.
        pipeline: who answers.
        names: parameters that the body calls otherwise.
        prompt: the body's field that became the prompt.
    """
    ports = {edge.target_port for edge in pipeline.edges if edge.source == IN and edge.source_port == MESSAGES}
    head = error.field.partition(".")[0].partition("[")[0]
    new = prompt if head in ports else names.get(head, head)
    if new == head:
        return error
    rest = error.field[len(head) :] if head not in ports else ""
    message = error.message
    if message.startswith(f"{error.field}:") and head not in ports:
        message = f"{new}{rest}{message[len(error.field) :]}"
    return type(error)(message, field=f"{new}{rest}", stage=error.stage)
