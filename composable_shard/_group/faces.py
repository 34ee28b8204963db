"""Faces: tensors over a slot, through which modules read the unsharded parameters and we notice who keeps views.

If a view of a weight outlives its forward (in a cache, say, or on a function's ``ctx``), the slot must not be reused,
as the view would then show other data. A view shares the storage of the tensor that it was made from, so the use counts
of the storages of a face tell whether such views exist.

If an unsharded parameter itself outlives its forward, reference counts tell. They are taken when it was installed and
when it is about to be replaced: in between, the runtime neither takes nor drops references, so whatever was added is
the user's. Its slot is reused, so it reads as NaN until the next gather, which makes it show the weights again. So a
module may cache its weight, as it may under FSDP2, where unsharded parameters are the same objects in all steps.
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

from .._errors import ShardConfigStateError
from .._memory.slots import Slot
from .._plan.layout import BucketLayout
from .._torch.core import alias, has_memory, plainly, storage_id, storage_uses
from .._torch.distributed import local_tensor
from .param import ShardedParam

# Attribute of a leaf: the name of its parameter. It shows, and lets errors name, a leaf that was taken for a parameter.
LEAF_OF = "_unsharded_copy_of"
_version, _data = attrgetter("_version"), attrgetter("data")
_SHOWN = (torch.nn.Parameter, DTensor)  # classes of leaves whose memory is that of their face


def weights_in(
    flat: torch.Tensor, dtype: torch.dtype, layout: BucketLayout, view: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Views of the parameters in memory, given as bytes: for `alias` cannot export every dtype (by dlpack).

    Args:
        flat: the memory.
        dtype, layout: of the parameters, and where they lie.
        view: makes each from its bytes.
    """
    size = dtype.itemsize
    params = layout.params
    parts = [flat.narrow(0, size * begin, size * at.numel) for begin, at in zip(layout.begins, params, strict=True)]
    return [view(part).view(dtype).view(at.shape) for part, at in zip(parts, params, strict=True)]


class Face:
    """The unsharded parameters in one slot, as tensors whose storages' use counts tell who else reads them.

    Each parameter has a storage of its own, also since operators such as `torch.cond` take no tensors that share one.

    Attributes:
        begin: the address of the slot.
        weights: the unsharded parameters, without autograd history.
        at_rest: for each storage, its use count when nobody keeps extra views: then only the face and the installed
            outputs (or leaves) share it. Empty until such outputs or leaves are made for the first time.
    """

    __slots__ = ("_alone", "_storages", "at_rest", "begin", "weights")

    def __init__(self, slot: Slot, dtype: torch.dtype, layout: BucketLayout) -> None:
        self.begin = slot.begin
        with plainly():
            # Each with a storage object of its own, unless the slot's memory resizes.
            view = _data if slot.resizes else alias
            self.weights = weights_in(slot.typed(torch.uint8), dtype, layout, view)
        # If the slot's memory resizes, use counts do not matter: views share its storage, and a kept view sees whatever
        # is gathered into the slot next, wherever its memory lies then.
        counts = not slot.resizes and all(map(has_memory, self.weights[:1]))  # all are fake, or none
        self._storages = list(map(storage_id, self.weights)) if counts else []
        self._alone = self._users()  # the use counts while nobody uses the face
        self.at_rest: list[int] = []

    def _users(self) -> list[int]:
        """The use count of each storage now; fake tensors have none."""
        return list(map(storage_uses, self._storages))

    def note_shown(self) -> None:
        """A node's outputs over this face were made for the first time; a face has those of one node at a time."""
        self.at_rest = self._users()

    def note_leaves(self) -> None:
        """Leaves were made over this face; they stay as long as it does."""
        self._alone = self.at_rest = self._users()

    @property
    def has_outputs(self) -> bool:
        """Whether outputs of a node lie over this face; the first one stands for all, if none was kept."""
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
    """The unsharded parameters in one slot as leaf Parameters: the same objects whenever the weights are there.

    Attributes:
        params: the leaves.
        versions: the version of each leaf as its weights were gathered; a later one tells of an edit.
        face: the face whose memory they share; None if the memory is not the pool's.
    """

    __slots__ = ("_free_counts", "_locals", "_storages", "face", "params", "versions")

    def __init__(self, params: list[torch.nn.Parameter], face: Face | None = None) -> None:
        self.params = params
        self.face = face
        self._locals = {index: _local(leaf) for index, leaf in enumerate(params) if face and type(leaf) in _SHOWN}
        self._storages = list(map(storage_id, self._locals.values()))
        self.versions: list[int] = list(map(_version, params))
        self._free_counts = list(map(getrefcount, params))  # reference counts while no module has them

    def held(self) -> list[bool]:
        """For each leaf, whether anything but this object holds it: user code, or modules in which it is installed."""
        return list(map(gt, map(getrefcount, self.params), self._free_counts))

    def show_weights(self) -> None:
        """Undo what a forward has put into the `.data` of a leaf, such as a bias in the dtype of its input.

        Leaves that user code has kept may show other memory, too.
        """
        if self._locals and list(map(storage_id, self._locals.values())) != self._storages:
            assert self.face is not None
            with plainly():
                for index, local in self._locals.items():
                    if type(self.params[index]) in _SHOWN:  # a packed one may have got another class
                        local.data = self.face.weights[index].data

    def written(self) -> set[int]:
        """Indices of the leaves that were written to since their weights were gathered, as far as versions tell."""
        versions = list(map(_version, self.params))
        if versions == self.versions:
            return set()
        return {index for index, version in enumerate(versions) if version != self.versions[index]}

    def give_up(self) -> None:
        """Increase the version counters of the leaves, as their memory is about to hold something else.

        If autograd has saved a leaf itself, and not as a handle, it then raises an error and does not read the memory.
        """
        torch.autograd.graph.increment_version(self.params)
        self.versions = list(map(_version, self.params))

    def note_versions(self, edited: Collection[int] = ()) -> None:
        """What was written so far is no edit, except of the leaves with these indices."""
        versions = list(map(_version, self.params))
        self.versions = [self.versions[at] if at in edited else now for at, now in enumerate(versions)]


def _without_values(weight: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, of bytes that are NaN in floating-point dtypes; it has memory for one element."""
    with plainly():
        element = torch.full((weight.element_size(),), 0xFF, dtype=torch.uint8, device=weight.device)
        return element.view(weight.dtype).squeeze(0).expand(weight.shape)


def _follow(tensor: torch.Tensor, param: ShardedParam) -> None:
    """Freeze or thaw a kept leaf like its parameter.

    Raises:
        ShardConfigStateError: the parameter was thawed since, and the tensor is an output of a node, which cannot be.
    """
    trains = param.sharded.requires_grad
    if tensor.requires_grad == trains or not tensor.is_leaf:
        return
    if LEAF_OF not in tensor.__dict__:
        raise ShardConfigStateError(
            f"parameter {param.fqn}: was frozen when code kept its unsharded copy in a forward, and trains now, so "
            "the copy would get no gradient. Read the parameter from its module again after requires_grad_(True)"
        )
    tensor.requires_grad_(trains)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _leaf(weight: torch.Tensor, param: ShardedParam) -> torch.nn.Parameter:
    local = weight.data  # with a version counter of its own, which `Leaves.give_up` moves
    leaf = torch.nn.Parameter(param.parallel.around(local) if param.parallel else local, requires_grad=False)
    leaf.__dict__[LEAF_OF] = param.fqn
    return leaf


class Faces:
    """The faces of a bucket in all slots where it ever was, and which of them somebody keeps views of.

    Attributes:
        leaves: by slot, the leaves that were made there.
        in_use: the face that the running forward reads; if none runs, the one that the last forward read.
        lent: the faces of which somebody kept views after a forward.
        kept: whether user code may have kept unsharded parameters (`ShardedParam.kept`) after a forward.
    """

    def __init__(self, dtype: torch.dtype, layout: BucketLayout, params: Sequence[ShardedParam]) -> None:
        self._dtype, self._layout, self._params = dtype, layout, params
        self._of: dict[Slot, list[Face]] = {}
        self._begins: dict[Slot, int] = {}  # where each slot was when its faces were made
        self.leaves: dict[Slot, Leaves] = {}
        self.in_use: Face | None = None
        self.lent: list[Face] = []
        self.kept = any(param.kept for param in params)
        self._of_kept: dict[Slot, Face] = {}  # by slot, the face whose weights the kept ones are made to show
        self._hidden: list[torch.Tensor] = []  # what kept ones show while nothing is gathered
        self._counts: list[int] = []  # reference counts of the outputs of the last use, when they were installed
        self._dropped: list[weakref.ref[torch.Tensor]] = []  # views of leaves that the last forward was about to drop

    def enter(self, slot: Slot) -> Leaves | None:
        """The weights are about to be gathered into this slot; returns the leaves there, if any were made.

        If its memory has moved since (see `BufferPool.rest`), faces over the former memory are of no use any more.
        """
        if self._begins.get(slot) != slot.begin:
            self._begins[slot] = slot.begin
            for of_slots in (self._of, self._of_kept, self.leaves):
                of_slots.pop(slot, None)
        if self.kept:
            self._show_kept(slot)
        return self.leaves.get(slot)

    def _show_kept(self, slot: Slot) -> None:
        """Make all unsharded parameters that user code has kept show the weights in this slot."""
        if slot not in self._of_kept:
            self._of_kept[slot] = Face(slot, self._dtype, self._layout)
        self._point_kept_at(self._of_kept[slot].weights)
        if (leaves := self.leaves.get(slot)) is not None:
            leaves.show_weights()  # the use counts of the leaves' own face include the leaves
        for param in self._params:
            for copy in param.kept_ones():
                _follow(copy, param)

    def hide_kept(self, slot: Slot) -> None:
        """The slot is given back: fill the unsharded parameters that user code has kept with NaN."""
        if not self._hidden:
            face = self._of_kept.get(slot) or self.in_use  # those kept in this very use were not shown before
            assert face is not None
            self._hidden = list(map(_without_values, face.weights))
        self._point_kept_at(self._hidden)

    def _point_kept_at(self, weights: Sequence[torch.Tensor]) -> None:
        """Make the unsharded parameters that are still kept show these weights, by index."""
        self._forget_leaves_let_go()
        kept = [(index, tensor) for index, param in enumerate(self._params) for tensor in param.kept_ones()]
        with plainly():
            for index, tensor in kept:
                _local(tensor).data = weights[index]
        if not kept:
            self.kept = False
            self._of_kept.clear()

    def _forget_leaves_let_go(self) -> None:
        """The leaves of a slot live as long as the slot, so weak references do not tell that user code let them go."""
        for leaves in self.leaves.values():
            for param, leaf, held in zip(self._params, leaves.params, leaves.held(), strict=True):
                if not held:
                    param.forget_kept(leaf)

    def _keep(self, held: Iterable[tuple[int, torch.Tensor]]) -> None:
        """User code holds these unsharded parameters, by index, after their forward."""
        for index, tensor in held:
            self._params[index].note_kept(tensor)
            self.kept = True

    def idle(self, slot: Slot, for_use: bool = False) -> list[torch.Tensor]:
        """The weights of a face in this slot that has no outputs of a node and no kept views; made if there is none.

        Args:
            slot: where the weights lie.
            for_use: whether a forward that begins now will read this face.
        """
        faces = self._of.setdefault(slot, [])
        for face in faces:
            # Of outputs that live and die together the first one tells, unless it was kept and moved to another face.
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
        """The leaves in this slot, made at the first call; the forward that begins reads their face."""
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

    def begin_use(self, outputs: Sequence[torch.Tensor]) -> None:
        """A node was made over the face in use, and modules have its outputs installed."""
        if self.in_use is not None and not self.in_use.at_rest:
            self.in_use.note_shown()
        self._counts = list(map(getrefcount, outputs))

    def end_use(self, shown: Sequence[torch.Tensor], dropped: Sequence[torch.Tensor], leaves: Leaves | None) -> None:
        """A forward is over: note which weights user code will keep, and whether it will keep views.

        Args:
            shown: the outputs of the node, still installed; empty if modules have leaves.
            dropped: views that the caller is about to drop.
            leaves: the leaves in this slot, if any were made.
        """
        if shown and list(map(getrefcount, shown)) != self._counts:
            self.note_kept(shown)
        if self.in_use is not None and not self.in_use.is_at_rest():
            self._note_users(self.in_use, dropped, leaves)

    def note_kept(self, shown: Sequence[torch.Tensor]) -> None:
        """These outputs of a node, which are installed, are about to be replaced: note those that user code holds."""
        counts = list(map(getrefcount, shown))  # first, because `enumerate` holds references too
        self._keep(itertools.compress(enumerate(shown), map(gt, counts, self._counts)))

    def _note_users(self, face: Face, dropped: Sequence[torch.Tensor], leaves: Leaves | None) -> None:
        """Views of a face that a forward has read are alive: note whether they will stay; arguments as of `end_use`."""
        if face in self.lent:
            return
        views = {id(view): view for view in dropped if not isinstance(view, torch.nn.Parameter)}
        if face.is_kept(views.values()):
            self.lent.append(face)
        elif leaves is not None and face is leaves.face:
            self._dropped = list(map(weakref.ref, views.values()))

    def are_kept(self, leaves: Leaves | None) -> bool:
        """The weights are given up: returns whether somebody keeps views of them, or of the leaves over them."""
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
