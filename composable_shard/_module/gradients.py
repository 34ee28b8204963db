"""Clip the gradients of all ranks by one norm, and average losses so that each token counts the same."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .._comm.mesh import compute_device, default_device_type
from .._torch.core import HANDLES
from .._torch.distributed import backend_name, sum_over_ranks
from ..errors import ShardConfigTypeError, ShardConfigValueError
from .state import states_below

Ranks = nn.Module | DeviceMesh | dist.ProcessGroup | None
_NEAR = 16  # number of autograd nodes of a loss that are searched for a division by zero tokens


# ---- clipping


class ClipWatcher(Protocol):
    """Receives the norms of gradients before they are clipped."""

    def clipped(self, params: set[int], norm: torch.Tensor) -> None:
        """Called after the gradients of the parameters with these ids, which had this norm, were clipped."""


_watchers: weakref.WeakSet[ClipWatcher] = weakref.WeakSet()


def watch_clipping(watcher: ClipWatcher) -> None:
    """Notify `watcher`, which is held weakly, of every call of `clip_grad_norm_` that is not traced by Dynamo."""
    _watchers.add(watcher)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip gradients in place, so that their total norm is at most `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_`, which does not support a mix of sharded and plain parameters
    (`ignored_params`), or of parameters on several meshes. All ranks must clip by the same norm:

    - The local value of a plain gradient is used. Average it over the ranks first.
    - Parameters that differ between ranks outside of the mesh (for example experts) must be DTensors on that axis
      before they are sharded. Otherwise the norm does not include the parameters of the other ranks.

    The arguments are those of torch's function.

    Returns:
        the norm before clipping, 0-dim: a DTensor if all gradients are on one mesh, like torch's, else a tensor.

    Raises:
        ShardConfigValueError: `max_norm` is negative or NaN, which would invert the gradients or set them to NaN.
        RuntimeError: `error_if_nonfinite` is True, and the norm is NaN or infinite.
    """
    if isinstance(max_norm, (int, float)) and not max_norm >= 0:
        raise ShardConfigValueError(f"max_norm: expected a number that is not negative, got {max_norm!r}")
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = _clip(params, max_norm, norm_type, error_if_nonfinite, foreach)
    if not torch.compiler.is_compiling():
        for watcher in list(_watchers):
            watcher.clipped(set(map(id, params)), norm)
    return norm


def _clip(
    params: list[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    by_mesh: dict[object, list[torch.Tensor]] = {}
    for param in params:
        if param.grad is not None:
            mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(param)
    if len(by_mesh) < 2:
        return torch_clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    norms = [_norm(alike, norm_type, foreach) for alike in by_mesh.values()]
    total = get_total_norm(norms, norm_type, error_if_nonfinite)
    for alike in by_mesh.values():
        clip_grads_with_norm_(alike, max_norm, total, foreach)
    return total


def _norm(params: list[torch.Tensor], norm_type: float, foreach: bool | None) -> torch.Tensor:
    norm = get_total_norm([p.grad for p in params if p.grad is not None], norm_type, foreach=foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# ---- averages over tokens


def average_by_tokens(
    loss: torch.Tensor, tokens: int | torch.Tensor, group: Ranks = None, *, total: int | torch.Tensor | None = None
) -> torch.Tensor:
    """Weight a loss so that all tokens of all ranks count the same; each rank calls `backward` on the result.

    Data parallelism averages gradients over the ranks, so every rank has the same weight, however many tokens it has
    (padding, packing, the end of an epoch). With this loss, the averaged gradients are those of one process that takes
    the mean over the tokens of all ranks. If all ranks have the same number of tokens, gradients are bitwise identical
    to those of the unweighted loss.

        loss = cs.average_by_tokens(mean_loss, tokens)  # 0-dim; equal on all ranks
        loss.backward()

    With gradient accumulation, the number of tokens of all microbatches must be known before the first backward:

        total = cs.total_tokens(sum(tokens_of(batch) for batch in microbatches))
        losses = []
        for batch in microbatches:
            losses.append(cs.average_by_tokens(mean_loss_of(batch), tokens_of(batch), total=total))
            losses[-1].backward()
        step_loss = sum(losses).detach()  # the mean over all tokens of the step

    This issues one all-reduce of two numbers over each axis of the mesh. The host does not wait for the device.
    ``torch.compile(fullgraph=True)`` can trace it if `group` is None or a process group.

    Args:
        loss: the mean over this rank's tokens; 0-dim.
        tokens: the number of these tokens; an int or a 0-dim tensor. A rank with 0 tokens must call `backward` as well,
            because the other ranks wait for it. Its loss may be NaN (0/0). It counts as 0, and its gradients are 0.
            (NaN gradients are set to 0 if one of the last 16 operations of the loss divides a scalar by the number of
            tokens. This does not work in a compiled graph: divide by ``count.clamp(min=1)`` there.)
        group: the data-parallel ranks, over which gradients are averaged: a sharded model (the mesh of its outermost
            group: both axes of an HSDP mesh, without the axes of tensor parallelism), a mesh of these axes, or a
            process group. None means all ranks. That is also correct with tensor parallelism, if ranks that share a
            batch pass the same numbers. Ranks that have no loss (other pipeline stages) must not be included.
        total: number of tokens of all ranks in all microbatches of the step, from `total_tokens`. None means the tokens
            of this call.

    Returns:
        0-dim, with the dtype of `loss`. Its value is the mean over the tokens of all ranks. With `total`, it is the
        share of this microbatch; the shares of a step add up to the mean over its tokens.

    Raises:
        ShardConfigTypeError: `tokens` or `total` is not an int or a tensor, or `group` has another type.
        ShardConfigValueError: `loss`, `tokens` or `total` is not 0-dim; an int is negative; or `group` is a module
            that is not sharded.

    The default division of gradients must be in use: see `set_gradient_divide_factor`.
    """
    if loss.dim():
        raise ShardConfigValueError(f"loss: expected the mean over this rank's tokens, 0-dim, got {tuple(loss.shape)}")
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    groups = _process_groups(group)
    count = _count("tokens", tokens, loss.device)
    some = count > 0
    if not (isinstance(tokens, int) and tokens) and loss.requires_grad and not torch.compiler.is_compiling():
        _mend_divisions(loss, some)
    own = torch.where(some, loss, torch.zeros_like(loss))
    sums = _summed(torch.stack([own.detach() * count, count]), groups)
    whole = (sums[1] if total is None else _count("total", total, loss.device)).clamp(min=1)
    ranks = math.prod([each.size() for each in groups])
    # The value is the mean over all tokens. The gradient is that of `weighted`, whose value cancels out: gradients are
    # averaged over all ranks, so this rank's share of the sum is multiplied by the number of ranks.
    weighted = own * (ranks * count / whole).to(loss.dtype)
    return (sums[0] / whole).to(loss.dtype) + (weighted - weighted.detach())


def total_tokens(tokens: int | torch.Tensor, group: Ranks = None) -> torch.Tensor:
    """The number of tokens on all ranks, for the `total` of `average_by_tokens`; one all-reduce of a number.

    Args:
        tokens: number of tokens in all microbatches of a step on this rank; an int or a 0-dim tensor.
        group: as for `average_by_tokens`.

    Returns:
        0-dim, int64, on the device from which the ranks communicate.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: as `average_by_tokens`.
    """
    groups = _process_groups(group)
    return _summed(_count("tokens", tokens, _device_of(group, groups)), groups).to(torch.int64)


def _process_groups(ranks: Ranks) -> list[dist.ProcessGroup]:
    """The process groups of the mesh axes. Sums over one after the other give the sum over all of these ranks."""
    if ranks is None:
        world = dist.group.WORLD if dist.is_initialized() else None
        return [] if world is None else [world]
    if isinstance(ranks, dist.ProcessGroup):
        return [ranks]
    if isinstance(ranks, DeviceMesh):
        return ranks.get_all_groups()
    if not isinstance(ranks, nn.Module):
        raise ShardConfigTypeError(
            f"group: expected a sharded model, a DeviceMesh or a process group, got {type(ranks).__name__}"
        )
    states = states_below(ranks)
    if not states:
        raise ShardConfigValueError(
            f"group: {type(ranks).__name__} contains no sharded module; pass the mesh of data parallelism, or call "
            "fully_shard first"
        )
    info = states[0].declaration.info
    return [group for group in (info.shard_group, info.replicate_group) if group is not None]


def _device_of(ranks: Ranks, groups: list[dist.ProcessGroup]) -> torch.device:
    """The device from which these ranks communicate."""
    if isinstance(ranks, nn.Module):
        return states_below(ranks)[0].declaration.info.device
    if isinstance(ranks, DeviceMesh):
        return compute_device(ranks.device_type)
    device = compute_device(default_device_type())
    try:
        for group in groups:
            backend_name(group, device)
    except (RuntimeError, NotImplementedError):  # only gloo, on a machine with an accelerator
        return torch.device("cpu")
    return device


def _count(name: str, tokens: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Convert a number of tokens to a float64 tensor, which is exact up to 2**53."""
    if isinstance(tokens, torch.Tensor):
        if tokens.dim():
            raise ShardConfigValueError(f"{name}: expected an int or a 0-dim tensor, got {tuple(tokens.shape)}")
        return tokens.detach().to(device, torch.float64, non_blocking=True)
    if not isinstance(tokens, int):
        raise ShardConfigTypeError(f"{name}: expected an int or a 0-dim tensor, got {type(tokens).__name__}")
    if tokens < 0:
        raise ShardConfigValueError(f"{name}={tokens}: expected a number of tokens of at least 0")
    return torch.full((), tokens, dtype=torch.float64, device=device)


def _summed(numbers: torch.Tensor, groups: list[dist.ProcessGroup]) -> torch.Tensor:
    for group in groups:
        numbers = sum_over_ranks(numbers, group)
    return numbers


def _mend_divisions(loss: torch.Tensor, some: torch.Tensor) -> None:
    """On a rank without tokens, set infinite and NaN gradients of scalars in the last operations of its loss to 0.

    The gradient of 0/0 is NaN even if the gradient of the result is 0.
    """
    nodes = [loss.grad_fn]
    for node in nodes:
        if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
            continue  # the end of the graph, or a custom autograd function
        if not hasattr(node, "variable"):  # not the node of a leaf, because the leaf's hooks belong to its owner
            node.register_hook(partial(_mended, some))
            HANDLES.give()
        nodes += [inner for inner, _ in node.next_functions if inner not in nodes][: _NEAR - len(nodes)]


def _mended(some: torch.Tensor, gradients: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
    return tuple(
        gradient
        if gradient is None or gradient.dim()
        else torch.where(some | gradient.isfinite(), gradient, torch.zeros_like(gradient))
        for gradient in gradients
    )
