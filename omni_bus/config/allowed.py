"""What a field of a Struct may hold, in words for people."""

from __future__ import annotations

from typing import Any, cast

from msgspec import inspect


def allowed(kind: Any) -> str:
    """Describe a field's type and limits: ``an integer, at least 1``; nothing for types that only an author knows."""
    return _describe(inspect.type_info(kind))


def _describe(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata(type=inner):
            extra: Any = cast(Any, info).extra_json_schema
            return str(extra["description"]) if extra and "description" in extra else _describe(inner)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "an integer" + _limits(info)
        case inspect.FloatType():
            return "a number" + _limits(info)
        case inspect.StrType(pattern=pattern):
            return "text" + (f" that matches {pattern}" if pattern else "") + _lengths(info, "characters")
        case inspect.LiteralType(values=values):
            return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)
        case inspect.EnumType(cls=cls):
            return " or ".join(f'"{member.value}"' for member in cls)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            item = _describe(info.item_type)
            return "a list" + (f" of {_plural(item)}" if item else "") + _lengths(info, "items")
        case inspect.TupleType(item_types=item_types):
            return f"a list of {len(item_types)}: " + "; ".join(_describe(item) for item in item_types)
        case inspect.DictType(value_type=value_type):
            item = _describe(value_type)
            return "a table" + (f" of {_plural(item)}" if item else "")
        case inspect.StructType(fields=fields):
            return "a table with " + ", ".join(field.encode_name for field in fields) if fields else "an empty table"
        case inspect.UnionType(types=types):
            return " or ".join(filter(None, (_describe(t) for t in types if not isinstance(t, inspect.NoneType))))
        case _:
            return ""


def _plural(words: str) -> str:
    for one, many in (("an integer", "integers"), ("a number", "numbers"), ("a table", "tables"), ("a list", "lists")):
        if words.startswith(one):
            return many + words[len(one) :]
    return words


def _limits(info: inspect.IntType | inspect.FloatType) -> str:
    limits = ((info.ge, "at least"), (info.gt, "above"), (info.le, "at most"), (info.lt, "below"))
    words = [f"{name} {value}" for value, name in limits if value is not None]
    if info.multiple_of is not None:
        words.append(f"a multiple of {info.multiple_of}")
    return ", " + " and ".join(words) if words else ""


def _lengths(info: Any, unit: str) -> str:
    words = [
        f"{name} {value}"
        for value, name in ((info.min_length, "at least"), (info.max_length, "at most"))
        if value is not None
    ]
    return f", {' and '.join(words)} {unit}" if words else ""
