"""Every optimizer of torch steps all shapes as in one process, on owners and inside of backward."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import composable_shard as cs
from _pool import more, simulated
from optim._single import Single, gradients_of, whole

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Muon": (torch.optim.Muon, {"lr": 0.02}),
    "LBFGS": (torch.optim.LBFGS, {}),
    "SparseAdam": (torch.optim.SparseAdam, {}),
}
SHAPES = {
    "number": (),
    "vector": (5,),
    "short": (1,),  # fewer elements than ranks
    "matrix": (6, 4),
    "uneven": (3, 5),  # fewer rows than four ranks
    "stack": (2, 3, 4),
    "frozen": (4, 3),
}


class Shapes(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            value = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name)))
            self.register_parameter(name, nn.Parameter(value, requires_grad=name != "frozen"))

    def forward(self, x):
        return sum((param * x[0] + x[1]).sin().square().sum() for param in self.parameters())


def twins(names):
    """A model, and a sharded copy. 0-dim parameters are not sharded, because they have no dim to shard."""
    plain = Shapes(names)
    model = copy.deepcopy(plain)
    cs.fully_shard(model, ignored_params={param for param in model.parameters() if not param.ndim})
    return plain, model


def backward(model, step):
    """All ranks have the same input, so the mean of their gradients is the gradient of one process."""
    model(torch.tensor([1.0 + step / 7, 0.3 * step])).backward()


def assert_equal(model, plain, exact):
    """`exact`: whether values must be bitwise identical. None: within the rounding of bfloat16."""
    how = {True: {"rtol": 0, "atol": 0}, False: {}, None: {"rtol": 0.03, "atol": 0.003}}[exact]
    for (name, ours), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), other, **how, msg=lambda text, name=name: f"{name}: {text}")


def at_owners(kind, names, state, exact=True, **options):
    plain, model = twins(names)
    optimizer = cs.optim.owned(kind, model.named_parameters(), state=state, **options)
    single = Single(kind, [*plain.named_parameters()], **options)
    for step in range(5):
        backward(model, step)
        single.step(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
        assert_equal(model, plain, exact)


def inside_of_backward(kind, names, exact=True, **options):
    plain, model = twins(names)
    optimizer = cs.optim.in_backward(model, lambda params: kind(params, **options))
    single = kind(plain.parameters(), **options)
    for step in range(5):
        for net, each in ((model, optimizer), (plain, single)):
            backward(net, step)
            each.step()
            each.zero_grad()
        assert_equal(model, plain, exact)


ALL = [*SHAPES]
MATRICES = ["matrix", "uneven", "stack", "frozen"]  # shapes that Muon accepts; each matrix of a stack


def accepted(name, names):
    """The names of shapes that an optimizer accepts."""
    return [each for each in names if name != "Muon" or each in MATRICES]


def in_the_default_run(names, default):
    return [name if name in default else more(name) for name in names]


STEPS_WHOLE = [name for name in OPTIMIZERS if name not in ("LBFGS", "SparseAdam")]
STEPS_SHARDS = [name for name in STEPS_WHOLE if name not in ("Adafactor", "Muon", "Rprop")]


@pytest.mark.parametrize("state", ["owner", more("shards")])
@pytest.mark.parametrize("name", in_the_default_run(STEPS_WHOLE, ("SGD", "Adafactor", "Muon")))
@simulated(world=(2, more(4)))
def test_steps_on_owners_equal_those_of_one_process(rank, world, name, state):
    kind, options = OPTIMIZERS[name]
    at_owners(kind, accepted(name, ALL), state, **options)


@pytest.mark.parametrize("name", in_the_default_run(STEPS_SHARDS, ("SGD", "NAdam")))
@simulated(world=(2, more(4)))
def test_steps_inside_of_backward_equal_those_of_one_process(rank, world, name):
    kind, options = OPTIMIZERS[name]
    inside_of_backward(kind, ALL, **options)


@pytest.mark.matrix
@simulated(world=2)
def test_muon_inside_of_backward_steps_shards_within_its_bfloat16(rank, world):
    inside_of_backward(*OPTIMIZERS["Muon"][:1], ["matrix", "uneven", "frozen"], exact=None, lr=0.02)


REFUSED = [
    ("LBFGS", "owned", ALL, cs.errors.ShardConfigTypeError, "kind: LBFGS calls the closure several times"),
    ("LBFGS", "in_backward", ALL, cs.errors.ShardConfigTypeError, "make: LBFGS calls the closure several times"),
    (
        "SparseAdam",
        "owned",
        ["matrix"],
        cs.errors.ShardConfigTypeError,
        "parameter matrix: SparseAdam accepts only sparse",
    ),
    (
        "SparseAdam",
        "in_backward",
        ["vector"],
        cs.errors.ShardConfigTypeError,
        "parameter vector: SparseAdam accepts only",
    ),
    (
        "Adafactor",
        "in_backward",
        ["stack"],
        cs.errors.ShardConfigTypeError,
        "parameter stack: is sharded, but Adafactor computes means",
    ),
    (
        "Rprop",
        "in_backward",
        ["uneven"],
        cs.errors.ShardConfigTypeError,
        "parameter uneven: is sharded, but Rprop uses masked",
    ),
    (
        "Muon",
        "owned",
        ["matrix", "vector"],
        cs.errors.ShardConfigValueError,
        "parameter vector: Muon does not accept it",
    ),
    ("Muon", "owned", ["number"], cs.errors.ShardConfigValueError, "parameter number: Muon does not accept it"),
    (
        "Muon",
        "in_backward",
        ["matrix", "stack"],
        cs.errors.ShardConfigValueError,
        "parameter stack: the optimizer of `make`",
    ),
    (
        "Muon",
        "in_backward",
        ["number", "matrix"],
        cs.errors.ShardConfigValueError,
        "parameter number: the optimizer of `make`",
    ),
]


@pytest.mark.parametrize(("name", "way", "names", "error", "match"), REFUSED)
@simulated(world=2)
def test_unsupported_parameters_are_named_before_any_step(rank, world, name, way, names, error, match):
    kind, options = OPTIMIZERS[name]
    _, model = twins(names)
    make = {
        "owned": lambda: cs.optim.owned(kind, model.named_parameters(), **options),
        "in_backward": lambda: cs.optim.in_backward(model, lambda params: kind(params, **options)),
    }[way]
    with pytest.raises(error, match=match):
        make()
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


@simulated(world=2)
def test_a_0_dim_parameter_cannot_be_sharded_and_is_named(rank, world):
    with pytest.raises(cs.errors.ShardConfigValueError, match="number"):
        cs.fully_shard(Shapes(["number", "matrix"]))


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        if any(param.ndim == 1 for group in self.param_groups for param in group["params"]):
            raise ArithmeticError("no vectors")
        return super().step(closure)


@simulated(world=2)
def test_an_error_inside_of_backward_names_the_parameters(rank, world):
    _, model = twins(["matrix", "vector"])
    cs.optim.in_backward(model, lambda params: Failing(params, lr=0.1))
    with pytest.raises(ArithmeticError, match="no vectors") as failed:
        backward(model, 0)
    assert re.search("in_backward: Failing raised this error in the step of .*vector", "".join(failed.value.__notes__))
