"""Explains out-of-memory errors: a note lists the bytes by category, and ways to use less memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._group.group import ParamGroup
from .._group.optimizers import state_of_optimizers
from .._memory.pool import BufferPool
from .._plan.fitting import least_step
from .._plan.plan import ShardPlan
from .._plan.text import mib
from .._torch.distributed import local_part

_TITLE = "memory of a sharded model on"
_KINDS = torch.OutOfMemoryError, MemoryError
# Words in the errors of allocators and libraries.
_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")


class MemoryUsers(NamedTuple):
    """The groups of one engine, their memory, and the plan that the engine follows."""

    groups: Sequence[ParamGroup]
    pool: BufferPool
    plan: ShardPlan


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed on any device. torch has an error type for this on accelerators only."""
    return isinstance(error, _KINDS) or (isinstance(error, RuntimeError) and any(w in str(error) for w in _WORDS))


def explain(error: BaseException, parts: Sequence[MemoryUsers]) -> None:
    """Add a note to an error if memory has run out and the error has no such note yet.

    Args:
        error: any error.
        parts: the parts of the model; empty if it has not run.
    """
    if not parts or not is_out_of_memory(error) or any(_TITLE in note for note in getattr(error, "__notes__", ())):
        return
    try:
        note = "\n".join(_lines(parts))
    except Exception as problem:  # must not replace the error that the note explains
        note = f"{_TITLE} this rank could not be counted: {type(problem).__name__}: {problem}"
    error.add_note(note)


class _Allocator(NamedTuple):
    """Statistics of an accelerator's allocator, in bytes: allocated to tensors now, the peak of that, and reserved."""

    allocated: int
    peak: int
    reserved: int


def _allocator_of(device: torch.device) -> _Allocator | None:
    """The allocator's statistics; None if it has none, as on the CPU."""
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    if not hasattr(module, "memory_reserved"):
        return None
    return _Allocator(
        module.memory_allocated(device), module.max_memory_allocated(device), module.memory_reserved(device)
    )


class _Held:
    """The bytes in use on this rank.

    Attributes:
        parts: the parts of the model.
        device: the device on which the model computes.
        kinds: bytes by device type, for each category of tensors that the model and its optimizers hold.
        pool: bytes that the pools hold.
        allocator: the allocator's statistics; None if it has none.
    """

    def __init__(self, parts: Sequence[MemoryUsers]) -> None:
        self.parts = parts
        self.device = parts[0].pool.memory.device
        groups = [group for part in parts for group in part.groups]
        shards = [shard for group in groups for shard in group.shards]
        self.kinds = {
            "parameters (sharded)": _bytes_by_device(shards),
            "gradients": _bytes_by_device([shard.grad for shard in shards if shard.grad is not None]),
            "gradients that wait for their reduction": _bytes_by_device(
                [gradient for group in groups for gradient in group.gradients.waiting()]
            ),
            "optimizer state": _bytes_by_device(state_of_optimizers(shards)),
            _COPIES: _bytes_by_device(_copies(groups)),
        }
        self.pool = sum(part.pool.held_bytes for part in parts)
        self.allocator = _allocator_of(self.device)

    @property
    def on_device(self) -> int:
        """Bytes of all categories on the device of the model, without the pool."""
        return sum(kind[self.device.type] for kind in self.kinds.values())

    def rest(self) -> tuple[int, int] | None:
        """Bytes of all other allocations, now and at the allocator's peak; None if not known."""
        if self.allocator is None:
            return None
        known = self.on_device + self.pool
        return max(0, self.allocator.allocated - known), max(0, self.allocator.peak - known)


_COPIES = "compute copies (outer_sharding)"


def _copies(groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
    made = [group.layout.copies for group in groups if group.layout.copies is not None]
    return [tensor for copies in made for tensor in copies.tensors()]


def _bytes_by_device(tensors: Iterable[torch.Tensor]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for tensor in tensors:
        local = local_part(tensor)
        counted[local.device.type] += local.nbytes
    return counted


def _lines(parts: Sequence[MemoryUsers]) -> Iterator[str]:
    held = _Held(parts)
    rank = f"rank {dist.get_rank()}, " if dist.is_initialized() else ""
    yield f"{_TITLE} {rank}{held.device}:"
    for name, kind in held.kinds.items():
        if kind or name not in ("gradients that wait for their reduction", _COPIES):
            yield f"  {name}: {_amount(kind, held.device.type)}"
    live, peak = (sum(getattr(part.pool, name) for part in parts) for name in ("live_bytes", "peak_bytes"))
    yield (
        f"  pool (gathered weights and communication): {mib(held.pool)}, {mib(live)} of it in use now, "
        f"peak use {mib(peak)}"
    )
    rest = held.rest()
    if rest is None:
        yield f"  activations and everything else: unknown, the allocator of {held.device.type} has no statistics"
    else:
        yield f"  activations and everything else: {mib(rest[0])} now, {mib(rest[1])} at the peak"
    yield "ways to use less memory, with the most that each can save:"
    for nbytes, advice in sorted(_advice(held), key=lambda line: -line[0]):
        yield f"  {mib(nbytes) if nbytes else 'unknown'}: {advice}"


def _amount(kind: Counter[str], device: str) -> str:
    """Bytes on the model's device; amounts on other devices name the device."""
    amounts = [mib(nbytes) + ("" if where == device else f" on {where}") for where, nbytes in kind.items()]
    return " and ".join(amounts) or mib(0)


def _advice(held: _Held) -> Iterator[tuple[int, str]]:
    """Ways to use less memory, with the most bytes that each can save; 0 if not known."""
    rest = held.rest()
    activations = 0 if rest is None else rest[1]
    if rest is None or activations:
        yield activations, "activation checkpointing (torch.utils.checkpoint) of each block"
        yield activations, "smaller microbatches, with gradient accumulation"
    waiting = held.kinds["gradients that wait for their reduction"][held.device.type]
    if waiting:
        yield waiting, "set_requires_gradient_sync(True): reduce gradients in each microbatch"
    if held.device.type != "cpu" and held.on_device:
        yield held.on_device - waiting, "offload_policy=CPUOffloadPolicy(): parameters, gradients, optimizer on the CPU"
    if held.allocator is not None and (free := held.allocator.reserved - held.allocator.allocated) > 0:
        yield free, "PYTORCH_ALLOC_CONF=expandable_segments:True: the allocator reserves this in unused fragments"
    for part in held.parts:
        yield from _advice_for(part)


def _advice_for(part: MemoryUsers) -> Iterator[tuple[int, str]]:
    """Ways to use less memory for the pool of a part."""
    groups, pool, plan = part
    kept = [group for group in groups if not (group.is_root or group.options.reshards(False))]
    if len(kept) > 1:
        nbytes = [group.layout.weight_bytes for group in kept]
        named = f"{kept[0].name} and {len(kept) - 1} more"
        yield sum(nbytes) - max(nbytes), f"reshard_after_forward=True (ZeRO-3 instead of ZeRO-2) for {named}"
    if len(groups) == 1:
        yield pool.peak_bytes, "fully_shard on each block as well: now all parameters are one group, gathered together"
    steps, sizes, _ = plan.schedule_inputs()
    least = least_step(steps, sizes).peak
    if plan.pool.budget is None and pool.peak_bytes > least:
        yield pool.peak_bytes - least, f"a pool budget of at least PoolPolicy(budget={least})"
