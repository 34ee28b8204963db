"""Gradients of all ranks together: clipped by one norm, and averages in which each token counts the same."""

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
from .._errors import ShardConfigTypeError, ShardConfigValueError
from .._torch.core import HANDLES
from .._torch.distributed import backend_name, sum_over_ranks
from .state import states_below

Ranks = nn.Module | DeviceMesh | dist.ProcessGroup | None
_NEAR = 16  # autograd nodes of a loss that are searched for a division by no tokens


# ---- clipping


class ClipWatcher(Protocol):
    """Whoever wants to know the norms that gradients had before they were clipped."""

    def clipped(self, params: set[int], norm: torch.Tensor) -> None:
        """The gradients of the parameters with these ids, which had this norm, were clipped."""


_watchers: weakref.WeakSet[ClipWatcher] = weakref.WeakSet()


def watch_clipping(watcher: ClipWatcher) -> None:
    """Tell `watcher`, while it lives, of every call of `clip_grad_norm_` that is not traced by Dynamo."""
    _watchers.add(watcher)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients down, in place, so that the norm of all of them together is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, which refuses to mix sharded parameters with plain ones (`ignored_params`), or
    those of several meshes. A plain gradient counts as it is on this rank: average it over the ranks first, or ranks
    clip differently. So do they if the ranks beside a mesh hold other parameters (experts, say) of which no DTensor
    tells: let those be DTensors on the axis of the experts before they are sharded.

    Returns:
        the norm before: a DTensor where all gradients lie on one mesh, as torch's; else a tensor.

    Raises:
        ShardConfigValueError: `max_norm` is negative or NaN, which would turn the gradients round or spoil them.
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
    """The loss of which each rank is to call `backward`, so that all tokens of all ranks weigh the same.

    Data parallelism averages gradients over the ranks and so weighs ranks alike, however many tokens each one has
    (padding, packing, the end of an epoch). With this loss, the averaged gradients are those of one process that takes
    the mean over the tokens of all ranks. Where all ranks have as many tokens, gradients stay the same to the bit.

        loss = cs.average_by_tokens(mean_loss, tokens)  # 0-dim; equal on all ranks
        loss.backward()

    With gradient accumulation the tokens of all microbatches have to be known before the first backward:

        total = cs.total_tokens(sum(tokens_of(batch) for batch in microbatches))
        losses = []
        for batch in microbatches:
            losses.append(cs.average_by_tokens(mean_loss_of(batch), tokens_of(batch), total=total))
            losses[-1].backward()
        step_loss = sum(losses).detach()  # the mean over all tokens of the step

    It is one all-reduce of two numbers over each axis of the mesh, without a host synchronisation, and traces under
    ``torch.compile(fullgraph=True)`` where `group` is None or a process group.

    Args:
        loss: this rank's mean over its tokens; 0-dim.
        tokens: how many these are; an int or a 0-dim tensor. A rank that has none calls `backward` all the same, since
            the others wait for it: its loss may be NaN (0/0) then, counts as 0, and gives gradients of 0. (A NaN in a
            gradient is mended where a scalar was divided by no tokens, in one of the last 16 operations of the loss. In
            a compiled graph it is not: divide by ``count.clamp(min=1)`` there.)
        group: the data-parallel ranks, over which gradients are averaged: a sharded model (the mesh of its outermost
            group: both axes of an HSDP mesh, and not the axes of tensor parallelism), a mesh of these axes, or a
            process group. None is all ranks, which is right beside tensor parallelism as well, where ranks that share a
            batch pass the same numbers; ranks that see no loss (other pipeline stages) must not be in it.
        total: tokens of all ranks in all microbatches of the step, as `total_tokens` says; None for those of this call.

    Returns:
        0-dim, of the dtype of `loss`; its value is the mean over the tokens of all ranks. With `total` it is the part
        of this microbatch: the parts of a step add up to the mean over its tokens.

    Raises:
        ShardConfigTypeError: `tokens` or `total` is no int and no tensor, or `group` is none of these.
        ShardConfigValueError: `loss`, `tokens` or `total` is not 0-dim; a number is negative; or `group` is a module
            that is not sharded.

    Gradients must be averaged as they are by default: see `set_gradient_divide_factor`.
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
    weighted = own * (ranks * count / whole).to(loss.dtype)
    return (sums[0] / whole).to(loss.dtype) + (weighted - weighted.detach())


def total_tokens(tokens: int | torch.Tensor, group: Ranks = None) -> torch.Tensor:
    """The number of tokens on all ranks, for the `total` of `average_by_tokens`; one all-reduce of a number.

    Args:
        tokens: of all microbatches of a step on this rank; an int or a 0-dim tensor.
        group: as of `average_by_tokens`.

    Returns:
        0-dim, int64, on the device that the ranks communicate from.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: as `average_by_tokens`.
    """
    groups = _process_groups(group)
    return _summed(_count("tokens", tokens, _device_of(group, groups)), groups).to(torch.int64)


def _process_groups(ranks: Ranks) -> list[dist.ProcessGroup]:
    """The process groups of the axes: a sum over the one after the other is a sum over all of these ranks."""
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
            f"group: {type(ranks).__name__} holds no sharded module; pass the mesh of data parallelism, or call "
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
    except (RuntimeError, NotImplementedError):  # gloo alone, on a machine that has an accelerator
        return torch.device("cpu")
    return device


def _count(name: str, tokens: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A number of tokens as a tensor: in float64, which counts up to 2**53 exactly."""
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
    """Where a rank has no tokens, let NaN that the last operations of its loss give for gradients be 0.

    The gradient of 0/0 is NaN even where the gradient of the result is 0. Only such scalars are changed.
    """
    nodes = [loss.grad_fn]
    for node in nodes:
        if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
            continue  # a leaf's end, or somebody's own function
        if not hasattr(node, "variable"):  # a leaf's node has one, and the leaf's hooks are its owner's
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
