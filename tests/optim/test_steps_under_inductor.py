"""Steps inside of backward of models that Inductor compiles give the weights of one process and of eager steps."""

from __future__ import annotations

import warnings

import pytest
import torch

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _compiling import LIMIT_S
from _pool import distributed, more
from composable_shard._torch.core import GRAPHS_GIVE_NONE
from composable_shard.report import watch_graphs
from optim.test_in_backward import assert_alike
from optim.test_in_graphs import KINDS, Twice, train, twins

with warnings.catch_warnings():  # Inductor's own imports warn
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx

TWICE = -1  # a net whose first block runs twice


def summed(call, optimizer, steps, micro):
    """Steps of one process with the batches of all ranks."""
    for step in range(steps):
        for index in range(micro):
            next_token_loss(call, *token_batch(0, micro * step + index)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("way", "layers", "kind", "micro"), [
    ("torch", 1, "foreach", 1),
    more("torch", 2, "fused", 2),
    more("ours", 2, "adamw", 1),
    more("blocks", 2, "fused", 1),
    more("torch", TWICE, "foreach", 1),
])  # fmt: skip
@distributed(world=2, limit_s=4 * LIMIT_S)
def test_under_inductor_weights_equal_those_of_one_process_and_of_eager_steps(rank, world, way, layers, kind, micro):
    """All ranks have the same input, so the mean of their gradients is the gradient of one process."""
    net = Twice if layers == TWICE else lambda: Transformer(layers=layers)
    torch._dynamo.reset()
    eager, model = twins(net)
    torch.manual_seed(0)
    plain = net()
    if way == "blocks":
        for block in model.blocks:
            block.compile(fullgraph=True)
    calls = {"torch": lambda: torch.compile(model, fullgraph=True), "ours": lambda: cs.compile(model)}
    call = calls.get(way, lambda: model)()
    params, seen = list(model.parameters()), []
    for param in params:
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    with watch_graphs() as graphs:
        train(model, call, cs.optim.in_backward(model, KINDS[kind]), 0, micro=micro)
    train(eager, eager, cs.optim.in_backward(eager, KINDS[kind]), 0, micro=micro)
    summed(plain, KINDS[kind](list(plain.parameters())), 3, micro)
    assert all(seen)
    assert all(param.grad is None for param in params)
    assert_alike(model, eager, exact=False)  # Inductor fuses operators, so rounding differs
    assert_alike(model, plain, exact=False)
    assert_alike(eager, plain)
    if GRAPHS_GIVE_NONE and way != "blocks":
        backwards = [str(graph) for graph in graphs if str(graph).startswith("backward")]
        assert backwards[-1].count("s") == len(model.blocks) + 1 + (layers == TWICE)
