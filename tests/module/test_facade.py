"""Attributes that torch's own code and tools read from a sharded module are equal for ours and for torch's FSDP2."""

from __future__ import annotations

import copy
import functools
import gc
import subprocess
import sys
import types
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

import composable_shard
from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, fully_shard, mesh_of
from _models import Coder, Stack, shard_blocks, vectors
from _pool import distributed, more
from _stepping import assert_at_rest

# ---- the facade, attribute by attribute


def shard_transformer(model, engine, **options):
    for block in model.blocks:
        engine(block, **options)
    engine([model.norm, model.head], **options)
    return engine(model, **options)


def twins(shard=shard_transformer, make=Transformer, **options):
    torch.manual_seed(3)
    plain = make()
    mesh = options.pop("mesh", mesh_of(dist.get_world_size()))
    return {
        name: shard(copy.deepcopy(plain), functools.partial(engine, mesh=mesh), **options)
        for name, engine in ENGINES.items()
    }


def shard_stack(model, engine, **options):
    shard_blocks(model, engine, **options)
    return model


def same_mesh_info(mine, theirs):
    if theirs is None:
        return mine is None
    facts = [(type(it), it.mesh.mesh.tolist(), it.shard_mesh_dim, it.replicate_mesh_dim) for it in (mine, theirs)]
    return facts[0] == facts[1]


def same_name(model, other, mine, theirs):
    """Whether two modules have the same name in two copies of a model."""
    names = {id(m): n for n, m in model.named_modules()}, {id(m): n for n, m in other.named_modules()}
    return names[0][id(mine)] == names[1][id(theirs)]


@distributed(world=1)
def test_modules_are_marked_as_managed_like_torchs(rank, world):
    """Libraries check the mark of a module to find out whether all ranks must run it."""
    models = twins()
    everything = [name for name, _ in Transformer().named_modules()]
    marked = {
        name: [n for n, m in model.named_modules() if m._is_fsdp_managed_module] for name, model in models.items()
    }
    assert marked == dict.fromkeys(models, everything)
    outer = nn.Sequential(fully_shard(nn.Linear(3, 3), mesh=mesh_of(1)), nn.Linear(3, 3))
    assert [hasattr(each, "_is_fsdp_managed_module") for each in (outer, *outer)] == [False, True, False]
    assert copy.deepcopy(outer)[0]._is_fsdp_managed_module


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.factor = 2.0

    def forward(self, x):
        return self.factor * self.inner(x) if self._is_fsdp_managed_module else x


@distributed(world=1)
def test_compiled_code_of_a_marked_module_sees_changed_attributes(rank, world):
    torch.manual_seed(0)
    plain = Scaled()
    plain._is_fsdp_managed_module = True
    model = Scaled()
    model.load_state_dict(plain.state_dict())
    fully_shard(model, mesh=mesh_of(1))
    torch.compiler.reset()  # earlier tests of this process count towards the limit of recompilations
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3)
    for factor in (2.0, 3.0, 2.0):
        plain.factor = model.factor = factor
        torch.testing.assert_close(compiled(x), plain(x))


PARAM = [
    "_param_fqn",
    "orig_dtype",
    "param_dtype",
    "reduce_dtype",
    "sharded_size",
    "contiguous_sharded_stride",
    "_orig_size",
    "_contiguous_orig_stride",
    "is_dtensor",
    "fsdp_placement",
    "offload_to_cpu",
    "pin_memory",
    "device",
    "sharded_state",
    "_sharding_spec",
    "_spmd_mesh",
    "_spmd_placements",
    "shard_mesh",
    "mp_policy",
]
GROUP = [
    "device",
    "_training_state",
    "_sharded_state",
    "is_sharded",
    "is_unsharded",
    "is_sharded_post_forward",
    "_module_fqn",
    "mp_policy",
    "_reshard_after_forward",
    "_use_post_forward_mesh",
    "_is_hsdp",
    "_param_group_index",
    "_num_param_groups",
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "gradient_divide_factor",
    "unshard_async_op",
    "unshard_in_backward",
    "force_sum_reduction_for_comms",
    "_all_reduce_hook",
    "_all_reduce_hook_stream",
    "_all_gather_result",
]
STATE = ["_is_root", "_device", "_mp_policy", "_auto_reshard_after_forward", "_training_state"]
CONTEXT = ["iter_forward_root", "post_backward_final_callback_queued", "is_last_backward", "post_optim_event"]
SINCE_LAZY_INIT = {"orig_dtype", "param_dtype", "reduce_dtype", "_orig_dtype", "_reduce_dtype"}


def compare(mine, theirs, names):
    """Compare the attributes of ours and of torch's."""
    for name in names:
        if not hasattr(theirs, name) and name not in vars(type(theirs)):
            assert name in SINCE_LAZY_INIT or not torch.__version__.startswith("2.13"), f"torch has no {name}"
            continue
        assert getattr(mine, name) == getattr(theirs, name), name
    assert repr(mine) == repr(theirs) or "object at" in repr(theirs)


def groups_of(state):
    """The groups of a state. Before torch 2.12, a state has at most one group."""
    found = getattr(state, "_fsdp_param_groups", None)
    return found if found is not None else [g for g in [state._fsdp_param_group] if g is not None]


def compare_models(ours, theirs):
    for (name, mine), other in zip(ours.named_modules(), theirs.modules(), strict=True):
        if not isinstance(other, fsdp.FSDPModule):
            assert fully_shard.state(mine) is None
            continue
        state, torchs = mine._get_fsdp_state(), other._get_fsdp_state()
        assert state is fully_shard.state(mine) is fsdp2.state(mine), name
        compare(state, torchs, STATE)
        compare(state._state_ctx, torchs._state_ctx, CONTEXT)
        assert len(state._modules) == len(torchs._modules)
        assert all(same_name(ours, theirs, a, b) for a, b in zip(state._modules, torchs._modules, strict=True))
        theirs_groups = groups_of(torchs)
        assert len(state._fsdp_param_groups) == len(theirs_groups)
        for group, group2 in zip(state._fsdp_param_groups, theirs_groups, strict=True):
            assert state._fsdp_param_group is group
            compare(group, group2, GROUP)
            assert same_mesh_info(group.mesh_info, group2.mesh_info)
            assert same_mesh_info(group.post_forward_mesh_info, group2.post_forward_mesh_info)
            assert group.modules == state._modules
            for param, param2 in zip(group.fsdp_params, group2.fsdp_params, strict=True):
                compare(param, param2, PARAM)
                assert torch.equal(param.sharded_param.to_local(), param2.sharded_param.to_local())
                assert torch.equal(param._sharded_local_tensor, param2._sharded_local_tensor)
                compare_holders(ours, theirs, param._module_info, param2._module_info)
                assert (param.unsharded_accumulated_grad is None) == (param2.unsharded_accumulated_grad is None)
                if group2.is_unsharded:
                    assert torch.equal(param.unsharded_param, param2.unsharded_param)
                    assert torch.equal(param._unsharded_param, param2._unsharded_param)
                else:
                    assert not hasattr(param, "unsharded_param")


def compare_holders(ours, theirs, mine, other):
    assert type(mine) is type(other)
    assert (mine.param_name, mine.shared_param_names) == (other.param_name, other.shared_param_names)
    pairs = zip([mine.module, *mine.shared_modules], [other.module, *other.shared_modules], strict=True)
    assert all(same_name(ours, theirs, a, b) for a, b in pairs)


CASES = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


@pytest.mark.parametrize("case", CASES)
@distributed(world=2)
def test_attributes_are_equal_to_torchs_during_training(rank, world, case):
    models = twins(**CASES[case])
    order = list(models.values())
    compare_models(*order)
    for step in range(2):
        losses = [next_token_loss(model, *token_batch(rank, step)) for model in order]
        compare_models(*order)
        for loss in losses:
            loss.backward()
        compare_models(*order)


@distributed(world=2)
def test_attributes_are_equal_to_torchs_for_tied_and_unsharded_parameters(rank, world):
    def shard(model, engine):
        engine(model.blocks[0])
        return engine(model)

    models = twins(shard, functools.partial(Transformer, tied=True))
    order = list(models.values())
    for model in order:
        next_token_loss(model, *token_batch(rank, 0)).backward()
        model.unshard()
    compare_models(*order)
    for model in order:
        model.reshard()
        for group in (model._get_fsdp_state()._fsdp_param_group, model.blocks[0]._get_fsdp_state()._fsdp_param_group):
            group.unshard()
            group.wait_for_unshard()
    compare_models(*order)
    for model in order:
        model._get_fsdp_state()._fsdp_param_group.reshard()
    compare_models(*order)


@distributed(world=4)
def test_attributes_are_equal_to_torchs_with_replicas_and_a_smaller_mesh(rank, world):
    for options in ({"mesh": mesh_of(2, 2)}, {"mesh": mesh_of(4), "reshard_after_forward": 2}):
        order = list(twins(shard_stack, Stack, **options).values())
        compare_models(*order)
        for model in order:
            model.unshard()
            model.reshard()
        compare_models(*order)


@distributed(world=2)
def test_the_states_during_forward_are_equal_to_torchs(rank, world):
    models = twins(shard_stack, Stack)
    seen = {name: [] for name in models}
    for name, model in models.items():

        def note(event, model=model, seen=seen[name]):
            for at in (model, *model.blocks):
                group = at._get_fsdp_state()._fsdp_param_group
                seen.append((event, group._training_state, group.is_unsharded))

        handles = [block.up.register_forward_hook(lambda *_, n=note: n("forward")) for block in model.blocks]
        x = vectors(rank, 0)[0].requires_grad_()
        out = model(x)
        out.register_hook(lambda grad, n=note: n("backward"))
        out.sum().backward()
        for handle in handles:
            handle.remove()
    assert [s for s in seen["ours"] if s[0] == "forward"] == [s for s in seen["fsdp2"] if s[0] == "forward"]


@distributed(world=1)
def test_setting_a_read_only_attribute_raises_an_error_with_the_method_to_use(rank, world):
    model = shard_stack(Stack(), fully_shard)
    group = model._get_fsdp_state()._fsdp_param_group
    with pytest.raises(AttributeError, match="use the module's set_requires_gradient_sync"):
        group.reduce_grads = False
    with pytest.raises(AttributeError, match="is read-only"):
        group.fsdp_params[0].sharded_param = None
    with pytest.raises(AttributeError, match=r"parameter inp\.weight: is not unsharded"):
        print(group.fsdp_params[0].unsharded_param)
    with pytest.raises(AttributeError, match="has no 'all_gather_outputs'"):
        print(group.fsdp_params[0].all_gather_outputs)
    with pytest.raises(RuntimeError, match="use register_fsdp_forward_method"):
        model._get_fsdp_state()._pre_forward(model, (), {})


@distributed(world=1)
def test_a_list_shares_one_state_and_a_state_keeps_no_model_alive(rank, world):
    model = shard_transformer(Transformer(), fully_shard)
    made = copy.deepcopy(model)
    for each in (model, made):
        state = fully_shard.state(each.norm)
        assert state is fully_shard.state(each.head)
        assert state._modules == (each.norm, each.head)
        next_token_loss(each, *token_batch(0, 0)).backward()
        assert state._fsdp_param_group._module_fqn == "norm, head"
        of_all = fully_shard.state(each)._state_ctx.all_states
        assert of_all == [fully_shard.state(m) for m in (each, *each.blocks, each.norm)]
        assert state._state_ctx.all_states == of_all
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model, each, state, of_all
        assert gone() is None
    finally:
        gc.enable()


# ---- torch's own functions, called on our modules


REGISTER = {"ours": composable_shard.register_fsdp_forward_method, "torch's": fsdp.register_fsdp_forward_method}


def half(model, x):
    """Set on a single model."""
    return 0.5 * model.encode(x)


WAYS = {
    "a method of the class": (lambda model: None, "encode"),
    "a bound function": (lambda model: setattr(model, "other", types.MethodType(half, model)), "other"),
    "a closure": (lambda model: setattr(model, "other", lambda x: torch.tanh(model.enc(x)).square()), "other"),
    "a partial": (lambda model: setattr(model, "other", functools.partial(half, model)), "other"),
    "one in place of the class's": (lambda model: setattr(model, "encode", lambda x: model.enc(x) * 3), "encode"),
    "a static method": (lambda model: None, "double"),
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("way", WAYS)
@distributed(world=2)
def test_any_callable_under_the_name_runs_as_a_forward(rank, world, way, register, times):
    torch.manual_seed(3)
    plain = Coder()
    prepare, name = WAYS[way]
    ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
    for model in (plain, ours, theirs):
        prepare(model)
    fully_shard(ours, reshard_after_forward=True)
    fsdp2(theirs, reshard_after_forward=True)
    for _ in range(times):
        REGISTER[register](ours, name)
    fsdp.register_fsdp_forward_method(theirs, name)
    for step in range(2):
        x = vectors(0, step)[0].requires_grad_()
        outputs = []
        for model in (plain, ours, theirs):
            model.zero_grad()
            outputs.append(getattr(model, name)(x))
            outputs[-1].square().mean().backward()
        assert torch.equal(outputs[0], outputs[1])
        for at, param in plain.named_parameters():
            mine, other = ours.get_parameter(at).grad, theirs.get_parameter(at).grad
            assert (mine is None) == (param.grad is None) == (other is None), at
            if mine is not None:
                torch.testing.assert_close(mine.full_tensor(), param.grad)
                torch.testing.assert_close(mine.to_local(), other.to_local())
    with torch.no_grad():
        getattr(ours, name)(x)
    assert_at_rest(ours)


@pytest.mark.parametrize("order", [("ours", "torch's"), ("torch's", "ours"), ("torch's", "torch's"), ("ours", "ours")])
@distributed(world=1)
def test_a_method_that_is_registered_twice_is_wrapped_once(rank, world, order):
    model = fully_shard(Coder())
    for which in order:
        REGISTER[which](model, "encode")
    model.encode(vectors(0, 0)[0])
    kind = type(vars(model)["encode"])
    assert kind.__name__ == "ForwardMethod"
    assert not isinstance(model.encode.__wrapped__, kind)
    assert model.encode.__wrapped__ is Coder.encode


@pytest.mark.parametrize("register", REGISTER)
@distributed(world=1)
def test_a_registered_method_may_fail_is_copied_and_does_not_keep_its_module_alive(rank, world, register):
    model = fully_shard(Coder(), reshard_after_forward=True)
    model.other = types.MethodType(half, model)
    for name in ("encode", "other"):
        REGISTER[register](model, name)
    made = copy.deepcopy(model)
    x = vectors(0, 0)[0]
    with pytest.raises(KeyError, match="as told"):
        model.encode(x, fail=True)
    assert_at_rest(model)
    with torch.no_grad():
        for param in made.parameters():
            param.zero_()
    assert not made.other(x).any()
    assert model.other(x).any()
    assert_at_rest(made)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@distributed(world=1)
def test_a_module_cannot_be_registered_as_a_method(rank, world):
    model = fully_shard(Coder())
    with pytest.raises(ValueError, match="does not have a method 'enc'"):
        composable_shard.register_fsdp_forward_method(model, "enc")


@distributed(world=2)
def test_torchs_share_comm_ctx_shares_streams(rank, world):
    torch.manual_seed(3)
    plains = [Stack() for _ in range(3)]
    models = [copy.deepcopy(plain) for plain in plains]
    for model in models:
        shard_blocks(model, fully_shard)
    fsdp.share_comm_ctx(models)
    for model, plain in zip(models, plains, strict=True):
        x = vectors(0, 0)[0]
        model(x).square().mean().backward()
        plain(x).square().mean().backward()
        for name, param in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)
    lanes = [model._own_state().bound.engine._actions._runtime for model in models]
    assert len({id(lane.gather_lane) for lane in lanes}) == len({id(lane.reduce_lane) for lane in lanes}) == 1
    contexts = {id(model._get_fsdp_state()._comm_ctx) for model in models}
    assert len(contexts) == 1


# ---- torch's names, patched by users


PATCHED = """
import sys, warnings
import torch, torch.nn as nn, torch.distributed as dist
warnings.simplefilter("error")
{first}
import composable_shard as cs
{second}
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method, FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
want = model(torch.ones(2, 4)).sum().item()
for layer in model:
    cs.fully_shard(layer)
cs.fully_shard(model)
assert isinstance(model, FSDPModule), type(model).__mro__
assert cs.fully_shard.state(model) is not None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(2, 4)).sum()
assert abs(loss.item() - want) < 1e-6
loss.backward()
optimizer.step()
assert model(torch.ones(2, 4)).sum().item() != want
import copy
copy.deepcopy(model)(torch.ones(2, 4))
{last}
dist.destroy_process_group()
print("trained")
"""

PATCHES = {
    "fully_shard": "torch.distributed.fsdp.fully_shard = cs.fully_shard",
    "fully_shard, of the composable package": "import torch.distributed._composable.fsdp as fsdp\n"
    "fsdp.fully_shard = torch.distributed.fsdp.fully_shard = cs.fully_shard",
    "all names": "for name in ('fully_shard', 'FSDPModule', 'register_fsdp_forward_method', 'share_comm_ctx',\n"
    "             'MixedPrecisionPolicy', 'OffloadPolicy', 'CPUOffloadPolicy'):\n"
    "    setattr(torch.distributed.fsdp, name, getattr(cs, name))\n"
    "torch.distributed.fsdp._fully_shard.fully_shard = cs.fully_shard",
    "a function without __wrapped__": "torch.distributed.fsdp.fully_shard = lambda *a, **kw: cs.fully_shard(*a, **kw)",
    "nothing at all": "del torch.distributed.fsdp.fully_shard; torch.distributed.fsdp.fully_shard = None",
}
FIRST = {"a function of the user's": "import torch.distributed.fsdp\ntorch.distributed.fsdp.fully_shard = print"}


@pytest.mark.parametrize(
    "patch", ["all names", *map(more, [name for name in (*PATCHES, *FIRST) if name != "all names"])]
)
def test_torchs_names_may_be_patched(patch):
    source = PATCHED.format(first=FIRST.get(patch, ""), second=PATCHES.get(patch, ""), last="")
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("trained\n")


# ---- lists


@pytest.mark.parametrize("async_op", [False, True])
@distributed(world=2)
def test_a_module_of_a_list_can_be_unsharded_before_the_root_has_run(rank, world, async_op):
    torch.manual_seed(3)
    plain = Stack()
    models = {name: copy.deepcopy(plain) for name in ENGINES}
    for name, model in models.items():
        ENGINES[name]([model.inp, model.head])
        ENGINES[name](model)
        handle = model.head.unshard(async_op=async_op)
        if async_op:
            handle.wait()
        assert torch.equal(model.inp.weight, plain.inp.weight)
        assert torch.equal(model.head.weight, plain.head.weight)
    for step in range(2):
        for model in (*models.values(), plain):
            model.zero_grad()
            model(vectors(0, step)[0]).square().mean().backward()
        for name, param in plain.named_parameters():
            mine, theirs = (model.get_parameter(name).grad for model in models.values())
            torch.testing.assert_close(mine.full_tensor(), param.grad)
            torch.testing.assert_close(mine.to_local(), theirs.to_local())
    assert_at_rest(models["ours"])


@distributed(world=1)
def test_an_unsharded_module_of_a_list_cannot_be_the_root(rank, world):
    for engine in ENGINES.values():
        model = Stack()
        engine([model.inp, model.head])
        model.inp.unshard()
        with pytest.raises(RuntimeError, match="requires a single root module"):
            model.inp(vectors(0, 0)[0])


@distributed(world=2)
def test_dir_lists_the_attributes_of_a_facade(rank, world):
    model = composable_shard.fully_shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    for view in (model._get_fsdp_state(), model._get_fsdp_state()._fsdp_param_group):
        assert set(type(view)._names) <= set(dir(view))
        assert type(view)._names
