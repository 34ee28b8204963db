"""Stages of torch's pipelines (`torch.distributed.pipelining`) whose modules are sharded over data-parallel ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from _engines import ENGINES, named_mesh
from _models import Block
from _pool import distributed
from _stepping import assert_at_rest

DIM, MICROBATCHES = 8, 4


class Stage(nn.Module):
    """Two blocks, and a weight of the stage's own."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(DIM, 2 * DIM) for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x


def shard(stage, engine, mesh, reshard):
    for block in stage.blocks:
        engine(block, mesh=mesh, reshard_after_forward=reshard)
    return engine(stage, mesh=mesh, reshard_after_forward=reshard)


def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)


def batch(dp_rank, step):
    generator = torch.Generator().manual_seed(10 * step + dp_rank)
    x, target = torch.randn(2, 2 * MICROBATCHES, DIM, generator=generator)
    return x, target


def reference_step(plain, step):
    """Gradients of one process: those of each data-parallel rank, of its microbatches in order, and their mean."""
    sums = []
    for dp_rank in range(2):
        plain.zero_grad()
        x, target = batch(dp_rank, step)
        for each, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss_fn(plain(each), wanted).backward()
        sums.append([p.grad for p in plain.parameters()])
    for p, first, second in zip(plain.parameters(), *sums, strict=True):
        p.grad = ((first + second) / 2) / MICROBATCHES


def build(name, stages, indices, mesh):
    """torch's schedule over the stages of this rank."""
    group = mesh.get_group("pp")
    made = [
        PipelineStage(stages[i], i, len(stages), torch.device("cpu"), group=group) for i in indices
    ]
    kind = get_schedule_class(name)
    return kind(made[0] if name in ("1F1B", "GPipe") else made, MICROBATCHES, loss_fn=loss_fn)


PLACES = {  # stages of each pipeline rank
    "GPipe": ((0,), (1,)),
    "1F1B": ((0,), (1,)),
    "Interleaved1F1B": ((0, 2), (1, 3)),
    "LoopedBFS": ((0, 2), (1, 3)),
    "InterleavedZeroBubble": ((0, 2), (1, 3)),
    "ZBVZeroBubble": ((0, 3), (1, 2)),
    "DualPipeV": ((0, 3), (1, 2)),
}


@pytest.mark.parametrize("side", ["ours", "fsdp2"])
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("name", PLACES)
@distributed(world=4)
def test_training_is_exact(rank, world, name, reshard, side):
    mesh = named_mesh((2, 2), ("pp", "dp"))
    places = PLACES[name]
    torch.manual_seed(3)
    plain = nn.Sequential(*(Stage() for _ in range(2 * len(places[0]))))
    own = places[mesh.get_local_rank("pp")]
    stages = {i: shard(copy.deepcopy(each), ENGINES[side], mesh["dp"], reshard) if i in own else each for i, each in enumerate(plain)}
    schedule = build(name, stages, own, mesh)
    optimizers = [torch.optim.SGD(stages[i].parameters(), lr=0.1, momentum=0.9) for i in own]
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x, target = batch(mesh.get_local_rank("dp"), step)
        losses = []
        args = (x,) if 0 in own else ()
        last = len(plain) - 1 in own
        schedule.step(*args, target=target if last else None, losses=losses if last else None)
        reference_step(plain, step)
        bits = 0
        for i in own:
            for key, p in plain[i].named_parameters():
                got = stages[i].get_parameter(key).grad
                assert got is not None, key
                torch.testing.assert_close(got.full_tensor(), p.grad, msg=lambda m, n=f"{i}.{key} {step}": f"{n}: {m}")
                bits += not torch.equal(got.full_tensor(), p.grad)
        print("NOBITS", name, bits)
        for optimizer in (*optimizers, plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        for i in own:
            for key, p in plain[i].named_parameters():
                torch.testing.assert_close(stages[i].get_parameter(key).full_tensor(), p)
    if side == "ours":
        for i in own:
            assert_at_rest(stages[i])
