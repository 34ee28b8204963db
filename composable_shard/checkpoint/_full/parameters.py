"""A module with its full parameters in the place of the sharded ones, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..._errors import CheckpointMismatchError, ShardConfigStateError, ShardConfigValueError
from ..._module.entries import list_anew
from ..._module.state import ShardState
from ..._module.state_dict import states_with_parameters_in
from ..._torch.core import current_backward
from .tensors import Held, Holdings
from .transfer import Part, gathered

_SHOWN = "_shown_in_full"  # an attribute of parameters that stand in the place of sharded ones


@contextlib.contextmanager
def full_parameters(
    module: nn.Module,
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    recurse: bool = True,
    offload_to_cpu: bool = False,
) -> Iterator[None]:
    """Within, the module has plain full parameters; afterwards, sharded ones again. As FSDP1's `summon_full_params`.

        with composable_shard.full_parameters(model):
            torch.nn.init.orthogonal_(model.head.weight)

    Entering is a collective: all ranks must enter. Within, `module.named_parameters()` gives plain `nn.Parameter`s with
    `requires_grad` as before, whose tied weights stay tied; optimizers and `state_dict()` keep the sharded ones. Packed
    (quantized) ones are of their own class again, with all that belongs to them; new ones may be put in their places.
    Gradients are not handled: the full parameters have none. The memory of all these parameters is needed in full.

    Afterwards the same sharded parameter objects are back, also after an error in the body; values are written back
    only if there was none. Parameters that are not sharded stay in place, so that changes of them always hold.

    Args:
        module: sharded or not; a part of a sharded model, too.
        writeback: whether to copy the values that the full parameters have in the end into the shards. Each rank copies
            its own pieces: change the values alike on all ranks.
        rank0_only: whether rank 0 alone has the full parameters (see `full_state_dict`), and the others keep their
            sharded ones. Only without `writeback`: for other ranks have nothing to write.
        recurse: whether to do so for sharded modules below `module`, too.
        offload_to_cpu: whether the full parameters are on the CPU.

    Raises:
        ShardConfigValueError: both `writeback` and `rank0_only` are asked for.
        ShardConfigStateError: the module is within its forward or backward, or within this context already.
        CheckpointError: a parameter is on the meta device.
        CheckpointMismatchError: a parameter was replaced within by one of another shape; nothing is written back.
    """
    if writeback and rank0_only:
        raise ShardConfigValueError(
            "rank0_only: cannot be combined with writeback=True, for only rank 0 has values to write; pass "
            "writeback=False, or let all ranks make the same changes"
        )
    states = states_with_parameters_in(module)
    _check_idle(module, states)
    _reshard(module, states)
    held = Holdings.together(
        module, "gather full parameters", lambda held: held.check_material("full_parameters", held.params.values())
    )
    places = _places(module, held, recurse)
    parts = [Part.of(each, each.tensor) for each in dict.fromkeys(place.held for place in places)]
    device = torch.device("cpu") if offload_to_cpu else None
    full = gathered(parts, held.ranks, limit=held.limit, lead_only=rank0_only, device=device)
    shown = {each: _shown(value, each) for each, value in full}
    if not shown:
        yield
        return
    _install(places, [shown[place.held] for place in places])
    try:
        yield
        values = {place.held: place.owner._parameters.get(place.name) for place in reversed(places)}
    finally:
        _install(places, [place.held.tensor for place in places])
    if writeback:
        _write(values, states)


class _Place(NamedTuple):
    """Where a module has a sharded parameter."""

    owner: nn.Module
    name: str
    held: Held


def _check_idle(module: nn.Module, states: list[ShardState]) -> None:
    if current_backward() >= 0 or any(group.running for state in states for group in state.groups):
        raise ShardConfigStateError(
            f"full_parameters: this {type(module).__name__} is within a forward or backward, which needs its own "
            "parameters; enter before the forward, or behind the backward"
        )
    for name, param in module.named_parameters():
        if hasattr(param, _SHOWN):
            raise ShardConfigStateError(f"full_parameters: {name} is shown in full already; leave that context first")


def _reshard(module: nn.Module, states: list[ShardState]) -> None:
    """Have the sharded parameters in place, and no memory of unsharded ones."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
    for state in states:
        state.release()


def _places(module: nn.Module, held: Holdings, recurse: bool) -> list[_Place]:
    """Where sharded parameters are, in the order of the modules."""
    known = {id(each.tensor): held.params[each.first] for each in held.params.values()}
    places = []
    to_do, seen = [module], set()
    while to_do:
        owner = to_do.pop()
        if owner not in seen:
            seen.add(owner)
            places += [
                _Place(owner, name, known[id(param)])
                for name, param in owner._parameters.items()
                if isinstance(param, DTensor)
            ]
            children = [child for child in owner.children() if recurse or not isinstance(child, FSDPModule)]
            to_do += reversed(children)
    return places


def _shown(full: torch.Tensor, held: Held) -> nn.Parameter:
    if held.carried is not None:
        param = held.carried.whole(full, held.tensor)
    else:
        param = nn.Parameter(full, requires_grad=held.tensor.requires_grad)
    setattr(param, _SHOWN, True)
    return param


def _install(places: list[_Place], params: list[torch.Tensor]) -> None:
    for place, param in zip(places, params, strict=True):
        place.owner._parameters[place.name] = param  # type: ignore[assignment]
    for owner in {place.owner: None for place in places}:
        if isinstance(owner, nn.RNNBase) and owner._parameters.keys() >= {*owner._flat_weights_names}:
            list_anew(owner)


def _write(values: Mapping[Held, torch.Tensor | None], states: list[ShardState]) -> None:
    """Copy this rank's pieces of full values into the shards."""
    replaced = [each.name for each, value in values.items() if value is None or value.shape != each.tensor.shape]
    if replaced:
        raise CheckpointMismatchError(
            f"full_parameters: {', '.join(replaced)} removed, or replaced by one of another shape, for which there are "
            "no shards; nothing was written back. Change values in place"
        )
    for state in states:
        state.overwritten()
    with torch.no_grad():
        for each, value in values.items():
            assert value is not None
            each.local.copy_(each.piece_of(value.detach()))
            if each.carried is not None:
                each.carried.take(each.tensor, value)
