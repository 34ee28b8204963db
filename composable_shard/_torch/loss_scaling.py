"""Detect whether the running backward began at a loss that a `GradScaler` has scaled; torch has no API for this."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from .core import queue_backward_callback, tree_tensors


class _Running:
    """An object that lives as long as a backward: autograd's callback refers to it until the backward ends or fails."""

    __slots__ = ("__weakref__",)


_running: weakref.WeakSet[_Running] = weakref.WeakSet()


def _end(running: _Running) -> None:
    """Do nothing. As a callback of autograd, it keeps its argument alive until the backward ends."""


def _begin(_: torch.Tensor) -> None:
    running = _Running()
    _running.add(running)
    queue_backward_callback(functools.partial(_end, running))


def _noting(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def scale_and_note(scaler: Any, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        if scaler.is_enabled() and not torch.compiler.is_compiling():
            for tensor in tree_tensors(scaled):
                if tensor.requires_grad:
                    tensor.register_hook(_begin)  # type: ignore[no-untyped-call]
        return scaled

    return scale_and_note


@functools.cache
def note_scaled_losses() -> None:
    """Patch all scalers of this process to note which losses they scale, at the cost of one hook per loss."""
    for kind in (torch.amp.GradScaler, ShardedGradScaler):
        mock.patch.object(kind, "scale", _noting(kind.scale)).start()


def in_scaled_backward() -> bool:
    """Whether a backward of a scaled loss is running."""
    return bool(_running)
