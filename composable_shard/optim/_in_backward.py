"""`in_backward`: an optimizer that steps each group inside of backward, as soon as its gradients are reduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.optim import Optimizer

from .._graph.traced import TracedSteps
from .._module.state import states_below
from .._torch.capturing import capture_number
from .._torch.distributed import local_part, local_tensor, sum_over_ranks
from .._torch.loss_scaling import in_scaled_backward, note_scaled_losses
from ..errors import ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from ._checks import IN_PARTS, check_steps_once, check_takes_parts, check_unchanged, title_of
from ._layout import most_bytes
from ._matrices import shard_of
from ._owned import Owned

Make = Callable[[list[nn.Parameter]], Optimizer]
GROUP, DELAYED = "group", "delayed"
_TINY = 1e-6  # as in `clip_grad_norm_`
_SCALED = (
    "in_backward: a GradScaler checks all gradients for infinities before the step, to skip it, but in_backward steps "
    "before that, with scaled gradients; train in bfloat16 without a scaler, or use an ordinary optimizer"
)


def in_backward(model: nn.Module, make: Make, *, max_norm: float | None = None, norm_of: str = GROUP) -> InBackward:
    """Step each parameter group inside of backward as soon as its gradients are reduced, and free them immediately.

    The gradients of all groups therefore never exist at the same time:

        optimizer = cs.optim.in_backward(model, lambda params: torch.optim.AdamW(params, lr=1e-3))
        for batch in batches:
            loss_of(model, batch).backward()  # steps the groups
            optimizer.step()                  # ends the optimizer step: steps the remaining gradients
            scheduler.step()

    Without clipping, weights are bitwise identical to those of an ordinary step. The parameters of one `fully_shard`
    call are a group. Each parameter without such a call is a group of its own. A group is stepped in parts, so that the
    gradients that exist at the same time on a rank have at most the bytes of the largest parameter. A group that is
    clipped by its own norm is stepped as a whole.

    Gradient accumulation works in two ways. If gradient synchronization is off, nothing is reduced or stepped: the
    gradients of microbatches accumulate, and the last backward steps. If every microbatch is reduced, run all
    microbatches except the last one in `optimizer.accumulating()`.

    Args:
        model: sharded or unsharded model.
        make: makes the optimizer from a list of parameters, which it may split into param groups. Called once, with all
            parameters of the model. The optimizer must store its state by parameter.
        max_norm: maximum norm of the gradients over all ranks. Larger gradients are scaled. None for no clipping.
        norm_of: gradients of the norm. ``"group"``: the gradients of each group. ``"delayed"``: all gradients of the
            previous step, because the norm of this step is known only after all its gradients are freed. The first step
            is then not clipped.

    Raises:
        ShardConfigTypeError: `make` does not return an optimizer, or returns one that cannot step a group at a time or
            cannot step shards: Adafactor, Rprop or SparseAdam.
        ShardConfigValueError: an argument is invalid, or the optimizer does not accept a parameter. The message names
            it.
        ShardConfigStateError: a `GradScaler` has scaled the loss. Raised in backward, before any weight changes.
    """
    return InBackward(model, make, max_norm=max_norm, norm_of=norm_of)


class _Unit:
    """A group of parameters that are stepped together, or in parts.

    Args:
        params: parameters of the group.

    Attributes:
        waiting: parameters whose gradient is ready, but not stepped.
        most: maximum bytes of the gradients of `waiting`.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.params = params
        self.waiting: dict[torch.Tensor, None] = {}
        self.most = math.inf
        self._seen: set[torch.Tensor] = set()  # parameters whose gradient was ready in this backward
        self._nbytes = 0  # bytes of the gradients of `waiting`
        self._sizes = {param: most_bytes(param) for param in params}

    @property
    def largest(self) -> int:
        """Bytes of the largest gradient, equal on all ranks."""
        return max(self._sizes.values(), default=0)

    def limit(self, most: int) -> None:
        """Set the maximum bytes of the waiting gradients."""
        self.most = most

    def take(self, param: torch.Tensor) -> bool:
        """Record a ready gradient. Returns whether the waiting gradients must be stepped now."""
        self.waiting[param] = None
        self._seen.add(param)
        self._nbytes += self._sizes[param]
        return self._nbytes > self.most or self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether all gradients were ready in this backward."""
        return len(self._seen) >= sum(map(_trains, self.params))

    def give(self) -> list[torch.Tensor]:
        """Return the waiting parameters that have a gradient, and clear `waiting`."""
        given = [param for param in self.waiting if param.grad is not None]
        self.waiting.clear()
        self._nbytes = 0
        return given

    def begin(self) -> None:
        """Prepare for the next backward, after the last gradient of this one."""
        self._seen.clear()


def _units_of(model: nn.Module, stepped: set[torch.Tensor]) -> list[_Unit]:
    """A unit for each group of a model and for each parameter without a group, with the parameters that are stepped.

    If other parameters are sharded, a parameter without a group is stepped after backward, because its gradient does
    not show whether more microbatches follow.
    """
    groups = [[param.sharded for param in state.declaration.params] for state in states_below(model)]
    taken = {param for group in groups for param in group}
    groups += [[param] for param in model.parameters() if param not in taken]
    return [_Unit([param for param in group if param in stepped]) for group in groups]


def _leave_room(units: set[_Unit]) -> None:
    """Limit the waiting gradients so that they and one more gradient have at most the bytes of the largest one."""
    largest = max([unit.largest for unit in units], default=0)
    for unit in units:
        unit.limit(largest - unit.largest)


def _in_graphs(model: nn.Module, stepped: set[torch.Tensor]) -> TracedSteps:
    """Let compiled graphs of the model step the groups whose trained parameters are all in `stepped`."""
    steps = TracedSteps(model)
    for state in states_below(model):
        if all(param.sharded in stepped for param in state.declaration.params if _trains(param.sharded)):
            steps.take(state.traced)
    return steps


def _trains(param: torch.Tensor) -> bool:
    return param.requires_grad


def _sharded_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The sharded parameters, or all parameters if none is sharded."""
    return [param for param in params if isinstance(param, DTensor)] or list(params)


class InBackward(Optimizer):
    """The optimizer that `in_backward` returns. Its state, param groups and state dict are those of `make`'s optimizer.

    Attributes:
        last_norm: norm of all gradients of the last step over all ranks, before clipping; 0-dim tensor. None before the
            first step, and without ``norm_of="delayed"``.
    """

    def __init__(self, model: nn.Module, make: Make, *, max_norm: float | None = None, norm_of: str = GROUP) -> None:
        _check_arguments(max_norm, norm_of)
        self._max_norm, self._delays = max_norm, norm_of == DELAYED
        self.last_norm: torch.Tensor | None = None
        self._norms = _Norms()
        self._inner = _made(make, model)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.state = self._inner.state
        self._names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
        self._accumulates = False
        self._open: _Unit | None = None  # the unit of the last gradient
        stepped = {param for group in self.param_groups for param in group["params"]}
        self._units = {param: unit for unit in _units_of(model, stepped) for param in unit.params}
        if max_norm is None or self._delays:
            _leave_room({*self._units.values()})
        self._in_graphs = _in_graphs(model, stepped)
        note_scaled_losses()
        hooked = list(filter(_trains, _sharded_of(self._units)))
        self._handles = [param.register_post_accumulate_grad_hook(self._arrived) for param in hooked]  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        raise ShardConfigStateError(
            "an optimizer of `in_backward` has hooks on its model and cannot be copied or pickled; make another one, "
            "and load its state_dict"
        )

    # ---- inside of backward

    def _arrived(self, param: torch.Tensor) -> None:
        """Handle a ready gradient of a parameter."""
        if param.grad is None:
            return
        if in_scaled_backward():  # even if it only accumulates, because a later step would use the scaled gradients
            raise ShardConfigStateError(_SCALED)
        if self._accumulates:
            return
        unit = self._units[param]
        if self._open is not None and self._open is not unit:
            self._close(self._open)  # its missing gradients will not be computed in this backward
        self._open = unit
        if unit.take(param):
            self._flush(unit)
            if unit.is_complete:
                self._close(unit)

    def _close(self, unit: _Unit) -> None:
        """Step the waiting gradients of a group that gets no more gradients."""
        self._open = None
        self._flush(unit)
        unit.begin()

    def _flush(self, unit: _Unit) -> None:
        """Step the waiting parameters of a group, and free their gradients."""
        if params := unit.give():
            self._step_some(params)

    @torch.no_grad()
    def _step_some(self, params: Sequence[torch.Tensor]) -> None:
        self._clip(params)
        wanted = set(params)
        options = [{**group, "params": None} for group in self.param_groups]
        groups = [
            {**group, "params": [param for param in group["params"] if param in wanted]} for group in self.param_groups
        ]
        self._inner.param_groups[:] = groups
        try:
            self._inner.step()
            self._inner.zero_grad()
        except Exception as error:
            names = ", ".join(self._names.get(param, "another one") for param in params)
            error.add_note(f"in_backward: {title_of(self._inner)} raised this error in the step of {names}")
            raise
        finally:
            self._inner.param_groups[:] = self.param_groups  # a captured step notices if their settings change
        for group, given in zip(groups, options, strict=True):
            check_unchanged(self._inner, group, given, self._names.get(params[0], "of the model"))

    def _clip(self, params: Sequence[torch.Tensor]) -> None:
        if self._max_norm is None:
            return
        if not self._delays:
            norms = _Norms()
            norms.add(params)
            _scale(params, self._max_norm, norms.total())
            return
        if capture_number(local_part(params[0]).device):  # a graph would always read the norm from before the capture
            raise ShardConfigStateError(
                "in_backward: a backward with norm_of='delayed' cannot be captured in a CUDA graph: it clips by "
                "the norm of the previous step; use norm_of='group'"
            )
        self._norms.add(params)
        if self.last_norm is not None:
            _scale(params, self._max_norm, self.last_norm)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside the context, backward accumulates gradients and steps nothing."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def remove_hooks(self) -> None:
        """Remove the hooks: backward then steps nothing, and `step` steps all parameters like any optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._in_graphs.let_go()

    def decision(self) -> tuple[bool, bool]:
        """Whether backward steps at all, and whether it only accumulates now."""
        return bool(self._handles), self._accumulates

    # ---- after backward

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End a step: step the remaining gradients. With ``norm_of="delayed"``, also sum the norm over ranks.

        Args:
            closure: runs the backward that steps. Called once.

        Returns:
            The result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._open = None
        for unit in dict.fromkeys(self._units.values()):
            unit.waiting.update(dict.fromkeys(unit.params))
            self._close(unit)
        if self._max_norm is not None and self._delays:
            self.last_norm, self._norms = self._norms.total(), _Norms()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group of `make`'s optimizer. Other groups cannot be added.

        Raises:
            ShardConfigStateError: the optimizer is already constructed.
        """
        if "_units" in self.__dict__:
            raise ShardConfigStateError(
                "in_backward: its groups are those of `make`; make another optimizer for new parameters"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of `make`'s optimizer."""
        super().load_state_dict(state_dict)
        self._inner.__setstate__({"state": self.state, "param_groups": [*self.param_groups]})

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse a `GradScaler`, whose `step` reads this attribute first.

        Raises:
            ShardConfigStateError: always.
        """
        raise ShardConfigStateError(_SCALED)


class _Norms:
    """Sums of squared gradients, by the mesh axes over which the gradients are sharded."""

    def __init__(self) -> None:
        self._squares: dict[tuple[DeviceMesh | None, tuple[int, ...]], torch.Tensor] = {}

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Add the gradients of parameters."""
        for param in params:
            gradient = param.grad
            assert gradient is not None
            key: tuple[DeviceMesh | None, tuple[int, ...]] = (None, ())
            if isinstance(gradient, DTensor):
                placements = gradient.placements
                cuts = [axis for axis, placed in enumerate(placements) if not isinstance(placed, Replicate)]
                key, gradient = (gradient.device_mesh, tuple(cuts)), local_tensor(gradient)
            square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
            self._squares[key] = self._squares[key] + square if key in self._squares else square

    def total(self) -> torch.Tensor:
        """The norm of all added gradients, a 0-dim tensor. A collective, in the same order on all ranks."""
        total = torch.zeros(())
        for (mesh, axes), squares in self._squares.items():
            for axis in axes:
                assert mesh is not None
                squares = sum_over_ranks(squares, mesh.get_group(axis))
            total = total.to(squares.device) + squares
        return total.sqrt()


def _scale(params: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Clip gradients to `max_norm`, given their norm."""
    factor = (max_norm / (norm + _TINY)).clamp(max=1.0)
    gradients = [shard_of(param.grad) for param in params if param.grad is not None]
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))


def _check_arguments(max_norm: float | None, norm_of: str) -> None:
    if max_norm is not None and not max_norm > 0:
        raise ShardConfigValueError(f"max_norm: must be positive, or None for no clipping; got {max_norm!r}")
    if norm_of not in (GROUP, DELAYED):
        raise ShardConfigValueError(f"norm_of: must be {GROUP!r} or {DELAYED!r}, got {norm_of!r}")


def _made(make: Make, model: nn.Module) -> Optimizer:
    """Make the optimizer of all parameters, and check it.

    Raises:
        ShardConfigTypeError: it is not an optimizer, or cannot step a group at a time.
        ShardConfigValueError: it does not accept a parameter.
    """
    try:
        made = make(list(model.parameters()))
    except ValueError as error:
        name = _first_refused(make, model, str(error))
        if name is None:
            raise
        raise ShardConfigValueError(
            f"parameter {name}: the optimizer of `make` does not accept it, but accepts others: {error}; use a "
            "separate optimizer for it"
        ) from error
    if not isinstance(made, Optimizer):
        raise ShardConfigTypeError(f"make: must return a torch.optim.Optimizer, but returned {title_of(made)}")
    if isinstance(made, Owned):
        raise ShardConfigTypeError(
            "make: `owned` steps when all gradients are ready, to send those of several groups together; use it "
            "without in_backward"
        )
    check_steps_once("make", made)
    stepped = {param for group in made.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        if param in stepped:
            check_takes_parts(name, param, made)
    IN_PARTS.add(made)
    return made


def _first_refused(make: Make, model: nn.Module, why: str) -> str | None:
    """The first parameter that an optimizer rejects with the error `why`; None if it rejects none or all."""
    refused = []
    for name, param in model.named_parameters():
        try:
            make([param])
        except ValueError as error:
            refused += [name] if str(error) == why else []
    takes_some = 0 < len(refused) < len(list(model.parameters()))
    return refused[0] if takes_some else None
