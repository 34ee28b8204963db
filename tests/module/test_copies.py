"""Copies, full state dicts, parameters that are added later, and optimizers that were built before sharding."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _engines import ENGINES, fully_shard
from _models import Stack, TiedText, shard_blocks, shard_lists, shard_root, tokens, vectors
from _pool import distributed
from _stepping import assert_at_rest, loss_of, train_step, twins
from composable_shard import FSDPModule


@pytest.mark.parametrize(
    ("shard", "moment"),
    [
        (shard_blocks, "new"),
        (shard_blocks, "between steps"),
        (shard_blocks, "after forward"),
        (shard_lists, "between steps"),
        (shard_root, "between steps"),
    ],
)
@distributed(world=2)
def test_a_deep_copy_trains_independently(rank, world, shard, moment):
    model, plain = twins(shard=shard)
    loss = None
    if moment == "between steps":
        train_step(model)
        train_step(plain)
    elif moment == "after forward":
        loss = loss_of(model)
    made = copy.deepcopy(model)
    assert type(made) is type(model)
    assert all(isinstance(p, DTensor) for p in made.parameters())
    assert not {id(p) for p in made.parameters()} & {id(p) for p in model.parameters()}
    assert {p.to_local().data_ptr() for p in made.parameters()}.isdisjoint(
        p.to_local().data_ptr() for p in model.parameters() if p.to_local().numel()
    )
    for name, param in made.named_parameters():
        param.grad = None
        assert torch.equal(param.full_tensor(), plain.get_parameter(name)), name
    if loss is not None:
        loss.backward()
        train_step(plain)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    twin = copy.deepcopy(plain)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(1, 3):
        train_step(made, step)
        twin.zero_grad()
        train_step(twin, step)
        optimizer.step()
        other.step()
        optimizer.zero_grad()
    for name, param in made.named_parameters():
        torch.testing.assert_close(param.full_tensor(), twin.get_parameter(name))
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), plain.get_parameter(name)), f"{name} of the original has changed"
        assert (param.grad is None) == (plain.get_parameter(name).grad is None), name
    if moment != "new":
        assert_at_rest(model)
    assert made.state_dict().keys() == model.state_dict().keys()
    made.load_state_dict(model.state_dict())


@distributed(world=2)
def test_a_copy_of_several_modules_in_one_group_loads_full_tensors(rank, world):
    model, plain = twins(shard=shard_root)
    made = copy.deepcopy(model)
    made.load_state_dict(plain.state_dict())
    for name, param in made.named_parameters():
        assert torch.equal(param.full_tensor(), plain.get_parameter(name)), name


@distributed(world=2)
def test_a_copy_distinguishes_ignored_and_added_parameters(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, ignored_params={*model[1].parameters()})
    made = copy.deepcopy(model)
    made.append(nn.Linear(4, 4).requires_grad_(False))
    made(torch.ones(2, 4)).sum().backward()
    assert made[0].weight.grad is not None


@distributed(world=2)
def test_tied_parameters_stay_tied_in_a_copy_and_fsdp2_cannot_be_copied(rank, world):
    model = TiedText()
    shard_root(model, fully_shard)
    made = copy.deepcopy(model)
    assert made.head.weight is made.embed.weight
    made(*tokens(rank, 0)).sum().backward()
    assert made.head.weight.grad is not None
    assert model.head.weight.grad is None
    theirs = Stack()
    shard_root(theirs, ENGINES["fsdp2"])
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(theirs)


@distributed(world=2)
def test_a_copy_can_keep_a_moving_average_of_the_weights(rank, world):
    model, plain = twins()
    ema, plain_ema = copy.deepcopy(model), copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        for each, average, optimizer in zip((model, plain), (ema, plain_ema), optimizers, strict=True):
            train_step(each, step)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for a, p in zip(average.parameters(), each.parameters(), strict=True):
                    a.lerp_(p, 0.25)
                average(*vectors(0, step))
    for name, param in ema.named_parameters():
        torch.testing.assert_close(param.full_tensor(), plain_ema.get_parameter(name).detach())
    torch.testing.assert_close(ema(*vectors(0, 5)), plain_ema(*vectors(0, 5)))


@pytest.mark.parametrize("run", ["eager", "compiled"])
@pytest.mark.parametrize("deleted", [False, True])
@distributed(world=2)
def test_a_shallow_copy_shares_parameters_and_engine_with_the_original(rank, world, deleted, run):
    model, plain = twins(shard=shard_blocks)
    made = copy.copy(model)
    assert type(made) is type(model)
    assert made is not model
    assert [*map(id, made.parameters())] == [*map(id, model.parameters())]
    assert made.state_dict().keys() == plain.state_dict().keys()
    made.tag = "copy"
    assert not hasattr(model, "tag")
    forward = torch.compile(made, backend="aot_eager", fullgraph=True) if run == "compiled" else made
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (made, plain))
    if deleted:
        del model
        gc.collect()
    for step in range(3):
        loss = loss_of(forward if deleted or step != 1 else model, step)
        assert torch.equal(loss, loss_of(plain, step))
        loss.backward()
        loss_of(plain, step).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    for (name, param), expected in zip(made.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected, msg=name)
    assert_at_rest(made)


@distributed(world=2)
def test_a_shallow_copy_runs_its_own_forward_methods(rank, world):
    class Scaled(nn.Linear):
        scale = 1.0

        def scaled(self, x):
            return self.scale * self(x)

    torch.manual_seed(0)
    plain = Scaled(4, 4)
    model = fully_shard(copy.deepcopy(plain))
    cs.register_fsdp_forward_method(model, "scaled")
    made = copy.copy(model)
    made.scale = 2.0
    x = torch.ones(2, 4)
    assert torch.equal(model.scaled(x), plain(x))
    assert torch.equal(made.scaled(x), 2 * plain(x))


@distributed(world=2)
def test_a_class_may_define_its_own_shallow_copy(rank, world):
    class Own(nn.Linear):
        def __copy__(self):
            return "own"

    assert copy.copy(fully_shard(Own(4, 4))) == "own"


@distributed(world=1)
def test_a_copy_of_a_submodule_is_sharded(rank, world):
    model, _ = twins()
    block = copy.deepcopy(model.blocks[0])
    assert isinstance(block, FSDPModule)
    block(torch.randn(2, 6)).sum().backward()
    assert block.up.weight.grad is not None


@distributed(world=1)
def test_pickling_raises_an_error_with_an_alternative(rank, world):
    model, _ = twins()
    with pytest.raises(RuntimeError, match=r"FSDPStack: a sharded module cannot be pickled; save its state_dict"):
        pickle.dumps(model)


# ---- full tensors


@pytest.mark.parametrize("assign", [False, True])
@distributed(world=(1, 2, 4))
def test_full_tensors_load_into_shards(rank, world, assign):
    model, _ = twins()
    source = Stack()
    for at in range(2):  # the second time while the unsharded parameters are installed
        with torch.no_grad():
            for p in source.parameters():
                p.add_(1)
        model.load_state_dict(source.state_dict(), assign=assign)
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor), name
            assert torch.equal(param.full_tensor(), source.get_parameter(name)), name
            assert param.to_local().untyped_storage().nbytes() == param.to_local().nbytes, f"{name} is a full copy"
        assert torch.equal(model(*vectors(0, at)), source(*vectors(0, at)))
    train_step(model)
    train_step(source)
    for name, param in model.named_parameters():
        assert torch.equal(param.grad.full_tensor(), source.get_parameter(name).grad), name


@distributed(world=2)
def test_a_full_tensor_of_another_shape_is_refused_by_torch(rank, world):
    model = fully_shard(nn.Linear(3, 4))
    with pytest.raises(RuntimeError, match="weight"):
        model.load_state_dict({"weight": torch.zeros(5, 3), "bias": torch.zeros(4)})


@distributed(world=2)
def test_torchs_fsdp2_does_not_load_full_tensors(rank, world):
    theirs = ENGINES["fsdp2"](nn.Linear(3, 4))
    with pytest.raises(RuntimeError, match="Tensor"):
        theirs.load_state_dict(nn.Linear(3, 4).state_dict())


# ---- added parameters, and optimizers from before sharding


@distributed(world=2)
def test_the_error_for_an_added_parameter_names_it(rank, world):
    model, _ = twins()
    model.blocks[1].up.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"parameters blocks\.1\.up\.scale: were added after fully_shard"):
        model(*vectors(0, 0))
    del model.blocks[1].up.scale
    train_step(model)
    model.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"parameters extra\.weight, extra\.bias: were added after"):
        model(*vectors(0, 0))
    model.extra = nn.Identity()
    train_step(model)


@distributed(world=2)
def test_the_error_for_a_replaced_module_names_its_parameters(rank, world):
    model, _ = twins()
    train_step(model)
    model.head = nn.Linear(6, 4)
    with pytest.raises(RuntimeError, match=r"parameters head\.weight, head\.bias: were added after"):
        model(*vectors(0, 0))


@distributed(world=2)
def test_buffers_and_modules_without_parameters_may_be_added(rank, world):
    model, _ = twins()
    train_step(model)
    model.blocks[0].act = nn.GELU()
    model.register_buffer("seen", torch.zeros(1))
    train_step(model)


@pytest.mark.parametrize("when", ["before sharding", "after sharding"])
@distributed(world=2)
def test_an_optimizer_that_was_built_before_sharding_fails_at_its_first_step(rank, world, when):
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters()) if when == "before sharding" else None
    shard_blocks(model, fully_shard)
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    train_step(model)
    if when == "after sharding":
        optimizer.step()
        return
    with pytest.raises(RuntimeError, match=r"the optimizer holds .*weight.* from before fully_shard") as caught:
        optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    assert f"the optimizer holds {', '.join(names[:5])} and" in str(caught.value)
    count = len(names)
    assert str(caught.value).count("weight") + str(caught.value).count("bias") <= 5 < count
    assert f"and {count - 5} more from before" in str(caught.value)


@distributed(world=2)
def test_with_fsdp2_such_an_optimizer_trains_nothing(rank, world):
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    shard_blocks(model, ENGINES["fsdp2"])
    before = [p.to_local().clone() for p in model.parameters()]
    train_step(model)
    optimizer.step()
    assert all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True))
