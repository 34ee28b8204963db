"""`in_backward`: an optimizer that steps each group as soon as its gradients are there, inside of backward."""

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

from .._errors import ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from .._graph.traced import TracedSteps
from .._module.state import states_below
from .._torch.distributed import local_tensor, sum_over_ranks
from .._torch.loss_scaling import in_scaled_backward, note_scaled_losses
from ._checks import IN_PARTS, check_steps_once, check_takes_parts, check_unchanged, title_of
from ._layout import most_bytes
from ._matrices import shard_of
from ._owned import Owned

Make = Callable[[list[nn.Parameter]], Optimizer]
GROUP, DELAYED = "group", "delayed"
_TINY = 1e-6  # as in `clip_grad_norm_`
_SCALED = (
    "in_backward: a GradScaler looks for infinities when all gradients are there, to leave a step out, and in_backward "
    "steps before that, with scaled gradients; train in bfloat16 without a scaler, or use an ordinary optimizer"
)


def in_backward(
    model: nn.Module,
    make: Make,
    *,
    max_norm: float | None = None,
    norm_of: str = GROUP,
    bucket_bytes: int | None = None,
) -> InBackward:
    """Step each group of parameters inside of backward, as soon as its gradients are reduced, and free these at once.

    So the gradients of all groups never exist together:

        optimizer = cs.optim.in_backward(model, lambda params: torch.optim.AdamW(params, lr=1e-3))
        for batch in batches:
            loss_of(model, batch).backward()  # steps
            optimizer.step()                  # ends the step: steps what no group has waited for
            scheduler.step()

    Weights are those of an ordinary step, to the bit, if nothing is clipped. A group is what one call of `fully_shard`
    has taken; parameters that no call has taken are a group each. With gradient synchronisation off nothing is reduced
    and nothing stepped: gradients of several micro-batches accumulate so, and the last backward steps. Where each
    micro-batch is reduced, run all but the last one under `optimizer.accumulating()`.

    Args:
        model: sharded or not.
        make: makes the optimizer of a list of parameters, or of param groups that it makes of these; called once, with
            all parameters of the model. It keeps its state by parameter.
        max_norm: gradients are scaled so that their norm, over all ranks, is at most this; None for no clipping.
        norm_of: which norm. ``"group"``: that of the gradients of each group. ``"delayed"``: that of all gradients of
            the step before, since that of this one is known only when all are gone; the first step is not clipped.
        bucket_bytes: so many bytes of gradients live at once on a rank, at most: a group that has more is stepped in
            parts. Default: those of the largest parameter, which is the least; 0 steps each parameter by itself. A
            group that is clipped by its own norm is stepped as a whole.

    Raises:
        ShardConfigTypeError: `make` makes no optimizer, or one that cannot step a group at a time, or shards: an
            Adafactor, a Rprop or a SparseAdam.
        ShardConfigValueError: an argument cannot be, or the optimizer does not take a parameter, which is named.
        ShardConfigStateError: raised in backward, before any weight is changed, if a `GradScaler` has scaled the loss.
    """
    return InBackward(model, make, max_norm=max_norm, norm_of=norm_of, bucket_bytes=bucket_bytes)


class _Unit:
    """A group of parameters that are stepped together, or in parts.

    Args:
        params: of the group.

    Attributes:
        waiting: those whose gradient is there.
        most: bytes of gradients that may wait.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.params = params
        self.waiting: dict[torch.Tensor, None] = {}
        self.most = math.inf
        self._seen: set[torch.Tensor] = set()  # those whose gradient has been there in this backward
        self._nbytes = 0  # of the gradients that wait
        self._sizes = {param: most_bytes(param) for param in params}

    @property
    def largest(self) -> int:
        """Bytes of the largest gradient, alike on all ranks."""
        return max(self._sizes.values(), default=0)

    def leave_room(self, bucket_bytes: int) -> None:
        """Let so few gradients wait that they and one more have this many bytes, at most."""
        self.most = max(bucket_bytes - self.largest, 0)

    def take(self, param: torch.Tensor) -> bool:
        """A gradient is there; returns whether those that wait are to be stepped now."""
        self.waiting[param] = None
        self._seen.add(param)
        self._nbytes += self._sizes[param]
        return self._nbytes > self.most or self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether all gradients have been there."""
        return len(self._seen) >= sum(map(_trains, self.params))

    def give(self) -> list[torch.Tensor]:
        """The parameters that wait and have a gradient; they wait no longer."""
        given = [param for param in self.waiting if param.grad is not None]
        self.waiting.clear()
        self._nbytes = 0
        return given

    def begin(self) -> None:
        """No more gradients will come in this backward."""
        self._seen.clear()


def _units_of(model: nn.Module, stepped: set[torch.Tensor]) -> list[_Unit]:
    """The groups of a model, and a unit for each parameter that is in none, as far as they are stepped.

    Beside sharded ones the latter is stepped behind backward: its gradient does not tell whether more micro-batches
    are to come.
    """
    groups = [[param.sharded for param in state.declaration.params] for state in states_below(model)]
    taken = {param for group in groups for param in group}
    groups += [[param] for param in model.parameters() if param not in taken]
    return [_Unit([param for param in group if param in stepped]) for group in groups]


def _leave_room(units: set[_Unit], bucket_bytes: int | None) -> None:
    if bucket_bytes is None:
        bucket_bytes = max([unit.largest for unit in units], default=0)
    for unit in units:
        unit.leave_room(bucket_bytes)


def _in_graphs(model: nn.Module, stepped: set[torch.Tensor]) -> TracedSteps:
    """Have graphs of the model step the groups of which all that train are stepped."""
    steps = TracedSteps(model)
    for state in states_below(model):
        if all(param.sharded in stepped for param in state.declaration.params if _trains(param.sharded)):
            steps.take(state.traced)
    return steps


def _trains(param: torch.Tensor) -> bool:
    return param.requires_grad


def _sharded_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that are sharded; all, if none is."""
    return [param for param in params if isinstance(param, DTensor)] or list(params)


class InBackward(Optimizer):
    """What `in_backward` makes. Its state, param groups and state dict are those of the one optimizer of `make`.

    Attributes:
        last_norm: of all gradients of the last step, over all ranks, before they were clipped; 0-dim. None before the
            first step, and without ``norm_of="delayed"``.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Make,
        *,
        max_norm: float | None = None,
        norm_of: str = GROUP,
        bucket_bytes: int | None = None,
    ) -> None:
        _check_arguments(max_norm, norm_of, bucket_bytes)
        self._max_norm, self._delays = max_norm, norm_of == DELAYED
        self.last_norm: torch.Tensor | None = None
        self._norms = _Norms()
        self._inner = _made(make, model)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.state = self._inner.state
        self._names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
        self._accumulates = False
        self._open: _Unit | None = None  # in which a gradient has come last
        stepped = {param for group in self.param_groups for param in group["params"]}
        self._units = {param: unit for unit in _units_of(model, stepped) for param in unit.params}
        if max_norm is None or self._delays:
            _leave_room({*self._units.values()}, bucket_bytes)
        self._in_graphs = _in_graphs(model, stepped)
        note_scaled_losses()
        hooked = list(filter(_trains, _sharded_of(self._units)))
        self._handles = [param.register_post_accumulate_grad_hook(self._arrived) for param in hooked]  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        raise ShardConfigStateError(
            "an optimizer of `in_backward` is hooked to its model and cannot be copied or pickled; make another one, "
            "and load what its state_dict gives"
        )

    # ---- inside of backward

    def _arrived(self, param: torch.Tensor) -> None:
        """The gradient of a parameter is there."""
        if param.grad is None:
            return
        if in_scaled_backward():  # also where it only accumulates: later steps would be of a sum with scaled gradients
            raise ShardConfigStateError(_SCALED)
        if self._accumulates:
            return
        unit = self._units[param]
        if self._open is not None and self._open is not unit:
            self._close(self._open)  # it lacks gradients that will not come
        self._open = unit
        if unit.take(param):
            self._flush(unit)
            if unit.is_complete:
                self._close(unit)

    def _close(self, unit: _Unit) -> None:
        """Step what still waits in a group that is over."""
        self._open = None
        self._flush(unit)
        unit.begin()

    def _flush(self, unit: _Unit) -> None:
        """Step what has a gradient in a group, and free it."""
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
        except Exception as error:
            names = ", ".join(self._names.get(param, "another one") for param in params)
            error.add_note(f"in_backward: {title_of(self._inner)} has raised it in the step of {names}")
            raise
        for group, given in zip(groups, options, strict=True):
            check_unchanged(self._inner, group, given, self._names.get(params[0], "of the model"))
        self._inner.zero_grad()

    def _clip(self, params: Sequence[torch.Tensor]) -> None:
        if self._max_norm is None:
            return
        if not self._delays:
            norms = _Norms()
            norms.add(params)
            _scale(params, self._max_norm, norms.total())
            return
        self._norms.add(params)
        if self.last_norm is not None:
            _scale(params, self._max_norm, self.last_norm)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """In this context a backward adds to gradients and steps nothing."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def remove_hooks(self) -> None:
        """From now on backward steps nothing, and `step` does what that of any optimizer does."""
        for handle in self._handles:
            handle.remove()
        self._in_graphs.let_go()

    # ---- behind backward

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End a step: step what has a gradient still, and with ``norm_of="delayed"`` sum up the norm over ranks.

        Args:
            closure: runs the backward that steps; it is called once.

        Returns:
            what the closure has returned.
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
        """Take a param group of `make`; no other one can be added.

        Raises:
            ShardConfigStateError: it is another one.
        """
        if "_units" in self.__dict__:
            raise ShardConfigStateError(
                "in_backward: its groups are those of `make`; make another optimizer for parameters that come later"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As that of the optimizer of `make`."""
        super().load_state_dict(state_dict)
        self._inner.__setstate__({"state": self.state, "param_groups": [*self.param_groups]})

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `GradScaler.step` asks first.

        Raises:
            ShardConfigStateError: always.
        """
        raise ShardConfigStateError(_SCALED)


class _Norms:
    """Squares of gradients, summed up by the ranks over which they are cut."""

    def __init__(self) -> None:
        self._squares: dict[tuple[DeviceMesh | None, tuple[int, ...]], torch.Tensor] = {}

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Take in the gradients of some parameters."""
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
        """The norm of all of them, 0-dim. A collective, in one order on all ranks."""
        total = torch.zeros(())
        for (mesh, axes), squares in self._squares.items():
            for axis in axes:
                assert mesh is not None
                squares = sum_over_ranks(squares, mesh.get_group(axis))
            total = total.to(squares.device) + squares
        return total.sqrt()


def _scale(params: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients as those whose norm is `norm` have to be."""
    factor = (max_norm / (norm + _TINY)).clamp(max=1.0)
    gradients = [shard_of(param.grad) for param in params if param.grad is not None]
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))


def _check_arguments(max_norm: float | None, norm_of: str, bucket_bytes: int | None) -> None:
    if max_norm is not None and not max_norm > 0:
        raise ShardConfigValueError(f"max_norm: must be positive, or None for no clipping; got {max_norm!r}")
    if norm_of not in (GROUP, DELAYED):
        raise ShardConfigValueError(f"norm_of: must be {GROUP!r} or {DELAYED!r}, got {norm_of!r}")
    if bucket_bytes is not None and not bucket_bytes >= 0:
        raise ShardConfigValueError(
            f"bucket_bytes: must be a number of bytes, 0 or more, or None; got {bucket_bytes!r}"
        )


def _made(make: Make, model: nn.Module) -> Optimizer:
    """The optimizer of all parameters.

    Raises:
        ShardConfigTypeError: it is none, or cannot step a group at a time.
    """
    try:
        made = make(list(model.parameters()))
    except ValueError as error:
        name = _first_refused(make, model, str(error))
        if name is None:
            raise
        raise ShardConfigValueError(
            f"parameter {name}: the optimizer of `make` does not take it, but does take others: {error}; step it with "
            "an optimizer of its own"
        ) from error
    if not isinstance(made, Optimizer):
        raise ShardConfigTypeError(f"make: must make a torch.optim.Optimizer, and has made {title_of(made)}")
    if isinstance(made, Owned):
        raise ShardConfigTypeError(
            "make: `owned` steps when all gradients are there, to send those of several groups together; use it alone"
        )
    check_steps_once("make", made)
    stepped = {param for group in made.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        if param in stepped:
            check_takes_parts(name, param, made)
    IN_PARTS.add(made)
    return made


def _first_refused(make: Make, model: nn.Module, why: str) -> str | None:
    """The first parameter that an optimizer refuses by the error `why`; None where it refuses none or all."""
    refused = []
    for name, param in model.named_parameters():
        try:
            make([param])
        except ValueError as error:
            refused += [name] if str(error) == why else []
    takes_some = 0 < len(refused) < len(list(model.parameters()))
    return refused[0] if takes_some else None
