"""Methods other than forward, and roots that share their streams."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed.fsdp as fsdp
import torch.nn as nn

import composable_shard
from _engines import ENGINES, fully_shard
from _models import Coder, Stack, shard_blocks, vectors
from _pool import distributed
from _stepping import assert_at_rest, assert_same_gradients, engine_of, train_step

REGISTER = {"ours": composable_shard.register_fsdp_forward_method, "fsdp2": fsdp.register_fsdp_forward_method}


def shard_coder(model, engine, register):
    engine(model, reshard_after_forward=True)
    register(model, "encode")
    register(model, "generate")


def sharded_coders():
    torch.manual_seed(3)
    plain = Coder()
    models = {name: copy.deepcopy(plain) for name in ENGINES}
    for name, model in models.items():
        shard_coder(model, ENGINES[name], REGISTER[name])
    return models, plain


@pytest.mark.parametrize("way", ["encode", "generate", "__call__"])
@distributed(world=(1, 2))
def test_a_registered_method_trains_exactly(rank, world, way):
    models, plain = sharded_coders()
    for step in range(2):
        x = vectors(0, step)[0]
        outputs = {}
        for name, model in {**models, "plain": plain}.items():
            model.zero_grad()
            outputs[name] = getattr(model, way)(x)
            outputs[name].square().mean().backward()
        assert torch.equal(outputs["ours"], outputs["plain"])
        for name, param in plain.named_parameters():
            mine, theirs = (m.get_parameter(name).grad for m in models.values())
            assert (mine is None) == (param.grad is None), name
            if mine is not None:
                torch.testing.assert_close(mine.full_tensor(), param.grad)
                torch.testing.assert_close(mine.to_local(), theirs.to_local())
    assert_at_rest(models["ours"])


@distributed(world=2)
def test_nothing_stays_unsharded_without_gradients_or_after_an_error(rank, world):
    models, plain = sharded_coders()
    model = models["ours"]
    x = vectors(0, 0)[0]
    with torch.no_grad():
        assert torch.equal(model.generate(x, steps=3), plain.generate(x, steps=3))
    assert_at_rest(model)
    with pytest.raises(RuntimeError):
        model.encode(torch.ones(2, 3))
    assert_at_rest(model)
    model.encode(x, scale=2.0).sum().backward()
    plain.encode(x, scale=2.0).sum().backward()
    torch.testing.assert_close(model.enc.weight.grad.full_tensor(), plain.enc.weight.grad)


@distributed(world=1)
def test_a_method_keeps_its_name_is_copied_and_does_not_keep_its_module_alive(rank, world):
    model = sharded_coders()[0]["ours"]
    assert model.encode.__name__ == "encode"
    assert model.encode.__doc__ == "Half of the way."
    made = copy.deepcopy(model)
    with torch.no_grad():
        for p in made.parameters():
            p.zero_()
    x = vectors(0, 0)[0]
    assert not made.encode(x).any()
    assert model.encode(x).any()
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@distributed(world=1)
def test_plain_modules_are_not_changed_and_missing_methods_are_errors(rank, world):
    plain = Coder()
    composable_shard.register_fsdp_forward_method(plain, "encode")
    assert "encode" not in vars(plain)
    model = fully_shard(Coder())
    with pytest.raises(ValueError, match="FSDPCoder does not have a method 'decode'"):
        composable_shard.register_fsdp_forward_method(model, "decode")


@pytest.mark.parametrize("order", ["torch.compile, shard", "m.compile(), shard", "shard, m.compile()"])
@distributed(world=2)
def test_methods_of_compiled_modules_train_exactly(rank, world, order):
    torch._dynamo.reset()
    torch.manual_seed(3)
    plain = Coder()
    models = [copy.deepcopy(plain) for _ in range(2)]
    for at, name in enumerate(ENGINES):
        shard, register = ENGINES[name], REGISTER[name]
        if order.startswith("torch.compile"):
            models[at] = torch.compile(models[at], backend="aot_eager")
        elif order.startswith("m.compile"):
            models[at].compile(backend="aot_eager")
        shard(models[at])
        if order.startswith("shard"):
            models[at].compile(backend="aot_eager")
        register(models[at], "encode")
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for model in (plain, *models):
            model.encode(x).square().mean().backward()
        for model in models:
            for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
                grad = None if param.grad is None else param.grad.full_tensor()
                torch.testing.assert_close(grad, expected.grad)


@distributed(world=2)
def test_roots_may_share_their_streams(rank, world):
    torch.manual_seed(3)
    plains = [Stack(), Stack()]
    models = [copy.deepcopy(plain) for plain in plains]
    for model in models:
        shard_blocks(model, fully_shard)
    composable_shard.share_comm_ctx(models)
    for model, plain in zip(models, plains, strict=True):
        train_step(model)
        train_step(plain)
        assert_same_gradients(model, plain)
    first, second = (engine_of(model)._actions._runtime for model in models)
    assert first.gather_lane is second.gather_lane
    assert first.reduce_lane is second.reduce_lane
    assert first.pool is not second.pool
    with pytest.raises(RuntimeError, match="share their streams before the first forward"):
        composable_shard.share_comm_ctx(models)
    with pytest.raises(ValueError, match="Linear is not sharded"):
        composable_shard.share_comm_ctx([nn.Linear(2, 2)])
    composable_shard.share_comm_ctx([])
