"""Training steps for the scenarios of `testing.races`."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from _leases import lease
from _race_settings import Gathers, Halved
from _race_training import Training, plain_step
from composable_shard import PoolPolicy, testing
from composable_shard._group.reduction import ReduceBucket, free_queued
from composable_shard._module.state import state_of
from composable_shard._torch.distributed import local_tensor


def accumulate(training: Training) -> None:
    for micro_batch in range(2):
        training.model.set_requires_gradient_sync(micro_batch == 1)
        training.backward()
    training.update()


def accumulate_pieces(training: Training) -> None:
    for micro_batch in range(2):
        training.model.set_requires_all_reduce(micro_batch == 1)
        training.backward()
    training.update()


def two_backwards(training: Training) -> None:
    training.model.set_is_last_backward(False)
    training.backward()
    training.model.set_is_last_backward(True)
    plain_step(training)


def evaluate_too(training: Training) -> None:
    plain_step(training)
    with torch.no_grad():
        training.forward()


def checkpointed(use_reentrant: bool) -> Callable[..., object]:
    def prepare(model: Any, checked: testing.Checked) -> None:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)

    return prepare


def touch_gradients(training: Training) -> None:
    training.backward()
    for parameter in training.model.parameters():
        local_tensor(parameter.grad).mul_(0.5)
    training.update()


def hook_gradients(model: nn.Module, checked: testing.Checked) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))


def reduce_on_own_stream(model: Any, checked: testing.Checked) -> None:
    scale = torch.full((), 0.5)
    stream = checked.stream("hook")
    stream.wait_stream(checked.stream_of_compute)
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(lambda reduced: reduced.mul_(scale), stream=stream)


def _raise(*_of_the_hook: object, **_also: object) -> None:
    raise ZeroDivisionError


def fail(training: Training, in_backward: bool) -> None:
    """Run a step that ends with an error in forward or backward."""
    failing = training.model.blocks[1].feed_forward
    handle = (failing.register_full_backward_hook if in_backward else failing.register_forward_hook)(_raise)
    with pytest.raises(ZeroDivisionError):
        training.backward()
    handle.remove()


def fail_first(training: Training) -> None:
    fail(training, in_backward=training.number % 2 == 0)
    plain_step(training)


def drop_after_failure(training: Training, in_backward: bool) -> None:
    """Delete the model after an error, with work in flight. Compute then reuses its memory."""
    fail(training, in_backward)
    model = weakref.ref(training.model)
    del training.model, training.optimizer
    gc.collect()
    assert model() is None
    torch.ones(4)


@contextlib.contextmanager
def on_side_stream(training: Training) -> Iterator[None]:
    """Use a stream of the user, with all necessary waits."""
    side, compute = torch.cuda.Stream(), torch.accelerator.current_stream()
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        yield
    compute.wait_stream(side)


def side_in_turns(training: Training) -> None:
    with on_side_stream(training) if training.number % 2 else contextlib.nullcontext():
        plain_step(training)


def side_forward(training: Training) -> None:
    """Run forward on another stream. Autograd then runs backward on it too."""
    with on_side_stream(training):
        loss = training.forward()
    loss.backward()
    training.update()


def event_of_the_optimizer(training: Training) -> None:
    plain_step(training)
    training.model.set_post_optim_event(torch.accelerator.current_stream().record_event())
    torch.ones(4).mul_(2)  # the gathers need not wait for this


def optimizer_on_another_stream(training: Training) -> None:
    """Run the optimizer on another stream. Only the gathers get its event.

    So the gradients must be kept until compute has waited for the optimizer.
    """
    compute, side = torch.accelerator.current_stream(), torch.cuda.Stream()
    training.backward()
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        training.optimizer.step()
        training.model.set_post_optim_event(side.record_event())
    training.__dict__.setdefault("kept", []).extend(param.grad for param in training.model.parameters())
    training.optimizer.zero_grad()


def memory_goes_back_on_another_stream(training: Training) -> None:
    """Allocate memory on one stream, and use and return it on another."""
    plain_step(training)
    plain_step(training)
    side, compute = torch.cuda.Stream(), torch.accelerator.current_stream()
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        plain_step(training)
        state_of(training.model).bound.engine.rebuild_if_idle()  # as for a memory tracker: frees all slots
        gc.collect()  # slots and the arena refer to each other
    torch.ones(4)  # on the compute stream, which has not waited for `side`
    compute.wait_stream(side)


def idle_memory_goes_back_on_another_stream(training: Training) -> None:
    """Allocate the memory of reductions on the stream of forward, and return it on the stream that calls backward."""
    side, compute = torch.cuda.Stream(), torch.accelerator.current_stream()
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        loss = training.forward()
    compute.wait_stream(side)
    loss.backward()
    with torch.cuda.stream(side):
        torch.ones(4)
    training.update()


def blocks_in_turns(model: Any, checked: testing.Checked) -> None:
    """Run blocks, and their backwards, alternately on two streams."""
    streams = [checked.stream("even"), checked.stream("odd")]

    def on(stream: torch.Stream, block: nn.Module, *inputs: Any) -> Any:
        before = torch.accelerator.current_stream()
        stream.wait_stream(before)
        with stream:
            output = type(block).__call__(block, *inputs)
        before.wait_stream(stream)
        return output

    blocks = [functools.partial(on, streams[index % 2], block) for index, block in enumerate(model.blocks)]
    model.forward = functools.partial(_through, model, blocks)


def _through(model: Any, blocks: Any, tokens: Tensor) -> Tensor:
    x = model.embed(tokens)
    for block in blocks:
        x = block(x, model.cos[: tokens.shape[1]], model.sin[: tokens.shape[1]])
    return model.head(model.norm(x))


def branches(model: Any, checked: testing.Checked) -> None:
    """Run every second block on another stream, concurrently with the others, and wait for it only at the end.

    The inputs of the blocks need no gradients, as in two encoders. So their backwards are not ordered either.
    """
    side = checked.stream("branch")

    def forward(tokens: Tensor) -> Tensor:
        x, compute = model.embed(tokens).detach(), torch.accelerator.current_stream()
        side.wait_stream(compute)
        outputs, y = [], x
        for block in model.blocks:
            with side if block in odd else contextlib.nullcontext():
                y = block(x, model.cos[: tokens.shape[1]], model.sin[: tokens.shape[1]])
                outputs.append(y)
        compute.wait_stream(side)
        return model.head(model.norm(sum(outputs)))

    odd = list(model.blocks)[1::2]
    model.forward = forward


def reshard_between(model: Any, checked: testing.Checked) -> None:
    """Free the pieces that few ranks keep of a block while later blocks run, and use the memory on another stream."""

    def give_up(block: Any) -> None:
        block.reshard()
        side, pool = checked.stream("other"), state_of(model).bound.engine.pool
        [resident] = state_of(block).bound.group.residents
        slot = pool.lease(resident.for_pieces)
        with side:
            for event in slot.free_after:
                side.wait_event(event)
            slot.typed(torch.uint8, written=True).zero_()
        pool.release(slot, side.record_event())

    for block, later in zip(model.blocks, model.blocks[1:], strict=False):
        later.attention.register_forward_pre_hook(lambda *_, block=block: give_up(block))


def read_a_kept_view(model: Any, checked: testing.Checked) -> None:
    """The last block keeps a view of a weight, and the head reads it after the block was resharded."""
    attention, kept = model.blocks[-1].attention, []
    attention.register_forward_pre_hook(lambda *_: kept.append(attention.q.weight.detach()))

    def read(*_: Any) -> None:
        kept.pop().sum()

    model.head.register_forward_pre_hook(read)


def reduce_by(bucket: Any, gradients: list[torch.Tensor]) -> None:
    """Reduce gradients with a bucket, and wait."""
    job = bucket.start(gradients, frees=True)
    free_queued(bucket._pool, [(bucket, job)])
    job.finish()


def reduce_on_two_streams(training: Training) -> None:
    """Run two reductions of a bucket, and other uses of its slots, on two streams that do not wait for each other."""
    plain_step(training)
    engine, compute = state_of(training.model).bound.engine, torch.accelerator.current_stream()
    group, pool = state_of(training.model.blocks[0]).bound.group, engine.pool
    [bucket] = group.gradients._bucket_set().buckets
    gradients = [torch.ones(param.shape) for param in group.params]
    side = training.checked.stream("other")
    side.wait_stream(compute)
    with side, torch.no_grad():
        reduce_by(bucket, gradients)
        for request in bucket.requests[1:]:  # scratch memory
            scratch = pool.lease(request)
            scratch.typed(torch.uint8, written=True).zero_()
            pool.release(scratch, side.record_event())
    with torch.no_grad():
        reduce_by(bucket, gradients)
    side.wait_stream(compute)
    with side:
        slot = pool.lease(bucket.requests[0])
        slot.typed(torch.uint8, written=True).zero_()
    pool.release(slot, side.record_event())
    with torch.no_grad():
        reduce_by(bucket, gradients)
    compute.wait_stream(side)


def as_a_graph(training: Training) -> None:
    """Call gathers and reductions like a compiled graph does, without a compiler."""
    plain_step(training)
    group = state_of(training.model.blocks[0]).bound.group
    exchange = group.exchange()
    with torch.no_grad():
        for _ in range(2):
            shards = [local_tensor(parameter.sharded) for parameter in group.params]
            weights = exchange.gather(shards).finish()
            gradients = [weight * 2 for weight in weights]
            weights.clear()
            exchange.gather(shards).abandon()
            wanted = range(len(gradients))
            reduced = exchange.reduce(gradients, wanted, None, False).finish()
            torch._foreach_sub_(shards, [reduced[index][0].view(shards[index].shape) for index in wanted])


def gather_elsewhere(training: Training) -> None:
    """Gather the pieces that few ranks keep into a slot that was not used since the last step."""
    loss, pool = training.forward(), state_of(training.model).bound.engine.pool
    if training.number == 0:
        lease(pool, 512, "held")  # prevents an arena, in which slots wait for slots that they overlap
    [bucket] = state_of(training.model).bound.group.buckets
    leased = pool.lease(bucket.for_weights[True])
    loss.backward()
    pool.release(leased, torch.accelerator.current_stream().record_event())
    training.update()


def fail_to_gather(training: Training) -> None:
    """Let a gather fail before its collective while others are in flight. Compute then reuses the memory."""
    plain_step(training)
    training.model.set_pool_policy(PoolPolicy(keep_idle=False))
    plain_step(training)
    plain_step(training)
    with mock.patch.object(Halved, "fsdp_pre_all_gather", _raise), pytest.raises(ZeroDivisionError):
        training.forward()
    gc.collect()
    torch.ones(4)


def fail_to_reduce(training: Training) -> None:
    """Let the second reduction of a block fail at its start: first in eager mode, then as in a compiled graph.

    The memory of the first reduction must be returned.
    """
    plain_step(training)
    engine, group = state_of(training.model).bound.engine, state_of(training.model.blocks[1]).bound.group

    def assert_at_rest() -> None:
        engine.pool.collect()
        assert not [request for request in engine.pool._live if request.name.startswith("reduction")]
        assert engine.pool.unfinished == 0

    with second_fails(), pytest.raises(ZeroDivisionError):
        training.backward()
    assert_at_rest()
    training.optimizer.zero_grad()
    gradients = [torch.ones(param.shape, dtype=param.dtype) for param in group.params]
    exchange = group.exchange()
    with torch.no_grad(), second_fails(), pytest.raises(ZeroDivisionError):
        exchange.reduce(gradients, range(len(gradients)), None, False)
    assert_at_rest()
    plain_step(training)


@contextlib.contextmanager
def second_fails() -> Iterator[None]:
    """Let the second reduction that starts in this context fail."""
    real, calls = ReduceBucket.start, itertools.count()

    def start(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 1:
            raise ZeroDivisionError
        return real(*args, **kwargs)

    with mock.patch.object(ReduceBucket, "start", start):
        yield


def fail_to_send(training: Training) -> None:
    """Let custom gathers fail after their inputs were copied."""
    plain_step(training)
    training.model.set_pool_policy(PoolPolicy(keep_idle=False))
    plain_step(training)
    plain_step(training)
    with mock.patch.object(Gathers, "__call__", _raise), pytest.raises(ZeroDivisionError):
        training.forward()
    gc.collect()
    torch.ones(4)


def unshard_by_hand(training: Training) -> None:
    for block in training.model.blocks:
        block.unshard(async_op=True)
    plain_step(training)
    for block in training.model.blocks:
        block.reshard()
