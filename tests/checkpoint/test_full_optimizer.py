"""Full optimizer states have torch's format, and load bit for bit, even into an optimizer that never stepped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _engines import named_mesh
from _models import Stack, shard_blocks
from _pool import distributed
from checkpoint._nets import assert_equal, assert_same, batch, build, full, shard, step
from composable_shard.checkpoint._full import tensors
from composable_shard.errors import CheckpointMismatchError

_STATE = ("step", "exp_avg", "exp_avg_sq")
FULL = StateDictOptions(full_state_dict=True)


def adamw(model, **options):
    """Two param groups, without the frozen norm."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": params[:3], "lr": 0.03}, {"params": params[3:], "weight_decay": 0.2}]
    return torch.optim.AdamW(groups, lr=0.01, **options)


def trained(engine="ours", rank=0, seed=0, optimizer=adamw, **options):
    model = shard(build(seed), engine, **options)
    made = optimizer(model)
    for at in range(2):
        step(model, made, rank, at)
    return model, made


def groups(state):
    """The param groups of a state, with lists instead of tuples, as torch makes them."""
    return [{k: list(v) if isinstance(v, tuple) else v for k, v in group.items()} for group in state["param_groups"]]


def assert_same_state(state, expected):
    assert groups(state) == groups(expected)
    assert list(state["state"]) == list(expected["state"])
    for name, values in expected["state"].items():
        assert list(state["state"][name]) == list(values)
        for key, value in values.items():
            assert_same(state["state"][name][key], value, f"{key} of {name}")


@pytest.mark.parametrize("engine", ["ours", "fsdp2"])
@distributed(world=2)
def test_the_state_equals_torchs_and_each_library_loads_the_others(rank, world, engine):
    model, optimizer = trained(engine, rank)
    expected = get_optimizer_state_dict(model, optimizer, options=FULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "CPU_LIMIT", 512)
        state = cs.checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert state["state"].keys() == expected["state"].keys()
    assert groups(state) == groups(expected)
    for name, values in expected["state"].items():
        assert_equal(state["state"][name], values)
    alone = cs.checkpoint.full_optimizer_state_dict(model, optimizer)
    if rank == 0:
        assert_same_state(alone, state)
    else:
        assert alone == {}
    after = []
    for load in (
        lambda other, its: set_optimizer_state_dict(other, its, copy.deepcopy(state), options=FULL),
        lambda other, its: cs.checkpoint.load_full_optimizer_state_dict(other, its, expected),
    ):
        other = shard(build(), engine)
        its = adamw(other)
        cs.checkpoint.load_full_state_dict(other, cs.checkpoint.full_state_dict(model, rank0_only=False))
        load(other, its)
        assert_same_state(cs.checkpoint.full_optimizer_state_dict(other, its, rank0_only=False), state)
        step(other, its, rank, 5)
        after.append(cs.checkpoint.full_state_dict(other, rank0_only=False))
    step(model, optimizer, rank, 5)
    for state in after:
        assert_equal(state, cs.checkpoint.full_state_dict(model, rank0_only=False))


@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world=2)
def test_state_of_any_dtype_is_bitwise_identical_in_an_optimizer_that_never_stepped(rank, world, broadcast):
    model, optimizer = trained(rank=rank)
    for param, values in optimizer.state.items():
        values["exp_avg"] = values["exp_avg"].bfloat16()
        values["exp_avg_sq"] = values["exp_avg_sq"].double()
        values["note"] = {"steps": [1, 2]}
        values["rows"] = torch.arange(3, dtype=torch.int32)
        if isinstance(param, DTensor):
            values["rows"] = DTensor.from_local(values["rows"], param.device_mesh)  # replicated
            values["whole"] = param.new_zeros(5)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
    state = cs.checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert state["state"]["scale"]["exp_avg"].dtype == torch.bfloat16

    other = shard(build(1))
    its = adamw(other)
    its.param_groups[0]["lr"] = 7.0
    given = state if rank == 0 or not broadcast else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "CPU_LIMIT", 512)
        cs.checkpoint.load_full_optimizer_state_dict(other, its, given, broadcast_from_rank0=broadcast)
    assert_same_state(cs.checkpoint.full_optimizer_state_dict(other, its, rank0_only=False), state)
    for (param, values), (twin, theirs) in zip(optimizer.state.items(), its.state.items(), strict=True):
        assert type(param) is type(twin)
        assert type(theirs["exp_avg"]) is type(values["exp_avg"])
        if isinstance(param, DTensor):
            assert theirs["exp_avg"].placements == twin.placements
            assert theirs["whole"].placements == values["whole"].placements
            assert torch.equal(theirs["exp_avg"].to_local(), values["exp_avg"].to_local())
    assert its.param_groups[0]["lr"] is not state["param_groups"][0]["lr"]
    assert its.param_groups[1]["weight_decay"] == 0.2
    theirs["rows"].add_(1)
    assert state["state"]["scale"]["rows"].tolist() == [0, 1, 2], "the argument's memory is not shared"


@distributed(world=2)
def test_state_of_an_optimizer_without_state_clears_the_state(rank, world):
    model = shard(build())
    fresh = adamw(model)
    state = cs.checkpoint.full_optimizer_state_dict(model, fresh, rank0_only=False)
    assert state["state"] == {}
    step(model, fresh, rank)
    cs.checkpoint.load_full_optimizer_state_dict(model, fresh, state)
    assert not fresh.state


@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world=2)
def test_state_of_no_parameter_is_kept_under_its_name(rank, world, broadcast):
    model, optimizer = trained(rank=rank)
    optimizer.state["global"] = {"d": 0.5, "sums": torch.tensor([1.0, 2.0])}
    state = cs.checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert state["own_state"]["global"]["sums"].tolist() == [1.0, 2.0]
    optimizer.state["global"]["sums"].add_(1)
    optimizer.state["other"] = 1
    cs.checkpoint.load_full_optimizer_state_dict(model, optimizer, state if rank == 0 or not broadcast else None,
                                      broadcast_from_rank0=broadcast)  # fmt: skip
    assert optimizer.state["global"]["sums"].tolist() == [1.0, 2.0]
    assert optimizer.state["global"]["d"] == 0.5
    assert "other" not in optimizer.state
    del state["own_state"]
    cs.checkpoint.load_full_optimizer_state_dict(model, optimizer, state)
    assert "global" in optimizer.state
    optimizer.state["global"]["sums"] = model.embed.weight.detach()
    with pytest.raises(cs.errors.CheckpointError, match="state 'global' of the optimizer: has DTensors"):
        cs.checkpoint.full_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world=2)
def test_a_failed_check_changes_nothing_and_all_ranks_raise_the_reason(rank, world, broadcast):
    model, optimizer = trained(rank=rank)
    before = cs.checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)

    def load(change, said):
        state = copy.deepcopy(before)
        if rank == 0:
            change(state)
        with pytest.raises(CheckpointMismatchError, match=said):
            cs.checkpoint.load_full_optimizer_state_dict(model, optimizer, state, broadcast_from_rank0=broadcast)

    def rename(state):
        groups = state["param_groups"]
        groups[0]["params"][0] = "stranger"
        state["state"]["stranger"] = state["state"].pop("scale")

    load(rename, r"(?s)on rank 0: nothing was changed.*missing: scale.*unexpected: stranger")
    load(lambda state: state["param_groups"][0]["params"].append(state["param_groups"][1]["params"].pop()),
         r"group 1 of the optimizer: has parameters of saved groups \[0, 1\]")  # fmt: skip
    load(lambda state: state["state"]["scale"].update(exp_avg=model.embed.weight), "'exp_avg' of scale: is a DTensor")
    load(dict.clear, "has no 'state' and 'param_groups'")
    assert_same_state(cs.checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False), before)
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(cs.errors.CheckpointError, match=r"parameter 0 of group 0, \(3,\), is not in the model"):
        cs.checkpoint.full_optimizer_state_dict(model, foreign)


@distributed(world=2)
def test_the_state_can_be_gathered_while_parameters_are_unsharded(rank, world):
    model, optimizer = trained(rank=rank, reshard_after_forward=False)
    expected = cs.checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    model(batch(rank, 0))
    assert_same_state(cs.checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False), expected)


@pytest.mark.matrix
@distributed(world=4)
def test_factored_state_works_with_replicas_and_tensor_parallelism(rank, world):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = named_mesh((2, 2), ("dp", "tp"))
    for kind, own in (("replicas", mesh), ("parallel", mesh["dp"])):
        pairs = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = Stack(dim=6, hidden=8)
            for block in model.blocks if kind == "parallel" else ():
                parallelize_module(block.up, mesh["tp"], ColwiseParallel())
            shard_blocks(model, cs.fully_shard, mesh=own)
            pairs.append((model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
        (model, optimizer), (other, its) = pairs
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        state = cs.checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
        cs.checkpoint.load_full_optimizer_state_dict(
            other, its, state if rank == 0 else None, broadcast_from_rank0=True
        )
        assert_same_state(cs.checkpoint.full_optimizer_state_dict(other, its, rank0_only=False), state)
        for param in other.parameters():
            assert its.state[param]["momentum_buffer"].placements == param.placements


# ---- torch's own functions


@pytest.mark.parametrize("offload", [False, True])
@distributed(world=2)
def test_torchs_state_dict_functions_return_the_same_as_for_fsdp2(rank, world, offload):
    taken = {}
    whole = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    sharded = StateDictOptions(cpu_offload=offload)
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for engine in ("ours", "fsdp2"):
        model, optimizer = trained(engine, rank)
        model(batch(rank, 0))
        got = [
            (get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options))
            for options in (whole, sharded)
        ]
        other = shard(build(1), engine)
        its = adamw(other)
        set_model_state_dict(other, dict(got[0][0]) if rank == 0 else {}, options=sent)  # it changes its argument
        given = copy.deepcopy(got[0][1]) if rank == 0 else {}
        if not offload:
            set_optimizer_state_dict(other, its, given, options=sent)
        got.append((get_model_state_dict(other), get_optimizer_state_dict(other, its)))
        taken[engine] = got
    for (model, optimizer), (theirs, its) in zip(taken["ours"], taken["fsdp2"], strict=True):
        assert list(model) == list(theirs)
        assert [type(v) for v in model.values()] == [type(v) for v in theirs.values()]
        for name in sorted({*model} - {"_extra_state"}):  # equal except for the rounding of reductions
            torch.testing.assert_close(full(model[name]), full(theirs[name]))
        assert optimizer.keys() == its.keys()
        for name in sorted(its.get("state", ())):
            one, two = ({n: full(state["state"][name][n]) for n in _STATE} for state in (optimizer, its))
            torch.testing.assert_close(one, two)
