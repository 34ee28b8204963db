"""One process of `memory.py`: bytes of a step by type, GPU memory of a step, or resident memory of a rank."""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import _device
import _engines
import _kinds
import _launch
import _noop
import _process
from _models import GPT, SIZES, GPTBlock
from _step_worker import batch, build

WARM_STEPS = 2


class Checkpointed(GPTBlock):  # type: ignore[misc, valid-type]
    """A block with activation checkpointing.

    Attributes:
        place: index of the block.
        backward: whether backward is running (for all blocks).
    """

    place: int
    backward = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._once, x, use_reentrant=False)

    def _once(self, x: Tensor) -> Tensor:
        _kinds.note(_kinds.MOMENT + f"{'backward' if Checkpointed.backward else 'forward'}, block {self.place}")
        return super().forward(x)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the addresses of the storages of these tensors."""
    return [local(tensor).untyped_storage().data_ptr() for tensor in tensors if tensor is not None]


@contextmanager
def replaced(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Replace `owner.name` by `around`, which gets the original function as its first argument."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def note_gradients(
    reduce: Callable[..., Any], of: Any, gradients: Sequence[Tensor | None], *args: Any, **kwargs: Any
) -> Any:
    """Note the gradients before they are reduced."""
    _kinds.note(_kinds.GRADIENTS, addresses(gradients))
    return reduce(of, gradients, *args, **kwargs)


def note_lease(lease: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Note the purpose of a leased slot, which depends on the caller's file."""
    slot = lease(*args, **kwargs)
    frame = sys._getframe(2)
    while frame.f_code.co_filename.endswith("_memory/pool.py") and frame.f_back is not None:
        frame = frame.f_back
    caller = frame.f_code.co_filename
    purpose = _kinds.REDUCE if caller.endswith("_group/reduction.py") else _kinds.GATHER
    _kinds.note(_kinds.UNSHARDED if slot.owner is not None else purpose, [slot.begin])
    return slot


def note_release(release: Callable[..., Any], pool: Any, slot: Any, *args: Any, **kwargs: Any) -> Any:
    """Note that a slot of the pool is free."""
    _kinds.note(_kinds.FREE, [slot.begin])
    return release(pool, slot, *args, **kwargs)


@contextmanager
def noting(engine: str) -> Iterator[None]:
    """Add notes to the profile for uses of memory that cannot be recognized from the stack."""
    if not engine.startswith("ours"):
        with replaced(_fsdp_param_group, "foreach_reduce", note_gradients):
            yield
        return
    from composable_shard._group.gradients import GroupGradients
    from composable_shard._memory.pool import BufferPool

    with (
        replaced(GroupGradients, "start_reduce", note_gradients),
        replaced(BufferPool, "lease", note_lease),
        replaced(BufferPool, "release", note_release),
    ):
        yield


def checkpointed(settings: dict[str, Any]) -> nn.Module:
    """Build the model on the meta device, shard it, and allocate it without initialization."""
    config = replace(SIZES[settings["size"]], context=settings["context"])
    with torch.device("meta"):
        model = GPT(config)
    for place, block in enumerate(model.blocks):
        block.__class__ = Checkpointed
        block.place = place
    device = settings["device"]
    mesh = init_device_mesh(device, (settings["simulated"],))
    if settings["engine"] in ("plain", "ddp"):
        return _engines.build(settings["engine"], model.to_empty(device=device), GPTBlock, mesh)
    return _engines.build(settings["engine"], model, GPTBlock, mesh).to_empty(device=device)


def live(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of each type at the peaks of a step, on rank 0 with collectives that do nothing."""
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor that is not a leaf"
    )  # the profiler reads .grad
    _noop.init(settings["simulated"])
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as watched,
        noting(settings["engine"]),
    ):
        model = checkpointed(settings)
        _kinds.note(_kinds.OWN, addresses([*model.parameters()]))
        ids = torch.randint(256, (settings["batch"], settings["context"] + 1))
        for step in range(WARM_STEPS + 1):
            model.zero_grad(set_to_none=True)
            if step == WARM_STEPS:
                _kinds.note(_kinds.BEGINS)
            for micro in range(settings["microbatches"]):
                if settings["microbatches"] > 1:
                    model.set_requires_gradient_sync(micro == settings["microbatches"] - 1)
                Checkpointed.backward = False
                _kinds.note(_kinds.MOMENT + "forward, root")
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                Checkpointed.backward = True
                _kinds.note(_kinds.MOMENT + "backward, root")
                loss.backward()
        _kinds.note(_kinds.ENDS)
        _kinds.note(_kinds.OWN_GRADIENTS, addresses([p.grad for p in model.parameters()]))
    runtime, total, apart = _kinds.peaks(_kinds.read(watched))
    count = sum(p.numel() for p in model.parameters())
    return {"parameters": count, "runtime": vars(runtime), "total": vars(total), "apart": apart}


def card(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the peak of allocated GPU memory in a step, in bytes, on rank 0 with collectives that do nothing.

    For ours, also return the bytes of the pool and the peak that the plan predicts.
    """
    _device.select(settings["device"])
    _noop.init(settings["simulated"])
    before = torch.cuda.memory_allocated()
    model = checkpointed(settings)
    own = sum(local(p).nbytes for p in model.parameters())
    ids = torch.randint(256, (settings["batch"], settings["context"] + 1), device=settings["device"])
    for step in range(WARM_STEPS + 1):
        model.zero_grad(set_to_none=True)
        between = _device.forget_peak() - before if step == WARM_STEPS else 0
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    found = {"peak": _device.peak() - before, "reserved": torch.cuda.max_memory_reserved(), "between": between}
    found |= {"own": own, "pool": None, "planned": None}
    if settings["engine"].startswith("ours"):
        import composable_shard

        figures = composable_shard.stats(model)
        found |= {"pool": int(figures["pool/held_bytes"]), "planned": int(figures["plan/peak_bytes"])}
    return found | {"parameters": sum(p.numel() for p in model.parameters())}


def resident(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the peak memory of a rank in steps with SGD, in bytes, above its memory before the model.

    This is resident memory, or on a GPU the memory that torch's allocator reserved.
    """
    rank, world = _launch.join()
    mesh = init_device_mesh(settings["device"], (world,))
    _process.forget_peak()
    before = _process.resident()
    side = build(settings["engine"], settings, mesh)
    if _launch.on_card():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    measured = _process.forget_peak()  # exclude the memory of the unsharded model
    for step in range(settings["steps"]):
        side.gradients(batch(settings["size"], settings["batch"], rank, step).to(settings["device"]))
        side.optimizer.step()
    grown = _process.resident("VmHWM") - before if measured else -1
    if _launch.on_card():
        grown = torch.cuda.max_memory_reserved()
    return {"resident": _launch.everyone(torch.tensor(grown)).max().item()}


PARTS = {"live": live, "card": card, "resident": resident}


def main() -> None:
    settings = json.loads(sys.argv[1])
    found = PARTS[settings["part"]](settings)
    if dist.get_rank() == 0:
        _launch.answer(json.dumps(found))
    _launch.leave()


if __name__ == "__main__":
    main()
