"""Where receivers put new weights: first in memory of their own, and in the tensors when a version is complete."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._comm.shardings import own_regions
from .._module.state_dict import states_with_parameters_in
from .._plan.boxes import Box
from .._plan.text import first_names
from ..checkpoint._full.tensors import Holdings
from ..errors import ShardConfigTypeError, ShardConfigValueError, StaleStateError
from ._describe import local_tensors
from ._layout import LocalTensor, Piece, WeightLayout, shown
from ._plan import Plan


class InPlace:
    """Tensors that are overwritten when a version is complete.

    Args:
        into: the model with these tensors; None if there is none.
        tensors: the tensors by name.
        staging: device of new weights until then. None for that of the tensors.
    """

    def __init__(
        self, into: nn.Module | None, tensors: dict[str, torch.Tensor], staging: torch.device | str | None = None
    ) -> None:
        self._model, self._staging = into, staging
        self.tensors = tensors

    @property
    def version(self) -> int:
        """Version of the tensors; -1 because they do not have one."""
        return -1

    def staged(self, new: Collection[str]) -> dict[str, torch.Tensor]:
        """Memory for the new weights: only for tensors with a part that is new."""
        return {name: torch.empty_like(self.tensors[name], device=self._staging) for name in new}

    def before_switch(self) -> None:
        """Prepare for a switch. It may fail here, but not later."""
        for state in states_with_parameters_in(self._model) if self._model is not None else ():
            state.before_load()

    def switch(self, version: int, staged: dict[str, torch.Tensor]) -> None:
        """Make the new weights current."""
        are_inference = any(each.is_inference() for each in self.tensors.values())
        with torch.inference_mode() if are_inference else torch.no_grad():
            if staged:
                torch._foreach_copy_([self.tensors[name] for name in staged], [*staged.values()])


class Versions:
    """Two sets of tensors, of which one is current. A switch to the other one is a single assignment.

    Code in another thread that reads `current` therefore gets either all old weights or all new ones. These tensors
    keep their values until the second update after that begins.

    Args:
        tensors: the tensors, by the names in the target layout. They hold every other version. The first update
            allocates the other set.

    Attributes:
        current: version and tensors of the current weights. The version is -1 before the first update.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.current: tuple[int, dict[str, torch.Tensor]] = (-1, {**tensors})
        self._other: dict[str, torch.Tensor] | None = None

    @property
    def version(self) -> int:
        """The current version."""
        return self.current[0]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The current tensors."""
        return self.current[1]

    def staged(self, new: Collection[str]) -> dict[str, torch.Tensor]:
        """Memory for the new weights: for all tensors, because the other set has an older version."""
        if self._other is None:
            self._other = {name: torch.empty_like(tensor) for name, tensor in self.tensors.items()}
        return self._other

    def before_switch(self) -> None:
        """Nothing to prepare."""

    def switch(self, version: int, staged: dict[str, torch.Tensor]) -> None:
        """Make the new weights current."""
        self._other = self.current[1]
        self.current = version, staged


Into = nn.Module | Mapping[str, torch.Tensor] | Versions
Target = InPlace | Versions


def target_of(into: Into, plan: Plan, rank: int, staging: torch.device | str | None) -> Target:
    """Where a receiver puts new weights.

    Args:
        into: the tensors.
        plan: the plan.
        rank: this rank in it.
        staging: see `InPlace`.

    Raises:
        StaleStateError: the tensors do not match the plan.
        ShardConfigValueError: they cannot be written to, or `staging` is passed with `Versions`.
        ShardConfigTypeError: see `tensors_of`.
    """
    if isinstance(into, Versions):
        if staging is not None:
            raise ShardConfigValueError("staging: Versions have two sets of tensors on one device; omit it")
        given: Given = into.tensors
    else:
        given = Holdings(into) if isinstance(into, nn.Module) else into
    tensors = tensors_of(given, plan.target, rank, "the target layout")
    problems = [*_read_only(tensors, plan.target.ranks[rank], plan.source.ties)]
    if isinstance(given, Holdings):
        problems += [_MADE.format(name) for name in tensors if given.tensors[name].is_made]
    if problems:
        raise ShardConfigValueError(f"into: {first_names(problems, 5)}")
    return (
        into if isinstance(into, Versions) else InPlace(into if isinstance(into, nn.Module) else None, tensors, staging)
    )


_MADE = (
    "{}: a hook of the state dict or get_extra_state has made it, so the model would not get the values; receive into "
    "tensors of your own, and call load_state_dict"
)


def _read_only(
    tensors: Mapping[str, torch.Tensor], held: Mapping[str, LocalTensor], ties: Mapping[str, str]
) -> Iterator[str]:
    """Tensors that cannot have the values of the layout, because elements share memory."""
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            yield f"{name}: several of its elements have one place in memory (strides {tensor.stride()}); clone it"
        if tensor.numel():
            other = seen.setdefault((tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()), name)
            if _parts(held[name], ties) != _parts(held[other], ties):
                yield f"{name}: has the memory of {other}, but other weights; clone it"


def _parts(local: LocalTensor, ties: Mapping[str, str]) -> list[Piece]:
    return sorted(piece._replace(name=ties.get(piece.name, piece.name)) for piece in local.pieces)


Given = Holdings | Mapping[str, torch.Tensor]


def tensors_of(given: Given, layout: WeightLayout, rank: int, what: str) -> dict[str, torch.Tensor]:
    """This rank's tensors by name, checked against a layout.

    Raises:
        StaleStateError: they do not match it.
        ShardConfigTypeError: a mapping has a DTensor.
    """
    held = layout.ranks[rank]
    if isinstance(given, Holdings):
        own = {name: given.tensors[name].tensor for name in held if name in given.tensors}
        tensors = local_tensors(given, [*own])
        problems = [*_misplaced(own, layout, held)]
    else:
        tensors, problems = {name: given[name] for name in held if name in given}, []
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                raise ShardConfigTypeError(f"{name}: is a DTensor; pass the model, or the local tensor (to_local())")
    _check(tensors, held, problems, what)
    return tensors


def _misplaced(
    tensors: Mapping[str, torch.Tensor], layout: WeightLayout, held: Mapping[str, LocalTensor]
) -> Iterator[str]:
    """Shards of a model that are other parts of their tensors than in the layout, but may have the same shape."""
    for name, tensor in tensors.items():
        pieces = held[name].pieces
        if isinstance(tensor, DTensor) and _are_of_one(pieces, tuple(tensor.shape), layout):
            own = {(box, at) for box, at in own_regions(tensor) if box.numel}
            if own != {(piece.box, piece.at) for piece in pieces}:
                yield (
                    f"{name} is {_shown(box for box, _ in own)} of the full tensor on this rank, and was "
                    f"{_shown(piece.box for piece in pieces)} (a layout with other numbers of ranks?)"
                )


def _are_of_one(pieces: Sequence[Piece], shape: tuple[int, ...], layout: WeightLayout) -> bool:
    """Whether pieces are parts of one full tensor of this shape. Otherwise, placements do not describe them."""
    infos = [layout.tensors.get(name) for name in {piece.name for piece in pieces}]
    return len(infos) == 1 and infos[0] is not None and infos[0].shape == shape


def _shown(boxes: Iterable[Box]) -> str:
    return ", ".join(map(shown, sorted(boxes)))


def _check(
    tensors: Mapping[str, torch.Tensor], held: Mapping[str, LocalTensor], problems: list[str], what: str
) -> None:
    """Check names, shapes and dtypes of this rank's tensors.

    Raises:
        StaleStateError: they do not match the layout, or there are other problems.
    """
    for name, local in held.items():
        tensor = tensors.get(name)
        if tensor is None:
            problems.append(f"{name} is missing")
        elif (tuple(tensor.shape), tensor.dtype) != (local.shape, local.dtype):
            problems.append(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on this rank, and was {local.dtype} {local.shape}"
            )
    if problems:
        raise StaleStateError(
            f"the tensors do not match {what} in the plan: {first_names(problems, 5)}. Make a new plan"
        )
