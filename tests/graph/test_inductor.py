"""The compiled path under Inductor: one graph each way, and results as of the unsharded model under Inductor.

All ranks get the same inputs, so the mean of their gradients is the gradient of the unsharded model.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _compiling import LIMIT_S, even, text_of, under_inductor
from _engines import fully_shard
from _models import Block, Stack, TiedText, shard_blocks, tokens, vectors
from _pool import POOL, distributed
from composable_shard.report import watch_graphs

with warnings.catch_warnings():  # Inductor's own imports warn
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx


class CheckpointedBlock(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def with_checkpoints():
    model = Stack(2, dim=8, hidden=16, out=4)
    model.blocks = nn.ModuleList(CheckpointedBlock(8, 16) for _ in range(2))
    return model


def with_frozen_weights():
    model = even()
    for block in model.blocks:
        block.up.requires_grad_(False)
    return model


@dataclass
class Case:
    """A model, how it is sharded, and the number of gathers in each of its graphs."""

    make: Any
    gathers: tuple[int, int]
    inputs: Any = vectors
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "one block": Case(functools.partial(even, blocks=1), (2, 1)),
    "two blocks": Case(even, (3, 2)),
    "the root gathers again": Case(even, (3, 3), options={"reshard_after_forward": True}),
    "checkpoints inside": Case(with_checkpoints, (3, 2)),
    "frozen weights": Case(with_frozen_weights, (3, 2)),
    "tied weights": Case(TiedText, (3, 2), inputs=tokens),
}


@contextlib.contextmanager
def no_caches():
    """Disable caches, because the guard does not read cached graphs again."""
    with torch._functorch.config.patch(enable_autograd_cache=False), torch._inductor.config.patch(fx_graph_cache=False):
        yield


def shard(model, **options):
    if isinstance(model, Stack):
        shard_blocks(model, fully_shard, **options)
    else:
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "one block" else pytest.mark.matrix) for n in CASES])
@distributed(world=2, limit_s=2 * LIMIT_S)
def test_gradients_equal_those_of_the_unsharded_model_under_inductor(rank, world, name):
    case = CASES[name]
    gradients = []
    for sharded in (True, False) if rank == 0 else (True,):  # the unsharded model is the same on all ranks
        torch.manual_seed(3)
        model = case.make()
        if sharded:
            shard(model, **case.options)
        torch._dynamo.reset()
        with watch_graphs() as found, no_caches():
            run = torch.compile(model, fullgraph=True)
            for step in range(2):
                run(*case.inputs(0, step)).square().mean().backward()
        if sharded:
            assert [report.direction for report in found] == ["forward", "backward"], text_of(found)
            assert tuple(report.sequence.count("G") for report in found) == case.gathers, text_of(found)
        grads = {name: param.grad for name, param in model.named_parameters()}
        gradients.append({n: g.full_tensor() if sharded and g is not None else g for n, g in grads.items()})
    if rank:
        return
    ours, plain = gradients
    assert ours.keys() == plain.keys()
    for name, gradient in plain.items():
        same = ours[name] is None if gradient is None else torch.equal(ours[name], gradient)
        assert same, name


MATRIX = {
    "test_compiled_matrix": [
        ("hybrid", 4, {}),
        ("uneven", 2, {}),
        ("empty", 2, {}),
        ("checkpointed", 2, {"where": "inside", "kind": "plain"}),
        ("checkpointed", 2, {"where": "outside", "kind": "selective"}),
    ],
    "test_compiled_parameters": [
        ("mixed_precision", 2, {"reduce_dtype": "float32"}),
        *[(name, 2, {}) for name in ("two_dtypes", "frozen", "tied", "partly_used", "twice", "normed")],
    ],
}


IN_BFLOAT16 = ("mixed_precision", "two_dtypes")  # Inductor omits roundings between fused operators


def in_both_ways(rank, world, module, body, kwargs):
    function = getattr(importlib.import_module(module), body)
    texts = [function(rank, world, **kwargs)]
    with under_inductor(0.03 if body in IN_BFLOAT16 else 1e-4):
        texts.append(function(rank, world, **kwargs))
    return texts


def collectives(text):
    """The direction of each graph, and its number of collectives of each type."""
    graphs = [line.split(",")[0].split() for line in text.splitlines()]
    return [(direction, *(sequence.count(kind) for kind in "GRAX")) for direction, sequence in graphs]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("module", "body", "world", "kwargs"), [(m, *case) for m, cases in MATRIX.items() for case in cases]
)
def test_every_case_has_the_same_collectives_and_results_as_without_inductor(module, body, world, kwargs):
    given = {"module": module, "body": body, "kwargs": kwargs}
    for plain, inductor in POOL.run("test_inductor:in_both_ways", world, given, 2 * LIMIT_S):
        assert collectives(inductor) == collectives(plain)


def by_name(model):
    return torch.compile(model, backend="composable_shard", fullgraph=True)


@pytest.mark.matrix  # the placement itself is tested without Inductor, in test_compiled_placement
@distributed(world=2)
def test_the_backend_found_by_name_follows_prefetch_lists(rank, world):
    models = [with_frozen_weights() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        shard_blocks(model, fully_shard, reshard_after_forward=True)
        model.set_modules_to_forward_prefetch([*model.blocks])
        model.set_modules_to_backward_prefetch([*reversed(model.blocks)])
    texts = []
    for model, make in zip(models, (by_name, cs.compile), strict=True):
        torch._dynamo.reset()
        with watch_graphs() as found, under_inductor(0.0):  # without a cache
            make(model)(*vectors(rank, 0)).square().mean().backward()
        texts.append(text_of(found))
    assert texts[0] == texts[1]
    assert texts[0].startswith("forward GwGG"), texts
    assert "\nbackward GwGG" in texts[0], texts
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad.to_local(), b.grad.to_local())
