"""What a model holds, by name: parameters as they are sharded, and buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..._comm.mesh import MeshInfo, compute_device
from ..._errors import CheckpointError
from ..._group.packed import Carried
from ..._group.param import ShardedParam
from ..._module.state_dict import states_with_parameters_in
from ..._torch.core import storage_id
from ..._torch.distributed import local_tensor, own_slices
from .ranks import ModelRanks
from .transfer import CPU_LIMIT, LIMIT, Cut, cut_of

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}  # what others put around modules


def plain_name(name: str) -> str:
    """A name without what compilation, checkpoints of activations and others put around modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_split(tensor: torch.Tensor) -> bool:
    """Whether ranks hold different parts of it."""
    if not isinstance(tensor, DTensor):
        return False
    mesh = tensor.device_mesh
    return any(not each.is_replicate() and mesh.size(axis) > 1 for axis, each in enumerate(tensor.placements))


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether this rank has no values of it."""
    return (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).is_meta


class Owner(NamedTuple):
    """What this library knows of a parameter that it has sharded."""

    param: ShardedParam
    info: MeshInfo


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor that a model holds.

    Attributes:
        name: without the parts that wrappers add.
        key: in the model's `state_dict()`.
        tensor: a DTensor if it is sharded.
        first: the first of its names; another one than `name` if weights are tied.
        cut: how it is cut, if one axis of a mesh cuts it.
        owner: what this library knows of it, if it has sharded it.
        is_param, is_buffer: whether it is a parameter, or a buffer.
    """

    name: str
    key: str
    tensor: torch.Tensor
    first: str
    cut: Cut | None
    owner: Owner | None
    is_param: bool
    is_buffer: bool = False

    @property
    def carried(self) -> Carried | None:
        """What it carries besides its data if it is a packed parameter."""
        return None if self.owner is None else self.owner.param.carried

    def as_kept(self, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype that it has where all floating-point numbers are cast to `dtype`, which packed bytes are not.

        Nor are tensors that a module has put into its state dict beside its own, such as the scales of such bytes.
        """
        beside = not self.is_param and not self.is_buffer
        kept = dtype is None or not self.tensor.is_floating_point() or beside or self.carried is not None
        return self.tensor.dtype if kept or dtype is None else dtype

    @property
    def local(self) -> torch.Tensor:
        """What this rank has of it."""
        return local_tensor(self.tensor) if isinstance(self.tensor, DTensor) else self.tensor

    def home(self, ranks: ModelRanks) -> torch.device:
        """Where its local tensor belongs, also if it is on meta still."""
        if self.owner is not None:
            return self.owner.info.home
        if not self.local.is_meta:
            return self.local.device
        return compute_device(self.tensor.device_mesh.device_type) if isinstance(self.tensor, DTensor) else ranks.device

    def piece_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a full value; often a view of it."""
        tensor = self.tensor
        if not isinstance(tensor, DTensor):
            return whole
        if self.cut is not None:
            return self.cut.piece(whole, tensor.device_mesh.get_local_rank(self.cut.axis))
        if self.owner is not None:
            return local_tensor(self.owner.param.piece_of(whole, self.owner.info))
        return whole[own_slices(tensor)]


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, tied ones under each: those that optimizers have, also while unsharded ones are shown."""
    sharded = {
        id(state.entries.installed(index)): param.sharded
        for state in states_with_parameters_in(model)
        if state.entries.shown
        for index, param in enumerate(state.entries.params)
    }
    return {
        plain_name(name): sharded.get(id(param), param)
        for name, param in model.named_parameters(remove_duplicate=False)
    }


class Holdings:
    """All that a model's state dict has.

    Attributes:
        params: the parameters by name, tied ones under each.
        tensors: parameters and buffers by name, in the order of the state dict.
        others: what is no tensor (`get_extra_state`), by key in the state dict.
        order: all keys of the state dict.
        ranks: those that hold the model.
        limit: bytes to move at a time: those of the largest group, at most `CPU_LIMIT` on CPUs and `LIMIT` elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        with torch.no_grad():
            state = model.state_dict(keep_vars=True)  # torch's FSDP2 reshards now
        states = states_with_parameters_in(model)
        self._engines = list(dict.fromkeys(each.bound.engine for each in states if each.bound is not None))
        owners = {
            id(param.sharded): Owner(param, each.declaration.info) for each in states for param in each.entries.params
        }
        firsts: dict[int, str] = {}
        self.params = {
            name: Held(name, "", param, firsts.setdefault(id(param), name), cut_of(param), owners.get(id(param)), True)
            for name, param in parameters_of(model).items()
        }
        buffers = {plain_name(name): each for name, each in model.named_buffers(remove_duplicate=False)}
        self.order = [*state]
        self.others = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        self.tensors: dict[str, Held] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                name = plain_name(key)
                param = self.params.get(name)
                if param is not None and _is_same(param.tensor, value):
                    self.tensors[name] = replace(param, key=key)
                else:
                    first = firsts.setdefault(id(buffers.get(name, value)), name)
                    is_buffer = name in buffers or name in self.params  # or what a hook has made of a parameter
                    self.tensors[name] = Held(name, key, value, first, cut_of(value), None, False, is_buffer)
        self.ranks = ModelRanks(meshes_of(held.tensor for held in self.tensors.values()))
        self.limit = limit_of(model, CPU_LIMIT if self.ranks.device.type == "cpu" else LIMIT)

    def together(self, what: str) -> None:
        """Compare with the other ranks that all are about to do this, once the model has run: see `Seat.together`.

        Raises:
            RankMismatchError: they are not; on all ranks.
            PeerLostError: another rank is lost.
        """
        for engine in self._engines:
            engine.review.seat.together(what)

    def once(self) -> list[Held]:
        """The tensors, tied ones under their first name alone."""
        return [held for held in self.tensors.values() if held.first == held.name]

    def check_material(self, what: str) -> None:
        """See that no tensor is on meta.

        Raises:
            CheckpointError: some are.
        """
        missing = [held.name for held in self.once() if held.local.is_meta]
        if missing:
            raise CheckpointError(
                f"{what}: {', '.join(missing[:20])} {'... ' if len(missing) > 20 else ''}on the meta device, and have "
                "no values; load a state first, or call model.to_empty() and initialise them"
            )

    def layout(self) -> list[tuple[object, ...]]:
        """What ranks must have in common: names, shapes and how tensors are cut."""
        return [
            (held.name, tuple(held.tensor.shape), None if held.cut is None else (held.cut.world, held.cut.dim))
            for held in self.tensors.values()
        ]


def _is_same(own: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a value of a state dict is the model's own tensor, and not one that a hook has made of it."""
    if own is value or isinstance(own, DTensor) != isinstance(value, DTensor) or own.shape != value.shape:
        return own is value
    if isinstance(own, DTensor):
        own, value = local_tensor(own), local_tensor(value)
    return own is value or (storage_id(own), own.storage_offset()) == (storage_id(value), value.storage_offset())


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The meshes of those that are DTensors, each once."""
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))


def limit_of(model: nn.Module, most: int) -> int:
    """Bytes to move at a time: those of the largest group, and not more than `most`."""
    groups = [state.declaration.params for state in states_with_parameters_in(model)]
    sizes = [sum(param.sharded.numel() * param.dtype.itemsize for param in params) for params in groups]
    return min(most, max(sizes, default=0) or most)
