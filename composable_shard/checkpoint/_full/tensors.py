"""The tensors of a model by name: sharded parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..._comm.mesh import MeshInfo, compute_device
from ..._comm.shardings import own_regions
from ..._group.packed import Carried, carried_by
from ..._group.param import ShardedParam
from ..._module.state_dict import states_with_parameters_in
from ..._plan.boxes import Box, whole_box
from ..._torch.distributed import local_part, local_tensor
from ...errors import CheckpointError, CheckpointMismatchError
from .entries import Entries, Entry, parameters_of
from .names import load_key, plain_name
from .ranks import ModelRanks, Together
from .transfer import CPU_LIMIT, LIMIT, Cut, cut_of


def is_split(tensor: torch.Tensor) -> bool:
    """Whether ranks hold different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return False
    mesh = tensor.device_mesh
    return any(not each.is_replicate() and mesh.size(axis) > 1 for axis, each in enumerate(tensor.placements))


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or its local tensor, is on the meta device."""
    return local_part(tensor).is_meta


class Owner(NamedTuple):
    """This library's record of a parameter that it has sharded."""

    param: ShardedParam
    info: MeshInfo


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor of a model.

    Attributes:
        name: its name without the parts that wrappers add.
        key: its key in the model's `state_dict()`.
        tensor: the tensor. A DTensor if it is sharded.
        first: first of its names. It differs from `name` if weights are tied.
        cut: how it is split, if exactly one axis of a mesh splits it.
        owner: this library's record of it, if this library has sharded it.
        is_param: whether it is a parameter.
        is_cast: whether it is cast when all floating-point tensors are cast. Scales that a hook adds to packed bytes
            are not.
        aliases: see `Entry.aliases`.
        is_made: whether a hook or `get_extra_state` has made it, and it shares no memory with the model: to write to it
            does not change the model.
    """

    name: str
    key: str
    tensor: torch.Tensor
    first: str
    cut: Cut | None
    owner: Owner | None
    is_param: bool
    is_cast: bool = True
    aliases: bool = False
    is_made: bool = False

    @property
    def carried(self) -> Carried | None:
        """The attributes of a packed parameter besides its data; None for other tensors."""
        return None if self.owner is None else self.owner.param.carried

    def as_kept(self, dtype: torch.dtype | None) -> torch.dtype:
        """Its dtype after a cast of all floating-point tensors to `dtype`. Packed bytes are not cast."""
        kept = dtype is None or not self.tensor.is_floating_point() or not self.is_cast or self.carried is not None
        return self.tensor.dtype if kept or dtype is None else dtype

    @property
    def local(self) -> torch.Tensor:
        """The part of the tensor on this rank."""
        return local_part(self.tensor)

    def home(self, ranks: ModelRanks) -> torch.device:
        """The device of its local tensor; if that is still on the meta device, the device that it will have."""
        if self.owner is not None:
            return self.owner.info.home
        if not self.local.is_meta:
            return self.local.device
        return compute_device(self.tensor.device_mesh.device_type) if isinstance(self.tensor, DTensor) else ranks.device

    def piece_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a full value, if possible as a view."""
        tensor = self.tensor
        if not isinstance(tensor, DTensor):
            return whole
        if self.cut is not None:
            return self.cut.piece(whole, tensor.device_mesh.get_local_rank(self.cut.axis))
        if self.owner is not None:
            return local_tensor(self.owner.param.piece_of(whole, self.owner.info))
        regions = own_regions(tensor)
        full = whole_box(whole.shape)
        if len(regions) == 1:
            return whole[regions[0].box.slices(full)]
        own = whole.new_empty(local_tensor(tensor).shape)
        for box, at in regions:
            own[Box(at, box.shape).slices(whole_box(own.shape))] = whole[box.slices(full)]
        return own


class Holdings:
    """The tensors and other values of a model's state dict.

    Attributes:
        params: parameters by name, tied ones under each name.
        tensors: parameters and buffers by name, in the order of the state dict. Hooks may have renamed them.
        hidden: parameters by their names that are not in the state dict, because hooks have removed or renamed them.
            `first` is their first name in the state dict, if any. `key` is their key for `load_state_dict`.
        others: values that are not tensors (`get_extra_state`), by key in the state dict.
        order: all keys of the state dict.
        metadata: see `metadata_of`.
        ranks: ranks that hold the model.
        limit: bytes to move at a time: those of the largest group, at most `CPU_LIMIT` on CPUs and `LIMIT` elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        entries = Entries.of(model)
        owners = {
            id(param.sharded): Owner(param, each.declaration.info)
            for each in states_with_parameters_in(model)
            for param in each.entries.params
        }
        firsts: dict[int, str] = {}
        self.params = {
            name: Held(name, "", param, firsts.setdefault(id(param), name), cut_of(param), owners.get(id(param)), True)
            for name, param in parameters_of(model).items()
        }
        self.order, self.others, self.metadata = entries.order, entries.others, entries.metadata
        casts = not (self._are_packed() or entries.make_integers())
        named = {*self.params, *(plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False))}
        self.tensors = {
            name: self._held(each, each.source is not None or ((name in named or casts) and not each.is_extra))
            for name, each in entries.tensors.items()
        }
        shown = {id(each.tensor): each.first for each in self.tensors.values() if each.is_param}
        self.hidden = {
            name: replace(self.params[name], key=load_key(key), first=shown.get(id(self.params[name].tensor), name))
            for key, _ in model.named_parameters(remove_duplicate=False)
            if (name := plain_name(key)) not in self.tensors
        }
        self.ranks = ranks_of(model)
        self.limit = limit_of(model, CPU_LIMIT if self.ranks.device.type == "cpu" else LIMIT)

    def _held(self, entry: Entry, is_cast: bool) -> Held:
        name, key, value, first, source, aliases = entry
        if source is not None and source.is_param:
            return replace(self.params[source.names[0]], name=name, key=key, first=first, aliases=aliases)
        is_made = source is None and not aliases
        return Held(name, key, value, first, cut_of(value), None, False, is_cast, aliases, is_made)

    def _are_packed(self) -> bool:
        """Whether some parameters are packed. Hooks may then add their scales to the state dict."""
        held = self.params.values()
        return any(each.carried is not None or carried_by(cast(nn.Parameter, each.tensor)) is not None for each in held)

    @classmethod
    def together(cls, model: nn.Module, what: str, check: Callable[[Holdings], object] = lambda _: None) -> Holdings:
        """Make the holdings of a model on all its ranks before a gather or a load. A collective if anything is sharded.

        Args:
            model: the model.
            what: what the ranks are about to do. Compared with the other ranks if the model has run.
            check: called with the holdings; raises if this rank cannot continue.

        Raises:
            RankMismatchError: a rank is about to do something else. Raised on all ranks.
            PeerLostError: another rank is lost.
            CheckpointMismatchError: the ranks of a mesh hold different tensors on it. Raised on all ranks.
            CheckpointError: `check` or a hook of the state dict raised on a rank. Raised on all ranks. An error type of
                this library is kept.
        """
        states = states_with_parameters_in(model)
        for engine in dict.fromkeys(each.bound.engine for each in states if each.bound is not None):
            engine.review.seat.together(what)

        def hold() -> Holdings:
            held = cls(model)
            check(held)
            return held

        # Do not use the parameters that modules have installed: on this or another rank, they may be unsharded.
        meshes = meshes_of((*parameters_of(model).values(), *model.buffers()))
        if not meshes:
            return hold()  # no rank waits for another one
        ranks = Together(ModelRanks(meshes))
        held, on_meshes = ranks.together_and_tell(hold, lambda held: held.digests())
        if _differ(dict(zip(ranks.everyone, on_meshes, strict=True))):
            _raise_difference(what, dict(zip(ranks.everyone, ranks.gather(held.on_meshes()), strict=True)))
        return held

    def once(self) -> list[Held]:
        """The tensors; tied ones only under their first name."""
        return [held for held in self.tensors.values() if held.first == held.name]

    def check_material(self, what: str, held: Iterable[Held] | None = None) -> None:
        """Check that no tensor is on the meta device.

        Args:
            what: name of the operation, for the message.
            held: tensors to check. Default: those of the state dict.

        Raises:
            CheckpointError: a tensor is on the meta device.
        """
        missing = [each.name for each in (self.once() if held is None else held) if each.local.is_meta]
        if missing:
            raise CheckpointError(
                f"{what}: {', '.join(missing[:20])} {'... ' if len(missing) > 20 else ''}on the meta device, and have "
                "no values; load a state first, or call model.to_empty() and initialize them"
            )

    def layout(self) -> list[tuple[object, ...]]:
        """The properties that must be equal on all ranks: names, shapes and how tensors are split."""
        return [
            (held.name, tuple(held.tensor.shape), None if held.cut is None else (held.cut.world, held.cut.dim))
            for held in self.tensors.values()
        ]

    def on_meshes(self) -> dict[tuple[int, ...], list[str]]:
        """Descriptions of the tensors that the ranks of each mesh gather together, in order."""
        lists: dict[tuple[int, ...], list[str]] = {}
        for held in self.once():
            if isinstance(held.tensor, DTensor):
                ranks = tuple(held.tensor.device_mesh.mesh.flatten().tolist())
                placed = f"{tuple(held.tensor.shape)} of {held.tensor.dtype}, placed {held.tensor.placements}"
                lists.setdefault(ranks, []).append(f"{held.name} {placed}")
        return lists

    def digests(self) -> dict[tuple[int, ...], str]:
        """Digests of `on_meshes`, short enough to compare on every call."""
        return {ranks: sha256(repr(lines).encode()).hexdigest() for ranks, lines in self.on_meshes().items()}


def ranks_of(model: nn.Module) -> ModelRanks:
    """The ranks that hold a model."""
    return ModelRanks(meshes_of((*parameters_of(model).values(), *model.buffers())))


def _differ(said: Mapping[int, Mapping[tuple[int, ...], object]]) -> tuple[int, int, tuple[int, ...]] | None:
    """Two ranks that hold different tensors on a common mesh, and the ranks of this mesh; None if there are none."""
    for rank, own in said.items():
        for ranks, lines in own.items():
            for other in ranks:
                if other in said and said[other].get(ranks) != lines:
                    return rank, other, ranks
    return None


def _raise_difference(what: str, said: Mapping[int, Mapping[tuple[int, ...], list[str]]]) -> None:
    difference = _differ(said)
    assert difference is not None
    rank, other, ranks = difference
    pairs = zip_longest(said[rank][ranks], said[other].get(ranks, []), fillvalue="nothing more")
    one, two = next((one, two) for one, two in pairs if one != two)
    raise CheckpointMismatchError(
        f"{what}: the state dict has {one} on rank {rank} and {two} on rank {other}; build and shard the model in the "
        "same way on all ranks, with the same hooks of state_dict()"
    )


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The distinct meshes of the DTensors among these tensors."""
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))


def limit_of(model: nn.Module, most: int) -> int:
    """Bytes to move at a time: those of the largest group, at most `most`."""
    groups = [state.declaration.params for state in states_with_parameters_in(model)]
    sizes = [sum(param.sharded.numel() * param.dtype.itemsize for param in params) for params in groups]
    return min(most, max(sizes, default=0) or most)
