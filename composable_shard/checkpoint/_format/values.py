"""Python's plain data as JSON and back, to the bit; tensors are taken out and kept by key.

Numbers, strings, None, lists and dictionaries of strings are themselves. Everything else is a dictionary whose key "$"
names what it is. Nothing is ever pickled: what is not listed here is refused by name.
"""

from __future__ import annotations

import base64
import collections
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..._errors import CheckpointMismatchError, ShardConfigTypeError
from .manifest import DTYPES, name_of

Keep = Callable[[str, torch.Tensor], None]  # is given a tensor and its key
Fetch = Callable[[str, Any], Any]  # gives the tensor of a key, for what is there now, or None; fills a generator
_NUMBERS = re.compile(r"[<>|=]?[biufc][0-9]{1,2}", re.ASCII)  # how NumPy names the dtypes of arrays that are saved


def encode(value: Any, key: str, keep: Keep) -> Any:
    """A value as JSON.

    Args:
        value: numbers, strings, bytes, None, tensors, NumPy's arrays and scalars, dtypes, generators, and lists,
            tuples, sets and dictionaries of those.
        key: of the value, from which those of its parts are made.
        keep: is called with every tensor that is found.

    Raises:
        ShardConfigTypeError: something in it cannot be saved without pickle.
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
            f"{key} is a {type(value).__module__}.{type(value).__qualname__}: checkpoints hold no pickled objects; "
            "give its state as numbers, strings, bytes, tensors, lists and dictionaries, or give it state_dict and "
            "load_state_dict methods that do so"
        )
    return tagged


def _is_plain(value: Mapping[Any, Any]) -> bool:
    return all(type(name) is str for name in value) and "$" not in value


def _tagged(value: Any, key: str, keep: Keep) -> dict[str, Any] | None:
    if isinstance(value, (tuple, set, frozenset)):
        if hasattr(value, "_fields"):
            return None  # a named tuple: its class would have to be found by name
        kind = "size" if isinstance(value, torch.Size) else next(k for k in _SEQUENCES if type(value) is _SEQUENCES[k])
        items = value if isinstance(value, tuple) else sorted(value, key=repr)
        return {"$": kind, "items": [encode(each, f"{key}.{index}", keep) for index, each in enumerate(items)]}
    if type(value) in (dict, collections.OrderedDict, collections.Counter):
        kind = "counter" if isinstance(value, collections.Counter) else "dict"
        pairs = [[encode(n, f"{key}.{n}", keep), encode(each, f"{key}.{n}", keep)] for n, each in value.items()]
        return {"$": kind, "items": pairs}
    if isinstance(value, (bytes, bytearray)):
        return {"$": "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$": "complex", "value": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {
            "$": "numpy",
            "dtype": value.dtype.str,
            "shape": None,
            "value": base64.b64encode(value.tobytes()).decode(),
        }
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$": "numpy", "dtype": value.dtype.str, "shape": list(value.shape), "value": data}
    if isinstance(value, torch.dtype):
        return {"$": "dtype", "value": name_of(value)}
    if isinstance(value, torch.device):
        return {"$": "device", "value": str(value)}
    if isinstance(value, torch.Generator):
        keep(key, value.get_state())
        return {"$": "generator", "key": key}
    return None


_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def decode(saved: Any, now: Any, fetch: Fetch) -> Any:
    """The value that a tree of JSON stands for.

    Args:
        saved: what `encode` has made.
        now: what is there at present, or None: tensors that fit are filled where they are, and so are generators.
        fetch: gives the tensor of a key; with a generator it fills that one, or another one, and gives it.

    Raises:
        CheckpointMismatchError: the tree has something that this library does not know.
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
        raise CheckpointMismatchError(f"a value of kind {kind!r} cannot be read: {error}") from None
    return made


def _made(kind: Any, saved: dict[str, Any], now: Any, fetch: Fetch) -> Any:
    if kind == "float":
        return float.fromhex(saved["value"])
    if kind == "tensor":
        return fetch(saved["key"], now if isinstance(now, torch.Tensor) else None)
    if kind == "generator":
        return fetch(saved["key"], now if isinstance(now, torch.Generator) else torch.Generator())
    if kind in _SEQUENCES or kind == "size":
        items = decode(saved["items"], now if isinstance(now, tuple) else None, fetch)
        return torch.Size(items) if kind == "size" else _SEQUENCES[kind](items)
    if kind in ("dict", "counter"):
        present = now if isinstance(now, Mapping) else {}
        pairs = [(decode(name, None, fetch), each) for name, each in saved["items"]]
        content = {name: decode(each, present.get(name), fetch) for name, each in pairs}
        return collections.Counter(content) if kind == "counter" else content
    return _plain(kind, saved)


def _plain(kind: Any, saved: dict[str, Any]) -> Any:
    value = saved["value"]
    if kind == "bytes":
        return base64.b64decode(value, validate=True)
    if kind == "complex":
        return complex(*map(float.fromhex, value))
    if kind == "dtype":
        return DTYPES[value]
    if kind == "device":
        return torch.device(value)
    if kind == "numpy":
        if _NUMBERS.fullmatch(saved["dtype"]) is None:
            raise ValueError(f"dtype {saved['dtype']!r}")
        dtype = np.dtype(saved["dtype"])
        array = np.frombuffer(base64.b64decode(value, validate=True), dtype)
        return array[0] if saved["shape"] is None else array.reshape(saved["shape"]).copy()
    raise ValueError("this library does not know it; a newer one may")
