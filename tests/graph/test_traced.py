"""`torch.compile` of a sharded model: one graph each way, one collective per group, bitwise identical to eager."""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from _engines import fully_shard, mesh_of
from _models import Stack, shard_blocks, shard_root, vectors
from _pool import distributed

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


class Graphs:
    """A backend that runs graphs unchanged and counts their operators."""

    def __init__(self):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        self.found = []
        self.backend = aot_autograd(
            fw_compiler=functools.partial(self._keep, "forward"),
            bw_compiler=functools.partial(self._keep, "backward"),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _keep(self, direction, graph, _inputs):
        from functorch.compile import make_boxed_func

        targets = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        counts = {name: sum(n for target, n in targets.items() if name in target) for name in COLLECTIVES}
        self.found.append((direction, {name: n for name, n in counts.items() if n}))
        return make_boxed_func(graph.forward)


def compiled(model, graphs):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=graphs.backend)


def make(shard=shard_blocks, blocks=3, **options):
    torch.manual_seed(3)
    model = Stack(blocks)
    models = [model, copy.deepcopy(model)]
    for each in models:
        shard(each, fully_shard, **options)
    return models


def check_step_parity(eager, model, run, rank, steps=3):
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, model)]
    for step in range(steps):
        outputs = []
        for call in (eager, run):
            out = call(*vectors(rank, step))
            out.square().mean().backward()
            outputs.append(out)
        assert torch.equal(*outputs), f"outputs of step {step}"
        for name, param in eager.named_parameters():
            twin = model.get_parameter(name)
            assert isinstance(twin, DTensor), name
            assert isinstance(twin.grad, DTensor), name
            assert torch.equal(param.grad.to_local(), twin.grad.to_local()), f"gradient of {name} in step {step}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.matrix
@distributed(world=2, limit_s=120)
def test_a_sharded_stack_is_one_forward_and_one_backward_graph_and_bitwise_identical_to_eager(rank, world):
    eager, model = make(reshard_after_forward=True)
    graphs = Graphs()
    check_step_parity(eager, model, compiled(model, graphs), rank)
    assert graphs.found == [
        ("forward", {"all_gather_into_tensor": 4}),
        ("backward", {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}),
    ]


@pytest.mark.matrix
@distributed(world=2, limit_s=120)
def test_the_root_is_not_gathered_again_in_the_backward_graph_by_default(rank, world):
    eager, model = make(blocks=2)
    with torch.no_grad():  # the first eager forward finds the root
        model(*vectors(rank, 0))
    graphs = Graphs()
    check_step_parity(eager, model, compiled(model, graphs), rank, steps=1)
    assert graphs.found == [
        ("forward", {"all_gather_into_tensor": 3}),
        ("backward", {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 3}),
    ]


@pytest.mark.matrix
@distributed(world=2, limit_s=120)
def test_groups_that_stay_unsharded_are_not_gathered_again_in_the_backward_graph(rank, world):
    eager, model = make(blocks=2, reshard_after_forward=False)
    graphs = Graphs()
    check_step_parity(eager, model, compiled(model, graphs), rank)
    assert graphs.found == [
        ("forward", {"all_gather_into_tensor": 3}),
        ("backward", {"reduce_scatter_tensor": 3}),
    ]


@distributed(world=1, limit_s=120)
def test_graphs_at_world_size_1_have_no_collectives(rank, world):
    eager, model = make(blocks=2)
    graphs = Graphs()
    check_step_parity(eager, model, compiled(model, graphs), rank)
    assert graphs.found == [("forward", {}), ("backward", {})]


@distributed(world=2, limit_s=120)
def test_the_plain_aot_eager_backend_compiles_a_single_group_too(rank, world):
    eager, model = make(shard=shard_root, blocks=1)
    torch._dynamo.reset()
    check_step_parity(eager, model, torch.compile(model, fullgraph=True, backend="aot_eager"), rank)


@pytest.mark.matrix
@distributed(world=4, limit_s=120)
def test_gradients_on_a_mesh_with_replicas_are_reduced_twice_in_the_graph(rank, world):
    eager, model = make(blocks=1, mesh=mesh_of(2, 2), reshard_after_forward=True)
    graphs = Graphs()
    run = compiled(model, graphs)
    for m in (eager, run):
        m(*vectors(rank, 0)).square().mean().backward()
    for name, param in eager.named_parameters():
        torch.testing.assert_close(param.grad.to_local(), model.get_parameter(name).grad.to_local())
    assert graphs.found[1] == (
        "backward",
        {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "all_reduce": 2},
    )


@pytest.mark.matrix
@distributed(world=2, limit_s=120)
def test_frozen_parameters_are_gathered_and_not_reduced_in_the_graph(rank, world):
    eager, model = make(blocks=2)
    for m in (eager, model):
        m.blocks[0].requires_grad_(False)
        m.blocks[1].up.bias.requires_grad_(False)
    graphs = Graphs()
    run = compiled(model, graphs)
    for m in (eager, run):
        m(*vectors(rank, 0)).square().mean().backward()
    for name, param in eager.named_parameters():
        twin = model.get_parameter(name)
        assert (param.grad is None) == (twin.grad is None), name
        if param.grad is not None:
            assert torch.equal(param.grad.to_local(), twin.grad.to_local()), name
    assert graphs.found[1][1]["reduce_scatter_tensor"] == 2


@pytest.mark.matrix
@distributed(world=2, limit_s=120)
def test_eager_and_compiled_calls_of_one_model_agree(rank, world):
    eager, model = make(blocks=2)
    run = compiled(model, Graphs())
    want = eager(*vectors(rank, 0))
    for call in (model, run, model, run):
        assert torch.equal(call(*vectors(rank, 0)), want)
        call(*vectors(rank, 0)).sum().backward()
    eager_twin = make(blocks=2)[0]
    for _ in range(4):
        eager_twin(*vectors(rank, 0)).sum().backward()
    for name, param in eager_twin.named_parameters():
        assert torch.equal(param.grad.to_local(), model.get_parameter(name).grad.to_local()), name
    with torch.no_grad():
        assert torch.equal(run(*vectors(rank, 0)), want)


def test_the_operator_has_a_schema_in_torch():
    import composable_shard  # noqa: F401

    schema = torch.ops.composable_shard.unshard.default._schema
    assert str(schema) == (
        "composable_shard::unshard(Tensor[] shards, Tensor? tag, str key, int fate, bool again, float? factor, "
        "bool only_sums) -> Tensor[]"
    )


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 5)
        self.b = nn.Linear(5, 5)
        self.c = nn.Linear(5, 3).double()

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))).double()).float()


@pytest.mark.matrix
@distributed(world=2, limit_s=120)
def test_a_group_of_two_dtypes_is_one_operator(rank, world):
    torch.manual_seed(3)
    eager = Mixed()
    model = copy.deepcopy(eager)
    for m in (eager, model):
        fully_shard(m, reshard_after_forward=True)
    graphs = Graphs()
    check_step_parity(eager, model, compiled(model, graphs), rank, steps=2)
    assert graphs.found == [
        ("forward", {"all_gather_into_tensor": 1}),
        ("backward", {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}),
    ]


def own_policy(context, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


@distributed(world=2, limit_s=120)
def test_torch_warns_about_a_context_fn_only_if_a_user_passed_it(rank, world):
    records = []
    logger, handler = logging.getLogger("torch._higher_order_ops.wrap"), logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        _, model = make(reshard_after_forward=False)
        torch._logging._internal.warning_once.cache_clear()
        compiled(model, Graphs())(*vectors(rank, 0)).sum().backward()
        assert records == []
        torch._logging._internal.warning_once.cache_clear()
        contexts = functools.partial(create_selective_checkpoint_contexts, own_policy)
        layer = nn.Linear(4, 4)
        torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=contexts), backend="aot_eager")(
            torch.ones(2, 4)
        ).sum().backward()
        assert ["context_fn is passed" in record.getMessage() for record in records] == [True]
    finally:
        logger.removeHandler(handler)
        torch._dynamo.reset()
