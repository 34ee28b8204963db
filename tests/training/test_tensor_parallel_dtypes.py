"""`reduce_dtype` with other parallelism: gradients are also summed over its axes in that dtype.

torch's FSDP2 sums over these axes in the dtype of the gradient, and casts the sum.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from _compiling import graphs_of, three_steps
from _engines import ENGINES, fully_shard, named_mesh
from _pool import distributed, more
from _stepping import assert_at_rest
from composable_shard import DataParallelMeshDims, MixedPrecisionPolicy

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Layer(nn.Module):
    """A pre-norm feed-forward layer with a scale that only some calls use."""

    def __init__(self, dim=8, hidden=16):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.5))
        self.scales = False

    def forward(self, x):
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y * self.scale.to_local() if self.scales else y)


def sequence_parallel(mesh, noted=True):
    """Layers with sequence parallelism: activations are sharded along the sequence.

    So the gradient of a norm's weight is a partial sum.
    """
    torch.manual_seed(3)
    model = nn.Sequential(Layer(), Layer())
    for layer in model:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
        layer.scale = nn.Parameter(distribute_tensor(layer.scale.detach(), mesh, [Replicate()]))
        if noted:
            layer.norm.register_forward_pre_hook(lambda m, args: note_gradients(m))
    return model


def on_all_axes(mesh, noted=True):
    torch.manual_seed(3)
    model = nn.Sequential(Layer(), Layer())
    for layer in model:
        for module in layer.modules():
            for name, param in list(module._parameters.items()):
                if param is not None:
                    whole = distribute_tensor(param.detach(), mesh, [Replicate()] * mesh.ndim)
                    setattr(module, name, nn.Parameter(whole))
        if noted:
            layer.norm.register_forward_pre_hook(lambda m, args: note_gradients(m))
    return model


def note_gradients(norm):
    """Record the gradients of the unsharded weight as autograd computes them."""
    norm.__dict__.setdefault("seen", [])
    if norm.weight.requires_grad and torch.is_grad_enabled():
        norm.weight.register_hook(norm.__dict__["seen"].append)


def shard(model, engine, **options):
    for layer in model:
        engine(layer, **options)
    return engine(model, **options)


def float32_mean(seen, data):
    """Sum partial gradients in float32 over all ranks, and average over the mesh `data`."""
    total = sum(DTensor.to_local(g).float() for g in seen)
    axes = [seen[0].device_mesh.get_group(i) for i, at in enumerate(seen[0].placements) if at.is_partial()]
    names = seen[0].device_mesh.mesh_dim_names
    axes += [data.get_group(i) for i, name in enumerate(data.mesh_dim_names) if name not in names]
    for group in axes:
        dist.all_reduce(total, group=group)
    return total / data.size()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def batch(index, step, length=4):
    return torch.randn(2, length, 8, generator=torch.Generator().manual_seed(7 * step + index))


def check_norms(model, data):
    for layer in model:
        seen = layer.norm.__dict__["seen"]
        assert seen[0].dtype == torch.bfloat16
        assert any(at.is_partial() for at in seen[0].placements)
        got = full(layer.norm.weight.grad)
        assert got.dtype == torch.float32
        assert torch.equal(got, float32_mean(seen, data)), "the gradient is not the float32 sum"
        seen.clear()


@distributed(world=4)
def test_the_gradient_of_a_replicated_norm_is_the_float32_sum(rank, world):
    for shape, names in (((2, 2), ("dp", "tp")), ((2, 1, 2), ("replicate", "shard", "tp"))):
        mesh = named_mesh(shape, names)
        data = mesh[names[:-1]]
        models = {side: sequence_parallel(mesh["tp"]) for side in ENGINES}
        for side, model in models.items():
            shard(model, ENGINES[side], mesh=data, mp_policy=MIXED)
        ours = models["ours"]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in models.values()]
        index = data.get_local_rank(names[0])
        for step in range(2):
            x = batch(index, step)[:, 2 * mesh.get_local_rank("tp") :][:, :2]
            for model in models.values():
                model(x).square().mean().backward()
            check_norms(ours, data)
            for mine, theirs in zip(ours.parameters(), models["fsdp2"].parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None)
                if mine.grad is not None:
                    torch.testing.assert_close(full(mine.grad), full(theirs.grad), rtol=0.02, atol=1e-3)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        ours.set_requires_gradient_sync(False)
        for step in range(2):
            ours(batch(index, step)[:, :2]).square().mean().backward()
        ours.set_requires_gradient_sync(True)
        ours(batch(index, 2)[:, :2]).square().mean().backward()
        for layer in ours:
            seen = layer.norm.__dict__["seen"]
            assert len(seen) == 3
            torch.testing.assert_close(full(layer.norm.weight.grad), float32_mean(seen, data), rtol=1e-6, atol=1e-7)
            seen.clear()
        with torch.no_grad():
            ours(batch(index, 3)[:, :2])
        assert_at_rest(ours)


@distributed(world=4)
def test_sums_over_several_axes_and_on_a_full_mesh_use_float32(rank, world):
    mesh = named_mesh((1, 2, 2), ("dp", "cp", "tp"))
    submesh = on_all_axes(mesh["cp", "tp"])
    shard(submesh, fully_shard, mesh=mesh["dp"], mp_policy=MIXED)
    two = named_mesh((2, 2), ("dp", "tp"))
    whole = on_all_axes(two)
    shard(whole, fully_shard, mesh=two, dp_mesh_dims=DataParallelMeshDims(shard="dp"), mp_policy=MIXED)
    for model, axes, data in ((submesh, mesh["cp", "tp"], mesh["dp"]), (whole, two, two["dp"])):
        for step in range(2):
            x = distribute_tensor(batch(0, step).flatten(0, 1), axes, [Shard(0), Shard(0)])
            (model(x).square().mean() * 8).backward()  # like a loss scaler
            check_norms(model, data)
            model.zero_grad()


@distributed(world=4)
def test_gradients_are_not_cast_if_reduce_dtype_is_none_or_not_wider(rank, world):
    """The result is bitwise identical to FSDP2, which sums in the dtype of the gradient."""
    mesh = named_mesh((2, 2), ("dp", "tp"))
    bf16, fp32 = torch.bfloat16, torch.float32
    policies = [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16),
        MixedPrecisionPolicy(reduce_dtype=bf16),
        MixedPrecisionPolicy(param_dtype=fp32, reduce_dtype=fp32),
    ]
    for policy in policies:
        models = [sequence_parallel(mesh["tp"]) for _ in ENGINES]
        for model, engine in zip(models, ENGINES.values(), strict=True):
            shard(model, engine, mesh=mesh["dp"], mp_policy=policy)
            model(batch(mesh.get_local_rank("dp"), 0)[:, :2]).square().mean().backward()
        for mine, theirs in zip(*(m.parameters() for m in models), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(full(mine.grad), full(theirs.grad)), policy


@distributed(world=4)
def test_averages_gradients_outside_forward_and_unused_parameters_use_float32(rank, world):
    mesh = named_mesh((2, 2), ("dp", "tp"))
    model = sequence_parallel(mesh["tp"])
    shard(model, fully_shard, mesh=mesh["dp"], mp_policy=MIXED)
    value = 1.0 if mesh.get_local_rank("tp") == 0 else 2.0**-9  # each is exact in bfloat16, their sum is not
    partial = torch.full((8,), value, dtype=torch.bfloat16)
    norm = model[0].norm

    def averaged(module, args):
        average = DTensor.from_local(partial, mesh["tp"], [Partial("avg")], run_check=False)
        module.weight.register_hook(lambda g: average)

    handle = norm.register_forward_pre_hook(averaged)
    x = batch(mesh.get_local_rank("dp"), 0)[:, :2]
    model(x).square().mean().backward()
    assert torch.equal(full(norm.weight.grad), torch.full((8,), (1 + 2.0**-9) / 2))
    assert all(layer.scale.grad is None for layer in model)
    handle.remove()
    model.zero_grad()
    model[1].scales = mesh.get_local_rank("dp") == 0  # unused on half of the data-parallel ranks
    model(x).square().mean().backward()
    assert model[1].scale.grad is not None
    assert model[0].scale.grad is None
    model.zero_grad()
    model[0].unshard()
    weight = norm.weight
    y = DTensor.from_local(torch.full((1, 8), value, dtype=torch.bfloat16), mesh["tp"], [Shard(0)]) * weight
    y.to_local().sum().backward()
    model[0].reshard()
    assert torch.equal(full(norm.weight.grad), torch.full((8,), 1 + 2.0**-9))


class Experts(nn.Module):
    """Experts on a separate axis, and a router that is replicated on all ranks."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.router = nn.Parameter(distribute_tensor(torch.randn(8, 2) * 0.3, mesh, [Replicate()]))
        self.experts = nn.Parameter(distribute_tensor(torch.randn(2, 8, 8) * 0.3, mesh, [Shard(0)]))

    def forward(self, x):
        scores = (DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False) @ self.router).softmax(-1).to_local()
        return x + scores[:, :1] * (x @ self.experts.to_local()[0])


@distributed(world=4)
def test_the_gradient_of_a_router_next_to_experts_is_the_float32_sum(rank, world):
    mesh = named_mesh((2, 2), ("dp", "ep"))
    torch.manual_seed(3)
    model = Experts(mesh["ep"])
    fully_shard(model, mesh=mesh["dp"], mp_policy=MIXED)
    seen = []
    model.register_forward_pre_hook(lambda m, args: m.router.register_hook(seen.append) and None)
    for step in range(2):
        x = batch(mesh.get_local_rank("dp"), step)[:, 2 * mesh.get_local_rank("ep") :][:, :2].flatten(0, 1)
        model(x).square().mean().backward()
        assert seen[0].placements == (Partial(),)
        assert torch.equal(full(model.router.grad), float32_mean(seen, mesh["dp"]))
        assert model.experts.grad.placements == model.experts.placements
        model.zero_grad()
        seen.clear()


def compiled(rank, world):
    mesh = named_mesh((2, 2), ("dp", "tp"))
    return three_steps(
        rank,
        sequence_parallel(mesh["tp"], noted=False),
        lambda m, engine, **options: shard(m, engine, mesh=mesh["dp"], mp_policy=MIXED),
        lambda rank, step: (batch(mesh.get_local_rank("dp"), step)[:, :2],),
    )


def compiled_on_a_full_mesh(rank, world):
    mesh = named_mesh((2, 2), ("dp", "tp"))
    options = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp"), "mp_policy": MIXED}
    return three_steps(
        rank,
        on_all_axes(mesh, noted=False),
        lambda m, engine, **_: shard(m, engine, **options),
        lambda rank, step: (distribute_tensor(batch(0, step).flatten(0, 1), mesh, [Shard(0), Shard(0)]),),
        loss_of=lambda m, step: full(
            m(distribute_tensor(batch(0, step).flatten(0, 1), mesh, [Shard(0), Shard(0)])).float().square().mean()
        ),
    )


@pytest.mark.parametrize("case", [more(compiled), more(compiled_on_a_full_mesh)])
def test_one_full_graph_is_bitwise_identical_to_eager(case):
    assert "R" in graphs_of(case, world=4)


@pytest.mark.matrix
@distributed(world=4)
def test_compiled_layers_reduce_in_float32(rank, world):
    mesh = named_mesh((2, 2), ("dp", "tp"))
    models = [sequence_parallel(mesh["tp"], noted=False) for _ in range(2)]
    for model in models:
        shard(model, fully_shard, mesh=mesh["dp"], mp_policy=MIXED)
    for layer in models[1]:
        layer.compile(backend="aot_eager")
    for step in range(2):
        for model in models:
            model.zero_grad()
            model(batch(mesh.get_local_rank("dp"), step)[:, :2]).square().mean().backward()
        for eager, mine in zip(*(m.parameters() for m in models), strict=True):
            assert (eager.grad is None) == (mine.grad is None)
            assert eager.grad is None or torch.equal(full(eager.grad), full(mine.grad))
