"""What a model holds, by name: parameters as they are sharded, and buffers."""

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
from ..._errors import CheckpointError, CheckpointMismatchError
from ..._group.packed import Carried, carried_by
from ..._group.param import ShardedParam
from ..._module.state_dict import states_with_parameters_in
from ..._torch.distributed import local_tensor, own_slices
from .entries import Entries, Entry, parameters_of
from .names import load_key, plain_name
from .ranks import ModelRanks, Together
from .transfer import CPU_LIMIT, LIMIT, Cut, cut_of


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
        is_param: whether it is a parameter.
        is_cast: whether it takes the dtype to which all floating-point numbers are cast. Scales that a hook adds
            to packed bytes do not.
        aliases: see `Entry.aliases`.
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

    @property
    def carried(self) -> Carried | None:
        """What it carries besides its data if it is a packed parameter."""
        return None if self.owner is None else self.owner.param.carried

    def as_kept(self, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype that it has where all floating-point numbers are cast to `dtype`, which packed bytes are not."""
        kept = dtype is None or not self.tensor.is_floating_point() or not self.is_cast or self.carried is not None
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


class Holdings:
    """All that a model's state dict has.

    Attributes:
        params: the parameters by name, tied ones under each.
        tensors: parameters and buffers by name, in the order of the state dict. Hooks may have renamed them.
        hidden: parameters by the names that the state dict does not have: hooks have removed or renamed them. `first`
            is the first of the names that it has for them, if any; `key` is what `load_state_dict` calls them.
        others: what is no tensor (`get_extra_state`), by key in the state dict.
        order: all keys of the state dict.
        metadata: see `metadata_of`.
        ranks: those that hold the model.
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
        return Held(name, key, value, first, cut_of(value), None, False, is_cast, aliases)

    def _are_packed(self) -> bool:
        """Whether some parameters are packed, so that hooks may put scales into the state dict."""
        held = self.params.values()
        return any(each.carried is not None or carried_by(cast(nn.Parameter, each.tensor)) is not None for each in held)

    @classmethod
    def together(cls, model: nn.Module, what: str, check: Callable[[Holdings], object] = lambda _: None) -> Holdings:
        """Those of a model that all its ranks are about to gather or to load. A collective, if anything is sharded.

        Args:
            model: the model.
            what: what the ranks are about to do; compared with the other ranks once the model has run.
            check: raises what this rank has against it.

        Raises:
            RankMismatchError: some are about to do something else; on all ranks.
            PeerLostError: another rank is lost.
            CheckpointMismatchError: ranks of a mesh hold different tensors on it; on all ranks.
            CheckpointError: `check`, or a hook of the state dict, has raised on a rank; on all ranks, its own kind if
                that is one of this library.
        """
        states = states_with_parameters_in(model)
        for engine in dict.fromkeys(each.bound.engine for each in states if each.bound is not None):
            engine.review.seat.together(what)

        def hold() -> Holdings:
            held = cls(model)
            check(held)
            return held

        # Unsharded parameters may be installed, on this rank or on others, so not by those that modules show.
        meshes = meshes_of((*parameters_of(model).values(), *model.buffers()))
        if not meshes:
            return hold()  # no rank waits for another one
        ranks = Together(ModelRanks(meshes))
        held, on_meshes = ranks.together_and_tell(hold, lambda held: held.digests())
        if _differ(dict(zip(ranks.everyone, on_meshes, strict=True))):
            _raise_difference(what, dict(zip(ranks.everyone, ranks.gather(held.on_meshes()), strict=True)))
        return held

    def once(self) -> list[Held]:
        """The tensors, tied ones under their first name alone."""
        return [held for held in self.tensors.values() if held.first == held.name]

    def check_material(self, what: str, held: Iterable[Held] | None = None) -> None:
        """See that no tensor is on meta: of these, by default of those of the state dict.

        Raises:
            CheckpointError: some are.
        """
        missing = [each.name for each in (self.once() if held is None else held) if each.local.is_meta]
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

    def on_meshes(self) -> dict[tuple[int, ...], list[str]]:
        """What the ranks of each mesh gather together, in order."""
        lists: dict[tuple[int, ...], list[str]] = {}
        for held in self.once():
            if isinstance(held.tensor, DTensor):
                ranks = tuple(held.tensor.device_mesh.mesh.flatten().tolist())
                placed = f"{tuple(held.tensor.shape)} of {held.tensor.dtype}, placed {held.tensor.placements}"
                lists.setdefault(ranks, []).append(f"{held.name} {placed}")
        return lists

    def digests(self) -> dict[tuple[int, ...], str]:
        """The same, short enough to be compared each time."""
        return {ranks: sha256(repr(lines).encode()).hexdigest() for ranks, lines in self.on_meshes().items()}


def ranks_of(model: nn.Module) -> ModelRanks:
    """The ranks that hold a model."""
    return ModelRanks(meshes_of((*parameters_of(model).values(), *model.buffers())))


def _differ(said: Mapping[int, Mapping[tuple[int, ...], object]]) -> tuple[int, int, tuple[int, ...]] | None:
    """Two ranks that hold different tensors on a mesh of both, and the ranks of that mesh."""
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
        f"{what}: the state dict has {one} on rank {rank} and {two} on rank {other}; build and shard the model alike "
        "on all ranks, with the same hooks of state_dict()"
    )


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The meshes of those that are DTensors, each once."""
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))


def limit_of(model: nn.Module, most: int) -> int:
    """Bytes to move at a time: those of the largest group, and not more than `most`."""
    groups = [state.declaration.params for state in states_with_parameters_in(model)]
    sizes = [sum(param.sharded.numel() * param.dtype.itemsize for param in params) for params in groups]
    return min(most, max(sizes, default=0) or most)
