"""Tensor parallelism first, then sharding over the other axis of the mesh."""

from __future__ import annotations

import copy
import inspect
import warnings
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from composable_shard import DataParallelMeshDims, FSDPMeshInfo, ShardPlacementResult
from contract._ways import PROCESSES, REAL, common_fsdp, contract

NAMES = ("dp", "tp")


class MLP(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu()).tanh()  # not the view that tensor-parallel layers return


def mlps():
    return nn.Sequential(MLP(), MLP())


def parallel(t, model, mesh, **options):
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        t.fully_shard(block, mesh=mesh["dp"], **options)
    return t.fully_shard(model, mesh=mesh["dp"], **options)


def batch(t, mesh, step=0):
    """Random numbers that differ only along the data-parallel axis."""
    generator = torch.Generator().manual_seed(100 * step + mesh.get_local_rank("dp"))
    return torch.randn(3, 8, generator=generator)


@contract(world=4)
def test_placements_of_tensor_and_data_parallelism_are_combined(t):
    mesh = t.mesh(2, 2, names=NAMES)
    model = parallel(t, mlps(), mesh)
    up, down = model[0].up.weight, model[0].down.weight
    assert up.device_mesh.mesh_dim_names == NAMES
    assert isinstance(up.placements[0], _StridedShard | Shard)
    assert up.placements[0].dim == 0
    assert up.placements[1] == Shard(0)
    assert down.placements == (Shard(0), Shard(1))
    assert up.shape == (16, 8)
    assert up.to_local().shape == (4, 8)
    assert down.to_local().shape == (4, 8)


@contract(world=4)
@pytest.mark.parametrize(("reshard", "offload"), [(True, False), (False, True)])
def test_a_tensor_parallel_model_trains_like_the_plain_model(t, reshard, offload):
    mesh = t.mesh(2, 2, names=NAMES)
    plain, model = t.pair(mlps)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    parallel(t, model, mesh, reshard_after_forward=reshard, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(batch(t, mesh, step)).sum().backward()
        t.average_grads(plain)
        t.same_params(model, plain)
        for optimizer in optimizers:
            optimizer.step()
    t.same_params(model, plain)


@contract(world=4, ways=REAL)
def test_gradients_are_clipped_by_the_norm_over_both_axes(t):
    mesh = t.mesh(2, 2, names=NAMES)
    plain, model = t.pair(mlps)
    parallel(t, model, mesh)
    for each in (plain, model):
        each(10 * batch(t, mesh)).sum().backward()
    t.average_grads(plain)
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (plain, model)]
    t.same(norms[1], norms[0])
    t.same_params(model, plain)


@contract(world=4)
def test_weights_are_tensor_parallel_dtensors_in_forward(t):
    mesh = t.mesh(2, 2, names=NAMES)
    seen = []
    model = t.build(mlps)
    parallel(t, model, mesh)
    model[0].register_forward_pre_hook(lambda m, a: seen.append(m.up.weight))
    model(batch(t, mesh)).sum().backward()
    (weight,) = seen
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(0),)
    assert weight.device_mesh == mesh["tp"]


@contract(world=4, ways=PROCESSES)
def test_the_full_state_dict_is_gathered_and_loaded(t):
    mesh = t.mesh(2, 2, names=NAMES)
    plain, model = t.pair(mlps)
    parallel(t, model, mesh)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, tensor in plain.state_dict().items():
        t.same(state[name], tensor)
    changed = {name: tensor + 1 for name, tensor in state.items()}
    set_model_state_dict(model, copy.deepcopy(changed), options=StateDictOptions(full_state_dict=True))
    for name, param in model.named_parameters():
        t.same(param, changed[name])


@contract(world=4)
def test_low_precision(t):
    mesh = t.mesh(2, 2, names=NAMES)
    model = t.build(mlps)
    parallel(t, model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    out = model(batch(t, mesh))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@contract(world=4)
def test_a_model_that_is_only_partly_tensor_parallel(t):
    mesh = t.mesh(2, 2, names=NAMES)
    plain, model = t.pair(lambda: nn.Sequential(MLP(), nn.LayerNorm(8), MLP()))
    for place in (0, 2):
        parallelize_module(model[place], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in model:
        t.fully_shard(layer, mesh=mesh["dp"])
    t.fully_shard(model, mesh=mesh["dp"])
    assert model[1].weight.placements == (Shard(0),)
    for each in (plain, model):
        each(batch(t, mesh)).sum().backward()
    t.average_grads(plain)
    t.same_params(model, plain)


@contract(world=4)
def test_replicated_tensor_parallel_parameters_are_sharded(t):
    mesh = t.mesh(2, 2, names=NAMES)
    model = parallelize_module(nn.Linear(8, 8), mesh["tp"], RowwiseParallel())
    t.fully_shard(model, mesh=mesh["dp"])
    assert model.weight.placements == (Shard(0), Shard(1))
    assert model.bias.placements == (Shard(0), Replicate())


@contract(world=4)
def test_the_two_axes_may_shard_different_dims(t):
    mesh = t.mesh(2, 2, names=NAMES)
    plain, model = t.pair(mlps)

    def other(param):
        cut = {p.dim for p in param.placements if isinstance(p, Shard)}
        return Shard(next(dim for dim in range(param.ndim) if dim not in cut))

    parallel(t, model, mesh, shard_placement_fn=other)
    assert model[0].up.weight.placements == (Shard(1), Shard(0))
    assert model[0].down.weight.placements == (Shard(0), Shard(1))
    for each in (plain, model):
        each(batch(t, mesh)).sum().backward()
    t.average_grads(plain)
    t.same_params(model, plain)


@contract(world=4, ways=PROCESSES)
@pytest.mark.parametrize(
    ("shape", "sequence", "checkpointing"),
    [((1, 2, 2), False, False), ((2, 1, 2), True, False), ((1, 2, 2), True, True)],
)
def test_torchs_mlp_stack_on_a_mesh_of_three_axes(t, shape, sequence, checkpointing):
    helpers = common_fsdp()
    mesh = t.mesh(*shape, names=("replicate", "shard", "tp"))
    dim = 8
    plain, model = t.pair(lambda: helpers.MLPStack(dim, with_seq_parallel=sequence))
    data = mesh["replicate", "shard"]
    with mock.patch.object(helpers, "fully_shard", t.fully_shard):
        model.parallelize(mesh["tp"], data, checkpointing, reshard_after_forward=True)
    generator = torch.Generator().manual_seed(t.rank // 2)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (plain, model)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP2 warns about views, which tensor-parallel layers return
        for _ in range(2):
            x = torch.randn(2, 4, dim, generator=generator)
            losses = []
            for each in (plain, model):
                each.zero_grad()
                losses.append(each(x).sum())
                losses[-1].backward()
            t.average_grads(plain)
            if not sequence:
                t.same(losses[1], losses[0])
            t.same_params(model, plain)
            for optimizer in optimizers:
                optimizer.step()


@contract(world=4)
@pytest.mark.parametrize("replicas", [False, True])
def test_parameters_on_the_full_mesh_are_sharded_over_the_named_axes(t, replicas):
    if "dp_mesh_dims" not in inspect.signature(t.fully_shard).parameters:
        return  # torch 2.11's own function
    names = ("dp", "tp") if not replicas else ("rep", "dp")
    mesh = t.mesh(2, 2, names=names)
    plain, model = t.pair(lambda: nn.Linear(8, 8, bias=False))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate(), Replicate()]))
    dims = DataParallelMeshDims(shard="dp", replicate="rep" if replicas else None)
    t.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert model.weight.placements == ((Replicate(), Shard(0)) if replicas else (Shard(0), Replicate()))
    assert model.weight.to_local().shape == (4, 8)
    generator = torch.Generator().manual_seed(t.rank if replicas else t.rank // 2)
    x = torch.randn(2, 8, generator=generator)
    plain(x).square().sum().backward()
    t.average_grads(plain)
    given = DTensor.from_local(x, mesh, [Replicate(), Replicate()], run_check=False)
    out = model(given)
    out.to_local().square().sum().backward()
    t.same(model.weight.grad, plain.weight.grad)


@contract(world=4)
def test_parameters_of_one_call_may_be_sharded_over_different_meshes(t):
    if t.engine == "torch" and not hasattr(_fsdp_common, "ShardPlacementResult"):
        return  # torch 2.11's own function
    mesh = t.mesh(2, 2, names=("replicate", "shard"))
    plain, model = t.pair(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    experts = set(model[2].parameters())
    small = FSDPMeshInfo(mesh=mesh["shard"], shard_mesh_dim=0)
    whole = FSDPMeshInfo(mesh=t.mesh(4), shard_mesh_dim=0)
    t.fully_shard(
        model,
        mesh=t.mesh(4),
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), small if p in experts else whole),
    )
    assert model[0].weight.to_local().shape == (2, 8)
    assert model[2].weight.to_local().shape == (4, 8)
    for each in (plain, model):
        each(t.randn(2, 8)).sum().backward()
    for layer, group in ((plain[0], None), (plain[2], mesh.get_group("shard"))):
        t.average_grads(layer, group)
    t.same(model[0].weight.grad, plain[0].weight.grad)
    t.same(model[2].weight.grad, plain[2].weight.grad)
