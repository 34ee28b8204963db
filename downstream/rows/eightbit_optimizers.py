"""Rows for 8-bit optimizers on shards that consist of whole quantization blocks of the optimizer state.

The result is compared with the optimizer of the unsharded model. FSDP2 has no such placement, so it fails. Both
libraries require plain tensors, so they get the local shard of each parameter, which shares its memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
import torch.distributed as dist
import torchao.optim
from _transformer import Config, loss_of, shard, transformer, whole
from torch import nn

from _rows import Rows, Run
from composable_shard import Ragged

rows = Rows("8-bit optimizers", environment="opt8", versions=("bitsandbytes", "torchao", "torch"))

BLOCK = 256  # elements per scale, in both libraries
# Shards consist of whole blocks and differ in size. torchao does not quantize states of fewer than 4096 elements.
SIZES = Config(vocabulary=66, dim=128, hidden=134, head_dim=32)

Make = Callable[[list[Any]], torch.optim.Optimizer]


def respecting(parameter: nn.Parameter) -> Ragged | None:
    """Return a placement that cuts only between whole blocks: a multiple of rows that fills blocks."""
    width = parameter[0].numel() if parameter.ndim > 1 else 1
    return Ragged(BLOCK // math.gcd(BLOCK, width))


def compare(run: Run, make: Make) -> None:
    """Train the sharded model, and train the unsharded model with the same gradients."""
    dist.init_process_group("gloo")
    plain = transformer(SIZES)
    model = shard(transformer(SIZES), shard_placement_fn=respecting)
    run.sharded(model)
    shards = [nn.Parameter(parameter.to_local().detach()) for parameter in model.parameters()]
    held = [each for each in shards if each.numel()]
    ours, alone = make(held), make(list(plain.parameters()))
    for step in range(4):
        loss_of(model, step, run.rank).backward()
        for parameter, own, other in zip(model.parameters(), shards, plain.parameters(), strict=True):
            own.grad, other.grad = parameter.grad.to_local().clone(), parameter.grad.full_tensor()
        ours.step()
        alone.step()
        model.zero_grad()
    run.agrees("weights", whole(model), whole(plain), tolerance=0.0)
    bytes_of = [tensor.nbytes for state in ours.state.values() for tensor in map(stored, state.values())]
    run.note("bytes of state", sum(bytes_of))


def stored(value: Any) -> torch.Tensor:
    """Return the 8-bit tensor of a state, or an empty tensor if the state is not quantized."""
    value = getattr(value, "codes", value)
    return value if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 else torch.empty(0)


def add(title: str, make: Make) -> None:
    rows.add(title, lambda run: compare(run, make))


for each in (bitsandbytes.optim.AdamW8bit, bitsandbytes.optim.Lion8bit):
    add(f"bitsandbytes, {each.__name__}", lambda params, each=each: each(params, lr=1e-2, min_8bit_size=1))


def eager(params: list[Any]) -> torch.optim.Optimizer:
    torch.compiler.set_stance("force_eager")  # torchao would compile a step for each shape
    return torchao.optim.AdamW8bit(params, lr=torch.tensor(1e-2), block_size=BLOCK)


add("torchao, AdamW8bit", eager)
