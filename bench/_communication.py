"""Run only the collectives of FSDP2's step, without model and runtime."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

NAME = "collectives"

# Newer versions of torch use these names and deprecate the others.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Group:
    """The buffers of one sharded module: unsharded, and this rank's shard.

    `gathers` is the number of gathers per step: 1 for the root, which stays gathered from forward to backward, else 2.
    """

    full: Tensor
    piece: Tensor
    gathers: int


def groups_of(model: nn.Module, block: type[nn.Module], world: int) -> list[Group]:
    """Return a group for each block and one for the rest. Parameters are padded to a multiple of `world` in dim 0."""
    blocks = [module for module in model.modules() if isinstance(module, block)]
    inside = {id(param) for module in blocks for param in module.parameters()}
    rest = [param for param in model.parameters() if id(param) not in inside]
    found = []
    for params, gathers in [(rest, 1), *[(list(module.parameters()), 2) for module in blocks]]:
        piece = sum(-(-len(param) // world) * param[0].numel() for param in params)
        full = params[0].new_zeros(world * piece)
        found.append(Group(full, full[piece * dist.get_rank() :][:piece], gathers))
    return found


def communicate(groups: list[Group]) -> None:
    """Run and wait for the collectives of a step: the gathers of FSDP2, and one reduction per group."""
    for group in groups:
        for _ in range(group.gathers):
            _gather(group.full, group.piece)
        _reduce(torch.empty_like(group.piece), group.full)
