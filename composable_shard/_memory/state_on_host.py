"""Optimizer state in host memory, for parameters on an accelerator.

A step processes the parameters in parts. For each part, shards and gradients are copied to the host, the optimizer
steps these copies on the CPU, and the new shards are copied back. Copies to and from the host have their own lanes, so
they overlap with the step of another part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._comm.lanes import Job, Steps, lane_for
from .._torch.core import set_grad_dtype
from .._torch.distributed import local_part
from .state_on_disk import StateKeeper, States, Step, wrap_like

_PART = 64 << 20  # bytes of shards per part
_AHEAD = 2  # number of parts in flight in each direction, in addition to the part that is stepped
_AT_ONCE = 2 * _AHEAD + 1  # limit of parts on the host: copied to the host, stepped, copied back
MOST_COPIES = 2 * _AT_ONCE * _PART  # limit of bytes of copied shards and gradients, if no parameter exceeds a part


class StateOnHost(StateKeeper):
    """The state of one optimizer in host memory.

    Args:
        pins: whether copies use pinned memory. This requires an accelerator.
        fused: whether to use torch's fused step unless `fused` is set or `foreach` is True.
    """

    loads_on_host = True

    def __init__(self, pins: bool, fused: bool) -> None:
        self._pins, self._fused = pins, fused

    def step(self, states: States, params: Sequence[torch.Tensor], step: Step) -> None:
        """Step parameters.

        Args:
            states: the state of the optimizer. Its tensors are on the host, including those that the step creates.
            params: the parameters to step, all on one device.
            step: steps copies of some of the parameters.
        """
        if not params:
            return
        device = local_part(params[0]).device
        coming, going = lane_for(device), lane_for(device)
        reads: deque[tuple[Sequence[torch.Tensor], Job[list[nn.Parameter]]]] = deque()
        writes: deque[Job[None]] = deque()
        for part in _parts_of(params):
            reads.append((part, coming.start(self._to_host(part), (coming.record_current_stream(),))))
            if len(reads) > _AHEAD:
                writes.append(self._step_part(states, *reads.popleft(), step, going))
            while len(writes) > _AHEAD:
                writes.popleft().finish()
        while reads:
            writes.append(self._step_part(states, *reads.popleft(), step, going))
        while writes:
            writes.popleft().finish()

    def keep_all(self, states: States, params: Sequence[torch.Tensor]) -> None:
        """Copy state to the host if it is elsewhere, for an optimizer that has stepped before."""
        for param in params:
            state = states.get(param, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and local_part(value).device.type != "cpu":
                    state[name] = self._copy(value)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a step on the CPU that replace those of a param group."""
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
        if stream is not None:
            stream.synchronize()  # the stream waits for the copies, and the step on the host must wait for the stream
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
        """Copy parameters and their gradients to the host."""
        twins = []
        for param in part:
            twin = nn.Parameter(self._copy(param.detach()), requires_grad=True)
            assert param.grad is not None
            if param.grad.dtype is not param.dtype:
                set_grad_dtype(twin, param.grad.dtype)
            twin.grad = self._copy(param.grad)
            twins.append(twin)
        yield from ()  # a lane takes generators that yield handles of collectives; there are none here
        return twins

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        local = local_part(tensor)
        host = torch.empty_strided(local.size(), local.stride(), dtype=local.dtype, pin_memory=self._pins)
        host.copy_(local, non_blocking=True)
        return wrap_like(tensor, host)


def bytes_of_copies(params: Sequence[torch.Tensor]) -> int:
    """Peak bytes of copies of shards and gradients on the host, in a step of these parameters."""
    if not params:
        return 0
    sizes = [sum(local_part(param).nbytes for param in part) for part in _parts_of(params)]
    return 2 * max(sum(sizes[begin : begin + _AT_ONCE]) for begin in range(len(sizes)))


def _back(part: Sequence[torch.Tensor], twins: Sequence[torch.Tensor]) -> Steps[None]:
    for param, twin in zip(part, twins, strict=True):
        local_part(param.detach()).copy_(local_part(twin.detach()), non_blocking=True)
    yield from ()  # as above


def _parts_of(params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    part: list[torch.Tensor] = []
    nbytes = 0
    for param in params:
        size = local_part(param).nbytes
        if part and nbytes + size > _PART:
            yield part
            part, nbytes = [], 0
        part.append(param)
        nbytes += size
    yield part
