"""Saved-tensor hooks by which autograd saves handles of parameters instead of their memory.

While a sharded module runs forward, a view of a parameter is packed as a handle (bucket, offset, shape, strides). In
backward, the handle is unpacked to that view of the parameters as they are gathered then, in whichever slot. So
autograd never reads a slot that was leased for other data in the meantime.

An unpacked view is for the backward of its use only. As with torch's FSDP2, a hook or an autograd function must not
keep it for later: the memory is reused after that backward.

Torch applies only the innermost hooks, so these hooks pass every other tensor on to the hooks that were active outside
of them. If there are none, the tensor is kept with its version. The version is checked here, as torch does without
hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from .._memory.pool import BufferPool
from .._memory.slots import Outside, Place, Slot
from .._torch.core import (
    SavedTensorsHooks,
    active_saved_tensors_hooks,
    address_of,
    give_way_to_transforms,
    never_trace,
    passed_by_checkpoints,
    saved_tensors_hooks_set_aside,
    unflattened,
)
from ..errors import SavedTensorModifiedError, StaleStateError
from .bucket import OUTPUT_OF, Bucket, Saved

PLAIN = (torch.Tensor, torch.nn.Parameter)
_OF_NONE = (None, 0)


class HandleKeeper(Protocol):
    """An object that all handles of a use of a frozen group hold, to tell when the last of them was freed.

    A frozen group has no node, whose deletion tells it for other groups.
    """

    saved: Saved


class WeightOwner(Protocol):
    """The interface of the engine for these hooks: it gathers parameters and finds their memory.

    Attributes:
        under_hooks: whether other hooks are active outside of ours in the forward that began last. False while our
            hooks are set aside (`weights_in_place`).
    """

    under_hooks: bool

    @property
    def pool(self) -> BufferPool: ...

    def fetch(self, bucket: Bucket) -> None:
        """Make a bucket's unsharded parameters readable; gather them if needed."""

    def halfway(self) -> None:
        """Handle the event that backward has read half of the handles of a use."""

    @property
    def keepers(self) -> Mapping[Bucket, HandleKeeper]:
        """By bucket of a frozen group, the object that all handles made now hold. Other groups have none."""


class Handle(NamedTuple):
    """A saved view of an unsharded parameter."""

    bucket: Bucket
    # Outside of the pool's memory: the view itself, or None for the whole parameter, and the parameter's index.
    place: Place | tuple[torch.Tensor | None, int]
    owner: WeightOwner | None  # gathers the parameters; None if it was freed
    keeper: object  # freed with the last handle of its use; None if the group is not frozen
    generation: int  # the bucket's generation when the view was saved
    shown: Sequence[torch.Tensor]  # the node outputs that were installed then, to detect edits of them
    version: int  # the version of the view then; a view shares its version counter with the output


_Tensor, _data_ptr, _is_grad_enabled = torch.Tensor, torch.Tensor.data_ptr, torch.is_grad_enabled
_new = tuple.__new__  # makes a named tuple at a third of the cost of calling its class


class _Flattened(NamedTuple):
    """A saved tensor of a subclass whose inner tensors include parameters, which became handles."""

    kind: type
    inner: dict[str, Any]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]


class _Whole(NamedTuple):
    """A saved parameter that defines its own all-gather, as a whole and not a view of it.

    A gather may make it from other tensors: a class can send other ones in backward than in forward.
    """

    handle: Handle


class _Foreign(NamedTuple):
    """A saved tensor as the hooks outside of ours have packed it."""

    packed: Any


def saved_weights(owner: WeightOwner) -> AbstractContextManager[Any] | None:
    """Return a context with these hooks for one forward; None if this owner's hooks are already the innermost ones."""
    outer = active_saved_tensors_hooks()
    ours = _ours(outer)
    if ours is not None and ours.owner() is not owner:
        ours = None
    owner.under_hooks = outer is not None if ours is None else ours.has_outer
    if ours is not None:
        return None
    hooks = _Hooks(owner, outer)
    return saved_tensors_hooks(passed_by_checkpoints(hooks.pack, outer), hooks.unpack)


def _ours(hooks: SavedTensorsHooks | None) -> _Hooks | None:
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, _Hooks) else None


def _are_ours(hooks: SavedTensorsHooks) -> bool:
    return _ours(hooks) is not None


def give_way() -> None:
    """From now on, let `torch.func` transforms run in forwards under these hooks, by disabling the hooks meanwhile."""
    give_way_to_transforms(_are_ours)


def weights_in_place(owner: WeightOwner) -> AbstractContextManager[None] | None:
    """Return a context without the owner's hooks, as some `torch.func` transforms require.

    None if these hooks are not the innermost ones, or none are set. In the context, autograd saves parameters like any
    tensor, so it is for forwards whose parameters stay gathered in their slot.
    """
    owner.under_hooks = False
    ours = _ours(active_saved_tensors_hooks())
    return saved_tensors_hooks_set_aside() if ours is not None and ours.owner() is owner else None


class _Hooks:
    """The hooks of one forward.

    Handles hold the engine, because an autograd graph must keep alive what its backward needs. The hooks themselves
    hold it weakly: torch copies the hooks of a thread to the threads that it starts, for example for a collective.
    """

    __slots__ = ("_addresses", "_keepers", "_last", "_outer", "_places", "has_outer", "owner")

    def __init__(self, owner: WeightOwner, outer: SavedTensorsHooks | None) -> None:
        self.owner = weakref.ref(owner)
        self._outer = outer
        self.has_outer = outer is not None
        self._addresses, self._places = owner.pool.addresses, owner.pool.places
        self._keepers = owner.keepers
        self._last: Slot | Outside | None = None  # one forward saves several weights of a slot

    def pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) in PLAIN:
            try:
                address = _data_ptr(tensor)
            except (RuntimeError, NotImplementedError):
                address = 0
            memory = self._addresses
            if memory.first <= address < memory.end and (handle := self._handle(tensor, address)) is not None:
                return handle
        elif (packed := self._whole(tensor) or self._flattened(tensor)) is not None:
            return packed
        if self._outer is not None:
            return _Foreign(self._outer[0](tensor))
        # An operator may save its own output, as `exp` does. The output holds the operator's node, and the node holds
        # what it saves: a cycle, unless the output is detached.
        if tensor.requires_grad:
            tensor = tensor.detach()
        version = tensor._version
        return (tensor, version) if version else tensor

    @never_trace  # compiled autograd would trace it and not record that it gathers
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

    def _handle(self, tensor: torch.Tensor, address: int) -> Any:
        """Make a handle for a view of a parameter whose data begins at `address`; None for views of other tensors."""
        slot = self._last
        if slot is None or (owner := slot.owner) is None or not slot.begin <= address < slot.end:
            slot = self._last = self._addresses.find(address)
            if slot is None or (owner := slot.owner) is None:
                return None
        if (bucket := owner()) is None:
            return None
        if bucket.is_complex and _is_lazy(tensor):
            return _copied(tensor)
        bucket.saved += 1
        place: Any
        if type(slot) is Outside:
            place = (tensor.detach(), slot.index)
        else:
            place = self._places[tensor.dtype, address - slot.begin, tensor.shape, tensor.stride()]
            if not bucket.shown:  # modules have leaves; for the check in `GatherBucket._read_before`
                bucket.writes.packed.append((place, tensor._version))
        keeper = self._keepers.get(bucket) if self._keepers else None
        if keeper is not None:
            keeper.saved.add((bucket, slot.index if type(slot) is Outside else place))
        return _new(Handle, (bucket, place, self.owner(), keeper, bucket.generation, bucket.shown, tensor._version))

    def _whole(self, tensor: Any) -> _Whole | None:
        """Save an output of a node that a later gather may make from other tensors; None for other tensors."""
        bucket, index = tensor.__dict__.get(OUTPUT_OF, _OF_NONE)
        if bucket is None or (owner := bucket()) is None:
            return None
        owner.count_saved()
        keeper = self._keepers.get(owner) if self._keepers else None
        if keeper is not None:
            keeper.saved.add((owner, index))
        place = (None, index)
        return _Whole(Handle(owner, place, self.owner(), keeper, owner.generation, owner.shown, tensor._version))

    def _flattened(self, tensor: Any) -> Any:
        """Flatten a tensor subclass, with handles for inner tensors that are parameters; None if there are none."""
        if type(tensor) in PLAIN or not hasattr(tensor, "__tensor_flatten__"):
            return self._handle(tensor, address_of(tensor))
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}  # tensors, and a DTensor's mesh
        inner = {
            name: self._flattened(part) if isinstance(part, torch.Tensor) else None for name, part in parts.items()
        }
        if all(handle is None for handle in inner.values()):
            return None
        kept = {name: _kept(parts[name]) if handle is None else handle for name, handle in inner.items()}
        return _Flattened(type(tensor), kept, context, tensor.shape, tensor.stride())


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor is lazily conjugated or negated, which a handle does not record."""
    return tensor.is_conj() or tensor.is_neg()


def _copied(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Copy a parameter, to be saved like any tensor, with its version."""
    copy = tensor.detach().clone()
    return copy, copy._version


def _weight(handle: Handle) -> torch.Tensor:
    """Return the unsharded parameter of a handle, gathered again if needed."""
    bucket, place, owner, _, generation, shown, version = handle
    if generation != bucket.generation:
        raise _stale(bucket)
    if not bucket.readable:
        assert owner is not None
        owner.fetch(bucket)
        if generation != bucket.generation:  # the gather has detected a change
            raise _stale(bucket)
    # Nothing to check if no parameter of this use was written to before its backward began (see `Writes`).
    if shown is not bucket.writes.unwritten and (rewritten := bucket.writes.look_at(shown, bucket.here)):
        member = bucket.members[place] if type(place) is Place else place[1]  # type: ignore[attr-defined, index]
        if rewritten.get(member, version) != version:
            raise _edited(bucket.fqns[member])
    if bucket.reads_left:
        bucket.reads_left -= 1
        if not bucket.reads_left and owner is not None:
            owner.halfway()
    view: torch.Tensor
    if type(place) is Place:
        view = bucket.slot.views[place]  # type: ignore[attr-defined]
    else:
        view = bucket.whole(place[1]) if place[0] is None else place[0]  # type: ignore[index]
    # With grad mode on (create_graph), backward saves this view again, without hooks, so the view needs its own memory.
    return view.clone() if _is_grad_enabled() else view


def _kept(part: Any) -> Any:
    return part.detach() if isinstance(part, torch.Tensor) else part


def _restored(packed: Any) -> torch.Tensor:
    """Restore a tensor of a subclass, or one of its inner tensors, from the form in which it was saved."""
    if isinstance(packed, Handle):
        return _weight(packed)
    if isinstance(packed, _Whole):
        return _weight(packed.handle)
    if isinstance(packed, _Flattened):
        inner = {name: _restored(part) for name, part in packed.inner.items()}
        return unflattened(packed.kind, inner, packed.context, packed.shape, packed.stride)
    kept: torch.Tensor = packed[0] if type(packed) is tuple else packed
    return kept


def _stale(bucket: Bucket) -> StaleStateError:
    return StaleStateError(
        f"weights of the group with {', '.join(bucket.fqns)}: an optimizer, a load or a write to the sharded "
        "parameters has changed them between forward and backward; run backward first, or run forward again afterwards"
    )


def _edited(fqn: str) -> SavedTensorModifiedError:
    return SavedTensorModifiedError(
        f"parameter {fqn}: its unsharded copy was modified by an in-place operation between its gather and backward "
        "(in forward, after forward, or after unshard()). The sharded parameter does not have this edit, so the "
        "gradient would not match its values. Edit the sharded parameter instead, between two steps, or compute with "
        "an edited copy"
    )


def _modified(tensor: torch.Tensor, version: int) -> SavedTensorModifiedError:
    return SavedTensorModifiedError(
        f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}, saved in forward for backward, was "
        f"modified by an in-place operation afterwards: it is at version {tensor._version}, expected {version}. "
        "Use the out-of-place form of that operation, or torch.autograd.set_detect_anomaly(True) to find it"
    )
