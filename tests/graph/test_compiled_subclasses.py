"""Whole graphs of models whose parameters define their own all-gather, compared with FSDP2's eager steps."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _compiling import LIMIT_S, local, text_of
from _engines import fsdp2, fully_shard, mesh_of
from _extended import Halved, InTwo, Same, Scaled, Ternary, Wrapping, precompute_scales
from _pool import distributed, more
from composable_shard import testing
from composable_shard._torch.core import GRAPHS_GIVE_NONE
from composable_shard.errors import StaleStateError
from composable_shard.report import compiled_step, watch_graphs

HALF = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


def converted(kind, converts=lambda name: True, **options):
    """A decoder in which the weights of the linear layers of its blocks are of a class."""
    torch.manual_seed(3)
    model = Transformer(**options)
    for name, layer in model.blocks.named_modules():
        if isinstance(layer, nn.Linear) and converts(name):
            layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def sharded(model, engine, **options):
    for block in model.blocks:
        engine(block, **options)
    engine(model, **options)
    return model


def inner(tensor):
    tensor = local(tensor)
    return tensor.inner if isinstance(tensor, Wrapping) else tensor


class Sides:
    """Two models that are trained together: FSDP2 in eager mode, and ours as one graph."""

    def __init__(self, make, backend="aot_eager", **options):
        torch._dynamo.reset()
        self.theirs, self.ours = sharded(make(), fsdp2, **options), sharded(make(), fully_shard, **options)
        self.run = cs.compile(self.ours, backend=backend, fullgraph=True)
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (self.theirs, self.ours)]

    @property
    def both(self):
        return self.theirs, self.run

    def backward(self, rank, step):
        losses = [next_token_loss(each, *token_batch(rank, step)) for each in self.both]
        assert torch.equal(*losses), f"step {step}: {losses}"
        for loss in losses:
            loss.backward()

    def check_gradients(self):
        for name, theirs in self.theirs.named_parameters():
            ours = self.ours.get_parameter(name)
            assert (ours.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                assert type(ours.grad) is type(theirs.grad), name
                assert ours.grad.dtype == theirs.grad.dtype, name
                assert torch.equal(local(ours.grad), local(theirs.grad)), name

    def update(self):
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, theirs in self.theirs.named_parameters():
            assert torch.equal(inner(self.ours.get_parameter(name)), inner(theirs)), name

    def train(self, rank, steps=3, after=None):
        for step in range(steps):
            self.backward(rank, step)
            self.check_gradients()
            self.update()
            if after is not None:
                after(self.theirs), after(self.ours)

    def evaluate(self, rank):
        with torch.no_grad():
            assert torch.equal(*(each.eval()(*token_batch(rank, 9)) for each in self.both))
        for each in self.both:
            each.train()


def one_forward_and_one_backward(found):
    return [each.direction for each in found if each.direction != "inference"] == ["forward", "backward"]


@distributed(world=2, limit_s=LIMIT_S)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Scaled, HALF),
        more(Scaled, {}),
        more(Scaled, {"reshard_after_forward": False}),
        more(Halved, {}),
        more(Halved, {"reshard_after_forward": False}),
        more(InTwo, {}),
        more(Same, {}),
        more(Ternary, HALF),
    ],
)
def test_a_whole_graph_is_bitwise_identical_to_fsdp2(rank, world, kind, options):
    with watch_graphs() as found:
        sides = Sides(lambda: converted(kind), **options)
        sides.train(rank, after=precompute_scales if kind is Scaled else None)
        sides.evaluate(rank)
        sides.train(rank, steps=1)
    assert one_forward_and_one_backward(found), text_of(found)
    assert all("grad_mode" in str(each) for each in found.failed_guards), found.failed_guards


@pytest.mark.matrix
@distributed(world=4, limit_s=LIMIT_S)
@pytest.mark.parametrize("kind", [Scaled, more(InTwo)])
def test_a_mesh_with_replicas_is_bitwise_identical_to_fsdp2(rank, world, kind):
    sides = Sides(lambda: converted(kind), mesh=mesh_of(2, 2))
    sides.train(rank)


@distributed(world=2, limit_s=LIMIT_S)
@pytest.mark.parametrize("kind", [Scaled, more(Halved)])
def test_activation_checkpoints_recompute_blocks_without_saving_their_weights(rank, world, kind):
    class Checkpointed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, *inputs):
            return checkpoint(self.block, *inputs, use_reentrant=False)

    def make():
        model = converted(kind)
        model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
        return model

    with watch_graphs() as found:
        Sides(make).train(rank, steps=2)
    assert one_forward_and_one_backward(found), text_of(found)
    forward, backward = (each for each in found if each.direction != "inference")
    assert [gather.saved for gather in forward.gathers if gather.fqn.startswith("blocks")] == [0, 0]
    assert backward.sequence.count("G") == 2


@distributed(world=2, limit_s=LIMIT_S)
def test_a_graph_gathers_the_inner_tensors_and_saves_none_of_them(rank, world):
    with watch_graphs() as found:
        sides = Sides(lambda: converted(Scaled, layers=2), **HALF)
        sides.train(rank, steps=1)
    if rank == 0:
        assert_expected_inline(
            text_of(found),
            """\
forward GwGwGmmmmmmmwmmmmmmmm, saves 22616 bytes
backward GmmmmmmmmwGmmmmmmmmRmmmmmmwmmmmmmmmwsRwsRw
""",
        )
        assert_expected_inline(
            str(compiled_step(sides.ours)),
            """\
peak bytes of weights and of gradients in flight: 8,288; planned 35,328
forward: GwGcwGccwccc; planned GwGcwGcwc
                      bytes  dtype                    behind    planned behind
  gather of (root)    2,400  bfloat16                 nothing   nothing
  gather of blocks.0  1,984  bfloat16, float8_e4m3fn  (root)    (root)
  gather of blocks.1  1,984  bfloat16, float8_e4m3fn  blocks.0  blocks.0
backward: GccccwGccccccccccccRcccwccccccccccccwRcwRw; planned GcwGcRwcRwRww
                         bytes  dtype                    behind                      planned behind
  gather of blocks.1     1,984  bfloat16, float8_e4m3fn  (root), blocks.1            (root)
  gather of blocks.0     1,984  bfloat16, float8_e4m3fn  blocks.1, (root), blocks.0  blocks.1
  reduction of blocks.1  3,904  bfloat16                 blocks.0, (root)            blocks.0
  reduction of blocks.0  3,904  bfloat16                 (root)                      nothing
  reduction of (root)    2,400  bfloat16                 nothing                     nothing""",
        )
        dtypes = "float32 as bfloat16, reduced as float32", "float32 as float8_e4m3fn, reduced as float32"
        assert cs.make_plan(sides.ours).group("blocks.0").dtype == ", ".join(dtypes)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_plan_predicts_the_bytes_that_are_sent(compiled):
    """Each rank sends one byte per element of a converted weight, and one all-reduce per step computes all scales."""
    with testing.fabric(2, latency_s=1e-6, bandwidth_Bps=1e9, clock="virtual") as net:
        model = sharded(converted(Scaled), fully_shard, **HALF)
        torch._dynamo.reset()
        run = cs.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for _ in range(2):
            net.reset()
            next_token_loss(run, *token_batch(0, 0)).backward()
            computed = [event for event in net.events if event.kind == "all_reduce"]
            precompute_scales(model)
        plan = cs.make_plan(model)
        gathers = [event.nbytes for event in net.events if event.kind == "all_gather"]
        reduces = [event for event in net.events if event.kind == "all_reduce"]
    assert not computed[1:], "the scales of the second step were computed after the first one"
    assert len(reduces) == 1
    planned = {group.fqn: sum(group.moved.gather) for group in plan.groups}
    assert sum(gathers) == 2 * (planned["blocks.0"] + planned["blocks.1"]) + planned[""]
    weights = sum(p.numel() for p in model.blocks[0].parameters() if p.ndim == 2)
    assert planned["blocks.0"] == weights + 2 * 2 * 16, "eight bits per weight, and two norms in bfloat16"


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_gradients_accumulate_with_and_without_reductions(rank, world):
    sides = Sides(lambda: converted(Scaled), **HALF)
    if not GRAPHS_GIVE_NONE:
        sides.ours.set_requires_gradient_sync(False)
        with pytest.raises(Exception, match=r"set_requires_gradient_sync\(False\) needs torch 2.13"):
            next_token_loss(sides.run, *token_batch(rank, 0))
        return
    for number in range(4):
        for model in (sides.theirs, sides.ours):
            model.set_requires_gradient_sync(number % 2 == 1)
        sides.backward(rank, number)
        if number % 2:
            sides.check_gradients()
    sides.update()
    sides.train(rank, steps=1)


@distributed(world=2, limit_s=LIMIT_S)
def test_a_group_may_mix_subclasses_and_plain_and_frozen_parameters(rank, world):
    def make():
        model = converted(Scaled, lambda name: "attention" in name or "gate" in name)
        for name, param in model.named_parameters():
            param.requires_grad_(not name.endswith(("q.weight", "down.weight")))
        return model

    sides = Sides(make)
    sides.train(rank)
    assert sides.ours.blocks[0].attention.q.weight.grad is None


class Layers(nn.Module):
    """Two layers; the first one runs twice."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        for block in self.blocks:
            block.weight = nn.Parameter(kind(block.weight.detach()))

    def forward(self, x):
        return self.blocks[1](self.blocks[0](self.blocks[0](x).tanh()).tanh())


def layers(kind=Scaled):
    """Two equal sharded models: an eager one and a compiled one, and the compiled one's call."""
    torch._dynamo.reset()
    eager, model = (sharded(Layers(kind), fully_shard) for _ in range(2))
    return eager, model, cs.compile(model, backend="aot_eager", fullgraph=True)


def rows(rank, step=0):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def assert_same_step(eager, model, run, rank, step=0):
    losses = [each(rows(rank, step)).square().mean() for each in (eager, run)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert_same_gradients(eager, model)


def assert_same_gradients(eager, model):
    for name, param in eager.named_parameters():
        twin = model.get_parameter(name)
        assert (param.grad is None) == (twin.grad is None), name
        # A graph reduces the gradients of each use of a module, and eager steps reduce their sum.
        assert param.grad is None or torch.allclose(local(param.grad), local(twin.grad), rtol=1e-5, atol=1e-7), name


def freeze(models, frozen):
    for model in models:
        model.zero_grad()
        model.blocks[0].requires_grad_(not frozen)


@distributed(world=2, limit_s=LIMIT_S)
def test_parameters_may_be_frozen_and_unfrozen_after_compilation(rank, world):
    eager, model, run = layers()
    assert_same_step(eager, model, run, rank)
    for frozen in (True, False):
        freeze((eager, model), frozen)
        assert_same_step(eager, model, run, rank)
        assert (model.blocks[0].weight.grad is None) == frozen


@distributed(world=2, limit_s=LIMIT_S)
def test_with_torch_compile_the_first_call_after_unfreezing_is_an_error(rank, world):
    eager, model, _ = layers()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    freeze((eager, model), True)
    assert_same_step(eager, model, run, rank)
    freeze((eager, model), False)
    with torch.no_grad():
        assert torch.equal(run(rows(rank)), eager(rows(rank)))
    freeze((eager, model), True)
    assert_same_step(eager, model, run, rank)
    freeze((eager, model), False)
    with pytest.raises(cs.errors.ShardConfigStateError, match=r"parameter blocks.0.weight requires a gradient now"):
        run(rows(rank))
    assert_same_step(eager, model, run, rank)


@distributed(world=2, limit_s=LIMIT_S)
def test_a_module_may_run_several_times(rank, world):
    eager, model, run = layers()
    for step in range(2):
        assert_same_step(eager, model, run, rank, step)


@distributed(world=2, limit_s=LIMIT_S)
def test_gradients_of_inputs_alone_leave_the_parameters_without(rank, world):
    eager, model, run = layers()
    assert_same_step(eager, model, run, rank)
    for each in (eager, run):
        x = rows(rank).requires_grad_()
        torch.autograd.grad(each(x).sum(), x)
        each(x).sum().backward(inputs=[x])
    assert_same_gradients(eager, model)
    assert_same_step(eager, model, run, rank)


@distributed(world=2, limit_s=LIMIT_S)
def test_hooks_of_all_parameters_of_a_group_get_the_gradients(rank, world):
    eager, model, run = layers()
    calls = []
    for each in (eager, model):
        for name, param in each.blocks[0].named_parameters():
            param.register_hook(lambda gradient: 2 * gradient)
            param.register_post_accumulate_grad_hook(lambda param, name=name: calls.append(name))
    for step in range(2):
        assert_same_step(eager, model, run, rank, step)
    assert sorted(calls) == sorted(4 * ["bias", "weight"])


@distributed(world=2, limit_s=LIMIT_S)
def test_a_backward_within_a_backward_does_not_lose_gradients_of_parameters_with_hooks(rank, world):
    _, model, run = layers()
    weight, calls = model.blocks[1].weight, []
    weight.register_hook(lambda gradient: calls.append(1) or gradient)
    expected = []
    for step in range(2):
        run(rows(rank, step)).square().mean().backward()
        expected.append(weight.grad.to_local().clone())
        model.zero_grad()
    x = rows(rank, 0).requires_grad_()
    x.register_hook(torch.enable_grad()(lambda gradient: run(rows(rank, 1)).square().mean().backward()))
    run(x).square().mean().backward()
    assert torch.allclose(weight.grad.to_local(), expected[0] + expected[1], rtol=1e-5, atol=1e-7)
    assert len(calls) == 4


@distributed(world=2, limit_s=LIMIT_S)
def test_classes_and_states_with_equal_texts_are_told_apart(rank, world):
    def make(factor):
        class Times(Halved):
            def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
                return outputs[0].to(param_dtype) * factor, ()

        return Times

    for factor in (1.0, 3.0):
        eager, model, run = layers(make(factor))
        with torch.no_grad():
            assert torch.equal(run(rows(rank)), eager(rows(rank)))
    model.blocks[0].weight._local_tensor.unit = 2.0
    with torch.no_grad():
        with pytest.raises(cs.errors.ShardConfigStateError, match=r"blocks.0.weight: its unit changed"):
            run(rows(rank))
        assert torch.equal(run(rows(rank)), eager(rows(rank)))


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_a_model_may_be_converted_and_loaded_after_compilation(rank, world):
    eager, model, run = layers(Halved)
    assert_same_step(eager, model, run, rank)
    for each in (eager, model):
        each.zero_grad()
        each.double()
    losses = [each(rows(rank).double()).square().mean() for each in (eager, run)]
    assert losses[0].dtype is torch.float64
    assert torch.equal(*losses)
    for each in (eager, model):
        each.float()
        values = {name: value.detach().clone() for name, value in each.state_dict().items()}
        each.load_state_dict(values, assign=True)
    assert_same_step(eager, model, run, rank, 1)


@distributed(world=2, limit_s=LIMIT_S)
def test_plain_parameters_may_replace_subclasses_after_compilation(rank, world):
    eager, model, run = layers(Halved)
    assert_same_step(eager, model, run, rank)
    plain = sharded(Layers(lambda weight: weight), fully_shard)
    for each in (eager, model):
        each.zero_grad()
        each.load_state_dict({name: value.detach().clone() for name, value in plain.state_dict().items()}, assign=True)
    with pytest.raises(cs.errors.ShardConfigStateError, match=r"at least one was replaced"):
        run(rows(rank))
    assert_same_step(eager, model, run, rank)


@distributed(world=2, limit_s=LIMIT_S)
def test_hooks_and_optimizers_in_backward_get_the_gradients(rank, world):
    plain, model = (sharded(converted(Scaled), fully_shard) for _ in range(2))
    torch._dynamo.reset()
    seen = []
    model.blocks[0].attention.q.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    inside = cs.optim.in_backward(model, partial(torch.optim.SGD, lr=0.1))
    outside = torch.optim.SGD(plain.parameters(), lr=0.1)
    run = cs.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(3):
        losses = [next_token_loss(each, *token_batch(rank, step)) for each in (plain, run)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        outside.step()
        outside.zero_grad()
        inside.step()
        for name, param in plain.named_parameters():
            assert torch.equal(inner(param), inner(model.get_parameter(name))), name
    assert seen == [True] * 3


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_a_model_may_run_eagerly_before_and_after_a_graph(rank, world):
    sides = Sides(lambda: converted(Scaled))
    compiled = sides.run
    for run in (sides.ours, compiled, sides.ours, compiled):
        sides.run = run
        sides.train(rank, steps=1, after=precompute_scales)


@distributed(world=2, limit_s=LIMIT_S)
def test_backward_may_run_after_the_model_was_freed(rank, world):
    model = sharded(converted(Scaled), fully_shard)
    torch._dynamo.reset()
    run = cs.compile(model, backend="aot_eager", fullgraph=True)
    next_token_loss(run, *token_batch(rank, 0)).backward()
    weight, freed = model.blocks[0].attention.q.weight, weakref.ref(model)
    before = weight.grad.to_local().clone()
    loss = next_token_loss(run, *token_batch(rank, 0))
    del model, run
    torch._dynamo.reset()
    gc.collect()
    loss.backward()
    assert freed() is None or torch.equal(weight.grad.to_local(), before + before)


@distributed(world=2, limit_s=LIMIT_S)
def test_an_edit_between_forward_and_backward_is_an_error(rank, world):
    model = sharded(converted(Scaled), fully_shard)
    torch._dynamo.reset()
    run = cs.compile(model, backend="aot_eager", fullgraph=True)
    next_token_loss(run, *token_batch(rank, 0)).backward()
    for edit in (
        lambda: torch.optim.SGD(model.parameters(), lr=0.1).step(),
        lambda: model.blocks[0].attention.q.weight._local_tensor.mul_(2.0),
    ):
        loss = next_token_loss(run, *token_batch(rank, 0))
        with torch.no_grad():
            edit()
        with pytest.raises((StaleStateError, RuntimeError), match=r"changed between a forward|modified by an inplace"):
            loss.backward()
        model.zero_grad()
        next_token_loss(run, *token_batch(rank, 0)).backward()


class Reads(Halved):
    def fsdp_pre_all_gather(self, mesh):
        if self.inner.abs().max().item() > 1e9:
            raise OverflowError
        return super().fsdp_pre_all_gather(mesh)


class Keeps(Halved):
    def fsdp_pre_all_gather(self, mesh):
        return super().fsdp_pre_all_gather(mesh)[0], object()

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return super().fsdp_post_all_gather(outputs, None, param_dtype, out=out)


class Fails(Halved):
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if not outputs[0].any():
            raise ValueError
        return outputs[0].to(param_dtype), ()


@distributed(world=2, limit_s=LIMIT_S)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Reads, r"parameter blocks.0.* \(a Reads\): fsdp_pre_all_gather cannot .*module.compile\(\)"),
        (Keeps, r"parameter blocks.0.* \(a Keeps\): fsdp_pre_all_gather .* a object in its metadata"),
        (Fails, r"parameter blocks.0.* \(a Fails\): fsdp_post_all_gather cannot "),
    ],
)
def test_what_cannot_be_traced_is_an_error_with_the_class_and_the_method(rank, world, kind, text):
    model = sharded(converted(kind), fully_shard)
    torch._dynamo.reset()
    run = cs.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with pytest.raises(Exception, match=text):
            next_token_loss(run, *token_batch(rank, 0))
    next_token_loss(model, *token_batch(rank, 0)).backward()


@distributed(world=2, limit_s=LIMIT_S)
def test_other_tensors_than_those_of_the_graph_are_an_error(rank, world):
    model = sharded(converted(Halved), fully_shard)
    torch._dynamo.reset()
    run = cs.compile(model, backend="aot_eager", fullgraph=True)
    next_token_loss(run, *token_batch(rank, 0)).backward()

    def other(self, mesh):
        return (self.inner.to(torch.float16),), None

    text = r"blocks.0.*returned other tensors.*float16.*bfloat16"
    with mock.patch.object(Halved, "fsdp_pre_all_gather", other):
        with pytest.raises(Exception, match=text):
            next_token_loss(run, *token_batch(rank, 0))
        model.zero_grad()
        next_token_loss(run, *token_batch(rank, 0)).backward()
