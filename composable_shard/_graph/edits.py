"""In-place edits of unsharded weights within a traced forward.

AOTAutograd turns an edit into a new tensor. The rest of the graph reads that tensor, but no shard is updated, so the
edit would be lost after the forward. Edits are therefore detected while Dynamo traces: it runs each operator on fake
tensors, whose versions show the edits.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch

from .._torch.compiler import last_traced
from .._torch.core import compilation, run_while_tracing

_Weights = Sequence[tuple[torch.Tensor, int]]  # fake tensors, each with its initial version

_count = itertools.count(1)
_watched: weakref.WeakKeyDictionary[object, dict[int, _Weights]] = weakref.WeakKeyDictionary()  # by compilation


@run_while_tracing
def watch_edits(count: int) -> int:
    """Watch the results of the last `count` traced operators: the weights of a module whose forward begins.

    Returns:
        a number for `edited`; 0 if nothing is being traced.
    """
    now = compilation()
    if now is None:
        return 0
    number = next(_count)
    _watched.setdefault(now, {})[number] = [(weight, weight._version) for weight in last_traced(count)]
    return number


@run_while_tracing
def edited(number: int) -> str:
    """Indices, separated by spaces, of the weights that were edited in place since `watch_edits` returned `number`.

    Empty if the graph has broken since then, because the weights then belong to another compilation.
    """
    now = compilation()
    weights = () if now is None else _watched.get(now, {}).pop(number, ())
    return " ".join(str(index) for index, (weight, version) in enumerate(weights) if weight._version != version)
