"""`log_to`: log figures of each step to TensorBoard, Weights & Biases, Lightning, a JSON Lines file, or a function.

None of these packages is imported: a logger is recognized by its methods.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import call
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._group.optimizers import watch_steps
from .._module.gradients import watch_clipping
from .._module.state import ShardState
from .._module.status import figures_of, sharded_states
from .._plan.plan import ShardPlan
from .._policies import require_count
from .._torch.distributed import public_all_gather
from ..errors import ShardConfigTypeError, ShardConfigValueError

Number = float | torch.Tensor
Figures = dict[str, float]
Write = Callable[[Figures, int], object]
OVER_RANKS = ("max", "mean")
_RATE = "step/tokens_per_second"  # the sum over ranks, if figures are combined over ranks
_SLOTS = 64  # ranks exchange a multiple of this number of figures, so that ranks with different figures do not hang
clock: Callable[[], float] = time.perf_counter


# ---- types of loggers


class _Sink(NamedTuple):
    """A logger in a uniform form: its name for messages, a function that writes, and one to call at the end."""

    name: str
    write: Write
    close: Callable[[], object]


def _nothing() -> None:
    """Do nothing: a logger that the user has opened stays open."""


def _scalars(writer: Any, figures: Figures, step: int) -> None:
    for name, value in figures.items():
        writer.add_scalar(name, value, step)


def _lines(file: Any, figures: Figures, step: int) -> None:
    """Write one line of JSON. NaN and infinities become null, because JSON does not have them."""
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    file.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
    file.flush()


def _keywords(method: Callable[..., object], figures: Figures, step: int) -> None:
    method(figures, step=step)


def _sentence(logger: logging.Logger, figures: Figures, step: int) -> None:
    logger.info("step %d: %s", step, ", ".join(f"{name} {value:.6g}" for name, value in figures.items()))


_METHODS: dict[str, Callable[[Any], Write]] = {
    "log_metrics": lambda logger: partial(_keywords, logger.log_metrics),  # Lightning, MLflow, Comet
    "add_scalar": lambda logger: partial(_scalars, logger),  # TensorBoard
    "log": lambda logger: partial(_keywords, logger.log),  # a run of Weights & Biases
    "write": lambda logger: partial(_lines, logger),  # a file
}


def _sink(logger: Any) -> _Sink:
    """Make a sink for a logger.

    Raises:
        ShardConfigTypeError: the logger has an unknown type.
    """
    if isinstance(logger, (str, os.PathLike)):
        path = Path(logger)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
        return _Sink(str(path), partial(_lines, file), file.close)
    name = type(logger).__qualname__
    if isinstance(logger, logging.Logger):
        return _Sink(f"{name} {logger.name}", partial(_sentence, logger), _nothing)
    for method, writing in _METHODS.items():
        if callable(getattr(logger, method, None)):
            return _Sink(name, writing(logger), _nothing)
    if callable(logger):
        return _Sink(getattr(logger, "__qualname__", name), logger, _nothing)
    raise ShardConfigTypeError(
        f"logger: expected a path, a file, a function of (figures, step), or an object with {', '.join(_METHODS)}; got "
        f"{name}"
    )


# ---- watching the model


class _Seen:
    """Watches the optimizer steps and the gradient norms of a model. It does not keep the model alive.

    Attributes:
        norm: the result of `clip_grad_norm_` since the last `take`; None if it was not called.
    """

    def __init__(self, model: nn.Module) -> None:
        self._states = [weakref.ref(state) for state in sharded_states(model)]
        self._stepped = False
        self.norm: torch.Tensor | None = None
        self._predicted: tuple[ShardPlan | None, Figures] = None, {}
        watch_steps(self)
        watch_clipping(self)

    def _living(self) -> Iterator[ShardState]:
        return filter(None, map(call, self._states))

    def _are_of_the_model(self, params: set[int]) -> bool:
        return any(id(param.sharded) in params for state in self._living() for param in state.declaration.params)

    def before_optimizer_step(self, stepped: set[int], optimizer: Optimizer | None) -> None:
        """Part of the `StepWatcher` interface."""
        self._stepped = self._stepped or self._are_of_the_model(stepped)

    def check_reduced(self, stepped: set[int]) -> None:
        """Part of the `StepWatcher` interface; there is nothing to check here."""

    def clipped(self, params: set[int], norm: torch.Tensor) -> None:
        """Part of the `ClipWatcher` interface."""
        if self._are_of_the_model(params):
            self.norm = norm

    def take(self) -> tuple[bool, torch.Tensor | None]:
        """Whether an optimizer has stepped parameters of the model since the last call, and the gradient norm.

        A `GradScaler` that finds infinite or NaN gradients skips the optimizer step.
        """
        seen = self._stepped, self.norm
        self._stepped, self.norm = False, None
        return seen

    def figures(self) -> Figures:
        """The figures of `stats`, and the exposed share that the plan predicts, if it has measured times."""
        bound = [state.bound for state in self._living()]
        engines = list(dict.fromkeys(each.engine for each in bound if each is not None))
        figures = figures_of(engines)
        if len(engines) == 1:
            plan = engines[0].order.plan
            if self._predicted[0] is not plan:
                self._predicted = plan, _predicted(plan)
            figures |= self._predicted[1]
        return figures


def _predicted(plan: ShardPlan) -> Figures:
    if plan.costs is None:
        return {}
    predicted = plan.predicted()
    assert predicted.exposed is not None
    return {"plan/exposed_share": predicted.exposed / predicted.seconds if predicted.seconds else 0.0}


# ---- figures that are being copied to the host


class _Arriving:
    """The figures of one step, some of which an accelerator may still be computing.

    They are copied to the host asynchronously, and read once the copy is done, so that the host does not wait for the
    accelerator.

    Attributes:
        step: number of the step.
    """

    def __init__(self, figures: Mapping[str, Number], step: int) -> None:
        self.step = step
        self._figures = dict(figures)
        away = {name: value for name, value in figures.items() if isinstance(value, torch.Tensor) and _is_away(value)}
        self._names = list(away)
        self._event: torch.Event | None = None
        if away:
            device = next(iter(away.values())).device
            stacked = torch.stack([each.to(device, torch.float64, non_blocking=True) for each in away.values()])
            self._copy = torch.empty(len(away), dtype=torch.float64, pin_memory=True)
            self._copy.copy_(stacked, non_blocking=True)
            self._event = torch.Event(device)
            self._event.record(torch.accelerator.current_stream())

    @property
    def has_come(self) -> bool:
        """Whether `read` would return without waiting."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Figures:
        """Wait for the copy, and return the figures."""
        if self._event is not None:
            self._event.synchronize()
            self._figures.update(zip(self._names, self._copy.tolist(), strict=True))
        return {name: float(value) for name, value in self._figures.items()}


def _is_away(value: torch.Tensor) -> bool:
    return value.device.type not in ("cpu", "meta")


def _whole(name: str, value: Number) -> Number:
    """Detach a figure. A DTensor is made full, by a small collective of all ranks.

    Raises:
        ShardConfigValueError: the figure is a tensor of several numbers.
    """
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.numel() != 1:
        raise ShardConfigValueError(f"{name}: expected one number, got a tensor of shape {tuple(value.shape)}")
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).reshape(())


def _over_ranks(figures: Mapping[str, Number], how: str, device: torch.device) -> dict[str, Number]:
    """Combine the figures of all ranks, by one all-gather of a few hundred bytes.

    If ranks have figures with different names, each rank gets its own figures back, and ``log/ranks_differ`` is 1.
    """
    names = sorted(figures)
    slots = -(-(len(names) + 1) // _SLOTS) * _SLOTS
    key = zlib.crc32(" ".join(names).encode())
    values = [torch.as_tensor(value, dtype=torch.float64) for value in (key, *map(figures.__getitem__, names))]
    own = torch.stack([value.to(device, non_blocking=True) for value in values])
    own = torch.cat([own, own.new_zeros(slots - len(own))])
    world = dist.group.WORLD
    assert world is not None
    ranks = own.new_empty(world.size() * slots)
    work = public_all_gather(ranks, own, world)
    if work is not None:
        work.wait()  # on an accelerator, only the stream waits
    ranks = ranks.view(-1, slots)
    alike = (ranks[:, 0] == key).all()
    taken = ranks.amax(0) if how == "max" else ranks.mean(0)
    if _RATE in names:
        taken[names.index(_RATE) + 1] = ranks[:, names.index(_RATE) + 1].sum()
    taken = torch.where(alike, taken, own)
    over: dict[str, Number] = dict(zip(names, taken[1:].unbind(), strict=False))
    return {**over, "log/ranks_differ": 1.0 - alike.double()}


# ---- public


class TrainingLog:
    """The log that `log_to` returns. Call `step` once after each optimizer step, on every rank.

    Attributes:
        steps: number of steps, including those of earlier runs.
        failures: how often a logger has failed.
    """

    def __init__(
        self, model: nn.Module, sinks: Sequence[_Sink], every: int, over_ranks: str | None, done: int = 0
    ) -> None:
        self.steps = done
        self.failures = 0
        self._device = sharded_states(model)[0].declaration.info.device
        self._seen = _Seen(model)
        self._sinks = sinks
        self._every, self._over_ranks = every, over_ranks
        self._began: float | None = None  # when the interval of the next figures began; the first step is not counted
        self._among = 0  # number of steps in this interval
        self._tokens: Number = 0
        self._skipped: Number = 0
        self._arriving: deque[_Arriving] = deque()
        self._have_failed: set[int] = set()  # by id of the sink

    def step(
        self,
        *,
        loss: Number | None = None,
        tokens: int | torch.Tensor = 0,
        grad_norm: Number | None = None,
        skipped: bool | Number | None = None,
        **others: Number,
    ) -> None:
        """Record the figures of a step after it has ended and, every `every` steps, pass figures to the loggers.

        Numbers may be 0-dim tensors on any device. This call does not wait for an accelerator: figures that are not
        computed yet are written by a later call, or by `close`.

        Args:
            loss: loss of the step on this rank (or on all ranks, if it is the result of `average_by_tokens`).
            tokens: number of tokens of this rank in this step, over all microbatches.
            grad_norm: gradient norm; by default, the result of `cs.clip_grad_norm_` since the last step. A DTensor,
                which that function returns, is made full when it is written, by a collective of all ranks.
            skipped: whether the optimizer step was skipped, or how many were. By default, a step counts as skipped if
                no optimizer has stepped a parameter of the model since the last call, for example because a
                `GradScaler` found an infinite gradient. Pass it if that cannot be detected: with a scaler and a fused
                optimizer, which is called in any case, and with optimizers that are not torch's.
            others: further figures, by name: for example, the learning rate.

        Raises:
            ShardConfigValueError: a figure is a tensor of several numbers.
        """
        self._deliver()
        stepped, norm = self._seen.take()
        now = clock()
        self.steps += 1
        self._skipped = self._skipped + (_whole("skipped", skipped) if skipped is not None else float(not stepped))
        if self._began is not None:
            self._among += 1
            self._tokens = self._tokens + _whole("tokens", tokens)
        if self.steps % self._every == 0:
            given = {"train/loss": loss, "train/grad_norm": norm if grad_norm is None else grad_norm, **others}
            self._note(now, {name: _whole(name, value) for name, value in given.items() if value is not None})
        if self._began is None or self.steps % self._every == 0:
            self._began, self._among, self._tokens = now, 0, 0

    def _note(self, now: float, given: dict[str, Number]) -> None:
        """Collect the figures that are due, and write those that are computed already."""
        if not (self._sinks or self._over_ranks):
            return
        figures: dict[str, Number] = {**given, "train/skipped_steps": self._skipped}
        if self._began is not None and self._among and now > self._began:
            figures["step/seconds"] = (now - self._began) / self._among
            figures[_RATE] = self._tokens / (now - self._began)
        figures |= self._seen.figures()
        if self._over_ranks is not None and dist.is_initialized():
            figures = _over_ranks(figures, self._over_ranks, self._device)
        if self._sinks:
            self._arriving.append(_Arriving(figures, self.steps))
            self._deliver()

    def _deliver(self, waits: bool = False) -> None:
        while self._arriving and (waits or self._arriving[0].has_come):
            arrived = self._arriving.popleft()
            figures = arrived.read()
            for sink in self._sinks:
                try:
                    sink.write(dict(figures), arrived.step)
                except Exception as error:
                    self._failed(sink, arrived.step, error)

    def _failed(self, sink: _Sink, step: int, error: Exception) -> None:
        self.failures += 1
        if id(sink) not in self._have_failed:
            self._have_failed.add(id(sink))
            warnings.warn(
                f"log_to: the logger {sink.name} failed at step {step} with {type(error).__name__}: {error}. Training "
                "continues, and the logger is called again for later steps. This warning appears once; `failures` of "
                "the log counts all failures",
                stacklevel=4,
            )

    def close(self) -> None:
        """Write the remaining figures, and close the files that `log_to` has opened; other loggers stay open."""
        self._deliver(waits=True)
        for sink in self._sinks:
            sink.close()
        self._sinks = ()

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def log_to(
    model: nn.Module,
    logger: Any,
    *,
    every: int = 1,
    rank: int | None = 0,
    over_ranks: str | None = None,
    done: int = 0,
) -> TrainingLog:
    """Log figures of training: the user's figures of each step together with the library's.

        with cs.report.log_to(model, "runs/1/steps.jsonl", every=10) as log:
            for batch in batches:
                loss = loss_of(model, batch)
                loss.backward()
                cs.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                log.step(loss=loss, tokens=batch.numel())

    Figures are a flat dict of floats. Unknown ones are left out:
        ``train/loss``, ``train/grad_norm``: as given, or the norm from `clip_grad_norm_`.
        ``train/skipped_steps``: total number of skipped steps.
        ``step/seconds``, ``step/tokens_per_second``: by the host's clock, the mean since the last figures. The first
        step is not included, because it compiles code and allocates memory.
        ``plan/exposed_share``: the share of a step that is exposed communication, as the plan predicts it once times
        are measured (`PrefetchPolicy.auto`). While `watch` is on, ``step/communication_share`` is the measured share.
        All figures of `stats`: ``pool/live_bytes``, ``pool/peak_bytes`` and so on.
        All other figures that are passed to `TrainingLog.step`.

    The log does not keep the model alive, and never makes a step wait for an accelerator. If a logger fails, one
    warning names it. Training continues, and the logger is called again for later figures.

    Args:
        model: a sharded model.
        logger: one logger, or a list of loggers: TensorBoard's ``SummaryWriter`` (anything with ``add_scalar``), a run
            of Weights & Biases (``log``), a logger of Lightning, MLflow or Comet (``log_metrics``), a `logging.Logger`
            (level INFO), a path or an open text file for one line of JSON each time, or a function of the figures and
            the step. Ranks that do not write may pass anything, including None.
        every: number of steps after which figures are written.
        rank: the rank that writes; None for all ranks, which then need separate loggers.
        over_ranks: None writes the figures of the writing rank. ``max`` or ``mean`` combines figures over all ranks by
            one small all-gather each time; tokens per second are summed. If ranks have figures with different names,
            ``log/ranks_differ`` is 1, and the figures are those of the writing rank.
        done: number of steps of earlier runs that this run resumes; steps are numbered from there.

    Returns:
        the log. Call its `step` on all ranks after each optimizer step.

    Raises:
        ShardConfigValueError: the model contains no sharded module; `every` is not an int of at least 1, or `done` of
            at least 0; or `over_ranks` has another value.
        ShardConfigTypeError: a logger has an unknown type.
    """
    require_count("every", every, 1)
    require_count("done", done, 0)
    if over_ranks not in (None, *OVER_RANKS):
        raise ShardConfigValueError(f"over_ranks={over_ranks!r}: expected None, {' or '.join(map(repr, OVER_RANKS))}")
    sharded_states(model)
    writes = rank is None or rank == (dist.get_rank() if dist.is_initialized() else 0)
    loggers = logger if isinstance(logger, (list, tuple)) else [logger]
    return TrainingLog(model, [_sink(each) for each in loggers] if writes else (), every, over_ranks, done)
