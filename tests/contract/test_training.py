"""Training is equal to training of a plain model whose gradients are averaged over the ranks."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import register_fsdp_forward_method, share_comm_ctx
from torch.distributed.tensor import DTensor, Shard

from _blocks import Transformer, next_token_loss, token_batch
from contract._ways import PROCESSES, REAL, common_fsdp, contract


def mlps(count=3, dim=8):
    return nn.Sequential(*(common_fsdp().MLP(dim, torch.device("cpu"), dim_multiplier=3) for _ in range(count)))


def shard_children(t, model, **options):
    for child in model:
        t.fully_shard(child, mesh=t.mesh(), **options)
    return t.fully_shard(model, mesh=t.mesh(), **options)


def shard_blocks(t, model, mesh=None, **options):
    mesh = mesh or t.mesh()
    for block in model.blocks:
        t.fully_shard(block, mesh=mesh, **options)
    return t.fully_shard(model, mesh=mesh, **options)


def train_tokens(t, plain, model, steps=2):
    """Train both models on next-token prediction."""

    class Loss(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = [inner]

        def forward(self, tokens):
            return next_token_loss(self.inner[0], tokens)

    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    for step in range(steps):
        losses = [next_token_loss(each, *token_batch(t.rank, step)) for each in (plain, model)]
        t.same(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        t.average_grads(plain)
        t.same_params(model, plain)
        for optimizer in optimizers:
            optimizer.step()
    t.same_params(model, plain)


@contract()
def test_one_group_of_uneven_shapes(t):
    plain, model = t.pair(lambda: nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3), nn.Linear(3, 1)))
    t.fully_shard(model, mesh=t.mesh())
    t.train(plain, model, lambda step: t.randn(4, 7, step=step))


@contract(world=4)
@pytest.mark.parametrize("reshard", [True, False, 2, None])
def test_many_groups_with_any_reshard_setting(t, reshard):
    plain, model = t.pair(mlps)
    shard_children(t, model, reshard_after_forward=reshard)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_a_transformer(t):
    plain, model = t.pair(Transformer)
    shard_blocks(t, model)
    train_tokens(t, plain, model)


@contract()
def test_tied_weights_of_one_group(t):
    plain, model = t.pair(lambda: Transformer(tied=True))
    shard_blocks(t, model)
    train_tokens(t, plain, model)
    assert model.head.weight is model.embed.weight


@contract()
def test_tied_weights_of_two_groups_are_refused(t):
    model = Transformer(tied=True)
    t.fully_shard(model.embed, mesh=t.mesh())
    tokens = token_batch(0, 0)[0]
    with pytest.raises(ValueError, match=r"[Ss]hared"):
        t.fully_shard(model, mesh=t.mesh())(tokens)


@contract(ways=REAL)
def test_with_the_largest_dim_sharded(t):
    plain, model = t.pair(Transformer)
    shard_blocks(t, model, shard_placement_fn=lambda p: Shard(max(range(p.ndim), key=p.shape.__getitem__)))
    train_tokens(t, plain, model)
    for param in model.parameters():
        assert param.grad.to_local().is_contiguous()


@contract()
def test_registered_parameters_are_plain_only_while_unsharded(t):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    seen = {}
    for place, (layer, reshard) in enumerate(zip(model, (True, False, None), strict=True)):
        layer.register_forward_pre_hook(lambda m, _, i=place: seen.update({i: type(m.weight)}))
        t.fully_shard(layer, mesh=t.mesh(), reshard_after_forward=reshard)
    t.fully_shard(model, mesh=t.mesh())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    out = model(t.randn(2, 4))
    assert [isinstance(layer.weight, DTensor) for layer in model] == [True, False, True]
    assert not isinstance(model[1].weight, DTensor)
    assert isinstance(model[1].weight, nn.Parameter)
    assert model[1].weight.shape == (4, 4)
    out.sum().backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert not any(issubclass(kind, DTensor) for kind in seen.values())
    assert len(seen) == 3


@contract(world=4)
def test_registered_parameters_after_forward_are_sharded_over_the_smaller_mesh(t):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    t.fully_shard(model[0], mesh=t.mesh(), reshard_after_forward=2)
    t.fully_shard(model, mesh=t.mesh())
    out = model(t.randn(2, 8))
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape == (4, 8)
    assert weight.device_mesh.size(-1) == 2
    out.sum().backward()
    assert model[0].weight.to_local().shape == (2, 8)


@contract()
def test_the_root_keeps_its_parameters_after_forward_by_default(t):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    t.fully_shard(model[0], mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    model(t.randn(2, 4))
    assert isinstance(model[0].weight, DTensor)
    assert not isinstance(model[1].weight, DTensor)
    model.reshard()
    assert isinstance(model[1].weight, DTensor)


@contract()
def test_set_reshard_after_forward_takes_effect_at_run_time(t):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard_children(t, model)
    for reshard, recurse in ((False, True), (True, True), (False, False)):
        model.set_reshard_after_forward(reshard, recurse=recurse)
        out = model(t.randn(2, 4))
        assert isinstance(model[0].weight, DTensor) == (reshard or not recurse)
        out.sum().backward()
        assert all(isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(ValueError, match="bool"):
        model.set_reshard_after_forward(2)


@contract()
def test_a_part_of_the_model_trains_separately(t):
    plain, model = t.pair(lambda: mlps(2))
    shard_children(t, model)
    for step in range(2):
        x = t.randn(2, 8, step=step)
        outs = [each(x) for each in (plain, model)]
        t.same(outs[1], outs[0])
        for each in (plain, model):
            each[0](x).sum().backward()
        t.average_grads(plain)
        t.same(model[0].in_proj.weight.grad, plain[0].in_proj.weight.grad)
        assert model[1].in_proj.weight.grad is None
        for each in (plain, model):
            each.zero_grad()


@contract()
def test_one_module_runs_twice_in_a_forward(t):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = common_fsdp().MLP(8, torch.device("cpu"))
            self.outer = nn.Linear(8, 8)

        def forward(self, x):
            return self.outer(self.inner(self.inner(x)))

    plain, model = t.pair(Twice)
    t.fully_shard(model.inner, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_two_forwards_before_one_backward(t):
    plain, model = t.pair(mlps)
    shard_children(t, model)
    for step in range(2):
        for each in (plain, model):
            (each(t.randn(2, 8, step=step)) + each(t.randn(2, 8, step=step + 7))).sum().backward()
        t.average_grads(plain)
        t.same_params(model, plain)


@contract()
def test_forwards_without_backward_and_under_no_grad_between_steps(t):
    plain, model = t.pair(mlps)
    shard_children(t, model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        x = t.randn(2, 8, step=step)
        with torch.no_grad():
            t.same(model(x), plain(x))
        model(x)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).sum().backward()
        t.average_grads(plain)
        t.same_params(model, plain)
        for optimizer in optimizers:
            optimizer.step()
        model.eval()
        with torch.no_grad():
            t.same(model(x), plain(x))
        model.train()


@contract()
def test_a_registered_forward_method_gathers_like_forward(t):
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Linear(6, 8)
            self.blocks = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

        def encode(self, x):
            return self.patch(x)

        def forward(self, x):
            return self.blocks(self.encode(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision = Vision()
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.vision.blocks(self.vision.encode(x)))

    plain, model = t.pair(Model)
    t.fully_shard(model.vision.blocks, mesh=t.mesh())
    t.fully_shard(model.vision, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    register_fsdp_forward_method(model.vision, "encode")
    t.train(plain, model, lambda step: t.randn(2, 6, step=step))
    register_fsdp_forward_method(plain, "encode")  # a no-op, because the module is not sharded
    with pytest.raises(ValueError, match="does not have a method"):
        register_fsdp_forward_method(model, "nothing")


@contract()
def test_modules_without_parameters_and_modules_that_do_not_run(t):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            return self.relu(self.used(x))

    plain, model = t.pair(Skips)
    for child in model.children():
        t.fully_shard(child, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    t.train(plain, model, lambda step: t.randn(2, 4, step=step))
    assert model.unused.weight.grad is None


@contract()
@pytest.mark.parametrize("second", [True, False])
def test_backward_from_only_one_of_several_outputs(t, second):
    make = lambda: nn.Sequential(common_fsdp().DoubleLinear(4), common_fsdp().DoubleLinear(4, second))  # noqa: E731
    plain, model = t.pair(lambda: nn.ModuleList(make()))
    for layer in model:
        t.fully_shard(layer, mesh=t.mesh())
    for step, first in itertools.product(range(2), (0, 1)):
        for each in (plain, model):
            each.zero_grad()
            out = each[1](each[0](t.randn(2, 4, step=step))[first])
            (out[0] if second else out).sum().backward()
        t.average_grads(plain)
        t.same_params(model, plain)


@contract()
def test_a_batch_of_structures_through_the_model(t):
    class Structured(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, batch, *, scale=None, flag="on"):
            x, (y, extra) = batch["x"], batch["pair"]
            assert flag == "on"
            return {"out": [self.layer(x) * scale, (self.layer(y), extra, None)], "words": "as they are"}

    plain, model = t.pair(lambda: nn.Sequential(nn.Linear(4, 4), Structured()))
    t.fully_shard(model[1], mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    for each in (plain, model):
        x = each[0](t.randn(2, 4)) if each is plain else t.randn(2, 4)
        out = each[1]({"x": x.detach(), "pair": (t.randn(2, 4, step=1), 3)}, scale=torch.tensor(2.0))
        assert out["words"] == "as they are"
        assert out["out"][1][1:] == (3, None)
        (out["out"][0].sum() + out["out"][1][0].sum()).backward()
        if each is plain:
            each.zero_grad()


@contract()
def test_several_models_may_share_their_streams(t):
    pairs = [t.pair(mlps) for _ in range(2)]
    for _, model in pairs:
        shard_children(t, model)
    share_comm_ctx([model for _, model in pairs])
    for step in range(2):
        x = t.randn(2, 8, step=step)
        outs = [pairs[1][side](pairs[0][side](x)) for side in (0, 1)]
        t.same(outs[1], outs[0])
        for out in outs:
            out.sum().backward()
        for plain, model in pairs:
            t.average_grads(plain)
            t.same_params(model, plain)
            plain.zero_grad()
            model.zero_grad()


@contract(world=1)
def test_a_world_of_one_rank(t):
    plain, model = t.pair(mlps)
    shard_children(t, model)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_a_loss_on_an_inner_output_and_on_the_last_one(t):
    plain, model = t.pair(mlps)
    shard_children(t, model)
    for each in (plain, model):
        kept = []
        handle = each[1].register_forward_hook(lambda m, a, out, kept=kept: kept.append(out.square().mean()))
        out = each(t.randn(2, 8))
        (out.sum() + kept[0]).backward()
        handle.remove()
    t.average_grads(plain)
    t.same_params(model, plain)


@contract()
def test_convolutions_and_batch_norm(t):
    def make():
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 4 * 4, 3))

    plain, model = t.pair(make)
    for layer in (model[0], model[4], model):
        t.fully_shard(layer, mesh=t.mesh())
    t.train(plain, model, lambda step: t.randn(2, 3, 6, 6, step=step))
    t.same(model[1].running_mean, plain[1].running_mean)


OPTIMIZERS = {
    "SGD": {"momentum": 0.9},
    "Adam": {"foreach": True},
    "AdamW": {"fused": True},
    "Adagrad": {"foreach": False},
    "RMSprop": {},
    "Adamax": {},
}


@contract(ways=PROCESSES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_is_sharded(t, optimizer):
    plain, model = t.pair(lambda: mlps(1))
    shard_children(t, model)
    make = functools.partial(getattr(torch.optim, optimizer), lr=1e-2, **OPTIMIZERS[optimizer])
    optimizers = [make(each.parameters()) for each in (plain, model)]
    for step in range(2):
        for each, o in zip((plain, model), optimizers, strict=True):
            o.zero_grad()
            each(t.randn(2, 8, step=step)).sum().backward()
        t.average_grads(plain)
        for o in optimizers:
            o.step()
        t.same_params(model, plain)
    for param, state in optimizers[1].state.items():
        assert isinstance(param, DTensor)
        assert all(isinstance(v, DTensor) for v in state.values() if isinstance(v, torch.Tensor) and v.dim())


@contract()
def test_autograd_grad_with_respect_to_inputs(t):
    plain, model = t.pair(mlps)
    shard_children(t, model)
    found = []
    for each in (plain, model):
        x = t.randn(2, 8).requires_grad_()
        found.append(torch.autograd.grad(each(x).sum(), x)[0])
    t.same(found[1], found[0])
    assert all(p.grad is None for p in model.parameters())


@contract()
def test_a_function_in_forward_reads_the_parameters_of_its_module(t):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 4))

        def forward(self, x):
            return F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True))

    plain, model = t.pair(Normed)
    t.fully_shard(model, mesh=t.mesh())
    t.train(plain, model, lambda step: t.randn(2, 4, step=step))


@contract()
def test_a_copy_from_before_sharding_is_not_changed(t):
    model = mlps(1)
    other = copy.deepcopy(model)
    shard_children(t, model)
    assert not any(isinstance(p, DTensor) for p in other.parameters())
    other(t.randn(2, 8)).sum().backward()


@contract(ways=PROCESSES)
def test_data_parallel_modules_next_to_a_sharded_one(t):
    from torch.nn.parallel import DistributedDataParallel

    plain, model = t.pair(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
    ignored = {*model[0].parameters(), *model[2].parameters()}
    model[0], model[2] = DistributedDataParallel(model[0]), DistributedDataParallel(model[2])
    t.fully_shard(model, mesh=t.mesh(), ignored_params=ignored)
    for step in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(t.randn(2, 8, step=step)).square().sum().backward()
        t.average_grads(plain)
        for (name, param), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(param, DTensor) == name.startswith("1"), name
            t.same(param.grad, reference.grad)


@contract()
@pytest.mark.parametrize("all_used", [True, False])
def test_a_group_of_two_modules_of_which_the_second_runs_in_chunks_after_the_models_forward(t, all_used):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 5)

        def forward(self, x):
            x = self.norm(self.body(x))
            return self.head(x) if all_used else x

    plain, model = t.pair(Model)
    t.fully_shard(model.body, mesh=t.mesh())
    t.fully_shard([model.norm, model.head], mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    for step in range(2):
        losses = []
        for each in (plain, model):
            out = each(t.randn(4, 8, step=step))
            chunks = [out] if all_used else [each.head(chunk) for chunk in out.chunk(2)]
            losses.append(sum(chunk.square().sum() for chunk in chunks))
            losses[-1].backward()
        t.same(losses[1], losses[0])
        t.average_grads(plain)
        t.same_params(model, plain)
        for each in (plain, model):
            each.zero_grad()


@contract(ways=PROCESSES)
@pytest.mark.parametrize("reshard", [True, False])
def test_compiled_blocks(t, reshard):
    plain, model = t.pair(Transformer)
    for block in model.blocks:
        block.compile(backend="aot_eager")
        t.fully_shard(block, mesh=t.mesh(), reshard_after_forward=reshard)
    t.fully_shard(model, mesh=t.mesh(), reshard_after_forward=reshard)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo reads `.grad` of torch's unsharded parameters
        train_tokens(t, plain, model)


@contract()
def test_local_shards_may_be_written_to_between_steps(t):
    plain, model = t.pair(mlps)
    shard_children(t, model)
    x = t.randn(2, 8)
    model(x).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(0.01)
            param.grad = None
        for param in plain.parameters():
            param.fill_(0.01)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_gradients_may_be_changed_and_replaced_before_the_optimizer_steps(t):
    plain, model = t.pair(mlps)
    shard_children(t, model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for each in (plain, model):
            each(t.randn(2, 8, step=step)).sum().backward()
        t.average_grads(plain)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            for param in each.parameters():
                if step == 0:
                    param.grad.mul_(0.5)
                else:
                    param.grad = param.grad * 0.25
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
        t.same_params(model, plain)
