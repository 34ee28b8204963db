"""Frozen parameters get no gradient, cause no gradient work, and may be unfrozen."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from _engines import ENGINES, fully_shard
from _models import Stack, shard_blocks, shard_lists, shard_nested, vectors
from _parity import Case, check_parity, plain_step
from _pool import distributed


def frozen_stack(*prefixes):
    def make():
        model = Stack()
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(prefixes))
        return model

    return make


FROZEN = {
    "members": ("blocks.0.norm", "blocks.1.up.weight", "blocks.2.down.bias", "inp.bias"),
    "middle-group": ("blocks.1",),
    "first-groups": ("inp", "blocks.0", "blocks.1"),
    "all-but-biases": ("inp.weight", "head.weight", "blocks.0.up.weight", "blocks.1", "blocks.2.norm"),
    "root": ("inp", "head"),
}


@pytest.mark.parametrize("frozen", FROZEN)
@distributed(world=(1, 2))
def test_frozen_parameters_get_no_gradient_and_the_rest_is_exact(rank, world, frozen):
    shots = check_parity(Case(model=frozen_stack(*FROZEN[frozen]), optimizer="adamw"), rank, world)
    for name, grad in shots["ours"][0].grads.items():
        assert (grad is None) == name.startswith(FROZEN[frozen]), name


@pytest.mark.parametrize("shard", [shard_nested, shard_lists], ids=["nested", "lists"])
@distributed(world=2)
def test_frozen_parameters_work_in_any_grouping(rank, world, shard):
    check_parity(Case(model=frozen_stack(*FROZEN["members"]), shard=shard), rank, world)


@distributed(world=2)
def test_an_input_gradient_flows_through_a_fully_frozen_model(rank, world):
    def train(run):
        (x,) = run.batch()
        x.requires_grad_()
        loss = run.model(x).square().mean()
        loss.backward()
        run.record("input gradient", x.grad)
        return loss

    case = Case(model=frozen_stack(""), train=train)
    shots = check_parity(case, rank, world)
    assert all(grad is None for grad in shots["ours"][0].grads.values())


@distributed(world=(1, 2))
def test_freezing_and_unfreezing_between_steps_is_exact(rank, world):
    def train(run):
        for name, param in run.params.items():
            if name.startswith("blocks.1"):
                param.requires_grad_(run.step not in (1, 2))
            if name.endswith("up.bias"):
                param.requires_grad_(run.step > 0)
        return plain_step(run)

    check_parity(Case(model=Stack, train=train), rank, world)


GATHERED = {"unshard": None, "root": None, "kept": False, "few": 2}  # values of `reshard_after_forward`
LOST = "torch's FSDP2 loses changes of requires_grad on unsharded parameters"


@pytest.mark.parametrize("gathered", GATHERED)
@distributed(world=4)
def test_freezing_and_unfreezing_unsharded_parameters_is_exact(rank, world, gathered):
    def shard(model, fully_shard):
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=GATHERED[gathered])
        return fully_shard(model)

    def train(run):
        if run.step and not run.reference:
            if gathered == "unshard":
                run.model.unshard()
                run.model.blocks[1].unshard()
            else:
                run.model(*run.batch())  # no backward follows
        frozen = {1: ("blocks.1.up", "inp"), 2: ("head",), 3: ("blocks.1.down",)}.get(run.step, ("nothing",))
        for name, param in run.model.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
        return plain_step(run)

    check_parity(Case(model=Stack, shard=shard, train=train, steps=5, fsdp2=False, why=LOST), rank, world)


@distributed(world=2)
def test_freezing_and_unfreezing_between_forward_and_backward_is_kept(rank, world):
    def train(run):
        loss = run.loss()
        for name, param in run.model.named_parameters():
            param.requires_grad_(not name.startswith("head" if run.step % 2 else "inp"))
        run.backward(loss)
        return loss

    check_parity(Case(model=Stack, train=train, steps=5, fsdp2=False, why=LOST), rank, world)


class Probe(torch.autograd.Function):
    """x * w; records which gradients backward must compute."""

    asked: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        Probe.asked.append(ctx.needs_input_grad)
        return grad * w, (grad * x).sum(0) if ctx.needs_input_grad[1] else None


class Probed(nn.Module):
    def __init__(self):
        super().__init__()
        self.free = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        return Probe.apply(Probe.apply(x, self.free), self.frozen)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_frozen_members_of_a_group_cause_no_gradient_work(rank, world, reshard):
    Probe.asked = []
    model = Probed()
    fully_shard(model, reshard_after_forward=reshard)
    model(torch.randn(3, 4)).sum().backward()
    assert Probe.asked == [(True, False), (False, True)]
    assert model.frozen.grad is None
    assert model.free.grad is not None


@distributed(world=2)
def test_a_frozen_group_reshards_after_its_backward(rank, world):
    model = frozen_stack("blocks.1")()
    shard_blocks(model, fully_shard)
    before = dict(model.named_parameters())
    model(*vectors(rank, 0)).sum().backward()
    after = dict(model.named_parameters())
    assert all(after[name] is param for name, param in before.items())


class Adapted(nn.Module):
    """A frozen linear layer with a LoRA adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a, self.b = nn.Linear(8, 3, bias=False), nn.Linear(3, 8, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def again(function, x, reentrant):
    return checkpoint(function, x, use_reentrant=reentrant) if x.requires_grad else function(x)


class Layer(nn.Module):
    """A frozen layer that checkpoints a part of itself, with an adapter in that part."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.norm, self.adapted = nn.RMSNorm(8).requires_grad_(False), Adapted()
        self.out = nn.Linear(8, 8).requires_grad_(False)

    def part(self, x):
        return self.adapted(self.norm(x))

    def forward(self, x):
        return x + self.out(again(self.part, x, self.reentrant))


class Adapters(nn.Module):
    """A frozen model with adapters, whose layers may be checkpointed as a whole, too."""

    def __init__(self, reentrant, outer):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8).requires_grad_(False)
        self.layers = nn.ModuleList(Layer(reentrant) for _ in range(4))
        self.head = nn.Linear(8, 11).requires_grad_(False)
        self.reentrant, self.outer = reentrant, outer
        self.most = 0  # layers that were unsharded at the same time in backward

    def forward(self, ids):
        x = self.embed(ids).requires_grad_()
        for layer in self.layers:
            if x.requires_grad:
                x.register_hook(self.count)
            x = again(layer, x, self.reentrant) if self.outer else layer(x)
        return self.head(x).clone()  # FSDP2 warns about views

    def count(self, _):
        self.most = max(self.most, sum(not isinstance(layer.out.weight, DTensor) for layer in self.layers))


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("outer", [False, True], ids=["parts", "parts and layers"])
@pytest.mark.parametrize("layers", [False, True], ids=["root", "layers"])
@distributed(world=2)
def test_recomputed_parts_of_a_frozen_group_read_its_weights(rank, world, reentrant, outer, layers):
    """The adapters are groups of their own, so the groups of the layers, or of the root, are frozen."""
    ids = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))
    plain = Adapters(reentrant, outer)
    models = {name: Adapters(reentrant, outer) for name in ENGINES}
    for name, model in models.items():
        for layer in model.layers:
            ENGINES[name](layer.adapted.a)
            ENGINES[name](layer.adapted.b)
            if layers:
                ENGINES[name](layer)
        ENGINES[name](model)
    for _ in range(2):  # the second step follows the plan of the first
        for model in (plain, *models.values()):
            model(ids).square().mean().backward()
        for name, param in plain.named_parameters():
            for model in models.values():
                grad = model.get_parameter(name).grad
                assert (grad is None) is (param.grad is None), name
                if grad is not None:
                    torch.testing.assert_close(grad.full_tensor(), param.grad)
    with torch.no_grad():
        torch.testing.assert_close(models["ours"](ids), plain(ids))
    if layers:
        assert 0 < models["ours"].most <= 3, "the layer itself, the one before it, and the one that is prefetched"
