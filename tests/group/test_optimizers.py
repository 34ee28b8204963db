"""Precision, optimizers and gradient hooks; sharded and plain parameters in one optimizer."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.nn as nn

from _engines import ENGINES, mesh_of
from _pool import distributed, more
from _sides import assert_alike, models_of, noise, optimizers_of, shard_children, stack, train_alike, whole
from _stepping import assert_at_rest, shard_whole
from composable_shard import clip_grad_norm_
from composable_shard.errors import ShardConfigStateError

# ---- precision and optimizers


@pytest.mark.parametrize("shard", [shard_children, shard_whole])
@distributed(world=2)
def test_autocast_is_exact(rank, world, shard):
    models = models_of(partial(stack, 4, 2), shard)

    def loss_of(model, step):
        with torch.autocast("cpu", torch.bfloat16):
            return model(noise(3, 4, seed=step)).float().square().mean()

    train_alike(models, loss_of)
    for name, model in models.items():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            models[name] = model(noise(3, 4))
    assert torch.equal(models["ours"], models["plain"])


@distributed(world=2)
def test_a_step_with_an_overflow_on_one_rank_is_skipped_on_all_ranks(rank, world):
    models = models_of(partial(stack, 4, 2))
    scalers = {name: torch.amp.GradScaler("cpu", init_scale=8.0) for name in models}
    optimizers = optimizers_of(models)
    for step in range(3):
        for name, model in models.items():
            loss = model(noise(3, 4, seed=step)).square().mean()
            if step == 1:  # the plain model gets the overflow of both ranks
                loss = loss * (torch.inf if rank == 1 or name == "plain" else 1.0)
            scalers[name].scale(loss).backward()
            scalers[name].unscale_(optimizers[name])
            if step != 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scalers[name].step(optimizers[name])
            scalers[name].update()
            optimizers[name].zero_grad()
        assert len({scaler.get_scale() for scaler in scalers.values()}) == 1
        assert_alike(models, exact=False)
    assert scalers["ours"].get_scale() == 4.0


@pytest.mark.parametrize("shard", [shard_children, shard_whole])
@distributed(world=2)
def test_an_optimizer_in_backward_steps_each_parameter_when_its_gradient_is_reduced(rank, world, shard):
    models = models_of(partial(stack, 4, 2), shard)
    steps = dict.fromkeys(models, 0)

    def install(name, model):
        for param in model.parameters():
            optimizer = torch.optim.AdamW([param], lr=0.01, foreach=False)

            def step(param, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()
                steps[name] += 1

            param.register_post_accumulate_grad_hook(step)

    for name, model in models.items():
        install(name, model)
    for step in range(3):
        for model in models.values():
            model(noise(3, 4, seed=step)).square().mean().backward()
        assert_alike(models, exact=False)
    assert set(steps.values()) == {12}


@distributed(world=2)
def test_a_hook_sees_all_gradients_reduced_before_and_may_step_their_optimizer(rank, world):
    models = models_of(partial(stack, 4, 2))
    found = {}

    def install(name, model):
        later = list(model[2].parameters())
        optimizer = torch.optim.SGD(later, lr=0.1)

        def step(_):
            found[name] = [param.grad is not None for param in later]
            optimizer.step()
            optimizer.zero_grad()

        model[0].weight.register_post_accumulate_grad_hook(step)

    for name, model in models.items():
        install(name, model)
    for step in range(3):
        for model in models.values():
            model(noise(3, 4, seed=step)).square().mean().backward()
        assert_alike(models)
        assert set(map(all, found.values())) == {True}
        assert models["ours"][2].weight.grad is None  # and no gradient is added later


@distributed(world=2)
def test_a_clip_and_step_within_backward_uses_the_clipped_gradients(rank, world):
    models = models_of(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)]))
    for model in models.values():
        late = [param for layer in model[6:] for param in layer.parameters()]
        optimizer = torch.optim.SGD(late, lr=1.0)
        before = [whole(param.detach()).clone() for param in late]

        def clip_and_step(*_, late=late, optimizer=optimizer):
            torch.nn.utils.clip_grad_norm_(late, 1e-3)
            optimizer.step()

        model[1].register_full_backward_hook(clip_and_step)
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        moved = [(whole(param.detach()) - old).norm() for param, old in zip(late, before, strict=True)]
        assert 0.9e-3 < torch.stack(moved).norm() < 1.1e-3


@distributed(world=2)
def test_tensor_hooks_change_the_reduced_gradient(rank, world):
    models = models_of(partial(stack, 4, 2), fsdp2=False)  # FSDP2 does not call them
    for model in models.values():
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    train_alike(models, lambda model, step: model(noise(3, 4, seed=step)).square().mean())


# ---- sharded and plain parameters together


def shard_but_biases(model, engine):
    shard_children(model, engine, ignored_params={model[0].bias, model[2].bias})


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [None, True, False])
@distributed(world=2)
def test_ignored_parameters_are_clipped_and_stepped_with_the_sharded_ones(rank, world, kind, foreach):
    models = models_of(partial(stack, 4, 2), shard_but_biases)
    theirs = models.pop("fsdp2")
    optimizers = {name: OPTIMIZERS[kind](model.parameters()) for name, model in models.items()}
    for step in range(3):
        for name, model in models.items():
            model(noise(3, 4, seed=step)).square().mean().backward()
            norm = clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
            models[name].norm = whole(norm)
        torch.testing.assert_close(models["ours"].norm, models["plain"].norm)
        assert_alike(models, exact=False)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(models, exact=False)
    theirs(noise(3, 4)).square().mean().backward()
    with pytest.raises(RuntimeError, match="got mixed"):
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1, foreach=foreach)
    if kind != "sgd":
        with pytest.raises(RuntimeError, match="got mixed"):
            OPTIMIZERS[kind](theirs.parameters()).step()


@pytest.mark.matrix
@distributed(world=4)
def test_parameters_on_several_meshes_are_clipped_and_stepped_together(rank, world):
    def shard(model, engine):
        engine(model[0], mesh=mesh_of(2, 2))
        engine(model[2], mesh=mesh_of(4))

    models = models_of(partial(stack, 4, 2), shard)
    theirs = models.pop("fsdp2")
    optimizers = {name: OPTIMIZERS["adamw foreach"](model.parameters()) for name, model in models.items()}
    for step in range(2):
        norms = []
        for model in models.values():
            model(noise(3, 4, seed=step)).square().mean().backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.1))
        torch.testing.assert_close(*norms)
        assert_alike(models, exact=False)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(models, exact=False)
    theirs(noise(3, 4)).square().mean().backward()
    with pytest.raises(RuntimeError, match="mesh"):
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)


@pytest.mark.parametrize("kind", ["adamw fused", "sgd foreach", "adamw foreach"])
@distributed(world=2)
def test_parameters_on_several_meshes_are_stepped_by_the_chosen_foreach_or_fused_functions(rank, world, kind):
    def shard(model, engine):
        engine(model[0], mesh=mesh_of(1, 2))
        engine(model[2], mesh=mesh_of(2))

    models = models_of(partial(stack, 4, 2), shard)
    optimizers = {name: OPTIMIZERS[kind](model.parameters()) for name, model in models.items()}
    for step in range(3):
        for name, model in models.items():
            model(noise(3, 4, seed=step)).square().mean().backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
        assert_alike(models, exact=False)
        for ours, theirs in zip(models["ours"].parameters(), models["fsdp2"].parameters(), strict=True):
            assert torch.equal(whole(ours.detach()), whole(theirs.detach()))
    [ours], [theirs] = (optimizers[name].param_groups for name in ("ours", "fsdp2"))
    assert [ours.get(name) for name in ("foreach", "fused")] == [theirs.get(name) for name in ("foreach", "fused")]


# ---- hooks of groups that a backward reduces without running them


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both=True):
        return self.a(x) + self.b(x) if both else self.a(x)


@pytest.mark.parametrize("ends", ["by the last microbatch", "manually"])
@distributed(world=2)
def test_hooks_see_gradients_accumulated_in_earlier_microbatches(rank, world, ends):
    models = models_of(TwoParts)
    calls = {name: [] for name in models}
    for name, model in models.items():
        for param_name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda p, n=param_name, found=calls[name]: found.append(n))
    for _ in range(2):
        for found in calls.values():
            found.clear()
        for name, model in models.items():
            if name != "plain":
                model.set_requires_gradient_sync(False)
            model(noise(3, 4)).square().mean().backward()
            calls[name].clear()
            if name == "plain":
                continue
            model.set_requires_gradient_sync(True)
            if ends == "manually" and name == "ours":
                model.finalize_backward()
            else:
                model(noise(3, 4), both=False).square().mean().backward()
        assert sorted(calls["ours"]) == sorted(calls["fsdp2"]) == ["a.bias", "a.weight", "b.bias", "b.weight"]


COMPILED = {name: OPTIMIZERS[name] for name in ("sgd", "adamw foreach", "adamw fused")}


def operators_in(graph):
    return {str(node.target) for node in graph.graph.nodes if "composable_shard" in str(node.target)}


@pytest.mark.parametrize("kind", ["sgd", *map(more, [kind for kind in COMPILED if kind != "sgd"])])
@distributed(world=2)
def test_a_compiled_step_is_exact_and_reshards_without_an_additional_graph_break(rank, world, kind):
    """An operator notifies the engines, in a separate graph before the break that torch makes in every step."""
    models = models_of(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), reshard_after_forward=False)
    warnings.filterwarnings("ignore", message="`torch.jit.script_method` is deprecated")  # Dynamo's own import
    breaks, graphs = {}, {}
    for name, model in models.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found = graphs[name] = []

        def backend(graph, inputs, found=found):
            found.append(graph)
            return graph

        optimizer = COMPILED[kind](model.parameters())
        step = torch.compile(optimizer.step, backend=backend)
        for _ in range(3):
            model(noise(3, 4)).square().mean().backward()
            step()
            optimizer.zero_grad()
        breaks[name] = dict(torch._dynamo.utils.counters["graph_break"])
    assert breaks["plain"]
    assert breaks["ours"] == breaks["plain"]
    ours = [graph for graph in graphs["ours"] if operators_in(graph)]
    assert len(ours) == 1
    assert len(graphs["ours"]) == len(graphs["plain"]) + 1
    assert_alike(models, exact=False)
    assert_at_rest(models["ours"])


@distributed(world=2)
def test_a_compiled_step_raises_the_errors_of_an_eager_step(rank, world):
    warnings.filterwarnings("ignore", message="`torch.jit.script_method` is deprecated")
    torch._dynamo.reset()
    model = stack(4, 2)
    of_old = torch.optim.SGD(model.parameters(), lr=0.1)
    shard_children(model, ENGINES["ours"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    before = [whole(param.detach()).clone() for param in model.parameters()]
    model.set_requires_gradient_sync(False)
    model(noise(3, 4)).square().mean().backward()
    with pytest.raises(ShardConfigStateError, match="still wait for their reduction"):
        step()
    assert all(map(torch.equal, before, map(whole, model.parameters())))
    with pytest.raises(ShardConfigStateError, match="from before fully_shard"):
        torch.compile(of_old.step, backend="eager")()
    model.set_requires_gradient_sync(True)
    model(noise(3, 4)).square().mean().backward()
    step()
    assert not any(map(torch.equal, before, map(whole, model.parameters())))
