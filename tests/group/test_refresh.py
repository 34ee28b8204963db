"""When the compute copies of a node are refreshed (`outer_sharding`), and what is refused."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.placement_types import Shard

import composable_shard as cs
from _engines import fully_shard, mesh_of
from _pool import distributed
from composable_shard import MixedPrecisionPolicy, Ragged, ShardPlacementResult
from composable_shard._faults.ledger import Ledger
from composable_shard._plan.schedule import Kind
from composable_shard.errors import RankMismatchError, ShardConfigUnsupportedError, ShardConfigValueError

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


def same_gradients(model, plain, losses):
    """Compare with the mean of the losses of all ranks, given by a function of the rank."""
    (sum(losses(each) for each in range(4)) / 4).backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("clears", [False, True])
@distributed(world=4)
def test_after_a_failed_backward_parameters_are_new(rank, world, clears):
    """It discards the gradients of an earlier microbatch, so none are pending."""
    model, plain = sharded()
    model.set_requires_gradient_sync(False)
    model(x_of(rank)).sum().backward()
    handle = model[1].register_forward_hook(
        lambda module, args, out: out.register_hook(lambda gradient: 1 / 0) and None
    )
    out = model(x_of(rank))
    handle.remove()
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    model.set_requires_gradient_sync(True)
    if clears:
        model.zero_grad()
    foreach_add(model, 0.5)
    add(plain, 0.5)
    same_output(model, plain, x_of(rank))


@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@pytest.mark.parametrize("to_none", [True, False])
@distributed(world=4)
def test_a_dropped_microbatch_is_not_pending(rank, world, setter, to_none):
    """For example after an overflow: `zero_grad`, and the parameters of a snapshot."""
    model, plain = sharded(dim=6)  # some shards of other layers would have no rows
    getattr(model, setter)(False)
    model(x_of(rank, dim=6)).sum().backward()
    model.zero_grad(set_to_none=to_none)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().data.add_(0.5)
    add(plain, 0.5)
    same_output(model, plain, x_of(rank, dim=6))


@pytest.mark.parametrize("place", ["waiting", "pending", "evaluated"])
@distributed(world=4)
def test_weights_that_were_swapped_while_unsharded_by_hand_do_not_stay(rank, world, place):
    model, plain = sharded()
    losses = []
    if place == "pending":
        model.set_requires_gradient_sync(False)
        model(x_of(rank)).square().sum().backward()
        model.set_requires_gradient_sync(True)
        losses.append(0)
    else:
        loss = model(x_of(rank, 1)).square().sum()
    foreach_add(model, 1.0)
    with torch.set_grad_enabled(place != "evaluated"):
        model[1].unshard()
        assert torch.allclose(model[1].weight, plain[1].weight + 1.0)
        model[1].reshard()
    foreach_add(model, -1.0)
    if place == "pending":
        loss = model(x_of(rank, 1)).square().sum()
    loss.backward()
    same_gradients(model, plain, lambda each: sum(plain(x_of(each, step)).square().sum() for step in [*losses, 1]))


@distributed(world=4)
def test_an_interrupted_evaluation_with_swapped_weights_does_not_stay(rank, world):
    model, plain = sharded()
    loss = model(x_of(rank)).square().sum()

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model[2].register_forward_pre_hook(interrupt)
    foreach_add(model, 1.0)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(x_of(rank))
    handle.remove()
    foreach_add(model, -1.0)
    loss.backward()
    same_gradients(model, plain, lambda each: plain(x_of(each)).square().sum())


@distributed(world=4)
def test_a_frozen_teacher_that_follows_by_foreach_functions_is_new_in_each_microbatch(rank, world):
    model, plain = sharded()
    for each in (model, plain):
        each[0].requires_grad_(False)
    teacher = list(model[0].parameters())
    model.set_requires_gradient_sync(False)
    for step in range(3):
        same_output(model, plain, x_of(rank, step))
        model(x_of(rank, step)).sum().backward()
        with torch.no_grad():
            torch._foreach_mul_(teacher, 1.5)
            for param in plain[0].parameters():
                param.mul_(1.5)


@distributed(world=4)
def test_backward_rounds_the_values_of_its_forward_after_an_evaluation(rank, world):
    """With parameters that are sent in fewer bits."""
    results = []
    for evaluates in (False, True):
        model, _ = sharded(dim=16)
        model.set_comm_policy(cs.CommPolicy(gather="int8"))
        loss = model(x_of(rank, dim=16)).square().sum()
        if evaluates:
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 2.0)
                model(x_of(rank, dim=16))
                torch._foreach_mul_(list(model.parameters()), 0.5)
        loss.backward()
        results.append([param.grad.full_tensor() for param in model.parameters()])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@distributed(world=4)
def test_a_group_that_an_optimizer_steps_between_microbatches_of_others_is_new(rank, world):
    torch.manual_seed(4)
    plain = Choice(8)
    model = copy.deepcopy(plain)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh_of(2, 2), **OUTER)
    fully_shard(model, mesh=mesh_of(2, 2), **OUTER)
    same_output(lambda x: model(x, (0, 1)), lambda x: plain(x, (0, 1)), x_of(rank))
    model.set_requires_gradient_sync(False)
    model(x_of(rank), (0,)).sum().backward()
    for each in (model, plain):
        for param in each.layers[1].parameters():
            param.grad = torch.ones_like(param)
        torch.optim.SGD(each.layers[1].parameters(), lr=0.5, foreach=True).step()
    same_output(lambda x: model(x, (0, 1)), lambda x: plain(x, (0, 1)), x_of(rank))


@distributed(world=4)
def test_groups_that_stay_unsharded_after_backward_refresh_nothing(rank, world):
    model, plain = sharded()
    model.set_reshard_after_backward(False)
    for step in range(3):
        model(x_of(rank, step)).sum().backward()
        if step:
            assert refreshes(model) == 0
    foreach_add(model, 0.5)
    add(plain, 0.5)
    for layer in model:
        layer.reshard()
    same_output(model, plain, x_of(rank))


class Choice(nn.Module):
    """Each rank uses some of the layers."""

    def __init__(self, dim):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, chosen):
        for index in chosen:
            x = self.layers[index](x)
        return x


@pytest.mark.parametrize("dim", [8, 3])
@pytest.mark.parametrize("setter", ["", "set_requires_gradient_sync", "set_requires_all_reduce"])
@distributed(world=4)
def test_a_parameter_has_a_gradient_if_any_rank_of_any_node_uses_it(rank, world, dim, setter):
    torch.manual_seed(2)
    plain = Choice(dim)
    model = fully_shard(copy.deepcopy(plain), mesh=mesh_of(2, 2), **OUTER)  # one group
    used = {0: (0, 1), 1: (0,), 2: (0,), 3: (0, 2)}
    for micro in range(2 if setter else 1):
        if setter:
            getattr(model, setter)(micro == 1)
        model(x_of(rank, micro, dim), used[rank]).sum().backward()
    steps = range(2 if setter else 1)
    (sum(plain(x_of(each, step, dim), used[each]).sum() for each in used for step in steps) / world).backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None) == ("layers.3" in name), name
        if other.grad is not None:
            assert torch.allclose(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5), name


@distributed(world=4)
def test_an_all_reduce_hook_gets_the_gradients_of_this_rank(rank, world):
    model, plain = sharded(layers=2, dim=6)
    seen = []

    def double(reduced):
        seen.append(reduced.numel())
        reduced.mul_(2.0)

    for layer in model:
        layer.set_all_reduce_hook(double)
    model(x_of(rank, dim=6)).square().sum().backward()
    (sum(plain(x_of(each, dim=6)).square().sum() for each in range(world)) / world).backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(param.grad.full_tensor(), 2.0 * other.grad, rtol=1e-4, atol=1e-5)
    # Of three rows of a node, each rank's chunk has two; that of the bias, too.
    assert seen == [2 * 6 + 2] * 2


@distributed(world=4)
def test_ranks_compare_refreshes_before_they_are_issued(rank, world):
    notes, real = [], Ledger.issue

    def issue(ledger, note):
        notes.append(note)
        real(ledger, note)

    model, _ = sharded()
    with mock.patch.object(Ledger, "issue", issue):
        model(x_of(rank)).sum().backward()
    refreshed = [note for note in notes if note.startswith("refresh")]
    assert [note.split(" of ")[0] for note in refreshed] == ["refresh 0", "refresh 1", "refresh 2"]
    assert "288 bytes of float32" in refreshed[0]


@distributed(world=4)
def test_nodes_with_different_models_get_an_error_before_they_communicate(rank, world):
    torch.manual_seed(0)
    node = rank // 2
    model = nn.Sequential(nn.Linear(4, 4 + 4 * node), nn.Linear(4 + 4 * node, 4))
    fully_shard(model, mesh=mesh_of(2, 2), **OUTER)
    with pytest.raises(RankMismatchError, match="different plans"):
        model(torch.ones(1, 4))


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
