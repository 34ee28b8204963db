"""Calls of unshard() and reshard() by the user."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from _blocks import TransformerBlock, rotary
from _engines import ENGINES, fully_shard
from _models import Stack, shard_blocks, vectors
from _parity import Case, check_parity, plain_step
from _pool import distributed
from _sides import assert_alike, models_of, noise, optimizers_of, train_alike
from composable_shard.errors import StaleStateError


def sharded_stack():
    model = Stack()
    plain = {n: p.detach().clone() for n, p in model.named_parameters()}
    shard_blocks(model, fully_shard)
    return model, plain


@distributed(world=(1, 2))
def test_unshard_before_the_first_forward_installs_unsharded_parameters(rank, world):
    model, plain = sharded_stack()
    block = model.blocks[1]
    sharded = dict(block.named_parameters())
    assert block.unshard() is None
    for name, param in block.named_parameters():
        assert not isinstance(param, DTensor), name
        assert isinstance(param, torch.nn.Parameter), name
        assert torch.equal(param, plain[f"blocks.1.{name}"]), name
    assert isinstance(model.blocks[0].up.weight, DTensor)
    block.reshard()
    assert all(param is sharded[name] for name, param in block.named_parameters())


@distributed(world=(1, 2))
def test_an_asynchronous_unshard_returns_a_handle(rank, world):
    model, plain = sharded_stack()
    handles = [block.unshard(async_op=True) for block in model.blocks]
    for number, (block, handle) in enumerate(zip(model.blocks, handles, strict=True)):
        handle.wait()
        handle.wait()  # a second wait is harmless
        for name, param in block.named_parameters():
            assert torch.equal(param, plain[f"blocks.{number}.{name}"]), name
        block.reshard()
    assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("engine", ENGINES)
@distributed(world=2)
def test_unsharding_a_module_that_backward_has_kept_unsharded_installs_its_parameters(rank, world, engine):
    model = Stack()
    shard_blocks(model, ENGINES[engine])
    model.set_reshard_after_backward(False)
    for step in range(2):
        model(*vectors(rank, step)).sum().backward()
        block = model.blocks[1]
        block.unshard(async_op=True).wait()
        assert not isinstance(block.up.weight, DTensor)
        model.state_dict()  # installs the sharded parameters
        block.unshard(async_op=True).wait()
        assert not isinstance(block.up.weight, DTensor)
        block.reshard()
        assert isinstance(block.up.weight, DTensor)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("async_op", [True, False])
@distributed(world=2)
def test_unsharding_again_shows_edits_of_shards_made_in_between(rank, world, async_op, grad):
    model, plain = sharded_stack()
    block = model.blocks[1]
    block.unshard()
    with torch.no_grad():
        model.state_dict()["blocks.1.up.bias"].add_(1)
    with torch.set_grad_enabled(grad):
        handle = block.unshard(async_op=async_op)
    if async_op:
        handle.wait()
    assert torch.equal(block.up.bias, plain["blocks.1.up.bias"] + 1)


@distributed(world=(1, 2))
def test_unsharding_and_resharding_twice_is_harmless(rank, world):
    model, plain = sharded_stack()
    for _ in range(2):
        model.unshard()
        model.unshard()
        assert torch.equal(model.head.weight, plain["head.weight"])
        model.reshard()
        model.reshard()
        assert isinstance(model.head.weight, DTensor)


def unshard_all(run, async_op):
    handles = [m.unshard(async_op=async_op) for m in [run.model, *run.model.blocks]]
    return [h for h in handles if h is not None]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("async_op", [True, False])
@distributed(world=(1, 2))
def test_training_after_an_early_unshard_is_exact(rank, world, async_op, wait):
    def train(run):
        if not run.reference:
            for handle in unshard_all(run, async_op):
                if wait:
                    handle.wait()
        return plain_step(run)

    check_parity(Case(model=Stack, train=train), rank, world)


class Positions(torch.nn.Module):
    """Adds learned positions, whose weight it reads from a sharded submodule, before a transformer block."""

    def __init__(self):
        super().__init__()
        self.positions = torch.nn.Embedding(6, 16)
        self.block = TransformerBlock(dim=16, heads=2, kv_heads=1, hidden=24, dropout=0.0)

    def forward(self, x):
        return self.block(x + self.positions.weight, *rotary(6, 8))


@pytest.mark.parametrize("wait", ["unshard", "before forward", "in forward"])
@distributed(world=2)
def test_a_parent_reads_a_weight_that_was_unsharded_before_the_first_forward(rank, world, wait):
    def loss_of(model, step):
        if not isinstance(model, FSDPModule):
            return model(noise(2, 6, 16, seed=step)).square().mean()
        handle = model.positions.unshard(async_op=wait != "unshard")
        if wait == "before forward":
            handle.wait()
        hooks = [model.register_forward_pre_hook(lambda *_: handle.wait())] if wait == "in forward" else []
        loss = model(noise(2, 6, 16, seed=step)).square().mean()
        for hook in hooks:
            hook.remove()
        return loss

    train_alike(models_of(Positions), loss_of)


@pytest.mark.parametrize("reshard", [None, True, False])
@distributed(world=2)
def test_resharding_between_forward_and_backward_is_exact(rank, world, reshard):
    def train(run):
        loss = run.loss()
        if not run.reference:
            for module in [run.model, *run.model.blocks]:
                module.reshard()
        run.backward(loss)
        return loss

    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    check_parity(Case(model=Stack, shard=shard, train=train), rank, world)


@distributed(world=2)
def test_parameters_left_unsharded_are_not_stale_after_an_optimizer_step(rank, world):
    def train(run):
        loss = plain_step(run)
        if not run.reference:
            unshard_all(run, async_op=False)
        return loss

    why = "FSDP2 computes with the weights from before the optimizer step"
    check_parity(Case(model=Stack, train=train, ends_sharded=False, fsdp2=False, why=why), rank, world)


@distributed(world=2)
def test_writing_to_an_unsharded_parameter_is_an_error(rank, world):
    """The next gather returns the values of the shards, which a write to an unsharded parameter does not change."""
    model, plain = sharded_stack()
    model.unshard()
    with torch.no_grad():
        model.head.bias.add_(1)
    for lost_by in (model.state_dict, model.reshard):
        with pytest.raises(StaleStateError, match=r"head\.bias: edited in place while unsharded"):
            lost_by()
    assert torch.equal(model.head.bias.full_tensor(), plain["head.bias"])


@distributed(world=2)
def test_a_chunked_loss_can_use_a_head_that_stays_unsharded(rank, world):
    """The backward of a chunk belongs to no forward of the model, so it must not reshard the head."""

    def shard(model, engine):
        for layer in model:
            engine(layer)
        engine(model)

    models = models_of(lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 5)), shard)
    optimizers = optimizers_of(models)
    for step in range(2):
        for name, model in models.items():
            hidden = model[0](noise(6, 8, seed=step))
            leaf = hidden.detach().requires_grad_()
            if name != "plain":
                model[1].unshard()
            for chunk in leaf.chunk(3):
                torch.nn.functional.linear(chunk, model[1].weight, model[1].bias).square().sum().backward()
            if name == "plain":
                weights = [param.grad.clone() for param in model[1].parameters()]
            else:
                model[1].reshard()
            hidden.backward(leaf.grad)
        for param, expected in zip(models["ours"][1].parameters(), weights, strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected)
        torch.testing.assert_close(models["ours"][0].weight.grad.full_tensor(), models["plain"][0].weight.grad)
        for optimizer in optimizers.values():
            optimizer.zero_grad()


@distributed(world=2)
def test_a_forward_after_unshard_gives_the_same_output(rank, world):
    model, _ = sharded_stack()
    want = model(*vectors(rank, 0)).detach()
    model.unshard()
    model.blocks[2].unshard()
    assert torch.equal(model(*vectors(rank, 0)), want)


@pytest.mark.parametrize("after_forward", [False, True])
@distributed(world=2)
def test_gradients_of_unsharded_weights_that_were_unfrozen_are_not_lost(rank, world, after_forward):
    models = models_of(functools.partial(TransformerBlock, 8, 2, 1, 12, 0.0), lambda model, engine: engine(model))
    cos, sin = rotary(5, 4)
    for name, model in models.items():
        model.requires_grad_(False)
        if after_forward:
            model(noise(2, 5, 8), cos, sin)
        if name != "plain":
            model.unshard()
        model.requires_grad_(True)
        sum(weight.square().sum() for weight in model.parameters()).backward()
        if name != "plain":
            model.reshard()
    lost = [param.grad is None for param in models.pop("fsdp2").parameters()]
    assert all(lost)
    assert_alike(models)
    for model in models.values():
        model.zero_grad()
    train_alike(models, lambda model, step: model(noise(2, 5, 8, seed=step), cos, sin).square().mean())
