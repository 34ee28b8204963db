"""A group's two phase tables: methods make all listed transitions and no others."""

from __future__ import annotations

import contextlib
import itertools
import re
import weakref

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from _engines import fully_shard
from _models import Stack, shard_blocks, vectors
from _pool import distributed
from composable_shard._group.gradients import GroupGradients
from composable_shard._group.phases import GRAD_TRANSITIONS, PARAM_TRANSITIONS, GradPhase, ParamPhase
from composable_shard.errors import PhaseError


def make_group(world, frozen=()):
    """Make the group of a Linear; at world size 4, two ranks keep it between forward and backward."""
    module = nn.Linear(4, 3)
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    model = nn.Sequential(nn.Linear(4, 4), module)
    fully_shard(module, reshard_after_forward=2 if world == 4 else None)
    fully_shard(model)
    with torch.no_grad():
        model(torch.ones(1, 4))
    # the module is returned too, because only it keeps the parameters' entries alive
    return module, module._shard_state.bound.group


def gradients(group):
    return [torch.ones(p.shape) if p.sharded.requires_grad else None for p in group.params]


PARAM_STEPS = {
    "start_gather": lambda group: group.start_gather(None),
    "finish_gather": lambda group: group.finish_gather(),
    "reshard": lambda group: group.reshard(),
    "shrink": lambda group: group.shrink(),
}
TO_REACH = {  # steps that take a new group to a phase
    ParamPhase.SHARDED: [],
    ParamPhase.GATHERING: ["start_gather"],
    ParamPhase.UNSHARDED: ["start_gather", "finish_gather"],
    ParamPhase.RESIDENT: ["start_gather", "finish_gather", "shrink"],
}
LEADS_TO = {
    "start_gather": ParamPhase.GATHERING,
    "finish_gather": ParamPhase.UNSHARDED,
    "reshard": ParamPhase.SHARDED,
    "shrink": ParamPhase.RESIDENT,
}


def group_in(phase, world):
    module, group = make_group(world)
    for step in TO_REACH[phase]:
        PARAM_STEPS[step](group)
    assert group.phase is phase
    return module, group


def finish(group):
    """Finish gathers in flight and reshard."""
    if group.phase is ParamPhase.GATHERING:
        group.finish_gather()
    if group.phase is not ParamPhase.SHARDED:
        group.reshard()


# ---- parameters


@pytest.mark.parametrize("step", PARAM_STEPS)
@pytest.mark.parametrize("phase", list(ParamPhase))
@distributed(world=4)
def test_a_method_follows_the_transition_table_or_raises(rank, world, phase, step):
    _module, group = group_in(phase, world)
    new = LEADS_TO[step]
    if new in PARAM_TRANSITIONS[phase]:
        PARAM_STEPS[step](group)
        assert group.phase is new
    else:
        with pytest.raises(PhaseError, match=f"group 1: cannot go from {phase.value} to {new.value}"):
            PARAM_STEPS[step](group)
        assert group.phase is phase
    finish(group)


@pytest.mark.parametrize(
    ("phase", "step"),
    [
        (ParamPhase.UNSHARDED, "start_gather"),
        (ParamPhase.SHARDED, "finish_gather"),
        (ParamPhase.SHARDED, "reshard"),
        (ParamPhase.GATHERING, "reshard"),
        (ParamPhase.UNSHARDED, "finish_gather"),
        (ParamPhase.SHARDED, "shrink"),
        (ParamPhase.GATHERING, "shrink"),
        (ParamPhase.RESIDENT, "finish_gather"),
        (ParamPhase.RESIDENT, "shrink"),
    ],
)
@distributed(world=4)
def test_a_refused_transition_changes_nothing(rank, world, phase, step):
    _module, group = group_in(phase, world)
    before = group.places, repr(group._runtime.pool)
    with pytest.raises(PhaseError):
        PARAM_STEPS[step](group)
    assert (group.places, repr(group._runtime.pool)) == before
    finish(group)


@distributed(world=4)
def test_methods_make_every_listed_transition_of_parameters(rank, world):
    taken = set()
    _module, group = make_group(world)
    unshard, again = ["start_gather", "finish_gather"], ["shrink", "start_gather", "finish_gather"]
    for step in [*unshard, "reshard", *unshard, *again, "shrink", "reshard"]:
        before = group.phase
        PARAM_STEPS[step](group)
        taken.add((before, group.phase))
    assert taken == {(old, new) for old, news in PARAM_TRANSITIONS.items() for new in news}


def test_the_tables_have_a_row_for_every_phase():
    assert set(PARAM_TRANSITIONS) == set(ParamPhase)
    assert set(GRAD_TRANSITIONS) == set(GradPhase)


@distributed(world=1)
def test_an_error_names_the_root(rank, world):
    model = Stack(1)
    shard_blocks(model, fully_shard)
    with torch.no_grad():
        model(*vectors(0, 0))
    with pytest.raises(PhaseError, match=re.escape("group (root): cannot go from sharded to unsharded")):
        model._shard_state.bound.group.finish_gather()


# ---- gradients


@contextlib.contextmanager
def watched_grads():
    """Record all transitions of gradients, as pairs of phases."""
    taken, real = set(), GroupGradients._set_phase

    def watch(gradients, new):
        before = gradients.phase
        real(gradients, new)
        taken.add((before, new))

    GroupGradients._set_phase = watch
    try:
        yield taken
    finally:
        GroupGradients._set_phase = real


@distributed(world=(1, 2))
def test_methods_make_every_listed_transition_of_gradients(rank, world):
    _module, group = make_group(world)
    with watched_grads() as taken:
        group.gradients.accumulate(gradients(group))  # none -> accumulated
        group.gradients.accumulate(gradients(group))  # accumulated -> accumulated
        first = group.gradients.start_reduce(group.gradients.take(gradients(group)))  # accumulated -> reducing
        group.gradients.accumulate(gradients(group))  # reducing -> accumulated
        group.gradients.finish_reduce(first)
        again = group.gradients.start_reduce(group.gradients.take(gradients(group)))
        group.gradients.finish_reduce(again)  # reducing -> none
        reductions = [group.gradients.start_reduce(gradients(group)) for _ in range(2)]  # none -> reducing -> reducing
        for reduction in reductions:
            group.gradients.finish_reduce(reduction)
        group.gradients.accumulate(gradients(group))
        group.gradients.forget()  # accumulated -> none
    assert taken == {(old, new) for old, news in GRAD_TRANSITIONS.items() for new in news}
    assert group.gradients.phase is GradPhase.NONE


@distributed(world=1)
def test_accumulated_gradients_can_be_taken_while_an_earlier_reduction_is_in_flight(rank, world):
    """This happens if a third reduction in a backward waits for the first, and both are of the same group."""
    _module, group = make_group(world)
    first = group.gradients.start_reduce(gradients(group))
    group.gradients.accumulate(gradients(group))
    total = group.gradients.take(gradients(group))
    group.gradients.finish_reduce(first)
    group.gradients.finish_reduce(group.gradients.start_reduce(total))


@pytest.mark.parametrize(
    ("old", "new"),
    [pair for pair in itertools.product(GradPhase, repeat=2) if pair[1] not in GRAD_TRANSITIONS[pair[0]]],
)
@distributed(world=1)
def test_an_unlisted_transition_of_gradients_raises(rank, world, old, new):
    _module, group = make_group(world)
    group.gradients.phase = old
    with pytest.raises(PhaseError, match=f"group 1: cannot go from {old.value} to {new.value}"):
        group.gradients._set_phase(new)
    assert group.gradients.phase is old


@distributed(world=(1, 2))
def test_a_reduction_returns_this_ranks_pieces_of_the_mean_and_sets_no_grad(rank, world):
    _module, group = make_group(world)
    own = [torch.full(p.shape, float(rank + 1)) for p in group.params]
    pieces = group.gradients.finish_reduce(group.gradients.start_reduce(own)).pieces()
    mean = sum(range(1, world + 1)) / world
    for index, param in enumerate(group.params):
        assert torch.equal(pieces[index], torch.full_like(param.local, mean))
        assert param.sharded.grad is None


@distributed(world=2)
def test_a_gradient_that_is_missing_on_one_rank_counts_as_zeros(rank, world):
    _module, group = make_group(world)
    own = [torch.full(group.params[0].shape, 2.0), None if rank == 0 else torch.full(group.params[1].shape, 2.0)]
    pieces = group.gradients.finish_reduce(group.gradients.start_reduce(own)).pieces()
    for index, mean in enumerate((2.0, 1.0)):
        assert torch.equal(pieces[index], torch.full_like(group.params[index].local, mean))


@distributed(world=2)
def test_a_gradient_that_is_missing_on_all_ranks_has_no_piece(rank, world):
    _module, group = make_group(world)
    pieces = group.gradients.finish_reduce(
        group.gradients.start_reduce([torch.ones(group.params[0].shape), None])
    ).pieces()
    assert list(pieces) == [0]


@distributed(world=2)
def test_frozen_members_are_gathered_and_not_reduced(rank, world):
    _module, group = make_group(world, frozen=["bias"])
    assert [p.fqn for p in group.params] == ["1.weight", "1.bias"]
    reduction = group.gradients.start_reduce(gradients(group))
    assert [bucket.indices for bucket, _ in reduction.jobs] == [[0]]
    assert list(group.gradients.finish_reduce(reduction).pieces()) == [0]
    group.start_gather(None)
    group.finish_gather()
    assert len(group.weights()) == 2
    group.reshard()


# ---- accumulated gradients


@distributed(world=(1, 2))
def test_the_first_accumulated_gradient_is_not_written_to(rank, world):
    _module, group = make_group(world)
    first = gradients(group)
    group.gradients.accumulate(first)
    group.gradients.accumulate(gradients(group))
    group.gradients.accumulate(gradients(group))
    assert all(bool((gradient == 1).all()) for gradient in first)
    total = group.gradients.take(gradients(group))
    assert all(bool((gradient == 4).all()) for gradient in total)
    group.gradients.finish_reduce(group.gradients.start_reduce(total))


@pytest.mark.parametrize("how", ["none", "zero", "foreach zero", "replaced"])
@distributed(world=(1, 2))
def test_accumulated_gradients_are_dropped_when_grad_is_cleared(rank, world, how):
    module, group = make_group(world)
    group.gradients.accumulate(gradients(group))
    assert not group.gradients.held_now().is_voided
    for param in module.parameters():
        assert isinstance(param.grad, DTensor)
        if how == "none":
            param.grad = None
        elif how == "zero":
            param.grad.zero_()
        elif how == "foreach zero":
            torch._foreach_zero_([param.grad])
        else:
            param.grad = torch.zeros_like(param)
    # Versions show all changes but those by foreach functions. `take` reads the marks.
    assert group.gradients.held_now().is_voided == (how != "foreach zero")
    total = group.gradients.take(gradients(group))
    assert all(bool((gradient == 1).all()) for gradient in total)


@distributed(world=(1, 2))
def test_accumulated_gradients_survive_other_changes_of_grad(rank, world):
    module, group = make_group(world)
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    group.gradients.accumulate(gradients(group))
    for param in module.parameters():
        param.grad.mul_(0.5)
    total = group.gradients.take([None] * len(group.params))
    assert all(bool((gradient == 1).all()) for gradient in total)


# ---- facts


@distributed(world=(1, 2))
def test_unsharded_parameters_are_full_and_leaves_have_the_requires_grad_of_their_shards(rank, world):
    torch.manual_seed(5)
    module = nn.Linear(4, 3)
    plain = {n: p.detach().clone() for n, p in module.named_parameters()}
    module.bias.requires_grad_(False)
    fully_shard(module)
    module.unshard()
    group = module._shard_state.bound.group
    for param, weight, leaf in zip(group.params, group.weights(), group.leaves(), strict=True):
        assert torch.equal(weight, plain[param.fqn])
        assert leaf.data_ptr() == weight.data_ptr()
        assert leaf.is_leaf
        assert leaf.requires_grad is (param.fqn == "weight")
    assert group.leaves() == group.leaves()
    module.reshard()


@distributed(world=(1, 2))
def test_a_changed_shard_makes_unsharded_parameters_stale_until_the_next_gather(rank, world):
    module = nn.Linear(4, 3)
    fully_shard(module, reshard_after_forward=False)
    shard = module.weight
    module.unshard()
    group = module._shard_state.bound.group
    for _ in range(2):
        module.unshard()
        assert not group.is_stale()
        with torch.no_grad():
            shard.add_(1)
        assert group.is_stale()
        module.reshard()


@distributed(world=2)
def test_the_repr_of_a_group_has_its_name_and_phase(rank, world):
    _module, group = make_group(world)
    assert repr(group) == "ParamGroup(1, 2 parameters, sharded)"


@distributed(world=2)
def test_packed_gradients_are_freed_before_their_reduction_is_done(rank, world):
    _, group = make_group(world)
    given = gradients(group)
    seen = [weakref.ref(gradient) for gradient in given]
    reduction = group.gradients.start_reduce(given)
    del given
    assert [ref() for ref in seen] == [None, None]
    pieces = group.gradients.finish_reduce(reduction).pieces()
    assert all(torch.equal(piece, torch.ones(piece.shape)) for piece in pieces.values())
