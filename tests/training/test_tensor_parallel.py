"""Tensor-parallel modules, sharded over the data-parallel axes of the same mesh."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from _compiling import graphs_of, three_steps
from _engines import ENGINES, fully_shard, named_mesh
from _pool import distributed, more
from _stepping import assert_at_rest
from composable_shard import testing


class Layer(nn.Module):
    def __init__(self, dim=8, hidden=16):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.layers = nn.ModuleList(Layer(**sizes) for _ in range(2))
        self.head = nn.Linear(sizes.get("dim", 8), 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * 1  # FSDP2 warns about outputs that are views


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def parallelize(model, mesh, plan=PLAN):
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def shard(model, engine, mesh, **options):
    for layer in model.layers:
        engine(layer, mesh=mesh, **options)
    engine(model, mesh=mesh, **options)


def mesh_2d():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def batch(dp_rank, step):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(7 * step + dp_rank))


def mean_gradients(plain, ranks, step):
    """Gradients of the unsharded model, averaged over the data-parallel ranks."""
    total = {}
    for dp_rank in range(ranks):
        plain.zero_grad()
        plain(batch(dp_rank, step)).square().mean().backward()
        for name, p in plain.named_parameters():
            total[name] = total.get(name, 0) + p.grad / ranks
    return total


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_and_compare(models, plain, dp_rank, dp_size, make=torch.optim.SGD, steps=3):
    optimizers = {name: make(m.parameters(), lr=0.1) for name, m in models.items()}
    plain_optimizer = make(plain.parameters(), lr=0.1)
    for step in range(steps):
        want = mean_gradients(plain, dp_size, step)
        for model in models.values():
            full(model(batch(dp_rank, step))).square().mean().backward()
        for name, p in plain.named_parameters():
            p.grad = want[name]
            for side, model in models.items():
                got = full(model.get_parameter(name).grad)
                torch.testing.assert_close(got, want[name], msg=lambda m, n=name, e=side: f"{e}: gradient of {n}: {m}")
        norms = {side: full(nn.utils.clip_grad_norm_(m.parameters(), 0.5)) for side, m in models.items()}
        want_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for norm in norms.values():
            torch.testing.assert_close(norm, want_norm)
        for optimizer in (*optimizers.values(), plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    for name, p in plain.named_parameters():
        for side, model in models.items():
            torch.testing.assert_close(
                full(model.get_parameter(name)), p, msg=lambda m, n=name, e=side: f"{e} {n}: {m}"
            )


@pytest.mark.parametrize(
    ("make", "reshard"),
    [
        pytest.param(torch.optim.SGD, False, marks=pytest.mark.matrix),
        (torch.optim.AdamW, True),
        pytest.param(torch.optim.SGD, True, marks=pytest.mark.matrix),
        pytest.param(torch.optim.AdamW, False, marks=pytest.mark.matrix),
    ],
)
@distributed(world=4)
def test_training_on_two_axes_is_exact(rank, world, reshard, make):
    mesh = mesh_2d()
    torch.manual_seed(3)
    plain = Net()
    models = {name: copy.deepcopy(plain) for name in ENGINES}
    for name, model in models.items():
        parallelize(model, mesh["tp"])
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
        for layer in model.layers:
            for key, p in list(layer.norm._parameters.items()):
                layer.norm._parameters[key] = nn.Parameter(distribute_tensor(p.detach(), mesh["tp"], [Replicate()]))
            layer.norm.register_forward_pre_hook(
                lambda m, args: (DTensor.from_local(args[0], mesh["tp"], [Replicate()], run_check=False),)
            )
        shard(model, ENGINES[name], mesh["dp"], reshard_after_forward=reshard)
    train_and_compare(models, plain, mesh.get_local_rank("dp"), 2, make)
    assert_at_rest(models["ours"])


@distributed(world=4)
def test_placements_and_state_dicts_match_torchs_fsdp2(rank, world):
    mesh = mesh_2d()
    torch.manual_seed(3)
    plain = Net()
    models = {name: copy.deepcopy(plain) for name in ENGINES}
    for name, model in models.items():
        parallelize(model, mesh["tp"])
        shard(model, ENGINES[name], mesh["dp"])
    ours, theirs = models["ours"], models["fsdp2"]
    up, down = ours.layers[0].up.weight, ours.layers[0].down.weight
    assert up.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert down.placements == (Shard(0), Shard(1))
    assert up.device_mesh.mesh_dim_names == ("dp", "tp")
    for name, p in theirs.named_parameters():
        mine = ours.get_parameter(name)
        assert (mine.placements, mine.device_mesh) == (p.placements, p.device_mesh), name
        assert torch.equal(mine.to_local(), p.to_local()), name
    for name, value in ours.state_dict().items():
        assert torch.equal(value.full_tensor(), plain.state_dict()[name]), name
    ours.load_state_dict(theirs.state_dict())


@distributed(world=4)
def test_a_module_gets_its_tensor_parallel_dtensor(rank, world):
    mesh = mesh_2d()
    model = Net()
    parallelize(model, mesh["tp"])
    before = model.layers[0].up.weight
    shard(model, fully_shard, mesh["dp"])
    seen = []
    model.layers[0].up.register_forward_pre_hook(lambda m, _: seen.append((m.weight, m.weight.to_local().clone())))
    model(batch(0, 0)).sum().backward()
    weight, local = seen[0]
    assert isinstance(weight, DTensor)
    assert isinstance(weight, nn.Parameter)
    assert (weight.placements, weight.device_mesh) == ((Shard(0),), mesh["tp"])
    assert torch.equal(local, before.to_local())


@distributed(world=4)
def test_tensor_parallel_modules_work_with_manual_unshard_and_no_grad(rank, world):
    mesh = mesh_2d()
    torch.manual_seed(3)
    plain = Net()
    model = copy.deepcopy(plain)
    parallelize(model, mesh["tp"])
    shard(model, fully_shard, mesh["dp"])
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0, 0)), plain(batch(0, 0)))
    model.layers[0].unshard()
    weight = model.layers[0].up.weight
    assert weight.placements == (Shard(0),)
    torch.testing.assert_close(weight.full_tensor(), plain.layers[0].up.weight)
    model.layers[0].reshard()
    torch.utils.checkpoint.checkpoint(model, batch(0, 0), use_reentrant=False).square().mean().backward()
    plain(batch(0, 0)).square().mean().backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name).grad), p.grad)


@distributed(world=4)
def test_tensor_parallel_modules_can_be_sharded_along_another_dim_and_copied(rank, world):
    mesh = mesh_2d()
    torch.manual_seed(3)
    plain = Net()
    model = copy.deepcopy(plain)
    parallelize(model, mesh["tp"])
    shard(model, fully_shard, mesh["dp"], shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    assert model.layers[0].up.weight.placements == (Shard(1), Shard(0))
    made = copy.deepcopy(model)
    for each in (model, made, plain):
        full(each(batch(0, 0))).square().mean().backward()
    for name, p in plain.named_parameters():
        for each in (model, made):
            torch.testing.assert_close(full(each.get_parameter(name).grad), p.grad)


@distributed(world=4)
def test_hsdp_with_tensor_parallelism_trains_exactly(rank, world):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    torch.manual_seed(3)
    plain = Net()
    models = {name: copy.deepcopy(plain) for name in ENGINES}
    for name, model in models.items():
        parallelize(model, mesh["tp"])
        shard(model, ENGINES[name], mesh["replicate", "shard"])
    assert models["ours"].layers[0].down.weight.placements == (Replicate(), Shard(0), Shard(1))
    want = mean_gradients(plain, 2, 0)
    for model in models.values():
        full(model(batch(mesh.get_local_rank("replicate"), 0))).square().mean().backward()
    for name, gradient in want.items():
        for model in models.values():
            torch.testing.assert_close(full(model.get_parameter(name).grad), gradient)


MESHES = {
    "replicas of shards of tensor-parallel ranks": ({"replicate": 2, "shard": 2, "tp": 2}, (6, 8), None),
    "along another dim": ({"dp": 2, "tp": 2}, (8, 16), lambda p: Shard(p.ndim - 1)),
}


@pytest.mark.parametrize("case", [more("replicas of shards of tensor-parallel ranks"), "along another dim"])
def test_three_steps_match_in_one_process(case):
    axes, sizes, choose = MESHES[case]
    data = [axis for axis in axes if axis != "tp"]

    def both_ways(layer, mesh):
        parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, mesh=mesh[tuple(data)], shard_placement_fn=choose)

    testing.assert_matches_unsharded(
        lambda: Layer(*sizes),
        lambda part, step: torch.randn(4, sizes[0], generator=torch.Generator().manual_seed(10 * step + part)),
        world_size=math.prod(axes.values()),
        mesh=axes,
        batch_axes=data,
        shard=both_ways,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        rtol=1e-5,
        atol=1e-6,
    )


def compiled(rank, world):
    mesh = mesh_2d()

    def shard_both_ways(model, engine):
        parallelize(model, mesh["tp"])
        shard(model, engine, mesh["dp"], reshard_after_forward=True)

    return three_steps(rank, Net(), shard_both_ways, lambda rank, step: (batch(mesh.get_local_rank("dp"), step),))


@pytest.mark.matrix
def test_the_compiled_graph_with_tensor_parallelism_is_bitwise_identical_to_eager():
    assert_expected_inline(
        graphs_of(compiled, world=4),
        """\
forward GwGwGmmAwwmmAwm, saves 1632 bytes
backward GwGmmwGmmmmAwRwmmmmAwwRwRw
""",
    )


@distributed(world=4)
def test_meshes_that_cannot_be_combined_raise_an_error(rank, world):
    mesh = mesh_2d()
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    unnamed = init_device_mesh("cpu", (4,))
    for sharding, words in ((mesh["tp"], "all different"), (other, "submeshes of one mesh"), (unnamed, "need names")):
        model = Net()
        parallelize(model, mesh["tp"])
        with pytest.raises(ValueError, match=f"parameter up.weight: is a DTensor on .*{words}"):
            fully_shard(model.layers[0], mesh=sharding)


@pytest.mark.matrix
@distributed(world=8)
def test_resharding_to_a_few_ranks_works_on_submeshes(rank, world):
    """torch's FSDP2 hangs here: it creates groups of all ranks from a mesh that differs between ranks."""
    mesh = named_mesh((4, 2), ("dp", "tp"))
    torch.manual_seed(3)
    plain = Net()
    model = copy.deepcopy(plain)
    parallelize(model, mesh["tp"])
    shard(model, fully_shard, mesh["dp"], reshard_after_forward=2)
    want = mean_gradients(plain, 4, 0)
    loss = full(model(batch(mesh.get_local_rank("dp"), 0))).square().mean()
    kept = model.layers[0].up.weight
    assert (kept.device_mesh.mesh_dim_names, kept.shape) == (("copies", "few"), (8, 8)), "wrong mesh or local shape"
    loss.backward()
    for name, gradient in want.items():
        torch.testing.assert_close(full(model.get_parameter(name).grad), gradient)
    assert_at_rest(model)
