"""Activation checkpointing of the blocks of a model, full or selective.

Recomputation: https://arxiv.org/abs/1604.06174. The choice of saved operators: https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default}
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def checkpoint_modules(modules: Iterable[nn.Module], kind: Checkpointing) -> None:
    """Apply activation checkpointing to modules, in place.

    Args:
        modules: the modules. Their `forward` is replaced.
        kind: ``full`` saves only the inputs of a module. ``selective`` also saves the outputs of attention and of every
            second matrix product. ``none`` changes nothing.
    """
    if kind == "none":
        return
    for module in modules:
        vars(module)["forward"] = functools.partial(_checkpointed, module.forward, kind)


def _checkpointed(forward: Callable[..., Any], kind: Checkpointing, *args: Any, **kwargs: Any) -> Any:
    if kind == "full":
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def _contexts() -> Any:
    products = {False: 0, True: 0}  # matrix products so far, in forward (False) and in the recomputation (True)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in _PRODUCTS:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = operator in _ATTENTION or operator is _aten.max.default  # a scale of float8: one number
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
