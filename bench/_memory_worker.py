"""One process of `memory.py`: the bytes of a step by kind or on a card, or the resident memory of a rank."""

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
    """A block that keeps its input alone and runs again in backward.

    Attributes:
        place: which block of the model it is.
        backward: whether backward runs now, for all of them.
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
    """Where the memory of these tensors begins."""
    return [local(tensor).untyped_storage().data_ptr() for tensor in tensors if tensor is not None]


@contextmanager
def replaced(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Within, calls of `owner.name` go to `around`, with the function itself as the first argument."""
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
    """Notes the gradients that are about to be reduced."""
    _kinds.note(_kinds.GRADIENTS, addresses(gradients))
    return reduce(of, gradients, *args, **kwargs)


def note_lease(lease: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Notes for what a slot of the pool is leased: the caller's file tells."""
    slot = lease(*args, **kwargs)
    frame = sys._getframe(2)
    while frame.f_code.co_filename.endswith("_memory/pool.py") and frame.f_back is not None:
        frame = frame.f_back
    caller = frame.f_code.co_filename
    purpose = _kinds.REDUCE if caller.endswith("_group/reduction.py") else _kinds.GATHER
    _kinds.note(_kinds.UNSHARDED if slot.owner is not None else purpose, [slot.begin])
    return slot


def note_release(release: Callable[..., Any], pool: Any, slot: Any, *args: Any, **kwargs: Any) -> Any:
    """Notes that a slot of the pool is free."""
    _kinds.note(_kinds.FREE, [slot.begin])
    return release(pool, slot, *args, **kwargs)


@contextmanager
def noting(engine: str) -> Iterator[None]:
    """Within, the runtime's use of memory leaves notes where a stack alone would not tell."""
    if not engine.startswith("ours"):
        with replaced(_fsdp_param_group, "foreach_reduce", note_gradients):
            yield
        return
    from composable_shard._group.gradients import GroupGradients
    from composable_shard._memory.pool import BufferPool

    with (
        replaced(GroupGradients, "start_reduce", note_gradients),
        replaced(BufferPool, "lease_for", note_lease),
        replaced(BufferPool, "release", note_release),
    ):
        yield


def checkpointed(settings: dict[str, Any]) -> nn.Module:
    """The model under the engine: made without memory, sharded, then given memory with arbitrary content."""
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
    """Bytes of each kind at the peaks of a step, of rank 0 in a world whose collectives do nothing."""
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor that is not a leaf"
    )  # the profiler looks
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
    """Bytes that torch has given out on the card at most in a step, of rank 0 in a world whose collectives do nothing.

    Beside them what the engine itself counts: ours knows the bytes of its pool and what its plan foretells.
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
    """Bytes by which a rank grows at most in steps with SGD, from before it has a model.

    Those of the process, or on a card what torch's allocator has taken from it.
    """
    rank, world = _launch.join()
    mesh = init_device_mesh(settings["device"], (world,))
    _process.forget_peak()
    before = _process.resident()
    side = build(settings["engine"], settings, mesh)
    if _launch.on_card():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    measured = _process.forget_peak()  # the unsharded model that it was made from counts no more
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
