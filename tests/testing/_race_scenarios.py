"""Ways to shard and to train a small decoder, to be looked at by `testing.races`."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _blocks import SwiGLU, Transformer, next_token_loss, token_batch
from composable_shard import MixedPrecisionPolicy, PoolPolicy, PrefetchPolicy, testing
from composable_shard._comm.collectives import RankOrdered
from composable_shard._comm.mesh import MeshInfo
from composable_shard._engine.engine import LISTENERS
from composable_shard._group.reduction import ReduceBucket
from composable_shard._module.state import state_of
from composable_shard._torch.distributed import local_tensor

STEPS = 2  # the first leases slots one by one, the second makes the arena; a forward follows
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass
class Training:
    """A model in training. `number` is that of the step."""

    checked: testing.Checked
    model: Any
    optimizer: torch.optim.Optimizer
    number: int = 0

    def forward(self) -> Tensor:
        return next_token_loss(self.model, *token_batch(0, self.number))

    def backward(self) -> None:
        self.forward().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain_step(training: Training) -> None:
    training.backward()
    training.update()


def decoder(layers: int = 2, dim: int = 16, equal: bool = False, **sizes: Any) -> nn.Module:
    """A decoder whose blocks are not all as large, so that slots of the arena overlap in part, or are `equal`."""
    model = Transformer(layers=layers, dim=dim, dropout=0.1, **sizes)
    if equal:
        return model
    for index, block in enumerate(model.blocks):
        block.feed_forward = SwiGLU(dim, (24, 56, 8)[index % 3])
    return model


@dataclass(frozen=True)
class Scenario:
    """How a decoder is sharded and trained.

    Attributes:
        options: of `fully_shard`.
        transport: by which parameters are gathered and gradients reduced.
        mesh: names and sizes of its axes.
        make: makes the decoder.
        prepare: is given the sharded model before the first step, with what checks it.
        step: one step of training.
        end: after the last one.
        around: a context around all of it.
        axis: of the mesh, over which `fully_shard` shards; all if empty.
    """

    options: dict[str, Any] = field(default_factory=dict)
    transport: str = "direct"
    mesh: dict[str, int] = field(default_factory=lambda: {"shard": 4})
    make: Callable[[], nn.Module] = decoder
    parallelize: Callable[[nn.Module, Any], object] | None = None
    prepare: Callable[[Any, testing.Checked], object] | None = None
    step: Callable[[Training], object] = plain_step
    end: Callable[[Training], object] | None = None
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    axis: str = ""
    steps: int = STEPS


def build(scenario: Scenario, checked: testing.Checked) -> Any:
    torch.manual_seed(0)
    model: Any = scenario.make()
    if scenario.parallelize is not None:
        scenario.parallelize(model, checked.mesh)
    mesh = checked.mesh[scenario.axis] if scenario.axis else checked.mesh
    for module in (*model.blocks, model):
        cs.fully_shard(module, mesh=mesh, **scenario.options)
    if scenario.prepare is not None:
        scenario.prepare(model, checked)
    return model


def perform(scenario: Scenario, until_race: bool = False) -> testing.Checked:
    """Train for some steps, or until there is a race; returns what the checker has seen."""
    world = functools.reduce(int.__mul__, scenario.mesh.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPOSABLE_SHARD_TRANSPORT", scenario.transport)
        with scenario.around(), testing.races(world, mesh=scenario.mesh, check=False) as checked:
            model = build(scenario, checked)
            trained = [p for p in model.parameters() if p.requires_grad]
            training = Training(checked, model, torch.optim.SGD(trained, lr=0.1, foreach=True))
            del model, trained  # a step may drop them
            for training.number in range(scenario.steps):
                scenario.step(training)
                if until_race and checked.races:
                    return checked
            if scenario.end is not None:
                scenario.end(training)
            if hasattr(training, "model"):
                training.forward().item()
    return checked


# ---- steps


def accumulate(training: Training) -> None:
    for micro_batch in range(3):
        training.model.set_requires_gradient_sync(micro_batch == 2)
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
    """A step that ends with an error in forward or in backward."""
    failing = training.model.blocks[1].feed_forward
    handle = (failing.register_full_backward_hook if in_backward else failing.register_forward_hook)(_raise)
    with pytest.raises(ZeroDivisionError):
        training.backward()
    handle.remove()


def fail_first(training: Training) -> None:
    fail(training, in_backward=training.number % 2 == 0)
    plain_step(training)


def drop_after_failure(training: Training, in_backward: bool) -> None:
    """The model is deleted after an error; compute gets its memory, whatever was in flight."""
    fail(training, in_backward)
    model = weakref.ref(training.model)
    del training.model, training.optimizer
    gc.collect()
    assert model() is None
    torch.ones(4)


@contextlib.contextmanager
def on_side_stream(training: Training) -> Iterator[None]:
    """A stream of the user's own, well fenced."""
    side, compute = torch.cuda.Stream(), torch.accelerator.current_stream()
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        yield
    compute.wait_stream(side)


def side_in_turns(training: Training) -> None:
    with on_side_stream(training) if training.number % 2 else contextlib.nullcontext():
        plain_step(training)


def side_forward(training: Training) -> None:
    """Forward on another stream: autograd runs backward there as well."""
    with on_side_stream(training):
        loss = training.forward()
    loss.backward()
    training.update()


def event_of_the_optimizer(training: Training) -> None:
    plain_step(training)
    training.model.set_post_optim_event(torch.accelerator.current_stream().record_event())
    torch.ones(4).mul_(2)  # what the gathers need not wait for


def memory_goes_back_on_another_stream(training: Training) -> None:
    """Memory that was allocated on one stream is used on another one, and goes back there."""
    plain_step(training)
    plain_step(training)
    side, compute = torch.cuda.Stream(), torch.accelerator.current_stream()
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        plain_step(training)
        state_of(training.model).bound.engine.count_memory(True)  # as a tool does: all slots are given up
        gc.collect()  # slots and the arena know each other
    torch.ones(4)  # on the stream of compute, which waits for nothing of its own
    compute.wait_stream(side)


def idle_memory_goes_back_on_another_stream(training: Training) -> None:
    """Reductions get memory in backward, on the stream of forward; it goes back on that which has called backward."""
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
    """Each block runs on another stream than the one before it, and so does its backward."""
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
    """Blocks run side by side: every second one on a stream that is joined at the end only.

    Their inputs need no gradients, as those of two encoders: so nothing orders their backwards, either.
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
    """What few ranks keep of a block is given up while later blocks run."""
    for block, later in zip(model.blocks, model.blocks[1:], strict=False):
        later.attention.register_forward_pre_hook(lambda *_, block=block: block.reshard())


def reduce_on_two_streams(training: Training) -> None:
    """Two reductions by one bucket, and other uses of its slots, on streams of which neither waits for the other."""
    plain_step(training)
    engine, compute = state_of(training.model).bound.engine, torch.accelerator.current_stream()
    group, pool = state_of(training.model.blocks[0]).bound.group, engine.pool
    [bucket] = group.gradients._buckets()
    gradients = [torch.ones(param.shape) for param in group.params]
    side = training.checked.stream("other")
    side.wait_stream(compute)
    with side, torch.no_grad():
        bucket.start(gradients).finish()
        for request in bucket.requests[1:]:  # scratch memory
            scratch = pool.lease_for(request)
            scratch.typed(torch.uint8, written=True).zero_()
            pool.release(scratch, side.record_event())
    with torch.no_grad():
        bucket.start(gradients).finish()
    side.wait_stream(compute)
    with side:
        slot = pool.lease_for(bucket.requests[0])
        slot.typed(torch.uint8, written=True).zero_()
    pool.release(slot, side.record_event())
    with torch.no_grad():
        bucket.start(gradients).finish()
    compute.wait_stream(side)


def as_a_graph(training: Training) -> None:
    """Gathers and reductions as compiled graphs call them; the graph itself is here by hand."""
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
    """What few ranks keep is gathered into a slot that nothing has used since the step before."""
    loss, pool = training.forward(), state_of(training.model).bound.engine.pool
    if training.number == 0:
        pool.lease(512, "held")  # so that there is no arena, in which slots wait for those that they overlap
    [bucket] = state_of(training.model).bound.group.buckets
    leased = pool.lease_for(bucket.for_weights[True])
    loss.backward()
    pool.release(leased, torch.accelerator.current_stream().record_event())
    training.update()


def fail_to_gather(training: Training) -> None:
    """A gather fails before its collective, beside others that go on; the memory goes back to compute at once."""
    plain_step(training)
    training.model.set_pool_policy(PoolPolicy(keep_idle=False))
    plain_step(training)
    plain_step(training)
    with mock.patch.object(Halved, "fsdp_pre_all_gather", _raise), pytest.raises(ZeroDivisionError):
        training.forward()
    gc.collect()
    torch.ones(4)


def fail_to_send(training: Training) -> None:
    """Likewise, where what is sent was copied already."""
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


# ---- models and settings


def three_quarters(model: Any, checked: testing.Checked) -> None:
    model.set_pool_policy(PoolPolicy(budget=cs.make_plan(model).peak_bytes * 3 // 4))


def idle_memory_goes_back(model: Any, checked: testing.Checked) -> None:
    model.set_pool_policy(PoolPolicy(keep_idle=False))


def freeze(model: Any) -> nn.Module:
    for parameter in (*model.embed.parameters(), *model.blocks[0].attention.parameters()):
        parameter.requires_grad_(False)
    return model


PLAN = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.o": RowwiseParallel(),
    "feed_forward.gate": ColwiseParallel(),
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(),
}


def parallelize(model: Any, mesh: Any) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], PLAN)
        block.attention.heads, block.attention.kv_heads = 2, 1


KEEP_CLASS = {
    *("empty_like", "new_zeros", "slice", "copy_", "view", "as_strided", "_to_copy", "split", "clone", "detach"),
}


class Halved(torch.Tensor):
    """A tensor around another one, gathered in bfloat16 and used in float32."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        keeps = func.overloadpacket.__name__ in (
            *(
                "empty_like",
                "new_zeros",
                "slice",
                "copy_",
                "view",
                "as_strided",
                "_to_copy",
                "split",
                "clone",
                "detach",
            ),
        )
        return pytree.tree_map_only(torch.Tensor, cls, out) if keeps else out

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        (gathered,) = outputs
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(gathered)
            return None
        wide = gathered.to(param_dtype)
        return wide, (wide,)


def extended() -> nn.Module:
    model: Any = decoder()
    for block in model.blocks:
        up = block.feed_forward.up
        up.weight = nn.Parameter(Halved(up.weight.detach().clone()))
    return model


class Gathers:
    """Communication of the user's own (torch's `AllGather`)."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatters(Gathers):
    """Likewise (torch's `ReduceScatter`)."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def own_communication(model: Any, checked: testing.Checked) -> None:
    for module in (*model.blocks, model):
        module.set_custom_all_gather(Gathers())
        module.set_custom_reduce_scatter(Scatters())


@contextlib.contextmanager
def offloading() -> Iterator[None]:
    """The CPU, which plays the accelerator, is also the host on which shards are kept."""
    real = ReduceBucket._at_home

    def at_home(bucket: ReduceBucket, out: Tensor) -> Tensor:
        home = real(bucket, out)
        _checked[-1].on_host(home)
        return home

    with (
        mock.patch.object(MeshInfo, "offloads", property(lambda info: True)),
        mock.patch.object(ReduceBucket, "_at_home", at_home),
    ):
        yield
        _checked.clear()


_checked: list[testing.Checked] = []


def shards_on_host(model: Any, checked: testing.Checked) -> None:
    _checked.append(checked)
    checked.on_host(*[local_tensor(parameter) for parameter in model.parameters()])


@contextlib.contextmanager
def sums_of_ranks() -> Iterator[None]:
    """The transport that gloo has, which needs scratch memory."""

    def transports_of(group: Any, device: Any, given: Any = None) -> dict[str, Any]:
        return {"direct": RankOrdered(group)}

    with mock.patch("composable_shard._comm.transports.transports_of", transports_of):
        yield


class Deaf:
    """A tool that counts memory: while there is one, a slot has memory only while it is leased."""

    heard = None


@contextlib.contextmanager
def counting() -> Iterator[None]:
    tool = Deaf()
    LISTENERS.add(tool)
    try:
        yield
    finally:
        LISTENERS.discard(tool)


@contextlib.contextmanager
def debugging() -> Iterator[None]:
    with mock.patch("composable_shard._debug.debugging", True):
        yield


def setting(method: str, *arguments: Any) -> Callable[..., object]:
    return lambda model, checked: getattr(model, method)(*arguments)


REPLICAS = {"replicate": 2, "shard": 2}
UNEVEN = functools.partial(decoder, dim=18, heads=3, kv_heads=1)

SCENARIOS = {
    "default": Scenario(),
    "deep": Scenario(make=functools.partial(decoder, 3), steps=3),
    "packed": Scenario(transport="packed"),
    "deep-packed": Scenario(transport="packed", make=functools.partial(decoder, 3), steps=3),
    "plain": Scenario(transport="torch"),
    "half": Scenario({"mp_policy": HALF}),
    "mixed": Scenario({"mp_policy": MIXED}),
    "mixed-packed": Scenario({"mp_policy": MIXED}, transport="packed"),
    "keep-weights": Scenario({"reshard_after_forward": False}),
    "three-ahead": Scenario(
        make=functools.partial(decoder, 4), prepare=setting("set_prefetch_policy", PrefetchPolicy.depth(3))
    ),
    "accumulate": Scenario(step=accumulate),
    "evaluate": Scenario(step=evaluate_too),
    "gradient-hooks": Scenario(prepare=hook_gradients),
    "all-reduce-hook": Scenario(prepare=reduce_on_own_stream),
    "checkpoint": Scenario(prepare=checkpointed(use_reentrant=False)),
    "checkpoint-reentrant": Scenario(prepare=checkpointed(use_reentrant=True)),
    "gradients-touched": Scenario(step=touch_gradients),
    "two-backwards": Scenario(step=two_backwards),
    "budget": Scenario(make=functools.partial(decoder, 4), prepare=three_quarters),
    "few-ranks": Scenario({"reshard_after_forward": 2}),
    "few-ranks-by-hand": Scenario(
        {"reshard_after_forward": 2}, make=functools.partial(decoder, 6), prepare=reshard_between, steps=3
    ),
    "failing": Scenario(step=fail_first),
    "dropped-in-forward": Scenario(end=functools.partial(drop_after_failure, in_backward=False)),
    "dropped-in-backward": Scenario(end=functools.partial(drop_after_failure, in_backward=True)),
    "side-in-turns": Scenario(step=side_in_turns),
    "side-forward": Scenario(step=side_forward),
    "optimizer-event": Scenario(step=event_of_the_optimizer),
    "another-stream": Scenario(step=memory_goes_back_on_another_stream, steps=1),
    "idle-memory": Scenario(prepare=idle_memory_goes_back),
    "own-memory": Scenario(prepare=setting("set_keep_unsharded_storage", True)),
    "idle-memory-on-another-stream": Scenario(
        prepare=idle_memory_goes_back, step=idle_memory_goes_back_on_another_stream
    ),
    "blocks-in-turns": Scenario(make=functools.partial(decoder, 4), prepare=blocks_in_turns),
    "blocks-in-turns-packed": Scenario(
        {"mp_policy": MIXED}, transport="packed", make=functools.partial(decoder, 4), prepare=blocks_in_turns
    ),
    "blocks-in-turns-few-ranks": Scenario(
        {"reshard_after_forward": 2}, make=functools.partial(decoder, 4), prepare=blocks_in_turns
    ),
    "branches": Scenario(make=functools.partial(decoder, 4), prepare=branches),
    "branches-few-ranks": Scenario({"reshard_after_forward": 2}, make=functools.partial(decoder, 4), prepare=branches),
    "branches-packed": Scenario(transport="packed", make=functools.partial(decoder, 4), prepare=branches),
    "branches-sums": Scenario(make=functools.partial(decoder, 4, equal=True), prepare=branches, around=sums_of_ranks),
    "branches-counted": Scenario(make=functools.partial(decoder, 4), prepare=branches, around=counting),
    "branches-debugging": Scenario(make=functools.partial(decoder, 4), prepare=branches, around=debugging),
    "blocks-in-turns-sums": Scenario(make=functools.partial(decoder, 4), prepare=blocks_in_turns, around=sums_of_ranks),
    "by-hand": Scenario(step=unshard_by_hand),
    "replicas": Scenario(mesh=REPLICAS),
    "replicas-mixed": Scenario({"mp_policy": MIXED}, mesh=REPLICAS, step=accumulate_pieces),
    "uneven": Scenario(make=UNEVEN),
    "uneven-packed": Scenario(make=UNEVEN, transport="packed"),
    "frozen": Scenario(make=lambda: freeze(decoder())),
    "tensor-parallel": Scenario(mesh={"dp": 2, "tp": 2}, axis="dp", parallelize=parallelize),
    "offload": Scenario(prepare=shards_on_host, around=offloading),
    "extensions": Scenario(make=extended),
    "own-communication": Scenario(prepare=own_communication),
    "failing-extension": Scenario(make=extended, step=fail_to_gather, steps=1),
    "two-streams": Scenario(step=reduce_on_two_streams),
    "two-streams-sums": Scenario(step=reduce_on_two_streams, around=sums_of_ranks),
    "two-streams-debugging": Scenario(step=reduce_on_two_streams, around=debugging),
    "graph": Scenario(step=as_a_graph),
    "few-ranks-elsewhere": Scenario({"reshard_after_forward": 2}, step=gather_elsewhere),
    "counted-memory": Scenario(around=counting),
    "sums-of-ranks": Scenario(around=sums_of_ranks),
    "debugging": Scenario(around=debugging),
}

FAILING_COMMUNICATION = Scenario({"mp_policy": MIXED}, prepare=own_communication, step=fail_to_send, steps=1)
