"""Temporarily replace the sharded parameters of a module by full parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..._module.entries import list_anew
from ..._module.state import ShardState
from ..._module.state_dict import states_with_parameters_in
from ..._torch.core import current_backward
from ...errors import CheckpointMismatchError, ShardConfigStateError, ShardConfigValueError
from .tensors import Held, Holdings
from .transfer import Part, gathered

_SHOWN = "_shown_in_full"  # attribute that marks full parameters inside of the context


@contextlib.contextmanager
def full_parameters(
    module: nn.Module,
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    recurse: bool = True,
    offload_to_cpu: bool = False,
) -> Iterator[None]:
    """Give a module plain full parameters inside the context, like FSDP1's `summon_full_params`.

        with composable_shard.checkpoint.full_parameters(model):
            torch.nn.init.orthogonal_(model.head.weight)

    Entering the context is a collective: all ranks must enter it.

    Inside the context, `module.named_parameters()` returns plain `nn.Parameter`s with their `requires_grad`, and tied
    weights stay tied. Optimizers and `state_dict()` keep the sharded parameters. Packed (quantized) parameters have
    their original class and attributes, and may be replaced by new ones. The full parameters have no gradients. All
    full parameters need memory at the same time.

    At the end, the same sharded parameter objects are installed again, even after an error in the body. Values are
    written back only if there was no error. Unsharded parameters are not replaced, so changes to them are always kept.

    Args:
        module: sharded or unsharded module, or a part of a sharded model.
        writeback: if True, copy the final values of the full parameters into the shards. Each rank copies its own
            pieces, so change the values in the same way on all ranks.
        rank0_only: if True, only rank 0 gets full parameters (see `full_state_dict`), and the other ranks keep their
            sharded ones. Requires ``writeback=False``, because the other ranks have no values to write.
        recurse: if True, include sharded modules below `module`.
        offload_to_cpu: if True, the full parameters are on the CPU.

    Raises:
        ShardConfigValueError: both `writeback` and `rank0_only` are True.
        ShardConfigStateError: the module is in its forward or backward, or already in this context.
        CheckpointError: a parameter is on the meta device.
        CheckpointMismatchError: the body replaced a parameter by one of another shape. Nothing is written back.
    """
    if writeback and rank0_only:
        raise ShardConfigValueError(
            "rank0_only: cannot be combined with writeback=True, because only rank 0 has values to write; pass "
            "writeback=False, or make the same changes on all ranks"
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
    """The module and the name of a sharded parameter."""

    owner: nn.Module
    name: str
    held: Held


def _check_idle(module: nn.Module, states: list[ShardState]) -> None:
    if current_backward() >= 0 or any(group.running for state in states for group in state.groups):
        raise ShardConfigStateError(
            f"full_parameters: this {type(module).__name__} is in its forward or backward, which needs the current "
            "parameters; enter the context before the forward or after the backward"
        )
    for name, param in module.named_parameters():
        if hasattr(param, _SHOWN):
            raise ShardConfigStateError(f"full_parameters: {name} is already a full parameter; exit that context first")


def _reshard(module: nn.Module, states: list[ShardState]) -> None:
    """Install the sharded parameters, and free the unsharded ones."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
    for state in states:
        state.release()


def _places(module: nn.Module, held: Holdings, recurse: bool) -> list[_Place]:
    """The places of sharded parameters, in the order of the modules."""
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
            f"full_parameters: {', '.join(replaced)} removed, or replaced by a parameter of another shape, which has "
            "no shards; nothing was written back. Change values in place"
        )
    for state in states:
        state.before_load()
    with torch.no_grad():
        for each, value in values.items():
            assert value is not None
            each.local.copy_(each.piece_of(value.detach()))
            if each.carried is not None:
                each.carried.take(each.tensor, value)
