"""State dicts contain sharded DTensors that alias the shards, need no communication, and can be loaded."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard

from _engines import fully_shard
from _models import Stack, TiedText, shard_blocks, tokens, vectors
from _pool import distributed


def sharded_stack(seed=0, **options):
    torch.manual_seed(seed)
    model = Stack()
    plain = {n: p.detach().clone() for n, p in model.named_parameters()}
    shard_blocks(model, fully_shard, **options)
    return model, plain


def same(model, other):
    return all(
        torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


@distributed(world=(1, 2, 4))
def test_values_are_sharded_tensors_equal_to_the_plain_parameters(rank, world):
    model, plain = sharded_stack()
    state = model.state_dict()
    assert list(state) == list(plain)
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        assert value.placements == (Shard(0),), name
        assert torch.equal(value.full_tensor(), plain[name]), name


@distributed(world=2)
def test_a_single_rank_can_call_state_dict(rank, world):
    model, plain = sharded_stack(reshard_after_forward=False)
    model(*vectors(rank, 0))
    if rank == 0:  # any communication would wait for the other rank
        state = model.state_dict()
        assert all(isinstance(v, DTensor) for v in state.values())
        assert list(state) == list(plain)
    dist.barrier()


@pytest.mark.parametrize("how", ["unshard", "forward"])
@distributed(world=(1, 2))
def test_values_are_shards_while_the_model_is_unsharded(rank, world, how):
    model, plain = sharded_stack(reshard_after_forward=False)
    if how == "unshard":
        for module in [model, *model.blocks]:
            module.unshard()
    else:
        model(*vectors(rank, 0))
    state = model.state_dict()
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        assert torch.equal(value.full_tensor(), plain[name]), name
    model(*vectors(rank, 0)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@distributed(world=(1, 2))
def test_values_alias_the_shards(rank, world):
    model, _ = sharded_stack()
    state = model.state_dict()
    for name, param in model.named_parameters():
        assert state[name].to_local().data_ptr() == param.to_local().data_ptr(), name
    before = {n: v.to_local().clone() for n, v in state.items()}
    model(*vectors(rank, 0)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    moved = [n for n, v in state.items() if not torch.equal(v.to_local(), before[n])]
    assert moved == list(state)


@pytest.mark.parametrize("assign", [False, True])
@distributed(world=(1, 2))
def test_a_model_trains_identically_after_loading_another_models_shards(rank, world, assign):
    source, _ = sharded_stack(seed=1)
    model, _ = sharded_stack(seed=2)
    model(*vectors(rank, 0)).square().mean().backward()  # the engine is already built
    model.zero_grad()
    state = {n: v.clone() for n, v in source.state_dict().items()}
    result = model.load_state_dict(state, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    for module in (source, model):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for step in range(3):
            module(*vectors(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(source, model)


@pytest.mark.parametrize("reshard", [None, False])
@distributed(world=2)
def test_loading_while_parameters_are_unsharded_leaves_no_stale_weights(rank, world, reshard):
    source, _ = sharded_stack(seed=1)
    model, _ = sharded_stack(seed=2, reshard_after_forward=reshard)
    with torch.no_grad():
        model(*vectors(rank, 0))
    model.unshard()
    model.load_state_dict(source.state_dict())
    with torch.no_grad():
        assert torch.equal(model(*vectors(rank, 0)), source(*vectors(rank, 0)))


@distributed(world=2)
def test_a_strict_load_names_missing_and_unexpected_keys(rank, world):
    model, _ = sharded_stack()
    state = dict(model.state_dict())
    state["stranger"] = state.pop("blocks.1.up.weight")
    with pytest.raises(RuntimeError, match=r"(?s)blocks\.1\.up\.weight.*stranger"):
        model.load_state_dict(state)


@distributed(world=2)
def test_a_saved_file_contains_only_the_shards(rank, world):
    torch.manual_seed(0)
    model = Stack(dim=64, hidden=256)
    shard_blocks(model, fully_shard)
    held = sum(p.to_local().numel() * 4 for p in model.parameters())
    one = model.state_dict()["head.bias"]
    whole_file, small_file = io.BytesIO(), io.BytesIO()
    torch.save({n: v.to_local() for n, v in model.state_dict().items()}, whole_file)
    torch.save(one.to_local(), small_file)
    assert whole_file.tell() < 1.1 * held + 16384
    assert small_file.tell() < 8192


@distributed(world=2)
def test_tied_weights_appear_under_both_names_and_share_one_shard(rank, world):
    model = TiedText()
    shard_blocks(model, fully_shard)
    state = model.state_dict()
    assert state["embed.weight"].to_local().data_ptr() == state["head.weight"].to_local().data_ptr()
    model(*tokens(rank, 0)).square().mean().backward()
    assert model.embed.weight is model.head.weight


@distributed(world=2)
def test_checkpoint_getters_and_setters_round_trip(rank, world):
    source, plain = sharded_stack(seed=1)
    model, _ = sharded_stack(seed=2)
    state = get_model_state_dict(source)
    assert list(state) == list(plain)
    set_model_state_dict(model, state)
    assert same(source, model)


@distributed(world=2)
def test_optimizer_state_is_sharded_like_the_parameters(rank, world):
    model, _ = sharded_stack()
    optimizer = torch.optim.AdamW(model.parameters())
    model(*vectors(rank, 0)).square().mean().backward()
    optimizer.step()
    for name, param in model.named_parameters():
        moment = optimizer.state[param]["exp_avg"]
        assert isinstance(moment, DTensor), name
        assert moment.to_local().shape == param.to_local().shape, name
