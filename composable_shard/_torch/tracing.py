"""What torch knows of its operators, for traces: operations, bytes, and which are collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# Attention that torch does not count, with the index of its queries among the arguments.
_ATTENTION = {_FLASH: 0, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: 1}

_COLLECTIVES = {  # bytes that a rank sends, as multiples of what the collective gives
    "all_reduce": 2.0,
    "all_gather_into_tensor": 1.0,
    "reduce_scatter_tensor": 1.0,
    "all_to_all_single": 1.0,
}
_ROWS = ("aten::embedding", "aten::index_select", "aten::gather")  # read as much of the first argument as they give


def flops_of_operator(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Operations of matrix products and of attention, a multiplication and an addition counted as two; else 0.

    Attention counts whole squares, as torch counts them: causal kernels leave half out, and run at about half the rate
    of other products (https://arxiv.org/abs/2407.08608).
    """
    if func._overloadpacket in _ATTENTION:
        query, key = args[_ATTENTION[func._overloadpacket] :][:2]
        products = 2 if func._overloadpacket is _FLASH else 5
        return int(2 * products * query.numel() * key.shape[-2])
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def bytes_of_operator(func: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Bytes that an operator reads and writes in memory; 0 for one that gives views alone."""
    name = func._schema.name
    if name.startswith(_ROWS):
        return 2 * sum(tensor.nbytes for tensor in outputs)
    if not func._schema.is_mutable:
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        outputs = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in given]
        if not outputs:
            return 0
    return sum(tensor.nbytes for tensor in (*inputs, *outputs))


def collective_bytes(func: Any, outputs: Sequence[torch.Tensor]) -> int:
    """Bytes of a functional collective, to be multiplied by ``(ranks - 1) / ranks``; 0 for other operators.

    An all-reduce counts twice, as a reduce-scatter and an all-gather.
    """
    space, _, name = func._schema.name.partition("::")
    if space != "_c10d_functional" or name not in _COLLECTIVES:
        return 0
    scale = _COLLECTIVES[name]
    return int(scale * sum(tensor.nbytes for tensor in outputs))
