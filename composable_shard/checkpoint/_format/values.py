"""Encode plain Python data as JSON and decode it, bit for bit. Tensors are replaced by their keys.

Numbers, strings, None, lists, and dictionaries with string keys are stored as they are. Every other type is stored as a
dictionary whose key "$" names the type. Nothing is ever pickled: a type that is not listed here is an error.
"""

from __future__ import annotations

import base64
import collections
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ...errors import CheckpointMismatchError, ShardConfigTypeError
from .manifest import DTYPES, name_of

Keep = Callable[[str, torch.Tensor], None]  # called with a tensor's key and the tensor
Fetch = Callable[[str, Any], Any]  # called with a key and the current value or None; returns the tensor or generator
_NUMBERS = re.compile(r"[<>|=]?[biufc][0-9]{1,2}", re.ASCII)  # NumPy's names of the dtypes of arrays that are saved


def encode(value: Any, key: str, keep: Keep) -> Any:
    """Encode a value as JSON.

    Args:
        value: numbers, strings, bytes, None, tensors, NumPy arrays and scalars, dtypes, generators, and lists, tuples,
            sets and dictionaries of these.
        key: key of the value. Keys of its parts begin with it.
        keep: called with every tensor in the value.

    Raises:
        ShardConfigTypeError: a part of the value cannot be saved without pickle.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:  # JSON has neither NaN nor infinity
        return value if math.isfinite(value) else {"$": "float", "value": value.hex()}
    if isinstance(value, torch.Tensor):
        keep(key, value)
        return {"$": "tensor", "key": key}
    if type(value) is list:
        return [encode(each, f"{key}.{index}", keep) for index, each in enumerate(value)]
    if type(value) in (dict, collections.OrderedDict) and _is_plain(value):
        return {name: encode(each, f"{key}.{name}", keep) for name, each in value.items()}
    tagged = _tagged(value, key, keep)
    if tagged is None:
        raise ShardConfigTypeError(
            f"{key} is a {type(value).__module__}.{type(value).__qualname__}: checkpoints store no pickled objects; "
            "save its state as numbers, strings, bytes, tensors, lists and dictionaries, or add state_dict and "
            "load_state_dict methods to its class"
        )
    return tagged


def _is_plain(value: Mapping[Any, Any]) -> bool:
    return all(type(name) is str for name in value) and "$" not in value


def _tagged(value: Any, key: str, keep: Keep) -> dict[str, Any] | None:
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        encoder = next((each for base, each in _BASES.items() if isinstance(value, base)), None)
    return None if encoder is None else encoder(value, key, keep)


def _encode_items(kind: str, value: Any, key: str, keep: Keep) -> dict[str, Any]:
    items = value if isinstance(value, tuple) else sorted(value, key=repr)
    return {"$": kind, "items": [encode(each, f"{key}.{index}", keep) for index, each in enumerate(items)]}


def _encode_pairs(kind: str, value: Mapping[Any, Any], key: str, keep: Keep) -> dict[str, Any]:
    pairs = [[encode(name, f"{key}.{name}", keep), encode(each, f"{key}.{name}", keep)] for name, each in value.items()]
    return {"$": kind, "items": pairs}


def _encode_bytes(value: bytes | bytearray, key: str, keep: Keep) -> dict[str, Any]:
    return {"$": "bytes", "value": base64.b64encode(value).decode()}


def _encode_complex(value: complex, key: str, keep: Keep) -> dict[str, Any]:
    return {"$": "complex", "value": [value.real.hex(), value.imag.hex()]}


def _encode_dtype(value: torch.dtype, key: str, keep: Keep) -> dict[str, Any]:
    return {"$": "dtype", "value": name_of(value)}


def _encode_device(value: torch.device, key: str, keep: Keep) -> dict[str, Any]:
    return {"$": "device", "value": str(value)}


def _encode_generator(value: torch.Generator, key: str, keep: Keep) -> dict[str, Any]:
    keep(key, value.get_state())
    return {"$": "generator", "key": key}


def _encode_numpy(value: Any, key: str, keep: Keep) -> dict[str, Any] | None:
    """Encode an array, or a scalar with shape None."""
    if value.dtype.kind not in "biufc":
        return None
    shape = list(value.shape) if isinstance(value, np.ndarray) else None
    data = np.ascontiguousarray(value).tobytes()
    return {"$": "numpy", "dtype": value.dtype.str, "shape": shape, "value": base64.b64encode(data).decode()}


_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_PAIRS: dict[str, Callable[[Any], Any]] = {"dict": dict, "counter": collections.Counter}
_Encoder = Callable[[Any, str, Keep], dict[str, Any] | None]
_ENCODERS: dict[type, _Encoder] = {  # exact types only: to load a named tuple, its class would have to be imported
    tuple: functools.partial(_encode_items, "tuple"),
    set: functools.partial(_encode_items, "set"),
    frozenset: functools.partial(_encode_items, "frozenset"),
    torch.Size: functools.partial(_encode_items, "size"),
    dict: functools.partial(_encode_pairs, "dict"),
    collections.OrderedDict: functools.partial(_encode_pairs, "dict"),
    collections.Counter: functools.partial(_encode_pairs, "counter"),
}
_BASES: dict[type, _Encoder] = {  # the first match counts: np.bytes_ is encoded as bytes, np.complex128 as NumPy
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    np.generic: _encode_numpy,
    np.ndarray: _encode_numpy,
    complex: _encode_complex,
    torch.dtype: _encode_dtype,
    torch.device: _encode_device,
    torch.Generator: _encode_generator,
}


def decode(saved: Any, now: Any, fetch: Fetch) -> Any:
    """Decode a JSON tree.

    Args:
        saved: result of `encode`.
        now: current value, or None. Its matching tensors and its generators are filled in place.
        fetch: returns the tensor of a key. If its second argument is a generator, it restores the saved state in it or
            in another generator, and returns this generator.

    Raises:
        CheckpointMismatchError: the tree has a type that this library does not support.
    """
    if isinstance(saved, list):
        known = now if isinstance(now, (list, tuple)) and len(now) == len(saved) else [None] * len(saved)
        return [decode(each, present, fetch) for each, present in zip(saved, known, strict=True)]
    if not isinstance(saved, dict):
        return saved
    if "$" not in saved:
        present = now if isinstance(now, Mapping) else {}
        return {name: decode(each, present.get(name), fetch) for name, each in saved.items()}
    kind = saved["$"]
    try:
        made = _made(kind, saved, now, fetch)
    except CheckpointMismatchError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointMismatchError(f"a value of type {kind!r} cannot be read: {error}") from None
    return made


def _made(kind: Any, saved: dict[str, Any], now: Any, fetch: Fetch) -> Any:
    if kind == "tensor":
        return fetch(saved["key"], now if isinstance(now, torch.Tensor) else None)
    if kind == "generator":
        return fetch(saved["key"], now if isinstance(now, torch.Generator) else torch.Generator())
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(saved["items"], now if isinstance(now, tuple) else None, fetch))
    if kind in _PAIRS:
        present = now if isinstance(now, Mapping) else {}
        pairs = [(decode(name, None, fetch), each) for name, each in saved["items"]]
        return _PAIRS[kind]({name: decode(each, present.get(name), fetch) for name, each in pairs})
    if kind == "numpy":
        return _decode_numpy(saved)
    if kind in _DECODERS:
        return _DECODERS[kind](saved["value"])
    raise ValueError("this version of the library does not support it; a newer one may")


def _decode_numpy(saved: dict[str, Any]) -> Any:
    if _NUMBERS.fullmatch(saved["dtype"]) is None:
        raise ValueError(f"dtype {saved['dtype']!r}")
    array = np.frombuffer(_decode_bytes(saved["value"]), np.dtype(saved["dtype"]))
    return array[0] if saved["shape"] is None else array.reshape(saved["shape"]).copy()


def _decode_bytes(value: str) -> bytes:
    return base64.b64decode(value, validate=True)


def _decode_complex(value: list[str]) -> complex:
    return complex(*map(float.fromhex, value))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float.fromhex,
    "bytes": _decode_bytes,
    "complex": _decode_complex,
    "dtype": DTYPES.__getitem__,
    "device": torch.device,
}
