"""Host memory and disk space that a rehearsed program uses instead of device memory, according to its policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from .._memory.elsewhere import Rehearsed, tensors_of
from .._memory.offload import rehearsed_apart
from .._memory.state_on_disk import bytes_on_disk
from .._policies import DiskOffloadPolicy
from .._torch.distributed import local_part


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Bytes of a rank that are not on its device.

    Attributes:
        host: bytes in host memory: shards, gradients and optimizer state, the memory of a `DiskOffloadPolicy` for its
            steps, and the copies of shards and gradients that a `HostOffloadPolicy` steps.
        disk: bytes of optimizer state on disk.
    """

    host: int = 0
    disk: int = 0

    @property
    def moved(self) -> int:
        """Bytes that a step reads from disk and writes to it, in total."""
        return 2 * self.disk

    def most(self, other: Offloaded) -> Offloaded:
        """The larger of each value."""
        return Offloaded(max(self.host, other.host), max(self.disk, other.disk))


class OffDevice:
    """Finds the tensors of a program that are not on its device.

    Args:
        rehearsed: keeps track of the shards on the host.
        optimizers: all optimizers that have stepped.
    """

    def __init__(self, rehearsed: Rehearsed, optimizers: Iterable[Optimizer]) -> None:
        self._rehearsed, self._optimizers = rehearsed, optimizers

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are on the host or on disk now."""
        elsewhere = self._shards_and_gradients()
        for optimizer in self._optimizers:
            elsewhere += [tensor for param in self._apart(optimizer) for tensor in tensors_of(optimizer.state[param])]
        return elsewhere

    def now(self) -> Offloaded:
        """The bytes that are on the host and on disk now."""
        host, disk = _nbytes(self._shards_and_gradients()), 0
        resident: dict[object, int] = {}
        for optimizer in self._optimizers:
            files = _on_disk(optimizer)
            for param in self._apart(optimizer):
                state = optimizer.state[param]
                if id(param) in files:
                    disk += bytes_on_disk(state)
                else:
                    host += _nbytes(tensors_of(state))
            for shared, nbytes in _resident(optimizer):
                resident[shared] = max(resident.get(shared, 0), nbytes)
        return Offloaded(host + sum(resident.values()), disk)

    def _shards_and_gradients(self) -> list[torch.Tensor]:
        shards = self._rehearsed.shards()
        both = [*shards, *(each.grad for each in shards if each.grad is not None)]
        return list(map(local_part, both))

    def _apart(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """The parameters of an optimizer whose state exists and is not on the device."""
        kept = rehearsed_apart(optimizer)
        apart = {id(each) for each in (*self._rehearsed.shards(), *(kept[1] if kept else ()))}
        return [param for param in optimizer.state if id(param) in apart]


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def _on_disk(optimizer: Optimizer) -> set[int]:
    """Ids of the parameters whose state is on disk."""
    kept = rehearsed_apart(optimizer)
    return {id(each) for each in kept[1]} if kept and isinstance(kept[0].policy, DiskOffloadPolicy) else set()


def _resident(optimizer: Optimizer) -> Iterator[tuple[object, int]]:
    """Bytes that an optimizer's policy keeps in host memory for steps, with the key of optimizers that share them."""
    kept = rehearsed_apart(optimizer)
    if kept is not None:
        keeper, params = kept
        policy = keeper.policy
        together = (policy.directory, policy.memory) if isinstance(policy, DiskOffloadPolicy) else id(optimizer)
        yield together, keeper.resident(optimizer.state, params)
