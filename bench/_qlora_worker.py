"""One rank of `qlora.py`: measure one engine with one type of frozen base."""

import gc
import logging
import os
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import _engines
import _launch
from _figures_worker import forget_peak, memory, most, now, slowest
from _models import GPT, SIZES, GPTBlock
from _step_worker import Side, batch, run

LEARNING_RATE = 1e-4
WARM_STEPS = 3
CHECKPOINTS = 3  # after one for warm-up
RANK = 8  # rank of the adapters
BF16 = torch.bfloat16


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank adapter."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inputs, RANK, bias=False, dtype=BF16)
        self.up = nn.Linear(RANK, outputs, bias=False, dtype=BF16)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def quantized(layer: nn.Linear, base: str) -> nn.Module:
    """Return the frozen layer: unchanged for `bf16`, quantized by bitsandbytes for `nf4` and `int8`."""
    if base == "bf16":
        return layer
    import bitsandbytes

    sizes = layer.in_features, layer.out_features, False
    made: nn.Module
    if base == "int8":
        made = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
    else:
        made = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=BF16, quant_type="nf4", quant_storage=BF16)
    made.load_state_dict(layer.state_dict())
    made.weight = made.weight.to(layer.weight.device)  # quantizes
    return made


def adapted(block: nn.Module, base: str, quantize: Callable[[nn.Linear, str], nn.Module] = quantized) -> nn.Module:
    """Freeze the block and add an adapter to each of its linear layers."""
    block.requires_grad_(False)
    for module in list(block.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, Adapted(quantize(layer, base), layer.in_features, layer.out_features))
    return block


def built(engine: str, settings: dict[str, Any], mesh: DeviceMesh) -> nn.Module:
    """Build the model with the engine. Each block is created, quantized and sharded before the next one."""
    shard = SHARDS[engine]()
    config = SIZES[settings["size"]]
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(config)
    for index in range(config.depth):
        block = GPTBlock(config)
        for name, module in block.named_modules():
            model.init_module(f"blocks.{index}.{name}", module)  # type: ignore[operator]
        model.blocks[index] = block = adapted(block.to(BF16), settings["base"])  # type: ignore[operator, index, assignment]
        shard(block, mesh=mesh)
    for name in ("embedding", "norm", "head"):
        module = model.get_submodule(name).to_empty(device="cpu").to(BF16)
        model.init_module(name, module)  # type: ignore[operator]
        module.requires_grad_(False)
    shard(model, mesh=mesh)
    return _engines.build(engine, model, GPTBlock, mesh) if engine == "ddp" else model


def _ours() -> Callable[..., object]:
    import composable_shard  # not imported when other engines are measured

    return composable_shard.fully_shard


SHARDS: dict[str, Callable[[], Callable[..., object]]] = {
    "ours": _ours,
    "fsdp2": lambda: fully_shard,
    "ddp": lambda: lambda *_, **__: None,
    "compute": lambda: lambda *_, **__: None,
}


class Received(TorchDispatchMode):
    """Counts the bytes that this rank receives from its peers in collectives."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.nbytes = 0
        self._share = (world - 1) / world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::recv"):
            self.nbytes += _nbytes(args[0])
        elif name.startswith(("c10d::_allgather", "c10d::allgather")):
            self.nbytes += int(self._share * _nbytes(args[0]))
        elif name.startswith(("c10d::_reduce_scatter", "c10d::reduce_scatter", "c10d::alltoall")):
            self.nbytes += int(self._share * _nbytes(args[1]))
        elif name.startswith("c10d::broadcast") and args[2] != dist.get_rank():  # its root
            self.nbytes += _nbytes(args[0])
        elif name.startswith("c10d::allreduce"):
            self.nbytes += int(2 * self._share * _nbytes(args[0]))
        return func(*args, **(kwargs or {}))


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(map(_nbytes, tensors))


def kept() -> int:
    """Return the bytes of all tensors of this process."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, Tensor):
            local = each.to_local() if isinstance(each, DTensor) else each
            storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(storages.values())


def checkpointed(side: Side) -> dict[str, float]:
    """Time the save and the load of adapters and optimizer state with torch's distributed checkpoints, in seconds."""
    folder = Path(os.environ["BENCH_FOLDER"], "checkpoint")
    adapters = {name: p for name, p in side.model.named_parameters() if p.requires_grad}
    moments = {f"{name}.{key}": value for name, p in adapters.items() for key, value in side.optimizer.state[p].items()}
    state = {name: p.detach() for name, p in adapters.items()} | moments
    work = {
        "write_s": lambda: dcp.save(state, checkpoint_id=folder),
        "read_s": lambda: dcp.load(state, checkpoint_id=folder),
    }
    return {key: statistics.median([slowest(each) for _ in range(1 + CHECKPOINTS)][1:]) for key, each in work.items()}


def measure(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Measure one engine. If it fails, return the error. For the unsharded model, measure only step time and losses."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # hide messages of bitsandbytes about casts
    try:
        return figures(settings, rank, world)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        said = " ".join(str(error).split())
        return {"error": f"{type(error).__name__}: {said[:200]}"}


def figures(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """See `measure`."""
    mesh = init_device_mesh("cpu", (world,))
    _engines.load(settings["engine"])
    quantized(nn.Linear(64, 64, bias=False), settings["base"])  # exclude imports from start-up time
    forget_peak()
    before, tensors = memory(), kept()
    dist.barrier()
    begins = now()
    model = built(settings["engine"], settings, mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    side = Side(settings["engine"], model, optimizer)

    def step(number: int) -> float:
        loss = side.gradients(batch(settings["size"], settings["batch"], rank, number))
        optimizer.step()
        return loss.item()

    losses = [step(0)]
    result: dict[str, Any] = {"start_s": most(now() - begins)}
    losses += [step(number) for number in range(1, WARM_STEPS)]
    numbers = iter(range(WARM_STEPS, WARM_STEPS + settings["steps"]))
    result["step_s"] = statistics.median(slowest(lambda: step(next(numbers))) for _ in range(settings["steps"]))
    result["losses"] = [float(_launch.everyone(torch.tensor(loss)).mean()) for loss in losses]
    if side.alone:
        return result
    result["peak"] = most(memory(most=True) - before)
    optimizer.zero_grad()
    result["kept"] = most(kept() - tensors)
    with Received(world) as received:
        step(0)
    return result | {"received": most(received.nbytes)} | checkpointed(side)


if __name__ == "__main__":
    run(measure)
