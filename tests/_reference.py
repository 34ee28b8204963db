"""The unsharded reference. Its gradients define the exact values that a sharded engine must give.

Every rank runs the batches of all ranks through one unsharded model. The gradient of a parameter is
g = (g_0 + g_1 + ...) / W in rank order, for each *use* of its group. A group that is used twice is reduced twice, and
the results are added in the order of reduction (backward order). Gradients of backwards without sync are added on their
rank before the sum over ranks. On a mesh of replicas x shards the sum is first over shards and then over replicas, like
the two collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from _parity import Case, Snapshot, make_optimizer

Grads = dict[str, Tensor]


@dataclass
class Event:
    """An action of all ranks: reduce gradients, clear them, or reduce results of `autograd.grad`."""

    kind: str
    grads: Grads = field(default_factory=dict)


class Groups:
    """Replaces `fully_shard` to record which module's forward uses which parameters."""

    def __init__(self) -> None:
        self.found: list[tuple[nn.Module, list[nn.Parameter]]] = []
        self._taken: set[nn.Parameter] = set()

    def __call__(self, module: nn.Module, *, ignored_params: Any = None, **_: Any) -> nn.Module:
        assert isinstance(module, nn.Module), "per-use gradients of list groups are not modelled"
        skip = self._taken | set(ignored_params or ())
        own = [p for p in module.parameters() if p not in skip]
        self._taken.update(own)
        self.found.append((module, own))
        return module


class Uses:
    """Gives each use of a group separate leaf copies of its parameters, to get the gradients of each use."""

    def __init__(self, model: nn.Module, groups: Groups) -> None:
        names = {p: n for n, p in model.named_parameters()}
        self.leaves: list[list[tuple[str, Tensor]]] = []
        for module, own in groups.found:
            places = [
                (owner._parameters, key, p)
                for owner in module.modules()
                for key, p in owner._parameters.items()
                if p is not None and any(p is q for q in own)
            ]
            self._hook(module, own, places, names)

    def _hook(self, module: nn.Module, own: list[nn.Parameter], places: list[Any], names: dict[Any, str]) -> None:
        def swap_in(*_: Any) -> None:
            copies = {p: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in own}
            self.leaves.append([(names[p], copy) for p, copy in copies.items()])
            for table, key, p in places:
                table[key] = copies[p]

        def swap_out(*_: Any) -> None:
            for table, key, p in places:
                table[key] = p

        module.register_forward_pre_hook(swap_in)
        module.register_forward_hook(swap_out, always_call=True)

    def collect(self) -> list[Grads]:
        """The gradients of the last backward, by use, in backward order."""
        out = []
        for leaves in reversed(self.leaves):
            if grads := {name: leaf.grad for name, leaf in leaves if leaf.grad is not None}:
                out.append(grads)
            for _, leaf in leaves:
                leaf.grad = None
        return out


class RankRun:
    """One step of one rank with the unsharded model. It records events instead of reducing gradients."""

    reference = True

    def __init__(self, owner: ReferenceRun, rank: int) -> None:
        self._case, self._uses, self._sync = owner.case, owner.uses, True
        self.rank, self.world, self.step, self.model, self.params = (
            rank,
            owner.world,
            owner.step,
            owner.model,
            owner.params,
        )
        self.events: list[Event] = []
        self.records: dict[str, Tensor] = {}
        self._kept: Grads = {}

    def batch(self, micro: int = 0) -> tuple[Any, ...]:
        return self._case.batch(self.rank, 10 * self.step + micro)

    def loss(self, micro: int = 0) -> Tensor:
        return self._case.loss(self.model, *self.batch(micro))

    def backward(self, loss: Tensor, *, inputs: Sequence[str] | None = None, **kwargs: Any) -> None:
        wanted = None if inputs is None else [self.params[name] for name in inputs]
        loss.backward(inputs=wanted, **kwargs)
        for grads in self._uses.collect() if self._uses else [self._take_grads()]:
            if self._sync:
                kept = {name: self._kept.pop(name) for name in grads if name in self._kept}
                self.events.append(Event("reduce", {n: kept[n] + g if n in kept else g for n, g in grads.items()}))
            else:
                self._kept |= {n: self._kept[n] + g if n in self._kept else g for n, g in grads.items()}

    def param_grads(self, loss: Tensor, names: Sequence[str]) -> None:
        grads = torch.autograd.grad(loss, [self.params[name] for name in names])
        self.events.append(Event("record", dict(zip(names, grads, strict=True))))

    def set_sync(self, sync: bool) -> None:
        self._sync = sync

    def zero_grad(self, set_to_none: bool = True, via: str = "optimizer") -> None:
        self._take_grads()
        self._kept = {}
        self.events.append(Event("clear" if set_to_none else "zero"))

    def record(self, name: str, value: Tensor) -> None:
        self.records[name] = value.detach().clone()

    def finish(self) -> None:
        assert not self._kept, "a step ended with unreduced gradients"

    def _take_grads(self) -> Grads:
        grads = {name: p.grad for name, p in self.params.items() if p.grad is not None}
        for p in self.params.values():
            p.grad = None
        return grads


class ReferenceRun:
    """A case with the unsharded model. Every rank computes the steps of all ranks."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        self.case, self.rank, self.world, self.step = case, rank, world, 0
        self.model = case.build()
        if case.prepare is not None:
            case.prepare(self.model)
        self.params = dict(self.model.named_parameters())
        self.uses: Uses | None = None
        if case.per_use:
            groups = Groups()
            case.shard(self.model, groups)
            self.uses = Uses(self.model, groups)
        self.optimizer = make_optimizer(case.optimizer, list(self.params.values()))

    def take(self) -> Snapshot:
        """Run one step of all ranks."""
        runs, losses = [], []
        for rank in range(self.world):
            torch.manual_seed(100 * self.step + rank)
            run = RankRun(self, rank)
            losses.append(self.case.train(run).detach().clone())
            run.finish()
            if self.uses:
                self.uses.leaves.clear()
            runs.append(run)
        shot = Snapshot(losses[self.rank], runs[self.rank].records)
        for p in self.params.values():
            p.grad = None
        for events in zip(*(run.events for run in runs), strict=True):
            self._apply(list(events), shot)
        if self.case.clip is not None:
            shot.records["norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
        shot.grads = {n: None if p.grad is None else p.grad.clone() for n, p in self.params.items()}
        self.optimizer.step()
        self.optimizer.zero_grad()
        shot.params = {n: p.detach().clone() for n, p in self.params.items()}
        self.step += 1
        return shot

    def _apply(self, events: list[Event], shot: Snapshot) -> None:
        kind = events[0].kind
        assert all(e.kind == kind for e in events)
        if kind in ("clear", "zero"):
            self.optimizer.zero_grad(set_to_none=kind == "clear")
            return
        for name in events[0].grads:
            mean = self._mean([e.grads[name] for e in events])
            if kind == "record":
                shot.records[f"autograd.grad {name}"] = mean
                continue
            param = self.params[name]
            param.grad = mean if param.grad is None else param.grad + mean

    def _mean(self, grads: list[Tensor]) -> Tensor:
        replicas, shards = self.case.mesh or (1, self.world)
        sums = [_sum(grads[r * shards : (r + 1) * shards]) for r in range(replicas)]
        return _sum(sums) / self.world


def _sum(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total = total + value
    return total
