"""Compiled models over many steps: accumulation, modes, changing sizes, and eager steps in between."""

from __future__ import annotations

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _compiling import LIMIT_S, Sides, graphs_of, make_twins, same_gradients, same_values, text_of
from _engines import fully_shard
from _models import Stack, shard_blocks, vectors
from _pool import POOL, distributed
from composable_shard._torch.core import GRAPHS_GIVE_NONE
from composable_shard.report import watch_graphs


def twins(shard=shard_blocks, blocks=2, **options):
    return make_twins(Stack(blocks, dim=8, hidden=16), shard, **options)


def loss_of(model, rank, step):
    return model(*vectors(rank, step)).square().mean()


def no_more_graphs():
    return torch._dynamo.config.patch(error_on_recompile=True)


# ---- accumulation


def accumulate(rank, world):
    """Two steps of three microbatches; the last microbatch reduces."""
    sides = Sides(*twins(blocks=1))
    with watch_graphs() as found:
        for step in range(3):
            for micro in range(3):
                for each in (sides.eager, sides.model):
                    each.set_requires_gradient_sync(micro == 2)
                for each in sides.both:
                    loss_of(each, rank, 3 * step + micro).backward()
            same_gradients(sides.eager, sides.model, f"in step {step}")
            sides.update()
    return text_of(found)


def refused(rank, world):
    """Before torch 2.13, microbatches without sync must run with the eager model."""
    sides = Sides(*twins(blocks=1))
    for each in (sides.eager, sides.model):
        each.set_requires_gradient_sync(False)
        loss_of(each, rank, 0).backward()
    with pytest.raises(Exception, match=r"needs torch 2\.13 or later"):
        loss_of(sides.run, rank, 0)
    for each in (sides.eager, sides.model):
        each.set_requires_gradient_sync(True)
    loss_of(sides.eager, rank, 1).backward()
    loss_of(sides.run, rank, 1).backward()
    same_gradients(sides.eager, sides.model)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_accumulation_without_sync_has_a_second_graph(world):
    if not GRAPHS_GIVE_NONE:
        POOL.run("test_compiled_steps:refused", world, limit_s=LIMIT_S)
        return
    text = graphs_of(accumulate, world=world)
    if world == 2:
        assert_expected_inline(
            text,
            """\
forward GwGmwmmm, saves 1288 bytes
backward Gmmwmmmmkmk
forward GwGmwmmm, saves 1288 bytes
backward GmmwmmmmRmwRw
""",
        )


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_microbatches_may_be_eager_and_compiled_in_any_order(rank, world):
    if not GRAPHS_GIVE_NONE:
        refused(rank, world)
        return
    sides = Sides(*twins(blocks=1))
    eager, run = sides.model, sides.run
    ways = [(eager, run, eager), (run, eager, run), (run, run, eager)]
    for step, way in enumerate(ways):
        for micro, call in enumerate(way):
            for each in (sides.eager, sides.model):
                each.set_requires_gradient_sync(micro == 2)
            loss_of(sides.eager, rank, 3 * step + micro).backward()
            loss_of(call, rank, 3 * step + micro).backward()
        same_gradients(sides.eager, sides.model, f"in step {step}")
        sides.update()


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_zero_grad_clears_gradients_accumulated_by_a_compiled_backward(rank, world):
    if not GRAPHS_GIVE_NONE:
        refused(rank, world)
        return
    sides = Sides(*twins(blocks=1))
    for each in sides.both:
        sides.model.set_requires_gradient_sync(False), sides.eager.set_requires_gradient_sync(False)
        loss_of(each, rank, 0).backward()
    for optimizer in sides.optimizers:
        optimizer.zero_grad()
    for each in sides.both:
        sides.model.set_requires_gradient_sync(True), sides.eager.set_requires_gradient_sync(True)
        loss_of(each, rank, 1).backward()
    same_gradients(sides.eager, sides.model)


@distributed(world=2, limit_s=LIMIT_S)
def test_gradients_of_microbatches_with_sync_are_summed(rank, world):
    sides = Sides(*twins(blocks=1))
    for micro in range(3):
        for each in sides.both:
            loss_of(each, rank, micro).backward()
    same_gradients(sides.eager, sides.model)


@distributed(world=2, limit_s=LIMIT_S)
def test_several_forwards_before_a_backward(rank, world):
    sides = Sides(*twins(blocks=1))
    for each in sides.both:
        losses = [loss_of(each, rank, step) for step in range(3)]
        (losses[0] + losses[2]).backward()
        losses[1].backward()
    same_gradients(sides.eager, sides.model)


# ---- modes and sizes


@distributed(world=2, limit_s=LIMIT_S)
def test_without_gradients_there_is_one_graph_and_no_backward(rank, world):
    sides = Sides(*twins(blocks=1))
    for mode in (torch.no_grad, torch.inference_mode):
        with watch_graphs() as found, mode():
            assert torch.equal(*[each(*vectors(rank, 0)) for each in sides.both])
        assert text_of(found) == "inference GwGmwmmm\n", mode
    for each in sides.both:
        loss_of(each, rank, 0).backward()
    same_gradients(sides.eager, sides.model)


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_batch_and_length_may_change_without_a_new_graph(rank, world):
    sides = Sides(*twins(blocks=1), dynamic=True)
    sizes = [(5, 3), (7, 2), (6, 11), (9, 4)]
    for place, size in enumerate(sizes):
        x = torch.randn(*size, 4, generator=torch.Generator().manual_seed(rank))
        with torch._dynamo.config.patch(error_on_recompile=place > 0):
            for each in sides.both:
                each(x).square().mean().backward()
        same_gradients(sides.eager, sides.model, str(size))


@distributed(world=2, limit_s=LIMIT_S)
def test_nothing_is_compiled_again_after_the_first_step(rank, world):
    sides = Sides(*twins())
    sides.train(lambda each, step: loss_of(each, rank, step), steps=1)
    with no_more_graphs():
        sides.train(lambda each, step: loss_of(each, rank, step), steps=3)


# ---- eager and compiled steps of one model


@distributed(world=2, limit_s=LIMIT_S)
def test_eager_and_compiled_steps_alternate_with_optimizer_and_state_dict(rank, world):
    sides = Sides(*twins())
    for step, call in enumerate((sides.model, sides.run, sides.run, sides.model, sides.run)):
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            losses = [loss_of(each, rank, step) for each in (sides.eager, call)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        same_gradients(sides.eager, sides.model, f"in step {step}")
        sides.update()
        assert all(isinstance(value, DTensor) for value in sides.model.state_dict().values())


@pytest.mark.parametrize("assign", [False, True])
@distributed(world=2, limit_s=LIMIT_S)
def test_a_loaded_state_dict_is_used_by_the_compiled_model(rank, world, assign):
    sides = Sides(*twins(blocks=1))
    loss_of(sides.run, rank, 0).backward()
    saved = {name: torch.nn.Parameter(value * 2) for name, value in sides.model.state_dict().items()}
    for each in (sides.eager, sides.model):
        each.load_state_dict(copy.deepcopy(saved), assign=assign)
        each.zero_grad()
    for each in (*sides.both, sides.eager, sides.model):
        loss_of(each, rank, 1).backward()
    same_values(sides.eager, sides.model)
    same_gradients(sides.eager, sides.model)


@distributed(world=2, limit_s=LIMIT_S)
def test_a_pending_eager_forward_survives_a_compiled_step(rank, world):
    sides = Sides(*twins(blocks=1))
    losses = [loss_of(sides.eager, rank, 0), loss_of(sides.model, rank, 0)]
    for each in sides.both:
        loss_of(each, rank, 1).backward()
    for loss in losses:
        loss.backward()
    same_gradients(sides.eager, sides.model)


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_weights_unsharded_by_a_user_do_not_affect_compiled_steps(rank, world):
    sides = Sides(*twins(blocks=1))
    sides.model.blocks[0].unshard()
    for each in sides.both:
        loss_of(each, rank, 0).backward()
    same_gradients(sides.eager, sides.model)
    assert all(isinstance(param, DTensor) for param in sides.model.parameters())


@distributed(world=2, limit_s=LIMIT_S)
def test_a_step_between_forward_and_backward_is_an_error(rank, world):
    sides = Sides(*twins(blocks=1))
    sides.train(lambda each, step: loss_of(each, rank, step), steps=1)
    loss = loss_of(sides.run, rank, 0)
    for param in sides.model.parameters():
        param.grad = torch.ones_like(param)
    sides.optimizers[1].step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_settings_of_the_reduction_apply_in_the_graph(rank, world):
    for set_it in (
        lambda m: m.set_gradient_divide_factor(3.0),
        lambda m: m.set_force_sum_reduction_for_comms(True),
        lambda m: m.set_reshard_after_forward(False),
        lambda m: m.set_reduce_scatter_unused_params(True),
    ):
        eager, model = twins(blocks=1)
        for each in (eager, model):
            set_it(each)
        Sides(eager, model).train(lambda each, step: loss_of(each, rank, step), steps=1)


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_a_list_in_which_one_module_is_not_used(rank, world):
    class Partial(Stack):
        def forward(self, x):
            return self.head(self.blocks[0](self.inp(x)))

    eager, model = make_twins(Partial(2, dim=8, hidden=16), lambda m, fs: (fs([m.blocks[0], m.blocks[1]]), fs(m)))
    sides = Sides(eager, model)
    sides.train(lambda each, step: loss_of(each, rank, step), steps=2)
    assert all(isinstance(param, DTensor) for param in model.parameters())


@distributed(world=2, limit_s=LIMIT_S)
def test_the_error_for_parameters_on_meta_names_them_if_the_model_is_compiled_first(rank, world):
    with torch.device("meta"):
        model = Stack(1)
    shard_blocks(model, fully_shard)
    with pytest.raises(Exception, match=r"still on meta device: .*blocks\.0\.up\.weight"):
        cs.compile(model, backend="aot_eager")(torch.randn(2, 4))


def test_compiling_something_other_than_a_module_is_an_error():
    with pytest.raises(cs.errors.ShardConfigTypeError, match=r"expected an nn\.Module, got int"):
        cs.compile(3)


@distributed(world=2)
def test_parameter_hooks_are_called_alike_in_eager_and_compiled_steps(rank, world):
    eager, model = twins()
    of_eager, of_model = calls = [], []
    for each, found in zip((eager, model), calls, strict=True):
        for name, param in each.named_parameters():
            param.register_hook(lambda grad: grad * 2)
            param.register_post_accumulate_grad_hook(
                lambda p, found=found, n=name: found.append((n, p.grad.to_local().sum().item()))
            )
    torch._dynamo.reset()
    run = cs.compile(model, backend="aot_eager")
    for step, way in enumerate((model, run, model, run)):
        for each in (eager, way):
            each.zero_grad()
            each(*vectors(rank, step)).square().mean().backward()
        same_gradients(eager, model, f"in step {step}")
        assert sorted(of_eager) == sorted(of_model)
        assert len(of_model) == (step + 1) * len(list(model.parameters()))


@pytest.mark.matrix
@distributed(world=2)
def test_hooks_are_not_called_in_compiled_microbatches_without_sync(rank, world):
    eager, model = twins()
    calls = []
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 2)
        param.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.to_local().abs().sum().item()))
    for param in eager.parameters():
        param.register_hook(lambda grad: grad * 2)
    torch._dynamo.reset()
    run = cs.compile(model, backend="aot_eager")
    if not GRAPHS_GIVE_NONE:
        model.set_requires_gradient_sync(False)
        with pytest.raises(Exception, match=r"set_requires_gradient_sync\(False\) needs torch 2.13"):
            run(*vectors(rank, 0))
        return
    for _ in range(2):
        for each in (eager, run):
            each.zero_grad()
        for sync in (False, True):
            for each in (eager, model):
                each.set_requires_gradient_sync(sync)
            for each in (eager, run):
                each(*vectors(rank, sync)).square().mean().backward()
            assert len(calls) == sync * len(list(model.parameters()))
        same_gradients(eager, model)
        calls.clear()
