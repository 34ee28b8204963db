"""Offload in rehearsals: which tensors a run would have on the host or on disk, when its steps use fake tensors.

Fake tensors have no bytes to move. A rehearsal steps the optimizer in parts, as a run does, and records which tensors
would not be in device memory, so that memory estimates can leave them out. If all parameters have state, that on disk
has the same parts as in a run. With state on the host, each parameter is a part of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .._policies import DiskOffloadPolicy, OffloadPolicy
from .._torch.distributed import local_part
from .state_on_disk import StateKeeper, States, Step, bytes_on_disk, most_in_a_unit
from .state_on_host import bytes_of_copies


class _Sharded(Protocol):
    sharded: Any


class Rehearsed:
    """The tensors that a rehearsal would have on the host.

    Attributes:
        steps: whether an optimizer is stepping on the host, so that all new tensors are on the host.
    """

    def __init__(self) -> None:
        self.steps = False
        self._shards: list[weakref.ref[_Sharded]] = []

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context in which an optimizer steps on the host."""
        self.steps = True
        try:
            yield
        finally:
            self.steps = False

    def note(self, params: Iterable[_Sharded]) -> None:
        """Record that the shards of these parameters are on the host."""
        self._shards += map(weakref.ref, params)

    def shards(self) -> list[torch.Tensor]:
        """The current shards on the host. Their gradients and the state of ordinary optimizers are on the host, too."""
        living = [ref() for ref in self._shards]
        return [each.sharded for each in living if each is not None]


_now: list[Rehearsed] = []  # at most one


@contextmanager
def rehearsing() -> Iterator[Rehearsed]:
    """Context in which offload policies are recorded for fake tensors. Elsewhere fake tensors ignore them."""
    _now.append(Rehearsed())
    try:
        yield _now[-1]
    finally:
        _now.pop()


def rehearsed() -> Rehearsed | None:
    """The current rehearsal; None outside of rehearsals."""
    return _now[-1] if _now else None


class StateElsewhere(StateKeeper):
    """The state of one optimizer that a run would keep on the host or on disk.

    Attributes:
        policy: the offload policy.
    """

    def __init__(self, policy: OffloadPolicy) -> None:
        self.policy = policy

    def step(self, states: States, params: Sequence[torch.Tensor], step: Step) -> None:
        """Step parameters on the host, in parts."""
        with (rehearsed() or Rehearsed()).stepping():
            for part in self._parts(states, params):
                step(part, part)

    def keep_all(self, states: States, params: Sequence[torch.Tensor]) -> None:
        """Do nothing: fake state need not be moved."""

    def resident(self, states: States, params: Sequence[torch.Tensor]) -> int:
        """Additional bytes of host memory in a step: the policy's memory, or copies of shards and gradients."""
        if isinstance(self.policy, DiskOffloadPolicy):
            return min(self.policy.memory, sum(bytes_on_disk(states.get(param, {})) for param in params))
        return bytes_of_copies(params)

    def _parts(self, states: States, params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The parameters of each part. A parameter without state begins a new one."""
        most = most_in_a_unit(self.policy.memory) if isinstance(self.policy, DiskOffloadPolicy) else 0
        part: list[torch.Tensor] = []
        held = 0
        for param in params:
            nbytes = bytes_on_disk(states.get(param, {}))
            if part and (not nbytes or held + nbytes > most):
                yield part
                part, held = [], 0
            part.append(param)
            held += nbytes
        if part:
            yield part


def tensors_of(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """The local tensors of a parameter's state."""
    return [local_part(value) for value in state.values() if isinstance(value, torch.Tensor)]
