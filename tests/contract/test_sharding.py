"""The result of `fully_shard`: the module's parameters and class, and the arguments that it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from _blocks import Transformer, token_batch
from contract._ways import contract


def mlp(dim=8, hidden=12, **options):
    return nn.Sequential(nn.Linear(dim, hidden, **options), nn.ReLU(), nn.Linear(hidden, dim, **options))


def raised(kind, words):
    """Check that the body raises an error of that type with these words in its message."""
    return pytest.raises(kind, match=words)


@contract(world=4)
def test_each_rank_has_its_chunk_of_dim_0_even_if_rows_are_uneven_or_few(t):
    plain, model = t.pair(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(1, 9)))
    t.fully_shard(model, mesh=t.mesh())
    for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, nn.Parameter)
        assert isinstance(param, DTensor)
        assert param.placements == (Shard(0),)
        assert param.shape == whole.shape
        assert param.stride() == whole.stride()
        chunks = whole.detach().chunk(4)
        own = chunks[t.rank] if t.rank < len(chunks) else whole[:0]
        assert param.to_local().shape == own.shape
        assert torch.equal(param.to_local(), own)


@contract(world=4)
def test_a_2d_mesh_replicates_over_the_first_axis_and_shards_over_the_second(t):
    model = t.fully_shard(mlp(), mesh=t.mesh(2, 2))
    for param in model.parameters():
        assert param.placements == (Replicate(), Shard(0))
        assert param.device_mesh == t.mesh(2, 2)
        assert param.to_local().shape[0] == param.shape[0] // 2


@contract()
def test_the_outer_call_shards_only_parameters_that_no_inner_call_has_sharded(t):
    model = mlp()
    t.fully_shard(model[0], mesh=t.mesh())
    inner = list(model[0].parameters())
    assert not isinstance(model[2].weight, DTensor)
    t.fully_shard(model, mesh=t.mesh())
    assert next(iter(model[0].parameters())) is inner[0]
    assert all(isinstance(param, DTensor) for param in model.parameters())


@contract()
def test_names_requires_grad_and_class_attributes_are_kept(t):
    model = mlp()
    model[0].bias.requires_grad_(False)
    names = [name for name, _ in model.named_parameters()]
    modules = [name for name, _ in model.named_modules()]
    t.fully_shard(model, mesh=t.mesh())
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.named_modules()] == modules
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]


@contract()
def test_buffers_are_not_sharded(t):
    model = t.fully_shard(nn.BatchNorm1d(4), mesh=t.mesh())
    assert not any(isinstance(buffer, DTensor) for buffer in model.buffers())
    assert model.running_mean.shape == (4,)


@contract()
def test_the_class_is_a_subclass_of_fsdp_module_and_of_the_original_class(t):
    model = nn.Sequential(Transformer(layers=1), nn.Identity())
    kind = type(model[0])
    assert t.fully_shard(model[0], mesh=t.mesh()) is model[0]
    assert isinstance(model[0], FSDPModule)
    assert isinstance(model[0], kind)
    assert type(model[0]).__name__ == "FSDPTransformer"
    assert not isinstance(model, FSDPModule)
    other = t.fully_shard(Transformer(layers=1), mesh=t.mesh())
    assert type(other) is type(model[0])


@contract()
def test_a_slice_of_a_sharded_container_is_a_plain_one_of_the_same_layers(t):
    model = t.fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), mesh=t.mesh())
    part = model[:2]
    assert type(part) is nn.Sequential
    assert not isinstance(part, FSDPModule)
    assert list(part.children()) == list(model.children())[:2]


@contract()
def test_a_list_of_modules_is_returned_and_each_is_an_fsdp_module(t):
    model = mlp()
    modules = [model[0], model[2]]
    assert t.fully_shard(modules, mesh=t.mesh()) is modules
    assert all(isinstance(module, FSDPModule) for module in modules)
    assert not isinstance(model, FSDPModule)


@contract()
def test_a_mesh_of_three_axes_is_refused(t):
    mesh = init_device_mesh("cpu", (1, 1, t.world), mesh_dim_names=("a", "b", "c"))
    with raised(ValueError, "fully_shard expects a 1D or 2D DeviceMesh"):
        t.fully_shard(mlp(), mesh=mesh)


@contract(world=4)
def test_a_mesh_of_two_axes_without_names_is_refused(t):
    mesh = init_device_mesh("cpu", (2, 2))
    with raised(AssertionError, "Please init the 2D mesh for HSDP with mesh_dim_names specified"):
        t.fully_shard(mlp(), mesh=mesh)


@contract()
def test_containers_without_a_forward_are_refused(t):
    words = "fully_shard does not support containers that do not implement forward"
    for container in (nn.ModuleList([nn.Linear(3, 3)]), nn.ModuleDict({"a": nn.Linear(3, 3)})):
        with raised(ValueError, words):
            t.fully_shard(container, mesh=t.mesh())


@contract()
def test_a_container_with_a_forward_is_sharded(t):
    class Chain(nn.ModuleList):
        def forward(self, x):
            for layer in self:
                x = layer(x)
            return x

    plain, model = t.pair(lambda: Chain([nn.Linear(4, 4), nn.Linear(4, 4)]))
    t.fully_shard(model, mesh=t.mesh())
    t.train(plain, model, lambda step: t.randn(2, 4, step=step), steps=1)


@contract()
def test_a_second_call_on_the_same_module_is_refused(t):
    model = t.fully_shard(nn.Linear(4, 4), mesh=t.mesh())
    with raised(AssertionError, "can only be applied to a module once"):
        t.fully_shard(model, mesh=t.mesh())


@contract()
def test_a_scalar_parameter_is_refused_by_name(t):
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with raised(ValueError, "scale"):
        t.fully_shard(model, mesh=t.mesh())


@contract()
def test_a_parameter_that_is_not_contiguous_is_refused(t):
    model = nn.Linear(4, 6)
    model.weight = nn.Parameter(torch.randn(4, 6).t())
    with raised(NotImplementedError, "non-contiguous parameters"):
        t.fully_shard(model, mesh=t.mesh())


@contract(world=4)
def test_reshard_after_forward_must_be_a_bool_or_a_factor_of_the_number_of_ranks(t):
    for value, words in ((3, "factor of 4"), (8, "factor of 4"), (0, "factor of 4"), ("yes", "bool or an int")):
        with raised(ValueError, words):
            t.fully_shard(nn.Linear(4, 4), mesh=t.mesh(), reshard_after_forward=value)


@contract()
def test_a_placement_function_chooses_the_dim_to_shard(t):
    plain = t.build(lambda: nn.Linear(6, 4))
    model = copy.deepcopy(plain)
    t.fully_shard(model, mesh=t.mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim > 1 else None)
    assert model.weight.placements == (Shard(1),)
    assert model.bias.placements == (Shard(0),)
    assert torch.equal(model.weight.to_local(), plain.weight.detach().chunk(2, 1)[t.rank])
    assert model.weight.to_local().is_contiguous()
    t.train(plain, model, lambda step: t.randn(3, 6, step=step))


@contract()
def test_a_negative_dim_counts_from_the_last(t):
    model = t.fully_shard(nn.Linear(6, 4, bias=False), mesh=t.mesh(), shard_placement_fn=lambda p: Shard(-1))
    assert model.weight.placements == (Shard(1),)


@contract()
def test_sharding_a_dim_other_than_0_must_divide_it(t):
    with raised(NotImplementedError, "uneven sharding"):
        t.fully_shard(nn.Linear(5, 4), mesh=t.mesh(), shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)


@contract()
def test_a_placement_function_that_returns_something_else_is_refused(t):
    with raised((ValueError, AssertionError), "[Ss]hard"):
        t.fully_shard(nn.Linear(4, 4), mesh=t.mesh(), shard_placement_fn=lambda p: Replicate())


@contract()
def test_ignored_parameters_stay_plain_and_get_local_gradients(t):
    plain, model = t.pair(mlp)
    ignored = set(model[2].parameters())
    t.fully_shard(model, mesh=t.mesh(), ignored_params=ignored)
    assert not isinstance(model[2].weight, DTensor)
    assert isinstance(model[0].weight, DTensor)
    x = t.randn(3, 8)
    for each in (plain, model):
        each(x).sum().backward()
    t.same(model[2].weight.grad, plain[2].weight.grad)
    t.average_grads(plain)
    t.same(model[0].weight.grad, plain[0].weight.grad)


@contract()
def test_the_model_may_move_to_another_dtype_after_sharding(t):
    plain, model = t.pair(mlp)
    for layer in (model[0], model[2], model):
        t.fully_shard(layer, mesh=t.mesh())
    plain.double()
    model.double()
    for param in model.parameters():
        assert param.dtype == torch.float64
        assert isinstance(param, DTensor)
    t.train(plain, model, lambda step: t.randn(3, 8, step=step).double())


@contract()
def test_the_mesh_may_come_from_a_process_group(t):
    plain, model = t.pair(mlp)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    t.fully_shard(model, mesh=mesh)
    t.train(plain, model, lambda step: t.randn(3, 8, step=step))


@contract(world=4)
def test_a_mesh_of_two_axes_may_come_from_process_groups(t):
    plain, model = t.pair(mlp)
    mesh = t.mesh(2, 2)
    groups = [mesh.get_group(0), mesh.get_group(1)]
    made = DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=("dp_replicate", "dp_shard"))
    t.fully_shard(model, mesh=made)
    assert model[0].weight.placements == (Replicate(), Shard(0))
    t.train(plain, model, lambda step: t.randn(3, 8, step=step))


@contract()
def test_inner_modules_may_not_run_before_the_root(t):
    model = mlp()
    t.fully_shard(model[0], mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    model[0](t.randn(2, 8))
    with raised(RuntimeError, "root module first"):
        model(t.randn(2, 8))


@contract()
def test_a_list_of_modules_cannot_be_the_root(t):
    model = mlp()
    t.fully_shard([model[0], model[2]], mesh=t.mesh())
    with raised(RuntimeError, "requires a single root module"):
        model(t.randn(2, 8))


@contract()
def test_only_sharded_modules_have_a_state(t):
    model = mlp()
    t.fully_shard(model[0], mesh=t.mesh())
    assert fully_shard.state(model[0]) is not None
    assert model[0]._get_fsdp_state() is not None
    assert not isinstance(model[2], FSDPModule)


@contract()
def test_shards_have_separate_memory(t):
    model = t.fully_shard(mlp(), mesh=t.mesh())
    x = t.randn(2, 8)
    before = {name: p.to_local().untyped_storage().data_ptr() for name, p in model.named_parameters()}
    model(x).sum().backward()
    assert {name: p.to_local().untyped_storage().data_ptr() for name, p in model.named_parameters()} == before


@contract()
def test_local_tensors_replaced_before_the_first_forward_are_used(t):
    model = t.fully_shard(mlp(), mesh=t.mesh())
    for param in model.parameters():
        param._local_tensor = torch.full_like(param._local_tensor, 0.5)
    x = torch.ones(1, 8)
    t.same(model(x), torch.full((1, 8), 12 * 4.5 * 0.5 + 0.5))


@contract()
def test_a_sharded_transformer_keeps_all_names(t):
    plain, model = t.pair(lambda: Transformer(tied=True))
    for block in model.blocks:
        t.fully_shard(block, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert model.head.weight is model.embed.weight
    t.parity(plain, model)
    tokens = token_batch(t.rank, 0)[0]
    t.same(model(tokens), plain(tokens))


@contract()
def test_a_parameter_that_is_already_a_dtensor_on_the_mesh_is_refused(t):
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), t.mesh(), [Shard(0)]))
    with pytest.raises((ValueError, AssertionError, NotImplementedError, RuntimeError)):
        t.fully_shard(model, mesh=t.mesh())
