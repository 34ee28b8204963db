"""Exact conversion of frozen dataclasses to plain data for JSON, and back by the types of their fields.

Supported: `int`, `float`, `str`, `bool`, `None`, `torch.dtype`, dataclasses, tuples of these, and unions with `None`.
Tuples become lists; a dataclass becomes an object of its fields.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

import torch

from .._errors import ShardConfigValueError

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Convert what JSON does not know to what it knows: to be passed to `json.dumps` as `default`.

    So nothing but one object at a time is converted: a plan of thousands of parameters would fill the cycle collector.

    Raises:
        TypeError: `value` is neither a dtype nor a dataclass.
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


def decode(kind: type[T], data: Any, where: str) -> T:
    """The inverse of `encode`.

    Args:
        kind: the dataclass that is expected.
        data: what JSON held.
        where: the path of `data`, for errors.

    Raises:
        ShardConfigValueError: a field is missing, unknown or of another type; with its path.
    """
    return typing.cast(T, _decode(kind, data, where))


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None:
            return None
        (kind,) = (each for each in args if each is not types.NoneType)
        return _decode(kind, data, where)
    if origin is tuple:
        if not isinstance(data, list) or (args[-1] is not Ellipsis and len(args) != len(data)):
            raise _unexpected("a list" if args[-1] is Ellipsis else f"a list of {len(args)}", data, where)
        kinds = [args[0]] * len(data) if args[-1] is Ellipsis else args
        return tuple(
            [_decode(each, item, f"{where}[{i}]") for i, (each, item) in enumerate(zip(kinds, data, strict=True))]
        )
    if dataclasses.is_dataclass(kind):
        return _object(typing.cast(type, kind), data, where)
    if kind is torch.dtype:
        found = getattr(torch, data, None) if isinstance(data, str) else None
        if not isinstance(found, torch.dtype):
            raise _unexpected("the name of a dtype", data, where)
        return found
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise _unexpected(kind.__name__, data, where)
    return data


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
