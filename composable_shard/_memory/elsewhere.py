"""What a run has on the host or on disk, where its steps are rehearsed with fake tensors.

Nothing is moved then, for there are no bytes: state is stepped in the parts in which a run steps it, and whoever counts
memory is told which tensors a device would not have.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .._policies import DiskOffloadPolicy, OffloadPolicy
from .state_on_disk import States, Step, bytes_on_disk, local_part, most_in_a_unit
from .state_on_host import bytes_of_copies


class _Sharded(Protocol):
    sharded: Any


class Rehearsed:
    """What a rehearsal has on the host.

    Attributes:
        steps: whether an optimizer steps there now, so that all it makes is there.
    """

    def __init__(self) -> None:
        self.steps = False
        self._shards: list[weakref.ref[_Sharded]] = []

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """In this context, an optimizer steps there."""
        self.steps = True
        try:
            yield
        finally:
            self.steps = False

    def note(self, params: Iterable[_Sharded]) -> None:
        """Note that the shards of parameters are there."""
        self._shards += map(weakref.ref, params)

    def shards(self) -> list[torch.Tensor]:
        """Those shards, as they are now; gradients and the state of an ordinary optimizer are with them."""
        living = [ref() for ref in self._shards]
        return [each.sharded for each in living if each is not None]


_now: list[Rehearsed] = []  # at most one


@contextmanager
def rehearsing() -> Iterator[Rehearsed]:
    """In this context, policies are noted for fake tensors, which they otherwise do nothing for."""
    _now.append(Rehearsed())
    try:
        yield _now[-1]
    finally:
        _now.pop()


def rehearsed() -> Rehearsed | None:
    """What is noted now; None outside of rehearsals."""
    return _now[-1] if _now else None


class StateElsewhere:
    """The state of one optimizer, which a run would keep on the host or on disk.

    Attributes:
        policy: that says where.
        loads_on_host: whether a load is to leave state on the host: here, it is nowhere.
    """

    loads_on_host = False

    def __init__(self, policy: OffloadPolicy) -> None:
        self.policy = policy

    def step(self, states: States, params: Sequence[torch.Tensor], step: Step) -> None:
        """Step parameters in parts, on the host; those that have no state yet one by one."""
        with (rehearsed() or Rehearsed()).stepping():
            for part in self._parts(states, params):
                step(part, part)

    def keep_all(self, states: States, params: Sequence[torch.Tensor]) -> None:
        """Leave all of it where it is."""

    @staticmethod
    def options(group: Mapping[str, Any]) -> dict[str, Any]:
        """What a step takes otherwise than the options of a param group say: nothing."""
        return {}

    def resident(self, states: States, params: Sequence[torch.Tensor]) -> int:
        """Bytes of the host's memory that a step has besides: a policy's memory, or copies of shards and gradients."""
        if isinstance(self.policy, DiskOffloadPolicy):
            return min(self.policy.memory, sum(bytes_on_disk(states.get(param, {})) for param in params))
        return bytes_of_copies(params)

    def _parts(self, states: States, params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
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
    """The tensors of a parameter's state, of this rank."""
    return [local_part(value) for value in state.values() if isinstance(value, torch.Tensor)]
