"""An exception on all ranks, in forward or in backward: the next step is exact, with no call needed."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from _engines import fully_shard
from _models import Stack, shard_blocks, shard_lists, shard_nested, shard_root, vectors
from _parity import Case, check_parity, plain_step
from _pool import distributed, simulated

WHY = "FSDP2 leaves parameters unsharded after an exception"
GROUPINGS = {"blocks": shard_blocks, "root": shard_root, "nested": shard_nested, "lists": shard_lists}


class BoomError(Exception):
    """The error that the tests raise."""


class _Tripwire(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fuse):
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fuse.armed == "backward":
            raise BoomError
        return grad, None


class Fuse(nn.Module):
    """Returns its input, or raises if it is armed."""

    def __init__(self):
        super().__init__()
        self.armed = None

    def forward(self, x):
        if self.armed == "forward":
            raise BoomError
        return _Tripwire.apply(x, self)


class Fused(Stack):
    """A stack with one fuse inside a block and one between blocks."""

    def __init__(self):
        super().__init__()
        self.between = Fuse()
        self.blocks[1].within = Fuse()
        self.blocks[1].register_forward_hook(lambda module, args, out: module.within(out))

    def forward(self, x):
        x = self.blocks[0](self.inp(x))
        x = self.between(self.blocks[1](x))
        return self.head(self.blocks[2](x))

    def fuse(self, place):
        return self.between if place == "between" else self.blocks[1].within


def blow_then_step(place, phase, clear, run):
    """Steps 1 and 2 begin with a failure; its gradients are cleared as a user would."""
    if run.step in (1, 2):
        run.model.fuse(place).armed = phase
        with pytest.raises(BoomError):
            run.backward(run.loss(5))
        run.model.fuse(place).armed = None
        if clear:
            run.zero_grad()
    return plain_step(run)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("place", ["within", "between"])
@distributed(world=(1, 2))
def test_the_step_after_an_exception_is_exact(rank, world, place, phase, reshard):
    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    train = functools.partial(blow_then_step, place, phase, True)
    check_parity(Case(model=Fused, shard=shard, train=train, fsdp2=False, why=WHY), rank, world)


@pytest.mark.parametrize("grouping", ["root", "nested", "lists"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@distributed(world=2)
def test_recovery_works_in_any_grouping(rank, world, phase, grouping):
    train = functools.partial(blow_then_step, "within", phase, True)
    check_parity(Case(model=Fused, shard=GROUPINGS[grouping], train=train, fsdp2=False, why=WHY), rank, world)


@distributed(world=2)
def test_an_exception_in_forward_needs_no_zero_grad(rank, world):
    train = functools.partial(blow_then_step, "within", "forward", False)
    check_parity(Case(model=Fused, train=train, fsdp2=False, why=WHY), rank, world)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@distributed(world=2)
def test_the_step_after_an_exception_in_a_microbatch_without_sync_is_exact(rank, world, phase):
    def train(run):
        run.set_sync(False)
        run.backward(run.loss(3))
        run.model.between.armed = phase
        with pytest.raises(BoomError):
            run.backward(run.loss(5))
        run.model.between.armed = None
        run.zero_grad()
        run.set_sync(True)
        return plain_step(run)

    check_parity(Case(model=Fused, train=train, fsdp2=False, why=WHY), rank, world)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@distributed(world=2)
def test_the_step_after_an_exception_in_an_evaluation_is_exact(rank, world, mode):
    def train(run):
        run.model.between.armed = "forward"
        with mode(), pytest.raises(BoomError):
            run.model(*run.batch(5))
        run.model.between.armed = None
        return plain_step(run)

    check_parity(Case(model=Fused, train=train, fsdp2=False, why=WHY), rank, world)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@distributed(world=2)
def test_a_state_dict_right_after_an_exception_is_sharded(rank, world, phase):
    model = Fused()
    plain = {n: p.detach().clone() for n, p in model.named_parameters()}
    shard_blocks(model, fully_shard)
    model.between.armed = phase
    with pytest.raises(BoomError):
        model(*vectors(rank, 0)).sum().backward()
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor), name
        assert torch.equal(value.full_tensor(), plain[name]), name


@distributed(world=2)
def test_the_users_exception_is_raised_unchanged(rank, world):
    model = Fused()
    shard_blocks(model, fully_shard)
    for phase in ("forward", "backward"):
        model.between.armed = phase
        with pytest.raises(BoomError) as caught:
            model(*vectors(rank, 0)).sum().backward()
        assert caught.type is BoomError
        assert caught.value.__cause__ is None


class Refuses(torch.autograd.Function):
    """The identity, without a backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("refused")


@simulated(world=2)
def test_an_optimizer_step_does_not_use_gradients_of_a_failed_backward_after_zero_grad(rank, world):
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(8)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.zero_grad()
    before = [param.full_tensor() for param in model.parameters()]
    model[0].register_forward_hook(lambda module, inputs, output: Refuses.apply(output))
    with pytest.raises(RuntimeError, match="refused"):
        model(torch.ones(2, 4)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(param.full_tensor(), old) for param, old in zip(model.parameters(), before, strict=True))
