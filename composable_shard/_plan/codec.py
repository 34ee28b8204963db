"""Lossless conversion of frozen dataclasses to JSON and back, driven by the types of their fields.

Supported types: `int`, `float`, `str`, `bool`, `None`, `torch.dtype`, `StrEnum`, dataclasses, tuples and dicts of
these, and unions with `None`. A tuple becomes a list, and a dataclass becomes an object with one key per field.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from enum import StrEnum
from typing import Any, TypeVar

import torch

from ..errors import ShardConfigValueError

T = TypeVar("T")


def written(value: Any, name: str, version: int, indent: int | None = 1) -> str:
    """Convert a dataclass to JSON that `read` accepts: an object with the keys ``version`` and `name`.

    Without an indent it takes a tenth of the time, because Python then uses an encoder in C.
    """
    return json.dumps({"version": version, name: value}, indent=indent, default=_encode)


def read(kind: type[T], text: str, name: str, version: int) -> T:
    """The inverse of `written`.

    Raises:
        ShardConfigValueError: the text is not such JSON or has another version, or a field is missing, unknown or has
            another type. The message contains the path of the field.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ShardConfigValueError(f"{name}: is not valid JSON ({error})") from None
    if not isinstance(data, dict) or "version" not in data:
        raise ShardConfigValueError(f"{name}: has no version; is it a file that to_json() wrote?")
    others = sorted(set(data) - {"version", name})
    if others and name not in data:
        raise ShardConfigValueError(f"{name}: missing; the JSON contains {', '.join(others)}. Pass a {name} file")
    if data["version"] != version:
        raise ShardConfigValueError(
            f"{name}: version {data['version']!r} is not supported; this library reads version {version}. "
            f"Re-create the {name}"
        )
    if others:
        raise ShardConfigValueError(f"{name}: unknown fields: {', '.join(others)}")
    return typing.cast(T, _decode(kind, data.get(name), name))


def _encode(value: Any) -> Any:
    """Convert one object that `json` cannot encode. `json` calls this function again for nested objects.

    Converting a plan of thousands of parameters in one call would create many objects for the cyclic garbage collector.
    """
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if names := _names(typing.cast(typing.Hashable, type(value))):
        return {name: getattr(value, name) for name in names}
    raise TypeError(f"{type(value).__name__}: cannot be converted to JSON")


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    """The field names of a dataclass; empty for other classes."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        (kind,) = (each for each in typing.get_args(kind) if each is not types.NoneType)
        return None if data is None else _decode(kind, data, where)
    if origin is tuple:
        return _tuple(typing.get_args(kind), data, where)
    if origin is dict:
        return _dict(typing.get_args(kind), data, where)
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        hints = typing.get_type_hints(kind)
        return kind(*_tuple(tuple(hints.values()), data, where))
    if dataclasses.is_dataclass(kind):
        return _object(typing.cast(type, kind), data, where)
    return _plain(kind, data, where)


def _plain(kind: Any, data: Any, where: str) -> Any:
    if kind is torch.dtype:
        return _dtype(data, where)
    if kind is float and type(data) is int:
        return float(data)
    if issubclass(kind, StrEnum):
        return _member(kind, data, where)
    if type(data) is not kind:
        raise _unexpected(kind.__name__, data, where)
    return data


def _tuple(kinds: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    """Decode a tuple. If `kinds` ends with an ellipsis, the tuple has any length and one element type."""
    if kinds[-1] is Ellipsis:
        if not isinstance(data, list):
            raise _unexpected("a list", data, where)
        if kinds[0] in (int, str) and {*map(type, data)} == {kinds[0]}:
            return tuple(data)  # fast path, same result as below
        kinds = kinds[:1] * len(data)
    elif not isinstance(data, list) or len(kinds) != len(data):
        raise _unexpected(f"a list of {len(kinds)}", data, where)
    pairs = zip(kinds, data, strict=True)
    return tuple([_decode(kind, item, f"{where}[{at}]") for at, (kind, item) in enumerate(pairs)])


def _dict(kinds: tuple[Any, ...], data: Any, where: str) -> dict[Any, Any]:
    """Decode a dict whose keys are strings or ints; JSON has only strings."""
    of_keys, of_values = kinds
    if not isinstance(data, dict):
        raise _unexpected("an object", data, where)
    if of_keys is int and (wrong := [key for key in data if not key.isdecimal()]):
        raise _unexpected("numbers as keys", wrong[0], where)
    return {of_keys(key): _decode(of_values, value, f"{where}.{key}") for key, value in data.items()}


def _dtype(data: Any, where: str) -> torch.dtype:
    dtype = getattr(torch, data, None) if isinstance(data, str) else None
    if not isinstance(dtype, torch.dtype):
        raise _unexpected("the name of a dtype", data, where)
    return dtype


def _member(kind: type[StrEnum], data: Any, where: str) -> StrEnum:
    names = [member.value for member in kind]
    if data not in names:
        raise _unexpected(f"one of {', '.join(names)}", data, where)
    return kind(data)


def _object(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _unexpected("an object", data, where)
    fields = _fields(kind)
    if unknown := sorted(set(data) - set(fields)):
        raise ShardConfigValueError(f"{where}: unknown fields: {', '.join(unknown)}")
    if missing := [name for name in fields if name not in data]:
        raise ShardConfigValueError(f"{where}: missing fields: {', '.join(missing)}")
    return kind(**{name: _decode(each, data[name], f"{where}.{name}") for name, each in fields.items()})


def _unexpected(expected: str, data: Any, where: str) -> ShardConfigValueError:
    return ShardConfigValueError(f"{where}: expected {expected}, got {data!r:.60}")
