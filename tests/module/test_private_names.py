"""Private names of torch's FSDP2 that public code reads, sets and calls: like torch's, on modules of ours."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, fully_shard, mesh_of
from _models import Stack, shard_blocks, vectors
from _pool import distributed
from composable_shard._fsdp2 import table

# ---- the table


def facades_of(model):
    state = model._get_fsdp_state()
    group = state._fsdp_param_groups[0]
    return {
        table.STATE: state,
        table.CONTEXT: state._state_ctx,
        table.GROUP: group,
        table.PARAM: group.fsdp_params[0],
    }


OURS = {  # helpers that are not names of torch
    "heard", "around", "load", "_names", "_own", "_known", "_hooks", "_initialised", "_comm", "_engine", "_group",
    "_info", "_options", "_of", "_trained", "_is_gathering", "_event", "_replacements", "_seen", "_gone", "_state",
    "_do", "_replace", "_listen", "_note_tool", "_pre_backward", "_post_backward", "_root", "_root_module",
    "_prefetched", "_share", "_set_hooks", "_param", "_index", "_top", "_dtensor", "_context", "_facade", "_title",
}  # fmt: skip


@distributed(world=1)
def test_the_table_lists_the_names_of_the_facades(rank, world):
    model = Stack()
    shard_blocks(model, fully_shard)
    model.unshard()
    for rows, facade in facades_of(model).items():
        listed = [name for row in rows for name in row.names]
        assert len(listed) == len(set(listed))
        for name in listed:
            getattr(facade, name)
        own = {name for each in type(facade).__mro__[:2] for name in vars(each) if not name.startswith("__")}
        inherited = set(vars(FSDPState)) if isinstance(facade, FSDPState) else set()
        refused = {name for name in own & inherited if name not in listed}
        for name in refused:
            with pytest.raises(AttributeError, match=f"has no '{name}'"):
                getattr(facade, name)
        assert (own | set(facade._names)) - OURS - refused - set(listed) == set()


def test_programs_without_private_names_do_not_load_the_facades():
    code = """
import sys
import torch
import composable_shard
model = torch.nn.Linear(2, 2)
composable_shard.fully_shard(model)
model(torch.ones(1, 2)).sum().backward()
loaded = [name for name in sys.modules if name.startswith("composable_shard._fsdp2")]
assert sorted(loaded) == ["composable_shard._fsdp2", "composable_shard._fsdp2.lazy_state"], loaded
assert model._get_fsdp_state()._is_root
assert "composable_shard._fsdp2.state" in sys.modules
torch.distributed.destroy_process_group()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


# ---- torch finds the states


@distributed(world=1)
def test_torch_finds_the_state_of_a_module_and_of_its_copies(rank, world):
    model = Stack()
    shard_blocks(model, fully_shard)
    for each in (model, copy.deepcopy(model)):
        for module in each.modules():
            state = _get_module_state(module)
            if not hasattr(module, "_get_fsdp_state"):
                assert state is None
                continue
            assert state is _get_module_fsdp_state(module) is module._get_fsdp_state()
            assert isinstance(state, FSDPState)
            assert state._modules == (module,)
            assert module in _module_state_mapping
    known = len(_module_state_mapping)
    del each, module, state, model
    gc.collect()
    assert len(_module_state_mapping) < known


# ---- names that code sets


def weights_after_forward(model, rank):
    with torch.no_grad():
        model(vectors(rank, 0)[0])
    return [isinstance(block.up.weight, DTensor) for block in model.blocks]


@pytest.mark.parametrize("engine", ENGINES)
@distributed(world=2)
def test_parameters_stay_unsharded_while_post_forward_mesh_info_is_none(rank, world, engine):
    """Servers for reinforcement learning do this around generation."""
    model = Stack()
    shard_blocks(model, ENGINES[engine])
    model(vectors(rank, 0)[0]).sum().backward()
    groups = [block._get_fsdp_state()._fsdp_param_group for block in model.blocks]
    before = [group.post_forward_mesh_info for group in groups]
    assert None not in before
    for block, group in zip(model.blocks, groups, strict=True):
        block.unshard()
        group.post_forward_mesh_info = None
    assert weights_after_forward(model, rank) == [False] * len(groups)
    for block, group, info in zip(model.blocks, groups, before, strict=True):
        group.post_forward_mesh_info = info
        block.reshard()
    assert weights_after_forward(model, rank) == [True] * len(groups)
    assert [group._reshard_after_forward for group in groups] == [True] * len(groups)


@distributed(world=4)
def test_a_smaller_mesh_can_be_set_again_after_forward(rank, world):
    model = Stack()
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(4), reshard_after_forward=2)
    fully_shard(model, mesh=mesh_of(4))
    model(vectors(rank, 0)[0]).sum().backward()
    group = model.blocks[0]._get_fsdp_state()._fsdp_param_group
    small = group.post_forward_mesh_info
    assert small.shard_mesh_size == 2
    group.post_forward_mesh_info = group.mesh_info
    assert group.post_forward_mesh_info.shard_mesh_size == 4
    group.post_forward_mesh_info = small
    assert group.post_forward_mesh_info.shard_mesh_size == 2
    other = fully_shard(nn.Linear(4, 4), mesh=mesh_of(4))._get_fsdp_state()._fsdp_param_group
    with pytest.raises(ValueError, match=r"post_forward_mesh_info: expected None, the mesh of the group \(4 ranks\)"):
        other.post_forward_mesh_info = small


@pytest.mark.parametrize("engine", ENGINES)
@distributed(world=2)
def test_auto_reshard_after_forward_can_be_set_before_the_first_forward(rank, world, engine):
    model = Stack()
    shard_blocks(model, ENGINES[engine])
    state = model._get_fsdp_state()
    assert state._auto_reshard_after_forward
    loss = model(vectors(rank, 0)[0]).sum()
    assert not isinstance(model.inp.weight, DTensor)
    loss.backward()
    state._auto_reshard_after_forward = False  # reshard the root, too
    loss = model(vectors(rank, 1)[0]).sum()
    assert isinstance(model.inp.weight, DTensor) is (engine == "ours"), "FSDP2 reads it before the first forward only"
    loss.backward()
    assert not state._auto_reshard_after_forward


@pytest.mark.parametrize("engine", ENGINES)
@distributed(world=2)
def test_auto_reshard_after_forward_that_is_set_first_reshards_the_root(rank, world, engine):
    model = Stack()
    shard_blocks(model, ENGINES[engine])
    model._get_fsdp_state()._auto_reshard_after_forward = False
    loss = model(vectors(rank, 0)[0]).sum()
    assert isinstance(model.inp.weight, DTensor)
    loss.backward()


@pytest.mark.parametrize("engine", ENGINES)
@distributed(world=2)
def test_models_can_be_moved_after_the_training_state_was_set_to_idle(rank, world, engine):
    """verl does so before it offloads a model."""
    model = Stack()
    shard_blocks(model, ENGINES[engine])
    model(vectors(rank, 0)[0]).sum().backward()
    for module in model.modules():
        state = _get_module_fsdp_state(module)
        if state is not None:
            state._training_state = TrainingState.IDLE
            state._fsdp_param_group._training_state = TrainingState.IDLE
    model.reshard()
    model.cpu()
    model(vectors(rank, 1)[0]).sum().backward()


@distributed(world=1)
def test_the_training_state_can_be_set_to_idle_only(rank, world):
    state = fully_shard(nn.Linear(2, 2))._get_fsdp_state()
    for each in (state, state._fsdp_param_group):
        with pytest.raises(AttributeError, match=r"_training_state: can only be set to TrainingState\.IDLE"):
            each._training_state = TrainingState.FORWARD
    with pytest.raises(AttributeError, match=r"FSDPParamGroup\.reduce_grads: is read-only; use the module's set_req"):
        state._fsdp_param_group.reduce_grads = False


@distributed(world=1)
def test_torch_finds_the_state_of_a_shallow_copy(rank, world):
    model = fully_shard(nn.Linear(2, 2))
    twin = copy.copy(model)
    state = _get_module_fsdp_state(twin)
    assert state is _get_module_fsdp_state(model)
    assert state._modules == (model, twin)
    assert state._state_ctx is state._state_ctx
    again = copy.deepcopy(twin)
    assert again in _get_module_fsdp_state(again)._modules
    del model
    gc.collect()
    assert state._modules == (twin,)
    state._lazy_init()
    twin(torch.ones(1, 2)).sum().backward()


# ---- names that code calls


def trained_by_calls(model, rank, heads):
    """Accumulate over two microbatches, then call `post_backward` for each group, as code with several heads does."""
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for step in range(2):
        next_token_loss(model, *token_batch(rank, step)).backward()
    model.set_requires_gradient_sync(True)
    states = [module._get_fsdp_state() for module in heads(model)]
    for state in states:
        state._fsdp_param_group.post_backward()
    for state in states:
        state._fsdp_param_group.finalize_backward()
    for module in heads(model):
        module.reshard()


def all_groups(model):
    return [*model.blocks, model]


@distributed(world=2)
def test_groups_can_be_reduced_by_hand_after_microbatches_without_sync(rank, world):
    torch.manual_seed(0)
    plain = Transformer()
    models = {}
    for name, engine in ENGINES.items():
        models[name] = model = copy.deepcopy(plain)
        for block in model.blocks:
            engine(block)
        engine(model)
        for _ in range(2):
            trained_by_calls(model, rank, all_groups)
            gradients = [p.grad.full_tensor() for p in model.parameters()]
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        models[name] = gradients, [p.full_tensor() for p in model.parameters()]
    assert all(
        torch.equal(a, b)
        for mine, other in zip(*models.values(), strict=True)
        for a, b in zip(mine, other, strict=True)
    )
    expected = copy.deepcopy(plain)
    for _ in range(2):
        for step in range(2):
            for each in range(world):
                (next_token_loss(expected, *token_batch(each, step)) / world).backward()
        wanted = [p.grad.clone() for p in expected.parameters()]
        torch.optim.SGD(expected.parameters(), lr=0.1).step()
        expected.zero_grad()
    for mine, want in zip(models["ours"][0], wanted, strict=True):
        torch.testing.assert_close(mine, want)


@distributed(world=2)
def test_a_group_that_is_not_reduced_by_hand_keeps_its_gradients(rank, world):
    torch.manual_seed(0)
    model = Transformer()
    expected = copy.deepcopy(model)
    for each in (model, expected):
        for block in each.blocks:
            fully_shard(block)
        fully_shard(each)
    trained_by_calls(model, rank, lambda model: [model.blocks[0]])
    groups = [module._get_fsdp_state()._fsdp_param_group for module in all_groups(model)]
    waiting = [any(p.unsharded_accumulated_grad is not None for p in group.fsdp_params) for group in groups]
    assert waiting == [False] + [True] * len(model.blocks)
    next_token_loss(model, *token_batch(rank, 2)).backward()  # reduces the others, with what they have accumulated
    for step in range(3):
        next_token_loss(expected, *token_batch(rank, step)).backward()
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad.full_tensor())


@distributed(world=2)
def test_shards_are_also_one_dimensional(rank, world):
    models = {}
    for name, engine in ENGINES.items():
        torch.manual_seed(0)
        models[name] = engine(nn.Linear(4, 5), mesh=mesh_of(2))  # rank 1 has 2 of 5 rows
    mine, theirs = (m._get_fsdp_state()._fsdp_param_group.fsdp_params for m in models.values())
    for ours, torchs in zip(mine, theirs, strict=True):
        assert ours.padded_sharded_param_size == torchs.padded_sharded_param_size
        assert torch.equal(ours._sharded_param_data, torchs._sharded_param_data)
    if rank == 0:
        mine[0]._sharded_param_data.zero_()
        assert not models["ours"].weight.to_local().any()
    else:
        with pytest.raises(RuntimeError, match=r"Inplace update to inference tensor"):
            mine[0]._sharded_param_data.zero_()
    for each in mine:
        each.accumulate_unsharded_grad_if_needed()
        each.to_accumulated_grad_if_needed()


# ---- the phase in `fsdp_pre_all_gather`


class Phased(torch.Tensor):
    """A weight whose `fsdp_pre_all_gather` notes the phase of its group, as MXFP8 weights choose rows or columns."""

    seen: ClassVar[list[tuple[bool, str]]] = []

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, strides=data.stride())

    def __init__(self, data):
        self.data_of = data

    def __tensor_flatten__(self):
        return ["data_of"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Phased(inner["data_of"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(value):
            return torch.utils._pytree.tree_map_only(Phased, lambda each: each.data_of, value)

        out = function(*plain(args), **plain(kwargs or {}))
        if function is torch.ops.aten.copy_.default:
            return args[0]
        keeps = {"detach", "split", "slice", "view", "as_strided", "clone", "new_zeros", "_to_copy", "empty_like"}
        if function._schema.name.partition("::")[2] in keeps:
            return torch.utils._pytree.tree_map_only(torch.Tensor, Phased, out)
        return out

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        owner = module if hasattr(module, "_get_fsdp_state") else nearest(module)
        group = owner._get_fsdp_state()._fsdp_param_group
        Phased.seen.append((bool(group._reshard_after_forward), group._training_state.name))
        return (self.data_of,), ()

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is None:
            return outputs[0], outputs
        return None


def nearest(module):
    """The smallest sharded module known to torch that contains a module."""
    around = [each for each in list(_module_state_mapping) if any(inner is module for inner in each.modules())]
    return min(around, key=lambda each: len(list(each.modules())))


class PhasedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(Phased(torch.randn(4, 4) * 0.3))

    def forward(self, x):
        return x + (x @ self.weight).tanh()


@distributed(world=2)
def test_the_phase_of_a_recomputed_forward_is_forward(rank, world):
    """A recomputation needs the form of weights that a forward multiplies by."""
    Phased.seen = []
    model = nn.Sequential(PhasedLinear(), PhasedLinear())
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    x = vectors(rank, 0)[0][:, :4].requires_grad_()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=True)
    Phased.seen.clear()
    x.sum().backward()
    assert [phase for _, phase in Phased.seen] == ["FORWARD", "PRE_BACKWARD"] * 2


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("own_groups", [True, False])
@distributed(world=2)
def test_the_phase_while_gathering_is_that_of_torch(rank, world, own_groups, reshards):
    seen = {}
    for name, engine in ENGINES.items():
        Phased.seen = []
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(PhasedLinear(), PhasedLinear()), nn.Linear(4, 3))
        for inner in model[0] if own_groups else ():
            engine(inner, reshard_after_forward=reshards)
        engine(model[0], reshard_after_forward=reshards)
        engine(model)
        for step in range(2):
            model(vectors(rank, step)[0][:, :4]).sum().backward()
            model.zero_grad()
        seen[name] = {*Phased.seen}
        assert dist.get_world_size() == 2
    assert seen["ours"] == seen["fsdp2"]
    assert seen["ours"] == {(reshards, "FORWARD")} | ({(True, "PRE_BACKWARD")} if reshards else set())
