"""Exact conversion of frozen dataclasses to plain data for JSON, and back by the types of their fields.

Supported: `int`, `float`, `str`, `bool`, `None`, `torch.dtype`, enums of strings, dataclasses, tuples of these, and
unions with `None`. Tuples become lists; a dataclass becomes an object of its fields.
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

from .._errors import ShardConfigValueError

T = TypeVar("T")


def written(value: Any, name: str, version: int) -> str:
    """A dataclass as JSON, under a name and with the version of its form, for `read`."""
    return json.dumps({"version": version, name: value}, indent=1, default=_encode)


def read(kind: type[T], text: str, name: str, version: int) -> T:
    """The inverse of `written`.

    Raises:
        ShardConfigValueError: the text is no such JSON, or of another version; or a field is missing, unknown or of
            another type, with its path.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ShardConfigValueError(f"{name}: is no JSON ({error})") from None
    if not isinstance(data, dict) or "version" not in data:
        raise ShardConfigValueError(f"{name}: has no version; is it a file that to_json() wrote?")
    others = sorted(set(data) - {"version", name})
    if others and name not in data:
        raise ShardConfigValueError(f"{name}: is not in it, but {', '.join(others)}; give the file of a {name}")
    if data["version"] != version:
        raise ShardConfigValueError(
            f"{name}: is of version {data['version']!r}, and this library reads {version}; make the {name} anew"
        )
    if others:
        raise ShardConfigValueError(f"{name}: has fields that are not known: {', '.join(others)}")
    return typing.cast(T, _decode(kind, data.get(name), name))


def _encode(value: Any) -> Any:
    """Convert what JSON does not know to what it knows: nothing but one object at a time.

    A plan of thousands of parameters that is converted whole would fill the cycle collector.
    """
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if names := _names(typing.cast(typing.Hashable, type(value))):
        return {name: getattr(value, name) for name in names}
    raise TypeError(f"{type(value).__name__}: is no data of a plan")


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass; nothing of other classes."""
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
    """Of any length, all of one kind, if `kinds` ends with an ellipsis."""
    if kinds[-1] is Ellipsis:
        if not isinstance(data, list):
            raise _unexpected("a list", data, where)
        if kinds[0] in (int, str) and {*map(type, data)} == {kinds[0]}:
            return tuple(data)  # as below, at once
        kinds = kinds[:1] * len(data)
    elif not isinstance(data, list) or len(kinds) != len(data):
        raise _unexpected(f"a list of {len(kinds)}", data, where)
    pairs = zip(kinds, data, strict=True)
    return tuple([_decode(kind, item, f"{where}[{at}]") for at, (kind, item) in enumerate(pairs)])


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
        raise ShardConfigValueError(f"{where}: has fields that are not known: {', '.join(unknown)}")
    if missing := [name for name in fields if name not in data]:
        raise ShardConfigValueError(f"{where}: lacks {', '.join(missing)}")
    return kind(**{name: _decode(each, data[name], f"{where}.{name}") for name, each in fields.items()})


def _unexpected(expected: str, data: Any, where: str) -> ShardConfigValueError:
    return ShardConfigValueError(f"{where}: expected {expected}, got {data!r:.60}")
