"""Compiled steps use the same memory as eager steps, make no more copies, and free all of their memory.

A graph may also fail midway, never run backward, run it twice, or outlive its model.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
import weakref
from collections import Counter

import pytest
import torch
import torch.nn as nn
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _compiling import LIMIT_S, Sides, local, make_twins, same_gradients, under_inductor
from _engines import fully_shard
from _models import Stack, shard_blocks, vectors
from _pool import distributed
from _stepping import engine_of, pool_of
from composable_shard._comm.lanes import Lost

with warnings.catch_warnings():  # Inductor's own imports warn
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx


def loss_of(model, rank, step):
    return model(*vectors(rank, step)).square().mean()


def leased(model):
    """Bytes that the pool has leased, none of which are in use between two steps."""
    gc.collect()
    pool_of(model).collect()
    return pool_of(model).live_bytes


@contextlib.contextmanager
def poisoned():
    """Fill freed memory with NaN, so that reads before a gather or after a free produce NaN."""
    before = cs.set_debug(True)
    try:
        yield
    finally:
        cs.set_debug(before)


# ---- memory and copies of a step


def peak_of(model, step):
    """Peak of leased bytes while `step` runs."""
    pool = pool_of(model)
    pool.collect()
    pool.peak_bytes = pool.live_bytes
    step()
    return pool.peak_bytes


def copies_of(step):
    """The copies that `step` makes, by shape; `_chunk_cat` packs gradients."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=True, acc_events=True) as seen:
        step()
    events = seen.profiler.kineto_results.events()
    copies = ("aten::copy_", "aten::_foreach_copy_", "aten::clone", "aten::_chunk_cat")
    return Counter((event.name(), str(event.shapes())) for event in events if event.name() in copies)


@distributed(world=2, limit_s=LIMIT_S)
def test_a_compiled_step_leases_the_same_slots_and_makes_the_same_copies_as_an_eager_one(rank, world):
    sides = Sides(*make_twins(Transformer(), shard_blocks))
    plain = Transformer()
    models = {
        "plain": plain,
        "plain compiled": torch.compile(plain, backend="aot_eager", fullgraph=True),
        "eager": sides.eager,
        "compiled": sides.run,
    }

    def step_of(name, step):
        return lambda: next_token_loss(models[name], *token_batch(rank, step)).backward()

    for step in range(4):
        for name in models:
            step_of(name, step)()
        sides.update()
        plain.zero_grad()
    made = pool_of(sides.model).allocations
    peaks = [peak_of(model, step_of(name, 4)) for name, model in (("eager", sides.eager), ("compiled", sides.model))]
    for optimizer in sides.optimizers:
        optimizer.zero_grad()
    plain.zero_grad()
    copies = {name: copies_of(step_of(name, 5)) for name in models}
    assert copies["compiled"] - copies["plain compiled"] == copies["eager"] - copies["plain"]
    assert pool_of(sides.model).allocations == made
    assert pool_of(sides.model).fallbacks == {}
    assert leased(sides.model) == 0
    assert peaks[1] <= peaks[0]


def as_it_is(module, inputs):
    return make_boxed_func(module.forward)


def with_the_rest_last(module, inputs):
    """A compiler that runs operators without dependent results last, as Inductor does if that seems to save memory."""
    *_, end = module.graph.nodes
    touches = [node for node in module.graph.nodes if "touch" in str(node.target)]
    assert len(touches) >= 6
    for node in touches:
        end.prepend(node)
    module.recompile()
    return make_boxed_func(module.forward)


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_a_slot_is_freed_at_the_last_use_of_its_weights_for_any_order_of_other_operators(rank, world):
    peaks = []
    for compiler in (as_it_is, with_the_rest_last):
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=as_it_is, bw_compiler=compiler)
        sides = Sides(*make_twins(Stack(6), shard_blocks, reshard_after_forward=True), backend=backend)
        for step in range(2):
            for run in sides.both:
                loss_of(run, rank, step).backward()
            same_gradients(sides.eager, sides.model, f"in step {step}")
            sides.update()
        peaks.append(peak_of(sides.model, lambda run=sides.run: loss_of(run, rank, 2).backward()))
    assert peaks[1] == peaks[0]


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_inductor_stores_no_saved_tensor_in_gathered_memory(rank, world):
    """Activations have the same size as weights here, so Inductor would reuse the memory of weights."""
    sides = Sides(*make_twins(Stack(3, dim=8, hidden=8), shard_blocks, reshard_after_forward=True), backend="inductor")
    held = []
    for step in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step + 10 * rank))
        losses = [each(x).square().mean() for each in sides.both]
        held.append(leased(sides.model))
        for loss in losses:
            loss.backward()
        with under_inductor(1e-5):
            same_gradients(sides.eager, sides.model, f"in step {step}")
            sides.update()
    assert held == [0] * 4


# ---- graphs that fail, run twice or never


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_a_forward_that_fails_midway_frees_its_prefetched_weights(rank, world):
    sides = Sides(*make_twins(Transformer(), shard_blocks))

    def loss_of(each, step):
        return next_token_loss(each, *token_batch(rank, step))

    with poisoned():
        sides.train(loss_of)
        made = pool_of(sides.model).allocations
        (tokens,) = token_batch(rank, 0)
        for each in sides.both:
            with pytest.raises(IndexError):
                each(tokens + 1000)
        gc.collect()
        live = pool_of(sides.model).live_bytes
        assert live > 0  # bytes of the block after the embedding
        assert leased(sides.model) == 0
        for each in sides.both:  # an error elsewhere leaks no memory either
            with contextlib.suppress(ZeroDivisionError):
                loss_of(each, 0) / (1 // 0)
        assert leased(sides.model) == 0
        sides.train(loss_of)
        assert leased(sides.model) == 0
        assert pool_of(sides.model).allocations == made


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_graphs_may_run_twice_or_never_or_in_other_threads_or_under_another_default_device(rank, world):
    sides = Sides(*make_twins(Stack(1, dim=8, hidden=16), shard_blocks))

    def again():
        for each in sides.both:
            loss = loss_of(each, rank, 0)
            loss.backward(retain_graph=True)
            loss.backward()

    def never():
        for each in sides.both:
            loss_of(each, rank, 1)
            loss_of(each, rank, 2).backward()

    def elsewhere():
        def run():
            for each in sides.both:
                loss_of(each, rank, 3).backward()
                done.append(each)

        done = []
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(LIMIT_S)
        assert len(done) == 2

    def on_meta():
        (x,) = vectors(rank, 4)
        for each in sides.both:
            with torch.device("meta"):
                each(x).square().mean().backward()

    with poisoned(), torch._functorch.config.patch(donated_buffer=False):  # required by torch for a second backward
        for way in (again, never, elsewhere, on_meta):
            way()
            same_gradients(sides.eager, sides.model, way.__name__)
            sides.update()
            assert leased(sides.model) == 0, way.__name__


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_a_backward_runs_after_its_model_was_deleted_and_then_frees_all_memory(rank, world):
    sides = Sides(*make_twins(Stack(2, dim=8, hidden=16), shard_blocks, reshard_after_forward=True))
    sides.model.cycle = [sides.model]  # a cycle that the garbage collector must find
    sides.train(lambda each, step: loss_of(each, rank, step), 2)
    pool, shard = weakref.ref(pool_of(sides.model)), weakref.ref(local(sides.model.head.weight))
    inputs = [vectors(rank, 3)[0].requires_grad_() for _ in range(2)]
    losses = [each(x).square().mean() for each, x in zip(sides.both, inputs, strict=True)]
    sides.run = sides.model = sides.optimizers = None
    gc.collect()
    for loss in losses:
        loss.backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    del loss, losses
    gc.collect()
    assert shard() is None
    assert pool() is None


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_a_compiled_model_may_be_converted_emptied_and_loaded(rank, world):
    sides = Sides(*make_twins(Stack(1, dim=8, hidden=16), shard_blocks))

    def train(dtype):
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (sides.eager, sides.model)]
        sides.optimizers = optimizers
        sides.train(lambda each, step: each(vectors(rank, step)[0].to(dtype)).square().mean(), 2)
        assert leased(sides.model) == 0

    train(torch.float32)
    saved = [copy.deepcopy(each.state_dict()) for each in (sides.eager, sides.model)]
    for each in (sides.eager, sides.model):
        each.to(torch.float64)
    train(torch.float64)
    for each, state in zip((sides.eager, sides.model), saved, strict=True):
        each.to_empty(device="cpu")
        each.to(torch.float32).load_state_dict(state)
    train(torch.float32)


# ---- collectives that fail


class Mixed(nn.Module):
    """Parameters of two dtypes: each gather and each reduction has two collectives."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        return self.b(self.a(x).double())


def failing(job):
    """Make the wait for a job fail, as if a peer had been lost."""
    job._handle.wait()
    job._handle = Lost("as told")
    return job


@distributed(world=2, limit_s=LIMIT_S)
def test_a_failed_collective_leaves_no_memory_leased(rank, world):
    model = Mixed()
    fully_shard(model)
    model(*vectors(rank, 0)).sum().backward()
    (group,) = engine_of(model).groups
    exchange, shards = group.exchange(), [param.local for param in group.params]
    want = [param.full_tensor() for param in model.parameters()]
    for which in (0, 1):
        gather = exchange.gather(shards)
        failing(gather._parts[which].job)
        with pytest.raises(RuntimeError, match="as told"):
            gather.finish()
        assert leased(model) == 0
        assert all(map(torch.equal, exchange.gather(shards).finish(), want))
        for abandon in (False, True):
            reduction = exchange.reduce([torch.ones_like(each) for each in want], range(len(want)), None, False)
            failing(reduction._jobs[which][1])
            if abandon:
                reduction.abandon()
            else:
                with pytest.raises(RuntimeError, match="as told"):
                    reduction.finish()
            assert leased(model) == 0
