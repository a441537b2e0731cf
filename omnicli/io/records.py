"""Plain data classes as JSON and back: requests, transcripts and answers in the run log."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def dump(record: object) -> str:
    """A data class as one line of ASCII; names that are no UTF-8 survive as half surrogates."""
    assert is_dataclass(record) and not isinstance(record, type)
    return json.dumps(_plain(record), default=_plain, sort_keys=True)


def load(kind: type[T], text: str) -> T:
    """Undo `dump`."""
    record: T = _built(kind, json.loads(text))
    return record


def _built(kind: Any, row: dict[str, Any]) -> Any:
    hints = _hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in row.items()})


@cache
def _hints(kind: type) -> dict[str, Any]:
    return {f.name: get_type_hints(kind)[f.name] for f in fields(kind)}


def _value(hint: Any, value: Any) -> Any:
    """JSON knows no tuples, paths and classes; the field's type says what it was."""
    if value is None:
        return None
    kinds = [k for k in get_args(hint) if k is not type(None)]
    if isinstance(hint, UnionType) and len(kinds) == 1:
        hint, kinds = kinds[0], list(get_args(kinds[0]))
    if hint is Path:
        return Path(value)
    if get_origin(hint) is tuple and is_dataclass(kinds[0]):
        return tuple(_built(kinds[0], row) for row in value)
    return tuple(value) if get_origin(hint) is tuple else value


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _hints(type(value))}
    raise TypeError(f"{type(value).__name__} is no plain data")
