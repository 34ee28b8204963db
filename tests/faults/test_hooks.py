"""Collectives in users' hooks on parameters: compared across ranks before they are issued."""

from __future__ import annotations

import copy
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import mesh_of
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
@pytest.mark.parametrize("kind", ["tensor", pytest.param("accumulated", marks=pytest.mark.matrix), "node"])
@distributed(world=2, limit_s=60.0)
def test_a_collective_in_a_hook_of_one_rank_is_an_error_on_all_ranks(rank, world, kind, hook):
    model = sharded()
    train(model, rank, 2)
    kept = REGISTER[kind](model.blocks[1].attention_norm.weight, hook) if rank == 0 else None
    with pytest.raises(cs.errors.RankMismatchError, match=COLLECTIVES[hook]) as caught:
        train(model, rank, 3)
    del kept
    text = str(caught.value)
    notes = getattr(caught.value, "__notes__", ())
    assert rank != 0 or any("test_hooks.py" in note for note in notes), "the note names the hook"
    assert "rank 0 is about to run" in text
    assert "on parameter blocks.1.attention_norm.weight, and rank 1 is about to" in text
    assert "Register the hook on all ranks, or compute with gradient.to_local()" in text
    assert not any("compute with other DTensors" in note for note in notes)


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


@distributed(world=2, limit_s=60.0)
def test_a_hook_carried_from_before_sharding_is_compared(rank, world):
    model = Transformer()
    kept = on_node(model.blocks[1].attention_norm.weight, own_all_reduce) if rank == 0 else None
    for block in model.blocks:
        cs.fully_shard(block)
    cs.fully_shard(model)
    with pytest.raises(
        cs.errors.RankMismatchError, match=r"rank 0 is about to run allreduce in a hook on parameter blocks\.1"
    ):
        train(model, rank, 3)
    del kept


@distributed(world=4, limit_s=60.0)
def test_a_collective_over_one_axis_of_replicas_is_compared(rank, world):
    torch.manual_seed(0)
    model = Transformer()
    for module in (*model.blocks, model):
        cs.fully_shard(module, mesh=mesh_of(2, 2))
    if rank == 0:
        model.blocks[1].attention_norm.weight.register_hook(full_gradient)
    with pytest.raises(cs.errors.ComposableShardError):
        train(model, rank, 3)


def log(gradient, norms):
    norms.append(gradient.full_tensor().norm().item())


def take_part(gradient):
    gradient.full_tensor()


def to_rank_0(gradient, norms):
    own = gradient.to_local().norm().reshape(1)
    if dist.get_rank() == 0:
        dist.recv(own, 1)
        norms.append(own.item())
    else:
        dist.send(own, 0)


def in_own_group(gradient, norms):
    """In a process group that was made without torch's registry."""
    store = dist.PrefixStore(str(len(norms)), dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroupGloo(store, dist.get_rank(), 2, timedelta(seconds=20))
    norm = gradient.to_local().norm().reshape(1)
    group.allreduce([norm]).wait()
    norms.append(norm.item())


def branching(gradient, norms):
    shard = gradient.to_local()
    norms.append(torch.cond(shard.sum() > 0, lambda x: x + 1, lambda x: x - 1, (shard,)).norm().item())


@pytest.mark.parametrize("kind", [log, to_rank_0, in_own_group, branching], ids=lambda kind: kind.__name__)
@distributed(world=2, limit_s=60.0)
def test_hooks_may_differ_between_ranks_and_communicate_in_other_ways(rank, world, kind):
    model, norms = sharded(), []
    weight = model.blocks[1].attention_norm.weight
    weight.register_hook(take_part if kind is log and rank else lambda gradient: kind(gradient, norms))
    train(model, rank, 3)
    assert len(norms) == (0 if rank and kind in (log, to_rank_0) else 3)


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
