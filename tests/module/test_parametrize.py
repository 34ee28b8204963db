"""Parametrized weights, and functional calls and transforms in a forward, compared with the unsharded model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.nn.utils import parametrizations, parametrize

import composable_shard as cs
from _pool import distributed
from _sides import models_of, noise, optimizers_of, shard_children, train_alike, whole
from _stepping import shard_whole

# ---- parametrizations


def parametrized(register):
    def make():
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        for at in (0, 2):
            register(model[at])
        return model

    return make


def own_parametrization(linear):
    parametrize.register_parametrization(linear, "bias", nn.Softplus())


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


@pytest.mark.parametrize(
    "register",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        own_parametrization,
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "own"],
)
@pytest.mark.parametrize("shard", [shard_children, shard_whole])
@distributed(world=2)
def test_parametrized_weights_are_exact(rank, world, register, shard):
    models = models_of(parametrized(register), shard)
    x = noise(5, 4)

    def loss_of(model, step):
        return model(x).square().mean()

    optimizers = optimizers_of(models)
    train_alike(models, loss_of, 2, optimizers)
    for model in models.values():
        model.eval()
    with torch.no_grad(), parametrize.cached():
        outs = [model(x) for model in models.values()]
    assert all(torch.equal(out, outs[0]) for out in outs)
    for model in models.values():
        model.train()
    with parametrize.cached():
        train_alike(models, loss_of, 1, optimizers)


@distributed(world=2)
def test_a_parametrization_may_come_after_sharding(rank, world):
    models = models_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), shard_whole, fsdp2=False)
    for model in models.values():
        parametrize.register_parametrization(model[0], "weight", Symmetric())
    x = noise(5, 4)
    train_alike(models, lambda model, step: model(x).square().mean(), 2, optimizers_of(models))


# ---- functional transforms


class Transformed(nn.Module):
    """Uses a transform in its forward, over its own weights and over those of a child."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inp = nn.Linear(4, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return getattr(self, self.kind)(self.inp(x))

    def vmap(self, x):
        return torch.func.vmap(lambda row: torch.tanh(self.weight @ row))(x)

    def grad(self, x):
        return torch.func.vmap(torch.func.grad(lambda row: torch.tanh(self.weight @ row).sum()))(x)

    def jvp(self, x):
        return torch.func.jvp(lambda y: torch.tanh(y @ self.weight), (x,), (torch.ones_like(x),))[1]

    def functional_call(self, x):
        changed = {name: 2 * p for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, changed, (x,))


def shard_parts(model, engine, **options):
    engine(model.inp, **options)
    engine(model, **options)


@distributed(world=2)
def test_functional_calls_in_a_forward_are_exact(rank, world):
    models = models_of(partial(Transformed, "functional_call"), shard_parts)
    models["plain"].weight.requires_grad_(True)
    train_alike(models, lambda model, step: model(noise(3, 4)).square().mean())


class CallsWith(nn.Module):
    """Runs one of its modules with other parameters than the module's own."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.shift = nn.Linear(4, 4), nn.Linear(4, 4), True
        self.other = {"weight": torch.zeros(4, 4), "bias": torch.ones(4)}

    def forward(self, x):
        return torch.func.functional_call(self.b, self.other, (self.a(x),)) if self.shift else self.b(self.a(x))


@distributed(world=2)
def test_a_functional_call_of_a_sharded_module_is_an_error_where_fsdp2_ignores_it(rank, world):
    models = models_of(CallsWith, shard_children)
    assert torch.equal(models["plain"](noise(3, 4)), torch.ones(3, 4))
    assert not torch.equal(models["fsdp2"](noise(3, 4)), torch.ones(3, 4)), "its own parameters were used"
    with pytest.raises(RuntimeError, match=r"parameter b.weight: was replaced by a Tensor .*functional_call"):
        models["ours"](noise(3, 4))
    for model in models.values():
        model.shift = False
    train_alike(models, lambda model, step: model(noise(3, 4, seed=step)).square().mean())


def shard_first(model, engine, **options):
    engine(model.a, **options)
    engine(model, **options)


def halved(model, train):
    """Parameters for a functional call, with the same placements."""
    halves = {name: param.detach() / 2 for name, param in model.named_parameters()}
    return {name: half.requires_grad_() for name, half in halves.items()} if train else halves


@pytest.mark.parametrize("backward", ["none", "inputs", "parameters"])
@distributed(world=2)
def test_a_functional_call_around_the_model_with_sharded_parameters_is_exact(rank, world, backward):
    models = models_of(CallsWith, shard_first, fsdp2=False)  # FSDP2 ignores the given parameters
    outputs, found = {}, {}
    for name, model in models.items():
        model.shift = False
        own, given, x = dict(model.named_parameters()), halved(model, backward == "parameters"), noise(3, 4)
        # A copy, because torch writes the model's parameters after the call into the dictionary.
        output = torch.func.functional_call(model, {**given}, (x.requires_grad_(backward != "none"),))
        if backward != "none":
            output.square().mean().backward()
        outputs[name] = output.detach()
        found[name] = [whole(each.grad) for each in given.values() if each.grad is not None]
        assert all(param.grad is None for param in own.values())
        model(noise(3, 4)).sum().backward()  # with its own parameters again
        assert all(param.grad is not None for param in own.values())
        model.zero_grad()
    torch.testing.assert_close(outputs["ours"], outputs["plain"])
    torch.testing.assert_close(found["ours"], found["plain"])
    train_alike(models, lambda model, step: model(noise(3, 4, seed=step)).square().mean())


@distributed(world=2)
def test_a_functional_call_with_non_leaf_parameters_is_refused(rank, world):
    models = models_of(CallsWith, shard_first, fsdp2=False)
    model = models["ours"]
    with pytest.raises(cs.errors.ShardConfigStateError, match=r"parameter b.weight: .* is not a leaf"):
        torch.func.functional_call(model, {"b.weight": 2 * model.b.weight}, (noise(3, 4),))
    for each in models.values():
        each.shift = False
    train_alike(models, lambda model, step: model(noise(3, 4, seed=step)).square().mean())


@distributed(world=2)
def test_a_parameter_assigned_between_forward_and_backward_is_kept(rank, world):
    models = models_of(CallsWith, shard_first, fsdp2=False)
    for model in models.values():
        model.shift = False
        new = halves(model)
        output = model(noise(3, 4)).sum()
        assign(model, new)
        output.backward()
        del output
    train_alike(models, lambda model, step: model(noise(3, 4, seed=step)).square().mean())


@distributed(world=2)
def test_assigning_over_an_unsharded_parameter_is_an_error(rank, world):
    models = models_of(CallsWith, shard_first, fsdp2=False)
    model = models["ours"]
    given = halves(model)
    for each in models.values():
        each.shift = False
        each(noise(3, 4))
    with pytest.raises(cs.errors.ShardConfigStateError, match=r"parameter b.weight: .*call reshard\(\)"):
        torch.func.functional_call(model, {**given}, (noise(3, 4),))
    wanted = models["plain"](noise(3, 4))
    torch.testing.assert_close(model(noise(3, 4)), wanted)  # with its own parameters, which are restored
    model.reshard()
    torch.func.functional_call(model, {**given}, (noise(3, 4),))
    torch.testing.assert_close(model(noise(3, 4)), wanted)
    with pytest.raises(cs.errors.ShardConfigStateError, match=r"parameter b.weight: .*call reshard\(\)"):
        torch.func.functional_call(model, {**given}, (noise(3, 4),))
    torch.testing.assert_close(model(noise(3, 4)), wanted)
    model.reshard()
    assign(models["plain"], halves(models["plain"]))
    assign(model, given)
    train_alike(models, lambda model, step: model(noise(3, 4, seed=step)).square().mean())


def halves(model):
    return {name: nn.Parameter(param.detach() / 2) for name, param in model.named_parameters()}


def assign(model, params):
    for name, param in params.items():
        model.get_submodule(name[0])._parameters[name[2:]] = param


@pytest.mark.parametrize("then", ["backward", "unshard"])
@distributed(world=2)
def test_a_parameter_assigned_to_a_frozen_module_before_a_gather_is_kept(rank, world, then):
    models = models_of(CallsWith, shard_first, fsdp2=False)
    for name, model in models.items():
        model.shift = False
        model.a.requires_grad_(False)
        output = model(noise(3, 4).requires_grad_()).sum()
        new = nn.Parameter(model.a.weight.detach() / 2, requires_grad=False)
        model.a._parameters["weight"] = new
        if then == "backward":
            output.backward()
            model.zero_grad()
        elif name == "ours":
            model.a.unshard()
            model.a.reshard()
            model.reshard()
        del output
        assert model.a._parameters["weight"] is new
    train_alike(models, lambda model, step: model(noise(3, 4, seed=step)).square().mean())


@pytest.mark.parametrize("kind", ["vmap", "jvp", "grad"])
@distributed(world=2)
def test_functional_transforms_in_a_forward(rank, world, kind):
    models = models_of(partial(Transformed, kind), shard_parts)
    # If the transform keeps views of memory, the group keeps that memory until the next forward.
    train_alike(models, lambda model, step: model(noise(3, 4)).square().mean(), at_rest=kind != "grad")


@distributed(world=2)
def test_a_transform_that_forbids_hooks_can_enclose_a_sharded_module(rank, world):
    # Before torch 2.13 FSDP2 frees storage that the transform has wrapped.
    models = models_of(partial(Transformed, "vmap"), shard_parts, fsdp2=torch.__version__ >= "2.13")
    for number in range(3):
        found = [torch.func.grad(lambda x, m=m: m(x).sum())(noise(3, 4, seed=number)).detach() for m in models.values()]
        for each in found[1:]:
            torch.testing.assert_close(each, found[0])
    train_alike(models, lambda model, step: model(noise(3, 4)).square().mean())
