"""The collectives of a sharded step by themselves: what is left of FSDP2's step without model and without runtime."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

NAME = "collectives"

# Newer versions of torch know them by these names and warn of the others.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Group:
    """What one sharded module communicates: room for all ranks, and a rank's piece of it.

    `gathers` is how often a step gathers it: the root keeps its parameters from forward to backward.
    """

    full: Tensor
    piece: Tensor
    gathers: int


def groups_of(model: nn.Module, block: type[nn.Module], world: int) -> list[Group]:
    """A group for each block and one for the rest; every parameter is padded to a multiple of the world in dim 0."""
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
    """One step's collectives, each waited for: as many gathers as FSDP2 makes, and one reduction a group."""
    for group in groups:
        for _ in range(group.gathers):
            _gather(group.full, group.piece)
        _reduce(torch.empty_like(group.piece), group.full)
