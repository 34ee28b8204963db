"""Parity: train the unsharded model, torch's FSDP2 and ours in the same way, and compare after every step.

A `Case` describes how to build, feed, shard and step a model. `check_parity` runs it with every engine on every rank,
and compares losses, gradients and parameters. Each rank compares its shards after every step, and the full tensors of
ours at the end. Ours must be bitwise identical to the unsharded reference. The gradients of the reference are the mean
over ranks in rank order, computed per use of a group (see _reference.py).

A step is a function of a `Run`, and is the same for all engines. So unusual steps (a second forward, an exception, an
auxiliary loss) are written once for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from _engines import ENGINES, FullyShard
from _models import shard_blocks, vectors

NORMAL_STEPS = 4  # three steps and one after them
RING_ATOL = 2e-6


class Run(Protocol):
    """Interface of a step function to an engine; one object per engine, rank and step."""

    rank: int
    world: int
    step: int
    model: nn.Module
    params: dict[str, nn.Parameter]
    reference: bool

    def batch(self, micro: int = 0) -> tuple[Any, ...]: ...
    def loss(self, micro: int = 0) -> Tensor: ...
    def backward(self, loss: Tensor, *, inputs: Sequence[str] | None = None, **kwargs: Any) -> None: ...
    def param_grads(self, loss: Tensor, names: Sequence[str]) -> None: ...
    def set_sync(self, sync: bool) -> None: ...
    def zero_grad(self, set_to_none: bool = True, via: str = "optimizer") -> None: ...
    def record(self, name: str, value: Tensor) -> None: ...


def mean_square(model: nn.Module, *batch: Any) -> Tensor:
    return model(*batch).float().square().mean()


def plain_step(run: Run) -> Tensor:
    loss = run.loss()
    run.backward(loss)
    return loss


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training to compare.

    per_use: the reference computes gradients per use of a group, for models that use a group more than once.
    outer: whether ours shards over the replicas' axis as well (`outer_sharding`). Shards then differ from FSDP2's, so
        full tensors are compared with it.
    ends_sharded: False if a step ends with a forward, which may leave parameters unsharded.
    mesh: (replicas, shards), for the order of sums in the reference.
    fsdp2: False if FSDP2 does not support the case; `why` has the reason.
    atol_reference, atol_fsdp2: 0 means bitwise identical; `why` has the reason for other values. In FSDP2 gloo decides
        the order of sums. With three or more ranks it starts at another rank for each shard, so the tolerance is then
        2e-6 of the largest value.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, ...]] = vectors
    shard: Callable[[Any, FullyShard], object] = shard_blocks
    prepare: Callable[[nn.Module], object] | None = None
    loss: Callable[..., Tensor] = mean_square
    train: Callable[[Run], Tensor] = plain_step
    optimizer: str = "sgd"
    clip: float | None = None
    steps: int = NORMAL_STEPS
    per_use: bool = False
    outer: bool = False
    ends_sharded: bool = True
    mesh: tuple[int, int] | None = None
    reference: bool = True
    fsdp2: bool = True
    atol_reference: float = 0.0
    atol_fsdp2: float = 0.0
    why: str = ""

    def build(self) -> nn.Module:
        torch.manual_seed(17)
        return self.model()


Spec = tuple[DeviceMesh, tuple[Placement, ...]]


@dataclass
class Snapshot:
    """The values of one step that are compared: gradients and parameters by name. Sharded ones are this rank's part.

    `specs` describes the sharded tensors. The tensors of the reference, and the last ones of ours, are full tensors.
    """

    loss: Tensor
    records: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)
    specs: dict[str, Spec] = field(default_factory=dict)


def make_optimizer(kind: str, params: Sequence[Tensor]) -> torch.optim.Optimizer:
    trainable = list(params)
    if kind == "sgd":
        return torch.optim.SGD(trainable, lr=0.1)
    if kind == "adamw":
        return torch.optim.AdamW(trainable, lr=0.01, foreach=False)
    if kind == "adamw-foreach":
        return torch.optim.AdamW(trainable, lr=0.01, foreach=True)
    raise ValueError(kind)


def whole(value: Tensor) -> Tensor:
    """A copy of the full tensor, on every rank."""
    tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().clone()


def own_part(value: Tensor) -> Tensor:
    """A copy of this rank's part."""
    tensor = value.to_local() if isinstance(value, DTensor) else value
    return tensor.detach().clone()


def cut(value: Tensor, spec: Spec | None) -> Tensor:
    """This rank's part of a full tensor."""
    if spec is None:
        return value
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, *spec)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        value = value.narrow(dim, min(offset, value.shape[dim]), size)
    return value


class ShardedRun:
    """A case with an engine that shards. The driver increments `step`."""

    reference = False

    def __init__(self, case: Case, fully_shard: FullyShard, rank: int, world: int, ends_whole: bool) -> None:
        self.case, self.rank, self.world, self.step = case, rank, world, 0
        self._ends_whole = ends_whole  # whether the last snapshot has full tensors
        self.model = case.build()
        case.shard(self.model, fully_shard)
        if case.prepare is not None:
            case.prepare(self.model)
        self.params = dict(self.model.named_parameters())
        self.optimizer = make_optimizer(case.optimizer, list(self.params.values()))
        self.records: dict[str, Tensor] = {}

    def batch(self, micro: int = 0) -> tuple[Any, ...]:
        return self.case.batch(self.rank, 10 * self.step + micro)

    def loss(self, micro: int = 0) -> Tensor:
        return self.case.loss(self.model, *self.batch(micro))

    def backward(self, loss: Tensor, *, inputs: Sequence[str] | None = None, **kwargs: Any) -> None:
        wanted = None if inputs is None else [self.params[name] for name in inputs]
        loss.backward(inputs=wanted, **kwargs)

    def param_grads(self, loss: Tensor, names: Sequence[str]) -> None:
        """Record `autograd.grad` of parameters: the reduced gradient, sharded like its parameter."""
        grads = torch.autograd.grad(loss, [self.params[name] for name in names])
        for name, grad in zip(names, grads, strict=True):
            assert isinstance(grad, DTensor), f"autograd.grad gave a {type(grad).__name__} for {name}"
            self.record(f"autograd.grad {name}", whole(grad))

    def set_sync(self, sync: bool) -> None:
        self.model.set_requires_gradient_sync(sync)

    def zero_grad(self, set_to_none: bool = True, via: str = "optimizer") -> None:
        owner = self.optimizer if via == "optimizer" else self.model
        owner.zero_grad(set_to_none=set_to_none)

    def record(self, name: str, value: Tensor) -> None:
        self.records[name] = value.detach().clone()

    def take(self) -> Snapshot:
        """Run one step of the case, and the optimizer."""
        self.records = {}
        torch.manual_seed(100 * self.step + self.rank)
        loss = self.case.train(self).detach().clone()
        registered = dict(self.model.named_parameters())
        assert registered.keys() == self.params.keys()
        for name, param in self.params.items():
            grad = param.grad
            if self.case.ends_sharded:
                assert registered[name] is param, f"after backward {name} is not the sharded parameter"
            if isinstance(param, DTensor) and grad is not None:
                assert isinstance(grad, DTensor), f"the gradient of {name} is a {type(grad).__name__}"
                assert grad.placements == param.placements, f"the gradient of {name} is {grad.placements}"
        takes_whole = self.case.outer or (self._ends_whole and self.step == self.case.steps - 1)
        take = whole if takes_whole else own_part
        shot = Snapshot(loss, self.records)
        if self.case.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
            assert isinstance(norm, DTensor), f"clip_grad_norm_ gave a {type(norm).__name__}"
            self.record("norm", whole(norm))
        shot.grads = {n: None if p.grad is None else take(p.grad) for n, p in self.params.items()}
        self.optimizer.step()
        self.zero_grad()
        shot.params = {n: take(p) for n, p in self.params.items()}
        if not takes_whole:
            sharded = {n: p for n, p in self.params.items() if isinstance(p, DTensor)}
            shot.specs = {n: (p.device_mesh, p.placements) for n, p in sharded.items()}
        self.step += 1
        return shot


def check_parity(case: Case, rank: int, world: int) -> dict[str, list[Snapshot]]:
    """Run the case with every engine and compare. Returns the snapshots by engine."""
    from _reference import ReferenceRun

    runs: dict[str, Any] = {}
    if case.reference:
        runs["reference"] = ReferenceRun(case, rank, world)
    if case.fsdp2:
        runs["fsdp2"] = ShardedRun(case, ENGINES["fsdp2"], rank, world, ends_whole=False)
    runs["ours"] = ShardedRun(case, ENGINES["ours"], rank, world, ends_whole=True)
    assert len(runs) > 1, "a parity test needs another engine"
    shots: dict[str, list[Snapshot]] = {}
    for name, run in runs.items():
        with named(name):
            shots[name] = [run.take() for _ in range(case.steps)]
    lines = []
    if case.reference:
        lines += differences("reference", shots["reference"], shots["ours"], rank, case.atol_reference)
    if case.fsdp2:
        lines += differences("fsdp2", shots["fsdp2"], shots["ours"], rank, case.atol_fsdp2 or RING_ATOL * (world > 2))
    assert not lines, "ours differs:\n" + "\n".join(lines[:20]) + (f"\n... {len(lines)} lines" if lines[20:] else "")
    return shots


@contextlib.contextmanager
def named(engine: str) -> Any:
    """Add the name of the engine to errors."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised while running engine {engine!r}")
        raise


def differences(other: str, theirs: Sequence[Snapshot], ours: Sequence[Snapshot], rank: int, atol: float) -> list[str]:
    """One line for each value of ours that is not within `atol` of the other engine's."""
    lines = []
    for step, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        pairs: list[tuple[str, Any, Any]] = [("loss", a.loss, b.loss)]
        for what in ("records", "grads", "params"):
            left, right = getattr(a, what), getattr(b, what)
            assert left.keys() == right.keys(), f"{what}: {sorted(left)} against {sorted(right)}"
            if what != "records":  # if only one of them has the full tensor, compare the other's part
                left = {n: v if v is None or n in a.specs else cut(v, b.specs.get(n)) for n, v in left.items()}
                right = {n: v if v is None or n in b.specs else cut(v, a.specs.get(n)) for n, v in right.items()}
            pairs += [(f"{what[:-1]} of {name}", left[name], right[name]) for name in left]
        for what, x, y in pairs:
            if problem := difference(x, y, atol):
                lines.append(f"ours vs {other}, step {step}, rank {rank}: {what}: {problem}")
    return lines


def difference(theirs: Tensor | None, ours: Tensor | None, atol: float) -> str:
    """Describe how two values differ; empty if they match."""
    if theirs is None or ours is None:
        return "" if theirs is ours else f"is {brief(ours)}, should be {brief(theirs)}"
    if theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return f"is {brief(ours)}, should be {brief(theirs)}"
    if torch.equal(theirs, ours):
        return ""
    gap = (theirs.double() - ours.double()).abs()
    scale = float(theirs.double().abs().max())
    wrong = int((~(gap <= atol * max(1.0, scale))).sum())
    if not wrong:
        return ""
    return f"differs in {wrong} of {gap.numel()} elements by at most {float(gap.max()):.3g} (largest value {scale:.3g})"


def brief(value: Tensor | None) -> str:
    return "None" if value is None else f"{value.dtype} {tuple(value.shape)}"
