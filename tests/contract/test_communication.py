"""Collectives: their number, division factors, sums, and custom communication."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from contract import _ways
from contract._ways import REAL, contract

c10d = torch.ops.c10d


layers = functools.partial(_ways.layers, 2)


def counts(body):
    """Collectives of a call, by operator."""
    with warnings.catch_warnings(), CommDebugMode() as mode:
        warnings.simplefilter("ignore")  # the mode's own hooks return views
        body()
    return {op: n for op, n in mode.get_comm_counts().items() if n}


@contract(ways=("processes", "fake"), transport="torch")
@pytest.mark.parametrize("reshard", [True, False])
def test_torchs_tools_count_a_gather_and_a_reduction_per_group(t, reshard):
    model = t.shard(t.build(layers), reshard_after_forward=reshard)
    out = []
    found = counts(lambda: out.append(model(t.randn(2, 8)).sum()))
    assert found == {c10d._allgather_base_: 2}
    found = counts(lambda: out[0].backward())
    assert found == {c10d._reduce_scatter_base_: 2} | ({c10d._allgather_base_: 2} if reshard else {})


@contract(world=4, ways=("processes", "fake"), transport="torch")
def test_torchs_tools_count_an_all_reduce_per_group_with_replicas(t):
    model = t.shard(t.build(layers), mesh=t.mesh(2, 2))
    found = counts(lambda: model(t.randn(2, 8)).sum().backward())
    assert found == {c10d._allgather_base_: 4, c10d._reduce_scatter_base_: 2, c10d.allreduce_: 2}


@contract(ways=("processes", "fake"), transport="torch")
def test_microbatches_without_sync_reduce_nothing(t):
    model = t.shard(t.build(layers))
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        found = counts(lambda i=micro: model(t.randn(2, 8, step=i)).sum().backward())
        assert found.get(c10d._reduce_scatter_base_, 0) == (2 if micro == 2 else 0)


@contract(ways=("processes", "fake"), transport="torch")
def test_parameters_that_stay_after_backward_are_not_gathered_again(t):
    model = t.shard(t.build(layers), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    for step in range(3):
        found = counts(lambda i=step: model(t.randn(2, 8, step=i)).sum().backward())
        assert found.get(c10d._allgather_base_, 0) == (0 if step else 2)


@contract(ways=("processes", "fake"), transport="torch")
def test_backward_gathers_again_after_an_explicit_reshard(t):
    model = t.shard(t.build(layers), reshard_after_forward=False)
    out = []
    assert counts(lambda: out.append(model(t.randn(2, 8)).sum())) == {c10d._allgather_base_: 2}
    for layer in model:
        layer.reshard()
    assert counts(lambda: out[0].backward()) == {c10d._allgather_base_: 2, c10d._reduce_scatter_base_: 2}


@contract(ways=("processes", "fake"), transport="torch")
@pytest.mark.parametrize("recurse", [True, False])
def test_set_reshard_after_forward_changes_what_backward_gathers(t, recurse):
    model = t.shard(t.build(layers), reshard_after_forward=True)
    model.set_reshard_after_forward(False, recurse=recurse)
    out = []
    assert counts(lambda: out.append(model(t.randn(2, 8)).sum())) == {c10d._allgather_base_: 2}
    found = counts(lambda: out[0].backward())
    assert found.get(c10d._allgather_base_, 0) == (0 if recurse else 2)


@contract(world=1, ways=("processes", "fake"), transport="torch")
def test_one_rank_communicates_nothing(t):
    model = t.shard(t.build(layers))
    assert counts(lambda: model(t.randn(2, 8)).sum().backward()) == {}


@contract(world=4, ways=("threads",))
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_gradients_may_be_divided_by_another_factor(t, shape):
    plain, model = t.pair(layers)
    t.shard(model, mesh=t.mesh(*shape), reshard_after_forward=True)
    for module in (model, *model):
        module.set_gradient_divide_factor(2 * t.world)
        module.set_force_sum_reduction_for_comms(True)
    for each in (plain, model):
        each(t.randn(2, 8)).sum().backward()
    t.average_grads(plain)
    for param in plain.parameters():
        param.grad.div_(2)
    t.same_params(model, plain)


@contract(world=4, ways=REAL)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_reductions_may_use_sums_only(t, shape):
    plain, model = t.pair(layers)
    t.shard(model, mesh=t.mesh(*shape))
    for module in (model, *model):
        module.set_force_sum_reduction_for_comms(True)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


class Gathers:
    """An all-gather that counts its calls and allocates its own memory."""

    def __init__(self):
        self.allocated, self.called = 0, 0

    def allocate(self, size, *, dtype, device):
        self.allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.called += 1
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatters(Gathers):
    """A reduce-scatter that counts its calls."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.called += 1
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return scatter(output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op)


@contract()
def test_custom_gathers_and_reductions(t):
    plain, model = t.pair(layers)
    t.shard(model)
    gathers, scatters = Gathers(), Scatters()
    for layer in model:
        layer.set_custom_all_gather(gathers)
        layer.set_custom_reduce_scatter(scatters)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))
    assert gathers.called == 8
    assert scatters.called == 4
    assert gathers.allocated >= 4
    assert scatters.allocated >= 4


@contract()
def test_the_all_reduce_hook_changes_the_gradient(t):
    plain, model = t.pair(layers)
    t.shard(model)
    for layer in model:
        layer.set_all_reduce_hook(lambda output: output.mul_(3))
    for each in (plain, model):
        each(t.randn(2, 8)).sum().backward()
    t.average_grads(plain)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        t.same(a.grad, 3 * b.grad)


@contract()
def test_reductions_can_use_a_separate_process_group(t):
    plain, model = t.pair(layers)
    t.shard(model)
    if not hasattr(model, "set_separate_reduce_scatter_group"):
        return
    model.set_separate_reduce_scatter_group()
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_a_wrong_number_of_reductions_in_flight_is_refused(t):
    plain, model = t.pair(layers)
    t.shard(model)
    if not hasattr(model, "set_reduce_scatter_max_input_buffers"):
        return
    for value, kind in ((True, TypeError), (1.5, TypeError), (0, ValueError)):
        with pytest.raises(kind, match="max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(value)
    model.set_reduce_scatter_max_input_buffers(2)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))
