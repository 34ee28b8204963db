"""The state of an optimizer in the memory of the host, while its parameters are on an accelerator.

A step goes through the parameters in parts: shards and gradients of some are copied to the host, the optimizer steps
these copies on the CPU, and the stepped shards are copied back. The copies have lanes of their own, so those of the
next part come while one part is stepped, and those of the part before go back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._comm.lanes import Awaitable, Job, Steps, lane_for
from .._torch.distributed import dtensor_at
from .state_on_disk import local_part

_PART = 64 << 20  # bytes of shards that are stepped at a time
_AHEAD = 2  # parts that are on the host at once beside the one that is stepped
_AT_ONCE = 2 * _AHEAD + 1  # parts: those that come, the one that is stepped, and those that go back
MOST_COPIES = 2 * _AT_ONCE * _PART  # bytes of copies of shards and gradients, where no parameter is larger than a part
States = MutableMapping[Any, dict[str, Any]]
Step = Callable[[Sequence[Any], Sequence[Any]], None]  # parameters, and what is stepped in their place


class StateOnHost:
    """The state of one optimizer.

    Attributes:
        loads_on_host: whether a load is to leave state on the host, and not where its parameter is.

    Args:
        pins: whether copies are in pinned memory, which is for an accelerator.
        fused: whether it takes torch's fused step where neither that nor another one is asked for.
    """

    loads_on_host = True

    def __init__(self, pins: bool, fused: bool) -> None:
        self._pins, self._fused = pins, fused

    def step(self, states: States, params: Sequence[torch.Tensor], step: Step) -> None:
        """Step parameters.

        Args:
            states: of the optimizer; its tensors are on the host, and those that the step makes are made there.
            params: to step; of one device.
            step: steps copies of some of them.
        """
        if not params:
            return
        device = local_part(params[0]).device
        coming, going = lane_for(device), lane_for(device)
        reads: deque[tuple[Sequence[torch.Tensor], Job[list[nn.Parameter]]]] = deque()
        writes: deque[Job[None]] = deque()
        for part in _parts_of(params):
            reads.append((part, coming.start(self._to_host(part), (coming.mark(),))))
            if len(reads) > _AHEAD:
                writes.append(self._step_part(states, *reads.popleft(), step, going))
            while len(writes) > _AHEAD:
                writes.popleft().finish()
        while reads:
            writes.append(self._step_part(states, *reads.popleft(), step, going))
        while writes:
            writes.popleft().finish()

    def keep_all(self, states: States, params: Sequence[torch.Tensor]) -> None:
        """Copy state to the host that is not there: of an optimizer that has stepped before."""
        for param in params:
            state = states.get(param, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and local_part(value).device.type != "cpu":
                    state[name] = self._copy(value)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What a step on the CPU takes otherwise than the options of a param group say."""
        moved = {name: value.cpu() for name, value in group.items() if isinstance(value, torch.Tensor)}
        chosen = self._fused and group.get("fused") is None and not group.get("foreach")
        return {
            **moved,
            **({"fused": True} if chosen else {}),
            **({"capturable": False} if "capturable" in group else {}),
        }

    def _step_part(
        self,
        states: States,
        part: Sequence[torch.Tensor],
        copies: Job[list[nn.Parameter]],
        step: Step,
        going: Any,
    ) -> Job[None]:
        twins = copies.finish()
        stream = going.current()
        if stream is not None:  # which waits for the copies now; the step is on the host, so the host waits for it
            stream.synchronize()
        for param, twin in zip(part, twins, strict=True):
            if param in states:
                states[twin] = states.pop(param)
        try:
            step(part, twins)
        finally:
            for param, twin in zip(part, twins, strict=True):
                if twin in states:
                    states[param] = states.pop(twin)
        job: Job[None] = going.start(_back(part, twins), held=twins)
        return job

    def _to_host(self, part: Sequence[torch.Tensor]) -> Steps[list[nn.Parameter]]:
        """Copies of parameters and their gradients."""
        twins = []
        for param in part:
            twin = nn.Parameter(self._copy(param.detach()), requires_grad=True)
            assert param.grad is not None
            twin.grad = self._copy(param.grad)
            twins.append(twin)
        yield from _nothing()
        return twins

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        local = local_part(tensor)
        host = torch.empty_strided(local.size(), local.stride(), dtype=local.dtype, pin_memory=self._pins)
        host.copy_(local, non_blocking=True)
        return dtensor_at(host, tensor.device_mesh, tensor.placements, tensor) if isinstance(tensor, DTensor) else host


def bytes_of_copies(params: Sequence[torch.Tensor]) -> int:
    """Bytes of the copies of shards and gradients that are on the host at once, at most, in a step of parameters."""
    if not params:
        return 0
    sizes = [sum(map(_nbytes, part)) for part in _parts_of(params)]
    return 2 * max(sum(sizes[begin : begin + _AT_ONCE]) for begin in range(len(sizes)))


def _back(part: Sequence[torch.Tensor], twins: Sequence[torch.Tensor]) -> Steps[None]:
    for param, twin in zip(part, twins, strict=True):
        local_part(param.detach()).copy_(local_part(twin.detach()), non_blocking=True)
    yield from _nothing()


def _nothing() -> Iterator[Awaitable]:
    """No handles to wait for: what is copied is in the lane."""
    yield from ()


def _parts_of(params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    part: list[torch.Tensor] = []
    nbytes = 0
    for param in params:
        size = _nbytes(param)
        if part and nbytes + size > _PART:
            yield part
            part, nbytes = [], 0
        part.append(param)
        nbytes += size
    yield part


def _nbytes(param: torch.Tensor) -> int:
    local = local_part(param)
    return local.numel() * local.element_size()
