"""Inspect a step: its actions as text, its collectives by type, its memory."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.nn as nn

from .._api import last_record
from .._module.state import state_of
from .._module.status import make_plan
from .._plan.record import Record
from .._plan.schedule import ROOT_NAME
from .._torch.core import current_backward, tree_tensors
from ..errors import ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from ._collectives import Issued
from ._exchange import HERE
from ._torch import CallsOfOperators

T = TypeVar("T")
# Maps prefixes of the names of torch.distributed's operators to collectives. Longer prefixes come first.
_OPERATORS = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
KINDS = frozenset(_OPERATORS.values())


class _Script:
    """Collects the lines of a trace: the actions of engines, and the forwards and backwards of modules."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._written: dict[int, tuple[list[Any], int]] = {}  # by the id of an engine's list of actions

    def catch_up(self, module: nn.Module | None = None) -> None:
        """Add the actions since the last call. The engine of `module` may have begun a new iteration."""
        state = state_of(module) if module is not None else None
        if state is not None and state.bound is not None:
            done = state.bound.engine._actions.recorder.history.done
            self._written.setdefault(id(done), (done, 0))
        for key, (done, count) in self._written.items():
            new = zip(done[count::3], done[count + 1 :: 3], strict=True)
            self.lines += [f"{kind} {fqn or ROOT_NAME}" for kind, fqn in new]
            self._written[key] = done, len(done)

    def skip(self, done: list[Any]) -> None:
        """Omit the actions of an engine so far."""
        self._written[id(done)] = done, len(done)

    def compute(self, module: nn.Module, name: str, direction: str) -> None:
        self.catch_up(module)
        state = state_of(module)
        if state is not None and state.bound is not None and state.bound.group is not None:
            self.lines.append(f"COMPUTE {name or ROOT_NAME}{direction}")


def _listen(script: _Script, name: str, module: nn.Module) -> list[Any]:
    def before(*_: Any) -> None:
        script.compute(module, name, " again" if current_backward() >= 0 else "")

    def after(_: nn.Module, __: Any, output: Any) -> None:
        seen: set[int] = set()

        def reached(*_: Any) -> None:
            now = current_backward()
            if now not in seen:
                seen.add(now)
                script.compute(module, name, " backward")

        for tensor in tree_tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(reached)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def trace(model: nn.Module, step: Callable[[], object]) -> str:
    """Run `step` and return the actions of a sharded model as text, one per line, for comparison in a test.

        print(testing.trace(model, lambda: model(x).sum().backward()))

    The lines are those of the record (``UNSHARD blocks.3``; see `Record`) and in addition:

    - ``COMPUTE blocks.3`` where the forward of a sharded module begins
    - ``COMPUTE blocks.3 backward`` where its backward begins
    - ``COMPUTE blocks.3 again`` where activation checkpointing recomputes its forward

    Raises:
        ShardConfigValueError: the model contains no sharded module.
    """
    sharded = {name: module for name, module in model.named_modules() if state_of(module) is not None}
    if not sharded:
        raise ShardConfigValueError(f"model: {type(model).__name__} contains no sharded module; call fully_shard first")
    script = _Script()
    with contextlib.ExitStack() as stack:
        for name, module in sharded.items():
            for handle in _listen(script, name, module):
                stack.callback(handle.remove)
        for module in sharded.values():
            state = state_of(module)
            if state is not None and state.bound is not None:  # earlier actions are not part of this step
                script.skip(state.bound.engine._actions.recorder.history.done)
        step()
        for module in sharded.values():
            script.catch_up(module)
    return "\n".join(script.lines)


@contextlib.contextmanager
def _count_collectives() -> Iterator[Counter[str]]:
    """Count the collectives that this rank launches, by type: ``{"all_gather": 2, "reduce_scatter": 1}``."""
    counts: Counter[str] = Counter()
    if HERE.exchange is not None:
        listeners = HERE.exchange.listeners[HERE.rank]

        def heard(issued: Issued) -> None:
            counts[issued.kind] += 1

        listeners.append(heard)
        try:
            yield counts
        finally:
            listeners.remove(heard)
        return

    def called(namespace: str, name: str) -> None:
        if namespace in ("c10d", "_c10d_functional"):
            name = name.lstrip("_")
            kind = next((kind for begin, kind in _OPERATORS.items() if name.startswith(begin)), None)
            counts.update([kind] if kind else [])

    with CallsOfOperators(called):
        yield counts


def assert_collectives(what: Callable[[], T], /, **expected: int) -> T:
    """Call `what`, and assert that this rank launches exactly these collectives.

        testing.assert_collectives(lambda: layer(x).sum().backward(), all_gather=2, reduce_scatter=1)

    In a simulated world and under `fake`, each bucket has one all-gather and one reduce-scatter. On gloo the library
    builds them from other collectives (see docs/low_precision.md), and those are counted. Collectives in compiled
    graphs are counted only in simulated worlds.

    Args:
        what: the function.
        expected: numbers by type: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, reduce, gather,
            scatter, barrier, send, recv. Types that are not given are expected 0 times.

    Returns:
        The result of `what`.

    Raises:
        AssertionError: the numbers differ.
        ShardConfigValueError: a type does not exist.
    """
    if unknown := sorted(set(expected) - KINDS):
        raise ShardConfigValueError(
            f"expected: {', '.join(unknown)} is not a collective; use {', '.join(sorted(KINDS))}"
        )
    with _count_collectives() as counts:
        result = what()
    wanted = {kind: number for kind, number in expected.items() if number}
    if dict(counts) != wanted:
        raise AssertionError(f"collectives: {_words(counts)}; expected {_words(wanted)}")
    return result


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())) or "none"


def assert_peak_bytes(what: nn.Module | Record, *, at_most: int | None = None) -> int:
    """Assert the peak memory of unsharded parameters and communication in the last iteration.

    Args:
        what: a sharded model that has run, or a record.
        at_most: limit in bytes; if None, the peak that the model's plan predicts.

    Returns:
        The peak in bytes.

    Raises:
        AssertionError: the peak is larger; the message names the action after which it was reached.
        ShardConfigStateError: the model is not sharded, or has not finished an iteration.
        ShardConfigTypeError: `what` is a record, and `at_most` is missing.
    """
    record = last_record(what) if isinstance(what, nn.Module) else what
    if record is None:
        raise ShardConfigStateError("model: it is not sharded, or has not finished an iteration; run a step first")
    limit, source = at_most, "at_most"
    if limit is None:
        if not isinstance(what, nn.Module):
            raise ShardConfigTypeError("at_most: required for a record, which has no plan; pass a number of bytes")
        limit, source = make_plan(what).peak_bytes, "the plan"
    if record.peak_bytes > limit:
        at = record.live_bytes.index(record.peak_bytes)
        raise AssertionError(
            f"peak of {record.peak_bytes:,} bytes, {source} allows {limit:,}: "
            f"after action {at + 1}, {record.actions[at]}"
        )
    return record.peak_bytes
