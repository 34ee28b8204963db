"""Saved weights are handles, not memory.

While a sharded module runs forward, autograd saves a weight as the name of its place (bucket, offset, shape, strides)
and asks for it in backward, wherever the weights are then. So no slot is ever read after it was given to others.
Everything else goes to the saved-tensor hooks that were active outside, because torch applies the innermost ones only;
where there are none it is kept as torch would keep it, with its version, since hooks switch off torch's own check.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from .._errors import SavedTensorModifiedError, StaleStateError
from .._memory.pool import BufferPool
from .._memory.slots import Outside, Place, Slot
from .._torch.core import (
    SavedTensorsHooks,
    active_saved_tensors_hooks,
    address_of,
    give_way_to_transforms,
    passed_by_checkpoints,
    saved_tensors_hooks_set_aside,
)
from .bucket import Bucket, GatherBucket

PLAIN = (torch.Tensor, torch.nn.Parameter)


class WeightOwner(Protocol):
    """Who gathers weights and knows where they lie.

    Attributes:
        under_hooks: whether what the forward that began last saves, but for weights, goes to hooks outside of ours.
    """

    under_hooks: bool

    @property
    def pool(self) -> BufferPool: ...

    def fetch(self, bucket: Bucket) -> None:
        """Make a bucket's weights readable, gathering them if need be."""

    def halfway(self) -> None:
        """Half of the weights that a use has saved were read."""

    @property
    def keepers(self) -> Mapping[Bucket, object]:
        """What the handles of a bucket hold, where their end must be noticed."""


class Handle(NamedTuple):
    """A saved view of a weight."""

    bucket: Bucket
    place: Place | tuple[torch.Tensor, int]  # in memory that is not the pool's: a view, and of which weight
    owner: WeightOwner | None  # who makes them readable
    keeper: object  # dies with the last handle of its use
    generation: int  # of the weights
    shown: Sequence[torch.Tensor]  # in which the forward found them


_Tensor, _data_ptr, _is_grad_enabled = torch.Tensor, torch.Tensor.data_ptr, torch.is_grad_enabled
_new = tuple.__new__  # makes a named tuple at a third of the cost of calling its class


class _Flattened(NamedTuple):
    """A saved tensor subclass with weights inside."""

    kind: type
    inner: dict[str, Any]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]


class _Foreign(NamedTuple):
    """What the hooks outside made of a saved tensor."""

    packed: Any


def saved_weights(owner: WeightOwner) -> AbstractContextManager[Any] | None:
    """The hooks as a context for one forward; None if they are in force already."""
    outer = active_saved_tensors_hooks()
    ours = _ours(outer)
    if ours is not None and ours.owner() is owner:
        owner.under_hooks = ours.has_outer
        return None
    hooks = _Hooks(owner, outer)
    owner.under_hooks = outer is not None
    return saved_tensors_hooks(passed_by_checkpoints(hooks.pack, outer), hooks.unpack)


def _ours(hooks: SavedTensorsHooks | None) -> _Hooks | None:
    found = None if hooks is None else getattr(hooks[0], "__self__", None)
    return found if isinstance(found, _Hooks) else None


def _are_ours(hooks: SavedTensorsHooks) -> bool:
    return _ours(hooks) is not None


def give_way() -> None:
    """From now on, transforms of `torch.func` run in forwards under these hooks, which are set aside meanwhile."""
    give_way_to_transforms(_are_ours)


def weights_in_place(owner: WeightOwner) -> AbstractContextManager[None] | None:
    """For a forward whose weights never move: sets the hooks aside, as some transforms of `torch.func` demand.

    Weights are then saved as any tensor is. None if the hooks are not in force.
    """
    owner.under_hooks = False
    ours = _ours(active_saved_tensors_hooks())
    return saved_tensors_hooks_set_aside() if ours is not None and ours.owner() is owner else None


class _Hooks:
    """The hooks of one forward.

    They hold the owner of the weights weakly, its handles hold it strongly: a graph holds what it will need, and a
    collective that was issued under the hooks, whose thread has a copy of this thread's state, holds nothing.
    """

    __slots__ = ("_keepers", "_last", "_outer", "_pool", "has_outer", "owner")

    def __init__(self, owner: WeightOwner, outer: SavedTensorsHooks | None) -> None:
        self.owner = weakref.ref(owner)
        self._outer = outer
        self.has_outer = outer is not None
        self._pool = owner.pool
        self._keepers = owner.keepers
        self._last: Slot | Outside | None = None  # one forward saves several weights of a slot

    def pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) in PLAIN:
            try:
                address = _data_ptr(tensor)
            except (RuntimeError, NotImplementedError):
                address = 0
            pool = self._pool
            if (
                pool.first <= address < pool.end
                and (found := self._handle(tensor, address, tensor._version)) is not None
            ):
                return found
        elif (found := self._flattened(tensor, tensor._version)) is not None:
            return found
        if self._outer is not None:
            return _Foreign(self._outer[0](tensor))
        if tensor.requires_grad:  # with a history: a saved output would hold its own graph for good
            tensor = tensor.detach()
        version = tensor._version
        return (tensor, version) if version else tensor

    def unpack(self, packed: Any) -> torch.Tensor:
        kind = type(packed)
        if kind is Handle:
            return _weight(packed)
        if kind is _Tensor and not packed._version:
            return packed  # type: ignore[no-any-return]
        if kind is _Foreign:
            assert self._outer is not None
            return self._outer[1](packed.packed)
        if kind is tuple or isinstance(packed, torch.Tensor):
            tensor, version = packed if kind is tuple else (packed, 0)
            if tensor._version != version:
                raise _modified(tensor, version)
            return tensor  # type: ignore[no-any-return]
        return _restored(packed)

    def _handle(self, tensor: torch.Tensor, address: int, version: int) -> Any:
        """A handle for a view of weights that begins there; None if no weights lie there, or those are gone.

        Args:
            tensor: the view.
            address: where it begins.
            version: of it, or of the tensor of a subclass that it is part of.
        """
        slot = self._last
        if slot is None or not slot.begin <= address < slot.end or slot.owner is None:
            slot = self._last = self._pool.find(address)
            if slot is None or slot.owner is None:
                return None
        bucket: Any = slot.owner()
        if bucket is None:
            return None
        keeper = self._keepers.get(bucket) if self._keepers else None
        if type(slot) is Outside:
            if (version or bucket.edited) and bucket.was_edited(slot.index, version):
                return _copied(tensor)
            kept = tensor.detach(), slot.index
            return Handle(bucket, kept, self.owner(), keeper, bucket.generation, bucket.shown)
        if bucket.is_complex and (tensor.is_conj() or tensor.is_neg()):
            return _copied(tensor)  # a handle has no word for a lazy conjugate
        place = self._pool.places[tensor.dtype, address - slot.begin, tensor.shape, tensor.stride()]
        if (version or bucket.edited) and bucket.was_edited(bucket.members[place], version):
            return _copied(tensor)
        bucket.note_saved()
        return _new(Handle, (bucket, place, self.owner(), keeper, bucket.generation, bucket.shown))

    def _flattened(self, tensor: Any, version: int) -> Any:
        """What stands for a tensor of a subclass if any of its inner tensors lies among weights."""
        if type(tensor) in PLAIN or not hasattr(tensor, "__tensor_flatten__"):
            return self._handle(tensor, address_of(tensor), version)
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}  # tensors, and a DTensor's mesh
        inner = {
            name: self._flattened(part, version) if isinstance(part, torch.Tensor) else None
            for name, part in parts.items()
        }
        if all(found is None for found in inner.values()):
            return None
        kept = {name: _kept(parts[name]) if found is None else found for name, found in inner.items()}
        return _Flattened(type(tensor), kept, context, tensor.shape, tensor.stride())


def _copied(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A saved weight that is no handle."""
    copy = tensor.detach().clone()
    return copy, copy._version


def _weight(handle: Handle) -> torch.Tensor:
    """The weight that a handle stands for, gathered again if need be."""
    bucket, place, owner, _, generation, shown = handle
    if generation != bucket.generation:
        raise StaleStateError(
            f"weights of the group with {', '.join(bucket.fqns)}: an optimizer or a load has changed them between "
            "forward and backward; run backward first, or forward again after it"
        )
    if not bucket.readable:
        assert owner is not None
        owner.fetch(bucket)
    if shown is not bucket.unedited and bucket.find_edited(shown):
        member = bucket.members[place] if type(bucket) is GatherBucket else place[1]  # type: ignore[index]
        if member in bucket.find_edited(shown):
            raise _edited(bucket.fqns[member])
    if bucket.reads_left and bucket.note_read() and owner is not None:
        owner.halfway()
    view: torch.Tensor = bucket.slot.views[place] if type(place) is Place else place[0]  # type: ignore[union-attr, index]
    # With grad mode on (create_graph) autograd saves what it gets here once more, and then past these hooks.
    return view.clone() if _is_grad_enabled() else view


def _kept(part: Any) -> Any:
    return part.detach() if isinstance(part, torch.Tensor) else part


def _restored(packed: Any) -> torch.Tensor:
    """A tensor of a subclass, or one of its inner tensors."""
    if isinstance(packed, Handle):
        return _weight(packed)
    if isinstance(packed, _Flattened):
        inner = {name: _restored(found) for name, found in packed.inner.items()}
        kind: Any = packed.kind
        whole: torch.Tensor = kind.__tensor_unflatten__(inner, packed.context, packed.shape, packed.stride)
        return whole
    kept: torch.Tensor = packed[0] if type(packed) is tuple else packed
    return kept


def _edited(fqn: str) -> SavedTensorModifiedError:
    return SavedTensorModifiedError(
        f"parameter {fqn}: unsharded weights, saved in forward for backward, were modified by an in-place operation "
        "afterwards. Change the sharded parameter instead, outside of forward and backward, or compute with a copy"
    )


def _modified(tensor: torch.Tensor, version: int) -> SavedTensorModifiedError:
    return SavedTensorModifiedError(
        f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}, saved in forward for backward, was "
        f"modified by an in-place operation afterwards: it is at version {tensor._version}, expected {version}. "
        "Use the out-of-place form of that operation, or torch.autograd.set_detect_anomaly(True) to find it"
    )
