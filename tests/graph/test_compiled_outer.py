"""Compiled models whose optimizer state is sharded over both axes of a mesh (`outer_sharding`)."""

from __future__ import annotations

import contextlib
import functools
import warnings

import pytest
import torch
from expecttest import assert_expected_inline

from _compiling import LIMIT_S, even, graphs_of, make_twins, same_gradients, under_inductor
from _engines import mesh_of
from _models import Stack, shard_blocks, vectors
from _pool import distributed, more
from composable_shard._group.refresh import NodeCopies
from composable_shard._torch.core import GRAPHS_GIVE_NONE
from graph.test_compiled_matrix import three_steps
from graph.test_compiled_steps import refused

with warnings.catch_warnings():  # Inductor's own imports warn
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx

OUTER = {"outer_sharding": "optimizer"}


@contextlib.contextmanager
def counted():
    """Count the refreshes of groups in this context."""
    counts, real = [0], NodeCopies.refresh

    def refresh(*args):
        counts[0] += 1
        real(*args)

    NodeCopies.refresh = refresh
    try:
        yield counts
    finally:
        NodeCopies.refresh = real


def outer(rank, world):
    return three_steps(rank, even(1), shard_blocks, vectors, mesh=mesh_of(2, 2), **OUTER)


def test_graphs_are_those_of_hybrid_sharding():
    assert_expected_inline(
        graphs_of(outer, world=4),
        """\
forward GwGmwmmm, saves 1288 bytes
backward GmmwmmmmRmRAwAw
""",
    )


def uneven(rank, world):
    return three_steps(rank, Stack(1), shard_blocks, vectors, mesh=mesh_of(world // 2, 2), **OUTER)


@pytest.mark.parametrize("world", [4, more(6)])
def test_uneven_shards_train_as_in_eager_steps(world):
    graphs_by_rank = functools.partial(graphs_of, uneven, world=world)
    assert "A" in graphs_by_rank()


def outer_only(rank, world):
    return three_steps(rank, even(1), shard_blocks, vectors, mesh=mesh_of(2, 1), **OUTER)


def test_an_inner_axis_of_one_rank_reduces_over_the_outer_axis():
    assert "A" in graphs_of(outer_only)


def loss_of(model, rank, step):
    return model(*vectors(rank, step)).square().mean()


def update(*models):
    with torch.no_grad():
        for model in models:
            for param in model.parameters():
                param.add_(param.grad, alpha=-0.1)
                param.grad = None


@pytest.mark.parametrize("way", ["aot_eager", more("inductor")])
@distributed(world=4, limit_s=LIMIT_S)
def test_microbatches_are_exact_and_only_the_first_refreshes(rank, world, way):
    if not GRAPHS_GIVE_NONE:
        refused(rank, world)
        return
    tolerance = contextlib.nullcontext() if way == "aot_eager" else under_inductor(1e-4)
    with tolerance:
        eager, model = make_twins(even(2), shard_blocks, mesh=mesh_of(2, 2), **OUTER)
        torch._dynamo.reset()
        run, seen = torch.compile(model, fullgraph=True, backend=way), []
        for step in range(3):
            for micro in range(3):
                for each in (eager, model):
                    each.set_requires_gradient_sync(micro == 2)
                loss_of(eager, rank, 3 * step + micro).backward()
                with counted() as counts:
                    loss_of(run, rank, 3 * step + micro).backward()
                seen.append(counts[0])
            same_gradients(eager, model, f"in step {step}")
            update(eager, model)
    assert seen == [3, 0, 0] * 3


@distributed(world=4, limit_s=LIMIT_S)
def test_a_change_between_microbatches_is_seen(rank, world):
    if not GRAPHS_GIVE_NONE:
        refused(rank, world)
        return
    eager, model = make_twins(even(2), shard_blocks, mesh=mesh_of(2, 2), **OUTER)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    shards = [list(each.parameters()) for each in (eager, model)]
    for step in range(3):
        for micro in range(2):
            for each in (eager, model):
                each.set_requires_gradient_sync(micro == 1)
            losses = [loss_of(each, rank, 2 * step + micro) for each in (eager, run)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
            with torch.no_grad():
                for param in [param for each in shards for param in each]:
                    param.mul_(1.5)
        same_gradients(eager, model, f"in step {step}")
        update(eager, model)


@distributed(world=4, limit_s=LIMIT_S)
def test_changes_by_foreach_functions_and_swapped_weights_are_seen(rank, world):
    eager, model = make_twins(even(2), shard_blocks, mesh=mesh_of(2, 2), **OUTER)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")

    shards = [list(each.parameters()) for each in (eager, model)]  # after a forward, modules have unsharded ones

    def scale(factor):
        with torch.no_grad():
            for each in shards:
                torch._foreach_mul_(each, factor)

    for step in range(3):
        losses = [loss_of(each, rank, step) for each in (eager, run)]
        with torch.no_grad():
            scale(2.0)  # without rounding
            assert torch.equal(loss_of(eager, rank, step), loss_of(run, rank, step))
            scale(0.5)
        for loss in losses:
            loss.backward()
        same_gradients(eager, model, f"in step {step}")
        loss_of(run, rank, step)  # no backward follows
        scale(1.25)
        with torch.no_grad():
            expected = loss_of(eager, rank, step)
        assert torch.equal(expected, loss_of(run, rank, step))
        update(eager, model)


@distributed(world=4, limit_s=LIMIT_S)
def test_blocks_that_are_compiled_one_by_one_refresh_once_per_step(rank, world):
    eager, model = make_twins(even(3), shard_blocks, mesh=mesh_of(2, 2), **OUTER)
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for step in range(4):
        loss_of(eager, rank, step).backward()
        with counted() as counts:
            loss_of(model, rank, step).backward()
        assert counts[0] == 4
        same_gradients(eager, model, f"in step {step}")
        update(eager, model)


@pytest.mark.parametrize("between", ["eager forward", "eager evaluation", "no backward", "zero_grad"])
@distributed(world=4, limit_s=LIMIT_S)
def test_a_change_by_foreach_functions_is_seen_by_the_next_graph(rank, world, between):
    if not GRAPHS_GIVE_NONE:
        refused(rank, world)
        return
    eager, model = make_twins(even(2), shard_blocks, mesh=mesh_of(2, 2), **OUTER)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    for micro in range(2):  # so that all graphs are compiled
        model.set_requires_gradient_sync(micro == 1)
        loss_of(run, rank, micro).backward()
    update(model)
    for param, twin in zip(eager.parameters(), model.parameters(), strict=True):
        param.to_local().data.copy_(twin.to_local())
    if between == "eager forward":
        loss_of(model, rank, 1)
    elif between == "eager evaluation":
        with torch.no_grad():
            loss_of(model, rank, 1)
    else:
        model.set_requires_gradient_sync(False)
        loss = loss_of(run, rank, 1)
        if between == "zero_grad":
            loss.backward()
            model.zero_grad()
        model.set_requires_gradient_sync(True)
    for each in (eager, model):
        each.reshard()
        with torch.no_grad():
            torch._foreach_mul_(list(each.parameters()), 1.5)
    with torch.no_grad():
        expected = loss_of(eager, rank, 2)
    assert torch.equal(loss_of(run, rank, 2), expected)
