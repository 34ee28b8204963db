"""Autograd features beyond loss.backward(): each case is exact, and so is the normal step after it.

In most of these cases FSDP2 raises or is silently wrong, so they are compared with the unsharded model.
"""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from _engines import fully_shard
from _models import Block, Stack, shard_blocks, shard_nested, shard_root, vectors
from _parity import Case, check_parity, plain_step
from _pool import distributed

WHY = "FSDP2 raises or is wrong"
GROUPINGS = {"blocks": shard_blocks, "root": shard_root, "nested": shard_nested}


def odd_then_normal(odd, run):
    """Run the odd step at steps 0 and 2, each followed by a normal step."""
    return odd(run) if run.step % 2 == 0 else plain_step(run)


def check(rank, world, odd, model=Stack, grouping="blocks", reshard=None, **options):
    shard = functools.partial(GROUPINGS[grouping], reshard_after_forward=reshard)
    train = functools.partial(odd_then_normal, odd)
    check_parity(Case(model=model, shard=shard, train=train, fsdp2=False, why=WHY, **options), rank, world)


class AuxBlock(Block):
    """Stores an auxiliary loss, computed from its own weights and activations, as an attribute."""

    def forward(self, x):
        hidden = torch.tanh(self.up(self.norm(x)))
        self.aux = hidden.square().mean() + 0.1 * self.down.weight.square().sum()
        return x + self.down(hidden)


class AuxStack(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(AuxBlock(6, 10) for _ in range(3))

    def aux(self):
        return sum(block.aux for block in self.blocks)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("grouping", ["blocks", "nested"])
@distributed(world=(1, 2))
def test_an_auxiliary_loss_stored_on_modules_is_exact(rank, world, grouping, reshard):
    def odd(run):
        loss = run.loss() + run.model.aux()
        run.backward(loss)
        return loss

    check(rank, world, odd, AuxStack, grouping, reshard)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("grouping", ["blocks", "nested"])
@distributed(world=(1, 2))
def test_a_backward_of_the_auxiliary_loss_only_is_exact(rank, world, grouping, reshard):
    def odd(run):
        run.loss()
        loss = run.model.aux()
        run.backward(loss)
        return loss

    check(rank, world, odd, AuxStack, grouping, reshard)


@distributed(world=2)
def test_the_auxiliary_loss_of_only_one_block_is_exact(rank, world):
    def odd(run):
        run.loss()
        loss = run.model.blocks[1].aux
        run.backward(loss)
        return loss

    check(rank, world, odd, AuxStack)


@distributed(world=2)
def test_auxiliary_and_main_loss_in_two_backwards_are_exact(rank, world):
    def odd(run):
        loss, aux = run.loss(), run.model.aux()
        run.backward(aux, retain_graph=True)
        run.backward(loss)
        return loss + aux

    check(rank, world, odd, AuxStack)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("grouping", ["blocks", "root", "nested"])
@distributed(world=(1, 2))
def test_a_gradient_penalty_with_create_graph_is_exact(rank, world, grouping, reshard):
    def odd(run):
        (x,) = run.batch()
        x.requires_grad_()
        out = run.model(x).square().mean()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        run.record("input gradient", grad)
        loss = out + grad.square().sum()
        run.backward(loss)
        return loss

    check(rank, world, odd, grouping=grouping, reshard=reshard)


@pytest.mark.parametrize("backward_too", [False, True])
@pytest.mark.parametrize("grouping", ["blocks", "root", "nested"])
@distributed(world=(1, 2))
def test_autograd_grad_on_inputs_is_exact_and_sets_no_parameter_gradients(rank, world, grouping, backward_too):
    def odd(run):
        (x,) = run.batch()
        x.requires_grad_()
        loss = run.model(x).square().mean()
        (grad,) = torch.autograd.grad(loss, x, retain_graph=backward_too)
        run.record("input gradient", grad)
        if backward_too:
            run.backward(loss)
            return loss
        assert all(p.grad is None for p in run.params.values())
        return loss.detach() + plain_step(run)

    check(rank, world, odd, grouping=grouping)


NAMES = ("inp.weight", "blocks.0.up.weight", "blocks.1.norm.bias", "blocks.2.down.weight", "head.bias")


@pytest.mark.parametrize("names", [NAMES, NAMES[2:3]], ids=["some", "one"])
@pytest.mark.parametrize("reshard", [None, True, False])
@distributed(world=(1, 2))
def test_autograd_grad_on_parameters_returns_the_reduced_sharded_gradient(rank, world, reshard, names):
    def odd(run):
        run.param_grads(run.loss(1), names)
        assert all(p.grad is None for p in run.params.values()), "autograd.grad left gradients behind"
        return plain_step(run)

    check(rank, world, odd, reshard=reshard)


@distributed(world=2)
def test_autograd_grad_on_all_parameters_returns_the_reduced_sharded_gradients(rank, world):
    def odd(run):
        run.param_grads(run.loss(1), list(run.params))
        return plain_step(run)

    check(rank, world, odd, grouping="nested")


@pytest.mark.parametrize("reshard", [None, True, False])
@distributed(world=(1, 2))
def test_backward_with_inputs_sets_only_their_gradients(rank, world, reshard):
    def odd(run):
        loss = run.loss()
        run.backward(loss, inputs=NAMES)
        for name, param in run.params.items():
            if name not in NAMES:
                assert param.grad is None, name
        return loss

    check(rank, world, odd, reshard=reshard)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("grouping", ["blocks", "root", "nested"])
@distributed(world=(1, 2))
def test_two_backwards_through_a_retained_graph_add_up(rank, world, grouping, reshard):
    def odd(run):
        loss = run.loss()
        run.backward(loss, retain_graph=True)
        run.backward(loss)
        return loss

    check(rank, world, odd, grouping=grouping, reshard=reshard)


class EscapingStack(Stack):
    """Keeps every intermediate, including views of weights, for losses that the caller computes."""

    def forward(self, x):
        self.kept = [x := self.inp(x)]
        for block in self.blocks:
            self.kept.append(x := block(x))
        return self.head(x)


@pytest.mark.parametrize("reshard", [None, True, False])
@distributed(world=2)
def test_losses_of_intermediates_kept_by_the_caller_are_exact(rank, world, reshard):
    def odd(run):
        run.loss()
        loss = sum(h.square().mean() for h in run.model.kept[:-1])
        run.backward(loss)
        return loss

    check(rank, world, odd, EscapingStack, reshard=reshard)


class Edited(nn.Module):
    """Edits an activation in place after autograd has saved it."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        h = torch.sigmoid(self.lin(x))
        out = h * h
        h.add_(1.0)
        return out


@distributed(world=(1, 2))
def test_an_in_place_edit_of_a_saved_activation_still_raises(rank, world):
    model = Edited()
    fully_shard(model)
    for _ in range(2):
        out = model(*vectors(rank, 0))
        with pytest.raises(RuntimeError, match=r"(?i)modified (in|by an) ?-?in?-?place|modified in place"):
            out.sum().backward()


class Mark:
    """Attached to a node of the graph, because nodes do not support weak references."""


def watch_node(tensor):
    mark = tensor.grad_fn.metadata["mark"] = Mark()
    return weakref.ref(mark)


class Watched(Stack):
    """Keeps weak references to the results of a forward."""

    def forward(self, x):
        self.refs = []
        x = self.inp(x)
        for block in self.blocks:
            x = torch.sin(block(x))
            self.refs += [weakref.ref(x), watch_node(x)]
        return self.head(x)


@pytest.mark.parametrize("reshard", [None, True, False])
@distributed(world=(1, 2))
def test_a_forward_without_backward_frees_its_activations_immediately(rank, world, reshard):
    model = Watched()
    shard_blocks(model, fully_shard, reshard_after_forward=reshard)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            out = model(*vectors(rank, 0))
            node = watch_node(out)
            assert node() is not None
            del out
            assert node() is None
            assert [ref() for ref in model.refs] == [None] * len(model.refs)
    finally:
        gc.enable()


@distributed(world=2)
def test_hooks_are_called_once_with_sharded_gradients(rank, world):
    model = Stack()
    shard_blocks(model, fully_shard)
    seen = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: seen.setdefault(name, []).append(p.grad))
    model(*vectors(rank, 0)).square().mean().backward()
    assert sorted(seen) == sorted(n for n, _ in model.named_parameters())
    for name, grads in seen.items():
        assert len(grads) == 1, name
        assert isinstance(grads[0], DTensor), name
        assert torch.equal(grads[0].to_local(), model.get_parameter(name).grad.to_local()), name


@distributed(world=2)
def test_an_unused_group_gets_no_gradient_and_the_rest_is_exact(rank, world):
    class Skipping(Stack):
        def forward(self, x):
            return self.head(self.blocks[2](self.blocks[0](self.inp(x))))

    shots = check_parity(Case(model=Skipping), rank, world)
    assert all((g is None) == n.startswith("blocks.1") for n, g in shots["ours"][0].grads.items())


@distributed(world=2)
def test_a_group_that_ran_but_was_detached_gets_no_gradient(rank, world):
    class Detaching(Stack):
        def forward(self, x):
            x = self.blocks[1](self.blocks[0](self.inp(x))).detach()
            return self.head(self.blocks[2](x))

    check_parity(Case(model=Detaching), rank, world)
