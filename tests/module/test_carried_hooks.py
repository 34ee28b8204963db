"""Hooks on parameters that are registered before sharding, and hooks on the node that accumulates a gradient."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, fully_shard
from _pool import distributed, simulated
from _sides import whole
from composable_shard.errors import ShardConfigStateError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # from torch.jit, which torch itself uses there
    from torch.distributed.optim import _apply_optimizer_in_backward


def shard(model, engine, **options):
    for block in model.blocks:
        engine(block, **options)
    engine(model, **options)


def plain_and_sharded(**options):
    torch.manual_seed(0)
    plain = Transformer()
    model = copy.deepcopy(plain)
    shard(model, fully_shard, **options)
    return plain, model


def loss_of(model, step=0):
    return next_token_loss(model, *token_batch(0, step))


def node_of(param):
    return param.expand_as(param).grad_fn.next_functions[0][0]


def assert_same_values(model, plain):
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), other, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("before_forward", [True, False])
@distributed(world=2)
def test_torchs_optimizer_in_backward_steps_in_the_same_backward(rank, world, before_forward):
    plain, model = plain_and_sharded()
    torch.manual_seed(0)
    theirs = Transformer()
    shard(theirs, ENGINES["fsdp2"])
    models = (plain, model, theirs)
    if not before_forward:  # a first step, in which no hooks are found
        for each in models:
            loss_of(each).backward()
            each.zero_grad()
    for each in models:
        _apply_optimizer_in_backward(torch.optim.AdamW, each.parameters(), {"lr": 0.01, "foreach": False})
    first = [param.detach().clone() for param in model.parameters()]
    for step in range(3):
        for each in (plain, model):
            loss_of(each, step).backward()
        assert all(param.grad is None for param in model.parameters())
        assert_same_values(model, plain)
    loss_of(theirs).backward()
    for mine, other in zip(first, theirs.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local()), "FSDP2 takes no step in this backward"


@distributed(world=2)
def test_node_hooks_see_and_change_the_reduced_gradient_until_removed(rank, world):
    plain, model = plain_and_sharded()
    seen = {"plain": [], "ours": []}
    handles, nodes = [], []
    for name, each in (("plain", plain), ("ours", model)):
        node = node_of(each.blocks[1].attention.q.weight)
        nodes.append(node)

        def twice(gradients, name=name):
            seen[name].append(("before", whole(gradients[0]).clone()))
            return (gradients[0] * 2,)

        def after(_, gradients, name=name):
            seen[name].append(("after", whole(gradients[0]).clone()))

        handles.append((node.register_prehook(twice), node.register_hook(after)))
    for step in range(2):
        for each in (plain, model):
            loss_of(each, step).backward()
    assert [kind for kind, _ in seen["ours"]] == ["before", "after"] * 2
    for (_, mine), (_, other) in zip(seen["ours"], seen["plain"], strict=True):
        torch.testing.assert_close(mine, other)
    for before, after in handles:
        before.remove()
        after.remove()
    for each in (plain, model):
        loss_of(each, 2).backward()
    assert len(seen["ours"]) == 4
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), other.grad, msg=lambda m, n=name: f"{n}: {m}")


@simulated(world=2)
def test_a_node_hook_runs_once_per_reduction(rank, world):
    plain, model = plain_and_sharded()
    calls = []
    node = node_of(model.head.weight)
    node.register_hook(lambda _, gradients: calls.append(gradients[0]))
    (loss_of(model, 0) + loss_of(model, 1)).backward()
    (loss_of(plain, 0) + loss_of(plain, 1)).backward()
    assert len(calls) == 1
    torch.testing.assert_close(whole(calls[0]), plain.head.weight.grad)
    for each in (plain, model):
        each.zero_grad()
    model.set_requires_gradient_sync(False)
    for each in (plain, model):
        loss_of(each, 0).backward()
    assert len(calls) == 1
    model.set_requires_gradient_sync(True)
    for each in (plain, model):
        loss_of(each, 1).backward()
    assert len(calls) == 2
    torch.testing.assert_close(whole(calls[1]), plain.head.weight.grad)


@distributed(world=2)
def test_node_hooks_can_be_registered_again_after_a_conversion(rank, world):
    _, model = plain_and_sharded()
    loss_of(model).backward()
    model.zero_grad()
    node_of(model.head.weight).register_hook(lambda *_: pytest.fail("this node is not kept alive"))
    loss_of(model).backward()
    model.zero_grad()
    kept = node_of(model.head.weight)
    old = []
    kept.register_hook(lambda *_: old.append(1))
    loss_of(model).backward()
    assert old == [1]
    model.double()
    calls = []
    node = node_of(model.head.weight)
    node.register_hook(lambda _, gradients: calls.append(gradients[0].dtype))
    next_token_loss(model, *token_batch(rank, 0)).backward()
    assert calls == [torch.float64]


@pytest.mark.parametrize("kind", ["tensor", "post", "node"])
@distributed(world=2)
def test_hooks_registered_before_sharding_see_reduced_gradients_until_removed(rank, world, kind):
    torch.manual_seed(0)
    plain = Transformer(tied=True)
    models = {"plain": plain, "ours": copy.deepcopy(plain), "fsdp2": copy.deepcopy(plain)}
    seen = {name: {} for name in models}
    handles, nodes = [], []
    for name, model in models.items():
        for at, param in model.named_parameters():

            def note(gradient, name=name, at=at):
                seen[name].setdefault(at, []).append(whole(gradient).detach().clone())

            if kind == "tensor":
                handles.append(param.register_hook(note))
            elif kind == "post":
                handles.append(param.register_post_accumulate_grad_hook(lambda p, note=note: note(p.grad)))
            else:
                nodes.append(node_of(param))
                handles.append(nodes[-1].register_hook(lambda _, gradients, note=note: note(gradients[0])))
        if name != "plain":
            shard(model, ENGINES[name])
    for step in range(2):
        for model in models.values():
            loss_of(model, step).backward()
            model.zero_grad()
    assert not seen["fsdp2"], "FSDP2 drops them"
    assert seen["ours"].keys() == seen["plain"].keys() == dict(plain.named_parameters()).keys()
    for at, gradients in seen["plain"].items():
        assert len(gradients) == len(seen["ours"][at]) == 2
        torch.testing.assert_close(seen["ours"][at], gradients)
    for handle in handles:
        handle.remove()
    for model in models.values():
        loss_of(model, 2).backward()
    assert {len(gradients) for gradients in seen["ours"].values()} == {2}
    for (name, mine), other in zip(models["ours"].named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), other.grad, msg=lambda m, n=name: f"{n}: {m}")


@simulated(world=2)
def test_a_hook_of_a_frozen_parameter_runs_once_it_is_unfrozen(rank, world):
    model = nn.Linear(4, 4)
    calls = []
    model.weight.register_hook(calls.append)
    model.weight.requires_grad_(False)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    assert not calls
    model.weight.requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()
    assert len(calls) == 1
    assert isinstance(calls[0], DTensor)


@pytest.mark.parametrize("thawed", [False, True])
@simulated(world=2)
def test_a_node_hook_is_detected_even_if_hooks_are_registered_in_every_step(rank, world, thawed):
    plain, model = plain_and_sharded()
    for each in (plain, model):
        each.head.weight.requires_grad_(not thawed)
    seen = {"plain": [], "ours": []}
    nodes = []
    for step in range(6):
        if step == 4:
            for name, each in (("plain", plain), ("ours", model)):
                each.head.weight.requires_grad_(True)
                nodes.append(node_of(each.head.weight))
                nodes[-1].register_prehook(lambda gradients, name=name: seen[name].append(whole(gradients[0]).clone()))
        for each in (plain, model):
            loss = loss_of(each, step)
            loss.register_hook(lambda gradient: None)  # other libraries register hooks in each forward
            loss.backward()
    assert len(seen["ours"]) == 2
    torch.testing.assert_close(seen["ours"], seen["plain"])
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), other.grad, msg=lambda m, n=name: f"{n}: {m}")


@distributed(world=2)
def test_torchs_optimizer_in_backward_is_refused_if_applied_before_sharding(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    fully_shard(model)
    with pytest.raises(ShardConfigStateError, match="from before fully_shard"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.matrix
@distributed(world=2)
def test_node_hooks_run_in_compiled_steps(rank, world):
    plain, model = plain_and_sharded()
    for each in (plain, model):
        _apply_optimizer_in_backward(torch.optim.SGD, each.parameters(), {"lr": 0.1, "foreach": False})
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(3):
        loss_of(plain, step).backward()
        loss_of(compiled, step).backward()
        assert_same_values(model, plain)


def mask(gradient):
    return gradient * torch.ones(gradient.shape)  # a plain tensor of the unsharded shape


def mask_all(gradients):
    return (mask(gradients[0]),)


def clip_after(param):
    param.grad.add_(torch.ones(param.shape))


def mask_after(_, gradients):
    mask(gradients[0])


HOOKS = {  # how to register a hook on a parameter or its node, and the hook
    "tensor": (lambda param, node: param.register_hook(mask), "mask"),
    "partial": (lambda param, node: param.register_hook(functools.partial(mask)), "mask"),
    "accumulated": (lambda param, node: param.register_post_accumulate_grad_hook(clip_after), "clip_after"),
    "before the node": (lambda param, node: node.register_prehook(mask_all), "mask_all"),
    "after the node": (lambda param, node: node.register_hook(mask_after), "mask_after"),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", HOOKS)
@simulated(world=2)
def test_an_error_in_a_hook_names_the_parameter_and_the_hook(rank, world, kind, before):
    register, name = HOOKS[kind]
    torch.manual_seed(0)
    model = Transformer()
    norm = model.blocks[1].attention_norm
    if not before:
        shard(model, fully_shard)
    node = node_of(norm.weight)
    register(norm.weight, node)
    if before:
        shard(model, fully_shard)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        loss_of(model).backward()
    (note,) = [each for each in caught.value.__notes__ if "raised by the hook" in each]
    assert f"raised by the hook {name} (" in note
    assert f"{__file__}:" in note
    assert "on parameter blocks.1.attention_norm.weight." in note
    assert "to_local()" in note


@pytest.mark.parametrize("own", [False, True])
@simulated(world=2)
def test_hooks_on_parameters_left_unsharded_by_forward_get_reduced_gradients(rank, world, own):
    """After a forward without a backward, users see unsharded copies. With `own`, the sharded ones have hooks, too."""
    plain, model = plain_and_sharded()
    names = ("embed.weight", "head.weight")
    doubled, seen, handles = [], [], []

    def double(gradient):
        doubled.append(isinstance(gradient, DTensor))
        return 2 * gradient

    def hook(each):
        for name in names:
            param = each.get_parameter(name)
            handles.append(param.register_hook(double))
            handles.append(param.register_post_accumulate_grad_hook(lambda p: seen.append(isinstance(p.grad, DTensor))))

    for step in range(3):
        for each in (plain, model):
            if own and not step:
                hook(each)
            loss_of(each, step)
            if not step:
                hook(each)
            loss_of(each, step).backward()
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), other.grad, msg=lambda m, n=(name, step): f"{n}: {m}")
            mine.grad = other.grad = None
        calls = 2 * len(names) * (1 + own) if step < 2 else 0
        assert doubled == seen == [False] * (calls // 2) + [True] * (calls // 2)
        doubled.clear()
        seen.clear()
        if step == 1:
            for handle in handles:
                handle.remove()
