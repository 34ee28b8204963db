"""The methods of a sharded module that control gradients, each compared with torch's FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.fsdp as fsdp
import torch.nn as nn

import composable_shard
from _engines import fully_shard, mesh_of
from _models import shard_blocks
from _pool import distributed
from _sides import assert_same, backward, both, call, run_both
from _stepping import engine_of, resident, train_step, twins
from composable_shard import errors, last_record, testing


@distributed(world=4)
def test_without_all_reduce_gradients_accumulate_until_it_is_on(rank, world):
    def train(model, step):
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            backward(model, rank, 3 * step + micro)

    run_both(both(mesh=mesh_of(2, 2)), train)


@distributed(world=4)
def test_accumulated_shards_are_separate_from_grad_and_cleared_with_it(rank, world):
    model, _ = twins(mesh=mesh_of(2, 2))
    twin, _ = twins(mesh=mesh_of(2, 2))
    for clear in (lambda: model.zero_grad(), lambda: model.zero_grad(set_to_none=False)):
        model.set_requires_all_reduce(False)
        backward(model, rank, 0)
        assert all(
            p.grad is not None and not p.grad.to_local().any() for p in model.parameters() if p.to_local().numel()
        )
        clear()
        model.set_requires_all_reduce(True)
        backward(model, rank, 1)
        twin.zero_grad()
        backward(twin, rank, 1)
        for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name
        model.zero_grad()


@distributed(world=4)
def test_without_all_reduce_a_group_that_is_used_twice_loses_nothing(rank, world):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(torch.tanh(self.lin(x)))

    torch.manual_seed(3)
    plain = Twice()
    model = copy.deepcopy(plain)
    fully_shard(model.lin, mesh=mesh_of(2, 2))
    fully_shard(model, mesh=mesh_of(2, 2))
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(micro))
        model(x).sum().backward()
        plain(x).sum().backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), p.grad)


@distributed(world=2)
def test_the_divide_factor_replaces_the_number_of_ranks_on_gloo_as_well(rank, world):
    model, _ = twins()
    twin, _ = twins()
    for module in model.modules():
        if isinstance(module, composable_shard.FSDPModule):
            module.set_gradient_divide_factor(5.0)
    for each in (model, twin):
        backward(each, rank, 0)
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local() * 5.0, other.grad.to_local() * world, msg=name)


@distributed(world=2)
def test_torchs_fsdp2_has_no_divide_factor_on_gloo(rank, world):
    model = both()["fsdp2"]
    model.set_gradient_divide_factor(5.0)
    with pytest.raises(RuntimeError, match=r"PREMUL_SUM|ReduceOp"):
        backward(model, rank, 0)


@distributed(world=2)
def test_a_changed_divide_factor_takes_effect_in_the_next_backward(rank, world):
    model, _ = twins()
    seen = []
    for factor in (2.0, 4.0):
        for module in model.modules():
            if isinstance(module, composable_shard.FSDPModule):
                module.set_gradient_divide_factor(factor)
        backward(model, rank, 0)
        seen.append([p.grad.to_local() for p in model.parameters()])
        model.zero_grad()
    for first, second in zip(*seen, strict=True):
        assert torch.equal(first, second * 2)


@distributed(world=4)
def test_sums_only_give_the_same_mean(rank, world):
    def shard(model, engine, **options):
        shard_blocks(model, engine, **options)
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    run_both(both(shard=shard, mesh=mesh_of(2, 2)), lambda model, step: backward(model, rank, step))


@distributed(world=4)
def test_float16_gradients_neither_overflow_nor_vanish(rank, world):
    policy = composable_shard.MixedPrecisionPolicy(reduce_dtype=torch.float16)

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return (self.w * x).sum()

    for scale in (3e4, 1.2e-7):  # near the limits of float16: the sum of four overflows, a quarter underflows
        models = both(Large, lambda model, engine: engine(model, mp_policy=policy))
        for model in models.values():
            model(torch.full((8,), scale)).backward()
        assert_same(models["ours"], models["fsdp2"])
        got = models["ours"].w.grad.full_tensor()
        torch.testing.assert_close(got, torch.full((8,), scale).half().float(), rtol=0.5, atol=0)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, use_b=True):
        x = self.a(x)
        return self.b(x) if use_b else self.c(x)


def shard_branches(model, engine, **options):
    for child in (model.a, model.b, model.c):
        engine(child, **options)
    engine(model, **options)


@distributed(world=2)
def test_modules_that_only_some_ranks_use_train_exactly_on_request(rank, world):
    """torch's FSDP2 would reduce b of one rank with c of the other: both come first, and they have the same size."""
    plain = Branches()
    model = copy.deepcopy(plain)
    shard_branches(model, fully_shard, reshard_after_forward=False)
    model.set_reduce_scatter_unused_params(True)
    sharded = dict(model.named_parameters())  # a module that is unsharded and not used stays unsharded
    x = [torch.randn(3, 4, generator=torch.Generator().manual_seed(each)) for each in range(world)]
    for step in range(2):
        for module in (model.a, model.b, model.c):  # the user gathers all modules on all ranks
            module.unshard()
        model(x[rank], use_b=rank == step).sum().backward()
        ((plain(x[step]).sum() + plain(x[1 - step], use_b=False).sum()) / 2).backward()
        for name, param in plain.named_parameters():
            torch.testing.assert_close(sharded[name].grad.full_tensor(), param.grad)


class TwoHeads(nn.Module):
    """A chain of modules with two heads. The head that comes first in backward is the one that a loss may leave out."""

    def __init__(self, uses):
        super().__init__()
        self.a, self.y, self.z = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 6)
        self.head, self.other = nn.Linear(6, 3), nn.Linear(6, 7)
        self.uses = uses

    def forward(self, x):
        x = self.a(x)
        for _ in range(self.uses):
            x = self.y(x).relu()
        x = self.z(x)
        return self.head(x), self.other(x)


def two_losses(world, engine, uses=1, depth=None, whole=False):
    """Train with a loss that leaves out the other head on all ranks except rank 0."""
    torch.manual_seed(5)
    plain = TwoHeads(uses)
    model = copy.deepcopy(plain)
    for child in model.children() if whole else (model.y, model.z, model.other):
        engine(child, mesh=world.mesh, reshard_after_forward=True)
    engine(model, mesh=world.mesh)
    call(model, "set_reduce_scatter_unused_params", True)
    if depth is not None:
        model.set_prefetch_policy(composable_shard.PrefetchPolicy.depth(depth))

    def loss_of(model, rank):
        head, other = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)))
        return head.square().sum() + (other.square().sum() if rank == 0 else 0.0)

    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
        loss_of(model, world.rank).backward()
        (sum(loss_of(plain, rank) for rank in range(world.size)) / world.size).backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)
    return str(last_record(model)), composable_shard.make_plan(model).actions() == last_record(model).actions


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_backward_communicates_in_the_same_order_on_ranks_with_different_losses(depth, uses, whole):
    one, other = testing.spmd(2)(two_losses, fully_shard, uses, depth, whole)
    assert one == other
    assert one[1], "reductions at the end are planned there"


def test_fsdp2_mixes_collectives_of_ranks_with_different_losses():
    with pytest.raises(errors.CollectiveMismatchError):
        testing.spmd(2)(two_losses, fsdp.fully_shard)


@distributed(world=2)
def test_an_unused_gathered_module_gets_zeros_only_on_request(rank, world):
    models = both(Branches, shard_branches)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for wanted in (False, True, False):
        for gathered in (True, False):
            for model in models.values():
                supported = call(model, "set_reduce_scatter_unused_params", wanted)
                model.zero_grad()
                if gathered:
                    model.c.unshard()
                model(x).sum().backward()
                model.c.reshard()
            mine, theirs = (model.c.weight.grad for model in models.values())
            assert (mine is not None) is (wanted and gathered)
            if gathered and supported:  # `supported` is that of torch's model, the last one in the loop
                assert (theirs is not None) is wanted


@distributed(world=2)
def test_a_backward_that_is_not_the_last_sets_all_gradients(rank, world):
    def train(model, step):
        model.set_is_last_backward(False)
        backward(model, rank, 2 * step)
        model.set_is_last_backward(True)
        backward(model, rank, 2 * step + 1)

    run_both(both(), train)
    model, _ = twins()
    twin, _ = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    model.set_is_last_backward(False)
    for each in (model, twin):
        backward(each, rank, 0)
    assert all(param.grad is not None for param in model.parameters())
    assert not engine_of(model)._actions.reductions.in_flight
    for optimizer in optimizers:
        optimizer.step()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local()), name


@distributed(world=2)
def test_reductions_in_flight_are_bounded(rank, world):
    for bound in (1, 2, 4):
        model, _ = twins()
        model.set_reduce_scatter_max_input_buffers(bound)
        train_step(model)
        flying = most = 0
        for action in last_record(model).actions:
            flying += {"REDUCE": 1, "REDUCED": -1}.get(action.kind, 0)
            most = max(most, flying)
        assert most == bound


@distributed(world=2)
def test_finalize_backward_ends_a_backward(rank, world):
    model, _ = twins()
    twin, _ = twins()
    assert model.finalize_backward() is None, "nothing has run"
    model.set_manual_backward_finalization(True)
    for async_op in (False, True):
        for each in (model, twin):
            each.set_requires_gradient_sync(False)
            backward(each, rank, 0)
            each.set_requires_gradient_sync(True)
            backward(each, rank, 1)
        handle = model.finalize_backward(async_op=async_op)
        assert (handle is not None) is async_op
        if handle is not None:
            handle.wait()
        for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name
        assert resident(model) == []
        for each in (model, twin):
            each.zero_grad()
