"""Optimizers of compiled models: steps inside of backward are in the graph or after it; `owned` works as in eager."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn

import composable_shard as cs
import composable_shard._compile.compiled as compiled_module
from _blocks import Transformer, next_token_loss, token_batch
from _pool import distributed, more
from composable_shard._torch.core import GRAPHS_GIVE_NONE
from composable_shard.report import watch_graphs
from optim._single import gradients_of, matrices, sharded
from optim.test_in_backward import assert_alike, live

KINDS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


class Twice(nn.Module):
    """Runs its first block twice."""

    def __init__(self):
        super().__init__()
        self.inner = Transformer(layers=2)
        self.blocks = self.inner.blocks

    def forward(self, tokens):
        inner, length = self.inner, tokens.shape[1]
        x = inner.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, inner.cos[:length], inner.sin[:length])
        return inner.head(inner.norm(x))


def twins(net):
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(net())
        sharded(made[-1])
    return made


def train(model, call, optimizer, rank, steps=3, micro=1):
    for step in range(steps):
        for index in range(micro):
            model.set_requires_gradient_sync(index == micro - 1)
            next_token_loss(call, *token_batch(rank, micro * step + index)).backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled(model):
    return torch.compile(model, backend=cs._compile.compiled.aot_eager(), fullgraph=True)


def in_graph(rank, net, kind, micro, options):
    torch._dynamo.reset()
    ordinary, model = twins(net)
    params, seen = list(model.parameters()), []
    for param in params:
        param.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad is not None, live(params))))
    optimizer = cs.optim.in_backward(model, KINDS[kind], **options)
    with watch_graphs() as graphs:
        train(model, compiled(model), optimizer, rank, micro=micro)
    train(ordinary, ordinary, KINDS[kind](list(ordinary.parameters())), rank, micro=micro)
    assert_alike(model, ordinary)
    backwards = [str(graph) for graph in graphs if str(graph).startswith("backward")]
    groups = 3 + (net is Twice)  # a block that runs twice has its gradients in two parts
    assert not GRAPHS_GIVE_NONE or backwards[-1].count("s") == groups
    assert seen
    assert all(there for there, _ in seen)
    whole = sum(p.to_local().nbytes for p in params)
    if GRAPHS_GIVE_NONE and net is not Twice and micro == 1:  # markers of accumulated gradients use `.grad`, too
        assert max(size for _, size in seen) < whole


@pytest.mark.parametrize(("net", "kind", "micro", "options"), [
    (Transformer, "foreach", 1, {}),
    more(Transformer, "fused", 1, {}),
    more(Transformer, "adamw", 2, {"max_norm": 1e9, "norm_of": "delayed"}),
    (Twice, "fused", 1, {}),
])  # fmt: skip
@distributed(world=2)
def test_the_step_is_in_the_backward_graph(rank, world, net, kind, micro, options):
    in_graph(rank, net if net is Twice else lambda: Transformer(layers=2), kind, micro, options)


@pytest.mark.matrix
@distributed(world=2)
def test_compiled_blocks_step_after_their_backward(rank, world):
    torch._dynamo.reset()
    ordinary, model = twins(Twice)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    optimizer = cs.optim.in_backward(model, KINDS["foreach"])
    train(model, model, optimizer, rank)
    train(ordinary, ordinary, KINDS["foreach"](list(ordinary.parameters())), rank)
    assert_alike(model, ordinary)


@pytest.mark.matrix
@distributed(world=2)
def test_without_hooks_graphs_leave_gradients_to_autograd(rank, world):
    torch._dynamo.reset()
    ordinary, model = twins(Transformer)
    run, optimizer = compiled(model), cs.optim.in_backward(model, KINDS["foreach"])
    plain = KINDS["foreach"](list(ordinary.parameters()))
    train(model, run, optimizer, rank, steps=1)
    optimizer.remove_hooks()
    next_token_loss(run, *token_batch(rank, 1)).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    train(ordinary, ordinary, plain, rank, steps=2)
    assert_alike(model, ordinary)


def whole_step(model, tokens):
    loss = next_token_loss(model, tokens)
    loss.backward()
    return loss.detach()


@pytest.mark.skipif(not GRAPHS_GIVE_NONE, reason="torch before 2.13 traces no backward to DTensors")
@distributed(world=2)
def test_a_graph_that_includes_the_backward_is_refused(rank, world):
    torch._dynamo.reset()
    _, model = twins(Transformer)
    cs.optim.in_backward(model, KINDS["foreach"])
    run = torch.compile(whole_step, fullgraph=True, backend=cs._compile.compiled.aot_eager())
    with (
        pytest.raises(
            cs.errors.ShardConfigStateError, match="an optimizer inside of backward cannot be part of a compiled"
        ),
        torch._dynamo.config.patch(trace_autograd_ops=True),
    ):
        run(model, *token_batch(rank, 0))


@distributed(world=2)
def test_owners_step_after_a_compiled_backward(rank, world):
    torch._dynamo.reset()
    ordinary, model = twins(lambda: Transformer(layers=1))
    run = compiled(model)
    optimizers = [cs.optim.owned(torch.optim.Muon, matrices(net), lr=0.02) for net in (ordinary, model)]
    for step in range(3):
        for call in (ordinary, run):
            next_token_loss(call, *token_batch(rank, step)).backward()
        one, two = gradients_of(ordinary), gradients_of(model)
        assert all(torch.equal(one[name], two[name]) for name in one)
        for net, optimizer in zip((ordinary, model), optimizers, strict=True):
            optimizer.step()
            net.zero_grad()
        assert_alike(model, ordinary)


@distributed(world=2)
def test_only_code_of_this_package_is_kept_from_dynamo(rank, world):
    """torch wraps the `step` of `owned` in code that all optimizers share. Others must compile like before."""
    sharded(model := Transformer(layers=1))
    optimizer = cs.optim.owned(torch.optim.Muon, matrices(model))
    assert type(optimizer).step.hooked
    with pytest.MonkeyPatch.context() as patch:
        kept = set()
        patch.setattr(compiled_module, "never_compile", lambda code: kept.add(code.co_filename))
        compiled_module.keep_from_dynamo(sys.modules, "composable_shard")
    assert compiled_module.__file__ in kept
    assert sys.modules[type(optimizer).__module__].__file__ in kept
    folder = os.path.dirname(cs.__file__)
    assert {file for file in kept if not file.startswith(folder)} <= {"<string>"}
