"""Unsharded parameters that user code keeps after a forward, in a cache or on a ``ctx``, show later values."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from _blocks import SwiGLU
from _engines import ENGINES, fully_shard, mesh_of, named_mesh
from _pool import distributed, simulated
from _sides import noise, whole
from _stepping import assert_at_rest, engine_of
from composable_shard.errors import ShardConfigStateError

SIZE, HIDDEN = 8, 16


class Caching(nn.Module):
    """A feed-forward layer that computes with the weights that it cached in its first forward."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(SIZE), SwiGLU(SIZE, HIDDEN)
        self.weights, self.caches = None, True

    def take(self):
        """Return the cached weights. They are in a list, because a module would register an assigned parameter."""
        if self.weights is not None:
            return self.weights
        weights = [self.mlp.gate.weight, self.mlp.up.weight, self.mlp.down.weight, self.norm.bias]
        self.weights = weights if self.caches else None
        return weights

    def forward(self, x):
        gate, up, down, bias = self.take()
        y = F.layer_norm(x, (SIZE,), self.norm.weight, bias)
        return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


class Gated(torch.autograd.Function):
    """A linear layer that keeps its weight as an attribute of ``ctx``, like fused kernels."""

    @staticmethod
    def forward(ctx, x, weight, how):
        ctx.kept = {"attribute": weight, "list": [weight], "function": lambda: weight}[how]
        ctx.save_for_backward(x)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        kept = ctx.kept
        weight = kept[0] if isinstance(kept, list) else kept if isinstance(kept, torch.Tensor) else kept()
        (x,) = ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return gradient @ weight, of_weight, None


class Fused(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.norm, self.linear, self.how = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE, bias=False), how

    def forward(self, x):
        return x + torch.tanh(Gated.apply(self.norm(x), self.linear.weight, self.how))


def freeze_nothing(blocks):
    pass


def freeze_weights(blocks):
    for block in blocks:
        for name, param in block.named_parameters():
            param.requires_grad_("norm" in name)


def freeze_blocks(blocks):
    for block in blocks:
        block.requires_grad_(False)


FROZEN = {"nothing": freeze_nothing, "weights": freeze_weights, "blocks": freeze_blocks}


def sides(make, freeze="nothing", blocks=3, **options):
    """Make the plain model, ours and FSDP2's: blocks between two linear layers that train."""
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(SIZE, SIZE), *[make() for _ in range(blocks)], nn.Linear(SIZE, 3))
    FROZEN[freeze](plain[1:-1])
    models = {"plain": plain}
    for name, shard in ENGINES.items():
        model = models[name] = copy.deepcopy(plain)
        for block in model[1:-1]:
            shard(block, **options)
        shard(model, **options)
    return models


def trained(model, steps=3, evaluates=False, before=lambda step: None):
    """Train for some steps, and return their losses and gradients and the loss of an evaluation."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found = []
    for step in range(steps):
        before(step)
        if evaluates:
            with torch.no_grad():
                found.append(model(noise(4, SIZE, seed=20 + step)).square().mean())
        loss = model(noise(4, SIZE, seed=step)).square().mean()
        loss.backward()
        found += [loss.detach(), *[whole(p.grad).clone() for p in model.parameters() if p.grad is not None]]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(model(noise(4, SIZE, seed=30)).square().mean())
    return found


def assert_all_equal(results):
    want = results.pop("plain")
    for name, found in results.items():
        assert len(found) == len(want) > 10, name
        for index, (ours, theirs) in enumerate(zip(found, want, strict=True)):
            assert torch.equal(ours, theirs), (name, index)


@pytest.mark.parametrize("evaluates", [False, True], ids=["trains first", "evaluates first"])
@pytest.mark.parametrize("freeze", FROZEN)
@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_a_module_may_cache_its_weights_in_its_first_forward(rank, world, reshard, freeze, evaluates):
    models = sides(Caching, freeze, reshard_after_forward=reshard)
    assert_all_equal({name: trained(model, evaluates=evaluates) for name, model in models.items()})
    assert_at_rest(models["ours"])


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_a_module_may_cache_its_weights_with_kept_unsharded_storage(rank, world, reshard):
    models = sides(Caching, reshard_after_forward=reshard)
    models["ours"].set_keep_unsharded_storage(True)
    assert_all_equal({name: trained(model) for name, model in models.items()})


@pytest.mark.parametrize("when", [0, 1, 2])
@distributed(world=2)
def test_weights_kept_from_an_unshard_call_may_be_used_later(rank, world, when):
    models = sides(Caching)

    def take(model, step):
        if step == when:
            for block in model[1:-1]:
                if model is not models["plain"]:
                    block.unshard()
                block.weights = None
                block.take()
                if model is not models["plain"]:
                    block.reshard()

    results = {}
    for name, model in models.items():
        results[name] = trained(model, before=lambda step, model=model: take(model, step))
    assert_all_equal(results)


class Views(nn.Module):
    """Caches the tensors that `kept` returns for its weight, and computes with the first one."""

    def __init__(self, kept):
        super().__init__()
        self.linear, self.kept, self.weights = nn.Linear(SIZE, SIZE), kept, None

    def forward(self, x):
        if self.weights is None:
            self.weights = self.kept(self.linear.weight)
        return x + torch.tanh(x @ self.weights[0].detach() + self.linear.bias)


VIEWS = {
    "transposed": lambda w: [w.T],
    "the weight and a view": lambda w: [w, w.detach()],
    "a view and the weight": lambda w: [w.detach(), w],
    "a part": lambda w: [w.split(SIZE)[0]],
}


@pytest.mark.parametrize("kept", VIEWS)
@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_an_evaluation_may_cache_views_with_or_without_their_weight(rank, world, reshard, kept):
    models = sides(lambda: Views(VIEWS[kept]), blocks=4, reshard_after_forward=reshard)
    assert_all_equal({name: trained(model, evaluates=True) for name, model in models.items()})


@distributed(world=2)
def test_cached_weights_of_a_block_that_is_unfrozen_later_train(rank, world):
    models = sides(Caching, "blocks")

    def thaw(model, step):
        if step == 1:
            for block in model[1:-1]:
                block.requires_grad_(True)

    results = {}
    for name, model in models.items():
        results[name] = trained(model, before=lambda step, model=model: thaw(model, step))
        assert all(p.grad is not None for block in model[1:-1] for p in block.parameters())
    assert_all_equal(results)


@simulated(world=2)
def test_a_cached_copy_that_cannot_be_unfrozen_is_an_error(rank, world):
    model = sides(Caching, "weights")["ours"]
    trained(model, steps=1)
    model[1].mlp.up.weight.requires_grad_(True)
    message = r"^parameter 1\.mlp\.up\.weight: was frozen when user code kept its unsharded copy"
    with pytest.raises(ShardConfigStateError, match=message):
        model(noise(4, SIZE))
    model[1].weights = None
    model(noise(4, SIZE)).sum().backward()
    assert model[1].mlp.up.weight.grad is not None
    assert_at_rest(model)


class Noted(nn.Module):
    """Computes with the weight that a backward hook of the module has kept."""

    def __init__(self):
        super().__init__()
        self.linear, self.weights = nn.Linear(SIZE, SIZE), None
        self.register_full_backward_hook(lambda block, *_: vars(block).update(weights=[block.linear.weight]))

    def forward(self, x):
        weight = self.linear.weight if self.weights is None else self.weights[0].detach()
        return x + torch.tanh(F.linear(x, weight, self.linear.bias))


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_a_weight_kept_in_backward_shows_later_values(rank, world, reshard):
    models = sides(Noted, reshard_after_forward=reshard)
    assert_all_equal({name: trained(model) for name, model in models.items()})


@pytest.mark.parametrize("shape", [(4, 1), (2, 2)], ids=["four replicas", "two of two"])
@distributed(world=4)
def test_weights_of_several_dtypes_may_be_cached_on_replicas(rank, world, shape):
    class Mixed(Caching):
        def forward(self, x):
            return super().forward(x) * self.scale.float()

    def make():
        block = Mixed()
        block.scale = nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16))
        return block

    models = sides(make, mesh=mesh_of(*shape))
    del models["fsdp2"]  # FSDP2 refuses several dtypes
    assert_all_equal({name: trained(model) for name, model in models.items()})


@simulated(world=2)
def test_a_packed_weight_may_be_kept_from_an_unshard_before_the_first_forward(rank, world):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.arange(64, dtype=torch.uint8).view(8, 8), requires_grad=False)
            self.kept = []

        def forward(self, x):
            return x @ (self.kept[0] if self.kept else self.codes).float()

    plain = nn.Sequential(Packed(), nn.Linear(SIZE, 3))
    model = copy.deepcopy(plain)
    fully_shard(model[0])
    model[0].unshard()
    model[0].kept.append(model[0].codes)
    model[0].reshard()
    fully_shard(model)
    for _ in range(2):
        assert torch.equal(model(noise(4, SIZE)), plain(noise(4, SIZE)))


@pytest.mark.parametrize("how", ["attribute", "list", "function"])
@pytest.mark.parametrize("freeze", FROZEN)
@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_an_autograd_function_may_keep_a_weight_on_its_context(rank, world, reshard, freeze, how):
    models = sides(lambda: Fused(how), freeze, reshard_after_forward=reshard)
    assert_all_equal({name: trained(model) for name, model in models.items()})
    assert_at_rest(models["ours"])


@pytest.mark.parametrize("freeze", FROZEN)
@distributed(world=2)
def test_compiled_blocks_may_cache_their_weights(rank, world, freeze):
    models = sides(Caching, freeze)
    for model in models.values():
        for block in model[1:-1]:
            block.compile(backend="aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # by Dynamo
        assert_all_equal({name: trained(model) for name, model in models.items()})


class Parallel(Caching):
    """Caches DTensors."""

    def forward(self, x):
        gate, up, down, bias = self.take()
        y = DTensor.from_local(F.layer_norm(x, (SIZE,), self.norm.weight, bias), gate.device_mesh, [Replicate()])
        return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down).full_tensor()


@distributed(world=4)
def test_cached_weights_under_tensor_parallelism_show_later_values(rank, world):
    mesh = named_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(SIZE, SIZE), *[Caching() for _ in range(2)], nn.Linear(SIZE, 3))
    results = {"plain": trained(plain)}
    for name, shard in ENGINES.items():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(SIZE, SIZE), *[Parallel() for _ in range(2)], nn.Linear(SIZE, 3))
        for block in model[1:-1]:
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block.mlp, mesh["tp"], plan)
            shard(block, mesh=mesh["dp"])
        shard(model, mesh=mesh["dp"])
        results[name] = trained(model)
    want = results.pop("plain")
    for name, found in results.items():
        for index, (ours, theirs) in enumerate(zip(found, want, strict=True)):
            torch.testing.assert_close(ours, theirs, msg=lambda text, at=(name, index): f"{at}: {text}")


@pytest.mark.parametrize("trains", [True, False])
@simulated(world=2)
def test_kept_weights_are_nan_while_nothing_is_gathered(rank, world, trains):
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    kept = []
    handle = model[0].register_forward_pre_hook(lambda layer, _: kept.append(layer.weight))
    with torch.set_grad_enabled(trains):
        out = model(noise(2, 6))
        assert kept[0].isnan().all()
        handle.remove()
        out = model(noise(2, 6))
    if trains:
        out.sum().backward()
    assert kept[0].isnan().all()
    assert kept[0].shape == (6, 6)
    model[0].unshard()
    assert torch.equal(kept[0], model[0].weight)
    model[0].reshard()
    assert kept[0].isnan().all()


@simulated(world=2)
def test_kept_weights_use_no_memory_and_may_be_released(rank, world):
    model = sides(Caching)["ours"]
    trained(model)
    assert engine_of(model).pool.live_bytes == 0
    params = [param for group in engine_of(model).groups for param in group.params]
    assert sum(len(param.kept_ones()) for param in params) == 12  # four in each block
    for block in model[1:-1]:
        block.weights, block.caches = None, False
    gc.collect()
    trained(model)
    assert not any(param.kept for param in params)
