"""Calls of a sharded module: users' hooks and an overridden `__call__` work as with torch's FSDP2."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import composable_shard
from _pool import distributed

ENGINES = {"ours": composable_shard.fully_shard, "fsdp2": fsdp2}


class Doubled(nn.Linear):
    """A class that overrides `__call__`."""

    def __call__(self, x):
        return 2 * super().__call__(x)


def build(shard, kind=nn.Linear):
    torch.manual_seed(0)
    model = nn.Sequential(kind(4, 6), nn.Linear(6, 3))
    for child in model:
        shard(child)
    return shard(model)


def step(model, x):
    """The loss and the gradients of one step."""
    for param in model.parameters():
        param.grad = None
    loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), *(param.grad.full_tensor() for param in model.parameters())]


def alike(found):
    return all(torch.equal(a, b) for a, b in zip(found["ours"], found["fsdp2"], strict=True))


@distributed(world=2)
def test_module_hooks_get_the_same_arguments_as_with_fsdp2(rank, world):
    x, seen, found = torch.full((2, 4), rank + 1.0), {name: [] for name in ENGINES}, {}
    for name, shard in ENGINES.items():
        model, log = build(shard), seen[name]
        step(model, x)  # first without hooks

        def before(module, args, log=log):
            log.append(("before", isinstance(module.weight, DTensor), tuple(args[0].shape)))
            return (args[0] + 1,)

        def after(module, args, output, log=log):
            log.append(("after", isinstance(module.weight, DTensor), tuple(output.shape)))
            return output * 3

        def back(module, given, taken, log=log):
            log.append(("back", tuple(taken[0].shape)))

        handles = [
            model[0].register_forward_pre_hook(before),
            model[0].register_forward_hook(after),
            model[1].register_full_backward_hook(back),
        ]
        with warnings.catch_warnings():  # FSDP2 warns about views in outputs, which this backward hook makes
            warnings.simplefilter("ignore")
            found[name] = step(model, x)
        for handle in handles:
            handle.remove()
        count = len(log)
        found[name] += step(model, x)
        assert len(log) == count
    assert seen["ours"] == seen["fsdp2"]
    assert [event for event, *_ in seen["ours"]] == ["before", "after", "back"]
    assert alike(found)


@distributed(world=2)
def test_global_module_hooks_run_for_sharded_modules(rank, world):
    x, seen = torch.full((2, 4), rank + 1.0), {name: [] for name in ENGINES}
    for name, shard in ENGINES.items():
        model, log = build(shard), seen[name]
        handles = [
            register_module_forward_pre_hook(lambda m, args, log=log: log.append(("before", type(m).__name__))),
            register_module_forward_hook(lambda m, args, out, log=log: log.append(("after", type(m).__name__))),
        ]
        try:
            model(x)
        finally:
            for handle in handles:
                handle.remove()
        model(x)
    assert [event for event, _ in seen["ours"]] == [event for event, _ in seen["fsdp2"]]
    assert len(seen["ours"]) == 6


@distributed(world=2)
def test_a_class_that_overrides_call_keeps_its_override(rank, world):
    x, found = torch.full((2, 4), rank + 1.0), {}
    for name, shard in ENGINES.items():
        model = build(shard, Doubled)
        found[name] = step(model, x)
        plain = build(lambda module: module, Doubled)
        assert torch.equal(found[name][0], plain(x).square().sum())
        assert not torch.equal(found[name][0], build(lambda module: module)(x).square().sum())
    assert alike(found)


@distributed(world=2)
def test_a_forward_set_on_the_instance_is_called(rank, world):
    x, found = torch.full((2, 4), rank + 1.0), {}
    for name, shard in ENGINES.items():
        model = build(shard)
        inner = model[0].forward
        model[0].forward = lambda x, inner=inner: inner(x) * 5
        found[name] = step(model, x)
    assert alike(found)


class Implemented(nn.Linear):
    """A class that overrides `_call_impl`."""

    def _call_impl(self, *args, **kwargs):
        return 2 * super()._call_impl(*args, **kwargs)


class Partly(nn.Linear):
    """A class whose `__call__` is a property."""

    @property
    def __call__(self):
        return functools.partial(nn.Linear.__call__, self)


@pytest.mark.parametrize("kind", [Implemented, Partly])
@distributed(world=2)
def test_other_overrides_of_call_are_kept(rank, world, kind):
    x = torch.full((2, 4), rank + 1.0)
    plain, model = build(lambda module: module, kind), build(composable_shard.fully_shard, kind)
    assert torch.equal(model(x), plain(x))


@distributed(world=2)
def test_a_patched_call_is_called(rank, world):
    x, kept, seen = torch.full((2, 4), rank + 1.0), nn.Module.__call__, []
    model = build(composable_shard.fully_shard)

    def patched(self, *args, **kwargs):
        seen.append(type(self).__name__)
        return kept(self, *args, **kwargs)

    nn.Module.__call__ = patched
    try:
        model(x)
    finally:
        nn.Module.__call__ = kept
    assert len(seen) == 3
