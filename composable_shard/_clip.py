"""Clipping gradients of which some are sharded and some are not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


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
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
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
