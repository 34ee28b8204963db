"""Where receivers put new weights: first in memory of their own, and in the tensors when a version is complete."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from .._module.state_dict import states_with_parameters_in
from .._plan.text import first_names
from ..checkpoint._full.tensors import Holdings
from ..errors import StaleStateError
from ._describe import local_tensors
from ._layout import LocalTensor


class InPlace:
    """Tensors that are overwritten when a version is complete.

    Args:
        into: the tensors by name, or a model with these names in its state dict.
        held: the tensors that the plan expects.
        staging: device of new weights until then. None for that of the tensors.
    """

    def __init__(
        self,
        into: nn.Module | Mapping[str, torch.Tensor],
        held: Mapping[str, LocalTensor],
        staging: torch.device | str | None = None,
    ) -> None:
        self._staging = staging
        self._model = into if isinstance(into, nn.Module) else None
        self.tensors = tensors_of(into, held, "the target layout")

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

    So code in another thread that reads `current` sees either all old weights or all new ones. The tensors that it got
    keep their values until the second update after that begins.

    Args:
        tensors: the tensors, by the names in the target layout. They are used for every other version.

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


def target_of(into: Into, held: Mapping[str, LocalTensor], staging: torch.device | str | None) -> Target:
    """Where a receiver puts new weights.

    Raises:
        StaleStateError: the tensors do not match the plan.
    """
    if not isinstance(into, Versions):
        return InPlace(into, held, staging)
    check(into.tensors, held, "the target layout")
    return into


def tensors_of(
    given: nn.Module | Mapping[str, torch.Tensor], held: Mapping[str, LocalTensor], what: str
) -> dict[str, torch.Tensor]:
    """This rank's tensors by name, checked against a layout.

    Raises:
        StaleStateError: they do not match it.
    """
    if isinstance(given, nn.Module):
        holdings = Holdings(given)
        tensors = local_tensors(holdings, [name for name in held if name in holdings.tensors])
    else:
        tensors = {name: given[name] for name in held if name in given}
    check(tensors, held, what)
    return tensors


def check(tensors: Mapping[str, torch.Tensor], held: Mapping[str, LocalTensor], what: str) -> None:
    """Check names, shapes and dtypes of this rank's tensors.

    Raises:
        StaleStateError: they do not match the layout.
    """
    problems = []
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
