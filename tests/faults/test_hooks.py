"""Collectives in users' hooks on parameters: compared across ranks before they are issued."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _pool import distributed


def norm_of_dtensor(gradient):
    gradient.norm().full_tensor()


def full_gradient(gradient):
    gradient.full_tensor()


def own_all_reduce(gradient):
    dist.all_reduce(torch.ones(1))


def objects(gradient):
    dist.all_gather_object([None] * dist.get_world_size(), "x")


def functional(gradient):
    from torch.distributed._functional_collectives import all_reduce

    all_reduce(torch.ones(1), "sum", dist.group.WORLD).wait()


COLLECTIVES = {
    norm_of_dtensor: "all_reduce",
    full_gradient: "all_gather_into_tensor",
    own_all_reduce: "allreduce",
    objects: "allgather",
    functional: "all_reduce",
}


def on_node(param, hook):
    node = param.view_as(param).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: hook(gradients[0]))
    return node  # its hooks are lost with it


REGISTER = {
    "tensor": lambda param, hook: param.register_hook(hook),
    "accumulated": lambda param, hook: param.register_post_accumulate_grad_hook(lambda p: hook(p.grad)),
    "node": on_node,
}


def sharded():
    torch.manual_seed(0)
    model = Transformer()
    for block in model.blocks:
        cs.fully_shard(block)
    return cs.fully_shard(model)


def train(model, rank, steps):
    for step in range(steps):
        next_token_loss(model, *token_batch(rank, step)).backward()


@pytest.mark.parametrize("hook", COLLECTIVES, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("kind", ["tensor", pytest.param("accumulated", marks=pytest.mark.matrix),
                                  pytest.param("node", marks=pytest.mark.matrix)])  # fmt: skip
@distributed(world=2, limit_s=60.0)
def test_a_collective_in_a_hook_of_one_rank_is_an_error_on_all_ranks(rank, world, kind, hook):
    model = sharded()
    train(model, rank, 2)
    kept = REGISTER[kind](model.blocks[1].attention_norm.weight, hook) if rank == 0 else None
    with pytest.raises(cs.RankMismatchError, match=COLLECTIVES[hook]) as caught:
        train(model, rank, 3)
    del kept
    text = str(caught.value)
    assert "rank 0 is about to run" in text
    assert "on parameter blocks.1.attention_norm.weight, and rank 1 is about to" in text
    assert "Register the hook on all ranks, or compute with gradient.to_local()" in text
    assert not any("compute with other DTensors" in note for note in getattr(caught.value, "__notes__", ()))


def note(seen, hook, gradient):
    seen.append(hook)
    hook(gradient)


@distributed(world=2, limit_s=60.0)
def test_collectives_in_hooks_of_all_ranks_change_nothing(rank, world):
    model, other = sharded(), sharded()
    seen, kept = [], []
    for hook in COLLECTIVES:
        for register in REGISTER.values():
            noted = partial(note, seen, hook)
            kept.append(register(model.blocks[1].attention_norm.weight, noted))
    train(model, rank, 3)
    train(other, rank, 3)
    assert len(seen) == 3 * len(COLLECTIVES) * len(REGISTER)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())


@distributed(world=2, limit_s=60.0)
def test_a_hook_of_one_rank_may_use_its_shard_and_a_group_of_its_own(rank, world):
    model, other = sharded(), sharded()
    alone = dist.new_group([0])
    norms = []

    def local(gradient):
        norm = gradient.to_local().norm()
        dist.all_reduce(norm, group=alone)
        norms.append(norm.item())

    if rank == 0:
        model.blocks[1].attention_norm.weight.register_hook(local)
    train(model, rank, 3)
    train(other, rank, 3)
    assert len(norms) == 3 * (rank == 0)
    assert all(norm > 0 for norm in norms)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())


@distributed(world=2)
def test_a_compiled_function_in_a_hook_stays_compiled(rank, world):
    model = sharded()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    scale = torch.compile(lambda shard: shard * 2 + 1, backend=count)
    outputs = []
    model.blocks[1].attention_norm.weight.register_hook(lambda g: outputs.append(scale(copy.copy(g.to_local()))))
    train(model, rank, 2)
    assert len(graphs) == 1
    assert len(outputs) == 2
