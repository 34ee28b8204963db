"""`log_to`: figures of each step for TensorBoard, Weights & Biases, Lightning, a file of JSON lines, or a function.

None of these packages is imported: a logger is whatever has the method that its kind is called by.
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

from .._errors import ShardConfigTypeError, ShardConfigValueError
from .._group.optimizers import watch_steps
from .._module.gradients import watch_clipping
from .._module.state import ShardState
from .._plan.plan import ShardPlan
from .._policies import require_count
from .._status import figures_of, sharded_states
from .._torch.distributed import public_all_gather

Number = float | torch.Tensor
Figures = dict[str, float]
Write = Callable[[Figures, int], object]
OVER_RANKS = ("max", "mean")
_RATE = "step/tokens_per_second"  # of all ranks together, where figures are taken over ranks
_SLOTS = 64  # ranks exchange a multiple of so many figures, so that one more on a rank is seen and not waited for
clock: Callable[[], float] = time.perf_counter


# ---- loggers of all kinds


class _Sink(NamedTuple):
    """A logger as it is used here: its name for messages, what writes, and what is called at the end."""

    name: str
    write: Write
    close: Callable[[], object]


def _nothing() -> None:
    """A logger that was given open stays open."""


def _scalars(writer: Any, figures: Figures, step: int) -> None:
    for name, value in figures.items():
        writer.add_scalar(name, value, step)


def _lines(file: Any, figures: Figures, step: int) -> None:
    """One line of JSON; what is not finite is null, as JSON has no name for it."""
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
    """How a logger is used.

    Raises:
        ShardConfigTypeError: it is of no kind that is known.
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


# ---- what is seen of the model


class _Seen:
    """Notices the optimizers' steps of a model, and norms of its gradients. It does not keep the model alive.

    Attributes:
        norm: what `clip_grad_norm_` has returned since the last `take`; None if it was not called.
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
        """As `StepWatcher` says."""
        self._stepped = self._stepped or self._are_of_the_model(stepped)

    def check_reduced(self, stepped: set[int]) -> None:
        """As `StepWatcher` says; nothing is to be checked here."""

    def clipped(self, params: set[int], norm: torch.Tensor) -> None:
        """As `ClipWatcher` says."""
        if self._are_of_the_model(params):
            self.norm = norm

    def take(self) -> tuple[bool, torch.Tensor | None]:
        """Whether an optimizer has stepped parameters of the model since the last call, and the norm of its gradients.

        A `GradScaler` that finds gradients that are not finite does not let the optimizer step.
        """
        seen = self._stepped, self.norm
        self._stepped, self.norm = False, None
        return seen

    def figures(self) -> Figures:
        """Those of `stats`, and the exposed share that the plan predicts, if it knows times."""
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


# ---- figures on their way


class _Arriving:
    """The figures of one step, some of which an accelerator may still compute.

    They are copied to the host behind that work, and read once they have come: nothing waits for the accelerator.

    Attributes:
        step: of which step.
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
        """Whether `read` would not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Figures:
        """The figures."""
        if self._event is not None:
            self._event.synchronize()
            self._figures.update(zip(self._names, self._copy.tolist(), strict=True))
        return {name: float(value) for name, value in self._figures.items()}


def _is_away(value: torch.Tensor) -> bool:
    return value.device.type not in ("cpu", "meta")


def _whole(name: str, value: Number) -> Number:
    """A figure apart from its graph, and, by a small collective, of all ranks if each has a part of it.

    Raises:
        ShardConfigValueError: it is a tensor of several numbers.
    """
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.numel() != 1:
        raise ShardConfigValueError(f"{name}: expected one number, got a tensor of shape {tuple(value.shape)}")
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).reshape(())


def _over_ranks(figures: Mapping[str, Number], how: str, device: torch.device) -> dict[str, Number]:
    """The figures over all ranks, by one all-gather of a few hundred bytes.

    Ranks that have figures of other names get their own back, among them ``log/ranks_differ``.
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
        work.wait()  # by the stream, where there is one
    ranks = ranks.view(-1, slots)
    alike = (ranks[:, 0] == key).all()
    taken = ranks.amax(0) if how == "max" else ranks.mean(0)
    if _RATE in names:
        taken[names.index(_RATE) + 1] = ranks[:, names.index(_RATE) + 1].sum()
    taken = torch.where(alike, taken, own)
    over: dict[str, Number] = dict(zip(names, taken[1:].unbind(), strict=False))
    return {**over, "log/ranks_differ": 1.0 - alike.double()}


# ---- what users have


class TrainingLog:
    """What `log_to` returns. Call `step` once after each optimizer step, on every rank.

    Attributes:
        steps: how many there were, those of earlier runs among them.
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
        self._began: float | None = None  # when the first step ended that belongs to the next figures, and how many do
        self._among = 0
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
        """A step is over: note its figures and, every so many steps, hand them to the loggers.

        Numbers may be 0-dim tensors on any device. On an accelerator they are not waited for: what is not computed yet
        is written by a later call, or by `close`.

        Args:
            loss: of the step; as it is on this rank (`average_by_tokens` makes it that of all ranks).
            tokens: of this rank in this step, its microbatches together.
            grad_norm: of the gradients; by default what `cs.clip_grad_norm_` has returned since the last step. A
                DTensor, as it returns, is made whole where it is written, which is a collective of all ranks.
            skipped: whether the optimizer's step was left out, or how many were. By default it was if no optimizer has
                stepped a parameter of the model since the last call, as when a `GradScaler` finds an infinite gradient.
                (Give it where that does not tell: with a scaler and a fused optimizer, which is called all the same,
                and with optimizers that are not torch's.)
            others: further figures, by name: the learning rate, say.

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
        """Make the figures that are due now, and write them if they are there already."""
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
                "goes on, and it is called again for later steps; this is said once, and `failures` of the log counts",
                stacklevel=4,
            )

    def close(self) -> None:
        """Write what has not been written yet, and close the files that were opened here; other loggers stay open."""
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
    """Log figures of training: what the user knows of a step beside what the library knows of it.

        with cs.log_to(model, "runs/1/steps.jsonl", every=10) as log:
            for batch in batches:
                loss = loss_of(model, batch)
                loss.backward()
                cs.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                log.step(loss=loss, tokens=batch.numel())

    Figures, flat and all floats; those that are not known are left out:
        ``train/loss``, ``train/grad_norm``: as given, or seen by `clip_grad_norm_`.
        ``train/skipped_steps``: so far.
        ``step/seconds``, ``step/tokens_per_second``: by the host's clock, the mean since the last figures; not of the
        first step, in which code is compiled and memory laid out.
        ``plan/exposed_share``: of a step in which compute waits for communication, as the plan predicts it, once it
        knows times (`PrefetchPolicy.auto`). While `watch` is on, ``step/communication_share`` is the measured one.
        All that `stats` gives: ``pool/live_bytes``, ``pool/peak_bytes`` and so on.
        Whatever else `TrainingLog.step` is given.

    The log does not keep the model alive, and a step waits for no accelerator because of it. A logger that fails is a
    warning that names it, once; training goes on, and later figures are offered to it again.

    Args:
        model: a sharded model.
        logger: where figures go; a list of several. TensorBoard's ``SummaryWriter`` (anything with ``add_scalar``), a
            run of Weights & Biases (``log``), a logger of Lightning, MLflow or Comet (``log_metrics``), a
            `logging.Logger` (level INFO), a path or an open text file for a line of JSON each time, or a function of
            the figures and the step. Ranks that do not write may pass anything, None too.
        every: after how many steps figures are written.
        rank: the rank that writes; None for all, each of which needs a logger of its own then.
        over_ranks: None writes the figures of the rank that writes. ``max`` or ``mean`` takes them over all ranks, and
            the sum of tokens a second: one small all-gather each time. ``log/ranks_differ`` is 1 then if ranks have
            figures of different names, and the figures are those of the rank alone.
        done: how many steps earlier runs have made, from which this one goes on: figures carry on their numbers.

    Returns:
        the log, whose `step` is to be called on all ranks after each step of the optimizer.

    Raises:
        ShardConfigValueError: the model holds no sharded module; `every` is no whole number of at least 1, or `done` of
            at least 0; `over_ranks` is none of these.
        ShardConfigTypeError: a logger is of no kind that is known.
    """
    require_count("every", every, 1)
    require_count("done", done, 0)
    if over_ranks not in (None, *OVER_RANKS):
        raise ShardConfigValueError(f"over_ranks={over_ranks!r}: expected None, {' or '.join(map(repr, OVER_RANKS))}")
    sharded_states(model)
    writes = rank is None or rank == (dist.get_rank() if dist.is_initialized() else 0)
    loggers = logger if isinstance(logger, (list, tuple)) else [logger]
    return TrainingLog(model, [_sink(each) for each in loggers] if writes else (), every, over_ranks, done)
