"""Collectives in the memory of one process: the inputs of each rank, the outputs of each rank, and the handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .._torch.core import without_dispatch_modes

Tensors = list[torch.Tensor]
Combine = Callable[[Tensors, Any], torch.Tensor]  # reduces the inputs of the ranks by a `ReduceOp`
Values = Callable[[int], Tensors]  # maps a rank in the group to its results, in the order of its outputs


@dataclass(frozen=True)
class Issued:
    """A collective that a rank has launched.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ...
        shapes, dtype: of the rank's input tensors.
        details: reduction, root or peer, as text for messages.
        group: name of the process group.
        members: global ranks of the group.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None
    details: str
    group: str
    members: tuple[int, ...]

    def __str__(self) -> str:
        tensors = ", ".join(str(list(shape)) for shape in self.shapes)
        what = f" of {str(self.dtype).removeprefix('torch.')} {tensors}" if self.shapes else ""
        return f"{self.kind}{what}{self.details} in group {self.group!r} of ranks {list(self.members)}"


@dataclass
class Call:
    """One rank's call of a collective.

    Attributes:
        issued: description for messages.
        inputs: tensors that this rank sends. There is one, or at least one per output or per rank, depending on `kind`.
        outputs: tensors that receive the results, in the order of the values (see `values_of`).
        pieces: number of equal parts that each input is split into.
        must_agree: values that must be equal on all ranks of the group.
        op, root: reduction and root, for the collectives that have one.
        on_current: whether the caller asked for a synchronous collective, which NCCL runs on the current stream.
    """

    issued: Issued
    inputs: Tensors
    outputs: Tensors
    pieces: int = 1
    must_agree: tuple[Any, ...] = ()
    op: Any = None
    root: int = 0
    on_current: bool = False

    def take_inputs(self) -> None:
        """Copy the inputs, split into their pieces. Later writes to the caller's tensors are not sent."""
        with without_dispatch_modes(), torch.no_grad():
            copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in self.inputs]
            cut = self.pieces > 1
            self.inputs = [part for copy in copies for part in (copy.view(self.pieces, -1) if cut else (copy,))]


def _all_gather(calls: list[Call], combine: Combine) -> Values:
    gathered = [call.inputs[i] for i in range(len(calls[0].inputs)) for call in calls]
    return lambda group_rank: gathered


def _reduce_scatter(calls: list[Call], combine: Combine) -> Values:
    world = len(calls)

    def values(group_rank: int) -> Tensors:
        ours = range(group_rank, len(calls[0].inputs), world)
        return [combine([call.inputs[at] for call in calls], calls[0].op) for at in ours]

    return values


def _all_reduce(calls: list[Call], combine: Combine) -> Values:
    reduced = [combine([call.inputs[i] for call in calls], calls[0].op) for i in range(len(calls[0].inputs))]
    return lambda group_rank: reduced if calls[group_rank].outputs else []


def _broadcast(calls: list[Call], combine: Combine) -> Values:
    return lambda group_rank: calls[calls[0].root].inputs if calls[group_rank].outputs else []


def _gather(calls: list[Call], combine: Combine) -> Values:
    return lambda group_rank: [call.inputs[0] for call in calls] if calls[group_rank].outputs else []


def _scatter(calls: list[Call], combine: Combine) -> Values:
    return lambda group_rank: [calls[calls[0].root].inputs[group_rank]]


def _all_to_all(calls: list[Call], combine: Combine) -> Values:
    return lambda group_rank: [call.inputs[group_rank] for call in calls]


def _barrier(calls: list[Call], combine: Combine) -> Values:
    return lambda group_rank: []


_VALUES: dict[str, Callable[[list[Call], Combine], Values]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "reduce": _all_reduce,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


def values_of(calls: list[Call], combine: Combine) -> Values:
    """The results of each rank, from the calls of all ranks in the order of the group."""
    return _VALUES[calls[0].issued.kind](calls, combine)


def fill(outputs: Tensors, values: Tensors) -> None:
    """Copy the results to a rank's outputs. As with a real backend, autograd does not record the copy."""
    with without_dispatch_modes(), torch.no_grad():
        for out, value in zip(outputs, values, strict=True):
            out.data.copy_(value.view(out.shape))


class Work(dist.Work):
    """The handle of a launched collective.

    Args:
        wait: blocks until the collective is done and its outputs are filled; may be called several times.
        ready: whether the collective is done.
        outputs: the result of the future.
    """

    def __init__(self, wait: Callable[[], object], ready: Callable[[], bool], outputs: Tensors) -> None:
        super().__init__()
        self._wait = wait
        self._ready = ready
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ready()

    def is_success(self) -> bool:
        return self._ready()

    def result(self) -> Tensors:
        return self._outputs

    def get_future(self) -> Any:
        """A completed future. This call waits, because no thread could complete the future later."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future


def together(works: Sequence[dist.Work]) -> Work:
    """Combine several handles into one."""

    def wait() -> None:
        for work in works:
            work.wait()

    return Work(wait, lambda: all(work.is_completed() for work in works), [])
