"""A module has full parameters inside the context, and the same sharded ones afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _engines import mesh_of
from _models import Stack, shard_blocks, vectors
from _pool import distributed
from checkpoint._nets import assert_equal, assert_same, batch, build, shard, step


def names_of(model):
    return dict(model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("engine", ["ours", "fsdp2"])
@pytest.mark.parametrize("options", [{}, {"offload_to_cpu": True, "writeback": False}])
@distributed(world=2)
def test_parameters_are_plain_and_full_inside_and_the_same_shards_return_afterwards(rank, world, engine, options):
    plain = build()
    model = shard(build(), engine, reshard_after_forward=False)
    model(batch(rank, 0))
    model.state_dict()  # torch's FSDP2 reshards here
    sharded = names_of(model)
    with cs.checkpoint.full_parameters(model, **options):
        shown = names_of(model)
        for name, param in names_of(plain).items():
            assert type(shown[name]) is nn.Parameter
            assert_same(shown[name].detach(), param.detach(), name)
            assert shown[name].requires_grad == param.requires_grad
        assert model.head.weight is model.embed.weight
        with torch.no_grad():
            for param in [*plain.parameters()]:
                param.add_(1)
            for param in [*model.parameters()]:
                param.add_(1)
    again = names_of(model)
    assert again.keys() == sharded.keys()
    assert all(again[name] is param for name, param in sharded.items())
    expected = plain if options.get("writeback", True) else build()
    if expected is not plain:
        with torch.no_grad():
            expected.apart.add_(1)  # it is not sharded, so the change is always kept
    assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), expected.state_dict())
    torch.testing.assert_close(model(batch(0, 1)), expected(batch(0, 1)))


@distributed(world=2)
def test_training_continues_with_written_values_and_the_same_optimizer(rank, world):
    models = [shard(build(), reshard_after_forward=False) for _ in range(2)]
    for model, by_context in zip(models, [True, False], strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step(model, optimizer, rank)
        loss = model(batch(rank, 1)).square().mean()
        if by_context:
            with cs.checkpoint.full_parameters(model), torch.no_grad():
                model.embed.weight.mul_(0.5)
            with pytest.raises(cs.errors.StaleStateError):
                loss.backward()
        else:
            loss.backward()
            model.apart.grad = None
            optimizer.zero_grad()
            with torch.no_grad():
                model.embed.weight.mul_(0.5)
        model.apart.grad = None
        optimizer.zero_grad()
        step(model, optimizer, rank, 2)
    assert_equal(*(cs.checkpoint.full_state_dict(model, rank0_only=False) for model in models))


@distributed(world=2)
def test_an_error_in_the_body_restores_and_writes_nothing(rank, world):
    model = shard(build())
    before, sharded = cs.checkpoint.full_state_dict(model, rank0_only=False), names_of(model)
    up = "blocks.0.feed_forward.up.weight"

    def fail():
        raise KeyError("mine")

    def replace():
        model.blocks[0].feed_forward.up.weight = nn.Parameter(torch.zeros(2, 2))

    def change(how):
        with cs.checkpoint.full_parameters(model):
            model.embed.weight.data.zero_()
            how()

    with pytest.raises(KeyError, match="mine"):
        change(fail)
    with pytest.raises(cs.errors.CheckpointMismatchError, match=f"{up} removed, or replaced"):
        change(replace)
    assert all(names_of(model)[name] is param for name, param in sharded.items())
    assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), before)
    with cs.checkpoint.full_parameters(model):
        model.blocks[0].feed_forward.up.weight = nn.Parameter(torch.ones(24, 16))
    assert names_of(model)[up] is sharded[up]
    assert model.blocks[0].feed_forward.up.weight.full_tensor().eq(1).all()
    model(batch(rank, 0)).sum().backward()


@distributed(world=2)
def test_rank0_only_and_a_part_of_the_model(rank, world):
    plain, model = build(), shard(build())
    with cs.checkpoint.full_parameters(model, rank0_only=True, writeback=False):
        kinds = {type(param) for param in model.parameters()}
        assert kinds == ({nn.Parameter} if rank == 0 else {nn.Parameter, DTensor})  # `apart` is not sharded
    with cs.checkpoint.full_parameters(model, recurse=False):
        assert type(model.embed.weight) is nn.Parameter
        assert isinstance(model.blocks[0].attention.q.weight, DTensor)
    with cs.checkpoint.full_parameters(model.blocks[1].attention):  # its parameters are in the block's group
        assert_same(model.blocks[1].attention.q.weight.detach(), plain.blocks[1].attention.q.weight.detach(), "q")
        assert isinstance(model.blocks[1].feed_forward.up.weight, DTensor)
    with cs.checkpoint.full_parameters(plain), torch.no_grad():
        plain.scale.zero_()
    assert plain.scale.item() == 0, "an unsharded module is not changed"


@distributed(world=2)
def test_invalid_uses_are_refused(rank, world):
    model = shard(build())
    with pytest.raises(cs.errors.ShardConfigValueError, match="rank0_only: cannot be combined with writeback=True"):
        cs.checkpoint.full_parameters(model, rank0_only=True).__enter__()

    def enter(*_):
        with pytest.raises(cs.errors.ShardConfigStateError, match=r"Net is in its forward or backward"):
            cs.checkpoint.full_parameters(model).__enter__()
        calls.append(1)

    calls: list[int] = []
    handle = model.norm.register_forward_hook(enter)
    loss = model(batch(rank, 0)).sum()
    handle.remove()
    loss.register_hook(enter)
    loss.backward()
    assert len(calls) == 2
    with cs.checkpoint.full_parameters(model):
        with pytest.raises(cs.errors.ShardConfigStateError, match=r"q\.weight is already a full parameter"):
            cs.checkpoint.full_parameters(model.blocks[0].attention).__enter__()
        with pytest.raises(cs.errors.ShardConfigStateError, match="was replaced by a Parameter after sharding"):
            model(batch(rank, 0))
    model(batch(rank, 0))
    with torch.device("meta"):
        empty = shard(type(model)())
    with pytest.raises(cs.errors.CheckpointError, match=r"full_parameters: .*on the meta device"):
        cs.checkpoint.full_parameters(empty).__enter__()


@pytest.mark.matrix
@distributed(world=4)
def test_it_works_over_replicas_with_a_recurrent_module(rank, world):
    torch.manual_seed(0)
    plain = nn.LSTM(4, 6)
    model = cs.fully_shard(copy.deepcopy(plain), mesh=mesh_of(2, 2))
    x = torch.randn(3, 2, 4)
    model(x)
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2)
        with cs.checkpoint.full_parameters(model):
            assert all(a is b for a, b in zip(model._flat_weights, model._parameters.values(), strict=True))
            for param in model.parameters():
                param.mul_(2)
    assert all(isinstance(weight, DTensor) for weight in model._flat_weights)
    torch.testing.assert_close(model(x)[0], plain(x)[0])
    stack = Stack()
    expected = copy.deepcopy(stack)
    shard_blocks(stack, cs.fully_shard, mesh=mesh_of(2, 2))
    with cs.checkpoint.full_parameters(stack):
        assert_equal({n: p.detach() for n, p in stack.named_parameters()}, expected.state_dict())
    torch.testing.assert_close(stack(*vectors(0, 0)), expected(*vectors(0, 0)))
