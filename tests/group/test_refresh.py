"""When the compute copies of a node are refreshed (`outer_sharding`), and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.placement_types import Shard

import composable_shard as cs
from _engines import fully_shard, mesh_of
from _pool import distributed
from composable_shard import MixedPrecisionPolicy, Ragged, ShardPlacementResult
from composable_shard._plan.schedule import Kind
from composable_shard.errors import ShardConfigUnsupportedError, ShardConfigValueError

OUTER = {"outer_sharding": "optimizer"}


def sharded(layers=3, dim=8, mesh=(2, 2), **options):
    torch.manual_seed(5)
    model = nn.Sequential(*[nn.Linear(dim, dim) for _ in range(layers)])
    plain = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer, mesh=mesh_of(*mesh), **OUTER, **options)
    return fully_shard(model, mesh=mesh_of(*mesh), **OUTER, **options), plain


def x_of(rank, step=0, dim=8):
    return torch.randn(3, dim, generator=torch.Generator().manual_seed(100 * step + rank))


def refreshes(model):
    return sum(action.kind is Kind.REFRESH for action in cs.last_record(model).actions)


def foreach_add(model, value):
    """Change all shards without increasing a version."""
    locals_ = [param.to_local().detach() for param in model.parameters()]
    before = [param._version for param in model.parameters()] + [local._version for local in locals_]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), value)
    assert before == [param._version for param in model.parameters()] + [local._version for local in locals_]


def add(plain, value):
    with torch.no_grad():
        for param in plain.parameters():
            param.add_(value)


def same_output(model, plain, x):
    assert torch.allclose(model(x), plain(x), atol=1e-6)


@distributed(world=4)
def test_all_refreshes_come_first_and_the_record_is_the_plan(rank, world):
    model, _ = sharded()
    for step in range(2):
        model(x_of(rank, step)).sum().backward()
    record, plan = cs.last_record(model), cs.make_plan(model)
    assert [str(action) for action in record.actions[:4]] == ["REFRESH 0", "REFRESH 1", "REFRESH 2", "UNSHARD 0"]
    assert record.actions == plan.actions()
    assert cs.drift(model) == ()
    assert cs.stats(model)["step/refreshes"] == 3
    assert plan.group("1").copy_bytes == (8 * 8 + 8) * 4 // 2
    assert cs.stats(model)["copies/bytes"] == sum(group.copy_bytes for group in plan.groups)


@distributed(world=4)
def test_copies_have_the_dtype_of_compute(rank, world):
    model, plain = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    model(x_of(rank)).sum().backward()
    assert cs.stats(model)["copies/bytes"] == sum(param.numel() for param in plain.parameters()) * 2 / 2
    assert all(param.dtype == param.grad.dtype == torch.float32 for param in model.parameters())


@distributed(world=4)
def test_changes_by_foreach_functions_are_seen_by_the_next_forward(rank, world):
    model, plain = sharded()
    same_output(model, plain, x_of(rank))  # in grad mode, and no backward follows
    for value in (0.5, -0.25):
        foreach_add(model, value)
        add(plain, value)
        same_output(model, plain, x_of(rank))
        with torch.no_grad():
            same_output(model, plain, x_of(rank))


@distributed(world=4)
def test_weights_that_were_swapped_for_an_evaluation_do_not_stay(rank, world):
    """In an evaluation between forward and backward, as well as between microbatches."""
    model, plain = sharded()
    model.set_requires_gradient_sync(False)
    for step in range(3):
        if step == 2:
            model.set_requires_gradient_sync(True)
        loss = model(x_of(rank, step)).square().sum()
        foreach_add(model, 1.0)
        with torch.no_grad():
            model(x_of(rank, step))
        foreach_add(model, -1.0)
        loss.backward()
    (sum(plain(x_of(each, step)).square().sum() for each in range(world) for step in range(3)) / world).backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@distributed(world=4)
def test_later_microbatches_refresh_nothing(rank, world, setter):
    model, _ = sharded()
    seen = []
    for step in range(6):
        getattr(model, setter)(step % 3 == 2)
        model(x_of(rank, step)).sum().backward()
        seen.append(refreshes(model))
        assert cs.drift(model) == () or step % 3 != 2
        if step % 3 == 2:
            with torch.no_grad():
                for param in model.parameters():
                    param.grad = None
    assert seen == [3, 0, 0, 3, 0, 0]


@distributed(world=4)
def test_a_change_between_microbatches_is_seen(rank, world):
    model, plain = sharded()
    model.set_requires_gradient_sync(False)
    model(x_of(rank)).sum().backward()
    with torch.no_grad():
        for each in (model, plain):
            for param in each.parameters():
                param.mul_(2.0)
    same_output(model, plain, x_of(rank))
    assert refreshes(model) == 3


@distributed(world=4)
def test_backward_computes_with_the_values_of_its_forward(rank, world):
    """With a mesh of one axis, backward would gather the changed parameters, so such a change is an error there."""
    model, plain = sharded()
    loss = model(x_of(rank)).square().sum()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    loss.backward()
    (sum(plain(x_of(each)).square().sum() for each in range(world)) / world).backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5)


@distributed(world=4)
def test_parameters_that_are_loaded_or_unsharded_by_hand_are_new(rank, world):
    model, plain = sharded()
    same_output(model, plain, x_of(rank))
    model.load_state_dict({name: value * 3.0 for name, value in model.state_dict().items()})
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(3.0)
    model[1].unshard()
    assert torch.equal(model[1].weight, plain[1].weight)
    model[1].reshard()
    same_output(model, plain, x_of(rank))


@distributed(world=4)
def test_a_failed_backward_leaves_nothing_pending(rank, world):
    model, plain = sharded()
    model.set_requires_gradient_sync(False)
    model(x_of(rank)).sum().backward()
    out = model(x_of(rank))
    out.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    model.set_requires_gradient_sync(True)
    foreach_add(model, 0.5)
    add(plain, 0.5)
    model.zero_grad()
    model(x_of(rank)).sum().backward()
    model.zero_grad()
    same_output(model, plain, x_of(rank))


@distributed(world=2)
def test_what_does_not_combine_is_an_error(rank, world):
    linear, flat, two = nn.Linear(4, 4), mesh_of(2), mesh_of(2, 1)
    with pytest.raises(ShardConfigValueError, match="outer_sharding: needs an outer axis"):
        fully_shard(linear, mesh=flat, **OUTER)
    with pytest.raises(ShardConfigValueError, match="outer_sharding: needs an outer axis"):
        fully_shard(linear, **OUTER)
    with pytest.raises(ShardConfigValueError, match="outer_sharding='all': expected \"optimizer\""):
        fully_shard(linear, mesh=two, outer_sharding="all")
    with pytest.raises(ShardConfigUnsupportedError, match="parameter weight is placed by Ragged"):
        fully_shard(linear, mesh=two, shard_placement_fn=lambda param: Ragged(2), **OUTER)
    linear.weight.fsdp_pre_all_gather = lambda *args: None
    with pytest.raises(ShardConfigUnsupportedError, match="with fsdp_pre_all_gather"):
        fully_shard(linear, mesh=two, **OUTER)
    del linear.weight.fsdp_pre_all_gather
    late = fully_shard(nn.Linear(4, 4), mesh=two, **OUTER)
    for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        setattr(late.weight._local_tensor, name, lambda *args: None)
    with pytest.raises(ShardConfigUnsupportedError, match="parameter weight: defines fsdp_pre_all_gather"):
        late(torch.ones(1, 4))
    with pytest.raises(ShardConfigUnsupportedError, match=r"uneven sharding on dim 1.*world size: 2"):
        fully_shard(nn.Linear(3, 4), mesh=two, shard_placement_fn=lambda param: Shard(param.ndim - 1), **OUTER)
    assert type(linear) is nn.Linear


@distributed(world=4)
def test_parameters_on_a_mesh_of_one_axis_are_sharded_as_usual(rank, world):
    """For example experts: a `ShardPlacementResult` with a 1D mesh."""
    from composable_shard import FSDPMeshInfo

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    plain = copy.deepcopy(model)
    info = FSDPMeshInfo(mesh_of(4), shard_mesh_dim=0)
    first = model[0].weight
    fully_shard(
        model,
        mesh=mesh_of(2, 2),
        shard_placement_fn=lambda param: ShardPlacementResult(Shard(0), info) if param is first else None,
        **OUTER,
    )
    assert model[0].weight.placements == (Shard(0),)
    assert len(model[1].weight.placements) == 2
    model(x_of(rank)).square().sum().backward()
    (sum(plain(x_of(each)).square().sum() for each in range(world)) / world).backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5)
