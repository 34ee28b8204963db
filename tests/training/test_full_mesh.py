"""Parameters that are DTensors on a mesh with all types of parallelism. `dp_mesh_dims` names the axes to shard over.

Both implementations average the gradients over these axes, although a loss over the whole batch would need their sum.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import composable_shard as cs
from _compositions import distribute, mlps, shard_mlps
from _engines import ENGINES, fully_shard, named_mesh
from _pool import distributed
from _stepping import assert_at_rest
from composable_shard import DataParallelMeshDims, FSDPMeshInfo, ShardPlacementResult

TORCH_HAS_DIMS = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")
SIDES = ("ours", "fsdp2") if TORCH_HAS_DIMS else ("ours",)


def make():
    torch.manual_seed(3)
    return mlps()


def batch(mesh, step):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    return x, distribute_tensor(x, mesh, [Replicate() if axis == "tp" else Shard(0) for axis in mesh.mesh_dim_names])


def full(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DTensor warns about the number of collectives
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


CASES = {
    "one axis": ((2, 2), ("dp", "tp"), {"shard": "dp"}, 2),
    "one axis, which is all": ((4,), ("dp",), {"shard": "dp"}, 4),
    "the later axis": ((2, 2), ("tp", "dp"), {"shard": "dp"}, 2),
    "two axes as one": ((2, 2), ("dp", "cp"), {"shard": ("dp", "cp")}, 4),
    "two axes as one, and another": ((2, 1, 2), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}, 2),
    "replicas of shards": ((2, 2), ("replicas", "dp"), {"shard": "dp", "replicate": "replicas"}, 4),
    "replicas alone": ((2, 2), ("dp", "tp"), {"replicate": "dp"}, 2),
}


FIRST = [
    ("one axis", False),
    ("the later axis", True),
    ("replicas of shards", True),
]
MORE = [pytest.param(case, True, marks=pytest.mark.matrix) for case in CASES if (case, True) not in FIRST]


@pytest.mark.parametrize(("case", "reshard"), FIRST + MORE)
@distributed(world=4)
def test_training_is_exact(rank, world, case, reshard):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    shape, names, dims, parts = CASES[case]
    mesh = named_mesh(shape, names)
    plain = make()
    models = {
        side: shard_mlps(
            distribute(make(), mesh),
            ENGINES[side],
            mesh=mesh,
            dp_mesh_dims=DataParallelMeshDims(**dims),
            reshard_after_forward=reshard,
        )
        for side in SIDES
    }
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, *models.values())]
    for step in range(3):
        x, distributed_x = batch(mesh, step)
        (plain(x).square().mean() / parts).backward()
        for model in models.values():
            model(distributed_x).square().mean().backward()
        for side, model in models.items():
            for name, want in plain.named_parameters():
                got = model.get_parameter(name)
                where = f"{side}: {name}, step {step}"
                torch.testing.assert_close(full(got.grad), want.grad, msg=lambda m, w=where: f"gradient of {w}: {m}")
                torch.testing.assert_close(full(got), want, msg=lambda m, w=where: f"{w}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if "fsdp2" in models:
        for mine, theirs in zip(models["ours"].parameters(), models["fsdp2"].parameters(), strict=True):
            assert (mine.placements, mine.device_mesh) == (theirs.placements, theirs.device_mesh)
    assert_at_rest(models["ours"])


@distributed(world=4)
def test_a_module_gets_parameters_that_are_replicated_over_the_data_parallel_axes(rank, world):
    mesh = named_mesh((2, 2), ("dp", "tp"))
    model = shard_mlps(distribute(make(), mesh), fully_shard, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    seen = []
    model[0].up.register_forward_pre_hook(lambda m, _: seen.append((m.weight.placements, full(m.weight.detach()))))
    _, x = batch(mesh, 0)
    with torch.no_grad():
        model(x)
    model(x).square().mean().backward()
    for placements, weight in seen:
        assert placements == (Replicate(), Shard(0))
        torch.testing.assert_close(weight, make()[0].up.weight)
    model.unshard()
    made = copy.deepcopy(model)
    made(x).square().mean().backward()
    for mine, other in zip(model.parameters(), made.parameters(), strict=True):
        assert torch.equal(full(mine.grad) * 2, full(other.grad))


@distributed(world=4)
def test_no_gradient_is_reduced_twice_over_the_data_parallel_axes(rank, world):
    mesh = named_mesh((4,), ("dp",))
    model = shard_mlps(distribute(make(), mesh), fully_shard, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    _, x = batch(mesh, 0)
    loss = model(x).square().mean()
    with CommDebugMode() as comms:
        loss.backward()
    found = {str(op): count for op, count in comms.get_comm_counts().items()}
    assert found == {"c10d._allgather_base_": 2, "c10d.alltoall_base_": 2}, (
        "more than a gather and a reduction per group"
    )


@pytest.mark.matrix
@distributed(world=4)
def test_one_full_graph_equals_eager(rank, world):
    mesh = named_mesh((2, 2), ("dp", "tp"))
    options = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp")}
    eager, model = (shard_mlps(distribute(make(), mesh), fully_shard, **options) for _ in range(2))
    torch._dynamo.reset()
    run = cs.compile(model, backend="aot_eager")
    for step in range(2):
        _, x = batch(mesh, step)
        for each in (eager, run):
            each(x).square().mean().backward()
        for (name, want), (_, got) in zip(eager.named_parameters(), model.named_parameters(), strict=True):
            torch.testing.assert_close(full(got.grad), full(want.grad), msg=lambda m, n=name: f"gradient of {n}: {m}")


@distributed(world=4)
def test_one_call_can_shard_over_different_axes_of_a_mesh(rank, world):
    mesh = named_mesh((2, 2), ("dp", "ep"))
    both = DataParallelMeshDims(shard=("dp", "ep"))
    info = FSDPMeshInfo(mesh["dp"], shard_mesh_dim=0, dp_mesh_dims=DataParallelMeshDims(shard="dp"), spmd_mesh=mesh)
    found = {}
    for side in SIDES:
        model = distribute(make(), mesh)
        ups = {id(p) for mlp in model for p in mlp.up.parameters()}
        ENGINES[side](
            model,
            mesh=mesh,
            dp_mesh_dims=both,
            shard_placement_fn=lambda p, ups=ups: ShardPlacementResult(None, info) if id(p) in ups else None,
        )
        found[side] = [(p.placements, p.device_mesh.shape) for p in model.parameters()]
    assert found["ours"] == found[SIDES[-1]]
    assert {shape for _, shape in found["ours"]} == {(4,), (2, 2)}


@distributed(world=4)
def test_a_parameter_that_is_returned_keeps_its_value(rank, world):
    mesh = named_mesh((2, 2), ("dp", "tp"))
    model = shard_mlps(distribute(make(), mesh), fully_shard, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    model[0].forward = lambda x, mlp=model[0]: (x, mlp.up.weight)
    _, weight = model[0](batch(mesh, 0)[1])
    model[1](batch(mesh, 0)[1]).square().mean().backward()
    torch.testing.assert_close(full(weight.detach()), make()[0].up.weight)


@distributed(world=4)
def test_invalid_full_meshes_raise_an_error(rank, world):
    mesh = named_mesh((2, 2), ("dp", "tp"))
    unnamed = init_device_mesh("cpu", (2, 2))
    other = named_mesh((4,), ("dp",))
    dims = DataParallelMeshDims(shard="dp")

    def refuses(kind, words, mesh=mesh, dims=dims, model=None):
        model = distribute(make(), mesh) if model is None else model
        before = list(model.parameters())
        with pytest.raises(kind, match=words):
            fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        assert [*map(id, before)] == [*map(id, model.parameters())]

    refuses(TypeError, "dp_mesh_dims: expected DataParallelMeshDims, got str", dims="dp")
    refuses(ValueError, "mesh must have mesh_dim_names when dp_mesh_dims is provided", mesh=unnamed, model=make())
    refuses(
        ValueError,
        r"dim name 'pp' not found in mesh.mesh_dim_names \('dp', 'tp'\)",
        dims=DataParallelMeshDims(shard="pp"),
    )
    refuses(ValueError, "names an axis twice", dims=DataParallelMeshDims(shard="dp", replicate="dp"))
    refuses(ValueError, r"must be DTensors .* but got a plain tensor for parameter .*\(0.scale\)", model=make())
    refuses(ValueError, r"but got a DTensor on .*\(0.scale\); distribute it", model=distribute(make(), other))
    refuses(ValueError, r"Replicate\(\) on DP shard dim 'tp'", dims=DataParallelMeshDims(shard="tp"))
    if TORCH_HAS_DIMS:
        with pytest.raises(ValueError, match="At least one"):
            DataParallelMeshDims()


@pytest.mark.parametrize("case", ["the later axis", "two axes as one, and another"])
@distributed(world=4)
def test_full_tensors_load_into_their_pieces(rank, world, case):
    shape, names, dims, _ = CASES[case]
    mesh = named_mesh(shape, names)
    model = shard_mlps(distribute(make(), mesh), fully_shard, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    state = {name: torch.randn_like(value) for name, value in make().state_dict().items()}
    model.load_state_dict(state)
    for name, value in state.items():
        assert torch.equal(full(model.get_parameter(name).detach()), value), name


def test_a_later_world_uses_its_own_groups():
    """A mesh of an earlier world compares equal to the current one, but its process groups are destroyed."""
    for _ in range(2):
        with cs.testing.fake(4, mesh={"dp": 2, "tp": 2}) as world:
            mesh = world.mesh
            model = distribute(make(), mesh)
            shard_mlps(model, fully_shard, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
            found = []
            model[0].up.register_forward_pre_hook(lambda m, _, found=found: found.append(m.weight.device_mesh))
            model(batch(mesh, 0)[1]).square().mean().backward()
            assert [one is mesh for one in found] == [True]
