"""Optimizer state that is sharded over both axes of a 2D mesh (HFSDP), compared with the unsharded model and HSDP."""

from __future__ import annotations

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, fully_shard, mesh_of, named_mesh
from _models import Stack, TiedText, shard_blocks, shard_nested, tokens
from _parity import Case, check_parity
from _pool import distributed, more, simulated
from composable_shard import CommPolicy, DataParallelMeshDims, MixedPrecisionPolicy, PoolPolicy, PrefetchPolicy
from composable_shard._comm.mesh import MeshInfo

OUTER = {"outer_sharding": "optimizer"}
GROUPINGS = {"blocks": shard_blocks, "nested": shard_nested}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharding(shape, grouping="blocks", **options):
    """Shard with `outer_sharding`; FSDP2, which does not have it, with HSDP."""

    def shard(model, engine):
        own = {} if engine is ENGINES["fsdp2"] else OUTER
        GROUPINGS[grouping](model, engine, mesh=mesh_of(*shape), **own, **options)

    return shard


def case_of(shape, grouping="blocks", options=None, **case):
    shard = sharding(shape, grouping, **(options or {}))
    return Case(**{"model": Stack, "shard": shard, "mesh": shape, "outer": True, **case})


def accumulate(run):
    run.set_sync(False)
    run.backward(run.loss(0))
    run.backward(run.loss(1))
    run.set_sync(True)
    loss = run.loss(2)
    run.backward(loss)
    return loss


def accumulate_pieces(run):
    """Reduce within the node in each microbatch, and between nodes in the last one."""
    run.model.set_requires_all_reduce(False)
    run.backward(run.loss(0))
    run.backward(run.loss(1))
    run.model.set_requires_all_reduce(True)
    loss = run.loss(2)
    run.backward(loss)
    return loss


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", more("adamw-foreach")])
@pytest.mark.parametrize("grouping", ["blocks", "nested"])
@distributed(world=4)
def test_two_nodes_of_two_ranks_match_the_reference_and_hsdp(rank, world, grouping, optimizer):
    check_parity(case_of((2, 2), grouping, optimizer=optimizer), rank, world)


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [(2, 3), (3, 2)], ids=str)
@distributed(world=6)
def test_six_ranks_match_the_reference_and_hsdp(rank, world, shape):
    check_parity(case_of(shape, optimizer="adamw"), rank, world)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
@distributed(world=2)
def test_a_mesh_axis_of_size_one_matches_the_reference(rank, world, shape):
    check_parity(case_of(shape, optimizer="adamw"), rank, world)


@distributed(world=4)
def test_accumulated_gradients_match_the_reference_and_hsdp(rank, world):
    check_parity(case_of((2, 2), train=accumulate), rank, world)


@distributed(world=4)
def test_gradients_that_were_reduced_within_the_node_match_hsdp(rank, world):
    check_parity(case_of((2, 2), train=accumulate_pieces, reference=False), rank, world)


@distributed(world=4)
def test_clipping_uses_the_norm_over_both_axes(rank, world):
    check_parity(
        case_of((2, 2), clip=0.05, atol_reference=1e-6, why="the norm is summed in another order"), rank, world
    )


@distributed(world=4)
def test_weights_may_stay_after_forward(rank, world):
    check_parity(case_of((2, 2), options={"reshard_after_forward": False}), rank, world)


@pytest.mark.matrix
@distributed(world=8)
def test_few_ranks_of_a_node_may_keep_pieces_between_forward_and_backward(rank, world):
    check_parity(case_of((2, 4), options={"reshard_after_forward": 2}, fsdp2=False), rank, world)


@pytest.mark.parametrize("policy", [HALF, MixedPrecisionPolicy(param_dtype=torch.bfloat16)], ids=["fp32", "bf16"])
@distributed(world=4)
def test_mixed_precision_matches_hsdp(rank, world, policy):
    case = case_of((2, 2), options={"mp_policy": policy}, reference=False, optimizer="adamw", atol_fsdp2=2e-2)
    check_parity(case, rank, world)


def pair(make, seed=3):
    torch.manual_seed(seed)
    model = make()
    return model, copy.deepcopy(model)


def shard_all(model, mesh=None, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh or mesh_of(2, 2), **OUTER, **options)
    return fully_shard(model, mesh=mesh or mesh_of(2, 2), **OUTER, **options)


def same_training(model, plain, rank, world, steps=3, tolerance=1e-6):
    """Train both with the mean loss of all ranks; compare losses, gradients and parameters, and an evaluation after."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    for step in range(steps):
        loss = next_token_loss(model, *token_batch(rank, step))
        loss.backward()
        losses = [next_token_loss(plain, *token_batch(each, step)) for each in range(world)]
        (sum(losses) / world).backward()
        assert torch.allclose(loss, losses[rank], atol=tolerance)
        same(model, plain, tolerance, grads=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same(model, plain, tolerance)
    with torch.no_grad():
        batch = token_batch(rank, steps)
        assert torch.allclose(next_token_loss(model, *batch), next_token_loss(plain, *batch), atol=tolerance)
    return optimizers


def same(model, plain, tolerance, grads=False):
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        ours, theirs = (param.grad, other.grad) if grads else (param, other)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
            gap = (whole - theirs).abs().max()
            assert gap <= tolerance * 100 if not grads else gap <= tolerance, (name, gap)


@distributed(world=4)
def test_parameters_and_optimizer_state_are_sharded_over_all_ranks(rank, world):
    model, plain = pair(functools.partial(nn.Linear, 8, 16))
    fully_shard(model, mesh=mesh_of(2, 2), **OUTER)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.placements == (_StridedShard(0, split_factor=2), Shard(0))
        assert param.device_mesh.mesh_dim_names == ("replicate", "shard")
        for tensor in (param, param.grad, optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]):
            assert tensor.to_local().numel() * world == whole.numel()
    copies = cs.stats(model)["copies/bytes"]
    assert copies == sum(param.nbytes for param in plain.parameters()) / 2


@distributed(world=4)
def test_frozen_parameters_match_the_unsharded_model(rank, world):
    model, plain = pair(Transformer)
    for each in (model, plain):
        for name, param in each.named_parameters():
            param.requires_grad_("norm" not in name and "blocks.0" not in name)
    same_training(shard_all(model), plain, rank, world)


@distributed(world=4)
def test_parameters_may_be_thawed_between_steps(rank, world):
    model, plain = pair(Transformer)
    for each in (model, plain):
        each.blocks[0].requires_grad_(False)
    shard_all(model)
    same_training(model, plain, rank, world, steps=1)
    for each in (model, plain):
        each.blocks[0].requires_grad_(True)
        each.blocks[1].requires_grad_(False)
    same_training(model, plain, rank, world, steps=2)


@distributed(world=4)
def test_tied_parameters_match_the_reference(rank, world):
    def shard(model, engine):
        own = {} if engine is ENGINES["fsdp2"] else OUTER
        engine(model, mesh=mesh_of(2, 2), **own)

    check_parity(Case(model=TiedText, shard=shard, batch=tokens, mesh=(2, 2), outer=True), rank, world)


@distributed(world=4)
def test_a_dim_other_than_0_is_split_over_all_ranks(rank, world):
    model, plain = pair(functools.partial(nn.Linear, 8, 3, bias=False))
    fully_shard(model, mesh=mesh_of(2, 2), shard_placement_fn=lambda param: Shard(1), **OUTER)
    assert model.weight.placements == (_StridedShard(1, split_factor=2), Shard(1))
    assert model.weight.to_local().shape == (3, 2)
    assert torch.equal(model.weight.full_tensor(), plain.weight)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    for each in range(world):
        plain(torch.randn(4, 8, generator=torch.Generator().manual_seed(each))).square().sum().backward()
    assert torch.allclose(model.weight.grad.full_tensor(), plain.weight.grad / world)


@pytest.mark.parametrize(
    "policy",
    [CommPolicy(refresh="bf16"), CommPolicy(replicas="bf16"), CommPolicy("bf16", "bf16", "bf16", refresh="bf16")],
    ids=str,
)
@distributed(world=4)
def test_communication_in_fewer_bits_trains_close_to_the_unsharded_model(rank, world, policy):
    model, plain = pair(Transformer)
    shard_all(model)
    model.set_comm_policy(policy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(3):
        loss = next_token_loss(model, *token_batch(rank, step))
        loss.backward()
        losses = [next_token_loss(plain, *token_batch(each, step)) for each in range(world)]
        (sum(losses) / world).backward()
        assert torch.allclose(loss, losses[rank], rtol=1e-2)
        for (name, param), other in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            gap = (param.grad.full_tensor() - other[1].grad).norm() / other[1].grad.norm().clamp(min=1e-3)
            assert 0 < gap < 0.03 or "norm" in name, (name, gap)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@distributed(world=4)
def test_weights_that_are_refreshed_in_fewer_bits_are_equal_on_all_ranks(rank, world):
    model, plain = pair(functools.partial(nn.Linear, 16, 8, bias=False))
    fully_shard(model, mesh=mesh_of(2, 2), **OUTER)
    model.set_comm_policy(CommPolicy(refresh="bf16"))
    with torch.no_grad():
        seen = model(torch.eye(16))
    assert torch.equal(seen, plain.weight.to(torch.bfloat16).float().T)


@distributed(world=4)
def test_a_budget_holds_and_training_is_exact(rank, world):
    model, plain = pair(functools.partial(Transformer, layers=4))
    shard_all(model)
    same_training(model, plain, rank, world, steps=2)
    least = cs.make_plan(model).peak_bytes
    model.set_pool_policy(PoolPolicy(budget=int(least * 0.8)))
    model.set_prefetch_policy(PrefetchPolicy.depth(2))
    same_training(model, plain, rank, world, steps=3)
    assert cs.last_record(model).peak_bytes <= int(least * 0.8)


@distributed(world=4)
def test_tensor_parallelism_inside_matches_the_unsharded_model(rank, world):
    """Two nodes of one rank, each of which is a pair of tensor-parallel ranks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False)

        def forward(self, x):
            return self.down(self.up(x).relu())

    mesh = named_mesh((2, 1, 2), ("outer", "inner", "tp"))
    model, plain = pair(MLP)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["outer", "inner"], **OUTER)
    assert model.up.weight.placements == (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2), Shard(0))
    node = rank // 2
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    for step in range(3):
        inputs = [torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + each)) for each in range(2)]
        model(inputs[node]).square().mean().backward()
        (sum(plain(each).square().mean() for each in inputs) / 2).backward()
        same(model, plain, 1e-6, grads=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same(model, plain, 1e-6)


@distributed(world=4)
def test_the_strategy_shards_over_all_ranks(rank, world):
    model, plain = pair(Transformer)
    cs.shard_auto(model, strategy="hfsdp", replicas=2)
    same_training(model, plain, rank, world)
    assert sum(p.to_local().numel() for p in model.parameters()) < sum(p.numel() for p in plain.parameters()) / 3


@pytest.mark.parametrize(
    ("shape", "names", "dims"),
    [
        ((2, 2), ("outer", "inner"), DataParallelMeshDims(shard="inner", replicate="outer")),
        ((2, 2), ("inner", "outer"), DataParallelMeshDims(shard="inner", replicate="outer")),
        ((2, 1, 2), ("outer", "inner", "tp"), DataParallelMeshDims(shard="inner", replicate="outer")),
        ((2, 1, 2), ("outer", "one", "two"), DataParallelMeshDims(shard=("one", "two"), replicate="outer")),
    ],
    ids=["two axes", "inner axis first", "tensor-parallel", "two inner axes"],
)
@distributed(world=4)
def test_dp_mesh_dims_name_the_axes(rank, world, shape, names, dims):
    mesh = named_mesh(shape, names)
    model, plain = pair(functools.partial(nn.Linear, 6, 7))  # uneven
    for name, param in list(model.named_parameters()):
        placements = [Shard(0) if axis == "tp" else Replicate() for axis in names]
        whole = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
        setattr(model, name, whole)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **OUTER)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), other)
        assert param.to_local().numel() < other.numel() / 2
    node = mesh.get_local_rank("outer")
    inner = dims.shard if isinstance(dims.shard, str) else dims.shard[-1]
    number = 2 * node + (mesh.get_local_rank(inner) if "tp" not in names else 0)
    inputs = [torch.randn(3, 6, generator=torch.Generator().manual_seed(each)) for each in range(4)]
    used = [0, 2] if "tp" in names else range(4)
    x = DTensor.from_local(inputs[number], mesh, [Replicate()] * mesh.ndim, run_check=False)
    out = model(x)
    out.redistribute(placements=[Replicate()] * mesh.ndim).to_local().square().sum().backward()
    (sum(plain(inputs[each]).square().sum() for each in used) / len(used)).backward()
    same(model, plain, 1e-4, grads=True)


@simulated(world=4)
def test_uneven_parameters_are_gathered_in_full_on_ranks_that_are_threads(rank, world):
    for rows in (1, 3, 5, 7, 8):
        torch.manual_seed(rows)
        plain = nn.Linear(3, rows)
        model = fully_shard(copy.deepcopy(plain), mesh=mesh_of(2, 2), **OUTER)
        model(torch.ones(2, 3)).sum().backward()
        plain(torch.ones(2, 3)).sum().backward()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.full_tensor(), other)
            assert torch.equal(param.grad.full_tensor(), other.grad)


@pytest.mark.matrix
def test_offloaded_shards_are_refreshed_from_the_host():
    """The CPU is both the device and the host: shards are copied before they are sent, and gradients after."""

    @simulated(world=4)
    def train(rank, world):
        model, plain = pair(Transformer)
        shard_all(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        same_training(model, plain, rank, world)

    with mock.patch.object(MeshInfo, "offloads", property(lambda info: True)):
        train()
