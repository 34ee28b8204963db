"""Arguments in all forms that users and libraries pass. They have the same meaning as with torch's FSDP2."""

from __future__ import annotations

import copy
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, fully_shard
from _models import shard_blocks
from _pool import distributed, simulated
from _sides import assert_same
from _stepping import assert_at_rest
from composable_shard._policies import as_bool, as_offload


def transformer():
    torch.manual_seed(3)
    return Transformer(dim=8, heads=2, kv_heads=1, hidden=12, dropout=0.0)


def trained(engine, rank, shard, change=None, loss_of=next_token_loss):
    """A model after two steps with the gradients of the last one, and the loss of an evaluation."""
    model = transformer()
    shard(model, ENGINES[engine])
    if change is not None:
        change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, *token_batch(rank, step)).backward()
        optimizer.step()
    with torch.no_grad():
        loss = loss_of(model, *token_batch(rank, 2))
    for module in (model, *model.blocks):
        module.reshard()  # FSDP2 leaves parameters that stay unsharded after a forward in the modules
    return model, loss


def check_alike(rank, shard, change=None, fsdp2=True):
    ours, loss = trained("ours", rank, shard, change)
    if fsdp2:
        theirs, other = trained("fsdp2", rank, shard, change)
        assert torch.allclose(loss, other), (loss, other)
        assert_same(ours, theirs)
    return ours


def shard_with(**options):
    return lambda model, engine: shard_blocks(model, engine, **options)


# ---- fully_shard


FORMS = {"offload_policy": [None, False, 0, np.False_, OffloadPolicy(), CPUOffload(), CPUOffload(offload_params=False)]}
FORMS |= {"reshard_after_forward": [None, True, False, 2], "mesh": [None], "shard_placement_fn": [None]}
FORMS |= {
    "mp_policy": [MixedPrecisionPolicy(cast_forward_inputs=1), MixedPrecisionPolicy(cast_forward_inputs=np.True_)]
}
OURS_ALONE = {
    "reshard_after_forward": [np.True_, np.bool_(False), np.int64(2), torch.tensor(True)],
    "mp_policy": [None],
}


def calls(forms):
    """Sets of arguments in which every form occurs at least once."""
    return [
        {name: values[index % len(values)] for name, values in forms.items()}
        for index in range(max(map(len, forms.values())))
    ]


@distributed(world=2)
def test_every_form_of_an_argument_trains_like_fsdp2(rank, world):
    theirs, _ = trained("fsdp2", rank, shard_with())
    for forms in (FORMS, OURS_ALONE):
        for options in calls(forms):
            ours = check_alike(rank, shard_with(**options), fsdp2=forms is FORMS)
            assert_same(ours, theirs)
            assert_at_rest(ours)
            assert not ours.blocks[0]._own_state().declaration.info.offloads


IGNORED = {
    "set": set,
    "list": list,
    "tuple": tuple,
    "frozenset": frozenset,
    "dict": dict.fromkeys,
    "keys": lambda params: dict.fromkeys(params).keys(),
    "generator": lambda params: (param for param in params),
    "list of modules": nn.ParameterList,
}


@distributed(world=2)
def test_ignored_parameters_may_be_in_any_iterable(rank, world):
    def shard(model, engine, kind=set):
        norms = [param for name, param in model.named_parameters() if "norm" in name]
        for block in model.blocks:
            engine(block, ignored_params=kind(norms))
        engine(model, ignored_params=kind(norms))

    theirs, _ = trained("fsdp2", rank, shard)
    for name, kind in IGNORED.items():
        ours, _ = trained("ours", rank, lambda model, engine, kind=kind: shard(model, engine, kind))
        for (key, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert type(mine) is type(other), f"{name}: {key}"
            local = [p.to_local() if "norm" not in key else p for p in (mine, other)]
            torch.testing.assert_close(*local, msg=lambda m, at=f"{name}: {key}": f"{at}: {m}")
        model = transformer()
        norms = [param for key, param in model.named_parameters() if "norm" in key]
        cs.shard_auto(model, ignored_params=kind(norms))
        assert [key for key, p in model.named_parameters() if not hasattr(p, "placements")] == [
            key for key, _ in model.named_parameters() if "norm" in key
        ]


@distributed(world=2)
def test_modules_that_share_a_group_may_be_a_tuple(rank, world):
    def shard(model, engine, kind=tuple):
        engine(kind([model.blocks[0], model.blocks[1]]), offload_policy=None)
        engine(model)

    ours = check_alike(rank, lambda model, engine: shard(model, engine, list if engine is ENGINES["fsdp2"] else tuple))
    assert ours.blocks[0]._shard_state is ours.blocks[1]._shard_state


MODULES = {
    "values of a dict": lambda blocks: dict(enumerate(blocks)).values(),
    "keys of a dict": lambda blocks: dict.fromkeys(blocks).keys(),
    "set of one": lambda blocks: {blocks[0]},
}


@pytest.mark.parametrize("kind", MODULES)
@distributed(world=2)
def test_modules_may_be_in_any_container_with_an_order(rank, world, kind):
    def shard(model, engine):
        first, *others = model.blocks
        engine(MODULES[kind]([first] if "one" in kind else model.blocks))
        for block in others if "one" in kind else ():
            engine(block)
        engine(model)

    check_alike(rank, shard)


@distributed(world=2)
def test_none_and_buffers_among_ignored_parameters_are_skipped(rank, world):
    def shard(model, engine):
        model.register_buffer("scale", torch.ones(2))
        norms = {param for name, param in model.named_parameters() if "norm" in name}
        for module in (*model.blocks, model):
            engine(module, ignored_params=norms | {None} | set(model.buffers()))

    ours, _ = trained("ours", rank, shard)
    theirs, _ = trained("fsdp2", rank, shard)
    for (key, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert type(mine) is type(other), key
        assert hasattr(mine, "placements") == ("norm" not in key)


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
@distributed(world=2)
def test_python_float_means_float64_like_fsdp2(rank, world, name):
    ours = check_alike(rank, shard_with(mp_policy=MixedPrecisionPolicy(**{"param_dtype": float, name: float})))
    assert getattr(ours._own_state().declaration.settings.current.mp_policy, name) is torch.float64


def test_a_set_of_several_modules_is_refused():
    with cs.testing.fake(2), pytest.raises(ValueError, match="a set does not have the same order"):
        fully_shard({nn.Linear(4, 4), nn.Linear(4, 4)})


@simulated(world=1)
def test_fsdp1s_cpu_offload_offloads(rank, world):
    assert as_offload(CPUOffload(offload_params=True)) == CPUOffloadPolicy()
    assert as_offload(CPUOffloadPolicy(pin_memory=np.False_)).pin_memory is False
    model = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffload(offload_params=True))
    model(torch.ones(2, 4)).sum().backward()


WRONG = [
    ("offload_policy", True, TypeError, "pass CPUOffloadPolicy"),
    ("offload_policy", "cpu", TypeError, "pass CPUOffloadPolicy"),
    ("offload_policy", CPUOffload(offload_params="false"), TypeError, "offload_params"),
    ("offload_policy", CPUOffloadPolicy(pin_memory="no"), TypeError, "pin_memory"),
    ("mp_policy", MixedPrecision(param_dtype=torch.bfloat16), TypeError, "MixedPrecisionPolicy"),
    ("mp_policy", MixedPrecisionPolicy(cast_forward_inputs="false"), ValueError, "cast_forward_inputs"),
    ("mp_policy", MixedPrecisionPolicy(param_dtype="bfloat16"), TypeError, "param_dtype: expected .* str"),
    ("mp_policy", MixedPrecisionPolicy(param_dtype=np.float32), TypeError, "param_dtype: expected .*float32"),
    ("mp_policy", MixedPrecisionPolicy(param_dtype=False), TypeError, "param_dtype: expected .* bool"),
    ("mp_policy", MixedPrecisionPolicy(reduce_dtype="float32"), TypeError, "reduce_dtype: expected .* str"),
    ("mp_policy", MixedPrecisionPolicy(output_dtype="float32"), TypeError, "output_dtype: expected .* str"),
    ("reshard_after_forward", "false", ValueError, "reshard_after_forward"),
    ("reshard_after_forward", 1.5, ValueError, "reshard_after_forward"),
    ("reshard_after_forward", [True], ValueError, "reshard_after_forward"),
    ("reshard_after_forward", torch.tensor([True, False]), ValueError, "reshard_after_forward"),
    ("ignored_params", ["weight"], TypeError, "ignored_params.* str"),
    ("ignored_params", {"weight": nn.Parameter(torch.ones(2))}, TypeError, "ignored_params.* str"),
    ("ignored_params", nn.Parameter(torch.ones(2)), TypeError, "ignored_params"),
    ("ignored_params", 3, TypeError, "ignored_params"),
    ("shard_placement_fn", True, TypeError, "shard_placement_fn"),
]


@pytest.mark.parametrize(("name", "value", "kind", "words"), WRONG)
def test_ambiguous_arguments_are_errors(name, value, kind, words):
    with cs.testing.fake(2), pytest.raises(kind, match=words) as caught:
        fully_shard(nn.Linear(4, 4), **{name: value})
    assert isinstance(caught.value, cs.errors.ShardConfigError)


# ---- setters


TRUE = [True, 1, 2, 1.0, np.True_, np.int64(1), np.array([True]), torch.tensor(True), torch.tensor([1])]
FALSE = [False, 0, 0.0, None, np.False_, np.int32(0), torch.tensor(False)]
SETTERS = ["set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward"]
SETTERS += ["set_reshard_after_backward", "set_unshard_in_backward", "set_force_sum_reduction_for_comms"]
SETTERS += ["set_reduce_scatter_unused_params"]


def settings(model):
    return [vars(state.declaration.settings.current) for state in cs._module.state.states_below(model)]


@simulated(world=2)
def test_setters_accept_the_same_truth_values_as_fsdp2(rank, world):
    ours, theirs = transformer(), transformer()
    shard_blocks(ours, ENGINES["ours"])
    shard_blocks(theirs, ENGINES["fsdp2"])
    for name in [*SETTERS, "set_keep_unsharded_storage", "set_manual_backward_finalization"]:
        for wanted, values in ((True, TRUE), (False, FALSE)):
            getattr(ours, name)(wanted)
            expected = settings(ours)
            for value in values:
                getattr(ours, name)(not wanted)
                getattr(ours, name)(value)
                assert settings(ours) == expected, f"{name}({value!r})"
                assert not ours._own_state()._for_root or set(map(type, ours._own_state()._for_root.values())) == {bool}
                if hasattr(theirs, name):
                    getattr(theirs, name)(value)
        default = getattr(cs._policies.Options(), name.removeprefix("set_"), None)
        getattr(ours, name)(name == "set_is_last_backward" or default is True)
    for recurse in (True, 1, np.True_, False, 0, None):
        ours.set_requires_gradient_sync(True)
        ours.set_requires_gradient_sync(0, recurse=recurse)
        assert ours.blocks[0]._own_state().declaration.settings.current.requires_gradient_sync is not bool(recurse)


@distributed(world=2)
def test_accumulation_with_numbers_as_bools_trains_like_fsdp2(rank, world):
    def accumulated(model, *batch):
        for micro in range(2):
            last = micro % 2  # a number, not a bool
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(torch.tensor(last))
            model.set_reshard_after_backward(np.bool_(last), recurse=1)
            loss = next_token_loss(model, *batch)
            if not last and torch.is_grad_enabled():
                loss.backward()
        return loss

    (ours, loss), (theirs, other) = (trained(each, rank, shard_with(), loss_of=accumulated) for each in ENGINES)
    assert torch.allclose(loss, other)
    assert_same(ours, theirs)


@simulated(world=2)
def test_setters_accept_numbers_and_iterables_in_all_forms(rank, world):
    model = transformer()
    shard_blocks(model, fully_shard)
    own = model._own_state()
    for factor in (2, np.float32(2), np.int64(2), torch.tensor(2.0), Fraction(2)):
        model.set_gradient_divide_factor(None)
        assert own.declaration.settings.current.divide_factor is None
        model.set_gradient_divide_factor(factor)
        assert own.declaration.settings.current.divide_factor == 2.0
    model.set_gradient_divide_factor(None)
    model.set_reduce_scatter_max_input_buffers(np.int64(3))
    assert own.declaration.settings.current.max_reductions == 3
    for value in (np.True_, torch.tensor(True)):
        model.set_reshard_after_forward(False)
        model.set_reshard_after_forward(value)
        assert own.declaration.settings.current.reshard_after_forward is True
    first, second = model.blocks[:2]
    for make in (list, tuple, iter, lambda each: dict.fromkeys(each).keys(), nn.ModuleList):
        for backward, name in enumerate(("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")):
            for modules in ([second], [], [first, second]):
                getattr(model, name)(make(modules))
                assert own.prefetched(bool(backward)) == [each._own_state() for each in modules]
    assert model.unshard(async_op=0) is None
    model.reshard()
    model.unshard(async_op=np.True_).wait()
    model.reshard()
    for enable in (1, None, np.False_):
        model.set_allocate_memory_from_process_group_for_comm(enable)
    model.set_all_reduce_hook(None)
    next_token_loss(model, *token_batch(rank, 0)).backward()


MISUSED = [
    *[(name, value, ValueError) for name in SETTERS for value in ("false", [], [False], torch.ones(2), {})],
    ("set_reshard_after_forward", "false", ValueError),
    ("set_reshard_after_forward", 1, ValueError),
    ("set_gradient_divide_factor", "2", ValueError),
    ("set_gradient_divide_factor", torch.ones(2), ValueError),
    ("set_gradient_divide_factor", float("nan"), ValueError),
    ("set_modules_to_forward_prefetch", None, TypeError),
    ("set_all_reduce_hook", "mean", TypeError),
    ("set_allocate_memory_from_process_group_for_comm", "false", ValueError),
    ("unshard", "false", ValueError),
]


def test_setters_refuse_ambiguous_values():
    with cs.testing.fake(2):
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
        before = copy.copy(settings(model))
        for name, value, kind in MISUSED:
            with pytest.raises(kind) as caught:
                getattr(model, name)(value)
            assert isinstance(caught.value, cs.errors.ShardConfigError), name
        for name in ("set_requires_gradient_sync", "set_reshard_after_backward"):
            with pytest.raises(ValueError, match="recurse should be a bool"):
                getattr(model, name)(True, recurse="false")
        for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
            with pytest.raises(TypeError, match=r"pass \[module\]"):  # iterating over a Sequential gives its children
                getattr(model, name)(model)
        assert settings(model) == before


def test_the_error_for_an_invalid_bool_names_the_argument():
    with pytest.raises(ValueError, match=r"flag should be a bool, got <class 'str'>: 'false'; pass True or False"):
        as_bool("flag", "false")
