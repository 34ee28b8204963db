"""Faces: tensors over a slot, through which modules read the unsharded parameters.

User code may keep an unsharded parameter, or a view of it, after the forward: in a cache, or on the ``ctx`` of an
autograd function. No handle stands for such a tensor. This file finds them in two ways:

- **Views.** A view shares the storage of its base tensor. Each parameter of a face has a storage object of its own
  (`alias`), so the use count of that storage tells whether views exist. While they do, the slot is not leased for other
  requests (`BufferPool.retain`). Only the next gather of the same bucket writes to it, so that views show new values. A
  slot that resizes needs no counts: it is never leased for other requests.
- **The parameter object itself.** Its reference count tells whether user code holds it. The count of an output is taken
  when it is installed in its modules, and right before it is replaced there. That of a leaf is taken while no module
  has it, and after it was replaced. Installing and replacing are the only places where this package stores or drops
  references, so any additional one is the user's. The slot is reused. Until
  the next gather, the kept parameter reads as NaN (`hide_kept`). Then it shows the gathered values. So a module may
  cache its weight, as with FSDP2, where unsharded parameters are the same objects in all steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter, gt, ne
from sys import getrefcount

import torch
from torch.distributed.tensor import DTensor

from .._memory.slots import Slot
from .._plan.layout import BucketLayout
from .._torch.core import alias, has_memory, plainly, storage_id, storage_uses
from .._torch.distributed import local_part
from ..errors import ShardConfigStateError
from .param import ShardedParam

# Attribute of a leaf: the name of its parameter. Errors use it to detect and name a leaf that is used as a parameter.
LEAF_OF = "_unsharded_copy_of"
_version, _data = attrgetter("_version"), attrgetter("data")
_SHOWN = (torch.nn.Parameter, DTensor)  # classes of leaves that share the memory of their face


def weights_in(
    flat: torch.Tensor, dtype: torch.dtype, layout: BucketLayout, view: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Make views of the parameters in some memory.

    Args:
        flat: the memory, as bytes, because `alias` exports a part of it by dlpack, which does not support every dtype.
        dtype, layout: the dtype and the layout of the parameters.
        view: makes a view from a parameter's bytes.
    """
    size = dtype.itemsize
    params = layout.params
    parts = [flat.narrow(0, size * begin, size * at.numel) for begin, at in zip(layout.begins, params, strict=True)]
    return [view(part).view(dtype).view(at.shape) for part, at in zip(parts, params, strict=True)]


class Face:
    """The unsharded parameters in one slot, as tensors whose storage use counts show whether other code reads them.

    Each parameter has its own storage, also because operators such as `torch.cond` refuse tensors that share one. In a
    slot that resizes, all share the storage of the slot, and there are no counts.

    Attributes:
        begin: the address of the slot.
        weights: the unsharded parameters, without autograd history.
        at_rest: for each storage, its use count when it is shared by the face and one set of outputs or leaves, and by
            nothing else. A higher count means that other views exist. Empty until outputs or leaves are made for the
            first time.
    """

    __slots__ = ("_alone", "_storages", "at_rest", "begin", "weights")

    def __init__(self, slot: Slot, dtype: torch.dtype, layout: BucketLayout) -> None:
        self.begin = slot.begin
        with plainly():
            # If the slot loses its memory at release (`Slot.resizes`), views share its storage, so that a kept view
            # shows the next gather, wherever its memory is. Otherwise each parameter has a storage of its own, for the
            # counts.
            view = _data if slot.resizes else alias
            self.weights = weights_in(slot.typed(torch.uint8), dtype, layout, view)
        counts = not slot.resizes and all(map(has_memory, self.weights[:1]))  # all are fake, or none
        self._storages = list(map(storage_id, self.weights)) if counts else []
        self._alone = self._users()  # like `at_rest`, without outputs (leaves stay, so they count)
        self.at_rest: list[int] = []

    def _users(self) -> list[int]:
        """Return the current use count of each storage; fake tensors have none."""
        return list(map(storage_uses, self._storages))

    def note_shown(self) -> None:
        """Take the counts of `at_rest`, when the first node has outputs over this face.

        They are the same for later nodes: a face has the outputs of one node at a time (`Faces.unused`).
        """
        self.at_rest = self._users()

    def note_leaves(self) -> None:
        """Take all counts again, because leaves were made over this face; they stay as long as the face."""
        self._alone = self.at_rest = self._users()

    @property
    def has_outputs(self) -> bool:
        """Whether a node has outputs over this face, judging by the first: outputs of a node are freed together."""
        return bool(self._storages) and storage_uses(self._storages[0]) != self._alone[0]

    def is_used(self) -> bool:
        """Whether anything but the face itself (and its leaves) shares its storages."""
        return any(map(ne, map(storage_uses, self._storages), self._alone))

    def is_at_rest(self) -> bool:
        """Whether nothing but the installed outputs or leaves shares its storages."""
        return list(map(storage_uses, self._storages)) == self.at_rest

    def is_kept(self, dropped: Iterable[torch.Tensor]) -> bool:
        """Whether anything but the installed outputs or leaves, and the views `dropped`, shares its storages."""
        gone = Counter(map(storage_id, dropped))
        counts = zip(self._users(), self.at_rest, self._storages, strict=True)
        return any(now - gone[storage] > at_rest for now, at_rest, storage in counts)


class Leaves:
    """The unsharded parameters in one slot as leaf Parameters: the same objects whenever the parameters are there.

    Attributes:
        params: the leaves.
        versions: the version of each leaf when its values were gathered; a later version indicates an edit.
        face: the face whose memory they share; None if the memory is not the pool's.
    """

    __slots__ = ("_free_counts", "_in_memory", "_locals", "_storages", "face", "params", "versions")

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        face: Face | None = None,
        in_memory: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.params = params
        self.face = face
        self._in_memory = params if in_memory is None else in_memory  # tensors in the memory that will hold other data
        self._locals = {index: local_part(leaf) for index, leaf in enumerate(params) if face and type(leaf) in _SHOWN}
        self._storages = list(map(storage_id, self._locals.values()))
        self.versions: list[int] = list(map(_version, params))
        self._free_counts = list(map(getrefcount, params))  # reference counts while no module has them installed

    def held(self) -> list[bool]:
        """Return for each leaf whether other objects hold it: user code, or modules in which it is installed."""
        return list(map(gt, map(getrefcount, self.params), self._free_counts))

    def show_weights(self) -> None:
        """Make all leaves share the memory of their face again.

        A forward may have assigned to the `.data` of a leaf, for example a bias in the dtype of its input. Leaves that
        user code has kept are pointed at NaN while nothing is gathered.
        """
        if self._locals and list(map(storage_id, self._locals.values())) != self._storages:
            assert self.face is not None
            with plainly():
                for index, local in self._locals.items():
                    # A layer may have changed the class of a packed one, for example when it converted its layout.
                    if type(self.params[index]) in _SHOWN:
                        local.data = self.face.weights[index].data

    def written(self) -> set[int]:
        """Return indices of the leaves that were written to since the gather, judging by versions."""
        versions = list(map(_version, self.params))
        if versions == self.versions:
            return set()
        return {index for index, version in enumerate(versions) if version != self.versions[index]}

    def give_up(self) -> None:
        """Increase the version counters of the leaves, because their memory is about to hold other data.

        If autograd has saved a leaf itself instead of a handle, it then raises an error and does not read the memory.
        For a leaf that consists of other tensors, the memory is that of some of these. Views of such a leaf share its
        version, but may have memory of their own, which stays.
        """
        torch.autograd.graph.increment_version(self._in_memory)
        self.versions = list(map(_version, self.params))

    def note_versions(self, edited: Collection[int] = ()) -> None:
        """Accept all writes so far, except to the leaves with these indices."""
        versions = list(map(_version, self.params))
        self.versions = [self.versions[at] if at in edited else now for at, now in enumerate(versions)]


def _without_values(weight: torch.Tensor) -> torch.Tensor:
    """Make a tensor like this one whose bytes are NaN in floating-point dtypes; it has memory for only one element."""
    with plainly():
        element = torch.full((weight.element_size(),), 0xFF, dtype=torch.uint8, device=weight.device)
        return element.view(weight.dtype).squeeze(0).expand(weight.shape)


def _follow(tensor: torch.Tensor, param: ShardedParam) -> None:
    """Freeze or unfreeze a kept leaf like its parameter.

    Raises:
        ShardConfigStateError: the parameter was unfrozen since, but the tensor is the output of a node, whose
            `requires_grad` cannot be changed.
    """
    trains = param.sharded.requires_grad
    if tensor.requires_grad == trains or not tensor.is_leaf:
        return
    if LEAF_OF not in tensor.__dict__:
        raise ShardConfigStateError(
            f"parameter {param.fqn}: was frozen when user code kept its unsharded copy in a forward, and requires a "
            "gradient now, which the copy would not get. Read the parameter from its module again after "
            "requires_grad_(True)"
        )
    tensor.requires_grad_(trains)


def _leaf(weight: torch.Tensor, param: ShardedParam) -> torch.nn.Parameter:
    local = weight.data  # with its own version counter: `Leaves.give_up` increases it without changing the face's
    leaf = torch.nn.Parameter(param.parallel.around(local) if param.parallel else local, requires_grad=False)
    leaf.__dict__[LEAF_OF] = param.fqn
    return leaf


class Faces:
    """The faces of a bucket in all slots that it has used, and which of them user code keeps views of.

    Attributes:
        leaves: by slot, the leaves that were made there.
        in_use: the face that the running forward reads; if none runs, the one that the last forward read.
        lent: the faces of which user code kept views at the end of a forward.
        kept: whether user code may have kept unsharded parameters (`ShardedParam.kept`) after a forward.
    """

    def __init__(self, dtype: torch.dtype, layout: BucketLayout, params: Sequence[ShardedParam]) -> None:
        self._dtype, self._layout, self._params = dtype, layout, params
        self._of: dict[Slot, list[Face]] = {}
        self._begins: dict[Slot, int] = {}  # the address of each slot when its faces were made
        self.leaves: dict[Slot, Leaves] = {}
        self.in_use: Face | None = None
        self.lent: list[Face] = []
        self.kept = any(param.kept for param in params)
        self._of_kept: dict[Slot, Face] = {}  # by slot, the face whose values the kept parameters show
        self._hidden: list[torch.Tensor] = []  # the data of kept parameters while nothing is gathered
        self._counts: list[int] = []  # reference counts of the last use's outputs, when they were installed
        self._dropped: list[weakref.ref[torch.Tensor]] = []  # views of leaves that the last forward was about to drop

    def enter(self, slot: Slot) -> Leaves | None:
        """Prepare a gather into this slot; returns the leaves there, if any were made.

        If the slot's memory has moved (see `BufferPool.free_idle`), faces over the former memory are dropped.
        """
        if self._begins.get(slot) != slot.begin:
            self._begins[slot] = slot.begin
            for of_slots in (self._of, self._of_kept, self.leaves):
                of_slots.pop(slot, None)
        if self.kept:
            self._show_kept(slot)
        return self.leaves.get(slot)

    def _show_kept(self, slot: Slot) -> None:
        """Make all unsharded parameters that user code has kept show the values in this slot."""
        if slot not in self._of_kept:
            self._of_kept[slot] = Face(slot, self._dtype, self._layout)
        self._point_kept_at(self._of_kept[slot].weights)
        if (leaves := self.leaves.get(slot)) is not None:
            # If leaves are among the kept ones, they refer to the face in `_of_kept` now. They must refer to their own
            # face again, because its use counts at rest include them.
            leaves.show_weights()
        for param in self._params:
            for copy in param.kept_ones():
                _follow(copy, param)

    def hide_kept(self, slot: Slot) -> None:
        """Fill the unsharded parameters that user code has kept with NaN, because the slot is released."""
        if not self._hidden:
            # Only shapes and dtypes are taken from a face, so any one will do. If parameters were kept when this slot
            # was gathered into, `_of_kept` has one (`_show_kept`). If they were first kept in the forward after that,
            # this forward has read `in_use`.
            face = self._of_kept.get(slot) or self.in_use
            assert face is not None
            self._hidden = list(map(_without_values, face.weights))
        self._point_kept_at(self._hidden)

    def _point_kept_at(self, weights: Sequence[torch.Tensor]) -> None:
        """Make the unsharded parameters that are still kept share the data of these weights, by index."""
        self._forget_leaves_let_go()
        kept = [(index, tensor) for index, param in enumerate(self._params) for tensor in param.kept_ones()]
        with plainly():
            for index, tensor in kept:
                local_part(tensor).data = weights[index]
        if not kept:
            self.kept = False
            self._of_kept.clear()

    def _forget_leaves_let_go(self) -> None:
        """Forget kept leaves that user code has released.

        `ShardedParam` has weak references to kept parameters. For leaves these never die, because `leaves` holds them.
        """
        for leaves in self.leaves.values():
            for param, leaf, held in zip(self._params, leaves.params, leaves.held(), strict=True):
                if not held:
                    param.forget_kept(leaf)

    def _keep(self, held: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Note that user code holds these unsharded parameters, by index, after their forward."""
        for index, tensor in held:
            self._params[index].note_kept(tensor)
            self.kept = True

    def unused(self, slot: Slot, for_use: bool = False) -> list[torch.Tensor]:
        """Return the weights of a face in this slot without node outputs and kept views; a new one if there is none.

        Args:
            slot: the slot of the unsharded parameters.
            for_use: whether a forward that begins now will read this face.
        """
        faces = self._of.setdefault(slot, [])
        for face in faces:
            # A face with outputs of another node cannot be used. It is enough to look at one storage, because the
            # outputs of a node are freed together. But an output that user code has kept no longer refers to this face
            # (`_point_kept_at`), so then all storages are looked at.
            looks_at_all = self.kept or face in self.lent
            if not (face.is_used() if looks_at_all else face.has_outputs):
                break
        else:
            face = Face(slot, self._dtype, self._layout)
            faces.append(face)
        if for_use:
            self.in_use = face
            if self.lent and face in self.lent:
                self.lent.remove(face)
        return face.weights

    def use_leaves(self, slot: Slot) -> Leaves:
        """Return the leaves in this slot, made at the first call; the forward that begins reads their face."""
        leaves = self.leaves.get(slot)
        if leaves is None:
            with plainly():
                face = Face(slot, self._dtype, self._layout)
                made = list(map(_leaf, face.weights, self._params))
            face.note_leaves()
            leaves = self.leaves[slot] = Leaves(made, face)
        leaves.show_weights()
        self.in_use = leaves.face
        return leaves

    def begin_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note a new node over the face in use, whose outputs modules have installed."""
        # The counts at rest are taken once, for the first node. Reference counts of outputs differ between nodes.
        if self.in_use is not None and not self.in_use.at_rest:
            self.in_use.note_shown()
        self._counts = list(map(getrefcount, outputs))

    def end_forward(
        self, shown: Sequence[torch.Tensor], dropped: Sequence[torch.Tensor], leaves: Leaves | None
    ) -> None:
        """Note at the end of a forward which parameters user code will keep, and whether it will keep views.

        Args:
            shown: the outputs of the node, still installed; empty if modules have leaves.
            dropped: views in the module's outputs, which the caller has replaced by copies and is about to drop.
            leaves: the leaves in this slot, if any were made.
        """
        if shown and list(map(getrefcount, shown)) != self._counts:
            self.note_kept(shown)
        if self.in_use is not None and not self.in_use.is_at_rest():
            self._note_users(self.in_use, dropped, leaves)

    def note_kept(self, shown: Sequence[torch.Tensor]) -> None:
        """Note which of these installed node outputs, which are about to be replaced, user code holds."""
        counts = list(map(getrefcount, shown))  # before `enumerate` holds references
        self._keep(itertools.compress(enumerate(shown), map(gt, counts, self._counts)))

    def _note_users(self, face: Face, dropped: Sequence[torch.Tensor], leaves: Leaves | None) -> None:
        """Note whether the views of a face that a forward has read will stay; arguments as for `end_forward`."""
        if face in self.lent:  # from an earlier forward; views of it are known
            return
        # A parameter among them is an output or a leaf itself, which the counts at rest include.
        views = {id(view): view for view in dropped if not isinstance(view, torch.nn.Parameter)}
        if face.is_kept(views.values()):
            self.lent.append(face)
        elif leaves is not None and face is leaves.face:
            self._dropped = list(map(weakref.ref, views.values()))

    def release(self, leaves: Leaves | None) -> bool:
        """Return whether user code keeps views of the parameters, now that they are released.

        This also ends the use of the leaves: autograd must not read those that it has saved (`Leaves.give_up`), and
        those that user code holds are noted as kept.
        """
        if self.lent:
            self.lent = [face for face in self.lent if face.is_used()]
        if leaves is None:
            return bool(self.lent)
        leaves.give_up()
        if any(held := leaves.held()):
            self._keep(itertools.compress(enumerate(leaves.params), held))
        face, dropped, self._dropped = leaves.face, self._dropped, []
        assert face is not None
        if self.lent or face.is_at_rest():
            return bool(self.lent)
        return face.is_kept(view for ref in dropped if (view := ref()) is not None)

    def clear(self) -> None:
        """Drop all views of slots."""
        self._of.clear()
        self._of_kept.clear()
        self._begins.clear()
        self.leaves.clear()
        self.in_use = None
