"""The unsharded parameters as modules are given them: tensors to read, over slots, of which somebody may keep views."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

from .._memory.slots import Slot
from .._plan.layout import BucketLayout
from .._torch.core import alias, has_memory, plainly, storage_id, storage_uses
from .param import ShardedParam

LEAF_OF = "_unsharded_copy_of"  # marks a leaf, for whoever takes it for the parameter
_version = attrgetter("_version")


def _apart(slot: Slot, part: torch.Tensor) -> torch.Tensor:
    """A view of a slot that shares no storage with others of it, unless the slot's memory resizes."""
    return part.data if slot.resizes else alias(part)


class Face:
    """The unsharded parameters in one slot, to read, over storages of their own: so it is known who else reads there.

    Each has its own: operators such as `torch.cond` take no tensors that share one.

    Attributes:
        weights: the unsharded parameters, without autograd history.
        at_rest: how many tensors share each storage while only what a module is shown does; empty until that is made.
    """

    __slots__ = ("_alone", "_storages", "at_rest", "weights")

    def __init__(self, slot: Slot, dtype: torch.dtype, layout: BucketLayout) -> None:
        with plainly():
            flat = slot.typed(torch.uint8)  # bytes: not every dtype can be exchanged
            size = dtype.itemsize
            self.weights = [
                _apart(slot, flat[size * begin :][: size * at.numel]).view(dtype).view(at.shape)
                for begin, at in zip(layout.begins, layout.params, strict=True)
            ]
        # Memory that resizes is good for views at the next gather, too, wherever that is.
        self._storages = [] if slot.resizes else [storage_id(weight) for weight in self.weights if has_memory(weight)]
        self._alone = self._users()  # how many do while nobody uses the face
        self.at_rest: list[int] = []

    def _users(self) -> list[int]:
        """How many tensors share each storage now; those that are fake are not counted."""
        return list(map(storage_uses, self._storages))

    def note_shown(self) -> None:
        """All that a module is shown of it was made for the first time; there is one set of that at a time."""
        self.at_rest = self._users()

    def note_leaves(self) -> None:
        """Leaves were made over it, which stay."""
        self._alone = self.at_rest = self._users()

    @property
    def has_outputs(self) -> bool:
        """Whether a node shows it: its outputs come and go together, so one tells of all."""
        return bool(self._storages) and storage_uses(self._storages[0]) != self._alone[0]

    def is_used(self) -> bool:
        """Whether anybody uses it."""
        return self._users() != self._alone

    def is_at_rest(self) -> bool:
        """Whether nobody uses it but those to whom it is shown."""
        return list(map(storage_uses, self._storages)) == self.at_rest

    def is_kept(self, dropped: Iterable[torch.Tensor]) -> bool:
        """Whether others do than these views."""
        gone = Counter(map(storage_id, dropped))
        counts = zip(self._users(), self.at_rest, self._storages, strict=True)
        return any(now - gone[storage] > at_rest for now, at_rest, storage in counts)


class Leaves:
    """The unsharded parameters in one place as leaf Parameters, the same whenever they are there.

    Attributes:
        params: the leaves.
        versions: of each, as long as nobody has edited it since its weights were gathered.
        face: over which they lie, if they lie in a slot.
    """

    __slots__ = ("face", "params", "versions")

    def __init__(self, params: list[torch.nn.Parameter], face: Face | None = None) -> None:
        self.params = params
        self.face = face
        self.versions: list[int] = list(map(_version, params))

    def edited(self) -> set[int]:
        """Which were edited since."""
        versions = list(map(_version, self.params))
        if versions == self.versions:
            return set()
        return {index for index, version in enumerate(versions) if version != self.versions[index]}

    def give_up(self) -> None:
        """Have autograd refuse what it has saved of them outside of a forward, where no handle stands for it."""
        torch.autograd.graph.increment_version(self.params)
        self.versions = list(map(_version, self.params))


class Faces:
    """The faces of a bucket, in all slots where it ever was, and who keeps views of them.

    Attributes:
        leaves: by slot, where any were made.
        in_use: what the forward that runs now reads.
        lent: those of which somebody keeps views.
    """

    def __init__(self, dtype: torch.dtype, layout: BucketLayout) -> None:
        self._dtype, self._layout = dtype, layout
        self._of: dict[Slot, list[Face]] = {}
        self.leaves: dict[Slot, Leaves] = {}
        self.in_use: Face | None = None
        self.lent: list[Face] = []
        self._dropped: list[weakref.ref[torch.Tensor]] = []  # views that are about to go

    def idle(self, slot: Slot, for_use: bool = False) -> list[torch.Tensor]:
        """The weights of a face of which nobody has views, perhaps for a forward that begins."""
        faces = self._of.setdefault(slot, [])
        for face in faces:
            if not face.has_outputs and (face not in self.lent or not face.is_used()):
                break
        else:
            face = Face(slot, self._dtype, self._layout)
            faces.append(face)
        if for_use:
            self.in_use = face
            if self.lent and face in self.lent:
                self.lent.remove(face)
        return face.weights

    def use_leaves(self, slot: Slot, params: Sequence[ShardedParam]) -> Leaves:
        """The leaves for a forward, made if there are none."""
        leaves = self.leaves.get(slot)
        if leaves is None:
            with plainly():
                face = Face(slot, self._dtype, self._layout)
                # `.data` gives each a version counter of its own, which `release` moves.
                made = [
                    torch.nn.Parameter(p.parallel.wrap(w.data) if p.parallel else w.data, requires_grad=False)
                    for w, p in zip(face.weights, params, strict=True)
                ]
            for leaf, param in zip(made, params, strict=True):
                leaf.__dict__[LEAF_OF] = param.fqn
            face.note_leaves()
            leaves = self.leaves[slot] = Leaves(made, face)
        self.in_use = leaves.face
        return leaves

    def note_users(self, face: Face, dropped: Sequence[torch.Tensor], leaves: Leaves | None) -> None:
        """A forward that has read a face is over, and others have views of it: notice who keeps them."""
        if face in self.lent:
            return
        views = {id(view): view for view in dropped if not isinstance(view, torch.nn.Parameter)}
        if face.is_kept(views.values()):
            self.lent.append(face)
        elif leaves is not None and face is leaves.face:
            self._dropped = list(map(weakref.ref, views.values()))

    def are_kept(self, leaves: Leaves | None) -> bool:
        """The weights are given up: whether somebody keeps views of them, or of the leaves that lie there."""
        self.lent = [face for face in self.lent if face.is_used()]
        if leaves is None:
            return bool(self.lent)
        leaves.give_up()
        face, dropped, self._dropped = leaves.face, self._dropped, []
        assert face is not None
        if self.lent or face.is_at_rest():
            return bool(self.lent)
        return face.is_kept(view for ref in dropped if (view := ref()) is not None)

    def clear(self) -> None:
        """Hold no view of any slot."""
        self._of.clear()
        self.leaves.clear()
        self.in_use = None
